"""Recycled memory under fresh tensors: a large output costs a page fault for every 4 KiB unless its pages are warm.

Every tensor handed out is fresh to its user: nothing else refers to its memory. When the last tensor over a block is
gone, the block is handed out again, pages and all. Tails that nobody writes are never touched and so cost nothing.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

from moe_rt.heap.segments import ask_for_huge_pages

# Below this the allocator's own free lists recycle memory.
_SMALLEST_BLOCK = 1 << 20
_GRANULE = 1 << 21

# References to a block that nobody uses: the list entry, the loop variable, getrefcount's argument.
_UNUSED = 3


class Recycler:
    """Blocks of one engine, freed with it. Not thread-safe: ops of one engine exclude each other."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[mmap.mmap]] = {}

    def empty(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """A contiguous uninitialised tensor [num_rows, hidden], as torch.empty."""
        count = num_rows * hidden
        num_bytes = count * dtype.itemsize
        if num_bytes < _SMALLEST_BLOCK:
            return torch.empty(num_rows, hidden, dtype=dtype)
        block = self._unused_block(-(-num_bytes // _GRANULE) * _GRANULE)
        # The tensor's storage holds a reference to the block until the last view of it is gone.
        return torch.frombuffer(block, dtype=dtype, count=count).view(num_rows, hidden)

    def _unused_block(self, num_bytes: int) -> mmap.mmap:
        blocks = self._blocks.setdefault(num_bytes, [])
        for block in blocks:
            if sys.getrefcount(block) == _UNUSED:
                return block
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ask_for_huge_pages(block)
        blocks.append(block)
        return block
