"""A CUDA rank on stand-ins of its GPU and launchers: order of its calls, memory it takes, and words of its refusals."""

from __future__ import annotations

import os
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.routing import make_spec

from moe_rt import _engine
from moe_rt.engine import cuda
from moe_rt.engine.cuda import CudaEngine
from moe_rt.engine.halves import Begun
from moe_rt.errors import (
    CompileError,
    ConcurrentUse,
    GroupClosed,
    GroupPoisoned,
    InvalidConfig,
    InvalidInput,
    LaunchFailed,
    Op,
)
from moe_rt.memory.segments import Segments

RANK = 1
DISPATCH: Any = SimpleNamespace(num_tokens=5)


def rank(noted: list[Any], *, channels: int = 2, capturing: bool = False, **changes: Any) -> Any:
    """Return an engine of rank 1 of two, whose calls of launchers and of its GPU are noted."""
    engine: Any = object.__new__(CudaEngine)
    engine.spec, engine.rank, engine.timeout_s, engine.device = make_spec(2, **changes), RANK, 1.0, torch.device("cpu")
    engine._launcher, *others = (launcher(noted, channel) for channel in range(channels))
    engine._gpu = SimpleNamespace(
        stream=lambda: 3, current=lambda: "stream 3", is_capturing=lambda: capturing,
        follow=lambda stream, tensors: noted.append(("follow", stream, tensors)),
    )  # fmt: skip
    engine._others, engine._lock, engine._pid = deque(others), threading.Lock(), os.getpid()
    engine._segments, engine._network, engine._windows = Segments([1, 2], [], []), None, None
    engine._ended, engine._closed, engine._captured = None, False, False
    return engine


def launcher(noted: list[Any], channel: int) -> Any:
    def note(name: str) -> Any:
        return lambda *given: noted.append((channel, name, *given))

    return SimpleNamespace(
        channel=channel, max_blocks=40, num_clients=0, whole=False, memory=[], record=torch.zeros(1),
        set_call=note("set"), launch=note("launch"), launch_half=note("launch half"), reported=lambda: None,
        windows=SimpleNamespace(take=note("take"), next=lambda op: 0),
    )  # fmt: skip


SEND, RECEIVE = ("dispatch_send", 6), ("dispatch_receive", 24)


def test_an_op_is_launched_in_its_channel_and_the_next_one_in_the_next() -> None:
    noted: list[Any] = []
    engine = rank(noted)
    for tag in (7, 8, 9):
        engine._run(Op.DISPATCH, DISPATCH, tag)
    assert noted == [
        call
        for channel, tag in ((0, 7), (1, 8), (0, 9))
        for call in (
            (channel, "set", DISPATCH, tag),
            (channel, "launch", [SEND, RECEIVE], 3),
            (channel, "take", Op.DISPATCH),
        )
    ]


def begun(op: Op = Op.DISPATCH) -> Begun:
    made = Begun(op, "dispatch", (), torch.zeros(1))
    made.args, made.tag, made.used = DISPATCH, 7, (torch.zeros(1), None, torch.zeros(2))
    return made


@pytest.mark.parametrize("outputs", [torch.zeros(3), (torch.zeros(3), torch.zeros(4))], ids=["one", "two"])
def test_halves_of_an_op_are_in_one_channel(outputs: Any) -> None:
    noted: list[Any] = []
    engine, op = rank(noted), begun()
    op.outputs = outputs
    engine._run_first(op)
    assert (engine._launcher.channel, op.stream, op.captured) == (1, "stream 3", False)
    engine._run_second(op)
    tensors = [op.used[0], op.used[2], *(outputs if isinstance(outputs, tuple) else [outputs])]
    names = [call[:2] for call in noted]
    assert names == [
        (0, "set"),
        (0, "launch half"),
        (0, "take"),
        ("follow", "stream 3"),
        (0, "set"),
        (0, "launch half"),
    ]
    assert [call[2:] for call in noted if call[1] == "set"] == [(DISPATCH, 7)] * 2
    assert [call[2:] for call in noted if call[1] == "launch half"] == [([SEND], 3), ([RECEIVE], 3)]
    (followed,) = (call[2] for call in noted if call[0] == "follow")
    assert [id(t) for t in followed] == [id(t) for t in tensors]


