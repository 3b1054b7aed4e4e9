"""Functions that ranks run in the tests of damaged checkpoints and full disks, on a tensor filled with its step."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from train import cases_train as cases

from moe_rt.errors import WriteFailed
from moe_rt.train import checkpoint, digests
from moe_rt.train.loop import make_optimizer
from moe_rt.train.parallel import process_group

CONFIG = cases.tiny()


def _model(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(64, 64, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def _save(directory: Path, step: int, model: nn.Module | None = None) -> None:
    model = model or _model(step)
    checkpoint.save(directory, step, model, make_optimizer(model, CONFIG), CONFIG)


def save(group: Any, directory: Path, *steps: int) -> None:
    """Save checkpoints in which all weights equal the step."""
    with process_group("cpu", CONFIG.timeout_s):
        for step in steps:
            _save(directory, step)


def load(group: Any, directory: Path) -> int:
    """Return the loaded step, after checking that all weights equal it; without a checkpoint they stay 0."""
    model = _model()
    with process_group("cpu", CONFIG.timeout_s):
        step = checkpoint.load(directory, model, make_optimizer(model, CONFIG), CONFIG)
    assert model.weight.unique().tolist() == [step]
    return step


def load_with_a_late_listing(group: Any, directory: Path) -> int:
    """Load while rank 1 does not see the newest checkpoint yet, as on a network's file system."""
    listed = checkpoint._checkpoints
    if dist.get_rank() == 1:
        checkpoint._checkpoints = lambda *given: listed(*given)[:-1]
    try:
        return load(group, directory)
    finally:
        checkpoint._checkpoints = listed


class _Large(nn.Module):
    """Parts of 256 KiB, so that every rank writes at least one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(256, 256) for _ in range(8))


def save_beyond_the_disk(group: Any, directory: Path) -> tuple[str, int, int]:
    """Return the error of a save whose files do not fit, its rank and its peer; the group must stay usable."""
    try:
        _save(directory, 2, _Large())
    except WriteFailed as error:
        found = str(error), error.rank, error.peer
    else:
        raise AssertionError("the save did not fail")
    dist.barrier()
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000001"]
    assert load(group, directory) == 1
    _save(directory, 3)
    assert load(group, directory) == 3
    return found


def save_beyond_a_limit(group: Any, directory: Path, limited: int) -> tuple[str, int, int]:
    """Save when one rank's files exceed a size limit, and return what save_beyond_the_disk does."""
    _save(directory, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        return save_beyond_the_disk(group, directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def killed_while_reading(group: Any, directory: Path, killed: int) -> None:
    """Rank `killed` is killed while digests are computed, in a save that all ranks began."""
    read = digests._sha256

    def die(path: Path) -> str:
        if dist.get_rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(path)

    digests._sha256 = die
    _save(directory, 1, _Large())
