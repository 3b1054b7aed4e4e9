"""Run steps one after another within one time budget, and assemble the document of the run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch

from moe_rt.errors import InvalidConfig
from moe_rt.info import machine_card
from moe_rt.lab.check.steps import STEPS, Check, Step

BUDGET_S, LEAST_S = 470.0, 10.0
_INSTEAD = "without a GPU the kernels can be compiled: moe-rt gpucheck --compile-only --arch sm_90a"
_OF_CUDA_13 = ("nvidia-cuda-nvrtc", "nvidia-nvshmem-cu13", "nvshmem4py-cu13")
_OF_CUDA_12 = ("nvidia-cuda-nvrtc-cu12", "nvidia-nvshmem-cu12", "nvshmem4py-cu12")
_PACKAGES = ("cuda-bindings", *_OF_CUDA_13, *_OF_CUDA_12, "triton", "vllm")
_QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"

Perform = Callable[[Step, Check], dict[str, Any]]


def run_steps(
    names: Sequence[str],
    device: Any,
    quick: bool,
    perform: Perform,
    tell: Callable[[str], None] = lambda text: None,
    *,
    patience: float = 1,
    skipped: Mapping[str, str] = MappingProxyType({}),
    nproc: int = 1,
) -> list[dict[str, Any]]:
    """Return the records of the steps, in the order of STEPS. No step gets more time than is left of the whole run's.

    Args:
        patience: factor on the time of a step and of the run.
        skipped: steps that cannot run here, and why.
        nproc: see Check.
    """
    records = []
    deadline = time.monotonic() + patience * BUDGET_S
    for step in STEPS.values():
        if step.name not in names:
            continue
        tell(f"{step.name}: {step.title}")
        begin, seconds = time.monotonic(), min(patience * step.seconds, deadline - time.monotonic())
        check = Check(device, quick, seconds, nproc=nproc)
        if step.name in skipped:
            check.details.append(skipped[step.name])
            record = check.record(step.name, "skipped", 0.0)
        elif seconds < LEAST_S:
            check.failures.append(f"no time left of the {BUDGET_S:.0f} s for all steps; run it alone with --only")
            record = check.record(step.name, "failed", 0.0)
        else:
            record = perform(step, check)
        record["seconds"] = round(time.monotonic() - begin, 3)
        records.append(record)
    return records


def document(records: list[dict[str, Any]], gpu: dict[str, Any], *, emulated: bool = False) -> dict[str, Any]:
    """Document printed as the last line of the output. `emulated` records that no GPU was used."""
    machine = {**gpu, **machine_card(), **_versions()}
    ok = all(record["result"] != "failed" for record in records)
    return {
        "ok": ok,
        "emulated": emulated,
        "command": " ".join(["moe-rt", *sys.argv[1:]]),
        "machine": machine,
        "steps": records,
    }


def gpu_card(device: str, nproc: int = 1) -> dict[str, Any]:
    """Properties of the GPU.

    Raises:
        InvalidConfig: torch cannot use the device, or any, or finds fewer than nproc.
    """
    from moe_rt.engine.gpu.driver import Gpu, why_there_is_none

    count = torch.cuda.device_count()
    if torch.version.cuda is None:
        raise InvalidConfig(f"torch: got {torch.__version__}, a build without CUDA, expected one with it; {_INSTEAD}")
    if why := why_there_is_none():  # includes a driver that is too old, whose GPUs are still counted
        raise InvalidConfig(f"device: got {device}, but torch can use no GPU here{why}; {_INSTEAD}")
    if device not in ("cuda", *(f"cuda:{index}" for index in range(count))):
        raise InvalidConfig(f"device: got {device}, expected cuda:0 to cuda:{count - 1}")
    if nproc > count:
        raise InvalidConfig(
            f"--nproc: got {nproc}, but torch finds {count} GPUs here; CUDA_VISIBLE_DEVICES may hide some"
        )
    gpu = Gpu(device)
    properties = torch.cuda.get_device_properties(gpu.device)
    card = {"gpu": gpu.name, "arch": gpu.arch, "sms": gpu.num_sms, "gpu_gib": round(properties.total_memory / 2**30, 1)}
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", f"--id=GPU-{gpu.uuid}"]
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
        card.update(zip(_QUERY.split(","), told.split(", "), strict=False))
    return card


def _versions() -> dict[str, str]:
    found = {"cuda_of_torch": str(torch.version.cuda)}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
