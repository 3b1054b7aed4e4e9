"""Gathers the experts of all ranks, so that one file serves any number of ranks, without a DeviceMesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_rt.errors import InvalidConfig
from moe_rt.nn.blocks import mark_states
from moe_rt.nn.part import Part, Whole
from moe_rt.nn.part_reductions import group_named


def whole_state_dict(source: nn.Module | Optimizer) -> dict[str, Any]:
    """Return the state dict of a model or an optimizer with the experts of all ranks. Collective.

    Save it on one rank, with any function that saves state dicts. `load_state_dict` of a model or an optimizer accepts
    it on any number of ranks; each rank takes its own experts. DTensors, as in layers over a DeviceMesh, are unchanged:
    torch.distributed.checkpoint saves them.

    Args:
        source: a model, bare or in DistributedDataParallel, or an optimizer with parameters of such a model.

    Returns:
        `source.state_dict()`, with tensors of experts [E, ...], in the order of expert ids, in host memory. Identical
        on all ranks of one expert-parallel group.

    Raises:
        InvalidConfig: a tensor of experts does not have one entry for each expert, as in optimizers that use flat
            vectors.
    """
    if isinstance(source, Optimizer):
        mark_states(source)
    experts: dict[Whole, list[Tensor]] = {}

    def gathered(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: gathered(f"{name}.{k}".lstrip("."), v) for k, v in value.items()}
        if not isinstance(value, Part) or value.whole is None:
            return value
        whole = value.whole
        if not whole.experts or value.dim() == 0 or value.shape[0] != len(whole.experts):
            expected = f"one entry for each of {len(whole.experts)} experts"
            raise InvalidConfig(f"{name}: got a tensor {list(value.shape)}, expected {expected}")
        if whole not in experts:
            experts[whole] = _of_all_ranks(torch.tensor(whole.experts, device=value.device), whole)
        return _whole(value.to_local(), whole, experts[whole])

    return gathered("", dict(source.state_dict()))


def _whole(part: Tensor, whole: Whole, experts: list[Tensor]) -> Tensor:
    blocks = _of_all_ranks(part, whole)
    result = torch.empty((whole.num_experts, *part.shape[1:]), dtype=part.dtype)
    for ids, block in zip(experts, blocks, strict=True):
        result[ids.cpu()] = block.cpu()
    return result


def _of_all_ranks(part: Tensor, whole: Whole) -> list[Tensor]:
    """Gather this tensor from every rank; dimension 0 may differ."""
    group = group_named(whole.group)
    if dist.get_backend(group) == "nccl":  # NCCL takes no host tensors
        part = part.cuda()
    count = torch.tensor([part.shape[0]], device=part.device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    sizes = [int(n) for n in counts]
    padded = part.new_zeros((max(sizes), *part.shape[1:]))
    padded[: part.shape[0]] = part
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [t[:size] for t, size in zip(received, sizes, strict=True)]
