"""Failures in two levels: every rank raises, informed by a rank that knows the cause; handles are checked first."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.cases_faults import good_round, open_buffer
from faults.cases_waiting import PATIENCE_S
from support.ranks import ThreadRanks
from support.rounds import one_round
from support.routing import make_inputs, make_spec

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import Code, MoeRtError

NODES = (0, 0, 1, 1)
FAULTY_RANK = 3  # rank 0 learns of it only through others
WAIT_S = 30.0  # limit without an announcement; otherwise no rank waits
POISON = 128  # address of the poison word, see cuda/protocol/core/layout.h


def two_level(group: ThreadGroup, **more: Any) -> Buffer:
    return open_buffer(group, make_spec(group.size, route="two_level", **more))


def closes(buffer: Buffer) -> None:
    buffer.close()


def calls_another_op(buffer: Buffer) -> None:
    inputs = make_inputs(buffer.spec, [3] * buffer.num_ranks, 1, "topk")
    handle = buffer.dispatch(*(each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)))
    buffer.dispatch(*(each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)))
    buffer.combine(*handle)


def aborts(buffer: Buffer) -> None:
    buffer.abort(ValueError("mine"))


def after_a_good_round(group: ThreadGroup, act: Callable[[Buffer], None], all_are_done: threading.Barrier) -> str:
    """The faulty rank acts instead of a second round."""
    buffer = two_level(group)
    good_round(buffer)
    all_are_done.wait(PATIENCE_S)  # abort would end an op that peers are still in
    try:
        act(buffer) if group.rank == FAULTY_RANK else good_round(buffer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.close()
    return "no error"


@pytest.mark.parametrize(
    ("act", "cause"),
    [(closes, "GroupClosed"), (calls_another_op, "CallOrderMismatch"), (aborts, "ValueError: mine")],
)
def test_everyone_names_the_rank(act: Callable[[Buffer], None], cause: str) -> None:
    outcomes = ThreadRanks(4, nodes=NODES).run(after_a_good_round, act, threading.Barrier(4))
    for rank, text in enumerate(outcomes):
        if rank != FAULTY_RANK:
            assert cause in text, outcomes
            assert f"rank {FAULTY_RANK}" in text, outcomes


def one_good_round(group: ThreadGroup) -> str:
    try:
        with two_level(group) as buffer:
            good_round(buffer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("rank", [0, 2])
def test_everyone_names_the_rank_whose_lists_are_corrupt(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Its proxy reads these lists first, and its neighbours read them."""
    monkeypatch.setenv("MOE_RT_FAULT", f"rank={rank},op=1,at=after_payload,do=corrupt")
    texts = ThreadRanks(3, nodes=(0, 0, 1)).run(one_good_round)
    named = f"control data of rank {rank} cannot be true", f"CorruptPeer, concerning rank {rank};"
    assert all(any(name in text for name in named) for text in texts), texts


def ends_with(group: ThreadGroup, last_op: str) -> str:
    """Run two rounds, of which the last ends after this op; a rank that completes it closes immediately."""
    with two_level(group) as buffer:
        good_round(buffer)
        if last_op == "combine":
            good_round(buffer)
        else:
            inputs = make_inputs(buffer.spec, [3] * group.size, 1, "topk")
            buffer.dispatch(*(each[group.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)))
    return "no error"


@pytest.mark.parametrize(("op", "name", "waiting"), [(3, "dispatch #2", (0, 2, 3)), (4, "combine #2", (3,))])
def test_a_forwarder_that_raises_before_it_passes_on(
    monkeypatch: pytest.MonkeyPatch, op: int, name: str, waiting: tuple[int, ...]
) -> None:
    """A rank raises if it waits for forwarded data of the dead proxy, or for its next op. The others may have all they
    need."""
    monkeypatch.setenv("MOE_RT_FAULT", f"rank=1,op={op},at=before_passing_on,do=raise")
    outcomes = ThreadRanks(4, nodes=NODES).run(after_a_good_round, good_round, threading.Barrier(4))
    assert outcomes[1].startswith(f"FaultInjected: {name} on rank 1"), outcomes
    for rank in (0, 2, 3):
        informed = "GroupPoisoned" in outcomes[rank] and "rank 1 failed first: FaultInjected" in outcomes[rank]
        assert informed or (rank not in waiting and outcomes[rank] == "no error"), outcomes


def only_rank_0_waits(group: ThreadGroup, begun: threading.Barrier, given_up: threading.Event) -> Any:
    """All ranks announce a dispatch. Rank 1, which passes rank 3's announcement on as it waits, starts no wait."""
    spec = make_spec(group.size, route="two_level")
    buffer = open_buffer(group, spec, timeout_s=0.2 if group.rank == 0 else PATIENCE_S)
    inputs = make_inputs(spec, [3] * group.size, 1, "topk")
    given = (each[group.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))
    pending = buffer.dispatch(*given, wait=False)
    begun.wait(PATIENCE_S)
    if group.rank != 0:
        assert given_up.wait(PATIENCE_S)
    try:
        pending.wait()
    except MoeRtError as error:
        return type(error).__name__, error.peer
    finally:
        given_up.set()
        buffer.close()
    return "no error"


