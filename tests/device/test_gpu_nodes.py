"""CUDA ranks on several nodes, emulated: two levels over a network that delivers late give the oracle's bits.

Without a heap that spans nodes, nodes are only declared: gets and puts then go to ranks that are mapped anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conformance.cases_scaled_rows import PLAIN, scaled_round
from conformance.test_conformance import tokens_for
from support.emulated_gpu import EmulatedGpu
from support.patience import patient
from support.ranks import CASE_TIMEOUT_S, ThreadRanks
from support.rounds import chain, full_round, rounds_in_a_row
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup, Tuning
from moe_rt.buffer.pending import Pending
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import (
    CallOrderMismatch,
    CorruptPeer,
    GroupClosed,
    GroupPoisoned,
    InvalidConfig,
    InvalidInput,
    InvalidRouting,
    MoeRtError,
    PeerTimeout,
)

FP8 = torch.float8_e4m3fn
NODES = {"2+2": (0, 0, 1, 1), "1+1+1": (0, 1, 2), "1+2": (0, 1, 1), "3+2, in turns": (0, 1, 0, 1, 0)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LANES = (3, 1, 32, 33)


def spec_of(nodes: Sequence[int], **changes: Any) -> BufferSpec:
    return make_spec(len(nodes), route="two_level", **changes)


def ranks_on(nodes: Sequence[int], lanes: int = 3) -> ThreadRanks:
    return ThreadRanks(len(nodes), EmulatedGpu(threads=lanes), nodes=nodes)


def every_combination() -> list[Any]:
    """Return each node layout and lane count once; all pairs in a sweep."""
    pairs = [(name, lanes) for name in NODES for lanes in LANES]
    once = set(zip(NODES, LANES, strict=True))
    return [pytest.param(*pair, marks=() if pair in once else pytest.mark.sweep) for pair in pairs]


@pytest.mark.parametrize(("name", "lanes"), every_combination())
def test_equal_to_the_oracle(name: str, lanes: int) -> None:
    """Rounds equal the oracle; each lane count uses another dtype."""
    dtype = DTYPES[LANES.index(lanes)]
    spec = spec_of(NODES[name], dtype=dtype, placement=[(8 - e) % len(NODES[name]) for e in range(9)])
    ranks_on(NODES[name], lanes).run(full_round, spec, tokens_for(len(NODES[name])), 1, "random")


def test_several_ops_under_way_are_refused() -> None:
    raised = ranks_on(NODES["1+2"]).outcomes(full_round, spec_of(NODES["1+2"], depth=2), [3, 2, 1], 1, "random")
    assert {type(error) for error in raised} == {InvalidConfig}
    assert "depth: got 2, expected 1 for GPUs" in str(raised[0])


@pytest.mark.parametrize("hidden", [272, pytest.param(300, marks=pytest.mark.sweep)])
def test_coded_rows(hidden: int) -> None:
    """Sums over several ranks are encoded again, by sixteen elements or by one."""
    spec = spec_of(NODES["2+2"], dtype=torch.bfloat16, hidden=hidden, dispatch_dtype=torch.int8, combine_dtype=FP8)
    ranks_on(NODES["2+2"], 32).run(full_round, spec, [12, 0, 7, 5], 3, "topk")


def test_rows_of_tokens_and_with_scales() -> None:
    nodes = NODES["1+2"]
    ranks_on(nodes).run(rounds_in_a_row, spec_of(nodes, layout="tokens"), [12, 0, 7], [1, 2], "random")
    ranks_on(nodes).run(scaled_round, spec_of(nodes, dtype=torch.bfloat16), PLAIN, [12, 0, 7], [1, 2])


@pytest.mark.parametrize("changes", [{}, dict(dtype=torch.bfloat16, hidden=272, combine_dtype=FP8)], ids=["raw", "fp8"])
def test_rows_that_return_one_by_one(changes: dict[str, Any]) -> None:
    nodes = NODES["3+2, in turns"]
    spec = spec_of(nodes, sums="invariant", num_topk=6, **changes)
    ranks_on(nodes, 32).run(rounds_in_a_row, spec, [12, 0, 7, 5, 1], [1, 2], "random")


def test_aligned_experts_and_lists_that_take_two_trips() -> None:
    nodes = NODES["3+2, in turns"]
    spec = spec_of(nodes, num_max_tokens_per_rank=100, num_topk=6, expert_alignment=8)
    ranks_on(nodes).run(full_round, spec, [20, 0, 100, 10, 5], 1, "random")


def test_a_node_without_tokens_and_drops() -> None:
    nodes = NODES["1+2"]
    ranks_on(nodes).run(rounds_in_a_row, spec_of(nodes), [0, 9, 9], [1, 2], "random")
    drops = spec_of(nodes, placement=[(8 - e) % 3 for e in range(9)], capacity_factor=0.4, overflow="drop")
    ranks_on(nodes).run(rounds_in_a_row, drops, [12] * 3, [6, 7], "topk")


@pytest.mark.parametrize("name", ["1+2", pytest.param("1+1+1", marks=pytest.mark.sweep)])
def test_chain(name: str) -> None:
    """A chain without a drain, with random pauses and ranks without tokens, keeps its order."""
    assert ranks_on(NODES[name]).run(chain, 15, "two_level") == [15] * 3


def test_one_rank_on_each_node_gives_the_flat_bits() -> None:
    outputs = []
    for route in ("flat", "two_level"):
        spec = make_spec(3, route=route, dtype=torch.bfloat16)
        outputs.append(ranks_on((0, 1, 2)).run(full_round, spec, [12, 7, 5], 4, "random"))
    assert outputs[0] == outputs[1]


def test_launches() -> None:
    """Rank 2 has no clients, the others are proxies; above the bound for separate waits, a small launch waits first."""
    gpu = EmulatedGpu()
    nodes = (0, 0, 0, 1, 1)
    spec = spec_of(nodes, tuning=Tuning(wait_apart_tokens=12))
    ThreadRanks(5, gpu, nodes=nodes).run(full_round, spec, [12, 12, 12, 12, 0], 1, "random")
    forward = ("dispatch_lists", "dispatch_forward", "combine_backward_forward", "combine_forward")
    assert [gpu.launched.count(name) for name in forward] == [4, 4, 4, 3 * 4], "a combine is played twice"
    waits = ("dispatch_wait", "combine_backward_first_wait", "combine_first_wait", "dispatch_fetch")
    assert [gpu.launched.count(name) for name in waits] == [4, 3, 3 * 3, 0]


Act = Callable[[Buffer, Any], None]


def outcomes(act: Act, nodes: Sequence[int] = NODES["2+2"], timeout_s: float = 60.0) -> list[Any]:
    """Return what each rank raises in its act, or by the time all ranks have ended theirs."""
    spec = spec_of(nodes)
    inputs = make_inputs(spec, [12] * len(nodes), seed=1, kind="topk")
    over = threading.Barrier(len(nodes), timeout=CASE_TIMEOUT_S)

    def case(group: ThreadGroup) -> Any:
        with Buffer(group, timeout_s=timeout_s, **buffer_kwargs(spec)) as buffer:
            mine = [each[buffer.rank].clone() for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
            error = None
            try:
                act(buffer, mine)
            except MoeRtError as raised:
                error = raised
            over.wait()  # launches are complete
            try:
                buffer.check()
            except MoeRtError as raised:
                error = error or raised
            over.wait()
        return error

    return ThreadRanks(len(nodes), EmulatedGpu(), nodes=nodes).outcomes(case)


def pair(buffer: Buffer, mine: Any) -> None:
    recv_x, recv_weights, handle = buffer.dispatch(*mine)
    buffer.combine(recv_x, recv_weights, handle)


def test_bad_expert_id_is_heard_on_every_node() -> None:
    """Rank 0 learns of rank 3's bad id only through its proxy, and moves no row."""

    def act(buffer: Buffer, mine: Any) -> None:
        pair(buffer, mine)
        if buffer.rank == 3:
            mine[1][7, 1] = 99
        _, _, handle = buffer.dispatch(*mine)
        assert handle.offs.sum() == 0

    errors = outcomes(act)
    assert {type(e) for e in errors} <= {InvalidRouting, GroupPoisoned}, errors
    refused = [e for e in errors if isinstance(e, InvalidRouting)]
    assert refused
    assert all(e.peer == 3 and "got expert id 99" in str(e) for e in refused)


