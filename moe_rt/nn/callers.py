"""Finds the caller of a part's op: torch's clipping and loss scaling, an optimizer or FSDP. No argument names it."""

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
    """Return whether torch reads a gradient to clip or scale it, or walks through an iterator of gradients to do so."""
    return any(frame.f_code.co_filename in _CLIPS_OR_SCALES for frame in islice(_frames(), 10))


def is_fsdp() -> bool:
    """Return whether FSDP calls the function that asks."""
    return sys._getframe(2).f_code.co_filename.startswith(_FSDP)


def wants_mean_square() -> bool:
    """Return whether an optimizer counts elements for a root mean square, by which it scales an update."""
    code = sys._getframe(2).f_code
    is_for_it = code.co_filename == _adafactor.__file__ or code.co_name.strip("_").removeprefix("get_") == "rms"
    return is_for_it and wants_all_ranks()


def wants_all_ranks() -> bool:
    """Return whether a number is wanted that must be the same on all ranks: to clip by, or for an optimizer's own ends.

    A closure, which an optimizer calls to compute the loss, is none of these ends, nor is what runs in a module or in
    the hooks of an optimizer.
    """
    inside: set[CodeType] = set()
    for frame in _frames():
        code = frame.f_code
        if code.co_filename == clip_grad.__file__:
            return True
        if code.co_filename == torch_optimizer.__file__ and code.co_name == "wrapper":  # calls hooks, and steps
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
