"""Checks of an op's tensors that need no engine: each says what is wrong, in the words of the error that refuses it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._C import _has_storage
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_rt import _engine
from moe_rt.config.codec import CODES, MOST_SCALES, SCALES
from moe_rt.engine.differentiation import ONE_BY_ONE, has_tangent
from moe_rt.errors import InvalidInput

_STRIDED = torch.strided


def mismatch(t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[str, int] | None:
    """Describe an operand of the wrong type, shape, dtype or device, with its last size; None if it is right."""
    got, size = "", shape[-1]
    with suppress(RuntimeError):  # a nested tensor has no shape
        if t.shape != shape or t.dtype is not dtype or t.device != device or t.layout is not _STRIDED:
            got, size = f"{t.dtype} {list(t.shape)} on {t.device}", t.shape[-1] if t.dim() else 0
        elif not _has_storage(t) and not t._is_zerotensor():
            got = "a batch of them, as torch.vmap makes"
        else:
            return None
    return _odd_kind(t) or got, size


def operand_problem(t: Any, device: torch.device) -> str:
    """Say why torch's dispatcher would reject an operand; "" if it would not."""
    got, expected = _odd_kind(t), "a torch.Tensor" if not isinstance(t, Tensor) else "a dense one"
    if not got and t.device != device:
        got, expected = f"a tensor on {t.device}", f"one on {device}"
    return f"got {got}, expected {expected}" if got else ""


def codes_problem(x: Any, coded: Any) -> str:
    """Say what is wrong with x and `coded` of a dispatch that delivers codes; "" if nothing is."""
    if type(coded) is not bool:
        return f"coded: got {coded!r}, expected True or False"
    if isinstance(x, tuple) and (len(x) != 2 or x[1] is None):
        return f"x: got a tuple of {len(x)}, expected rows, or (codes, scales)"
    return ""


def tag_problem(tag: Any) -> str:
    """Refusal of a layer's tag."""
    return f"tag: got {tag!r}, expected an integer in [0, 2**{_engine.TAG_BITS})"


def bound_problem(max_tokens: Any, most: int) -> str:
    """Refusal of max_tokens."""
    return f"max_tokens: got {max_tokens!r}, expected an integer in [1, num_max_tokens_per_rank = {most}]"


def codes_expected(x: Tensor, hidden: int) -> tuple[tuple[int, int], torch.dtype]:
    """Return the shape and dtype that codes must have: those of x as far as they may vary, else any valid ones."""
    packed = x.dtype is torch.uint8 and last(x) * 2 == hidden  # two codes per byte
    return (length(x), hidden // 2 if packed else hidden), x.dtype if x.dtype in CODES else CODES[0]


def scales_expected(scales: Tensor, num_tokens: int) -> tuple[tuple[int, int], torch.dtype]:
    """Return the shape and dtype that the scales of codes must have; see `codes_expected`."""
    shape = (num_tokens, min(max(last(scales), 1), MOST_SCALES))
    return shape, scales.dtype if scales.dtype in SCALES else SCALES[0]


def weights_problem(by_token: bool) -> str:
    """Refusal of weights with rows of tokens, whose experts have applied them; or of no weights with other rows."""
    if by_token:
        return 'recv_weights: got weights with layout="tokens", expected None: experts weigh what they add up'
    return 'recv_weights: got NoneType with layout="experts", expected the torch.Tensor that dispatch returned'


def out_problem(out: Tensor, recv_plan: Tensor, send_plan: Tensor) -> str:
    """Say why an `out` of the right shape cannot be written in place; "" if it can.

    It may overlap y or recv_weights, which are read first.
    """
    if not out.is_contiguous() or out.is_neg() or out._is_zerotensor():
        return "out: got a view that is not contiguous, or that torch negates at reading, expected contiguous memory"
    for name, plan in ("handle.recv_plan", recv_plan), ("handle.send_plan", send_plan):
        if overlap(out, plan):
            return memory_problem("out", name)
    return ""


def memory_problem(name: str, whose: str) -> str:
    """Refusal of an operand in memory that ops also write or read as something else."""
    return f"{name}: got memory of {whose}, expected memory that no op writes or reads as anything else"


def as_stored(t: Tensor) -> Tensor:
    """Return the same values as C++ reads them: torch may owe a sign to what is in memory, or have no memory."""
    if t.is_neg() or t._is_zerotensor():
        t = t.resolve_neg() if t.is_neg() else torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    return t.contiguous()


def is_recorded(*tensors: Any) -> bool:
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
