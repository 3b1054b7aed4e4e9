"""Ops of alternating kinds reuse one window each; if a kind follows itself, its two windows take turns."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from support.ranks import Ranks
from support.routing import buffer_kwargs, make_spec
from torch import Tensor

from moe_rt import Buffer, ThreadGroup, Tuning
from moe_rt.buffer.handle import Handle

MakeRanks = Callable[[str, int], Ranks]
TOKENS, HIDDEN = 3, 48  # rows of whole cache lines, without gaps between them
BOUND = Tuning.pushed_rows + 1  # from here on GPUs also write rows into their own windows
# Dispatches and combines, with the window that each must use.
CHAIN = "D0 C0 D0 C0 D0 D1 C0 C1 D1 D0 D1 C1 C0 C1 D1 C1"


def place(buffer: Buffer, rows: Tensor) -> int:
    """Return the offset of these bytes in this rank's segment, where they occur once."""
    address = buffer._engine._segments.addresses[buffer.rank]
    segment, wanted = ctypes.string_at(address, buffer.num_bytes), rows.detach().numpy().tobytes()
    assert segment.count(wanted) == 1
    return segment.index(wanted)


def rows_of(op: int) -> Tensor:
    return torch.arange(1.0, TOKENS * HIDDEN + 1).reshape(TOKENS, HIDDEN) + 1000 * op


def run_chain(group: ThreadGroup) -> None:
    """Run the chain. Every token visits the other rank's expert with weight 2, so that its partial is twice its row."""
    spec = make_spec(2, num_max_tokens_per_rank=BOUND, hidden=HIDDEN, num_topk=1, num_experts=2)
    idx, weights = torch.full((TOKENS, 1), 1 - group.rank), torch.full((TOKENS, 1), 2.0)
    waiting: list[tuple[Tensor, tuple[Tensor, Tensor, Handle]]] = []
    places: dict[str, set[int]] = {}
    with Buffer(group, **buffer_kwargs(spec)) as buffer:
        for op, kind_and_window in enumerate(CHAIN.split()):
            if kind_and_window[0] == "D":
                rows = rows_of(2 * op + group.rank)
                waiting.append((rows, buffer.dispatch(rows, idx, weights)))
            else:
                sent, received = waiting.pop(0)
                rows = buffer.combine(*received)
                assert torch.equal(rows, 2 * sent)
            places.setdefault(kind_and_window, set()).add(place(buffer, rows))
    assert [len(at) for at in places.values()] == [1] * 4, "each window is in one place"
    assert len(set[int]().union(*places.values())) == 4, "and no two are in the same"


def run_step(group: ThreadGroup) -> None:
    """Run a training step twice; the gradients' ops also alternate."""
    spec = make_spec(2, num_max_tokens_per_rank=BOUND, hidden=HIDDEN, num_topk=1, num_experts=2)
    idx, weights = torch.full((TOKENS, 1), 1 - group.rank), torch.full((TOKENS, 1), 2.0)
    tokens, partials = set(), set()
    with Buffer(group, **buffer_kwargs(spec)) as buffer:
        for step in range(2):
            x = rows_of(4 * step + group.rank).requires_grad_()
            received = buffer.dispatch(x, idx, weights)
            tokens.add(place(buffer, x))
            out = buffer.combine(*received)
            partials.add(place(buffer, out))
            grad_out = rows_of(4 * step + 2 + group.rank) * 1e6
            (grad_x,) = torch.autograd.grad(out, x, grad_out)
            tokens.add(place(buffer, grad_out))
            partials.add(place(buffer, grad_x))
    assert (len(tokens), len(partials)) == (1, 1)


@pytest.mark.emulated("reads the emulated GPU's memory")
@pytest.mark.parametrize("heap", ["threads", "loopback"])
@pytest.mark.parametrize("case", [run_chain, run_step])
def test_window_selector(make_ranks: MakeRanks, heap: str, case: Callable[[ThreadGroup], None]) -> None:
    make_ranks(heap, 2).run(case)
