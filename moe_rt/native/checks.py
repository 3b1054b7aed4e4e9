"""Checks of an op's arguments before it is announced. Wrong input is refused, so that every rank raises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _has_storage
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_rt import _engine
from moe_rt.config.row_format import CODES, MOST_SCALES, SCALES, RowFormat
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidInput, MoeRtError, Op
from moe_rt.native.differentiation import ONE_BY_ONE, has_tangent
from moe_rt.native.token_window import TokenWindows

# A layer's tag travels in TAG_BITS bits.
NUM_TAGS = 1 << _engine.TAG_BITS
_STRIDED = torch.strided


class Checks(ABC):
    """One rank's argument checks, against the sizes that its group agreed on."""

    spec: BufferSpec
    rank: int
    device: torch.device
    plan_ints: int
    by_token: bool
    _acc_dtype: torch.dtype
    _windows: TokenWindows | None
    _reader: _engine.TensorReader  # accepts plain input in one call; only what it rejects is checked here

    @abstractmethod
    def _next_window(self) -> int | None:
        """Return the token window that the next op takes if it is a dispatch; None if the host does not know."""

    @abstractmethod
    def _refuse(self, op: Op, tag: int, error: MoeRtError, got: int, expected: int) -> NoReturn:
        """Announce that this rank refuses the op because of its input, then raise `error`."""

    def weights_shape(self, capacity: int) -> tuple[int, ...]:
        """Shape of recv_weights: one weight per row or, with rows of tokens, K weights per row."""
        return (capacity, self.spec.num_topk) if self.by_token else (capacity,)

    def require_call(self, op: Op, tag: int, max_tokens: Any = None, **tensors: Any) -> None:
        """Refuse arguments that torch's dispatcher would reject before the engine sees them: peers would wait."""
        if not isinstance(tag, int | torch.SymInt) or not 0 <= tag < NUM_TAGS:
            self._refuse_tag(op, tag)
        if max_tokens is not None and not isinstance(max_tokens, int | torch.SymInt):
            self._refuse_bound(tag, max_tokens)
        for name, t in tensors.items():
            got, expected = _odd_kind(t), "a torch.Tensor" if not isinstance(t, Tensor) else "a dense one"
            if not got and t.device != self.device:
                got, expected = f"a tensor on {t.device}", f"one on {self.device}"
            if got:
                error = InvalidInput(f"{name}: got {got}, expected {expected}", rank=self.rank, op=op)
                self._refuse(op, tag, error, 0, 0)

    def codes_and_scales(self, tag: int, x: Any, coded: Any) -> tuple[Tensor, Tensor | None]:
        """Return the codes, or rows to encode, and the scales of a dispatch that delivers codes."""
        message = ""
        if type(coded) is not bool:
            message = f"coded: got {coded!r}, expected True or False"
        elif isinstance(x, tuple) and (len(x) != 2 or x[1] is None):
            message = f"x: got a tuple of {len(x)}, expected rows, or (codes, scales)"
        if message:
            self._refuse(Op.DISPATCH, tag, InvalidInput(message, rank=self.rank, op=Op.DISPATCH), 0, 0)
        return x if isinstance(x, tuple) else (x, None)

    def refuse_handle(self, handle: Any) -> NoReturn:
        """Refuse a combine whose handle is not a Handle."""
        message = f"handle: got a {type(handle).__name__}, expected the Handle that dispatch returned with these rows"
        self._refuse(Op.COMBINE, 0, InvalidInput(message, rank=self.rank, op=Op.COMBINE), 0, 0)

    def require_no_grad(self, tag: int, *tensors: Any) -> None:
        """Refuse a combine with out= that would lose a gradient, as torch does; peers may record none."""
        if _recorded(*tensors):
            message = "out: got a combine that gradients are recorded of, expected torch.no_grad(), or no out"
            self._refuse(Op.COMBINE, tag, InvalidInput(message, rank=self.rank, op=Op.COMBINE), 0, 0)

    def require_no_grad_through_codes(self, tag: int, *tensors: Any) -> None:
        """Refuse a dispatch of codes that would lose a gradient; peers may record none."""
        if _recorded(*tensors):
            got = "codes, or coded=True, in a dispatch that gradients are recorded of"
            message = f"x: got {got}, expected torch.no_grad(), as codes have none"
            self._refuse(Op.DISPATCH, tag, InvalidInput(message, rank=self.rank, op=Op.DISPATCH), 0, 0)

    def require_no_grad_into_window(self, tag: int, x: Any, topk_weights: Any) -> None:
        """Refuse a dispatch from a token window if autograd would save rows that later ops overwrite."""
        if self._windows is not None and _recorded(x, topk_weights) and isinstance(x, Tensor):
            self.refuse_recorded_window(tag, x)

    def refuse_recorded_window(self, tag: int, x: Tensor) -> None:
        """Refuse x if it is in a token window. The caller has found that gradients or tangents are wanted."""
        if self._windows is not None and self._windows.hold(x):
            got = "a token window in a dispatch that gradients are recorded of"
            message = f"x: got {got}, expected torch.no_grad(), or rows in memory of their own: windows are overwritten"
            self._refuse(Op.DISPATCH, tag, InvalidInput(message, rank=self.rank, op=Op.DISPATCH), 0, 0)

    def require_window_as_handed_out(self, tag: int, x: Tensor) -> None:
        """Refuse rows that a graph has copied: it writes its inputs at its end, when peers may read the next op's."""
        if self._windows is not None and self._windows.beside(x):
            got = "rows that a graph has copied from a token window, or that are not in it"
            message = f"x: got {got}, expected token_window to be written and dispatched outside of torch.compile"
            self._refuse(Op.DISPATCH, tag, InvalidInput(message, rank=self.rank, op=Op.DISPATCH), 0, 0)

    def _check_window(self, tag: int, x: Tensor, scaled: bool) -> None:
        """Refuse rows in a token window that this op cannot publish as they are."""
        assert self._windows is not None
        got = "codes in a token window" if scaled else self._windows.why_not(x, self._next_window())
        if got:
            expected = "all rows of the tensor that token_window gave since the last op, or memory of their own"
            error = InvalidInput(f"x: got {got}, expected {expected}", rank=self.rank, op=Op.DISPATCH)
            self._refuse(Op.DISPATCH, tag, error, 0, 0)

    def _check_scaled(self, tag: int, x: Tensor, scales: Tensor | None) -> RowFormat:
        """Check a dispatch of codes. Return the row format of x and scales or, without scales, of the codec."""
        s, op, num_tokens = self.spec, Op.DISPATCH, length(x)
        if scales is None:
            if s.dispatch_dtype is None:
                message = "coded: got True without scales, expected a buffer with a dispatch_dtype, or (codes, scales)"
                self._refuse(op, tag, InvalidInput(message, rank=self.rank, op=op), 0, 0)
            return RowFormat.of_codec(s.dispatch_dtype, s.hidden)
        packed = x.dtype is torch.uint8 and last(x) * 2 == s.hidden
        codes = x.dtype if x.dtype in CODES else CODES[0]
        shape = (num_tokens, s.hidden // 2 if packed else s.hidden)
        self._check(op, tag, "x[0], codes", x, shape, codes, may_be_window=True)
        dtype, count = scales.dtype if scales.dtype in SCALES else SCALES[0], last(scales)
        self._check(op, tag, "x[1], scales", scales, (num_tokens, min(max(count, 1), MOST_SCALES)), dtype)
        row, room = RowFormat.of(x, scales), s.shape().row_bytes()
        if row.row_bytes > room:
            message = f"x: got rows of {row.row_bytes} bytes with their scales, expected at most {room}"
            self._refuse(op, tag, InvalidInput(message, rank=self.rank, op=op), row.row_bytes, room)
        return row

    def _check_rows(
        self, op: Op, tag: int, name: str, rows: Tensor, weights_name: str, weights: Tensor | None
    ) -> tuple[int, int]:
        """Check rows and weights, and return the count of each. The engine compares the counts with the plan."""
        num_rows = length(rows)
        self._check(op, tag, name, rows, (num_rows, self.spec.hidden), self.spec.dtype)
        if weights is None:
            return num_rows, _engine.ANY_CAPACITY
        capacity = length(weights)
        shape = self.weights_shape(capacity) if self.by_token else (capacity,)
        self._check(op, tag, weights_name, weights, shape, self._acc_dtype)
        if num_rows > capacity:
            message = f"{name}: got {num_rows} rows, expected at most those of {weights_name}, {capacity}"
            self._refuse(op, tag, InvalidInput(message, rank=self.rank, op=op), num_rows, capacity)
        return num_rows, capacity

    def _refuse_weights(self, op: Op, tag: int) -> NoReturn:
        """Refuse weights with rows of tokens, whose experts have applied them, and missing weights with other rows."""
        got = 'weights with layout="tokens", expected None: experts weigh what they add up'
        if not self.by_token:
            got = 'NoneType with layout="experts", expected the torch.Tensor that dispatch returned'
        self._refuse(op, tag, InvalidInput(f"recv_weights: got {got}", rank=self.rank, op=op), 0, 0)

    def _check_plans(self, op: Op, tag: int, recv_plan: Tensor, send_plan: Tensor | None) -> None:
        if type(tag) is not int or not 0 <= tag < NUM_TAGS:
            self._refuse_tag(op, tag)
        self._check(op, tag, "handle.recv_plan", recv_plan, (self.plan_ints,), torch.int32)
        if send_plan is not None:
            shape = (length(send_plan), self.spec.num_topk)
            self._check(op, tag, "handle.send_plan", send_plan, shape, torch.int32)

    def _check_grad_out(self, op: Op, tag: int, grad_out: Tensor, recv_plan: Tensor) -> int:
        """Check the operands of a combine backward and return the number of tokens."""
        num_tokens = length(grad_out)
        self._check_plans(op, tag, recv_plan, None)
        self._check(op, tag, "grad_out", grad_out, (num_tokens, self.spec.hidden), self.spec.dtype)
        return num_tokens

    def _check_out(self, op: Op, tag: int, out: Tensor, num_tokens: int, plans: tuple[Tensor, Tensor]) -> None:
        """Refuse an `out` that cannot be written in place. It may overlap y or recv_weights, which are read first."""
        self._check(op, tag, "out", out, (num_tokens, self.spec.hidden), self.spec.dtype)
        if not out.is_contiguous() or out.is_neg() or out._is_zerotensor():
            message = (
                "out: got a view that is not contiguous, or that torch negates at reading, expected contiguous memory"
            )
            self._refuse(op, tag, InvalidInput(message, rank=self.rank, op=op), 0, 0)
        for name, plan in zip(("handle.recv_plan", "handle.send_plan"), plans, strict=True):
            if overlap(out, plan):
                self._refuse_memory(op, tag, "out", name)

    def _refuse_memory(self, op: Op, tag: int, name: str, whose: str) -> NoReturn:
        """Refuse an operand in memory that ops also write or read as something else."""
        message = f"{name}: got memory of {whose}, expected memory that no op writes or reads as anything else"
        self._refuse(op, tag, InvalidInput(message, rank=self.rank, op=op), 0, 0)

    def _refuse_tag(self, op: Op, tag: Any) -> NoReturn:
        error = InvalidInput(
            f"tag: got {tag!r}, expected an integer in [0, 2**{_engine.TAG_BITS})", rank=self.rank, op=op
        )
        self._refuse(op, 0, error, 0, 0)

    def _refuse_bound(self, tag: int, max_tokens: Any) -> NoReturn:
        most = self.spec.num_max_tokens_per_rank
        message = f"max_tokens: got {max_tokens!r}, expected an integer in [1, num_max_tokens_per_rank = {most}]"
        self._refuse(Op.DISPATCH, tag, InvalidInput(message, rank=self.rank, op=Op.DISPATCH), 0, 0)

    def _check(
        self, op: Op, tag: int, name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype,
        may_be_window: bool = False,
    ) -> None:  # fmt: skip
        """Refuse an operand of the wrong type, shape, dtype or device, or in memory that ops write."""
        got, last, is_right = "", shape[-1], False
        with suppress(RuntimeError):  # a nested tensor has no shape
            if t.shape != shape or t.dtype is not dtype or t.device != self.device or t.layout is not _STRIDED:
                got, last = f"{t.dtype} {list(t.shape)} on {t.device}", t.shape[-1] if t.dim() else 0
            elif not _has_storage(t) and not t._is_zerotensor():
                got = "a batch of them, as torch.vmap makes"
            else:
                is_right = True
        if is_right:
            if self._windows is not None and self._windows.touch(t) and not may_be_window:
                self._refuse_memory(op, tag, name, "a token window")
            return
        got, expected = _odd_kind(t) or got, f"{dtype} {list(shape)} on {self.device}"
        error = InvalidInput(f"{name}: got {got}, expected {expected}", rank=self.rank, op=op)
        self._refuse(op, tag, error, last, shape[-1])


def _recorded(*tensors: Any) -> bool:
    """True if torch records an op on these tensors for a backward, or follows a tangent of one."""
    wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    return wanted or (forward_ad._current_level >= 0 and any(has_tangent(t) for t in tensors))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors have memory in common."""
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes


def last(t: Tensor) -> int:
    """Size of the last dimension, or 0."""
    try:
        return t.shape[-1]
    except (IndexError, RuntimeError):  # see length
        return 0


def length(t: Tensor) -> int:
    """Size of the first dimension, or 0. Equally fast alternatives raise for some kinds of tensors."""
    try:
        return t.shape[0]
    except (IndexError, RuntimeError):  # a scalar, a nested tensor
        return 0


def require_plain(**tensors: Any) -> None:
    """Raise InvalidInput for anything but a dense tensor, and under torch.vmap, which turns one call into many."""
    if not is_dynamo_compiling() and any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ()):
        raise InvalidInput(f"call: {ONE_BY_ONE}")
    for name, t in tensors.items():
        if got := _odd_kind(t):
            raise InvalidInput(f"{name}: got {got}, expected a dense torch.Tensor")


def _odd_kind(t: Any) -> str:
    """Describe an argument that is not a dense tensor with its own memory; "" if it is one."""
    if not isinstance(t, Tensor) or is_traceable_wrapper_subclass(t):
        return f"a {type(t).__module__}.{type(t).__qualname__}".replace("builtins.", "")
    if t.is_nested:
        return "a nested tensor"
    return "" if t.layout is _STRIDED else f"a tensor of layout {t.layout}"
