"""Functions that ranks run in the tests of the torchtitan dispatcher: a stand-in for its MoE, against a dense one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from integrations.cases_adapters import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOPK,
    differences,
    inputs_of,
    numbers,
    poison,
    rank_and_size,
    weighted_sum,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from moe_rt.integrations.torchtitan import MoeRtTokenDispatcher


def make_weights() -> dict[str, Tensor]:
    """Return weights of all experts and of the router, as leaves."""
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "w1": (EXPERTS, INTERMEDIATE, HIDDEN),
        "w2": (EXPERTS, HIDDEN, INTERMEDIATE),
        "w3": (EXPERTS, INTERMEDIATE, HIDDEN),
    }
    return {
        name: numbers(seed, *shape, scale=0.3).requires_grad_() for seed, (name, shape) in enumerate(shapes.items())
    }


def route(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.linear(x, router).softmax(-1)
    ids = scores.detach().topk(TOPK, -1).indices
    return scores.gather(1, ids), ids


def dense_moe(x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    scores, ids = route(x, w["router"])
    scores.retain_grad()
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        y = F.linear(F.silu(F.linear(x, w["w1"][e])) * F.linear(x, w["w3"][e]), w["w2"][e])
        out = out + ((ids == e) * scores).sum(-1, keepdim=True) * y
    return out, scores


def grouped_experts(x: Tensor, counts: Tensor, w: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Apply the experts as torchtitan does: the activation covers all rows, products follow the cumulated counts."""
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)

    def linear(rows: Tensor, name: str) -> Tensor:
        return F.grouped_mm(rows.to(dtype), w[name].to(dtype).transpose(-2, -1), offs=offs)

    return linear(F.silu(linear(x, "w1")) * linear(x, "w3"), "w2").type_as(x)


def titan_moe(
    x: Tensor,
    w: dict[str, Tensor],
    dispatcher: Any,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Router, dispatch, experts, combine, called as torchtitan's RoutedExperts does; experts compute in dtype."""
    poisoned = not torch.compiler.is_compiling()
    scores, ids = route(x, w["router"])
    if poisoned:
        scores.retain_grad()
    num_local_tokens = F.one_hot(ids, EXPERTS).sum((0, 1))
    rows, counts, metadata = dispatcher.dispatch(x, scores, ids, num_local_tokens)
    if poisoned:
        poison(rows, counts)
    y = grouped_experts(rows, counts, w, dtype)
    if poisoned:
        poison(y, counts)
    return dispatcher.combine(y, metadata, x), scores


def own_experts(w: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return this rank's block of the experts, as new leaves."""
    own = {name: t.detach().chunk(size)[rank].clone().requires_grad_() for name, t in w.items() if name != "router"}
    return {**own, "router": w["router"].detach().clone().requires_grad_()}


def make_dispatcher(ep_mesh: Any, **config: Any) -> MoeRtTokenDispatcher:
    dispatcher = MoeRtTokenDispatcher(MoeRtTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK, **config))
    dispatcher.wire_meshes(ep_mesh=ep_mesh)
    return dispatcher


def equal_dense(group: Any, tokens: list[int], config: dict[str, Any], recompute: bool = False) -> dict[str, float]:
    """Return differences of output and all gradients. Processes pass a mesh, as torchtitan does."""
    rank, size = rank_and_size(group)
    ep_mesh = group if isinstance(group.rank, int) else DeviceMesh.from_group(group, "cpu")
    dispatcher = make_dispatcher(ep_mesh, **config)
    own = own_experts(make_weights(), rank, size)
    x = inputs_of(rank, tokens[rank]).requires_grad_()
    if recompute:
        out, scores = checkpoint(titan_moe, x, own, dispatcher, use_reentrant=False)
    else:
        out, scores = titan_moe(x, own, dispatcher)
    weighted_sum(out).backward()
    got = {"out": out.detach(), "x": x.grad, **{name: t.grad for name, t in own.items()}}

    whole, mine = make_weights(), {}
    for r in range(size):
        xr, router = inputs_of(r, tokens[r]).requires_grad_(), whole["router"].detach().clone().requires_grad_()
        outr, scoresr = dense_moe(xr, {**whole, "router": router})
        weighted_sum(outr).backward()
        if r == rank:
            mine = {"out": outr.detach(), "x": xr.grad, "router": router.grad}
            if not recompute:  # a recomputed tensor has no gradient here
                got["scores"], mine["scores"] = scores.grad, scoresr.grad
    expected = {**{n: t.grad.chunk(size)[rank] for n, t in whole.items() if n != "router"}, **mine}
    return differences(got, expected)


def compiled(group: Any, tokens: int) -> dict[str, float]:
    """Compare one graph of the whole layer, with a buffer made at wiring, with eager execution.

    Products are in bf16, as in torchtitan: the only dtype in which they can be traced.
    """
    rank, size = rank_and_size(group)
    dispatcher = make_dispatcher(group, num_max_tokens_per_rank=tokens, hidden_dim=HIDDEN, dtype="float32")
    results = []
    for run in (titan_moe, torch.compile(titan_moe, fullgraph=True, backend="aot_eager")):
        own = own_experts(make_weights(), rank, size)
        x = inputs_of(rank, tokens).requires_grad_()
        out, _ = run(x, own, dispatcher, torch.bfloat16)
        weighted_sum(out).backward()
        results.append({"out": out.detach(), "x": x.grad, **{name: t.grad for name, t in own.items()}})
    return differences(results[1], results[0])


def layers_share_a_buffer(group: Any) -> tuple[bool, bool]:
    one, two = (make_dispatcher(group, num_max_tokens_per_rank=8, hidden_dim=HIDDEN, dtype="float32") for _ in "ab")
    first, second = one._exchange, two._exchange
    assert first is not None
    assert second is not None
    return first._buffer is second._buffer and first._buffer is not None, first._tag != second._tag


def refused(group: Any, tokens: list[list[int]], config: dict[str, Any]) -> list[str]:
    """Return the error of each dispatch; all use one dispatcher, one after the other."""
    rank, _ = rank_and_size(group)
    dispatcher = make_dispatcher(group, **config)
    router, errors = make_weights()["router"], []
    for per_rank in tokens:
        x = inputs_of(rank, per_rank[rank])
        scores, ids = route(x, router)
        try:
            dispatcher.dispatch(x, scores, ids, torch.zeros(EXPERTS, dtype=torch.int64))
            errors.append("")
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def outgrown(group: Any, batches: list[list[int]]) -> tuple[float, bool]:
    """Return the largest error of identity experts over two layers, and whether both use the same memory."""
    rank, _ = rank_and_size(group)
    dispatchers = [make_dispatcher(group) for _ in "ab"]
    router, largest = make_weights()["router"].detach(), 0.0
    for tokens in batches:
        x = inputs_of(rank, tokens[rank])
        scores, ids = route(x, router)
        expected = x * scores.sum(-1, keepdim=True)
        for dispatcher in dispatchers:
            rows, _, metadata = dispatcher.dispatch(x, scores, ids, torch.zeros(EXPERTS, dtype=torch.int64))
            out = dispatcher.combine(rows, metadata, x)
            largest = max(largest, float((out - expected).abs().max()) if len(x) else 0.0)
    first, second = (d._exchange for d in dispatchers)
    assert first is not None
    assert second is not None
    return largest, first._buffer is second._buffer
