"""Checks that a given buffer or mesh matches the sizes and placement of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.comm.buffer import Buffer
from moe_rt.config.placement import Placement
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidConfig


def check_blocks(spec: BufferSpec, mesh: DeviceMesh) -> None:
    """Raise InvalidConfig unless each rank holds one equal block of experts, in rank order, as a DTensor does.

    All ranks raise or none does, because they agreed on `spec`.
    """
    size = mesh.size()
    if size != spec.num_ranks:
        raise InvalidConfig(f"group: got a mesh of {size} ranks, expected {spec.num_ranks} as in the buffer")
    if spec.num_experts % size:
        raise InvalidConfig(f"num_experts: got {spec.num_experts}, expected a multiple of the mesh's {size} ranks")
    placement = spec.placement
    if placement != Placement.contiguous(spec.num_experts, size):
        raise InvalidConfig(f"placement: got {list(placement.ranks)}, expected contiguous blocks, or a ProcessGroup")
    members = mesh.mesh.flatten().tolist()
    if members != sorted(members):  # a group's ranks ascend, whatever the mesh's order
        raise InvalidConfig(f"group: got a mesh of ranks {members}, expected ascending ones, or a ProcessGroup")


def fitting(buffer: Any, config: Any, dtype: torch.dtype | None, placement: Placement | None = None) -> Buffer:
    """Return `buffer`. Raise InvalidConfig if a size, dtype or placement differs; a dtype or placement of None fits."""
    if not isinstance(buffer, Buffer):
        raise InvalidConfig(f"buffer: got {type(buffer).__name__}, expected a moe_rt.Buffer")
    fields = {f: getattr(config, f) for f in ("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts")}
    for name, expected in {**fields, "dtype": dtype, "placement": placement, "layout": "experts"}.items():
        got = getattr(buffer.spec, name)
        if expected is not None and got != expected:
            raise InvalidConfig(f"buffer.{name}: got {got}, expected {expected} as in the layer")
    return buffer
