"""Tensors of which each rank of a group holds a different part: experts' weights, their gradients, optimizer states.

Data parallelism assumes that parameters are replicas. Code that relies on this does not check it, but all its ops pass
through torch's dispatcher, where a Part intervenes:

* A collective that would make parts equal, or sum them, raises InvalidConfig. Read-only collectives (all_gather) run.
* GradScaler's search for infinities finds those of all ranks.
* A norm, sum or other reduction to one number covers all ranks while torch.nn.utils clips gradients and inside an
  optimizer; anywhere else it is local, so that a single rank may inspect its weights.
* Elementwise results, copies, views and optimizer states of a Part are Parts also. Products are not.

Kernels, compiled code and the layer itself see a plain tensor: a Part has its own storage and needs no unwrapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl, _DisableTorchDispatch
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch.compiler import is_compiling
from torch.optim import optimizer as torch_optimizer

from moe_rt.errors import InvalidConfig
from moe_rt.nn.callers import clips_or_scales, is_fsdp, wants_all_ranks, wants_mean_square
from moe_rt.nn.part_reductions import (
    find_infinities,
    is_full_reduction,
    of_all_ranks,
    reduces_experts,
    refuse,
    refuse_collective,
    refuse_fsdp,
)


class Whole(NamedTuple):
    """Identity of the whole tensor that a Part belongs to.

    Attributes:
        group: name of the process group whose ranks hold the parts.
        experts: ids of the experts in this part, one for each entry of dimension 0; empty for a mix of parts.
        num_experts: entries of dimension 0 of all parts together.
    """

    group: str
    experts: tuple[int, ...]
    num_experts: int


class _DispatchUnlessTraced:
    """Part's `__torch_dispatch__`, hidden from torch.compile, which therefore traces a Part as a plain tensor."""

    def __get__(self, part: Part | None, cls: type[Part]) -> Any:
        if part is None and TracingContext.try_get() is not None:
            return Tensor.__torch_dispatch__
        return cls._dispatch


_grad: Any = Tensor.grad
_data: Any = Tensor.data