def errors_without_rank_3(begin: Callable[[Buffer, Any], Pending[Any] | None]) -> list[Any]:
    """Return what the others raise in an op that they have begun.

    No rank waits before all have begun, so ranks 1 and 2 wait for rank 3 only. Rank 0 waits for what a proxy passes on,
    and would blame the proxy; it waits until it is poisoned.
    """
    begun = threading.Barrier(4, timeout=CASE_TIMEOUT_S)

    def act(buffer: Buffer, mine: Any) -> None:
        with patient(buffer):
            pending = begin(buffer, mine)
            begun.wait()
            if buffer.rank == 0:
                finish(pending)
        if buffer.rank in (1, 2):
            finish(pending)

    def finish(pending: Any) -> None:
        received = pending.wait()
        if isinstance(received, tuple):  # of a dispatch
            assert received[-1].offs.sum() == 0

    return outcomes(act, timeout_s=1.0)[:3]


def test_a_silent_peer_is_named_by_whoever_waits_for_it() -> None:
    """A rank that waits for a silent peer names it. Others, which wait for forwarded rows, are poisoned."""

    def begin(buffer: Buffer, mine: Any) -> Pending[Any] | None:
        pair(buffer, mine)
        return None if buffer.rank == 3 else buffer.dispatch(*mine, wait=False)

    errors = errors_without_rank_3(begin)
    assert {type(e) for e in errors} == {PeerTimeout, GroupPoisoned}, errors
    assert {e.peer for e in errors if isinstance(e, PeerTimeout)} == {3}


