"""What the engines of all machines share: checking tensors, making outputs, and naming an engine by an integer.

An engine runs the four ops over its heap. What differs is in a few hooks, which this class calls and which call nothing
here: where outputs come from, how an op is run, whether capacity grows, and how this rank refuses an op.
"""

from __future__ import annotations

import itertools
import zlib
from abc import ABC, abstractmethod
from typing import Any, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_rt import _engine
from moe_rt.config.spec import BufferSpec
from moe_rt.diagnostics.report import Report
from moe_rt.errors import CapacityOverflow, Code, GroupClosed, InvalidInput, MoeRtError, Op, TooManyTokens

REFUSAL_CODES: dict[type[MoeRtError], Code] = {
    TooManyTokens: Code.TOO_MANY_TOKENS,
    InvalidInput: Code.INVALID_INPUT,
}
# A layer's tag travels in so many bits.
NUM_TAGS = 1 << _engine.TAG_BITS
# The op's own struct of cuda/protocol/core/args.h.
Args: TypeAlias = _engine.DispatchArgs | _engine.CombineArgs | _engine.CombineBackwardArgs
_STRIDED = torch.strided
_ids = itertools.count(1)
_engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()


class Engine(ABC):
    """One rank's engine. Ops name it by `id`, an integer that a traced graph can hold."""

    def __init__(self, spec: BufferSpec, rank: int, device: torch.device, timeout_s: float) -> None:
        self.spec, self.rank, self.device, self.timeout_s = spec, rank, device, timeout_s
        self.num_local_experts = spec.placement.num_local(rank)
        self.capacity = spec.capacity(rank)
        self.plan_ints = spec.shape().recv_plan_ints(self.num_local_experts)
        self._rows_shape = (self.capacity, spec.hidden)
        self._acc_dtype = spec.acc_dtype
        # Compilers keep graphs on disk by their text, in which this number is all that tells what shapes an op returns.
        shapes = repr((spec.hash(), rank, self.capacity, self.plan_ints)).encode()
        self.id = next(_ids) << 32 | zlib.crc32(shapes)
        _engines[self.id] = self

    @abstractmethod
    def _rows(self, num_rows: int) -> Tensor:
        """An uninitialised output [num_rows, H] of the payload's dtype."""

    @abstractmethod
    def _run(self, op: Op, args: Args, tag: int) -> None:
        """Runs an op."""

    @abstractmethod
    def _grow(self) -> bool:
        """After an overflow: makes room for all that the dispatch needed. False where capacity is fixed."""

    @abstractmethod
    def _refuse(self, op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> NoReturn:
        """Tells the peers that this rank will not take part in the op with its input, and raises `error`."""

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tag: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x [T, H], topk_idx int64 [T, K], topk_weights [T, K] -> recv_x, recv_weights, offs, recv_plan, send_plan."""
        if type(tag) is not int or not 0 <= tag < NUM_TAGS:
            self._refuse_tag(Op.DISPATCH, tag)
        s, num_tokens = self.spec, x.size(0) if x.dim() else 0
        self._check(Op.DISPATCH, tag, "x", x, (num_tokens, s.hidden), s.dtype)
        if num_tokens > s.num_max_tokens_per_rank:
            limit = s.num_max_tokens_per_rank
            error = TooManyTokens(f"x: got {num_tokens} tokens, expected at most num_max_tokens_per_rank = {limit}")
            self._refuse(Op.DISPATCH, tag, error, num_tokens, limit)
        self._check(Op.DISPATCH, tag, "topk_idx", topk_idx, (num_tokens, s.num_topk), torch.int64)
        self._check(Op.DISPATCH, tag, "topk_weights", topk_weights, (num_tokens, s.num_topk), self._acc_dtype)
        x, topk_idx, topk_weights = self._input(x), self._input(topk_idx), self._input(topk_weights)
        try:
            return self._dispatch(x, topk_idx, topk_weights, num_tokens, tag)
        except CapacityOverflow:  # all ranks see the same overflow and the same need, so all retry alike, and once
            if not self._grow():
                raise
        return self._dispatch(x, topk_idx, topk_weights, num_tokens, tag)

    def _dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_tokens: int, tag: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        recv_x = self._rows(self.capacity)
        recv_weights = topk_weights.new_empty(self.capacity)
        offs = topk_idx.new_empty(self.num_local_experts, dtype=torch.int32)
        recv_plan = topk_idx.new_empty(self.plan_ints, dtype=torch.int32)
        send_plan = topk_idx.new_empty(num_tokens, self.spec.num_topk, dtype=torch.int32)
        args = _engine.DispatchArgs(
            x=x.data_ptr(),
            topk_idx=topk_idx.data_ptr(),
            topk_weights=topk_weights.data_ptr(),
            num_tokens=num_tokens,
            recv_x=recv_x.data_ptr(),
            recv_weights=recv_weights.data_ptr(),
            offs=offs.data_ptr(),
            recv_plan=recv_plan.data_ptr(),
            send_plan=send_plan.data_ptr(),
        )
        self._run(Op.DISPATCH, args, tag)
        return recv_x, recv_weights, offs, recv_plan, send_plan

    def combine(self, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, tag: int) -> Tensor:
        """y [capacity, H], recv_weights [capacity] -> out [T, H]."""
        self._check_plans(Op.COMBINE, tag, recv_plan, send_plan)
        recv_plan, send_plan = recv_plan.contiguous(), send_plan.contiguous()
        self._check_rows(Op.COMBINE, tag, "y", y, "recv_weights", recv_weights, recv_plan)
        y, recv_weights = self._input(y), self._input(recv_weights)
        num_tokens = send_plan.shape[0]
        out = self._rows(num_tokens)
        args = _engine.CombineArgs(
            op=Op.COMBINE,
            y=y.data_ptr(),
            recv_weights=recv_weights.data_ptr(),
            grad_recv_weights=0,
            recv_plan=recv_plan.data_ptr(),
            send_plan=send_plan.data_ptr(),
            num_tokens=num_tokens,
            out=out.data_ptr(),
            grad_topk_weights=0,
        )
        self._run(Op.COMBINE, args, tag)
        return out

    def dispatch_backward(
        self, grad_recv_x: Tensor, grad_recv_weights: Tensor, recv_plan: Tensor, send_plan: Tensor, tag: int
    ) -> tuple[Tensor, Tensor]:
        """grad_recv_x [capacity, H], grad_recv_weights [capacity] -> grad_x [T, H], grad_topk_weights [T, K]."""
        op = Op.DISPATCH_BACKWARD
        self._check_plans(op, tag, recv_plan, send_plan)
        recv_plan, send_plan = recv_plan.contiguous(), send_plan.contiguous()
        self._check_rows(op, tag, "grad_recv_x", grad_recv_x, "grad_recv_weights", grad_recv_weights, recv_plan)
        grad_recv_x, grad_recv_weights = self._input(grad_recv_x), self._input(grad_recv_weights)
        num_tokens = send_plan.shape[0]
        grad_x = self._rows(num_tokens)
        grad_topk_weights = grad_recv_weights.new_empty(num_tokens, self.spec.num_topk)
        args = _engine.CombineArgs(
            op=op,
            y=grad_recv_x.data_ptr(),
            recv_weights=0,
            grad_recv_weights=grad_recv_weights.data_ptr(),
            recv_plan=recv_plan.data_ptr(),
            send_plan=send_plan.data_ptr(),
            num_tokens=num_tokens,
            out=grad_x.data_ptr(),
            grad_topk_weights=grad_topk_weights.data_ptr(),
        )
        self._run(op, args, tag)
        return grad_x, grad_topk_weights

    def combine_backward(
        self, grad_out: Tensor, y: Tensor, recv_weights: Tensor, recv_plan: Tensor, tag: int
    ) -> tuple[Tensor, Tensor]:
        """grad_out [T, H], y [capacity, H], recv_weights [capacity] -> grad_y, grad_recv_weights."""
        op, num_tokens = Op.COMBINE_BACKWARD, grad_out.size(0) if grad_out.dim() else 0
        self._check_plans(op, tag, recv_plan, None)
        self._check(op, tag, "grad_out", grad_out, (num_tokens, self.spec.hidden), self.spec.dtype)
        recv_plan = recv_plan.contiguous()
        self._check_rows(op, tag, "y", y, "recv_weights", recv_weights, recv_plan)
        grad_out, y, recv_weights = self._input(grad_out), self._input(y), self._input(recv_weights)
        grad_y = self._rows(y.shape[0])
        grad_recv_weights = torch.empty_like(recv_weights)
        args = _engine.CombineBackwardArgs(
            grad_out=grad_out.data_ptr(),
            num_tokens=num_tokens,
            y=y.data_ptr(),
            recv_weights=recv_weights.data_ptr(),
            recv_plan=recv_plan.data_ptr(),
            grad_y=grad_y.data_ptr(),
            grad_recv_weights=grad_recv_weights.data_ptr(),
        )
        self._run(op, args, tag)
        return grad_y, grad_recv_weights

    def require_call(self, op: Op, tag: int, **tensors: Any) -> None:
        """Refuses what torch's dispatcher would not bring to this engine: it would raise here, and peers would wait."""
        if not isinstance(tag, int | torch.SymInt) or not 0 <= tag < NUM_TAGS:
            self._refuse_tag(op, tag)
        for name, t in tensors.items():
            got, expected = _odd_kind(t), "a torch.Tensor" if not isinstance(t, Tensor) else "a dense one"
            if not got and t.device != self.device:
                got, expected = f"a tensor on {t.device}", f"one on {self.device}"
            if got:
                error = InvalidInput(f"{name}: got {got}, expected {expected}", rank=self.rank, op=op)
                self._refuse(op, tag, error, 0, 0)

    @abstractmethod
    def health(self) -> None:
        """Raises what ended the group, if anything did. Never blocks."""

    @abstractmethod
    def timings(self) -> dict[str, Any]:
        """Where the time of the last op went; see moe_rt.Buffer.timings."""

    @abstractmethod
    def report(self) -> Report:
        """What every rank of the group does; see moe_rt.Buffer.report."""

    @abstractmethod
    def waited_ns(self) -> list[int]:
        """How long this rank has waited for each peer so far; see moe_rt.Buffer.waited_ns."""

    @abstractmethod
    def poison(self, error: BaseException | None = None) -> None:
        """Ends the group on every rank: this one will not go on, because of `error`. CPU ranks tell their peers so."""

    @abstractmethod
    def close(self, why: str = "") -> None:
        """Tells peers that this rank has closed, refuses further ops and lets go of the segments. Local, idempotent.

        `why` is what CPU ranks tell peers that still wait for this one, if it did not close its buffer by hand.
        """

    def _input(self, t: Tensor) -> Tensor:
        """The same values as C++ reads them: torch may owe a sign to what is in memory, or have no memory at all."""
        if t.is_neg() or t._is_zerotensor():
            t = t.resolve_neg() if t.is_neg() else torch.zeros(t.shape, dtype=t.dtype, device=t.device)
        return t.contiguous()

    def _check_rows(
        self, op: Op, tag: int, name: str, rows: Tensor, weights_name: str, weights: Tensor, recv_plan: Tensor
    ) -> None:
        shape = self._rows_shape
        if self.spec.overflow == "retry":  # the handle may be older than the present capacity; on CPU ranks alone
            shape = (int(recv_plan[_engine.RecvPlan.capacity]), self.spec.hidden)
        self._check(op, tag, name, rows, shape, self.spec.dtype)
        self._check(op, tag, weights_name, weights, shape[:1], self._acc_dtype)

    def _check_plans(self, op: Op, tag: int, recv_plan: Tensor, send_plan: Tensor | None) -> None:
        if type(tag) is not int or not 0 <= tag < NUM_TAGS:
            self._refuse_tag(op, tag)
        self._check(op, tag, "handle.recv_plan", recv_plan, (self.plan_ints,), torch.int32)
        if send_plan is not None:
            num_tokens = send_plan.size(0) if send_plan.dim() else 0  # len() would take longer than the other checks
            self._check(op, tag, "handle.send_plan", send_plan, (num_tokens, self.spec.num_topk), torch.int32)

    def _refuse_tag(self, op: Op, tag: Any) -> NoReturn:
        error = InvalidInput(
            f"tag: got {tag!r}, expected an integer in [0, 2**{_engine.TAG_BITS})", rank=self.rank, op=op
        )
        self._refuse(op, 0, error, 0, 0)

    def _check(self, op: Op, tag: int, name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        try:
            if t.shape == shape and t.dtype is dtype and t.device == self.device and t.layout is _STRIDED:
                return
            got, last = f"{t.dtype} {list(t.shape)} on {t.device}", t.shape[-1] if t.dim() else 0
        except RuntimeError:  # a nested tensor has no shape
            got, last = "", shape[-1]
        got, expected = _odd_kind(t) or got, f"{dtype} {list(shape)} on {self.device}"
        error = InvalidInput(f"{name}: got {got}, expected {expected}", rank=self.rank, op=op)
        self._refuse(op, tag, error, last, shape[-1])


def _odd_kind(t: Any) -> str:
    """What this is, where it is no dense tensor with memory of its own; else nothing."""
    if not isinstance(t, Tensor) or is_traceable_wrapper_subclass(t):
        return f"a {type(t).__module__}.{type(t).__qualname__}".replace("builtins.", "")
    if t.is_nested:
        return "a nested tensor"
    return "" if t.layout is _STRIDED else f"a tensor of layout {t.layout}"


def engine_by_id(engine_id: int) -> Engine:
    """The engine that an op was recorded with; raises GroupClosed when its buffer is gone."""
    engine = _engines.get(engine_id)
    if engine is None:
        raise GroupClosed(f"buffer {engine_id}: got an op on a buffer that no longer exists, expected an open one")
    return engine
