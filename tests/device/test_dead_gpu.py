"""If a GPU refuses every launch, or is missing, the first error is raised and the buffer is closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emulated_gpu import EmulatedGpu
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.engine import cuda
from moe_rt.engine.cuda import CudaEngine
from moe_rt.errors import (
    Code,
    GroupClosed,
    GroupPoisoned,
    InvalidConfig,
    InvalidInput,
    LaunchFailed,
    MoeRtError,
    Op,
    TooManyTokens,
)
from moe_rt.memory.segments import Segments

pytestmark = pytest.mark.emulated("lets the GPU die")
SPEC = make_spec(1)


def inputs() -> list[Any]:
    made = make_inputs(SPEC, [12], seed=1, kind="topk")
    return [each[0] for each in (made.xs, made.topk_idx, made.topk_weights)]


class DyingGpu(EmulatedGpu):
    """The driver refuses every launch once `dead` is set."""

    dead = False

    def kernels(self, source: str, defines: Any, **how: Any) -> Any:
        kernels = super().kernels(source, defines, **how)
        launch = kernels.launch

        def refuse(launches: Any, **how: Any) -> None:
            if self.dead:
                name = launches[0][0]
                raise LaunchFailed(f"{name}: got CUDA_ERROR_ILLEGAL_ADDRESS from the CUDA driver, expected success")
            launch(launches, **how)

        kernels.launch = refuse  # type: ignore[method-assign]
        return kernels


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda buffer, mine: buffer.dispatch(*mine), LaunchFailed),
        (lambda buffer, mine: buffer.dispatch(mine[0][:, 1:], *mine[1:]), InvalidInput),
        (lambda buffer, mine: {}["weight"], KeyError),
    ],
    ids=["an op", "a refusal", "the caller's own"],
)
def test_a_dead_gpu_hides_no_error(act: Callable[[Buffer, Any], None], kind: type[Exception]) -> None:
    """The first error is raised and the buffer is closed, although poisoning the peers also fails."""
    gpu = DyingGpu()
    buffer = Buffer(ThreadGroup.make(1, gpu)[0], **buffer_kwargs(SPEC))
    segments = buffer._engine._segments
    gpu.dead = True
    with pytest.raises(kind) as raised, buffer:
        act(buffer, inputs())
    assert type(raised.value) is kind
    assert "abort_group" not in str(raised.value)
    assert buffer.closed
    assert segments.addresses == [], "its memory is given back"


@pytest.mark.parametrize("part", ["a whole op", "first half", "second half"])
def test_a_launch_that_failed_ends_the_group(part: str) -> None:
    gpu = DyingGpu()
    with Buffer(ThreadGroup.make(1, gpu)[0], **buffer_kwargs(SPEC)) as buffer:
        begun = buffer.dispatch(*inputs(), wait=False) if part == "second half" else None
        gpu.dead = True
        with pytest.raises(LaunchFailed):
            buffer.dispatch(*inputs(), wait=part != "first half") if begun is None else begun.wait()
        gpu.dead = False
        with pytest.raises(GroupPoisoned, match="CUDA_ERROR_ILLEGAL_ADDRESS") as raised:
            buffer.dispatch(*inputs())
    assert isinstance(raised.value.__cause__, LaunchFailed)


def stub(refuses: bool = False) -> tuple[Any, list[Any]]:
    """Return an engine of two channels whose launches are only noted, with other calls, in a list."""
    noted: list[Any] = []
    engine: Any = object.__new__(CudaEngine)
    of_channels = [(f"table {channel}", f"record {channel}") for channel in range(2)]
    memory = {name: torch.zeros(1) for name in (*of_channels[0], *of_channels[1], "segment", "network")}
    names = {t.data_ptr(): name for name, t in memory.items()}

    def launch(launches: Any, stream: int) -> None:
        if refuses:
            raise RuntimeError("the driver is gone")
        noted.append(launches[0][0])

    engine._launcher, *others = (
        SimpleNamespace(
            set_call=lambda args, tag: None, launch=launch, reported=lambda: None,
            memory=[memory[table]], record=memory[record],
        )
        for table, record in of_channels
    )  # fmt: skip
    engine._gpu = SimpleNamespace(stream=lambda: 3, outlive_stream=lambda t: noted.append(names[t.data_ptr()]))
    engine._segments = Segments([1], [], [memory["segment"]], on_release=lambda: noted.append("released"))
    engine._network = Segments([1], [], [memory["network"]], on_release=lambda: noted.append("released"))
    engine._others, engine._lock, engine._pid, engine.rank = others, threading.Lock(), os.getpid(), 1
    engine._ended, engine._closed, engine.timeout_s = None, False, 1.0
    return engine, noted


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the codes that peers get."""
    sent: list[int] = []
    monkeypatch.setattr(cuda._engine, "EndArgs", lambda code: sent.append(int(code)))
    return sent


