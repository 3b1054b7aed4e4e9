"""Faults on a GPU are reported while no host waits, raised at the next op, and announced to every peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_gpu import EmulatedGpu
from support.patience import patient
from support.ranks import CASE_TIMEOUT_S, ThreadRanks
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import (
    CallOrderMismatch,
    CapacityOverflow,
    ConcurrentUse,
    CorruptPeer,
    GroupClosed,
    GroupPoisoned,
    InvalidConfig,
    InvalidInput,
    InvalidRouting,
    MoeRtError,
    Op,
    PeerTimeout,
    Phase,
    TooManyTokens,
)

SIZE = 3
Act = Callable[[Buffer, Any], None]


def outcomes(
    act: Act, size: int = SIZE, gpu: EmulatedGpu | None = None, timeout_s: float = 60.0, **changes: Any
) -> list[Any]:
    """Return what `act` on each rank raises, or else what `check` raises within 1.5 seconds, or None."""
    spec = make_spec(size, **changes)
    inputs = make_inputs(spec, [12] * size, seed=1, kind="topk")

    def case(group: ThreadGroup) -> Any:
        with Buffer(group, timeout_s=timeout_s, **buffer_kwargs(spec)) as buffer:
            mine = [each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
            try:
                act(buffer, mine)
                deadline = time.monotonic() + 1.5
                while time.monotonic() < deadline:
                    buffer.check()
                    time.sleep(0.01)
            except MoeRtError as error:
                return error
        return None

    return ThreadRanks(size, gpu or EmulatedGpu()).outcomes(case)


def kinds(errors: list[Any]) -> set[type]:
    return {type(e) for e in errors}


def pair(buffer: Buffer, mine: Any) -> None:
    recv_x, recv_weights, handle = buffer.dispatch(*mine)
    buffer.combine(recv_x, recv_weights, handle)


def test_silent_peer() -> None:
    begun, given_up = (threading.Barrier(SIZE, timeout=CASE_TIMEOUT_S) for _ in range(2))

    def act(buffer: Buffer, mine: Any) -> None:
        with patient(buffer):
            pair(buffer, mine)
            if buffer.rank == 1:  # it receives every rank's rows, and learns afterwards that they have aborted
                begun.wait()
                given_up.wait()
                return pair(buffer, mine)
            pending = buffer.dispatch(*mine, wait=False)
            begun.wait()  # ranks 0 and 2 then wait for rank 1 only
        recv_x, _, handle = pending.wait()
        assert handle.offs.sum() == 0, "the rows that never came must not be used"
        given_up.wait()
        with pytest.raises(MoeRtError):  # the next op raises
            buffer.combine(recv_x, torch.empty(buffer.capacity), handle)
        buffer.check()

    errors = outcomes(act, timeout_s=1.5)
    assert all(isinstance(e, PeerTimeout | GroupPoisoned) for e in errors), errors
    timeouts = [e for e in errors if isinstance(e, PeerTimeout)]
    assert timeouts
    for e in timeouts:
        assert (e.peer, e.op, e.seq, e.phase) == (1, Op.DISPATCH, 2, Phase.WAIT)
        assert "announced op 1, expected 2 within 1.5 s" in str(e)


def test_bad_expert_id() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        if buffer.rank == 2:
            mine[1][7, 1], mine[1][9, 0] = 99, -2
        _, _, handle = buffer.dispatch(*mine)
        assert handle.offs.sum() == 0

    errors = outcomes(act)
    assert all("rank 2 got expert id 99" in str(e) for e in errors if isinstance(e, InvalidRouting)), errors
    assert kinds(errors) <= {InvalidRouting, GroupPoisoned}
    assert InvalidRouting in kinds(errors)


def test_capacity_overflow() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        mine[1][:] = torch.tensor([0, 1, 2])  # rank 0's experts
        _, _, handle = buffer.dispatch(*mine)
        assert handle.offs.sum() == 0

    errors = outcomes(act, capacity_factor=1.0)
    assert CapacityOverflow in kinds(errors), errors
    assert kinds(errors) <= {CapacityOverflow, GroupPoisoned}
    assert any("rank 0 would receive 108 rows, expected at most its capacity of 36" in str(e) for e in errors)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda mine: mine.__setitem__(0, mine[0][:, 1:]), InvalidInput),
        (lambda mine: mine.__setitem__(0, mine[0].double()), InvalidInput),
        (lambda mine: mine.__setitem__(1, mine[1][:5]), InvalidInput),
        (lambda mine: [mine.__setitem__(i, torch.cat([t, t])) for i, t in enumerate(mine)], TooManyTokens),
    ],
)
def test_refused_input_ends_the_group(change: Callable[[Any], Any], kind: type) -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        pair(buffer, mine)
        if buffer.rank == 0:
            change(mine)
        pair(buffer, mine)

    errors = outcomes(act)
    assert type(errors[0]) is kind, errors
    assert kinds(errors[1:]) == {GroupPoisoned}
    assert any("rank 0 failed first" in str(e) for e in errors[1:])


def test_refused_once_stays_refused() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        with pytest.raises(InvalidInput):
            buffer.dispatch(mine[0][:, 1:], mine[1], mine[2])
        buffer.dispatch(*mine)

    errors = outcomes(act, size=1)
    assert type(errors[0]) is GroupPoisoned
    assert isinstance(errors[0].__cause__, InvalidInput)


def test_different_layers() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        buffer.dispatch(*mine, tag=5 + (buffer.rank == 1))

    errors = outcomes(act)
    assert CallOrderMismatch in kinds(errors), errors
    assert kinds(errors) <= {CallOrderMismatch, GroupPoisoned}


@pytest.mark.emulated("orders launches by the host")
def test_the_worst_of_what_peers_announce_counts() -> None:
    """The most severe announcement is raised when rank 1's entry is refused and rank 2 runs another layer."""
    announced = threading.Barrier(SIZE)

    def act(buffer: Buffer, mine: Any) -> None:
        launch = buffer._engine._launcher.launch

        def when_all_have_announced(launches: Any, stream: int) -> None:
            for one in launches:
                if one[0] == "dispatch_receive":
                    announced.wait(60.0)  # otherwise poison may reach a rank before it sees a failure
                launch([one], stream)

        buffer._engine._launcher.launch = when_all_have_announced
        if buffer.rank == 1:
            mine[1][0, 0] = 99
        buffer.dispatch(*mine, tag=5 + (buffer.rank == 2))

    assert kinds(outcomes(act)) == {CallOrderMismatch}


