"""One rank of three does something else than its peers: every rank goes on with right results, or every rank raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS
from faults.cases_faults import good_round, open_buffer
from support.ranks import Ranks, ThreadRanks
from support.routing import make_inputs, make_spec

FAULTY_RANK, SIZE = 1, 3
WAIT_S = 60.0  # no rank waits that long: peers announce what they do instead


def acts(group: Any, how: str) -> str:
    """Run a round with gradients, in which the faulty rank differs, and another; return the error."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    odd = rank == FAULTY_RANK
    dtype = torch.float64 if how == "dtype of its buffer" and odd else torch.float32
    spec = make_spec(SIZE, dtype=dtype)
    try:
        with open_buffer(group, spec, timeout_s=WAIT_S) as buffer:
            inputs = make_inputs(spec, [3, 0 if how == "empty" else 3, 3], 1, "topk")
            x, weights = (each[rank].detach() for each in (inputs.xs, inputs.topk_weights))
            if how == "dtype of a call" and odd:
                x = x.double()
            if not (how == "no gradients" and odd):
                x.requires_grad_(), weights.requires_grad_()
            recv_x, recv_weights, handle = buffer.dispatch(x, inputs.topk_idx[rank], weights)
            out = buffer.combine(recv_x, recv_weights, handle)
            if out.requires_grad and not (how == "skipped backward" and odd):
                out.sum().backward()
                assert x.grad is not None
                assert x.grad.shape == x.shape
            if how == "one round less" and odd:
                return "no error"
            good_round(buffer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "no error"


EXPECTED: dict[str, tuple[set[str], str]] = {
    "nothing": ({"no error"}, ""),
    "empty": ({"no error"}, ""),
    "no gradients": ({"CallOrderMismatch", "GroupPoisoned"}, "rank 1 called dispatch #2"),
    "skipped backward": ({"CallOrderMismatch", "GroupPoisoned"}, "rank 1 called dispatch #2"),
    "dtype of a call": ({"InvalidInput"}, "rank 1 refused its input"),
    "dtype of its buffer": ({"ConfigMismatch", "GroupPoisoned"}, "rank 1"),
    "one round less": ({"GroupClosed", "GroupPoisoned"}, "rank 1 closed its buffer"),
}


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("how", EXPECTED)
def test_all_go_on_or_all_raise(make_ranks: Any, heap: str, how: str) -> None:
    ranks: Ranks = make_ranks(heap, SIZE)
    kinds, said = EXPECTED[how]
    outcomes = ranks.run(acts, how)
    others = [text for rank, text in enumerate(outcomes) if rank != FAULTY_RANK]
    assert {text.partition(":")[0] for text in others} <= kinds, outcomes
    assert any(said in text for text in others), outcomes
    if how != "one round less":
        assert outcomes[FAULTY_RANK].partition(":")[0] in kinds, outcomes


def reads_slowly(group: Any, read: threading.Event) -> torch.Tensor:
    """Return what a combine gave; the slow rank looks at it after the others have closed and let go of everything."""
    with open_buffer(group) as buffer:
        inputs = make_inputs(buffer.spec, [3] * SIZE, 1, "topk")
        mine = (each[group.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))
        recv_x, recv_weights, handle = buffer.dispatch(*mine)
        if group.rank != FAULTY_RANK:
            out = buffer.combine(recv_x, recv_weights, handle)
        else:
            real = int(handle.offs[-1])  # rows past them are unspecified
            kept, out = recv_x[:real].clone(), buffer.combine(recv_x, recv_weights, handle)
            assert read.wait(WAIT_S)
            assert torch.equal(recv_x[:real], kept), "received rows are this rank's memory"
            return out.clone()
    if group.rank == 0:
        read.set()
    return out


def test_a_slow_reader_at_exit() -> None:
    """Closing of a rank waits for no reader, and takes nothing from one."""
    outs = ThreadRanks(SIZE).run(reads_slowly, threading.Event())
    spec = make_spec(SIZE)
    inputs = make_inputs(spec, [3] * SIZE, 1, "topk")
    for rank, out in enumerate(outs):
        torch.testing.assert_close(out, inputs.xs[rank] * inputs.topk_weights[rank].sum(1, keepdim=True))
