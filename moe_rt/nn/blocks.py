"""Experts in checkpoint files: checks which experts a file holds, and takes this rank's from a file with all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from moe_rt.errors import InvalidConfig
from moe_rt.nn.part import Part, as_part, experts_of


class _Holder(Protocol):
    num_ranks: int
    num_experts: int
    expert_ids: tuple[int, ...]
    over_mesh: bool


def note_mesh_block(tensor: Any) -> None:
    """Record on a DTensor the coordinate of its block in the mesh, so that a pickle keeps it."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is not None:
        tensor.moe_rt_block = list(mesh.get_coordinate())


def check_held(name: str, saved: Sequence[int], holder: _Holder) -> None:
    """Raise InvalidConfig if a file records experts that are neither those of `holder` nor all."""
    if list(saved) not in (list(holder.expert_ids), list(range(holder.num_experts))):
        _refuse(name, f"experts {_short(saved)}", holder.expert_ids)


def take_own_block(name: str, got: Any, parameter: Tensor, holder: _Holder) -> Any:
    """Return the tensor to load into a parameter of `holder`.

    Args:
        got: the tensor of the file, with this rank's experts or all of them in dimension 0.

    Raises:
        InvalidConfig: it holds another rank's experts, or a different number of them.
    """
    if holder.over_mesh:
        _check_mesh_block(name, got, parameter)
        return got
    here = holder.expert_ids
    stacked = here and isinstance(got, Tensor) and got.dim() > 0 and parameter.shape[:1] == (len(here),)
    if not stacked or hasattr(got, "device_mesh"):
        return got
    return own_block(name, got, experts_of(got), here, holder.num_experts)


def own_block(name: str, got: Tensor, ids: Sequence[int] | None, here: Sequence[int], num_experts: int) -> Tensor:
    """Return the entries of the experts `here` from a tensor of the experts `ids`, which is None if unknown.

    Raises:
        InvalidConfig: the tensor holds another rank's experts, or neither this rank's nor all.
    """
    if got.shape[0] == num_experts != len(here):
        return got[torch.tensor(here, dtype=torch.int64, device=got.device)]
    if ids is not None and list(ids) != list(here):
        _refuse(name, f"experts {_short(ids)}", here)
    if got.shape[0] != len(here):
        _refuse(name, f"{got.shape[0]} experts", here)
    return got


def _check_mesh_block(name: str, got: Any, parameter: Any) -> None:
    block = getattr(got, "moe_rt_block", None)
    if block is None:
        return
    here = list(parameter.device_mesh.get_coordinate() or ())  # a loaded mesh has its saver's coordinate
    if list(block) != here:
        raise InvalidConfig(
            f"{name}: got the block at {list(block)} of the mesh, expected the one at {here}: it was saved on another "
            "rank; save with torch.distributed.checkpoint, see moe-rt docs howto/resume"
        )


def _refuse(name: str, got: str, here: Sequence[int]) -> NoReturn:
    raise InvalidConfig(
        f"{name}: got {got}, expected this rank's, {_short(here)}, or all of them: ranks hold different experts, so a "
        "file that one rank saves has only its own; save moe_rt.parallel.whole_state_dict(model), or use a DeviceMesh; "
        "see moe-rt docs howto/resume"
    )


def _short(ids: Sequence[int]) -> str:
    return str(list(ids)) if len(ids) <= 8 else f"[{ids[0]}, {ids[1]}, ... {ids[-1]}]"


def mark_states(optimizer: torch.optim.Optimizer) -> None:
    """Turn an optimizer's loaded states of Parts into Parts. A state of all experts is cut to this rank's.

    Raises:
        InvalidConfig: a state was saved on another rank, for other experts.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not isinstance(p, Part) or p.whole is None:
                continue
            state = optimizer.state.get(p) or {}
            for key, value in state.items():
                if not isinstance(value, Tensor) or isinstance(value, Part) or value.dim() == 0:
                    continue
                if p.whole.experts and value.dim() == p.dim() and value.shape[1:] == p.shape[1:]:
                    what = f"optimizer state {key}"
                    value = own_block(what, value, experts_of(value), p.whole.experts, p.whole.num_experts)
                state[key] = as_part(value, p.whole)
