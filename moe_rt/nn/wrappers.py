"""Hooks that refuse torch's wrappers and optimizers if they would treat experts as replicas."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as torch_optimizer

from moe_rt.errors import InvalidConfig
from moe_rt.nn.blocks import mark_states
from moe_rt.nn.part import Part
from moe_rt.nn.spread import names_in, spread_modules


def _refuse_wrapper(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuse an unprepared model. torch calls this before a module gets a child, so before DDP broadcasts."""
    if child is None or not isinstance(parent, (DistributedDataParallel, DataParallel)):
        return
    ignored = getattr(parent, "parameters_to_ignore", ())
    for path, module, inner in spread_modules(child):
        if inner.num_ranks == 1:
            continue
        inner.mark_parameters(module)
        if inner.mean is None or not names_in(module, path).issubset(ignored):
            raise InvalidConfig(
                f"{type(parent).__name__}: got {path or 'experts'} spread over {inner.num_ranks} ranks, whose parts "
                "it takes for copies of one another; expected moe_rt.parallel.prepare(model), called with the model "
                "that DistributedDataParallel gets"
            )
        ranks = dist.get_world_size(cast(dist.ProcessGroup, parent.process_group))
        if ranks != inner.mean.num_ranks:
            raise InvalidConfig(
                f"DistributedDataParallel: got {ranks} ranks, expected the {inner.mean.num_ranks} of the group that "
                "moe_rt.parallel.prepare(model, group) was called with"
            )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Turn loaded states into Parts, and refuse LBFGS and ZeroRedundancyOptimizer. torch calls this before a step.

    ZeroRedundancyOptimizer would broadcast one rank's updated experts to all others.
    """
    mark_states(optimizer)
    if isinstance(optimizer, LBFGS) and _has_parts(optimizer):
        raise InvalidConfig(
            "LBFGS: got experts that are spread over ranks: each rank's loss differs, so ranks would take different "
            "steps; expected an optimizer that steps once for each gradient"
        )
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # imported if any exists
    if zero is None or not isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return
    if _has_parts(optimizer):
        raise InvalidConfig(
            "ZeroRedundancyOptimizer: got experts that are spread over ranks, which it would overwrite with one "
            "rank's; expected an optimizer of their own for moe_rt.parallel.expert_parameters(model)"
        )


def _has_parts(optimizer: Optimizer) -> bool:
    return any(isinstance(p, Part) for group in optimizer.param_groups for p in group["params"])


@cache
def watch_wrappers() -> None:
    """Register these hooks with torch, once."""
    register_module_module_registration_hook(_refuse_wrapper)
    torch_optimizer.register_optimizer_step_pre_hook(_before_step)
