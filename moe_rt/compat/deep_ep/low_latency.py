"""Dispatch and combine of DeepEP's low-latency mode: rows padded by expert, weights applied where the token is.

Each pair of a token and an expert travels as a separate token, since combine has to bring the rows of a token home
one by one. A pair's weight carries the index of its token to the expert's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rt.compat.deep_ep import fp8
from moe_rt.compat.deep_ep.config import low_latency_bytes
from moe_rt.compat.deep_ep.exchange import Exchange, Received, Rows, invalid, spelled
from moe_rt.errors import InvalidInput, MoeRtError, TooManyTokens

MOST_OUTSTANDING = 2  # DeepEP has two buffers
_FIRST_INEXACT = 1 << 24  # a float32 holds every smaller integer


class LowLatencyHandle(Sequence[Any]):
    """Routing of one low-latency dispatch. Its items are those of DeepEP's handle.

    Items: packed_recv_src_info int32 [L, R * M], the source's token of each row; packed_recv_layout_range int64 [L, R],
    begin << 32 | count of the rows from each rank; M; hidden; num_experts.
    """

    def __init__(self, owner: LowLatency, items: tuple[Any, ...], topk_idx: Tensor, received: Received) -> None:
        self.owner, self.items, self.topk_idx, self.received = owner, items, topk_idx, received
        self.slots = received.weights.new_empty(0, dtype=torch.int64)  # slot of each received row
        self.arrived = False
        self.combine_buffer: Tensor | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


@dataclass
class _Packed:
    """Results of a low-latency dispatch, written when the rows have arrived."""

    x: Tensor
    scales: Tensor | None
    count: Tensor
    handle: LowLatencyHandle
    stats: Tensor | None

    def fill(self) -> None:
        received, (src_info, layout_range, most, *_) = self.handle.received, self.handle.items
        num_ranks, num_local = layout_range.shape[1], len(layout_range)
        offs = received.handle.offs
        num_rows = int(offs[-1])
        tokens = received.weights[:num_rows].long()
        rows = torch.arange(num_rows, device=offs.device)
        experts = torch.searchsorted(offs, rows.int(), right=True)
        begins = torch.nn.functional.pad(offs[:-1], (1, 0)).long()
        slots = self.handle.slots = experts * (num_ranks * most) + rows - begins[experts]
        _flat(self.x)[slots] = _bytes(received.x[0] if self.scales is not None else received.x)[:num_rows]
        if self.scales is not None:
            self.scales[experts, rows - begins[experts]] = received.x[1][:num_rows]
        src_info.view(-1)[slots] = (tokens % most).int()
        counts = torch.bincount(experts * num_ranks + tokens // most, minlength=num_local * num_ranks)
        counts = counts.view(num_local, num_ranks)
        layout_range.copy_((counts.cumsum(1) - counts) << 32 | counts)
        self.count.copy_(counts.sum(1))
        if self.stats is not None:
            self.stats.add_(self.count)
        self.handle.arrived = True


class LowLatency:
    """Low-latency mode of one deep_ep.Buffer."""

    def __init__(self, exchange: Exchange, num_rdma_bytes: int, enabled: bool) -> None:
        self._exchange, self._num_rdma_bytes, self._enabled = exchange, num_rdma_bytes, enabled
        self.rank, self.num_ranks = exchange.rank, exchange.num_ranks
        self._outstanding: list[Callable[[], None]] = []

    @property
    def num_outstanding(self) -> int:
        """Number of hooks that were returned and not called."""
        return len(self._outstanding)

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, most: int, num_experts: int, stats: Tensor | None, use_fp8: bool,
        round_scale: bool, use_ue8m0: bool, return_recv_hook: bool, async_finish: bool,
    ) -> tuple[Any, Tensor, LowLatencyHandle, Callable[[], None] | None]:  # fmt: skip
        """Return packed rows, with scales if use_fp8, the number of rows of each expert, the handle and the hook."""
        error = self._problem(x, topk_idx, most, num_experts, stats, use_fp8, round_scale, use_ue8m0)
        error = error or self._too_many(return_recv_hook, async_finish)
        hidden = x.shape[1] if isinstance(x, Tensor) and x.dim() == 2 else 0
        rows = Rows("experts", hidden, 1, num_experts, torch.bfloat16)
        if error is not None:
            sizes = (len(x), most) if isinstance(error, TooManyTokens) else (0, 0)
            self._exchange.refuse(rows, error, *sizes)
        num_tokens, num_topk = topk_idx.shape
        pairs = topk_idx.flatten().unsqueeze(1)
        first = self.rank * most
        ids = torch.arange(first, first + num_tokens, device=x.device, dtype=torch.float32).repeat_interleave(num_topk)
        sent: Any = lambda window: window.view(num_tokens, num_topk, hidden).copy_(x.unsqueeze(1))  # noqa: E731
        if use_fp8:
            parts = fp8.cast(x, round_scale, use_ue8m0)
            sent = tuple(part.repeat_interleave(num_topk, 0) for part in map(_bytes, parts))
            sent = sent[0].view(torch.float8_e4m3fn), sent[1]
        bound = max(most * num_topk, 1)
        received = self._exchange.dispatch(rows, sent, pairs, ids.unsqueeze(1), bound)
        packed = self._packed(received, topk_idx, most, hidden, num_experts, stats)
        hook = self._finish(packed.fill, return_recv_hook)
        recv_x = packed.x if packed.scales is None else (packed.x, packed.scales)
        return recv_x, packed.count, packed.handle, hook

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: LowLatencyHandle, zero_copy: bool,
        return_recv_hook: bool, async_finish: bool, out: Tensor | None,
    ) -> tuple[Tensor, Callable[[], None] | None]:  # fmt: skip
        """Return each token's sum of its experts' rows, weighted, and the hook."""
        error = self._unfit(x, topk_idx, topk_weights, handle, zero_copy, out)
        error = error or self._too_many(return_recv_hook, async_finish)
        if error is not None:
            own = isinstance(handle, LowLatencyHandle) and handle.owner is self
            self._exchange.refuse_combine(handle.received.buffer if own else self._exchange.buffers[-1], error)
        received, (*_, hidden, _) = handle.received, handle.items
        rows = handle.combine_buffer if zero_copy and handle.combine_buffer is not None else x
        y = rows.view(-1, hidden)[handle.slots]
        pairs = received.buffer.combine(y, torch.ones_like(received.weights), received.handle)
        weights = topk_weights.masked_fill(topk_idx < 0, 0.0)
        result = pairs.new_empty(len(topk_idx), hidden) if out is None else out

        def add_up() -> None:
            home = pairs.view(*topk_idx.shape, hidden)
            total = torch.zeros(len(topk_idx), hidden, dtype=torch.float32, device=x.device)
            for k in range(topk_idx.shape[1]):  # DeepEP's order
                total.addcmul_(home[:, k].float(), weights[:, k : k + 1])
            result.copy_(total)

        return result, self._finish(add_up, return_recv_hook)

    def next_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return bfloat16 [L, R * M, H] for combine with zero_copy."""
        if not isinstance(handle, LowLatencyHandle) or handle.owner is not self:
            raise self._foreign()
        if handle.combine_buffer is None:
            src_info, hidden = handle.items[0], handle.items[3]
            handle.combine_buffer = src_info.new_empty(*src_info.shape, hidden, dtype=torch.bfloat16)
        return handle.combine_buffer

    def _packed(
        self, received: Received, topk_idx: Tensor, most: int, hidden: int, num_experts: int, stats: Tensor | None
    ) -> _Packed:
        num_local, slots = num_experts // self.num_ranks, self.num_ranks * most
        like, scales = received.x, None
        if isinstance(received.x, tuple):
            like, given = received.x
            scales = given.new_empty(num_local, given.shape[1], slots).transpose(1, 2)
        count = received.handle.offs.new_full((num_local,), -1)  # until the rows have arrived
        src_info = count.new_empty(num_local, slots)
        layout_range = count.new_empty(num_local, self.num_ranks, dtype=torch.int64)
        handle = LowLatencyHandle(self, (src_info, layout_range, most, hidden, num_experts), topk_idx.clone(), received)
        return _Packed(like.new_empty(num_local, slots, hidden), scales, count, handle, stats)

    def _finish(self, fill: Callable[[], None], later: bool) -> Callable[[], None] | None:
        """Fill the results now, or return a hook that fills them once."""
        if not later:
            fill()
            return None
        called = False

        def hook() -> None:
            nonlocal called
            if called:
                raise invalid(self.rank, "hook", "a second call", "one call for each op with return_recv_hook=True")
            called = True
            self._outstanding.remove(hook)
            fill()

        self._outstanding.append(hook)
        return hook

    def _foreign(self) -> InvalidInput:
        return invalid(
            self.rank, "handle", "another buffer's, or a copy of its items", "one that low_latency_dispatch returned"
        )

    def _too_many(self, return_recv_hook: bool, async_finish: bool) -> InvalidInput | None:
        if async_finish and return_recv_hook:
            return invalid(self.rank, "async_finish", "True with return_recv_hook=True", "one of them")
        if len(self._outstanding) >= MOST_OUTSTANDING:
            got = f"a low-latency op while the hooks of {MOST_OUTSTANDING} others were not called"
            return invalid(
                self.rank, "return_recv_hook", got, f"at most {MOST_OUTSTANDING} outstanding ops; call a hook"
            )
        return None

    def _problem(
        self, x: Tensor, topk_idx: Tensor, most: int, num_experts: int, stats: Tensor | None, use_fp8: bool,
        round_scale: bool, use_ue8m0: bool,
    ) -> MoeRtError | None:  # fmt: skip
        """Return the error of a dispatch's arguments, None if DeepEP's contract holds."""
        if not self._enabled:
            return invalid(self.rank, "low_latency_mode", False, "a Buffer made with low_latency_mode=True")
        if type(num_experts) is not int or num_experts < 1 or num_experts % self.num_ranks:
            return invalid(self.rank, "num_experts", num_experts, f"a multiple of {self.num_ranks} ranks")
        multiple = 512 if use_fp8 else 128
        if not isinstance(x, Tensor) or x.dtype is not torch.bfloat16 or x.dim() != 2 or not x.is_contiguous():
            return invalid(self.rank, "x", spelled(x), "contiguous bfloat16 [T, H]")
        if x.shape[1] == 0 or x.shape[1] % multiple:
            return invalid(self.rank, "x", spelled(x), f"H a multiple of {multiple}")
        if not isinstance(topk_idx, Tensor) or topk_idx.dtype is not torch.int64 or topk_idx.dim() != 2:
            return invalid(self.rank, "topk_idx", spelled(topk_idx), f"int64 {[len(x), 'K']}")
        if len(topk_idx) != len(x) or not topk_idx.is_contiguous():
            return invalid(self.rank, "topk_idx", spelled(topk_idx), f"contiguous int64 {[len(x), 'K']}")
        if type(most) is not int or most < 1 or self.num_ranks * most % 4 or self.num_ranks * most > _FIRST_INEXACT:
            expected = f"a positive number that times {self.num_ranks} ranks is a multiple of 4 and at most 2^24"
            return invalid(self.rank, "num_max_dispatch_tokens_per_rank", most, expected)
        if len(x) > most:
            message = f"x: got {len(x)} tokens, expected at most num_max_dispatch_tokens_per_rank = {most}"
            return TooManyTokens(f"rank {self.rank}: {message}", rank=self.rank)
        if use_ue8m0 and not (use_fp8 and round_scale):
            return invalid(self.rank, "use_ue8m0", True, "use_fp8=True and round_scale=True with it")
        size = [num_experts // self.num_ranks]
        if stats is not None and (stats.dtype is not torch.int32 or list(stats.shape) != size):
            return invalid(self.rank, "cumulative_local_expert_recv_stats", spelled(stats), f"int32 {size}")
        needed = low_latency_bytes(most, x.shape[1], num_experts)
        if needed > self._num_rdma_bytes:
            expected = f"{needed}, as DeepEP needs (get_low_latency_rdma_size_hint)"
            return invalid(self.rank, "num_rdma_bytes", self._num_rdma_bytes, expected)
        return None

    def _unfit(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any, zero_copy: bool, out: Tensor | None
    ) -> InvalidInput | None:
        """Return the error of a combine's arguments, None if DeepEP's contract holds."""
        if not isinstance(handle, LowLatencyHandle) or handle.owner is not self:
            return self._foreign()
        if not handle.arrived:
            return invalid(
                self.rank, "handle", "a dispatch whose hook was never called", "its hook called before combine"
            )
        shape = [*handle.items[0].shape, handle.items[3]]
        if not isinstance(x, Tensor) or x.dtype is not torch.bfloat16 or list(x.shape) != shape:
            return invalid(self.rank, "x", spelled(x), f"contiguous bfloat16 {shape}")
        if not x.is_contiguous():
            return invalid(self.rank, "x", spelled(x), f"contiguous bfloat16 {shape}")
        if zero_copy and handle.combine_buffer is None:
            return invalid(self.rank, "zero_copy", True, "rows in get_next_low_latency_combine_buffer(handle)")
        sent = handle.topk_idx
        if not isinstance(topk_idx, Tensor) or topk_idx.shape != sent.shape or topk_idx.dtype is not torch.int64:
            return invalid(self.rank, "topk_idx", spelled(topk_idx), f"int64 {list(sent.shape)}, as dispatched")
        if not bool(((topk_idx == sent) | (topk_idx == -1)).all()):
            return invalid(self.rank, "topk_idx", "other experts", "those of the dispatch, or -1")
        if not isinstance(topk_weights, Tensor) or topk_weights.dtype is not torch.float32:
            return invalid(self.rank, "topk_weights", spelled(topk_weights), f"float32 {list(sent.shape)}")
        if topk_weights.shape != sent.shape:
            return invalid(self.rank, "topk_weights", spelled(topk_weights), f"float32 {list(sent.shape)}")
        size = [len(sent), shape[-1]]
        if out is not None and (out.dtype is not torch.bfloat16 or list(out.shape) != size or not out.is_contiguous()):
            return invalid(self.rank, "out", spelled(out), f"contiguous bfloat16 {size}")
        return None


def _bytes(t: Tensor) -> Tensor:
    """View one-byte codes as uint8, whose elements can be indexed."""
    return t.view(torch.uint8) if t.itemsize == 1 else t


def _flat(t: Tensor) -> Tensor:
    return _bytes(t).view(-1, t.shape[-1])
