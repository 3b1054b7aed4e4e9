"""Dispatch and combine of DeepEP's low-latency mode: rows padded by expert, weights applied where the token is.

moe_rt/buffer/packed.py has the ops. A hook runs an op's second half. One op of a buffer is under way at a time, so the
second half of an earlier op runs when the next one begins, and its hook then only says that the results are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from moe_rt.buffer import packed
from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.compat.deep_ep import fp8
from moe_rt.compat.deep_ep.config import low_latency_bytes
from moe_rt.compat.deep_ep.exchange import Exchange, Rows
from moe_rt.compat.deep_ep.layout import copied_ids, describe_rows, ids_equal, names_others, put_in_columns
from moe_rt.compat.deep_ep.operands import invalid, spelled, twice, wrong_ids, wrong_tensor
from moe_rt.errors import InvalidInput, MoeRtError, TooManyTokens

MOST_OUTSTANDING = 2  # DeepEP has two buffers
_MOST_ROWS = 1 << 31  # rows are counted in 32 bits
_ALIGNED = 16  # bytes, of an output that kernels write in vectors


class Size(NamedTuple):
    """Parts that all ops of one size use. They are made when DeepEP would accept the size.

    Attributes:
        shape: of the packed rows, [L, R * M, H].
    """

    rows: Rows
    shape: tuple[int, int, int]


class LowLatencyHandle(Sequence[Any]):
    """Routing of one low-latency dispatch. Its items are those of DeepEP's handle, computed when they are read.

    Items: packed_recv_src_info int32 [L, R * M], the source's token of each row; packed_recv_layout_range int64 [L, R],
    begin << 32 | count of the rows from each rank; M; hidden; num_experts.
    """

    complete = False  # the rows are here
    arrived = False  # and the caller knows, since it has called the hook
    combine_buffer: Tensor | None = None
    _described: tuple[Tensor, Tensor] | None = None

    def __init__(self, owner: LowLatency, size: Size, ids: bytes | Tensor, buffer: Buffer, plan: Handle) -> None:
        self.owner, self.size, self.ids, self.buffer, self.plan = owner, size, ids, buffer, plan

    def routes(self, topk_idx: Any) -> bool:
        """True if these are the ids of the dispatch, in a contiguous tensor."""
        return (
            isinstance(topk_idx, Tensor) and topk_idx.dtype is torch.int64 and topk_idx.is_contiguous()
            and topk_idx.shape == self.plan.send_plan.shape and ids_equal(self.ids, topk_idx)
        )  # fmt: skip

    def describe(self) -> None:
        """Write the items that were read before the rows were here."""
        self.complete = True
        if self._described is not None:
            describe_rows(self.buffer, self.plan, *self._described)

    def _items(self) -> tuple[Any, ...]:
        (num_local, slots, hidden), offs = self.size.shape, self.plan.offs
        if self._described is None:
            ranges = offs.new_empty(num_local, self.owner.num_ranks, dtype=torch.int64)
            self._described = offs.new_empty(num_local, slots), ranges
            if self.complete:
                self.describe()
        return *self._described, slots // self.owner.num_ranks, hidden, self.size.rows.num_experts

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, index: Any) -> Any:
        return self._items()[index]


class Hook:
    """The second half of a low-latency op, which is called once.

    Args:
        name: of the op.
        half: the op, which has begun.
        after: called when the outputs are there.
    """

    def __init__(self, owner: LowLatency, name: str, half: packed.Half, after: Callable[[], None]) -> None:
        self._owner, self.name, self._half, self._after = owner, name, half, after
        self._complete = self._called = False
        self.handle: LowLatencyHandle | None = None  # of a dispatch, which the hook makes ready for combine

    def complete(self) -> None:
        """Run the second half, once."""
        if not self._complete:
            self._complete = True
            self._half.finish()
            with torch.inference_mode():  # where the outputs may have been made
                self._after()

    def __call__(self) -> None:
        """Complete the op. Raises InvalidInput at a second call."""
        if self._called:
            expected = "one call for each op with return_recv_hook=True"
            raise invalid(self._owner.rank, f"{self.name}: hook", "a second call", expected)
        self._called = True
        self._owner.outstanding.remove(self)
        self.complete()
        if self.handle is not None:
            self.handle.arrived = True


class LowLatency:
    """Low-latency mode of one deep_ep.Buffer."""

    def __init__(self, exchange: Exchange, num_rdma_bytes: int, enabled: bool) -> None:
        self._exchange, self._num_rdma_bytes, self._enabled = exchange, num_rdma_bytes, enabled
        self.rank, self.num_ranks = exchange.rank, exchange.num_ranks
        self.outstanding: list[Hook] = []  # not called yet
        self._sizes: dict[tuple[Any, ...], Size] = {}
        self._ones = torch.ones(0, 0)  # weights, which stay at home until combine

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, most: int, num_experts: int, stats: Tensor | None, waits: Tensor | None,
        use_fp8: bool, round_scale: bool, use_ue8m0: bool, return_recv_hook: bool, async_finish: bool,
    ) -> tuple[Any, Tensor, LowLatencyHandle, Callable[[], None] | None]:  # fmt: skip
        """Return packed rows, with scales if use_fp8, the number of rows of each expert, the handle and the hook."""
        name = "low_latency_dispatch"
        size = self._wrong_tensors(x, topk_idx) or self._size(
            x, topk_idx, most, num_experts, (use_fp8, round_scale, use_ue8m0)
        )
        ids: bytes | Tensor | None = None
        error: MoeRtError | None = None
        if isinstance(size, Size):
            ids = copied_ids(topk_idx)
            error = self._wrong_values(x, most, size, stats) or (twice(self.rank) if ids is None else None)
        else:
            error = size
        error = error or self._too_many(name, return_recv_hook, async_finish) or self._wrong_waits(waits)
        self._complete_all()
        if error is not None:
            self._refuse_dispatch(x, topk_idx, most, num_experts, error)
        assert isinstance(size, Size)
        assert ids is not None
        before = self._waited(waits)
        buffer = self._exchange.buffer(size.rows, x.shape[0], most)
        sent = fp8.cast(x, round_scale, use_ue8m0) if use_fp8 else x
        half = packed.dispatch(buffer, sent, topk_idx, self._weights(topk_idx), most, wait=not return_recv_hook)
        assert half.handle is not None
        recv_x, count = half.outputs[0].view(*size.shape), half.handle.offs
        scales = None
        if use_fp8:
            given = half.outputs[-1]
            scales = given.new_empty(size.shape[0], given.shape[1], size.shape[1]).transpose(1, 2)
        handle = LowLatencyHandle(self, size, ids, buffer, half.handle)
        after = handle, half, scales, stats, waits, before
        hook = None
        if return_recv_hook:
            count.fill_(-1)  # until rows have arrived
            hook = self._later(name, half, self._received, *after)
            hook.handle = handle
        else:
            self._received(*after)
            handle.arrived = True
        return recv_x if scales is None else (recv_x, scales), count, handle, hook

    def _received(
        self, handle: LowLatencyHandle, half: packed.Half, scales: Tensor | None, stats: Tensor | None,
        waits: Tensor | None, before: Tensor | None,
    ) -> None:  # fmt: skip
        """Write the scales, statistics and handle of a dispatch whose rows and counts are here."""
        handle.describe()
        if scales is not None:
            put_in_columns(handle.buffer, handle.plan, half.outputs[-1], scales)
        if stats is not None:
            stats.add_(handle.plan.offs)
        self._add_waits(waits, before)

    def _refuse_dispatch(self, x: Any, topk_idx: Any, most: Any, num_experts: Any, error: Any) -> NoReturn:
        """Raise the error on every rank, in the buffer through which peers dispatch."""
        hidden = x.shape[1] if isinstance(x, Tensor) and x.dim() == 2 else 0
        num_topk = topk_idx.shape[1] if isinstance(topk_idx, Tensor) and topk_idx.dim() == 2 else 1
        rows = self._rows(hidden, num_topk, num_experts) if type(num_experts) is int else None
        self._exchange.refuse(rows, error, *((x.shape[0], most) if isinstance(error, TooManyTokens) else ()))

    @staticmethod
    def _rows(hidden: int, num_topk: int, num_experts: int) -> Rows:
        return Rows("experts", hidden, num_topk, num_experts, torch.bfloat16, "invariant")

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: LowLatencyHandle, zero_copy: bool,
        return_recv_hook: bool, async_finish: bool, out: Tensor | None, waits: Tensor | None,
    ) -> tuple[Tensor, Callable[[], None] | None]:  # fmt: skip
        """Return each token's sum of its experts' rows, weighted, and the hook."""
        name = "low_latency_combine"
        same = isinstance(handle, LowLatencyHandle) and handle.routes(topk_idx)
        error = self._unfit(x, topk_idx, same, topk_weights, handle, zero_copy, out)
        error = error or self._too_many(name, return_recv_hook, async_finish) or self._wrong_waits(waits)
        self._complete_all()
        if error is not None:
            own = isinstance(handle, LowLatencyHandle) and handle.owner is self
            self._exchange.refuse_combine(handle.buffer if own else self._exchange.buffers[-1], error)
        before = self._waited(waits)
        rows = handle.combine_buffer if zero_copy and handle.combine_buffer is not None else x
        plan = handle.plan if same else packed.without_entries(handle.plan, topk_idx < 0)
        half = packed.combine(handle.buffer, rows, plan, topk_weights, out, wait=not return_recv_hook)
        if return_recv_hook:
            return half.outputs, self._later(name, half, self._add_waits, waits, before)
        self._add_waits(waits, before)
        return half.outputs, None

    def next_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return bfloat16 [L, R * M, H] for combine with zero_copy."""
        if not isinstance(handle, LowLatencyHandle) or handle.owner is not self:
            raise self._foreign()
        if handle.combine_buffer is None:
            handle.combine_buffer = handle.plan.offs.new_empty(handle.size.shape, dtype=torch.bfloat16)
        return handle.combine_buffer

    def _weights(self, topk_idx: Tensor) -> Tensor:
        """Return float32 ones of the shape of topk_idx."""
        if self._ones.shape != topk_idx.shape:
            self._ones = torch.ones(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        return self._ones

    def _later(self, name: str, half: packed.Half, after: Callable[..., None], *given: Any) -> Hook:
        """Return the hook of an op, which calls `after` with what is given when the outputs are there."""
        hook = Hook(self, name, half, partial(after, *given))
        self.outstanding.append(hook)
        return hook

    def _complete_all(self) -> None:
        """Run the second halves of ops that are under way, since a buffer runs one op at a time."""
        for hook in self.outstanding:
            hook.complete()

    def _waited(self, wanted: Tensor | None) -> Tensor | None:
        """Return int64 [R], the nanoseconds that this rank has waited for each peer, if they are wanted."""
        if wanted is None:
            return None
        each = [waits for buffer in self._exchange.buffers if (waits := buffer.waited_ns())]  # CUDA ranks have none
        return torch.tensor([[0] * self.num_ranks, *each], device="cpu").sum(0)

    def _add_waits(self, stats: Tensor | None, before: Tensor | None) -> None:
        now = self._waited(stats)
        if stats is not None:
            assert now is not None
            assert before is not None
            stats.add_((now - before).to(stats.device).view(stats.shape))

    def _wrong_waits(self, stats: Tensor | None) -> InvalidInput | None:
        if stats is None or (stats.dtype is torch.int64 and stats.numel() == self.num_ranks):
            return None
        return invalid(self.rank, "wait_recv_cost_stats", spelled(stats), f"int64 [{self.num_ranks}]")

    def _foreign(self) -> InvalidInput:
        return invalid(
            self.rank, "handle", "another buffer's, or a copy of its items", "one that low_latency_dispatch returned"
        )

    def _too_many(self, name: str, return_recv_hook: bool, async_finish: bool) -> InvalidInput | None:
        if async_finish and return_recv_hook:
            return invalid(self.rank, "async_finish", "True with return_recv_hook=True", "one of them")
        if len(self.outstanding) >= MOST_OUTSTANDING:
            got = f"{name} while the hooks of {MOST_OUTSTANDING} other ops were not called"
            return invalid(
                self.rank, "return_recv_hook", got, f"at most {MOST_OUTSTANDING} outstanding ops; call a hook"
            )
        return None

    def _wrong_tensors(self, x: Tensor, topk_idx: Tensor) -> MoeRtError | None:
        if not isinstance(x, Tensor) or x.dtype is not torch.bfloat16 or x.dim() != 2 or not x.is_contiguous():
            return invalid(self.rank, "x", spelled(x), "contiguous bfloat16 [T, H]")
        return wrong_ids(self.rank, topk_idx, x.shape[0], x)

    def _size(
        self, x: Tensor, topk_idx: Tensor, most: int, num_experts: int, options: tuple[bool, bool, bool]
    ) -> Size | MoeRtError:
        """Return the parts of a dispatch of this size, or the error if DeepEP refuses it."""
        hidden, num_topk = x.shape[1], topk_idx.shape[1]
        key = hidden, num_topk, most, num_experts, options
        whole = type(num_experts) is int and type(most) is int  # 8.0 is the same key as 8
        if whole and (size := self._sizes.get(key)) is not None:
            return size
        if type(num_experts) is not int or num_experts < 1 or num_experts % self.num_ranks:
            return invalid(self.rank, "num_experts", num_experts, f"a multiple of {self.num_ranks} ranks")
        if type(most) is not int or most < 1 or self.num_ranks * most % 4 or num_experts * most >= _MOST_ROWS:
            expected = f"a positive number that times {self.num_ranks} ranks is a multiple of 4, below 2^31 rows"
            return invalid(self.rank, "num_max_dispatch_tokens_per_rank", most, expected)
        if not self._enabled:
            return invalid(self.rank, "low_latency_mode", False, "a Buffer made with low_latency_mode=True")
        use_fp8, round_scale, use_ue8m0 = options
        multiple = 512 if use_fp8 else 128
        if hidden == 0 or hidden % multiple:
            return invalid(self.rank, "x", spelled(x), f"H a multiple of {multiple}")
        if use_ue8m0 and not (use_fp8 and round_scale):
            return invalid(self.rank, "use_ue8m0", True, "use_fp8=True and round_scale=True with it")
        needed = low_latency_bytes(most, hidden, num_experts)
        if needed > self._num_rdma_bytes:
            expected = f"{needed}, as DeepEP needs (get_low_latency_rdma_size_hint)"
            return invalid(self.rank, "num_rdma_bytes", self._num_rdma_bytes, expected)
        num_local, slots = num_experts // self.num_ranks, self.num_ranks * most
        rows = self._rows(hidden, num_topk, num_experts)
        return self._sizes.setdefault(key, Size(rows, (num_local, slots, hidden)))

    def _wrong_values(self, x: Tensor, most: int, size: Size, stats: Tensor | None) -> MoeRtError | None:
        if x.shape[0] > most:
            message = f"x: got {x.shape[0]} tokens, expected at most num_max_dispatch_tokens_per_rank = {most}"
            return TooManyTokens(f"rank {self.rank}: {message}", rank=self.rank)
        if stats is None or (stats.dtype is torch.int32 and stats.shape == size.shape[:1] and stats.device == x.device):
            return None
        expected = f"int32 {[size.shape[0]]} on {x.device}"
        return invalid(self.rank, "cumulative_local_expert_recv_stats", spelled(stats), expected)

    def _unfit(
        self, x: Tensor, topk_idx: Tensor, same: bool, topk_weights: Tensor, handle: Any, zero_copy: bool,
        out: Tensor | None,
    ) -> InvalidInput | None:  # fmt: skip
        """Return the error of a combine's arguments, None if DeepEP's contract holds.

        Args:
            same: topk_idx is that of the dispatch.
        """
        if not isinstance(handle, LowLatencyHandle) or handle.owner is not self:
            return self._foreign()
        if not handle.arrived:
            return invalid(
                self.rank, "handle", "that of a low_latency_dispatch whose hook was never called", "its hook called"
            )
        plan = handle.plan.send_plan
        if error := wrong_tensor(self.rank, "x", x, torch.bfloat16, handle.size.shape, plan):
            return error
        if zero_copy and handle.combine_buffer is None:
            return invalid(self.rank, "zero_copy", True, "rows in get_next_low_latency_combine_buffer(handle)")
        shape = plan.shape
        error = None if same else wrong_tensor(self.rank, "topk_idx", topk_idx, torch.int64, shape, plan)
        error = error or wrong_tensor(self.rank, "topk_weights", topk_weights, torch.float32, shape, plan)
        if error is None and not same and names_others(handle.ids, topk_idx):
            error = invalid(self.rank, "topk_idx", "other experts", "those of the dispatch, or -1")
        if error is None and out is not None:
            error = wrong_tensor(self.rank, "out", out, torch.bfloat16, (shape[0], x.shape[2]), plan)
            if error is None and out.data_ptr() % _ALIGNED:
                error = invalid(self.rank, "out", "an odd address", f"a multiple of {_ALIGNED}")
        return error