@pytest.mark.parametrize("captured", [True, False])
def test_both_halves_are_in_one_graph_or_in_none(captured: bool) -> None:
    noted: list[Any] = []
    engine, op = rank(noted, capturing=not captured), begun(Op.COMBINE)
    op.captured, op.outputs = captured, ()
    where = "a captured graph" if captured else "no graph"
    with pytest.raises(InvalidInput) as raised:
        engine._run_second(op)
    expected = f"wait: got an op begun in {where}, expected both halves in one graph, or in none"
    assert (raised.value.args[0], raised.value.rank, raised.value.op) == (expected, RANK, Op.COMBINE)
    assert noted == []


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("kind", [LaunchFailed, CompileError])
def test_an_op_that_cannot_be_launched_ends_the_group(half: bool, kind: type[Exception]) -> None:
    """Peers must not wait for launches that never come; kernels of halves may be compiled by the op itself."""
    noted: list[Any] = []
    engine, op, error = rank(noted), begun(), kind("refused")

    def refuse(*given: Any) -> None:
        raise error

    engine._launcher.launch_half = engine._launcher.launch = refuse
    engine._tell_peers = lambda kernel, code: noted.append((kernel, int(code)))
    if kind is CompileError and not half:
        return
    with pytest.raises(kind) as raised:
        engine._run_first(op) if half else engine._run(Op.DISPATCH, DISPATCH, 7)
    assert raised.value is error
    assert [call for call in noted if call[0] == "abort_group"] == [("abort_group", 22)]
    assert not [call for call in noted if call[1] == "take"], "it is not announced"
    with pytest.raises(GroupPoisoned) as ended:
        engine._run(Op.DISPATCH, DISPATCH, 8)
    assert (ended.value.args[0], ended.value.rank) == ("rank 1 ended the group: refused", RANK)
    assert not engine._lock.locked()


def test_a_group_that_has_ended_launches_no_half() -> None:
    noted: list[Any] = []
    engine, op = rank(noted), begun()
    engine._closed = True
    with pytest.raises(GroupClosed) as raised:
        engine._run_first(op)
    assert (raised.value.args[0], raised.value.rank) == (
        "the buffer was closed on this rank; expected an open one",
        RANK,
    )
    assert noted == []


def test_another_thread_is_refused_at_once() -> None:
    engine = rank([])
    with engine._lock, pytest.raises(ConcurrentUse) as raised:
        engine._run(Op.COMBINE, DISPATCH, 7)
    error = raised.value
    assert error.args[0] == "rank 1: another thread is inside an op of this buffer; expected one op at a time"
    assert (error.rank, error.op) == (RANK, Op.COMBINE)
    assert engine._ended is None, "the group goes on"


@pytest.mark.parametrize("peers", [{0: 3}, {0: 3, 1: 4}, {2: 9, 0: 3}])
def test_ranks_that_share_a_stream_are_named(peers: dict[int, int]) -> None:
    engine = rank([])
    engine._segments.streams = peers
    with pytest.raises(InvalidConfig) as raised:
        engine._stream()
    got = "stream: got the one that virtual rank 0 uses, expected one for each rank"
    assert raised.value.args[0].startswith(got)
    assert (raised.value.rank, raised.value.peer) == (RANK, 0)


@pytest.mark.parametrize(
    ("streams", "capturing", "after"),
    [
        (None, False, None),
        ({}, False, {1: 3}),
        ({1: 3, 0: 3}, False, {1: 3, 0: 3}),  # compared when it was taken
        ({1: 8, 0: 4}, False, {1: 3, 0: 4}),
        ({0: 3}, True, {0: 3}),  # a capture's stream runs nothing
    ],
)
def test_the_stream_of_each_rank_is_on_record(streams: Any, capturing: bool, after: Any) -> None:
    engine = rank([], capturing=capturing)
    engine._segments.streams = streams
    assert engine._stream() == 3
    assert engine._segments.streams == after


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])
def test_inputs_and_outputs_begin_at_whole_vectors(offset: int) -> None:
    engine = rank([])
    t = torch.arange(80.0)[offset : offset + 60].view(3, 20)
    base = t.data_ptr() % 16
    read, written = engine._input(t), engine._writable(t)
    assert torch.equal(read, t)
    assert (read.data_ptr() % 16, written.data_ptr() % 16) == (0, 0)
    assert (written.shape, written.dtype) == (t.shape, t.dtype)
    assert (read is t, written is t) == ((base == 0), (base == 0))


def test_outputs_are_made_on_the_gpu() -> None:
    engine = rank([])
    rows = engine._rows(4, torch.zeros(1, dtype=torch.float16))
    assert (rows.shape, rows.dtype) == ((4, engine.spec.hidden), torch.float16)
    engine.device = torch.device("meta")
    made = engine._matrix(3, 5, torch.int8)
    assert (made.shape, made.dtype, made.device) == ((3, 5), torch.int8, engine.device)
    assert engine._grow(5) is False, "the host does not see an overflow"
    assert engine.waited_ns() == []
    for name in ("timings", "report"):
        with pytest.raises(
            InvalidConfig, match=f"^{name}: got a CUDA buffer, whose ops the host does not watch; expec"
        ):
            getattr(engine, name)()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("op", [Op.DISPATCH, Op.COMBINE, Op.DISPATCH_BACKWARD, Op.COMBINE_BACKWARD])