class Part(Tensor):
    """This rank's part, as a parameter. The module's docstring lists the differences from a plain tensor.

    Args:
        data: a tensor; it shares its memory with the part.
        requires_grad: see torch.nn.Parameter.
        whole: the tensor that it is a part of; None copies the attribute of `data`.
        mixed: the tensor also holds replicated values.
    """

    whole: Whole | None
    mixed: bool  # it also holds replicated values, as torch.cat of all parameters does

    # Accelerate recreates a parameter on another device with the entries of __dict__ as keywords.
    def __new__(
        cls,
        data: Tensor,
        requires_grad: bool = True,
        whole: Whole | None = None,
        mixed: bool = False,
        _is_param: bool = True,
    ) -> Part:
        self = as_part(data, whole or getattr(data, "whole", None), mixed)
        self.requires_grad_(requires_grad)
        self._is_param = _is_param  # isinstance(self, torch.nn.Parameter) reads this
        return self

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]
    __torch_dispatch__ = _DispatchUnlessTraced()

    @classmethod
    def _dispatch(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            refuse_collective(func, args, list(_parts_in((args, kwargs))))
        elif func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            return find_infinities(*args)
        elif func is torch.ops.aten.copy_.default:
            _check_copy(args[0], args[1])
        if is_fsdp():
            refuse_fsdp(next(_parts_in((args, kwargs))))
        if any(t is not Tensor and not issubclass(t, Part) and _dispatches(t) for t in types):
            return NotImplemented
        with _DisableTorchDispatch():
            out = func(*args, **kwargs)
        if func.namespace != "aten" or out is None:
            return out
        parts = list(_parts_in((args, kwargs)))
        if is_full_reduction(out, parts):
            return of_all_ranks(func, args, kwargs, out, parts) if wants_all_ranks() else out
        if reduces_experts(func, args, kwargs) and wants_all_ranks():
            refuse(f"{func.overloadpacket.__name__} over the experts of each rank")
        return _marked(func, args, out, parts)

    @property
    @_disable_dynamo  # like torch.compiler.disable, but imports the compiler, which takes seconds, only when called
    def grad(self) -> Tensor | None:
        """The gradient, as a Part. If it is None, clipping and GradScaler get an empty Part, because all ranks must
        reach the same reductions."""
        grad: Tensor | None = _grad.__get__(self)
        if grad is None:
            return as_part(self.new_empty(0), self.whole) if clips_or_scales() else None
        if type(grad) is Tensor and self.whole is not None:
            grad = as_part(grad, self.whole)
            _grad.__set__(self, grad)  # so that every read returns the same object
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)

    @property
    @_disable_dynamo
    def data(self) -> Tensor:
        data: Tensor = _data.__get__(self)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        _data.__set__(self, value if isinstance(value, Part) else as_part(value, self.whole))

    def numel(self) -> int:
        """Return the number of elements; of all ranks' parts, if an optimizer divides their norm by it."""
        number = Tensor.numel(self)
        if is_compiling() or self.whole is None or not self.whole.experts or not wants_mean_square():
            return number
        return number // len(self.whole.experts) * self.whole.num_experts

    def to_local(self) -> Tensor:
        """Return a plain tensor over the same memory, without a gradient; any collective takes it."""
        return plain(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the array of a plain tensor."""
        return plain(self).requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """Return the list of a plain tensor."""
        return plain(self).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        if id(self) not in memo:
            copy = as_part(plain(self).clone(memory_format=torch.preserve_format), self.whole, self.mixed)
            copy.requires_grad_(self.requires_grad)
            copy._is_param = getattr(self, "_is_param", False)
            memo[id(self)] = copy
        found: Part = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor or parameter, which loads without moe_rt. A tensor records the ids of its experts."""
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (plain(self), self.requires_grad, {})
        tensor = plain(self)
        if self.whole is not None and self.whole.experts:
            tensor.moe_rt_experts = list(self.whole.experts)  # type: ignore[attr-defined]  # see experts_of
        return tensor.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Part({plain(self)!r}, {self.whole})"


# Optimizers update many parameters in one kernel if they know the type of each.
torch_optimizer._foreach_supported_types.append(Part)


def as_part(tensor: Tensor, whole: Whole | None, mixed: bool = False) -> Part:
    """Return a Part over the same memory. It is not a parameter, and autograd does not record it."""
    part: Part = Tensor._make_subclass(Part, plain(tensor) if isinstance(tensor, Part) else tensor.detach())
    part.whole, part.mixed = whole, mixed
    return part


def plain(tensor: Tensor) -> Tensor:
    """Return a plain tensor over the same memory. Autograd does not record it."""
    with _DisableTorchDispatch():
        return tensor.detach()


def experts_of(tensor: Tensor) -> Sequence[int] | None:
    """Return the ids of the experts in a Part or in a tensor loaded from the pickle of a Part; None if unknown."""
    if isinstance(tensor, Part):
        return tensor.whole.experts or None if tensor.whole is not None else None
    return getattr(tensor, "moe_rt_experts", None)


def _check_copy(to: Tensor, of: Tensor) -> None:
    """Raise InvalidConfig if a tensor saved on one rank would overwrite the part of another rank."""
    here, got = experts_of(to), experts_of(of)
    if here and got and to.shape == of.shape and not isinstance(of, Part) and list(here) != list(got):
        raise InvalidConfig(
            f"load: got experts {list(got)}, expected {list(here)}: they were saved on another rank; save "
            "moe_rt.parallel.whole_state_dict(model), or use a DeviceMesh; see moe-rt docs howto/resume"
        )


# Ops that move elements or change shapes.
_MOVES = {
    "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "cat", "clone", "copy", "detach", "diagonal",
    "expand", "index", "index_select", "lift_fresh", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "stack", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
}  # fmt: skip
# Ops whose result may have the shape of a Part, but is one only if all inputs are Parts: otherwise it holds tokens.
_PRODUCTS = {"_grouped_mm", "addbmm", "addmm", "baddbmm", "bmm", "linear", "linalg_matrix_exp", "mm", "matmul"}


def _marked(func: Any, args: tuple[Any, ...], out: Any, parts: list[Part]) -> Any:
    """Return the result of an op on Parts, with the Parts in it marked."""
    name = func.overloadpacket.__name__
    if name in _PRODUCTS and not all(isinstance(t, Part) for t in args if isinstance(t, Tensor)):
        return out
    if isinstance(out, (list, tuple)) and name.startswith("_foreach"):
        at = [_at(args, i) for i in range(len(out))]
        return type(out)(_mark(t, own, False) if own else t for t, own in zip(out, at, strict=True))
    moves = name in _MOVES
    mixes = name in ("cat", "stack") and any(not isinstance(t, Part) and t.numel() for t in args[0])
    shapes = {p.shape for p in parts}
    counts = {(p.dim(), len(p.whole.experts)) for p in parts if p.whole is not None}

    def mark(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dim() == 0:
            return t
        is_part = moves or t.shape in shapes or (t.dim(), t.shape[0]) in counts
        return _mark(t, parts, mixes) if is_part else t

    return type(out)(mark(t) for t in out) if isinstance(out, (list, tuple)) else mark(out)


def _at(args: tuple[Any, ...], i: int) -> list[Part]:
    """Return the Parts among the i-th entries of a _foreach op's lists."""
    return [a[i] for a in args if isinstance(a, (list, tuple)) and i < len(a) and isinstance(a[i], Part)]


def _mark(t: Tensor, parts: list[Part], mixed: bool) -> Part:
    if isinstance(t, Part):  # of an op in place, whose result torch does not use
        return t
    wholes = {p.whole for p in parts if p.whole is not None}
    whole = wholes.pop() if wholes else None
    for other in wholes:
        mixed |= other.group != whole.group  # type: ignore[union-attr]
        whole = Whole(whole.group, (), 0)  # type: ignore[union-attr]
    if whole is not None and (t.dim() != parts[0].dim() or t.shape[0] != len(whole.experts)):
        whole = Whole(whole.group, (), 0)  # a piece, for example one expert's weights
    return as_part(t, whole, mixed or any(p.mixed for p in parts))


def _parts_in(values: Any) -> Iterator[Part]:
    if isinstance(values, Part):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _parts_in(value)
    elif isinstance(values, dict):
        yield from _parts_in(tuple(values.values()))


def _dispatches(kind: type) -> bool:
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]