def test_different_ops() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        recv_x, recv_weights, handle = buffer.dispatch(*mine)
        if buffer.rank == 1:
            buffer.dispatch(*mine)
        else:
            buffer.combine(recv_x, recv_weights, handle)

    errors = outcomes(act)
    assert kinds(errors) <= {CallOrderMismatch, GroupPoisoned, PeerTimeout}, errors
    assert CallOrderMismatch in kinds(errors)


def test_peer_that_closed() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        pair(buffer, mine)
        if buffer.rank == 1:
            buffer.close()
            buffer.close()
        else:
            pair(buffer, mine)

    errors = outcomes(act)
    assert "closed on this rank" in str(errors[1])
    assert kinds(errors) <= {GroupClosed, GroupPoisoned}, errors


def test_aborting_rank() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        pair(buffer, mine)
        if buffer.rank == 1:
            buffer.abort()
        pair(buffer, mine)

    errors = outcomes(act)
    assert isinstance(errors[1], GroupClosed)
    assert kinds([errors[0], errors[2]]) == {GroupPoisoned}, errors


@pytest.mark.emulated("rewrites the emulated GPU's memory")
@pytest.mark.parametrize("bound", [12, 129])
@pytest.mark.parametrize("word", range(0, 40, 7))
def test_corrupt_lists(word: int, bound: int) -> None:
    """Lists rewritten after publication, including pushed ones, are detected or harmless, and never cause a stray
    access."""

    def act(buffer: Buffer, mine: Any) -> None:
        launch, engine = buffer._engine._launcher.launch, buffer._engine

        def scribble(launches: Any, stream: int) -> None:
            region = engine._segments.mappings[0]
            start = engine._segments.addresses[1] - region.data_ptr()
            words = region[start : start + buffer.num_bytes].view(torch.int32)
            words = words[(256 + 2 * 3 * 128) // 4 :]  # past the mailboxes
            for one in launches:
                before = words.clone()
                launch([one], stream)
                if one[0] == "dispatch_send" and buffer.rank == 1:
                    small = (words > 0) & (words < 1000)  # counts, ends and entries; no float has such bits
                    lists = (small & (words != before)).nonzero()[:, 0]
                    words[lists[word % len(lists)]] = 2**30

        engine._launcher.launch = scribble
        pair(buffer, mine)

    errors = outcomes(act, num_max_tokens_per_rank=bound)
    assert kinds(errors) <= {CorruptPeer, GroupPoisoned, type(None)}, errors


@pytest.mark.emulated("rewrites the emulated GPU's memory")
@pytest.mark.parametrize("lanes", [1, 64], ids=["each lane a source", "lanes share a source"])
def test_counts_that_are_wrong_but_add_up(lanes: int) -> None:
    """A negative count is noticed although another one makes up for it, before rows are placed by it."""

    def act(buffer: Buffer, mine: Any) -> None:
        launch, engine = buffer._engine._launcher.launch, buffer._engine
        mine[1] = torch.tensor([1, 2, 3]).expand_as(mine[1]).contiguous()  # no token of expert 0, which might be missed
        counts = torch.bincount(mine[1].flatten(), minlength=9).int()

        def scribble(launches: Any, stream: int) -> None:
            words = engine._segments.mappings[0].view(torch.int32)
            for one in launches:
                launch([one], stream)
                if one[0] == "dispatch_send":
                    (places,) = (words.unfold(0, 9, 1) == counts).all(1).nonzero(as_tuple=True)
                    for at in places.tolist():
                        words[at], words[at + 1] = -1, counts[0] + counts[1] + 1

        engine._launcher.launch = scribble
        pair(buffer, mine)

    gpu = EmulatedGpu(threads=lanes)
    assert kinds(outcomes(act, 1, gpu, num_max_tokens_per_rank=129)) == {CorruptPeer}


def test_two_threads() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        entered, tried = threading.Event(), threading.Event()
        launch = buffer._engine._launcher.launch

        def slow(launches: Any, stream: int) -> None:
            entered.set()
            tried.wait(300.0)
            launch(launches, stream)

        buffer._engine._launcher.launch = slow
        thread = threading.Thread(target=buffer.dispatch, args=mine)
        thread.start()
        entered.wait()
        try:
            buffer.dispatch(*mine)
        finally:
            tried.set()
            thread.join()

    assert kinds(outcomes(act, size=1)) == {ConcurrentUse}


class OneStream(EmulatedGpu):
    def stream(self) -> int:
        return 7


@pytest.mark.emulated("pretends a stream")
def test_shared_stream() -> None:
    errors = outcomes(pair, size=2, gpu=OneStream())
    assert any("expected one for each rank" in str(e) for e in errors if isinstance(e, InvalidConfig)), errors


def test_too_many_virtual_ranks() -> None:
    errors = ThreadRanks(5, EmulatedGpu(num_sms=4)).outcomes(lambda group: Buffer(group, **buffer_kwargs(make_spec(5))))
    assert kinds(errors) == {InvalidConfig}
    assert all(
        "got 5 waits of virtual ranks, ranks times depth, on a GPU of 4 multiprocessors" in str(e) for e in errors
    )


@pytest.mark.parametrize("num_sms", [0, 25])
def test_num_sms(num_sms: int) -> None:
    group = ThreadGroup.make(1, EmulatedGpu(num_sms=24))[0]
    with pytest.raises(InvalidConfig, match=f"num_sms: got {num_sms}, expected 1 to 24"):
        Buffer(group, num_sms=num_sms, **buffer_kwargs(make_spec(1)))


def test_too_many_experts_for_a_block() -> None:
    spec = make_spec(1, num_experts=7000)
    with pytest.raises(InvalidConfig, match="bytes of shared memory"):
        Buffer(ThreadGroup.make(1, EmulatedGpu())[0], **buffer_kwargs(spec))


class Compared(dict[int, int]):
    """Streams of ranks. While rank 0 compares them, rank 1 comes and does so too, unless it has to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    def items(self) -> Any:
        if not self.has_begun.is_set():
            self.has_begun.set()
            self.has_ended.wait(0.2)
        return super().items()


@pytest.mark.emulated("pretends a stream")
def test_ranks_that_come_while_streams_are_compared() -> None:
    """One of two ranks that come to a stream together is refused."""
    streams = Compared()

    def case(group: ThreadGroup) -> None:
        with Buffer(group, **buffer_kwargs(make_spec(2))) as buffer:
            engine: Any = buffer._engine
            engine._segments.streams = streams
            if buffer.rank == 0:
                assert engine._stream() == 7
                streams.has_begun.set()
                return
            assert streams.has_begun.wait(CASE_TIMEOUT_S)
            with pytest.raises(InvalidConfig, match="stream: got the one that virtual rank 0 uses"):
                engine._stream()
            streams.has_ended.set()

    ThreadRanks(2, OneStream()).run(case)


def test_a_stream_of_a_peer() -> None:
    with Buffer(ThreadGroup.make(1, EmulatedGpu())[0], **buffer_kwargs(make_spec(1))) as buffer:
        engine: Any = buffer._engine
        engine._segments.streams = {7: engine._gpu.stream()}
        with pytest.raises(InvalidConfig, match="stream: got the one that virtual rank 7 uses"):
            engine._stream()
