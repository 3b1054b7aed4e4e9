"""Parameters of which every rank holds others: their gradients averaged, their norm, and wrappers that would mix them.

Data parallelism takes parameters for copies of one another: it broadcasts them, averages their gradients, shards them.
A SpreadModule says that its parameters are none. Wrappers that have not been told raise when they wrap.
"""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from moe_rt.errors import InvalidConfig


class Mean(NamedTuple):
    """A mean of gradients over `num_ranks` ranks, of which those of the process group named `replicas` hold copies."""

    num_ranks: int
    replicas: str | None


class SpreadModule(nn.Module):
    """A module whose parameters, other than its children's, differ between ranks.

    Attributes:
        num_ranks: how many ranks hold the parts; 1 until `spread_over` says more.
        mean: what gradients are averaged over, or None where they stay sums.
        sharded: FSDP was told about the parts, by `moe_rt.parallel.shard_experts`.
        over_mesh: the parameters are DTensors, since `shard_over`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_ranks = 1
        self.mean: Mean | None = None
        self.sharded = self.over_mesh = False
        self._spread_group: str | None = None
        self._managed = False

    def spread_over(self, num_ranks: int, group: dist.ProcessGroup | None) -> None:
        """Says who holds the other parts; `group` lets norms of gradients count them, for parameters that can."""
        self.num_ranks = num_ranks
        self._spread_group = group.group_name if group is not None and num_ranks > 1 else None
        self._mark_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(self.parameters()).dtype

    def shard_over(self, mesh: DeviceMesh) -> None:
        """Makes every parameter a DTensor [E, ...] in equal blocks over all ranks of a mesh. Local."""
        from torch.distributed.tensor import DTensor, Shard  # here, since it makes `import moe_rt` a second slower

        for name, p in list(self.named_parameters(recurse=False)):
            block = DTensor.from_local(p.detach(), mesh, [Shard(0)] * mesh.ndim, run_check=False)
            self.register_parameter(name, nn.Parameter(block, p.requires_grad))
        self.over_mesh = True

    def parts(self, *names: str) -> dict[str, Tensor]:
        """This rank's part of each of these parameters, for `forward`: gradients become the mean that `mean` says."""
        return {name: self.averaged(self._part(name)) for name in names}

    def _part(self, name: str) -> Tensor:
        weight: Any = getattr(self, name)
        part: Tensor = weight.to_local() if self.over_mesh else weight
        return part

    def averaged(self, weight: Tensor) -> Tensor:
        """The weight itself; its gradient becomes the mean."""
        mean = self.mean
        if mean is None:
            return weight
        result: Tensor = _Averaged.apply(weight, mean.num_ranks, mean.replicas)
        return result

    def _mark_parameters(self) -> None:
        if self._spread_group is not None and not self.sharded:
            for name, p in list(self._parameters.items()):
                if type(p) is nn.Parameter:  # DTensors know their ranks
                    self.register_parameter(name, SpreadParameter(p.data, p.requires_grad, self._spread_group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A pickle has plain parameters; a deep copy, which comes here too, does not. Only modules over the default
        # group are pickled, and here it may have another name.
        if self._spread_group is not None and any(type(p) is nn.Parameter for p in self._parameters.values()):
            self._spread_group = dist.group.WORLD.group_name if dist.group.WORLD is not None else None
            self._mark_parameters()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_parameters()  # load_state_dict(assign=True) brings parameters of its own

    # FSDP, both kinds of it, writes this into every module whose parameters it shards.
    @property
    def _is_fsdp_managed_module(self) -> bool:
        return self._managed

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        if value and self.num_ranks > 1 and not self.sharded:
            raise InvalidConfig(
                f"fully_shard: got experts spread over {self.num_ranks} ranks, whose parts it takes for copies of one "
                "another; expected moe_rt.parallel.prepare(model) or moe_rt.parallel.shard_experts(model, mesh) before"
            )
        self._managed = value


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, num_ranks: int, replicas: str | None) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.num_ranks, ctx.replicas = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Every backward by itself, so that sums over micro-batches need no other rule, with and without no_sync.
        grad = grad / ctx.num_ranks
        if ctx.replicas is not None:
            collectives = torch.ops._c10d_functional
            grad = collectives.wait_tensor(collectives.all_reduce(grad.contiguous(), "sum", ctx.replicas))
        return grad, None, None


_grad: Any = torch.Tensor.grad


class SpreadParameter(nn.Parameter):
    """A plain part. What torch.nn.utils.clip_grad_norm_ reads of its gradient counts the parts of the whole group."""

    group: str

    def __new__(cls, data: Tensor, requires_grad: bool, group: str) -> SpreadParameter:
        self = super().__new__(cls, data, requires_grad)
        self.group = group
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadParameter:
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = type(self)(data, self.requires_grad, self.group)
        found: SpreadParameter = memo[id(self)]
        return found

    @property
    @_disable_dynamo  # torch.compiler.disable, which imports the compiler at the first call only: it takes seconds
    def grad(self) -> Tensor | None:
        grad: Tensor | None = _grad.__get__(self)
        if grad is None or not _read_for_clipping():
            return grad
        part = grad.as_subclass(_PartOfGradient)
        part.group = self.group
        return part

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)


