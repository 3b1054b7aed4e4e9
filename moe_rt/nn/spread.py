"""Modules whose parameters differ between ranks: they are marked, averaged, and saved with their expert ids.

A SpreadModule turns its parameters into Parts (moe_rt/nn/part.py) whenever they are created, assigned, loaded, moved or
cast. Their gradients become means, as in data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.nn.averaging import Mean, averaged
from moe_rt.nn.blocks import check_held, note_mesh_block, take_own_block
from moe_rt.nn.part import Part, Whole, as_part
from moe_rt.nn.part_reductions import find_infinities, group_named

# Name of the buffer that records in a checkpoint which experts it holds.
HELD = "held_experts"


class SpreadModule(nn.Module):
    """A module whose parameters, including those of its children, differ between ranks.

    Attributes:
        num_ranks: number of ranks that hold parts; 1 before `spread_over`.
        expert_ids: experts of this rank, one for each entry of dimension 0 of each parameter; empty if unknown.
        num_experts: number of experts of all ranks.
        mean: the mean that gradients become, or None if they stay sums.
        mean_of_rows: the layer divides the gradient of rows, not gradients of parameters, since an adapter around the
            experts has parameters that `parts` does not return.
        trains_somewhere: some rank's experts need gradients, so every rank takes part in the backward.
        sharded: `moe_rt.parallel.shard_experts` has handed the parts to FSDP.
        param_dtype: dtype to which FSDP casts the parameters for `forward`, or None for no cast.
        over_mesh: the parameters are DTensors; set by `shard_over`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    def _begin(self) -> None:
        self.num_ranks, self.num_experts = 1, 0
        self.expert_ids: tuple[int, ...] = ()
        self.mean: Mean | None = None
        self.trains_somewhere = self.sharded = self.over_mesh = self.mean_of_rows = False
        self.param_dtype: torch.dtype | None = None
        self._spread_group: str | None = None

    def spread_over(
        self, num_ranks: int, group: dist.ProcessGroup | None, expert_ids: Sequence[int] = (), num_experts: int = 0
    ) -> None:
        """Set the ranks that hold the other parts, and this rank's experts. Parameters become Parts over `group`."""
        self.num_ranks, self.expert_ids, self.num_experts = num_ranks, tuple(expert_ids), num_experts
        self._spread_group = group.group_name if group is not None and num_ranks > 1 else None
        if self._spread_group is not None and expert_ids and not self.over_mesh:
            # The ids are stored as a tensor, so that tensor-only file formats keep them.
            held = torch.tensor(expert_ids, device="cpu")  # on the CPU, so reading it does not wait for a GPU
            self.register_buffer(HELD, as_part(held, self._whole))
        self.mark_parameters()

    @property
    def _whole(self) -> Whole:
        assert self._spread_group is not None
        return Whole(self._spread_group, self.expert_ids, self.num_experts)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that hold the parts; None for a single rank and for threads."""
        name = self._spread_group
        return None if name is None else group_named(name)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return next(self.parameters()).dtype

    def shard_over(self, mesh: DeviceMesh) -> None:
        """Make every parameter a DTensor [E, ...] in equal blocks over all ranks of a mesh. Local."""
        from torch.distributed.tensor import DTensor, Shard  # here, since it would slow `import moe_rt` by a second

        scale_all_gradients()
        for name, p in list(self.named_parameters(recurse=False)):
            block = DTensor.from_local(p.detach(), mesh, [Shard(0)] * mesh.ndim, run_check=False)
            self.register_parameter(name, nn.Parameter(block, p.requires_grad))
        self.over_mesh = True

    def parts(self, *names: str) -> dict[str, Tensor]:
        """Return this rank's parts of the named parameters, for `forward`, as plain tensors whose gradients become the
        mean `self.mean`."""
        if not is_compiling():
            self.mark_parameters()  # offloading hooks write to _parameters without register_parameter
        mean = Mean(1, self.mean.replicas) if self.mean is not None and self.mean_of_rows else self.mean
        return averaged({name: self._part(name) for name in names}, mean)

    def check_copies(self) -> None:
        """Raise InvalidConfig if means over copies of this module have no place in the order of ops."""

    def _part(self, name: str) -> Tensor:
        weight: Any = getattr(self, name)
        part: Tensor = weight.to_local() if self.over_mesh else weight
        return part

    def mark_parameters(self, root: nn.Module | None = None) -> None:
        """Turn parameters that are not yet Parts into Parts, in this module or in `root`, an adapter around it."""
        if self._spread_group is None or self.sharded:
            return
        whole = self._whole
        for module in (root or self).modules():
            for name, p in module._parameters.items():
                # DTensors know their ranks, and other subclasses of Tensor are left unchanged.
                is_marked = isinstance(p, Part) and p.whole == whole
                if p is not None and type(p) in (nn.Parameter, Tensor, Part) and not is_marked:
                    mark_parameter(module, name, p, whole)

    def unmark_parameters(self) -> None:
        """Turn Parts into plain parameters again, for FSDP."""
        for name, p in list(self._parameters.items()):
            if isinstance(p, Part):
                self._parameters[name] = nn.Parameter(p.to_local(), p.requires_grad)
        self._buffers.pop(HELD, None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter and mark it. torch also calls this for an assignment."""
        super().register_parameter(name, param)
        if param is not None and "_spread_group" in self.__dict__:
            self.mark_parameters()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)  # may replace parameters
        self.mark_parameters()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A pickle has plain parameters; a deep copy, which also calls this, has Parts. Only modules over the default
        # group are pickled, and that group may have another name in this process.
        if self._spread_group is not None and not any(isinstance(p, Part) for p in self.parameters()):
            self._spread_group = dist.group.WORLD.group_name if dist.group.WORLD is not None else None
        self.mark_parameters()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.over_mesh:
            for name in self._parameters:
                note_mesh_block(destination.get(prefix + name))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as torch does, but take only this rank's experts from tensors with all of them.

        Raises:
            InvalidConfig: the experts are another rank's; names the parameter and the experts got and expected.
        """
        state_dict = dict(state_dict)
        saved = state_dict.pop(prefix + HELD, None)  # absent in files of single ranks and of other programs
        if HELD in self._buffers:
            state_dict[prefix + HELD] = self._buffers[HELD]
        if saved is not None and self.expert_ids:
            check_held(prefix + HELD, saved.tolist(), self)
        if not self.sharded:
            for name, p in self._parameters.items():
                if prefix + name in state_dict and p is not None:
                    state_dict[prefix + name] = take_own_block(prefix + name, state_dict[prefix + name], p, self)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.mark_parameters()  # load_state_dict(assign=True) replaces parameters


def scale_all_gradients() -> None:
    """Replace GradScaler's op, which takes DTensors over only one mesh, without plain ones among them."""
    from torch.distributed.tensor import DTensor

    aten = torch.ops.aten
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[aten._amp_foreach_non_finite_check_and_unscale_.default] = _find_infinities


