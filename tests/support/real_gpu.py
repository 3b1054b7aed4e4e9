"""Puts a real GPU in place of the emulated one, for `pytest --gpu tests/conformance tests/device`.

Tests keep their tensors on the CPU. Around each op, operands are copied to the GPU, with the memory that they share,
and outputs are copied back when the rank's stream is done. So no rank has work queued that waits for a peer while it
copies: such a copy would hold up the peer's copies. Launches without a wait of the host between them are in
`moe-rt gpucheck --only chains`.

`--gpu-rehearsal=emulated` runs these tests, with the copies, on the emulated GPU. `--gpu-rehearsal=sm_90a` also
compiles their kernels for such a GPU into MOE_RT_CACHE, so that a machine with one need not.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import support.emulated_gpu
import support.ranks
import torch
from support.emulated_gpu import EmulatedGpu
from torch import Tensor

from moe_rt.engine.cuda import CudaEngine
from moe_rt.engine.gpu import driver
from moe_rt.engine.gpu.driver import Gpu, Kernels, Launches
from moe_rt.engine.gpu.jit import compile_kernels
from moe_rt.group.thread_ranks import ENVIRONMENT
from moe_rt.lab.testing.rounds import read

_EMULATED, _HANG_S = "emulated", 100.0
_FIRST = "test_conformance.py"  # its kernels are compiled ahead (tools/first_gpu/prepare.sh)
_OPS = ("dispatch", "combine", "dispatch_backward", "combine_backward", "combine_tokens_backward")
_left_out: Counter[str] = Counter()


class RealGpu(Gpu):
    """Takes the arguments of EmulatedGpu. Lanes of a block and sizes are those of compiled kernels."""

    def __init__(
        self, num_sms: int | None = None, threads: int = 0, constants: bool = True, bulk_bytes: int = 0
    ) -> None:
        super().__init__("cuda")
        self.num_sms = min(num_sms or self.num_sms, self.num_sms)
        self.bulk_bytes = min(bulk_bytes, self.bulk_bytes)
        self.launched: list[str] = []
        self.outlived: list[int] = []

    def kernels(self, *what: Any, **how: Any) -> Kernels:
        return _Noted(super().kernels(*what, **how), self.launched)

    def outlive_stream(self, memory: Tensor) -> None:
        self.outlived.append(memory.data_ptr())
        super().outlive_stream(memory)


class _Noted:
    """Kernels that append the names of their launches to a list."""

    def __init__(self, kernels: Kernels, launched: list[str]) -> None:
        self._kernels, self._launched = kernels, launched

    def launch(self, launches: Launches, **how: Any) -> None:
        self._launched += [name for name, _ in launches]
        self._kernels.launch(launches, **how)


class CompilingGpu(EmulatedGpu):
    """An emulated GPU whose kernels are also compiled for another architecture."""

    compiles_for = ""

    def kernels(self, source: str, defines: Mapping[str, str | int], **how: Any) -> Any:
        compile_kernels(source, self.compiles_for, defines, library=how.get("library"))
        return super().kernels(source, defines, **how)


class _Copies:
    """Copies of an op's operands on the engine's device. Operands that share memory share its copy.

    Args:
        always: copy operands that are there already, too.
    """

    def __init__(self, engine: CudaEngine, always: bool) -> None:
        self._engine, self._always = engine, always
        self._made: dict[tuple[int, int], Tensor] = {}
        self.used = False

    def are_needed(self, t: Any) -> bool:
        windows = self._engine._windows
        if not isinstance(t, Tensor) or (windows is not None and windows.touch(t)):
            return False
        return self._always or t.device != self._engine.device

    def of(self, t: Any) -> Any:
        if not self.are_needed(t):
            return t
        self.used, where = True, self._engine.device
        if t.layout is not torch.strided or t.is_neg():
            return t.to(where)
        memory = t.untyped_storage()
        key = memory.data_ptr(), memory.nbytes()
        if key not in self._made:
            self._made[key] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(memory).to(where, copy=True)
        there = self._made[key].untyped_storage()
        return torch.empty(0, dtype=t.dtype, device=where).set_(there, t.storage_offset(), t.shape, t.stride())


def _home(outputs: Any) -> Any:
    return tuple(map(read, outputs)) if isinstance(outputs, tuple) else read(outputs)


@contextmanager
def copied_operands(always: bool = False) -> Any:
    """Let the ops of GPU ranks take operands on the CPU, and return outputs there."""

    def around_op(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(engine: CudaEngine, *given: Any, **named: Any) -> Any:
            copies = _Copies(engine, always)
            there, named_there = [copies.of(t) for t in given], {name: copies.of(t) for name, t in named.items()}
            made = method(engine, *there, **named_there)
            if not copies.used or named.get("start") is not None:  # a first half has no outputs yet
                return made
            for own, written in zip((*given, *named.values()), (*there, *named_there.values()), strict=True):
                if written is made:
                    return own.copy_(read(made))
            return _home(made)

        return call

    def around_second_half(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(engine: CudaEngine, begun: Any) -> None:
            method(engine, begun)
            if any(map(_Copies(engine, always).are_needed, begun.given)):
                begun.outputs = _home(begun.outputs)

        return call

    def around_refusals(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(engine: CudaEngine, op: Any, tag: int, max_tokens: Any = None, **tensors: Any) -> None:
            method(engine, op, tag, max_tokens, **{name: _Copies(engine, always).of(t) for name, t in tensors.items()})

        return call

    around = dict.fromkeys(_OPS, around_op)
    around |= {"_run_second": around_second_half, "require_call": around_refusals}
    with pytest.MonkeyPatch.context() as patch:
        for name, wrap in around.items():
            patch.setattr(CudaEngine, name, wrap(getattr(CudaEngine, name)))
        yield


def put_in_place(config: pytest.Config) -> None:
    """Replace the emulated GPU for the whole run, as --gpu says.

    Raises:
        UsageError: torch can use no GPU.
    """
    which = config.getoption("gpu")
    if which is None:
        return
    if which == "cuda":
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        if why := driver.why_there_is_none():
            raise pytest.UsageError(
                f"--gpu: got no GPU that torch can use{why}; --gpu-rehearsal=emulated runs the tests without one"
            )
        support.ranks.CASE_TIMEOUT_S = _HANG_S  # a machine with a GPU is at hand for minutes
        support.emulated_gpu.EmulatedGpu = RealGpu  # type: ignore[assignment,misc]
    elif which != _EMULATED:
        CompilingGpu.compiles_for = which
        support.emulated_gpu.EmulatedGpu = CompilingGpu  # type: ignore[misc]
    copying = copied_operands(always=which != "cuda")
    copying.__enter__()
    config.add_cleanup(lambda: copying.__exit__(None, None, None))


def is_in_place() -> bool:
    """True if ranks on a GPU are on a real one."""
    return support.emulated_gpu.EmulatedGpu is RealGpu  # type: ignore[comparison-overlap]


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have no rank on a GPU, or need an emulated one, and count them by reason."""
    if config.getoption("gpu") is None:
        return
    reasons = {item: why_not(item) for item in items}
    left_out = [item for item in items if reasons[item]]
    _left_out.update(reasons[item] for item in left_out)
    items[:] = [item for item in items if not reasons[item]]
    items.sort(key=lambda item: item.path.name != _FIRST)
    config.hook.pytest_deselected(items=left_out)


def why_not(item: pytest.Item) -> str:
    """Return why a test does not run on a real GPU, or ""."""
    marker = item.get_closest_marker("emulated")
    if marker is not None:
        return str(marker.args[0])
    parameters = getattr(item, "callspec", None)
    heap = parameters.params.get("heap") if parameters is not None else None
    if heap is None and "EmulatedGpu" in vars(getattr(item, "module", None) or object()):
        return ""
    return "" if heap == "loopback" else "has no rank on a GPU"


def summary() -> list[str]:
    """Return a line for each reason for which tests were left out."""
    return [f"--gpu left out {number}: {why}" for why, number in sorted(_left_out.items())]