# Optimisers update many parameters in one kernel if they know the type of each.
torch_optimizer._foreach_supported_types.append(SpreadParameter)


def _read_for_clipping() -> bool:
    """Whether the gradient is read in torch.nn.utils.clip_grad, or in an iterator that it walks through."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_filename == clip_grad.__file__:
            return True
        frame = frame.f_back
    return False


class _PartOfGradient(Tensor):
    """A gradient whose norm is that of the parts of all ranks; everything else is the part's own."""

    group: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func is torch.linalg.vector_norm:
                return _norm_over(args[0], result, *args[1:])
            if func is torch._foreach_norm:
                parts = zip(args[0], result, strict=True)
                return [_norm_over(t, norm, *args[1:]) if isinstance(t, cls) else norm for t, norm in parts]
            return result


def _norm_over(part: _PartOfGradient, norm: Tensor, kind: float = 2.0) -> Tensor:
    """The norm of the whole from the norm of each part. Collective over the group."""
    collectives = torch.ops._c10d_functional
    how = {math.inf: "max", -math.inf: "min"}.get(kind, "sum")
    power = 1.0 if how != "sum" or kind == 0 else float(kind)  # of kind 0 is the number of elements that are not 0
    whole: Tensor = collectives.wait_tensor(collectives.all_reduce(norm**power, how, part.group))
    return whole ** (1 / power)


def _refuse_wrapper(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """torch calls this before a module gets a child: DistributedDataParallel's before it broadcasts."""
    if child is None or not isinstance(parent, (DistributedDataParallel, DataParallel)):
        return
    told = getattr(parent, "parameters_to_ignore", ())
    for path, module in child.named_modules():
        if not isinstance(module, SpreadModule) or module.num_ranks == 1:
            continue
        names = {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
        if module.mean is None or not names.issubset(told):
            raise InvalidConfig(
                f"{type(parent).__name__}: got {path or 'experts'} spread over {module.num_ranks} ranks, whose parts "
                "it takes for copies of one another; expected moe_rt.parallel.prepare(model), called with the model "
                "that DistributedDataParallel gets"
            )
        ranks = dist.get_world_size(cast(dist.ProcessGroup, parent.process_group))
        if ranks != module.mean.num_ranks:
            raise InvalidConfig(
                f"DistributedDataParallel: got {ranks} ranks, expected the {module.mean.num_ranks} of the group that "
                "moe_rt.parallel.prepare(model, group) was called with"
            )


def _refuse_zero(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch calls this before a step: ZeroRedundancyOptimizer's broadcasts what one rank has updated to all others."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # imported by whoever has one
    if zero is None or not isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return
    if any(isinstance(p, SpreadParameter) for group in optimizer.param_groups for p in group["params"]):
        raise InvalidConfig(
            "ZeroRedundancyOptimizer: got experts that are spread over ranks, which it would overwrite with one "
            "rank's; expected an optimizer of their own for moe_rt.parallel.expert_parameters(model)"
        )


register_module_module_registration_hook(_refuse_wrapper)
torch_optimizer.register_optimizer_step_pre_hook(_refuse_zero)
