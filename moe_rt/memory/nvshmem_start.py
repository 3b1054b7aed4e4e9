"""Preconditions of NVSHMEM: the package, settings that it reads once, and a GPU for each rank."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from moe_rt.errors import InvalidConfig
from moe_rt.extras import cuda_extra, how_to_install
from moe_rt.group.all_or_none import all_or_none
from moe_rt.group.rendezvous import Rendezvous

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MPS = "nvidia-cuda-mps-control"


def load(device: torch.device) -> tuple[Any, Any]:
    """Import nvshmem.core, and return it with the cuda.core Device. Ranks without a GPU need neither."""
    if device.type != "cuda":
        raise InvalidConfig(f'heap "nvshmem": got memory on {device}, expected a CUDA device')
    try:
        import nvshmem.core as core
        from cuda.core import Device

        core.get_version()  # loads the library, without which init_status() fails instead of saying "no"
        return core, Device(torch.cuda.current_device() if device.index is None else device.index)
    except Exception as error:  # each of them loads libraries that may be missing
        expected = f"NVSHMEM's package, a CUDA driver and {device}; {how_to_install(cuda_extra())}"
        message = f'heap "nvshmem": got {type(error).__name__}: {error}; expected {expected}'
        raise InvalidConfig(message) from error


def host() -> str:
    """Return an id of the host that is equal in all its containers, whatever their names."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def disable_multicast() -> None:
    """Disable multicast, unless the user has set it: its setup may fail, and nothing here uses it."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")


def enable_gpu_networking(hosts: list[str]) -> None:
    """Let GPUs drive the network card directly if ranks are on several hosts, unless the user has set this.

    Otherwise a CPU thread forwards whatever a kernel sends. Within a host the direct path is unused, and its start may
    fail for lack of rights to the card.
    """
    if len(set(hosts)) > 1:
        os.environ.setdefault("NVSHMEM_IB_ENABLE_IBGDA", "1")


def require_own_gpus(rendezvous: Rendezvous, gpus: list[tuple[str, str]], timeout_s: float) -> None:
    """Refuse ranks that share a GPU, or an instance of one, without MPS. Collective if some do.

    Args:
        gpus: the host and the UUID of each rank's GPU, by rank; identical on every rank.

    Raises:
        InvalidConfig: on every rank, naming the ranks and the GPU.
    """
    sharing = {gpu: [r for r, other in enumerate(gpus) if other == gpu] for gpu in gpus if gpus.count(gpu) > 1}
    if not sharing:
        return
    records = all_or_none(rendezvous, lambda: {"mps": mps_is_running()}, "look for MPS", timeout_s)
    for (_, uuid), ranks in sharing.items():
        if not all(records[r]["mps"] for r in ranks):
            expected = 'a GPU each: call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before making a buffer'
            raise InvalidConfig(
                f"group: got ranks {ranks} on one GPU, {uuid}, expected {expected}; only under MPS may they share one",
                rank=rendezvous.rank,
            )


def mps_is_running() -> bool:
    """True if the control daemon of CUDA's multi-process service (MPS) answers."""
    if shutil.which(_MPS) is None:
        return False
    try:
        asked = subprocess.run([_MPS], input="get_server_list\n", capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0 and "cannot" not in (asked.stdout + asked.stderr).lower()
