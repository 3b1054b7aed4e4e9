"""CUDA graphs of a device whose tensors are the CPU's: the driver records launches, and torch's ops run again.

A replay calls each op again in capture order and writes its results to the addresses of the first call. Values follow
changed inputs and addresses stay, as on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

OWN = "moe_rt"  # ops that launch kernels; their launches are captured


class Graph:
    """Stand-in for torch.cuda.CUDAGraph."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._thread = 0
        self.calls: list[Callable[[], None]] = []
        self.kept: list[Any] = []  # memory that a replay reads and writes

    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self._thread, self._gpu.recording = threading.get_ident(), self
        try:
            with _Ops(self):
                yield
        finally:
            self._gpu.recording = None

    def launch(self, launch: Callable[[], None]) -> None:
        """Record one launch with its arguments."""
        with self._gpu.graph() as replay:
            launch()
        self.calls.append(replay)

    def replay(self) -> None:
        for call in self.calls:
            call()

    def reset(self) -> None:
        self.calls.clear()
        self.kept.clear()


class _Ops(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = func(*args, **kwargs)
        self._graph.kept.append((args, kwargs, first))
        if func.namespace == OWN or _leaves_memory(func) or func.is_view:
            return first
        written = [t for t in tree_flatten(first)[0] if isinstance(t, Tensor)]

        def again() -> None:
            fresh = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, Tensor)]
            for old, new in zip(written, fresh, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._graph.calls.append(lambda: _undisturbed(again))
        return first


def _leaves_memory(func: Any) -> bool:
    """True for ops such as empty(), which do not write the memory they return."""
    return str(func.name()).startswith("aten::empty") or str(func.name()).startswith("aten::new_empty")


def _undisturbed(call: Callable[[], None]) -> None:
    with torch.no_grad():
        call()


class RecordedKernels:
    """Kernels whose launches a capture of this thread records."""

    def __init__(self, gpu: Any, kernels: Any) -> None:
        self._gpu, self._kernels = gpu, kernels

    def launch(self, launches: Any, **how: Any) -> None:
        recording = self._gpu.recording
        if recording is None or not recording.is_of_this_thread():
            self._kernels.launch(launches, **how)
            return
        recording.launch(lambda: self._kernels.launch(launches, **how))
