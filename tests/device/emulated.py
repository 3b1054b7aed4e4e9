"""A stand-in for a GPU whose kernels run on host threads: the CUDA engine, launches and all, on CPU tensors."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-ffp-contract=off", "-pthread"]


_WIRES = {"kRaw": 0, "kFp8": 1, "kInt8": 2}
_compiling = threading.Lock()


def library() -> ctypes.CDLL:
    """The emulation; ranks that are threads ask for it at once."""
    with _compiling:
        return _library()


@functools.cache
def _library() -> ctypes.CDLL:
    """The emulation, compiled once per user and state of the sources."""
    sources = [
        p for part in ("cuda", "tests/device") for p in sorted((ROOT / part).rglob("*")) if p.suffix in (".h", ".cpp")
    ]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"moe_rt_emulation_{os.getuid()}" / f"{digest}.so"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        source = str(Path(__file__).with_name("emulation.cpp"))
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *FLAGS, "-shared", "-fPIC", source, "-o", str(partial)], check=True)
        partial.replace(path)
    return ctypes.CDLL(str(path))


class EmulatedGpu:
    """Has what moe_rt.native.gpu.Gpu has. Launches run at once, in the calling thread's time.

    Args:
        num_sms: blocks that may wait at once.
        threads: lanes of a block, whatever the engine asks for.
    """

    name, arch, uuid = "emulated", "none", "none"

    def __init__(self, num_sms: int = 24, threads: int = 3) -> None:
        self.device = torch.device("cpu")
        self.num_sms, self.threads = num_sms, threads
        self.launched: list[str] = []
        self.networks: dict[int, ctypes.Array[Any]] = {}  # a rank's own segment -> where the network finds everyone's

    def zeros(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, values: Tensor) -> Tensor:
        return values.clone()

    def host_bytes(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        pass

    def stream(self) -> int:
        return threading.get_ident()

    def is_capturing(self) -> bool:
        return False

    def outlive_stream(self, memory: Tensor) -> None:
        pass

    def kernels(self, source: str, defines: Mapping[str, str | int], *, nvshmem: bool = False) -> EmulatedKernels:
        return EmulatedKernels(self, defines, nvshmem)


class EmulatedKernels:
    _seeds = itertools.count(1)

    def __init__(self, gpu: EmulatedGpu, defines: Mapping[str, str | int], nvshmem: bool) -> None:
        self.gpu = gpu
        self.network = nvshmem
        self.elem = str(defines["MOE_RT_ELEM"]).encode()
        self.wires = [_WIRES[str(defines.get(f"MOE_RT_{op}_WIRE", "kRaw"))] for op in ("DISPATCH", "COMBINE")]
        self.hidden, self.num_topk = int(defines["MOE_RT_HIDDEN"]), int(defines["MOE_RT_TOPK"])

    def launch(
        self, name: str, *, blocks: int, threads: int, shared_bytes: int, stream: int, params: ctypes.Array[Any]
    ) -> None:
        self.gpu.launched.append(name)
        own = ctypes.cast(params[2], ctypes.POINTER(ctypes.c_uint64))[0]  # NetworkMemory.segment
        known = library().emulated_launch(
            name.encode(),
            self.elem,
            self.hidden,
            self.num_topk,
            *self.wires,
            blocks,
            self.gpu.threads,
            ctypes.c_int64(shared_bytes),
            params,
            self.gpu.networks[own] if self.network else None,
            next(self._seeds),
        )
        assert known, f"no kernel is called {name}"
