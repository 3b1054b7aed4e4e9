"""Registers how torch's dispatcher differentiates an op, and refuses what torch would differentiate wrongly.

torch.library supports only backwards: what it registers silently drops the tangents of forward mode, and its errors
under transforms of functions (torch.func) describe its internals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._library.autograd import Info, make_autograd_impl
from torch._VF import _make_dual, _unpack_dual
from torch.autograd import forward_ad
from torch.library import Library
from torch.utils._pytree import tree_leaves, tree_map_only

from moe_rt.errors import InvalidInput

Args: TypeAlias = tuple[Any, ...]
# Raises InvalidInput with the message, about a call with these arguments.
Refuse: TypeAlias = Callable[[str, Args], NoReturn]
# Returns the tangents of an op's outputs, None for an output without, from its arguments and their tangents.
TangentRule: TypeAlias = Callable[[Args, Args], Any]

_LEVEL = 0  # forward mode's only level; torch.autograd.forward_ad does not see levels that graphs enter
ONE_BY_ONE = "got a call under torch.vmap, or a transform built on it, expected one call for each sample or direction"
_NOT_FUNCTIONAL = (
    "got a gradient under torch.func (grad, vjp, jacrev, ...), expected torch.autograd.grad, or backward()"
)
SECOND_DERIVATIVE = "got a second derivative, expected first ones only"


def refuse_call(message: str, _: Args = ()) -> NoReturn:
    """Refuse a call of an op that involves no peer."""
    raise InvalidInput(message)


def differentiate(
    lib: Library,
    name: str,
    backward: Callable[..., Any],
    set_up: Callable[..., None] | None,
    *,
    tangents: TangentRule,
    refuse: Refuse = refuse_call,
) -> None:
    """Register an op's backward as torch.library.register_autograd does, and the rule for its tangents."""
    record = make_autograd_impl(getattr(torch.ops.moe_rt, name).default, Info(backward, set_up))

    def run(keyset: Any, *args: Any) -> Any:
        leaves = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if _are_functorch_transforms_active() and torch.is_grad_enabled() and any(t.requires_grad for t in leaves):
            refuse(f"{name}: {_NOT_FUNCTIONAL}", args)
        if not any(has_tangent(t) for t in leaves):
            return record(keyset, *args)
        primals = tree_map_only(Tensor, lambda t: _unpack_dual(t, _LEVEL).primal, args)
        moved = tangents(primals, tree_map_only(Tensor, lambda t: _unpack_dual(t, _LEVEL).tangent, args))
        result = record(keyset, *primals)
        if isinstance(result, Tensor):
            return _make_dual(result, moved, _LEVEL)
        return tuple(r if t is None else _make_dual(r, t, _LEVEL) for r, t in zip(result, moved, strict=True))

    lib.impl(name, run, "Autograd", with_keyset=True)
    refuse_vmap(lib, name, refuse)


def refuse_vmap(lib: Library, name: str, refuse: Refuse) -> None:
    """Refuse torch.vmap for an op: it is never run for many samples in one call."""
    lib.impl(name, lambda *args, **_: refuse(f"{name}: {ONE_BY_ONE}", args), "FuncTorchBatched")


def has_tangent(t: Any) -> bool:
    """True if forward mode has a tangent of this tensor."""
    if forward_ad._current_level < 0 and not _are_functorch_transforms_active():
        return False  # unpacking is an op, which a tracer would record
    return isinstance(t, Tensor) and _unpack_dual(t, _LEVEL).tangent is not None
