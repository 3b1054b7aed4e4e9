"""Faults that tests inject: in the arguments of launches, in the memory they point to, and in the PTX."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import torch
from ptx.gpu import PtxGpu
from support.rounds import one_round
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer

_WORD = 8


def round_with(group: Any, plant: Callable[[Buffer], None]) -> None:
    """Run a round on a buffer that `plant` has changed."""
    spec = make_spec(2)
    inputs = make_inputs(spec, [12, 7], seed=1)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        plant(buffer)
        one_round(buffer, inputs, seed=1)


def words_swapped(buffer: Buffer) -> None:
    """Swap the addresses of the tokens and of the experts' ids."""

    def swap(words: Any) -> None:
        words[0], words[1] = words[1], words[0]

    _rewrite(buffer, swap)


def half_a_vector_off(buffer: Buffer) -> None:
    def shift(words: Any) -> None:
        words[0] += 8

    _rewrite(buffer, shift)


def a_row_too_remote(buffer: Buffer) -> None:
    def shift(words: Any) -> None:
        words[0] += buffer.spec.hidden * buffer.spec.dtype.itemsize

    _rewrite(buffer, shift)


def tables_given_back(buffer: Buffer) -> None:
    """Free the table of expert placement."""
    buffer._engine._launcher.memory.clear()  # type: ignore[attr-defined]


def _rewrite(buffer: Buffer, change: Callable[[Any], None]) -> None:
    """Change the words of a dispatch's arguments: x, topk_idx, topk_weights and so on."""
    launcher: Any = buffer._engine._launcher  # type: ignore[attr-defined]
    set_call = launcher.set_call

    def changed(args: Any, tag: int) -> None:
        if type(args).__name__ == "DispatchArgs":
            change(ctypes.cast(args.address, ctypes.POINTER(ctypes.c_uint64)))
        set_call(args, tag)

    launcher.set_call = changed


class HostTables(PtxGpu):
    """Returns addresses of the host's memory, which a kernel cannot reach."""

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(values.numpy().tobytes()), dtype=values.dtype)


class SmallSegments(PtxGpu):
    """Each rank owns only the first half of its segment."""

    segment_share = 0.5


def in_entry(name: str, old: str, new: str, which: int = 0) -> Callable[[str], str]:
    """Return an edit that replaces one occurrence of a text in one entry."""
    return _Replaced(name, old, new, which)


class _Replaced:
    def __init__(self, name: str, old: str, new: str, which: int) -> None:
        self._name, self._old, self._new, self._which = name, old, new, which

    def __call__(self, ptx: str) -> str:
        begin = ptx.index(f".visible .entry {self._name}(")
        places = [match.start() for match in re.finditer(re.escape(self._old), ptx) if match.start() > begin]
        at = places[self._which]
        return ptx[:at] + self._new + ptx[at + len(self._old) :]


def without(name: str, pattern: str, instead: str = "") -> Callable[[str], str]:
    """Return an edit that replaces every match of a pattern in one entry."""
    return _Without(name, pattern, instead)


class _Without:
    def __init__(self, name: str, pattern: str, instead: str) -> None:
        self._name, self._pattern, self._instead = name, pattern, instead

    def __call__(self, ptx: str) -> str:
        begin = ptx.index(f".visible .entry {self._name}(")
        end = ptx.find(".visible .entry ", begin + 1)
        piece, count = re.subn(self._pattern, self._instead, ptx[begin:end])
        assert count > 0, f"no {self._pattern!r} in {self._name}"
        return ptx[:begin] + piece + ptx[end:]
