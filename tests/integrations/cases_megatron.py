"""Functions that ranks run in the tests of the Megatron manager: a stand-in for its caller, against a dense layer."""

from __future__ import annotations

from types import SimpleNamespace
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

from moe_rt.integrations.megatron import MoeRtManager, install


class FlexDispatcher:
    """The six steps of MoEFlexTokenDispatcher in their order, as far as they concern the manager."""

    _comm_manager: Any = None

    def __init__(self, group: Any, tp_size: int) -> None:
        _, size = rank_and_size(group)
        self.tp_ep_group, self.tp_size, self.ep_size = group, tp_size, size // tp_size
        self.num_local_experts = EXPERTS // self.ep_size
        self.config = SimpleNamespace(moe_router_topk=TOPK, num_moe_experts=EXPERTS, fp8=None)

    def spread(self, t: Tensor) -> Tensor:
        """[T, E] -> [T, ranks, local experts]: a tensor-parallel rank gets the entries of its expert-parallel rank."""
        shape = (t.shape[0], self.ep_size, 1, self.num_local_experts)
        wide = t.reshape(shape).expand(-1, -1, self.tp_size, -1)
        return wide.reshape(t.shape[0], self.tp_size * self.ep_size, self.num_local_experts).contiguous()

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self.hidden_shape = hidden.shape
        self._comm_manager.setup_metadata(self.spread(routing_map), self.spread(probs))
        return hidden.view(-1, self.hidden_shape[-1]), self._comm_manager.token_probs

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._comm_manager.dispatch(hidden, True, True)
        return rows, self._comm_manager.dispatched_probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, permuted_probs = self._comm_manager.get_permuted_hidden_states_by_experts(hidden)
        return rows, self._comm_manager.get_number_of_tokens_per_expert(), permuted_probs

    def combine_preprocess(self, hidden: Tensor) -> Tensor:
        return self._comm_manager.get_restored_hidden_states_by_experts(hidden)

    def token_combine(self, hidden: Tensor) -> Tensor:
        return self._comm_manager.combine(hidden, True, True)

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        return hidden.view(self.hidden_shape)


def make_weights() -> dict[str, Tensor]:
    shapes = {"fc1": (EXPERTS, INTERMEDIATE, HIDDEN), "fc2": (EXPERTS, HIDDEN, INTERMEDIATE)}
    return {
        name: numbers(seed, *shape, scale=0.3).requires_grad_() for seed, (name, shape) in enumerate(shapes.items())
    }


