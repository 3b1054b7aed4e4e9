"""Checkpoints that do not depend on how experts are spread: torch.distributed.checkpoint, one entry per global expert.

A checkpoint is written under another name, flushed, and renamed when it is whole; what a crash leaves behind is never
taken for one. The format's index is a pickle, so load only checkpoints that you trust.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from moe_rt.errors import InvalidConfig
from moe_rt.layer import MoELayer
from moe_rt.train.config import MODEL_FIELDS, TrainConfig

KEPT = 2
MANIFEST = "manifest.json"

State = dict[str, dict[str, Tensor]]


def save(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """Writes `directory`/step-..., then removes all but the newest KEPT. Collective over the world."""
    final = directory / f"step-{step:08d}"
    unfinished = final.with_suffix(".tmp")
    main = dist.get_rank() == 0
    if main:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("*.tmp"):
            shutil.rmtree(leftover)
        unfinished.mkdir()
    dist.barrier()
    state = global_state(model, optimizer)
    state["rng"] = {"cpu": torch.get_rng_state()}
    state_dict_saver.save(state, checkpoint_id=unfinished)
    if main:
        manifest = {"step": step, **{name: getattr(config, name) for name in MODEL_FIELDS}}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _flush(unfinished / MANIFEST)
        _flush(unfinished)
        if final.exists():
            _remove(final)
        unfinished.rename(final)
        _flush(directory)
        for old in _complete(directory)[:-KEPT]:
            _remove(old)
    dist.barrier()


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig) -> int:
    """Loads the newest checkpoint in place and returns its step; 0, and nothing loaded, if there is none. Collective.

    Raises:
        InvalidConfig: it is of another model; names the field.
    """
    # Rank 0 looks, so that all ranks load the same one.
    steps = [int(path.name.removeprefix("step-")) for path in _complete(directory)]
    newest = torch.tensor(steps[-1] if steps else 0)
    dist.broadcast(newest, 0)
    step = int(newest)
    if step == 0:
        return 0
    path = directory / f"step-{step:08d}"
    manifest = json.loads((path / MANIFEST).read_text())
    for name in MODEL_FIELDS:
        got, expected = getattr(config, name), manifest[name]
        if got != expected:
            raise InvalidConfig(f"{name}: got {got}, expected {expected} as in the checkpoint {path}")
    state = global_state(model, optimizer)
    state["rng"] = {"cpu": torch.get_rng_state()}
    state_dict_loader.load(state, checkpoint_id=path)
    torch.set_rng_state(state["rng"]["cpu"])
    for moments in optimizer.state.values():
        moments["step"].fill_(step)
    return step


def global_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Views of parameters, moments and persistent buffers, under names that are the same for any number of ranks."""
    state: State = {"model": {}, "exp_avg": {}, "exp_avg_sq": {}}
    experts = {
        f"{prefix}.experts.{name}": (f"{prefix}.experts", name, module.expert_ids)
        for prefix, module in model.named_modules()
        if isinstance(module, MoELayer)
        for name, _ in module.experts.named_parameters()
    }
    for name, p in model.named_parameters():
        tensors = {"model": p.detach(), **{key: optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")}}
        for kind, tensor in tensors.items():
            if name in experts:
                prefix, leaf, expert_ids = experts[name]
                for expert, view in zip(expert_ids, tensor.unbind(), strict=True):
                    state[kind][f"{prefix}.{expert}.{leaf}"] = view
            else:
                state[kind][name] = tensor
    persistent = model.state_dict()
    state["model"] |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return state


def _complete(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(
        p for p in directory.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name) and (p / MANIFEST).is_file()
    )


def _remove(checkpoint: Path) -> None:
    """Renames first, so that one that is half removed is never taken for a whole one."""
    doomed = checkpoint.with_suffix(".old.tmp")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
