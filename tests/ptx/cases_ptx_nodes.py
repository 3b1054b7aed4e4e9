"""Cases that reach the orders of forwarding kernels: rounds of three ranks on two nodes, and ops that fail there."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from conformance.cases_scaled_rows import open_buffer
from ptx.gpu import PtxGpu
from support.ranks import ThreadRanks
from support.rounds import full_round, one_round, rounds_in_a_row
from support.routing import make_inputs, make_spec

from moe_rt.errors import MoeRtError

POISON, POISON_WORD = 128, ctypes.c_uint64  # address of the poison word, see cuda/protocol/core/layout.h
# Rank 0 is the proxy for rank 2 and announces to rank 1; rank 2 is the proxy for both. Rank 1 has no clients.
NODES = (0, 0, 1)
SPEC = make_spec(3, route="two_level", placement=[(8 - e) % 3 for e in range(9)])
INVARIANT = make_spec(3, route="two_level", sums="invariant", num_topk=9)


def _over_nodes(case: Callable[..., Any], *args: Any) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        ThreadRanks(3, gpu, nodes=NODES).run(case, *args)

    return run


def silent_over_nodes(group: Any, gpu: PtxGpu, who: int, op: str) -> str:
    """One rank skips an op, or sends an expert id that does not exist."""
    inputs = make_inputs(SPEC, [12, 7, 12], 1)
    with open_buffer(group, SPEC) as buffer:
        x, idx, weights = (each[buffer.rank].clone() for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))
        try:
            if buffer.rank == who and op == "bad id":
                idx[0, 0] = 99
            x.requires_grad_()
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
            if buffer.rank == who and op == "combine":
                return _wound(buffer, gpu)
            out = buffer.combine(recv_x, recv_weights, handle)
            if buffer.rank == who and op == "backward":
                return _wound(buffer, gpu)
            out.sum().backward()
            buffer.check()
        except MoeRtError as error:
            return type(error).__name__
    return ""


def _wound(buffer: Any, gpu: PtxGpu) -> str:
    """Return the error of this rank after the others have timed out, or "poisoned"."""
    deadline = time.monotonic() + 600.0
    while time.monotonic() < deadline:
        gpu.wind(10.0)
        time.sleep(0.05)
        try:
            buffer.check()
        except MoeRtError as error:
            return type(error).__name__
        if POISON_WORD.from_address(buffer._engine._segments.addresses[buffer.rank] + POISON).value:
            return "poisoned"
    return "never announced"


def _silent(who: int, op: str) -> Callable[[PtxGpu], None]:
    def run(gpu: PtxGpu) -> None:
        outcomes = ThreadRanks(3, gpu, nodes=NODES).run(silent_over_nodes, gpu, who, op)
        expected = "InvalidRouting" if op == "bad id" else "PeerTimeout"
        assert expected in outcomes, outcomes
        assert set(outcomes) <= {expected, "GroupPoisoned", "poisoned"}, outcomes

    return run


def _long_lists(gpu: PtxGpu) -> None:
    """The lists are fetched in two round trips."""
    spec = make_spec(3, route="two_level", num_max_tokens_per_rank=200)
    ThreadRanks(3, gpu, nodes=NODES).run(full_round, spec, [12, 7, 20], 1, "random")


def nodes_on_one_block(group: Any) -> None:
    with open_buffer(group, SPEC, num_sms=1) as buffer:
        one_round(buffer, make_inputs(SPEC, [12, 7, 12], 1, "random"), 1)


CASES: dict[str, Callable[[PtxGpu], None]] = {
    "a round": _over_nodes(full_round, SPEC, [12, 9, 8], 1, "random"),
    "a round on one block": _over_nodes(nodes_on_one_block),
    "a bad id of a served rank": _silent(2, "bad id"),
    "a bad id of a neighbour": _silent(1, "bad id"),
    "a silent neighbour": _silent(1, "combine"),
    "a silent rank that is served": _silent(2, "backward"),
    "a round of long lists": _long_lists,
    "a round of rows that return one by one": _over_nodes(full_round, INVARIANT, [12, 9, 8], 1, "random"),
    "rounds in a row": _over_nodes(rounds_in_a_row, SPEC, [12, 7, 12], [5, 6], "random"),
}
