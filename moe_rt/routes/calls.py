"""Numbers a layer's forwards, and finds which of them activation checkpointing recomputes.

A recomputation runs inside a backward, in which micro-batches may come in any order. Both kinds of checkpointing keep
an object from the forward to its recomputation, and it is in a local variable of a function that is running then: the
frame of torch's non-reentrant kind, or the `ctx` of an autograd.Function, as the reentrant kind and compiled graphs
have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint
from torch.utils.checkpoint import _CheckpointFrame


def in_backward() -> bool:
    """True if this thread runs a backward, so that a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Calls:
    """Numbers of one layer's forwards, from 0.

    Attributes:
        count: forwards so far, without recomputations.
    """

    def __init__(self) -> None:
        self.count = 0
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def recomputes(self) -> bool:
        """True if this call recomputes one of the forwards."""
        return in_backward() and any(one in self._numbers for one in _kept_objects())

    def number(self) -> int | None:
        """Return the number of the forward that this call is or recomputes; None if that cannot be found."""
        kept = list(_kept_objects())
        if in_backward():
            known = [self._numbers[one] for one in kept if one in self._numbers]
            if not known:
                return None
            number = known[0]
        else:
            number, self.count = self.count, self.count + 1
        for one in kept:  # checkpointing may be nested, so a recomputation may keep objects for the next one
            self._numbers.setdefault(one, number)
        return number


def _kept_objects() -> Iterator[Any]:
    """Yield what checkpointing keeps for the forwards that run now, innermost first."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for cell in getattr(hooks[0] if hooks else None, "__closure__", None) or ():
        if isinstance(cell.cell_contents, _CheckpointFrame):
            yield cell.cell_contents
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__ and code.co_name in ("checkpoint", "unpack_hook"):
            generator = frame.f_locals.get("gen")
            inner = getattr(generator, "gi_frame", None)
            found = frame.f_locals.get("frame") if inner is None else inner.f_locals.get("new_frame")
            if found is not None:
                yield found
        elif code.co_varnames[:1] == ("ctx",) and isinstance(ctx := frame.f_locals.get("ctx"), FunctionCtx):
            yield ctx
        frame = frame.f_back
