"""Dispatch for all engines: capacity, outputs, arguments, and the retry after an overflow."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeAlias

import torch
from torch import Tensor, is_anomaly_enabled

from moe_rt import _engine
from moe_rt.config.row_format import RowFormat
from moe_rt.errors import CapacityOverflow, Op, TooManyTokens
from moe_rt.native.checks import NUM_TAGS, Checks, length
from moe_rt.native.storage import blank

# The op's argument struct in cuda/protocol/core/args.h.
Args: TypeAlias = _engine.DispatchArgs | _engine.CombineArgs | _engine.CombineBackwardArgs


class Dispatching(Checks):
    """The part of an engine that sends rows to experts, and the hooks that every op calls."""

    num_parts: int  # parts of recv_x, which offs delimits
    _capacities: dict[int, int]  # rows of recv_x, by max_tokens

    @abstractmethod
    def _rows(self, num_rows: int, like: Tensor) -> Tensor:
        """Return an uninitialised output [num_rows, H] of the payload's dtype, which is that of `like`."""

    @abstractmethod
    def _matrix(self, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised output for codes or scales."""

    @abstractmethod
    def _run(self, op: Op, args: Args, tag: int) -> None:
        """Run an op."""

    @abstractmethod
    def _grow(self, max_tokens: int) -> bool:
        """Increase the capacity for this bound to what the overflowed dispatch needed. False if capacity is fixed."""

    @property
    def capacity(self) -> int:
        """Rows of recv_x on this rank, in a dispatch without its own max_tokens."""
        return self._capacities[self.spec.num_max_tokens_per_rank]

    def capacity_for(self, max_tokens: int | None) -> int:
        """Rows of recv_x in a dispatch whose ranks send at most max_tokens tokens each."""
        if max_tokens is None:
            return self.capacity
        if max_tokens not in self._capacities:
            self._capacities[max_tokens] = self.spec.capacity(self.rank, max_tokens)
        return self._capacities[max_tokens]

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tag: int, max_tokens: int | None = None,
        scaled: bool = False, scales: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """x [T, H], topk_idx [T, K], topk_weights [T, K] -> recv_x, recv_weights, offs, recv_plan, send_plan.

        If `scaled`, recv_x holds codes and recv_scales is returned last. x then holds codes if `scales` is given, and
        otherwise rows that travel as codes.
        """
        if type(tag) is not int or not 0 <= tag < NUM_TAGS:
            self._refuse_tag(Op.DISPATCH, tag)
        most = self.spec.num_max_tokens_per_rank
        if max_tokens is not None:
            if type(max_tokens) is not int or not 1 <= max_tokens <= most:
                self._refuse_bound(tag, max_tokens)
            most = max_tokens
        row = self._check_scaled(tag, x, scales) if scaled else None
        num_tokens = self._reader.dispatch(x, topk_idx, topk_weights) if row is None else -1
        if not 0 <= num_tokens <= most:
            limit = "num_max_tokens_per_rank" if max_tokens is None else "max_tokens"
            x, topk_idx, topk_weights, scales = self._check_dispatch(
                tag, x, topk_idx, topk_weights, scaled, scales, limit, most
            )
            num_tokens = x.shape[0]
        try:
            return self._dispatch(x, topk_idx, topk_weights, num_tokens, tag, most, row, scales)
        except CapacityOverflow:  # every rank sees the same overflow and the same need, so all retry, once
            if not self._grow(most):
                raise
        x = x.contiguous()  # a token window is now an earlier op's, and its rows may be padded
        return self._dispatch(x, topk_idx, topk_weights, num_tokens, tag, most, row, scales)

    def _check_dispatch(
        self, tag: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, scaled: bool, scales: Tensor | None,
        limit: str, most: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Refuse wrong inputs; return right ones as C++ reads them."""
        s, num_tokens = self.spec, length(x)
        if scales is None:
            self._check(Op.DISPATCH, tag, "x", x, (num_tokens, s.hidden), s.dtype, may_be_window=True)
        if num_tokens > most:
            error = TooManyTokens(f"x: got {num_tokens} tokens, expected at most {limit} = {most}")
            self._refuse(Op.DISPATCH, tag, error, num_tokens, most)
        idx_dtype = torch.int32 if topk_idx.dtype is torch.int32 else torch.int64
        self._check(Op.DISPATCH, tag, "topk_idx", topk_idx, (num_tokens, s.num_topk), idx_dtype)
        self._check(Op.DISPATCH, tag, "topk_weights", topk_weights, (num_tokens, s.num_topk), self._acc_dtype)
        if self._windows is not None and self._windows.hold(x):
            self._check_window(tag, x, scaled)
        else:
            x = self._input(x)
        return x, self._input(topk_idx), self._input(topk_weights), None if scales is None else self._input(scales)

    def _dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_tokens: int, tag: int, max_tokens: int,
        row: RowFormat | None, scales: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        capacity = self._capacities.get(max_tokens) or self.capacity_for(max_tokens)
        recv_x = self._rows(capacity, x) if row is None else self._matrix(capacity, row.num_codes, row.codes)
        recv_weights = topk_weights.new_empty(self.weights_shape(capacity) if self.by_token else capacity)
        if is_anomaly_enabled():  # one test for both takes half as long
            blank(recv_x), blank(recv_weights)
        offs = topk_idx.new_empty(self.num_parts, dtype=torch.int32)
        recv_plan = offs.new_empty(self.plan_ints)  # naming the dtype again would take longer
        send_plan = offs.new_empty(num_tokens, self.spec.num_topk)
        args = _engine.DispatchArgs(
            x=x.data_ptr(),
            topk_idx=topk_idx.data_ptr(),
            idx_bytes=topk_idx.itemsize,
            topk_weights=topk_weights.data_ptr(),
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            capacity=capacity,
            recv_x=recv_x.data_ptr(),
            recv_weights=recv_weights.data_ptr(),
            offs=offs.data_ptr(),
            recv_plan=recv_plan.data_ptr(),
            send_plan=send_plan.data_ptr(),
        )
        if row is None:
            self._run(Op.DISPATCH, args, tag)
            return recv_x, recv_weights, offs, recv_plan, send_plan
        recv_scales = blank(self._matrix(capacity, row.num_scales, row.scales))
        args.scaled = _engine.ScaledArgs(
            row_format=0 if scales is None else row.word(self.spec.hidden),
            scales=0 if scales is None else scales.data_ptr(),
            recv_scales=recv_scales.data_ptr(),
            code_bytes=row.code_bytes,
            scale_bytes=row.scale_bytes,
        )
        self._run(Op.DISPATCH, args, tag)
        return recv_x, recv_weights, offs, recv_plan, send_plan, recv_scales

    def _input(self, t: Tensor) -> Tensor:
        """Return the same values as C++ reads them: torch may owe a sign to what is in memory, or have no memory."""
        if t.is_neg() or t._is_zerotensor():
            t = t.resolve_neg() if t.is_neg() else torch.zeros(t.shape, dtype=t.dtype, device=t.device)
        return t.contiguous()
