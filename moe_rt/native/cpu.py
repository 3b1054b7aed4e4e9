"""The CPU engine for tensors: checks what it is given, makes the outputs, and turns statuses into exceptions.

Input that this rank refuses is refused together: the engine announces the refusal, so that every rank raises in the
same op and none waits for rows that will never come.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moe_rt import _engine
from moe_rt.config import ELEMENTS, BufferSpec
from moe_rt.errors import Code, GroupClosed, InvalidInput, MoeRtError, Op, TooManyTokens, error_from_status
from moe_rt.heap.segments import Segments
from moe_rt.native.storage import Recycler

_REFUSAL_CODES: dict[type[MoeRtError], Code] = {
    TooManyTokens: Code.TOO_MANY_TOKENS,
    InvalidInput: Code.INVALID_INPUT,
}
_ids = itertools.count(1)
_engines: WeakValueDictionary[int, CpuEngine] = WeakValueDictionary()


class CpuEngine:
    """One rank's engine. Ops name it by `id`, an integer that a traced graph can hold."""

    def __init__(
        self, spec: BufferSpec, rank: int, segments: Segments, *, timeout_s: float, num_threads: int, isa: str
    ) -> None:
        self.spec, self.rank, self.timeout_s = spec, rank, timeout_s
        self.num_local_experts = len(spec.local_experts(rank))
        self.capacity = spec.capacity(rank)
        self._rows_shape = (self.capacity, spec.hidden)
        self._acc_dtype = spec.acc_dtype
        self.plan_ints = spec.shape().recv_plan_ints(self.num_local_experts)
        self._segments = segments
        self._memory = Recycler()
        self._engine = _engine.Engine(
            shape=spec.shape(),
            elem=ELEMENTS[spec.dtype],
            rank=rank,
            config_hash=spec.hash(),
            expert_rank=list(spec.placement),
            capacity=[spec.capacity(r) for r in range(spec.num_ranks)],
            segments=segments.addresses,
            pidfds=segments.pidfds,
            timeout_s=timeout_s,
            drop_overflow=spec.overflow == "drop",
            num_lanes=num_threads,
            isa=isa,
        )
        self.id = next(_ids)
        _engines[self.id] = self

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tag: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x [T, H], topk_idx int64 [T, K], topk_weights [T, K] -> recv_x, recv_weights, offs, recv_plan, send_plan."""
        s, num_tokens = self.spec, x.shape[0] if x.dim() else 0
        self._check(Op.DISPATCH, tag, "x", x, (num_tokens, s.hidden), s.dtype)
        if num_tokens > s.num_max_tokens_per_rank:
            limit = s.num_max_tokens_per_rank
            error = TooManyTokens(f"x: got {num_tokens} tokens, expected at most num_max_tokens_per_rank = {limit}")
            self._refuse(Op.DISPATCH, tag, error, num_tokens, limit)
        self._check(Op.DISPATCH, tag, "topk_idx", topk_idx, (num_tokens, s.num_topk), torch.int64)
        self._check(Op.DISPATCH, tag, "topk_weights", topk_weights, (num_tokens, s.num_topk), self._acc_dtype)
        x, topk_idx, topk_weights = x.contiguous(), topk_idx.contiguous(), topk_weights.contiguous()
        recv_x = self._memory.empty(self._rows_shape, s.dtype)
        recv_weights = torch.empty(self.capacity, dtype=self._acc_dtype)
        offs = torch.empty(self.num_local_experts, dtype=torch.int32)
        recv_plan = torch.empty(self.plan_ints, dtype=torch.int32)
        send_plan = torch.empty(num_tokens, s.num_topk, dtype=torch.int32)
        status = self._engine.dispatch(
            x.data_ptr(),
            topk_idx.data_ptr(),
            topk_weights.data_ptr(),
            num_tokens,
            recv_x.data_ptr(),
            recv_weights.data_ptr(),
            offs.data_ptr(),
            recv_plan.data_ptr(),
            send_plan.data_ptr(),
            tag,
        )
        if status.code:
            self._raise(status)
        return recv_x, recv_weights, offs, recv_plan, send_plan

    def combine(self, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, tag: int) -> Tensor:
        """y [capacity, H], recv_weights [capacity] -> out [T, H]."""
        self._check_rows(Op.COMBINE, tag, "y", y, "recv_weights", recv_weights)
        self._check_plans(Op.COMBINE, tag, recv_plan, send_plan)
        y, recv_weights = y.contiguous(), recv_weights.contiguous()
        num_tokens = send_plan.shape[0]
        out = self._memory.empty((num_tokens, self.spec.hidden), self.spec.dtype)
        status = self._engine.combine(
            y.data_ptr(),
            recv_weights.data_ptr(),
            recv_plan.data_ptr(),
            send_plan.data_ptr(),
            num_tokens,
            out.data_ptr(),
            tag,
        )
        if status.code:
            self._raise(status)
        return out

    def dispatch_backward(
        self, grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, tag: int
    ) -> tuple[Tensor, Tensor]:
        """grad_recv_x [capacity, H], grad_recv_weights [capacity] -> grad_x [T, H], grad_topk_weights [T, K]."""
        op = Op.DISPATCH_BACKWARD
        self._check_rows(op, tag, "grad_recv_x", grad_recv_x, "grad_recv_weights", grad_recv_weights)
        self._check_plans(op, tag, recv_plan, send_plan)
        grad_recv_x, grad_recv_weights = grad_recv_x.contiguous(), grad_recv_weights.contiguous()
        num_tokens = send_plan.shape[0]
        grad_x = self._memory.empty((num_tokens, self.spec.hidden), self.spec.dtype)
        grad_topk_weights = torch.empty(num_tokens, self.spec.num_topk, dtype=self._acc_dtype)
        status = self._engine.dispatch_backward(
            grad_recv_x.data_ptr(),
            grad_recv_weights.data_ptr(),
            recv_plan.data_ptr(),
            send_plan.data_ptr(),
            num_tokens,
            grad_x.data_ptr(),
            grad_topk_weights.data_ptr(),
            tag,
        )
        if status.code:
            self._raise(status)
        return grad_x, grad_topk_weights

    def combine_backward(
        self, grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, tag: int
    ) -> tuple[Tensor, Tensor]:
        """grad_out [T, H], y [capacity, H], recv_weights [capacity] -> grad_y, grad_recv_weights."""
        op, num_tokens = Op.COMBINE_BACKWARD, grad_out.shape[0] if grad_out.dim() else 0
        self._check(op, tag, "grad_out", grad_out, (num_tokens, self.spec.hidden), self.spec.dtype)
        self._check_rows(op, tag, "y", y, "recv_weights", recv_weights)
        self._check_plans(op, tag, recv_plan, None)
        grad_out, y, recv_weights = grad_out.contiguous(), y.contiguous(), recv_weights.contiguous()
        grad_y = self._memory.empty(self._rows_shape, self.spec.dtype)
        grad_recv_weights = torch.empty_like(recv_weights)
        status = self._engine.combine_backward(
            grad_out.data_ptr(),
            num_tokens,
            y.data_ptr(),
            recv_weights.data_ptr(),
            recv_plan.data_ptr(),
            grad_y.data_ptr(),
            grad_recv_weights.data_ptr(),
            tag,
        )
        if status.code:
            self._raise(status)
        return grad_y, grad_recv_weights

    def require_device(self, op: Op, tag: int, name: str, t: Tensor) -> None:
        """Refuses a tensor that is not here: torch would look for another kernel and never ask this engine."""
        if not t.is_cpu:
            error = InvalidInput(f"{name}: got a tensor on {t.device}, expected one on cpu", rank=self.rank, op=op)
            self._refuse(op, tag, error, 0, 0)

    def health(self) -> None:
        """Raises what ended the group, if anything did. Never blocks."""
        status = self._engine.health()
        if status.code:
            self._raise(status)

    def timings(self) -> dict[str, Any]:
        """Where the time of the last op went; see moe_rt.Buffer.timings."""
        op, before, wait, after, arrivals = self._engine.timings()
        names = {"op": Op(op).name.lower(), "before_ns": before, "wait_ns": wait, "after_ns": after}
        return {**names, "arrival_ns": arrivals}

    def poison(self) -> None:
        """Ends the group on every rank: this one will not go on."""
        self._engine.poison(Code.POISONED, -1)

    def close(self) -> None:
        """Says goodbye, refuses further ops and lets go of the segments. Local, idempotent, silent in a forked child.

        While another thread is inside an op the segments stay mapped: they go with the engine, which the op holds.
        """
        if self._engine.close():
            self._segments.release()

    def _check_rows(self, op: Op, tag: int, name: str, rows: Tensor, weights_name: str, weights: Tensor) -> None:
        self._check(op, tag, name, rows, self._rows_shape, self.spec.dtype)
        self._check(op, tag, weights_name, weights, self._rows_shape[:1], self._acc_dtype)

    def _check_plans(self, op: Op, tag: int, recv_plan: Tensor, send_plan: Tensor | None) -> None:
        self._check(op, tag, "handle.recv_plan", recv_plan, (self.plan_ints,), torch.int32)
        if send_plan is not None:
            self._check(op, tag, "handle.send_plan", send_plan, (len(send_plan), self.spec.num_topk), torch.int32)

    def _check(self, op: Op, tag: int, name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if t.shape == shape and t.dtype is dtype and t.is_cpu:
            return
        got = f"{t.dtype} {list(t.shape)} on {t.device}"
        error = InvalidInput(f"{name}: got {got}, expected {dtype} {list(shape)} on cpu", rank=self.rank, op=op)
        self._refuse(op, tag, error, t.shape[-1] if t.dim() else 0, shape[-1])

    def _refuse(self, op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> NoReturn:
        """Announces the refusal, then raises `error` here; a failed group is raised instead, caused by `error`."""
        code = _REFUSAL_CODES[type(error)]
        status = self._engine.refuse(op, code, got, expected, tag)
        if status.code >= Code.CONFIG_MISMATCH:
            raise error_from_status(status, self.rank, self.timeout_s) from error
        raise error

    def _raise(self, status: _engine.Status) -> NoReturn:
        raise error_from_status(status, self.rank, self.timeout_s)


def engine_by_id(engine_id: int) -> CpuEngine:
    """The engine that an op was recorded with; raises GroupClosed when its buffer is gone."""
    engine = _engines.get(engine_id)
    if engine is None:
        raise GroupClosed(f"buffer {engine_id}: got an op on a buffer that no longer exists, expected an open one")
    return engine
