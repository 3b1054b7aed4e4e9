"""Numbers a layer's forwards, and finds which of them activation checkpointing recomputes.

A recomputation runs inside a backward, in which micro-batches may come in any order. Both kinds of checkpointing keep
an object from the forward to its recomputation, and it is in a local variable of a function that is running then: the
frame of torch's non-reentrant kind, or the `ctx` of an autograd.Function, as the reentrant kind and compiled graphs
have.
"""

from __future__ import annotations

import sys
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
        self._numbers: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # of all forwards in a region
        self._turns: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # a backward, and its recomputations

    def recomputes(self) -> bool:
        """True if this call recomputes one of the forwards."""
        return in_backward() and any(again and one in self._numbers for one, again in _kept_objects().values())

    def number(self) -> int | None:
        """Return the number of the forward that this call is or recomputes; None if that cannot be found."""
        kept = _kept_objects().values()
        if in_backward():
            known = [one for one, again in kept if again and one in self._numbers]
            if not known:
                return None
            number = self._next_of(known[0])
        else:
            number, self.count = self.count, self.count + 1
        for one, again in kept:  # checkpointing may be nested, so a recomputation may keep objects for the next one
            if not again:
                self._numbers.setdefault(one, []).append(number)
        return number

    def _next_of(self, region: Any) -> int:
        """Return the next number of a region. A backward recomputes its forwards in order, perhaps several times."""
        backward, numbers = torch._C._current_graph_task_id(), self._numbers[region]
        earlier, turn = self._turns.get(region, (backward, 0))
        turn = turn if earlier == backward else 0
        self._turns[region] = backward, turn + 1
        return numbers[turn % len(numbers)]


def _kept_objects() -> dict[int, tuple[Any, bool]]:
    """Return what checkpointing keeps for the regions that run now, by its id, innermost first; True if it recomputes
    the region."""
    found: dict[int, tuple[Any, bool]] = {}
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for cell in getattr(hooks[0] if hooks else None, "__closure__", None) or ():
        if isinstance(cell.cell_contents, _CheckpointFrame):
            found[id(cell.cell_contents)] = cell.cell_contents, False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__ and code.co_name in ("checkpoint", "unpack_hook"):
            inner = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            one = frame.f_locals.get("frame") if inner is None else inner.f_locals.get("new_frame")
            if one is not None:
                found.setdefault(id(one), (one, code.co_name == "unpack_hook"))
        elif code.co_varnames[:1] == ("ctx",) and isinstance(ctx := frame.f_locals.get("ctx"), FunctionCtx):
            # Functions of any name may run in a forward with its ctx.
            found.setdefault(id(ctx), (ctx, in_backward() and code.co_name != "forward"))
        frame = frame.f_back
    return found
