"""Ops in halves under autograd and torch.compile: gradients, one graph, order, and what torch's dispatcher sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import CASE_TIMEOUT_S, Ranks
from torch import Tensor
from torch.autograd import forward_ad

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidInput, Op
from moe_rt.ops import declare

MakeRanks = Callable[[str, int], Ranks]
T, H, K, E = 6, 8, 2, 4
BACKWARD = ("dispatch_backward", "combine_backward")
SIZES: dict[str, Any] = {"num_max_tokens_per_rank": T, "hidden": H, "num_topk": K, "num_experts": E}


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(ThreadGroup.make(1)[0], dtype=torch.float64, **SIZES) as buffer:
        yield buffer


def inputs(rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(T, H, dtype=dtype, generator=g).requires_grad_()
    weights = torch.rand(T, K, dtype=dtype, generator=g).requires_grad_()
    return x, torch.rand(T, E, generator=g).topk(K).indices, weights


def round_in_halves(buffer: Buffer, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """Run both ops in halves, with work in between that the result depends on."""
    pending = buffer.dispatch(x, idx, weights, wait=False)
    between = x.sin().sum()
    recv_x, recv_weights, handle = pending.wait()
    returning = buffer.combine(recv_x * 2, recv_weights, handle, wait=False)
    between = between + x.cos().sum()
    return returning.wait() + between


def round_of_whole_ops(buffer: Buffer, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
    return buffer.combine(recv_x * 2, recv_weights, handle) + x.sin().sum() + x.cos().sum()


def test_gradcheck(buffer: Buffer) -> None:
    x, idx, weights = inputs(0)
    assert torch.autograd.gradcheck(lambda x, w: round_in_halves(buffer, x, idx, w), (x, weights))


def test_second_derivative_is_refused(buffer: Buffer) -> None:
    x, idx, weights = inputs(0)
    (grad,) = torch.autograd.grad(round_in_halves(buffer, x, idx, weights).sum(), x, create_graph=True)
    with pytest.raises(InvalidInput, match="second derivative"):
        grad.sum().backward()


def test_tangents_are_refused(buffer: Buffer) -> None:
    x, idx, weights = inputs(0)
    with forward_ad.dual_level(), pytest.raises(InvalidInput, match="tangents"):
        buffer.dispatch(forward_ad.make_dual(x.detach(), torch.ones_like(x)), idx, weights.detach(), wait=False)
    buffer.dispatch(x, idx, weights, wait=False).wait()


def test_schemas() -> None:
    for name in ("dispatch", "dispatch_scaled", "combine", "dispatch_backward", "combine_backward"):
        whole, begin, finish = (declare.OPS[name + half].schema() for half in ("", "_begin", "_finish"))
        given, returned = whole.removeprefix(name).split(" -> ")
        assert begin == f"{name}_begin{given} -> Tensor"
        assert finish == f"{name}_finish(Tensor ticket, {given[1:]} -> {returned}"


def let_repeat(buffer: Buffer) -> None:
    """Let torch call either half any number of times: the first is also ended, and the second runs the whole op."""
    engine: Any = buffer._engine

    def begin(name: str, *given: Any) -> Tensor:
        first, second = (getattr(type(engine), name + half) for half in ("_begin", "_finish"))
        ticket: Tensor = first(engine, *given)
        second(engine, ticket)
        return ticket.zero_()  # its value is unspecified

    for name in ("dispatch", "dispatch_scaled", "combine", *BACKWARD):
        setattr(engine, f"{name}_begin", partial(begin, name))
        setattr(engine, f"{name}_finish", lambda ticket, *given, name=name: getattr(engine, name)(*given))


def test_opcheck(buffer: Buffer) -> None:
    """Each half's schema, fakes, gradients or their refusal, and dynamic shapes through AOT dispatch."""
    x, _, weights = (t.detach() for t in inputs(0))
    idx = torch.tensor([[t % E, (t + 1) % E] for t in range(T)])  # every row of recv_x is then specified
    engine = buffer._engine.id
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
    codes, scales = torch.randint(-9, 9, (T, H), dtype=torch.int8), torch.rand(T, 1)
    plans = handle.recv_plan, handle.send_plan
    given: dict[str, tuple[Any, ...]] = {
        "dispatch": (x.requires_grad_(), idx, weights.requires_grad_(), engine, 0),
        "dispatch_scaled": (codes, scales, idx, weights.detach(), engine, 0),
        "combine": (recv_x.requires_grad_(), recv_weights.requires_grad_(), *plans, engine, 0),
        "dispatch_backward": (recv_x.detach(), recv_weights.detach(), *plans, engine, 0),
        "combine_backward": (x.detach(), recv_x.detach(), recv_weights.detach(), plans[0], engine, 0),
    }
    let_repeat(buffer)
    structure = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, args in given.items():
        begin, finish = (getattr(torch.ops.moe_rt, name + half).default for half in ("_begin", "_finish"))
        torch.library.opcheck(begin, args)
        values = {} if "dispatch" not in name or name in BACKWARD else {"test_utils": structure}
        torch.library.opcheck(finish, (torch.zeros(1, dtype=torch.int32), *args), **values)


def test_out_is_not_for_halves(buffer: Buffer) -> None:
    x, idx, weights = (t.detach() for t in inputs(0))
    recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
    with pytest.raises(InvalidInput, match="out: got wait=False also") as raised:
        buffer.combine(recv_x, recv_weights, handle, out=torch.empty_like(x), wait=False)  # type: ignore[call-overload]
    assert raised.value.op == Op.COMBINE


def compiled(group: Any, backend: str, num_rounds: int) -> None:
    """Compare compiled halves with whole eager ops, on ranks of which one has no tokens."""
    rank = group.rank()
    with Buffer(group, dtype=torch.float32, timeout_s=CASE_TIMEOUT_S, **SIZES) as buffer:
        graph = torch.compile(round_in_halves, fullgraph=True, backend=backend)
        for _ in range(num_rounds):
            results = []
            for run in (round_of_whole_ops, graph):
                x, idx, weights = inputs(rank, torch.float32)
                if rank == 1:
                    x, idx, weights = (t.detach()[:0] for t in (x, idx, weights))
                    x.requires_grad_(), weights.requires_grad_()
                out = run(buffer, x, idx, weights)
                out.square().sum().backward()
                results.append((out.detach(), x.grad, weights.grad))
            torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(make_ranks: MakeRanks, backend: str) -> None:
    make_ranks("shm", 2).run(compiled, backend, 2)
