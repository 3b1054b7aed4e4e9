"""The stand-in device of `moe-rt gpucheck --emulated`: PtxGpu, torch.cuda with a host's clock, small sizes.

Each step has a dedicated process, which all this changes permanently.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from gpucheck.fake_cuda_timing import SmallFlush, TimedKernels, stand_in
from ptx import captured_graphs
from ptx.gpu import PtxGpu
from ptx.modules import ARCH

from moe_rt.config.codec import Codec
from moe_rt.lab.check import compiling, correctness, graphs, layers, loads, measuring, pairs, scale, timing, training
from moe_rt.lab.check.compiling import Variant

# Steps that measure waits: their waits expire in the host's time.
IN_REAL_TIME = ("errors",)
# Steps in which torch's compiler checks for streams and events, and must find torch's classes.
COMPILES = ("layer",)
ONLY_COMPILES, PROCESSES = "compile", "processes"
SMALL_LAYER = layers.LayerSizes(64, 32, 8, 2, 16)


def small_load(ranks: int, tokens: int = 16, **how: Any) -> measuring.Load:
    return measuring.Load(min(ranks, 2), min(tokens, 16), hidden=64, topk=2, experts=8, **how)


# Module -> reduced sizes, so that a step takes seconds although a lane is a few hundred thousand times slower.
SMALLER: dict[Any, dict[str, Any]] = {
    compiling: {"VARIANTS": (), "NEEDED": (Variant("kernels.cu", "Bf16", 20, 3, Codec.FP8),)},
    correctness: {"QUICK_PAIRS": 20, "CHECK_EVERY": 5},
    graphs: {"QUICK_REPLAYS": 3},
    layers: {
        "check": functools.partial(layers.check, sizes=SMALL_LAYER),
        "LayerSizes": lambda: SMALL_LAYER,
        "WARM_UP": 1,
    },
    training: {"LayerSizes": lambda: SMALL_LAYER},
    scale: {"HIDDEN": 64, "TOPK": 2, "EXPERTS": 8, "MANY": 60},
    measuring: {"_COPIED_BYTES": 1 << 16},
    pairs: {"Load": small_load, "WARM_UP": 1, "PAIRS_IN_GRAPH": 2, "REPLAYS": 2, "OPS_IN_A_ROW": 3, "LOOPS": 1},
    timing: {"Load": small_load, "QUICK_RUNS": 2, "BLOCKS": (8,), "SIDE": 32, "OVERLAP_WARM_UP": 1},
    loads: {"HIDDEN": 64, "TOPK": 2, "EXPERTS": 8, "QUICK_RUNS": 2, "WARM_UP": 1},
}


class Rehearsal(PtxGpu):
    """Remembers when launches began and ended, and records captured launches."""

    def __init__(self, *, real_time: bool) -> None:
        super().__init__(real_time=real_time)
        self.events: list[Any] = []
        self.recording: captured_graphs.Graph | None = None  # of the thread that holds the capture lock

    def is_capturing(self) -> bool:
        return (self.recording is not None and self.recording.is_of_this_thread()) or super().is_capturing()

    def kernels(self, *what: Any, **how: Any) -> Any:
        return captured_graphs.RecordedKernels(self, TimedKernels(super().kernels(*what, **how), self.events))


class _ForGood:
    """The interface of pytest's monkeypatch, without undo: the process ends with the step."""

    setattr = staticmethod(setattr)


def prepare(step: str) -> Any:
    """Return the device for a step."""
    for module, values in SMALLER.items():
        for name, value in values.items():
            assert hasattr(module, name), f"{module.__name__} has no {name}"
            setattr(module, name, value)
    if step == PROCESSES:  # its ranks are CPU ranks over shared memory
        return "cpu"
    if step == ONLY_COMPILES:  # loads nothing: the compiler does not work with the stand-in for the driver
        return SimpleNamespace(device=torch.device("cpu"), arch=ARCH)
    gpu = Rehearsal(real_time=step in IN_REAL_TIME)
    if step in COMPILES:
        return gpu
    stand_in(_ForGood, gpu)
    measuring.Flush = SmallFlush  # type: ignore[assignment,misc]
    torch.cuda.CUDAGraph = functools.partial(captured_graphs.Graph, gpu)  # type: ignore[assignment,misc]
    torch.cuda.graph = _graph  # type: ignore[assignment,misc]
    torch.cuda.set_sync_debug_mode = lambda mode: None  # guards calls of CUDA's runtime, and none is made here
    torch.cuda.empty_cache = lambda: None
    return gpu


@contextlib.contextmanager
def _graph(graph: captured_graphs.Graph, **how: Any) -> Iterator[None]:
    with graph.capture():
        yield