def test_a_silent_neighbour_in_a_combine() -> None:
    def begin(buffer: Buffer, mine: Any) -> Pending[Any] | None:
        received = buffer.dispatch(*mine)
        return None if buffer.rank == 3 else buffer.combine(*received, wait=False)

    errors = errors_without_rank_3(begin)
    assert {type(e) for e in errors} == {PeerTimeout, GroupPoisoned}, errors
    assert {e.peer for e in errors if isinstance(e, PeerTimeout)} == {3}


def test_refused_input_ends_the_group() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        if buffer.rank == 2:
            mine[0] = mine[0][:, 1:]
        pair(buffer, mine)

    errors = outcomes(act)
    assert [type(e) for e in errors] == [GroupPoisoned, GroupPoisoned, InvalidInput, GroupPoisoned], errors
    assert all("rank 2 failed first" in str(errors[rank]) for rank in (0, 1, 3))


def test_another_op() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        recv_x, recv_weights, handle = buffer.dispatch(*mine)
        if buffer.rank == 3:
            buffer.dispatch(*mine)
        else:
            buffer.combine(recv_x, recv_weights, handle)

    errors = outcomes(act)
    assert {type(e) for e in errors} <= {CallOrderMismatch, GroupPoisoned, GroupClosed}, errors
    assert CallOrderMismatch in {type(e) for e in errors}


def test_closing_is_found_by_whoever_waits_for_it() -> None:
    def act(buffer: Buffer, mine: Any) -> None:
        pair(buffer, mine)
        if buffer.rank == 3:
            buffer.close()
        else:
            pair(buffer, mine)

    errors = outcomes(act)
    assert GroupClosed in {type(e) for e in errors[:3]}, errors
    assert {type(e) for e in errors[:3]} <= {GroupClosed, GroupPoisoned}
    assert "rank 3" in str(errors[2])


@pytest.mark.emulated("rewrites the emulated GPU's memory")
def test_lists_that_cannot_be_true() -> None:
    """A proxy raises CorruptPeer on a token past the last, stages nothing, and signals no rank to continue."""

    def act(buffer: Buffer, mine: Any) -> None:
        mine[1][:] = 8  # an expert of rank 3, whose node receives all these entries
        launcher = buffer._engine._launcher
        launch = launcher._kernels.launch

        def bent(launches: Any, **how: Any) -> None:
            for one in launches:
                launch([one], **how)
                if one[0] == "dispatch_send" and buffer.rank == 0:
                    # No rank has read them yet: rank 2 is the proxy for rank 0, and begins when rank 3 has announced.
                    _bend_lists(buffer)
                    bent_lists.set()

        bent_lists.wait(60.0) if buffer.rank == 3 else None
        launcher._kernels.launch = bent
        buffer.dispatch(*mine)

    bent_lists = threading.Event()
    errors = outcomes(act)
    assert isinstance(errors[2], CorruptPeer), errors
    assert all(isinstance(e, GroupPoisoned | None) for e in (errors[0], errors[1], errors[3])), errors
    assert errors[2].peer == 0


def _bend_lists(buffer: Buffer) -> None:
    """Replace every 11 in this rank's lists, such as its last pull, by 99."""
    segments = buffer._engine._segments
    shape = buffer.spec.gpu_shape()
    region = segments.mappings[0].view(torch.uint8)
    start = segments.addresses[buffer.rank] - region.data_ptr()
    words = region[start : start + shape.tokens_at(0)].view(torch.int32)
    words[words == 11] = 99
