"""DeepEP's `Buffer`: its arguments, results and refusals, over the exchanges of normal.py and low_latency.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from moe_rt.compat.deep_ep.config import Config, low_latency_hint, queue_of
from moe_rt.compat.deep_ep.exchange import Exchange, ungraded
from moe_rt.compat.deep_ep.layout import Layout, per_domain
from moe_rt.compat.deep_ep.low_latency import LowLatency, LowLatencyHandle
from moe_rt.compat.deep_ep.normal import DispatchHandle, Normal, biases
from moe_rt.compat.deep_ep.operands import invalid, spelled
from moe_rt.compat.deep_ep.utils.event import EventHandle, EventOverlap, event_of
from moe_rt.errors import GroupClosed, InvalidConfig
from moe_rt.group.groups import Group

# Chunks of DeepEP's queues by the largest number of ranks that they are recommended for.
_DISPATCH = {2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 16: (36, 288, 20, 128), 24: (32, 288, 8, 128)}
_COMBINE = {2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128), 24: (1, 288, 8, 128)}
_MASKS = "enable_shrink=False; moe_rt.elastic continues without dead ranks"


@functools.cache
def _default_config(num_ranks: int, num_sms: int) -> Config:
    return queue_of(_DISPATCH, num_ranks, num_sms)


class Buffer:
    """Communication buffer of one expert-parallel group, with the methods of DeepEP's class of this name.

    An op is complete when it returns: CPU ranks have no streams. Operands are checked as DeepEP's are, and wrong ones
    raise on every rank.

    Args:
        group: a torch process group, or any other group that moe_rt.Buffer takes.
        num_nvl_bytes, num_rdma_bytes: DeepEP's sizes. An op that DeepEP would refuse for them is refused; moe_rt
            allocates what it needs.
        low_latency_mode: allow the low-latency methods.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: ignored, since ranks share memory.
        explicitly_destroy: require `destroy()`; otherwise the buffer closes when it is garbage.
        enable_shrink, comm: refused.
        timeout_s: seconds to wait for a peer, not an argument of DeepEP's.

    Raises:
        InvalidConfig: enable_shrink or comm was given, or the group is none.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Group,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        timeout_s: float = 120.0,
    ) -> None:
        if enable_shrink:
            raise InvalidConfig(f"enable_shrink: got True, expected {_MASKS}")
        if comm is not None:
            raise InvalidConfig(f"comm: got {type(comm).__name__}, expected None and a torch process group")
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = int(num_nvl_bytes), int(num_rdma_bytes)
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self._exchanges = Exchange(group, timeout_s), Exchange(group, timeout_s)
        self._normal = Normal(self._exchanges[0], self.num_nvl_bytes)
        self._low_latency = LowLatency(self._exchanges[1], self.num_rdma_bytes, low_latency_mode)
        self.rank, self.group_size = self._normal.rank, self._normal.num_ranks
        self._destroyed = False

    def destroy(self) -> None:
        """Close the buffer. Local.

        Raises:
            InvalidInput: it was not made with explicitly_destroy=True, or a hook was never called.
        """
        if not self.explicitly_destroy:
            raise invalid(
                self.rank, "destroy", "explicitly_destroy=False", "a Buffer made with explicitly_destroy=True"
            )
        self._destroyed = True
        for exchange in self._exchanges:
            exchange.close()
        if names := [hook.name for hook in self._low_latency.outstanding]:
            raise invalid(self.rank, "destroy", f"hooks never called of {', '.join(names)}", "every hook called")

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: rows may be fp8."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number of SMs of recommended configs. It tunes nothing on CPU ranks."""
        if new_num_sms % 2:
            raise InvalidConfig(f"new_num_sms: got {new_num_sms}, expected an even number")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the num_rdma_bytes that DeepEP recommends for low-latency ops of these sizes."""
        return low_latency_hint(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a config for dispatch; any number of ranks has one."""
        return queue_of(_DISPATCH, num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return a config for combine; any number of ranks has one."""
        return queue_of(_COMBINE, num_ranks, Buffer.num_sms)

    def get_comm_stream(self) -> Any:
        """Return the current stream, on which ops run. CPU ranks have none: InvalidConfig."""
        if not torch.cuda.is_initialized():
            raise InvalidConfig("get_comm_stream: got a buffer of CPU ranks, which have no streams; expected no call")
        return torch.cuda.current_stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> NoReturn:
        """Raise InvalidConfig: moe_rt's memory has no raw part. `moe_rt.Buffer.token_window` lends memory for rows."""
        raise InvalidConfig("get_local_buffer_tensor: got a call, expected moe_rt.Buffer.token_window")

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count a routing int64 [T, K]. Local.

        Returns:
            int32 [R], tokens for each rank; int32 [R / 8], tokens for each domain of 8 ranks, None up to 8 ranks;
            int32 [E], entries of each expert; bool [T, R], True if the token visits the rank; and the event.
        """
        if num_experts < 1 or num_experts % self.group_size:
            raise invalid(self.rank, "num_experts", num_experts, f"a multiple of {self.group_size} ranks")
        if not isinstance(topk_idx, Tensor) or topk_idx.dtype is not torch.int64 or topk_idx.dim() != 2:
            raise invalid(self.rank, "topk_idx", spelled(topk_idx), "int64 [T, K]")
        layout = self._normal.known.compute(topk_idx, num_experts, self.group_size)
        event = event_of(async_finish, topk_idx)
        return layout.per_rank, per_domain(layout.in_rank), layout.per_expert, layout.in_rank, event

    @ungraded
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]:
        """Send each token once to each rank of its experts. Collective.

        Args:
            x: bfloat16 [T, H], or fp8 [T, H] with float32 or int32 scales [T, S].
            handle: repeats the dispatch that returned it, for other rows; without topk_idx and topk_weights.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert: as
                get_dispatch_layout returns them.
            topk_idx, topk_weights: int64 and float32 [T, K].
            expert_alignment: rounds the returned counts up.
            num_worst_tokens: returns this number of rows and an empty list, so that the host reads no count.

        Returns:
            Rows of the received tokens, in the order source rank, token; int64 [N, K], this rank's expert ids or -1;
            float32 [N, K], their weights or 0; the number of rows of each expert; the handle; the event.

        Raises:
            MoeRtError: see moe_rt.Buffer.dispatch. Wrong operands raise InvalidInput on every rank.
        """
        self._require_open()
        config = config or _default_config(self.group_size, Buffer.num_sms)
        if handle is not None:
            if not isinstance(handle, DispatchHandle) or topk_idx is not None or topk_weights is not None:
                expected = "that of a dispatch, without topk_idx and topk_weights"
                self._exchanges[0].refuse(None, invalid(self.rank, "handle", spelled(handle), expected))
            recv_x = self._normal.again(x, handle, config)
            return recv_x, None, None, None, None, event_of(async_finish, recv_x)
        layout: Any = Layout(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)  # type: ignore[arg-type]
        recv_x, ids, weights, counts, returned = self._normal.dispatch(
            x, topk_idx, topk_weights, layout, num_tokens_per_rdma_rank, expert_alignment, num_worst_tokens, config
        )
        return recv_x, ids, weights, counts, returned, event_of(async_finish, recv_x)

    @ungraded
    def combine(
        self,
        x: Tensor,
        handle: DispatchHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Add the rows of each token, without weights. Collective.

        Args:
            x: bfloat16 [N, H], a row for each received one.
            handle: as dispatch returned it.
            topk_weights: float32 [N, K], added in the same way.
            bias: one or two bfloat16 [T, H], added before the sum is rounded.

        Returns:
            bfloat16 [T, H]; float32 [T, K], or None; the event.
        """
        self._require_open()
        out, weights = self._normal.combine(x, handle, topk_weights, biases(bias))
        return out, weights, event_of(async_finish, out)

    def internode_dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Call `dispatch`, which serves several hosts too (heap "ucx")."""
        return self.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
            topk_weights, expert_alignment, 0, config, previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip

    internode_combine = combine

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: low-latency ops have memory of their own, which normal ops do not touch."""

    @ungraded
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Send each token to each of its experts, into rows padded by expert. Collective.

        Args:
            x: bfloat16 [T, H], T at most num_max_dispatch_tokens_per_rank (M), which is the same on all ranks.
            topk_idx: int64 [T, K].
            cumulative_local_expert_recv_stats: int32 [L], to which the received counts are added.
            dispatch_wait_recv_cost_stats: int64 [R], to which nanoseconds of waiting for each rank are added.
            use_fp8, round_scale, use_ue8m0: cast rows to fp8, with float32 scales, powers of two, or their exponents.
            return_recv_hook: results are written when the returned hook is called, exactly once.

        Returns:
            bfloat16 [L, R * M, H], or fp8 with scales [L, R * M, S] whose rows are contiguous along dimension 1;
            int32 [L], rows of each expert; the handle; the event; the hook or None.

        Raises:
            MoeRtError: see moe_rt.Buffer.dispatch. Wrong operands raise InvalidInput on every rank.
        """
        self._require_open()
        recv_x, count, handle, hook = self._low_latency.dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats, use_fp8, round_scale, use_ue8m0, return_recv_hook, async_finish,
        )  # fmt: skip
        return recv_x, count, handle, event_of(async_finish, count), hook

    @ungraded
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Add the rows of each token, times the weights, in the order of its experts. Collective.

        Args:
            x: bfloat16 [L, R * M, H], in the slots of dispatch.
            topk_idx, topk_weights: int64 and float32 [T, K]; the ids of dispatch, or -1 to leave one out.
            use_logfmt: refused.
            zero_copy: rows are in get_next_low_latency_combine_buffer(handle), not in x.
            return_recv_hook: the result is written when the returned hook is called, exactly once.
            out: bfloat16 [T, H], written and returned.
            combine_wait_recv_cost_stats: as for dispatch.

        Returns:
            bfloat16 [T, H]; the event; the hook or None.
        """
        self._require_open()
        if use_logfmt:
            raise InvalidConfig("use_logfmt: got True, expected False: rows return as bfloat16")
        combined, hook = self._low_latency.combine(
            x, topk_idx, topk_weights, handle, zero_copy, return_recv_hook, async_finish, out,
            combine_wait_recv_cost_stats,
        )  # fmt: skip
        return combined, event_of(async_finish, combined), hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return bfloat16 [L, R * M, H], to be filled for low_latency_combine(..., handle, zero_copy=True)."""
        return self._low_latency.next_combine_buffer(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> NoReturn:
        """Raise InvalidConfig: ranks are not masked."""
        raise InvalidConfig(f"low_latency_update_mask_buffer: got a call, expected {_MASKS}")

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> NoReturn:
        """Raise InvalidConfig: ranks are not masked."""
        raise InvalidConfig(f"low_latency_query_mask_buffer: got a call, expected {_MASKS}")

    def low_latency_clean_mask_buffer(self) -> NoReturn:
        """Raise InvalidConfig: ranks are not masked."""
        raise InvalidConfig(f"low_latency_clean_mask_buffer: got a call, expected {_MASKS}")

    def _require_open(self) -> None:
        if self._destroyed:
            raise GroupClosed(f"rank {self.rank}: got an op on a destroyed deep_ep.Buffer, expected a living one")