def test_a_proxy_that_does_not_pass_on_is_named() -> None:
    """The rank whose announcement it should pass on is not to blame."""
    outcomes = ThreadRanks(4, nodes=NODES).run(only_rank_0_waits, threading.Barrier(4), threading.Event())
    assert outcomes == [("PeerTimeout", 1), *[("GroupPoisoned", 0)] * 3]


def rank_1_closes(group: ThreadGroup) -> str:
    with two_level(group) as buffer:
        good_round(buffer)
        try:
            if group.rank == 0:
                good_round(buffer)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_node_of_one_rank_that_closes() -> None:
    """A close is announced across nodes by a rank without neighbours on its node."""
    outcomes = ThreadRanks(2, nodes=(0, 1)).run(rank_1_closes)
    assert outcomes[0].startswith("GroupClosed: dispatch #2 on rank 0: rank 1 closed its buffer"), outcomes


@pytest.mark.parametrize("last_op", ["dispatch", "combine"])
def test_what_a_rank_tells_itself_may_be_ahead(monkeypatch: pytest.MonkeyPatch, last_op: str) -> None:
    """Rank 1, the proxy, has announced its second dispatch and is delayed before it forwards rank 3's header to rank 0.
    Rank 3 has meanwhile completed the op, and closed or reached the combine. Neither is a failure."""
    monkeypatch.setenv("MOE_RT_FAULT", "rank=1,op=3,at=after_all_flags,do=sleep=0.3")
    assert ThreadRanks(4, nodes=NODES).run(ends_with, last_op) == ["no error"] * 4


@pytest.mark.parametrize("route", ["flat", "two_level"])
def test_a_rank_that_finds_a_failure_passes_it_on(route: str) -> None:
    """The rank that found a failure poisoned only rank 0 and died; rank 0 forwards the poison to the others."""
    groups = ThreadGroup.make(4, nodes=NODES)
    waiting = threading.Barrier(4)

    def live(group: ThreadGroup) -> str:
        buffer = open_buffer(group, make_spec(4, route=route), timeout_s=WAIT_S)
        good_round(buffer)
        waiting.wait()
        if group.rank == 0:
            word = ctypes.c_uint64.from_address(buffer._engine._segments.addresses[0] + POISON)
            word.value = 4 << 32 | 3 << 16 | Code.PEER_DEAD  # found by rank 2, about rank 3
        try:
            good_round(buffer)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if group.rank != 0:  # a rank that raises and stays alive closes nothing
                buffer.close()
            kept.append(buffer)
        return "no error"

    kept: list[Buffer] = []
    ranks = ThreadRanks(4)
    outcomes = ranks.run(lambda group: live(groups[group.rank]))
    for text in outcomes:
        assert "rank 2 failed first" in text, outcomes
        assert "rank 3" in text, outcomes


def with_a_bent_plan(group: ThreadGroup, value: int) -> str:
    """Set the last number of the faulty rank's plan, the count of its node's ranks for a remote token, and combine."""
    buffer = two_level(group)
    with buffer:
        inputs = make_inputs(buffer.spec, [12] * group.size, 1, "topk")
        x, idx, weights = (each[group.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))
        recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
        if group.rank == FAULTY_RANK:
            handle.recv_plan = handle.recv_plan.clone()
            handle.recv_plan[-1] = value
        try:
            buffer.combine(recv_x, recv_weights, handle)
            text = "no error"
        except RuntimeError as error:
            text = f"{type(error).__name__} of {getattr(error, 'peer', None)}"
        one_round(buffer, make_inputs(buffer.spec, [5] * group.size, 2, "random"), 2)
    return text


@pytest.mark.parametrize(("value", "is_refused"), [(-1, True), (0, False), (2, False), (3, True), (2**31 - 1, True)])
def test_a_plan_whose_sums_lead_outside(value: int, is_refused: bool) -> None:
    """The count of a node's ranks for a token is refused outside 0 to 2."""
    expected = f"InvalidInput of {FAULTY_RANK}" if is_refused else "no error"
    assert ThreadRanks(4, nodes=NODES).run(with_a_bent_plan, value) == [expected] * 4


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def opens_and_closes(group: ThreadGroup, times: int) -> None:
    sizes = {"num_max_tokens_per_rank": 4096, "hidden": 1024, "num_topk": 1, "num_experts": 2}
    for _ in range(times):
        with Buffer(group, route="two_level", dtype=torch.float32, **sizes):
            pass


def test_room_for_sums_is_given_back() -> None:
    ranks = ThreadRanks(2, nodes=(0, 1))
    ranks.run(opens_and_closes, 2)
    before = address_space()
    ranks.run(opens_and_closes, 30)
    of_one = 4096 * 4096  # one rank's space for sums of the other's tokens
    assert address_space() - before < 10 * of_one
