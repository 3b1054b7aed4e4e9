"""A communication manager for the flexible token dispatcher of Megatron-Core, installed before models are built.

    from moe_rt.integrations import megatron
    megatron.replace_deepep()

The module can be imported without Megatron-Core. docs/howto/adapters.md is the guide.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.pool import GrowingOptions
from moe_rt.config.options import Sums
from moe_rt.engine.storage import blank
from moe_rt.errors import InvalidConfig, InvalidInput, MissingPackage
from moe_rt.group.groups import Group
from moe_rt.integrations.exchange import Exchanged, LayerExchange

# Settings that make experts expect rows padded to a multiple; moe_rt's rows are packed.
_WANT_ALIGNED_ROWS = (
    "fp8",
    "fp4",
    "moe_use_grouped_tensor",
    "use_transformer_engine_op_fuser",
    "moe_router_padding_for_quantization",
    "moe_pad_expert_input_to_capacity",
    "moe_ncclep_zero_copy",
)
_HOW_TO_BUILD = (
    "moe_rt.integrations.megatron.replace_deepep() before the model is built, with --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend deepep"
)


class MoeRtManager:
    """Communication manager of one layer, in place of Megatron's _DeepepManager, whose arguments it accepts.

    Routing probabilities travel with the rows, and experts apply them; combine sums the experts' outputs. Gradients are
    exact.

    Args:
        group: the ranks, including tensor-parallel ones.
        num_local_experts: experts of this rank.
        router_topk: maximum number of experts of a token (K), including tensor-parallel copies.
        num_experts: experts of the group (E).
        config: a TransformerConfig to check, or None.
        num_max_tokens_per_rank: maximum number of tokens a rank dispatches in one call; identical on every rank. None
            sizes buffers for the largest batch of any rank, and grows them; CUDA ranks then compare sizes each time.
        capacity_factor: None sizes recv_x for the worst case; else for this multiple of a balanced load, beyond which
            every rank raises CapacityOverflow: no token is ever dropped.
        static_shapes: False passes only the real rows to experts, and waits once per layer for the device to report
            their number; Megatron's own experts need that. True passes all rows of recv_x without waiting; experts must
            then use the counts, which stay on the device, and ignore the other rows.
        timeout_s: seconds to wait for a peer.
        sums: see `moe_rt.Buffer`.

    Two fields of `config` are used. moe_flex_dispatcher_num_sms limits the multiprocessors that an op may fill.
    moe_expert_rank_capacity_factor is Megatron's budget: rows beyond it are dropped, and `over_budget` is set. Then
    Megatron's PagedStashRunner sets this manager's factor to None and repeats the step with capacity for all rows.

    Raises:
        InvalidConfig: sizes are invalid, or the config needs padded rows, or capacity_factor and the config's budget
            are both given.

    Attributes:
        token_probs, token_indices: [T, K] of the next dispatch; an index of -1 means no expert.
        dispatched_probs: [capacity] of the last dispatch.
        moe_expert_rank_capacity_factor: budget of the next dispatch: the config's, or None.
        over_budget: bool [1] on the device: True if this rank has dropped rows since Megatron last cleared it. Exists
            only if the config has a moe_expert_rank_capacity_factor.
    """

    over_budget: Tensor

    def __init__(
        self,
        group: Group,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any = None,
        *,
        num_max_tokens_per_rank: int | None = None,
        capacity_factor: float | None = None,
        static_shapes: bool = False,
        timeout_s: float = 120.0,
        sums: Sums = "ranked",
    ) -> None:
        for name in _WANT_ALIGNED_ROWS:
            if getattr(config, name, None):
                raise InvalidConfig(f"{name}: got {getattr(config, name)}, expected it unset: rows come without gaps")
        self.group, self.num_local_experts, self.num_experts = group, num_local_experts, num_experts
        self.router_topk, self.static_shapes = router_topk, static_shapes
        self.token_probs: Tensor | None = None
        self.token_indices: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self.tokens_per_expert: Tensor | None = None
        self._received: Exchanged | None = None
        budget = self.moe_expert_rank_capacity_factor = getattr(config, "moe_expert_rank_capacity_factor", None)
        if budget is not None and capacity_factor is not None:
            expected = f"None with moe_expert_rank_capacity_factor = {budget}"
            raise InvalidConfig(f"capacity_factor: got {capacity_factor}, expected {expected}")
        options = GrowingOptions(
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            capacity_factor=capacity_factor,
            timeout_s=timeout_s,
            sums=sums,
            num_sms=getattr(config, "moe_flex_dispatcher_num_sms", None),
        )
        sizes: dict[str, Any] = dict(num_experts=num_experts, num_topk=router_topk)
        self._exchange = LayerExchange(group, options=options, **sizes)
        self._budgeted: LayerExchange | None = None
        if budget is not None:
            dropping = replace(options, capacity_factor=budget, overflow="drop")
            self._budgeted = LayerExchange(group, options=dropping, **sizes)

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Convert a routing map to top-k entries, without waiting for the device.

        A token with more than K experts gets the invalid id num_experts, so that dispatch raises InvalidRouting on
        every rank.

        Args:
            routing_map: bool [T, ranks, local experts] or [T, E].
            probs: probabilities, in the same shape; only those under the map count.

        Raises:
            InvalidInput: a tensor does not have E entries for each token.
        """
        for name, t in (("routing_map", routing_map), ("probs", probs)):
            if t.numel() != t.shape[0] * self.num_experts:
                raise InvalidInput(f"{name}: got {list(t.shape)}, expected {self.num_experts} entries for each token")
        shape = (routing_map.shape[0], self.num_experts)
        mapped, probs = routing_map.reshape(shape).bool(), probs.reshape(shape)
        # Keys are distinct and larger for lower ids, so ids are in ascending order on every device.
        keys = mapped * torch.arange(self.num_experts, 0, -1, dtype=torch.int32, device=mapped.device)
        largest, ids = keys.topk(self.router_topk, dim=-1)
        missing = largest == 0
        self.token_probs = probs.gather(1, ids).masked_fill(missing, 0)
        too_many = mapped.sum(1, keepdim=True) > self.router_topk
        self.token_indices = ids.masked_fill(missing, -1).masked_fill(too_many, self.num_experts)

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Dispatch [T, H] -> [capacity, H], packed by local expert. Collective; always runs on the current stream.

        Raises:
            InvalidInput: setup_metadata was not called before.
            MoeRtError: see `moe_rt.Buffer` and its dispatch.
        """
        if self.token_indices is None or self.token_probs is None:
            raise InvalidInput("routing_map: got none, expected setup_metadata before dispatch")
        num_ranks = self._exchange.num_ranks
        if self.num_local_experts * num_ranks != self.num_experts:
            expected = f"{self.num_experts} experts divided by {num_ranks} ranks"
            raise InvalidConfig(f"num_local_experts: got {self.num_local_experts}, expected {expected}")
        budgeted = self._budgeted if self.moe_expert_rank_capacity_factor is not None else None
        received = (budgeted or self._exchange).dispatch(hidden_states, self.token_indices, self.token_probs)
        if budgeted is not None:
            self._count_dropped(received.handle.num_dropped)
        self._received, self.dispatched_probs = received, received.weights
        self.tokens_per_expert = received.handle.num_recv_tokens_per_expert.to(torch.int64)
        return received.rows

    def _count_dropped(self, num_dropped: Tensor) -> None:
        """Update over_budget. It stays the same tensor, because Megatron clears it and CUDA graphs write to it."""
        dropped = (num_dropped > 0).view(1)
        if hasattr(self, "over_budget"):
            self.over_budget |= dropped
        else:
            self.over_budget = dropped

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' rows, given dispatch's result, and each row's probability, which is not yet applied."""
        probs, received = self.dispatched_probs, self._received
        if probs is None or received is None:
            raise InvalidInput("hidden_states: got none dispatched, expected dispatch before")
        if self.static_shapes:
            return hidden_states, probs
        count = int(received.handle.offs[-1])
        return _RealRows.apply(hidden_states, count), _RealRows.apply(probs, count)

    def get_number_of_tokens_per_expert(self) -> Tensor | None:
        """Return the row counts of the last dispatch, int64 [local experts], on the device."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Extend the experts' output rows to [capacity, H], which combine takes."""
        if self.static_shapes or self._received is None:
            return hidden_states
        return _AllRows.apply(hidden_states, self._received.rows.shape[0])

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Combine [capacity, H] -> [T, H], the sum of each token's rows. Collective; runs on the current stream."""
        if self._received is None:
            raise InvalidInput("hidden_states: got none dispatched, expected dispatch before combine")
        ones = torch.ones_like(self._received.weights, requires_grad=False)  # experts have applied the probabilities
        out = replace(self._received, weights=ones).combine(hidden_states)
        # Drop these references: autograd's graph keeps what backward needs.
        self._received = self.dispatched_probs = self.tokens_per_expert = None
        return out


