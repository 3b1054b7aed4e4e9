"""Finds the caller of an op on a Part, which no argument names: clipping, loss scaling, an optimizer or FSDP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, _adafactor
from torch.optim import optimizer as torch_optimizer

_CLIPS_OR_SCALES = (clip_grad.__file__, grad_scaler.__file__)
_FSDP = str(Path(torch.distributed.__file__).parent / "fsdp")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def clips_or_scales() -> bool:
    """True if torch reads a gradient, perhaps from an iterator of gradients, to clip or scale it."""
    return any(frame.f_code.co_filename in _CLIPS_OR_SCALES for frame in islice(_frames(), 10))


def is_fsdp() -> bool:
    """True if FSDP called the caller of this function."""
    return sys._getframe(2).f_code.co_filename.startswith(_FSDP)


def wants_mean_square() -> bool:
    """True if an optimizer counts elements for the root mean square by which it scales an update."""
    code = sys._getframe(2).f_code
    is_for_it = code.co_filename == _adafactor.__file__ or code.co_name.strip("_").removeprefix("get_") == "rms"
    return is_for_it and wants_all_ranks()


def wants_all_ranks() -> bool:
    """True if the caller needs a number that is identical on all ranks: for clipping, or inside an optimizer's step.

    Excluded are the closure that an optimizer calls to compute the loss, optimizer hooks, and code inside a module.
    """
    inside: set[CodeType] = set()
    for frame in _frames():
        code = frame.f_code
        if code.co_filename == clip_grad.__file__:
            return True
        if code.co_filename == torch_optimizer.__file__ and code.co_name == "wrapper":  # runs hooks and the step
            return False
        owner = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, Optimizer):
            return _code_of(frame.f_locals.get("closure")) not in inside
        if isinstance(owner, torch.nn.Module):
            return False
        inside.add(code)
    return False


def _code_of(closure: Any) -> CodeType | None:
    while isinstance(closure, partial):
        closure = closure.func
    return getattr(closure, "__code__", None) or getattr(type(closure).__call__, "__code__", None)