def _find_infinities(op_call: Any, args: Any, kwargs: Any) -> None:
    find_infinities(*args)


def mark_parameter(module: nn.Module, name: str, p: nn.Parameter, whole: Whole) -> None:
    """Turn a parameter into a Part. If torch can swap them it stays the same object, which an optimizer may hold."""
    part = Part(p.detach(), p.requires_grad, whole)
    if p.grad is not None:
        part.grad = as_part(p.grad, whole)
    part.__dict__.update({key: value for key, value in p.__dict__.items() if key not in part.__dict__})
    try:
        torch.utils.swap_tensors(p, part)
    except RuntimeError:  # a graph or a weak reference refers to it
        module._parameters[name] = part  # type: ignore[assignment]


def spread_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, SpreadModule]]:
    """Yield path, module and SpreadModule of all experts, including those of a single rank.

    The two modules differ if an adapter wraps a layer's experts: the adapter's parameters then count as the experts'.
    """
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        holder = getattr(module, "holds_experts", False)
        children = dict(module.named_children())
        if holder and "experts" in children:
            path, module = f"{path}.experts".lstrip("."), children["experts"]
        elif not isinstance(module, SpreadModule):
            continue
        inside.update(module.modules())
        inner = next((m for m in module.modules() if isinstance(m, SpreadModule)), None)
        if inner is not None:
            yield path, module, inner


def spread_names(model: nn.Module) -> set[str]:
    """Return the names of all parameters and buffers that differ between ranks."""
    found = [(path, module) for path, module, inner in spread_modules(model) if inner.num_ranks > 1]
    return {name for path, module in found for name in names_in(module, path)}


def names_in(module: nn.Module, path: str) -> set[str]:
    """Return the names of all parameters and buffers of a module at `path`."""
    values = chain(module.named_parameters(), module.named_buffers())
    return {f"{path}.{name}".lstrip(".") for name, _ in values}


def spread_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, SpreadModule]]:
    """Return by name each parameter that differs between ranks, with its SpreadModule."""
    return {
        f"{path}.{name}".lstrip("."): (p, inner)
        for path, module, inner in spread_modules(model)
        if inner.num_ranks > 1
        for name, p in module.named_parameters()
    }