def replace_deepep(**options: Any) -> None:
    """Make all dispatchers that are built for DeepEP from now on use moe_rt. DeepEP need not be installed.

    Call it on every rank with the same options, before the model is built. A later call changes the options.

    Args:
        options: num_max_tokens_per_rank, capacity_factor, static_shapes, timeout_s and sums of MoeRtManager.

    Raises:
        MissingPackage: Megatron-Core is missing, or has no flexible dispatcher for DeepEP.
    """
    try:
        from megatron.core.transformer.moe import token_dispatcher
    except ImportError as error:
        expected = "expected Megatron-Core; pip install megatron-core"
        raise MissingPackage(f"megatron.core: got {type(error).__name__}: {error}, {expected}") from error
    if not hasattr(token_dispatcher, "_DeepepManager"):
        raise MissingPackage("megatron.core: got none with a _DeepepManager, expected 0.11 or later")
    token_dispatcher._DeepepManager = partial(MoeRtManager, **options)


def install(dispatcher: Any, **options: Any) -> MoeRtManager:
    """Make a MoEFlexTokenDispatcher use moe_rt. Call it on every rank with the same options, before the first forward.

    It is for existing layers, which were built with an installed back end of Megatron; `replace_deepep` needs none.

    Args:
        dispatcher: the `token_dispatcher` of a Megatron MoELayer.
        options: see `replace_deepep`.

    Returns:
        The manager, now the dispatcher's `_comm_manager`.

    Raises:
        InvalidConfig: the dispatcher has another type; or see MoeRtManager.
    """
    if not hasattr(dispatcher, "_comm_manager"):
        raise InvalidConfig(
            f"dispatcher: got {type(dispatcher).__name__}, expected MoEFlexTokenDispatcher: {_HOW_TO_BUILD}"
        )
    config, copies = dispatcher.config, dispatcher.tp_size
    manager = MoeRtManager(
        dispatcher.tp_ep_group,
        num_local_experts=dispatcher.num_local_experts,
        router_topk=copies * config.moe_router_topk,
        num_experts=copies * config.num_moe_experts,
        config=config,
        **options,
    )
    dispatcher._comm_manager = manager
    dispatcher.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.token_indices"]
    return manager


def _with_tail(t: Tensor, capacity: int) -> Tensor:
    """Append unspecified rows to t, up to `capacity`: filling them would cost the memory traffic of the worst case."""
    out = blank(t.new_empty(capacity, *t.shape[1:]))
    out[: t.shape[0]] = t
    return out


class _RealRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int) -> Tensor:
        ctx.capacity = rows.shape[0]
        return rows[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _with_tail(grads[0], ctx.capacity), None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, capacity: int) -> Tensor:
        ctx.count = rows.shape[0]
        return _with_tail(rows, capacity)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][: ctx.count], None