def test_few_tokens_take_one_launch_of_one_block(op: Op, whole: bool) -> None:
    engine = rank([])
    engine._launcher.whole = whole
    names = [name for name, _ in engine._queue(op, DISPATCH)]
    one = {Op.DISPATCH: "dispatch_whole", Op.COMBINE: "combine_whole", Op.DISPATCH_BACKWARD: "combine_whole"}
    if whole and op in one:
        assert engine._queue(op, DISPATCH) == [(one[op], 1)]
    else:
        part = {Op.DISPATCH_BACKWARD: "combine"}.get(op, op.name.lower())
        assert names == [f"{part}_send", f"{part}_receive"]


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [(0, 2), (1, 2), (6, 7), (7, 9), (13, 15), (14, 17), (33, 38), (34, 39), (35, 40), (36, 40), (10**6, 40)],
)
def test_one_in_eight_blocks_of_a_dispatch_may_route(tokens: int, blocks: int) -> None:
    assert _engine.BLOCKS_PER_ROUTER == 8
    engine = rank([], num_max_tokens_per_rank=10**6)
    assert engine._launches(Op.DISPATCH, SimpleNamespace(num_tokens=tokens))[0] == ("dispatch_send", blocks)


@pytest.mark.parametrize("apart", [0, 1])
def test_all_launches_in_order(apart: int) -> None:
    """Lists are fetched after the wait, and rows of remote ranks are passed on before."""
    engine = rank([])
    tokens = engine.spec.tuning.wait_apart_tokens - 1 + apart
    engine._network, args = object(), SimpleNamespace(num_tokens=tokens)
    wait = [("dispatch_wait", 1)] * apart
    assert engine._launches(Op.DISPATCH, args) == [("dispatch_send", 40), *wait, ("dispatch_fetch", 2), RECEIVE]
    engine._launcher.max_blocks = 1
    assert engine._launches(Op.DISPATCH, args)[-2] == ("dispatch_fetch", 1)
    engine._launcher.max_blocks, engine._launcher.num_clients = 40, 3
    forwarded = [("combine_forward", 36)]
    if apart:
        forwarded = [("combine_first_wait", 1), *forwarded, ("combine_wait", 1)]
    assert engine._launches(Op.COMBINE, args) == [("combine_send", 24), *forwarded, ("combine_receive", 40)]


def test_the_first_refusal_is_raised_and_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(cuda._engine, "EndArgs", lambda code: sent.append(int(code)) or "ended")
    noted: list[Any] = []
    engine, error = rank(noted), InvalidInput("x: got 7")
    with pytest.raises(InvalidInput) as raised:
        engine._refuse(Op.DISPATCH, 4, error, 1, 2)
    assert raised.value is error
    assert sent == [1, 1]
    assert noted == [
        call for channel in (0, 1)
        for call in ((channel, "set", "ended", 0), (channel, "launch", [("abort_group", 1)], 3))
    ]  # fmt: skip


def test_an_abort_says_which_rank_it_was() -> None:
    engine = rank([])
    engine._tell_peers = lambda kernel, code: None
    engine.poison(KeyError("k"))
    assert (engine._ended.args[0], engine._ended.rank) == ("this rank aborted", RANK)
    assert isinstance(engine._ended.__cause__, KeyError)


def test_a_child_of_a_fork_learns_of_that_first() -> None:
    engine = rank([])
    engine._pid, engine._closed = -1, True
    with pytest.raises(GroupClosed) as raised:
        engine.health()
    assert raised.value.args[0] == "got a use after fork, expected the process that made the buffer"
    assert raised.value.rank == RANK
    engine._pid, engine._ended = os.getpid(), InvalidInput("earlier")
    with pytest.raises(GroupClosed, match="was closed on this rank"):
        engine.health()


def test_tensors_of_a_window_are_retired_when_an_op_has_begun() -> None:
    noted: list[Any] = []
    engine = rank(noted, channels=1)
    engine._windows = SimpleNamespace(retire=lambda: noted.append("retire"))
    engine._run(Op.DISPATCH, DISPATCH, 0)
    assert noted[-2:] == [(0, "take", Op.DISPATCH), "retire"]
