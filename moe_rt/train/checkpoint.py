"""Checkpoints that do not depend on how experts are spread: torch.distributed.checkpoint, one entry per global expert.

A checkpoint is written under a temporary name, flushed, and renamed when complete, so the remains of a crash are never
mistaken for one. A checkpoint whose digests do not match is set aside, and an older one is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from moe_rt.errors import CorruptCheckpoint, InvalidConfig, WriteFailed
from moe_rt.nn.layer import MoELayer
from moe_rt.nn.part import Part, plain
from moe_rt.train import digests
from moe_rt.train.all_or_none import all_or_none, in_words
from moe_rt.train.config import MODEL_FIELDS, TrainConfig
from moe_rt.train.index import IndexedReader, IndexedWriter

KEPT = 2
MANIFEST = "manifest.json"
DAMAGED = ".damaged"

State = dict[str, dict[str, Tensor]]


def save(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """Write `directory`/step-..., then remove all but the newest KEPT. Collective over the world.

    Raises:
        WriteFailed: the system refused a rank, for example on a full disk; raised on all ranks. Nothing is left
            of this checkpoint, older ones are unchanged, and the group and the model remain usable.
    """
    final = directory / f"step-{step:08d}"
    unfinished = final.with_suffix(".tmp")
    main = dist.get_rank() == 0
    manifest = {"step": step, **{name: getattr(config, name) for name in MODEL_FIELDS}}
    state = global_state(model, optimizer)
    state["rng"] = {"cpu": torch.get_rng_state()}
    try:
        all_or_none(lambda: _begin(unfinished) if main else None, WriteFailed, digests.WRITE)
        writer = IndexedWriter(unfinished)
        state_dict_saver.save(state, storage_writer=writer)
        all_or_none(lambda: _write_manifest(unfinished, manifest, writer) if main else None, WriteFailed, digests.WRITE)
        digests.write(unfinished)
        all_or_none(lambda: _publish(unfinished, final) if main else None, WriteFailed, digests.WRITE)
    except (WriteFailed, CheckpointException) as error:
        if main:
            shutil.rmtree(unfinished, ignore_errors=True)
        peer, reason = _failure(error)
        raise WriteFailed(f"{final}: got no checkpoint: {reason}", rank=dist.get_rank(), peer=peer) from error


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig) -> int:
    """Load the newest intact checkpoint in place and return its step; 0, and load nothing, if no checkpoint exists.

    Collective over the world; rank 0 prints what is loaded, and why a newer one is not.

    Raises:
        CorruptCheckpoint: checkpoints exist, but none is intact; names the files.
        InvalidConfig: the checkpoint is of another model; names the field.
    """
    # All ranks use rank 0's listing, so that all load the same checkpoint.
    names: list[str] = all_or_none(
        lambda: [path.name for path in _checkpoints(directory)], CorruptCheckpoint, digests.READ
    )[0]
    damaged: dict[Path, str] = {}
    for path in (directory / name for name in reversed(names)):
        try:
            manifest = _read_whole(path)
        except CorruptCheckpoint as error:
            damaged[path] = str(error)
            continue
        _load_whole(path, manifest, model, optimizer, config)
        if dist.get_rank() == 0:
            _set_aside(damaged)
            print(f"resume: goes on from {path}")
        return int(manifest["step"])
    if damaged:
        listed = "\n".join(f"{path}: {why}" for path, why in damaged.items())
        raise CorruptCheckpoint(f"expected a whole checkpoint under {directory}, got none:\n{listed}")
    if dist.get_rank() == 0:
        print(f"resume: {directory} has no checkpoint, so this starts from step 0")
    return 0


def _load_whole(
    path: Path, manifest: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> None:
    for name in MODEL_FIELDS:
        got, expected = getattr(config, name), manifest.get(name)
        if got != expected:
            raise InvalidConfig(f"{name}: got {got}, expected {expected} as in the checkpoint {path}")
    state = global_state(model, optimizer)
    state["rng"] = {"cpu": torch.get_rng_state()}
    try:
        state_dict_loader.load(state, storage_reader=IndexedReader(path, manifest["tensors"]))
    except CheckpointException as error:
        reason = _failure(error)[1]
        raise InvalidConfig(f"got a model that the whole checkpoint {path} does not fit: {reason}") from error
    torch.set_rng_state(state["rng"]["cpu"])
    for moments in optimizer.state.values():
        moments["step"].fill_(manifest["step"])


def global_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Views of parameters, moments and persistent buffers, under names that do not depend on the number of ranks."""
    state: State = {"model": {}, "exp_avg": {}, "exp_avg_sq": {}}
    experts = {
        f"{prefix}.experts.{name}": (f"{prefix}.experts", name, module.expert_ids)
        for prefix, module in model.named_modules()
        if isinstance(module, MoELayer)
        for name, _ in module.experts.named_parameters()
    }
    for name, p in model.named_parameters():
        tensors = {"model": p, **{key: optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")}}
        for kind, part in tensors.items():
            tensor = plain(part)
            if name in experts:
                prefix, leaf, expert_ids = experts[name]
                for expert, view in zip(expert_ids, tensor.unbind(), strict=True):
                    state[kind][f"{prefix}.{expert}.{leaf}"] = view
            else:
                state[kind][name] = tensor
    persistent = model.state_dict()
    state["model"] |= {
        name: buffer for name, buffer in model.named_buffers() if name in persistent and not isinstance(buffer, Part)
    }
    return state


def _begin(unfinished: Path) -> None:
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    for leftover in unfinished.parent.glob("*.tmp"):
        _remove(leftover)
    unfinished.mkdir()


def _write_manifest(directory: Path, manifest: dict[str, Any], writer: IndexedWriter) -> None:
    (directory / MANIFEST).write_text(json.dumps({**manifest, "tensors": writer.index}) + "\n")


def _read_whole(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint that is unchanged and under its original name. Collective."""
    digests.check(path)
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        step = manifest["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{MANIFEST}: got {in_words(error)}, expected a step") from error
    if path.name != f"step-{step:08d}":
        raise CorruptCheckpoint(f"{MANIFEST}: got step {step}, expected that of {path.name}")
    return manifest


def _publish(unfinished: Path, final: Path) -> None:
    for name in (MANIFEST, digests.SUMS, "."):
        _flush(unfinished / name)
    if os.path.lexists(final):
        _retire(final)
    unfinished.rename(final)
    _flush(final.parent)
    for old in _checkpoints(final.parent)[:-KEPT]:
        _retire(old)
    for damaged in _checkpoints(final.parent, DAMAGED):
        if _step(damaged) <= _step(final):
            _remove(damaged)


def _checkpoints(directory: Path, suffix: str = "") -> list[Path]:
    """Entries named as a checkpoint, intact or not, oldest first."""
    if not directory.exists():
        return []
    named = re.compile(r"step-\d{8,}" + re.escape(suffix))
    return sorted((path for path in directory.iterdir() if named.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _set_aside(damaged: dict[Path, str]) -> None:
    """Rename damaged checkpoints until training has passed them, so that KEPT counts intact ones."""
    for path, why in damaged.items():
        aside = path.with_suffix(DAMAGED)
        with contextlib.suppress(OSError):  # without the right to rename, removing fails as well
            _remove(aside)
            path.rename(aside)
        print(f"resume: {path} is damaged, so it is now {aside.name} and an older one is used: {why}")


def _retire(checkpoint: Path) -> None:
    """Rename before removing, so that a half-removed checkpoint is never taken for an intact one."""
    doomed = checkpoint.with_suffix(".old.tmp")
    checkpoint.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a file, link or directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _failure(error: WriteFailed | CheckpointException) -> tuple[int, str]:
    """Return the peer that failed first, or -1 if this rank did, and the reason."""
    if isinstance(error, WriteFailed):
        return error.peer, str(error)
    rank, (cause, _) = min(error.failures.items())
    return -1 if rank == dist.get_rank() else rank, f"rank {rank} got {in_words(cause)}"


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