def test_a_close_tells_peers_first_and_keeps_what_queued_kernels_use(codes: list[int]) -> None:
    engine, noted = stub()
    for _ in range(2):
        engine.close()
        kept = ["table 0", "record 0", "table 1", "record 1", "segment", "network"]
        assert noted == ["leave", "leave", *kept, "released", "released"]
    engine.poison(ValueError("late"))
    assert codes == [0, 0], "a closed buffer ends no group"
    with pytest.raises(GroupClosed, match="was closed on this rank"):
        engine.health()


def test_a_close_without_a_driver_gives_memory_back(codes: list[int]) -> None:
    engine, noted = stub(refuses=True)
    engine.close()
    assert noted == ["released", "released"]
    assert engine._closed


def test_a_child_of_a_fork_neither_closes_nor_uses_the_buffer(codes: list[int]) -> None:
    engine, noted = stub()
    engine._pid += 1
    engine.close()
    assert noted == []
    with pytest.raises(GroupClosed, match="use after fork"):
        engine.health()


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(
    ("error", "code"),
    [(TooManyTokens("got 9"), Code.TOO_MANY_TOKENS), (InvalidInput("got 7"), Code.INVALID_INPUT)],
    ids=["tokens", "input"],
)
def test_the_first_cause_ends_the_group(codes: list[int], error: MoeRtError, code: Code, refuses: bool) -> None:
    engine, noted = stub(refuses)
    with pytest.raises(type(error)) as raised:
        engine._refuse(Op.DISPATCH, 0, error, 0, 0)
    assert raised.value is error
    sent = [code] if refuses else [code, code]
    assert codes == sent
    cause = ValueError("later")
    engine.poison(cause)
    assert codes == sent, "peers get it once in each channel"
    with pytest.raises(GroupPoisoned, match=str(error.args[0])) as ended:
        engine.health()
    assert (ended.value.rank, ended.value.__cause__) == (1, error)
    with pytest.raises(GroupPoisoned):  # of this rank, not that it refuses once more
        engine._refuse(Op.DISPATCH, 0, InvalidInput("another"), 0, 0)
    assert noted == ([] if refuses else ["abort_group"] * 2)


def test_an_abort_tells_its_reason(codes: list[int]) -> None:
    engine, _ = stub()
    reason = ValueError("bad batch")
    engine.poison(reason)
    assert codes == [Code.POISONED] * 2
    assert engine._ended.__cause__ is reason


@pytest.mark.parametrize("channel", [0, 1])
def test_a_failure_in_any_channel_is_raised(monkeypatch: pytest.MonkeyPatch, channel: int) -> None:
    engine, _ = stub()
    engine.health()
    launchers = [engine._launcher, *engine._others]
    launchers[channel].reported = lambda: "a failure"
    monkeypatch.setattr(cuda, "error_from_status", lambda status, *_: InvalidInput(status))
    with pytest.raises(InvalidInput, match="a failure"):
        engine.health()


# The rest of torch's message depends on its build.
NO_GPU = "expected a CUDA device that torch can use; torch "


def test_no_gpu_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InvalidConfig, match=NO_GPU):
        Buffer(ThreadGroup.make(1, "cuda")[0], **buffer_kwargs(make_spec(1)))
    with pytest.raises(InvalidConfig, match=NO_GPU):
        Buffer(ThreadGroup.make(1)[0], heap="loopback", **buffer_kwargs(make_spec(1)))


def test_no_window_is_known_once_an_op_was_captured() -> None:
    """A replay takes windows that the host does not count."""
    engine: Any = object.__new__(CudaEngine)
    windows = SimpleNamespace(next=lambda op: 1, take=lambda op: None)
    engine._launcher = SimpleNamespace(channel=3, windows=windows)
    engine._others, engine._windows, engine._captured = (), None, False
    found = []
    for capturing in (False, True, False, False):
        engine._gpu = SimpleNamespace(is_capturing=lambda capturing=capturing: capturing)
        found.append(engine._next_window())
        engine._has_announced(Op.DISPATCH)
    assert found == [2 * 3 + 1, None, None, None]
