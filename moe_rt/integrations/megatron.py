"""A communication manager for the flexible token dispatcher of Megatron-Core, put in place by `install`.

Importable without Megatron-Core. docs/howto/adapters.md is the guide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt.comm.buffer import Buffer
from moe_rt.comm.handle import Handle
from moe_rt.comm.shared_buffers import shared_buffer
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.heap.groups import Group

# Each makes experts count on rows that are padded to a multiple, and these are packed.
_WANT_ALIGNED_ROWS = (
    "fp8",
    "fp4",
    "moe_use_grouped_tensor",
    "use_transformer_engine_op_fuser",
    "moe_router_padding_for_quantization",
    "moe_pad_expert_input_to_capacity",
)


class MoeRtManager:
    """Does for one layer what Megatron's _DeepepManager does; its constructor takes the same arguments, and more.

    Routing probabilities travel with the rows, and experts apply them; combine adds what experts return. Exact
    gradients come home the same way.

    Args:
        group: the ranks, tensor-parallel ones included.
        num_local_experts: experts of this rank.
        router_topk: the most experts of a token (K), tensor-parallel copies included.
        num_experts: experts of the group.
        config: a TransformerConfig to check, or None.
        num_max_tokens_per_rank: the most tokens a rank dispatches at once; the same on every rank. None takes the T of
            the first dispatch, which must then be the same on every rank, and the largest there will be.
        capacity_factor: None makes room for the worst case; otherwise for this multiple of a balanced load, beyond
            which CapacityOverflow is raised on every rank: no token is ever dropped.
        static_shapes: False hands experts the real rows only, and waits once a layer for the device to say how many
            they are: Megatron's own experts need that. True hands on all rows of the receive buffer and waits for
            nothing; experts must then go by the counts, which stay on the device, and leave the other rows alone.
        timeout_s: seconds to wait for a peer.

    Raises:
        InvalidConfig: sizes do not fit, or the config asks for what packed rows cannot give.

    Attributes:
        token_probs, token_indices: [T, K] of the next dispatch; an index of -1 is none.
        dispatched_probs: [capacity] of the last dispatch.
    """

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
        self.handle: Handle | None = None
        self._options = dict(capacity_factor=capacity_factor, timeout_s=timeout_s)
        self._num_max_tokens = num_max_tokens_per_rank
        self._buffer: Buffer | None = None
        self._tag = 0

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Makes top-k entries of a map, without waiting for the device.

        A token with more than K experts makes the dispatch raise InvalidRouting, on every rank: it names expert
        num_experts for that.

        Args:
            routing_map: bool [T, ranks, local experts] or [T, E].
            probs: of the same shape; only those under the map count.
        """
        for name, t in (("routing_map", routing_map), ("probs", probs)):
            if t.numel() != t.shape[0] * self.num_experts:
                raise InvalidInput(f"{name}: got {list(t.shape)}, expected {self.num_experts} entries for each token")
        shape = (routing_map.shape[0], self.num_experts)
        mapped, probs = routing_map.reshape(shape).bool(), probs.reshape(shape)
        # Distinct keys, larger for lower ids: ids come in ascending order, whatever breaks ties on a device.
        keys = mapped * torch.arange(self.num_experts, 0, -1, dtype=torch.int32, device=mapped.device)
        largest, ids = keys.topk(self.router_topk, dim=-1)
        missing = largest == 0
        self.token_probs = probs.gather(1, ids).masked_fill(missing, 0)
        too_many = mapped.sum(1, keepdim=True) > self.router_topk
        self.token_indices = ids.masked_fill(missing, -1).masked_fill(too_many, self.num_experts)

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """[T, H] -> [capacity, H], packed by local expert. Collective; runs on the current stream whatever the flags.

        Raises:
            MoeRtError: as `moe_rt.Buffer` and its dispatch.
        """
        if self.token_indices is None or self.token_probs is None:
            raise InvalidInput("routing_map: got none, expected setup_metadata before dispatch")
        buffer = self._buffer or self._open(hidden_states)
        rows, self.dispatched_probs, self.handle = buffer.dispatch(
            hidden_states, self.token_indices, self.token_probs, tag=self._tag
        )
        self.tokens_per_expert = self.handle.num_recv_tokens_per_expert.to(torch.int64)
        return rows

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """What dispatch returned -> the rows for the experts, and the probability of each, still to be applied."""
        probs, handle = self.dispatched_probs, self.handle
        if probs is None or handle is None:
            raise InvalidInput("hidden_states: got none dispatched, expected dispatch before")
        if self.static_shapes:
            return hidden_states, probs
        count = int(handle.offs[-1])
        return _RealRows.apply(hidden_states, count), _RealRows.apply(probs, count)

    def get_number_of_tokens_per_expert(self) -> Tensor | None:
        """int64 [local experts], on the device."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """The experts' rows -> [capacity, H], which combine takes."""
        if self.static_shapes or self._buffer is None:
            return hidden_states
        return _AllRows.apply(hidden_states, self._buffer.capacity)

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """[capacity, H] -> [T, H], the sum of each token's rows. Collective; runs on the current stream."""
        if self._buffer is None or self.handle is None or self.dispatched_probs is None:
            raise InvalidInput("hidden_states: got none dispatched, expected dispatch before combine")
        ones = torch.ones_like(self.dispatched_probs, requires_grad=False)
        out = self._buffer.combine(hidden_states, ones, self.handle)
        # Held on by the graph as far as backward needs them, and by nothing else.
        self.handle = self.dispatched_probs = self.tokens_per_expert = None
        return out

    def _open(self, x: Tensor) -> Buffer:
        buffer = shared_buffer(
            self.group,
            num_max_tokens_per_rank=x.shape[0] if self._num_max_tokens is None else self._num_max_tokens,
            hidden=x.shape[1],
            num_topk=self.router_topk,
            num_experts=self.num_experts,
            dtype=x.dtype,
            **self._options,
        )
        if self.num_local_experts * buffer.num_ranks != self.num_experts:
            expected = f"{self.num_experts} experts divided by {buffer.num_ranks} ranks"
            raise InvalidConfig(f"num_local_experts: got {self.num_local_experts}, expected {expected}")
        self._buffer, self._tag = buffer, buffer.new_tag()
        return buffer


def install(dispatcher: Any, **options: Any) -> MoeRtManager:
    """Makes a MoEFlexTokenDispatcher communicate through moe_rt; call it alike on every rank, before the first forward.

    Args:
        dispatcher: the `token_dispatcher` of a Megatron MoELayer.
        options: num_max_tokens_per_rank, capacity_factor, static_shapes and timeout_s of MoeRtManager.

    Returns:
        The manager, now the dispatcher's `_comm_manager`.
    """
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
    """t and rows after it that are unspecified; filling them would cost as much memory traffic as the worst case."""
    out = t.new_empty(capacity, *t.shape[1:])
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
