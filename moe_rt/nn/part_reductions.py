"""Reductions of a whole tensor from those of its parts, and the collectives that Parts refuse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _DisableTorchDispatch
from torch._C._distributed_c10d import _resolve_process_group

from moe_rt.errors import InvalidConfig

if TYPE_CHECKING:
    from moe_rt.nn.part import Part

# Op -> reduction that combines the numbers of all ranks.
_HOW = {
    "_foreach_max": "max", "all": "min", "amax": "max", "amin": "min", "any": "max", "count_nonzero": "sum",
    "dot": "sum", "max": "max", "min": "min", "sum": "sum", "vdot": "sum",
}  # fmt: skip
_NORMS = ("_foreach_norm", "linalg_vector_norm", "norm")


def is_full_reduction(out: Any, parts: list[Part]) -> bool:
    """True if an op reduced each part, or the only one, to one number."""
    results = out if isinstance(out, (list, tuple)) else [out]
    return all(isinstance(t, Tensor) and t.dim() == 0 for t in results) and any(p.dim() > 0 for p in parts)


def reduces_experts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an op reduces a part's dimension 0, which indexes experts, but not all dimensions."""
    name = func.overloadpacket.__name__
    if name not in (*_HOW, *_NORMS, "mean") or not isinstance(args[0], Tensor) or args[0].dim() == 0:
        return False
    whole = getattr(args[0], "whole", None)
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False), **kwargs)
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or ()
    return whole is not None and bool(whole.experts) and any(d % args[0].dim() == 0 for d in dims)


def of_all_ranks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, parts: list[Part]) -> Any:
    """Return the reductions over all ranks, given this rank's. Collective over the group of each part.

    Raises:
        InvalidConfig: a part also holds replicated values, or the result does not follow from those of the parts.
    """
    name = func.overloadpacket.__name__
    if any(p.mixed or p.whole is None for p in parts):
        refuse(f"{name} over experts and replicated parameters in one tensor")
    kind = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    order = 2.0 if kind is None or name not in _NORMS else float(kind)

    def whole(part: Any, number: Tensor) -> Tensor:
        group = getattr(part, "whole", None)
        if group is None:
            return number
        if name in _NORMS:
            return _norm(number, order, group.group)
        if name == "mean":
            total = torch.stack([number * part.numel(), number.new_tensor(float(part.numel()))])
            total = _all_reduce(total, "sum", group.group)
            return total[0] / total[1]
        if name not in _HOW:
            refuse(f"{name} over experts")
        whole_number: Tensor = _all_reduce(number, _HOW[name], group.group)
        return whole_number

    if isinstance(out, (list, tuple)):
        return type(out)(whole(part, number) for part, number in zip(args[0], out, strict=True))
    return whole(parts[0], out)


def _norm(number: Tensor, kind: float, group: str) -> Tensor:
    how = {math.inf: "max", -math.inf: "min"}.get(kind, "sum")
    power = 1.0 if how != "sum" or kind == 0 else kind  # kind 0 counts nonzero elements
    return _all_reduce(number**power, how, group) ** (1 / power)


def _all_reduce(number: Tensor, how: str, group: str) -> Tensor:
    collectives = torch.ops._c10d_functional
    counted = number.to(torch.int32) if number.dtype is torch.bool else number
    total: Tensor = collectives.wait_tensor(collectives.all_reduce(counted, how, group))
    return total.to(number.dtype)


def find_infinities(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Run GradScaler's op on gradients of any kind; found_inf then covers all ranks. Collective over their groups."""
    from torch.distributed.tensor import DTensor

    groups: dict[str, None] = {}  # in the order of the gradients, identical on all ranks
    local = []
    for grad in grads:
        whole = getattr(grad, "whole", None)
        if isinstance(grad, DTensor):
            names = [grad.device_mesh.get_group(i).group_name for i, at in enumerate(grad.placements) if at.is_shard()]
            groups.update(dict.fromkeys(names))
            grad = grad.to_local()
        elif whole is not None:
            groups[whole.group] = None
        local.append(grad)
    with _DisableTorchDispatch():
        torch._amp_foreach_non_finite_check_and_unscale_(local, found_inf, inv_scale)
    for group in groups:
        found_inf.copy_(_all_reduce(found_inf, "max", group))


_MAKES_EQUAL = ("broadcast", "allreduce", "all_reduce", "reduce", "reduce_scatter")


def refuse_collective(func: Any, args: tuple[Any, ...], parts: list[Part]) -> None:
    """Raise InvalidConfig if a collective would treat parts of several ranks as replicas."""
    name = func.overloadpacket.__name__.strip("_")
    if not name.startswith(_MAKES_EQUAL):
        return
    group = next((found for found in map(_process_group, args) if found is not None), None)
    ranks = set(dist.get_process_group_ranks(group)) if group is not None else set()
    for part in parts:
        if part.whole is not None and len(ranks.intersection(_ranks_of(part.whole.group))) > 1:
            refuse(f"{name.removesuffix('_')} of experts")


def group_named(name: str) -> dist.ProcessGroup:
    """Return this process's process group of the given name."""
    group: dist.ProcessGroup = _resolve_process_group(cast(Any, name))
    return group


def _process_group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    if isinstance(value, str):
        try:
            return group_named(value)
        except (KeyError, RuntimeError, ValueError):  # the name of a reduction, not of a group
            return None
    return None


def _ranks_of(group: str) -> list[int]:
    try:
        return dist.get_process_group_ranks(group_named(group))
    except (KeyError, RuntimeError, ValueError):  # the group was destroyed
        return []


def refuse_fsdp(part: Part) -> NoReturn:
    """Raise InvalidConfig in an op by which FSDP takes over a parameter: `replicate` has no earlier hook."""
    ranks = len(_ranks_of(part.whole.group)) if part.whole is not None else "several"
    raise InvalidConfig(
        f"fully_shard or replicate: got experts spread over {ranks} ranks, whose parts it takes for copies of one "
        "another; expected moe_rt.parallel.prepare(model) or moe_rt.parallel.shard_experts(model, mesh) before, and "
        "for replicate ignored_params=set(moe_rt.parallel.expert_parameters(model))"
    )


def refuse(what: str) -> NoReturn:
    """Raise InvalidConfig: the operation `what` treats experts as replicas."""
    raise InvalidConfig(
        f"{what}: got weights that differ between ranks, expected replicas; leave out "
        "moe_rt.parallel.expert_parameters(model), or see moe-rt docs howto/ddp"
    )