def routing_of(rank: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return a map as capacity dropping leaves it, with TOPK experts or fewer per token; and probs, a leaf."""
    scores = numbers(200 + rank, num_tokens, EXPERTS).softmax(-1)
    kept = numbers(300 + rank, num_tokens, TOPK) > -0.8
    routing_map = torch.zeros(num_tokens, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOPK, -1).indices, kept)
    return routing_map, (scores * routing_map).requires_grad_()


def dense_moe(x: Tensor, routing_map: Tensor, probs: Tensor, w: dict[str, Tensor]) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        y = F.linear(F.silu(F.linear(x, w["fc1"][e])) * probs[:, e, None], w["fc2"][e])
        out = out + routing_map[:, e, None] * y
    return out


def experts_by_counts(rows: Tensor, counts: Tensor, probs: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Apply the experts as grouped products over all rows, split by the counts."""
    offs = counts.cumsum(0, dtype=torch.int32)
    h = F.silu(F.grouped_mm(rows, w["fc1"].transpose(1, 2), offs=offs)) * probs[:, None]
    return F.grouped_mm(h, w["fc2"].transpose(1, 2), offs=offs)


def experts_by_splits(rows: Tensor, counts: Tensor, probs: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Apply one expert after the other, as Megatron's SequentialMLP does; rows without tokens are an error."""
    split, sizes = [], counts.tolist()
    for e, (h, p) in enumerate(zip(torch.split(rows, sizes), torch.split(probs, sizes), strict=True)):
        split.append(F.linear(F.silu(F.linear(h, w["fc1"][e])) * p[:, None], w["fc2"][e]))
    return torch.cat(split)


def own_experts(w: dict[str, Tensor], rank: int, size: int, tp_size: int) -> dict[str, Tensor]:
    """Return the rank's block of experts, and of each expert its tensor-parallel share of the inner dimension."""
    ep_rank, tp_rank = divmod(rank, tp_size)
    ep_size = size // tp_size
    return {
        "fc1": w["fc1"].chunk(ep_size)[ep_rank].chunk(tp_size, 1)[tp_rank],
        "fc2": w["fc2"].chunk(ep_size)[ep_rank].chunk(tp_size, 2)[tp_rank],
    }


def equal_dense(
    group: Any, tokens: list[int], options: dict[str, Any], tp_size: int = 1, dispatcher: Any = None
) -> dict[str, float]:
    """Return differences of output and all gradients between the six steps and a dense layer."""
    rank, size = rank_and_size(group)
    dispatcher = dispatcher or FlexDispatcher(group, tp_size)
    manager = install(dispatcher, **options)
    assert dispatcher._comm_manager is manager
    shares = own_experts(make_weights(), rank, size, tp_size)
    own = {name: t.detach().clone().requires_grad_() for name, t in shares.items()}
    x = inputs_of(rank, tokens[rank]).view(-1, 1, HIDDEN).requires_grad_()
    routing_map, probs = routing_of(rank, tokens[rank])

    hidden, token_probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
    rows, dispatched_probs = dispatcher.token_dispatch(hidden, token_probs)
    counts = manager.get_number_of_tokens_per_expert()
    assert counts is not None
    assert counts.dtype is torch.int64
    poison(rows, counts)
    poison(dispatched_probs, counts)
    rows, counts, permuted_probs = dispatcher.dispatch_postprocess(rows, dispatched_probs)
    run = experts_by_counts if manager.static_shapes else experts_by_splits
    y = dispatcher.combine_preprocess(run(rows, counts, permuted_probs, own))
    poison(y, counts)
    out = dispatcher.combine_postprocess(dispatcher.token_combine(y))
    assert manager.dispatched_probs is None
    weighted_sum(out).backward()
    got = {"out": out.detach(), "x": x.grad, "probs": probs.grad, **{name: t.grad for name, t in own.items()}}

    whole, expected = make_weights(), {}
    for r in range(size):
        xr, (map_r, probs_r) = inputs_of(r, tokens[r]).requires_grad_(), routing_of(r, tokens[r])
        out_r = dense_moe(xr, map_r, probs_r, whole)
        weighted_sum(out_r).backward()
        if r == rank:
            expected = {"out": out_r.detach().view(-1, 1, HIDDEN), "x": xr.grad.view(-1, 1, HIDDEN)}
            expected["probs"] = probs_r.grad
    grads = own_experts({name: t.grad for name, t in whole.items()}, rank, size, tp_size)
    return differences(got, {**expected, **grads})


def too_many_experts(group: Any) -> list[str]:
    """Return the error of a dispatch in which one token of rank 0 has an expert too many, and of a valid one."""
    rank, size = rank_and_size(group)
    manager = MoeRtManager(group, EXPERTS // size, TOPK, EXPERTS, num_max_tokens_per_rank=4)
    x, errors = inputs_of(rank, 4), []
    for extra in (True, False):
        routing_map = torch.zeros(4, EXPERTS, dtype=torch.bool)
        routing_map[:, :TOPK] = True
        routing_map[1, TOPK] = extra and rank == 0
        manager.setup_metadata(routing_map, routing_map.float())
        try:
            manager.dispatch(x)
            errors.append("")
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def installed_twice(group: Any) -> bool:
    dispatcher = FlexDispatcher(group, 1)
    install(dispatcher, num_max_tokens_per_rank=4)
    x = inputs_of(rank_and_size(group)[0], 3)
    routing_map = torch.zeros(3, EXPERTS, dtype=torch.bool)
    routing_map[:, 1] = True
    for options in ({"num_max_tokens_per_rank": 4}, {}):
        manager = install(dispatcher, **options)
        hidden, probs = dispatcher.dispatch_preprocess(x, routing_map, routing_map.float())
        rows, probs = dispatcher.token_dispatch(hidden, probs)
        rows, _, _ = dispatcher.dispatch_postprocess(rows, probs)
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
        if dispatcher._comm_manager is not manager or not torch.equal(out, x):
            return False
    return True
