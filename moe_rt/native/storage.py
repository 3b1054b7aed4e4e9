"""Recycled memory under fresh tensors: a large output costs a page fault for every 4 KiB unless its pages are warm.

Every tensor handed out is fresh to its user: nothing else refers to its memory. When the last tensor over a block is
gone, the block is handed out again, pages and all. Tails that nobody writes are never touched and so cost nothing.
"""

from __future__ import annotations

import mmap
from sys import getrefcount

import torch
from torch import Tensor
from torch._C import _storage_Use_Count
from torch.utils import deterministic

from moe_rt.heap.segments import ask_for_huge_pages

# Below this the allocator's own free lists recycle memory.
_SMALLEST_BLOCK = 1 << 20
_GRANULE = 1 << 21


class _Block:
    """Pages, and tensors over them of the shape last asked for: handing out one like it is a single call of torch."""

    def __init__(self, num_bytes: int, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ask_for_huge_pages(self._pages)
        self._view(num_rows, hidden, dtype)

    def _view(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        # An alias of an inference tensor is one for ever, and autograd forgets what is done to it; so there is a tensor
        # for either mode, whichever is on when the pages are first asked for.
        with torch.inference_mode(False):
            t = torch.frombuffer(self._pages, dtype=dtype, count=num_rows * hidden).view(num_rows, hidden)
        # All tensors over a storage share its Python object, too, which has a count of its own.
        self._storage = t.untyped_storage()
        with torch.inference_mode():
            for_inference = t.new_empty(0).set_(self._storage, 0, t.shape, t.stride())
        self._tensors = t, for_inference
        self._address, self._pages_at = self._storage._cdata, t.data_ptr()
        self._own_uses = _storage_Use_Count(self._address), getrefcount(self._storage)

    def unused(self) -> bool:
        """Whether nobody else refers to these pages."""
        return (_storage_Use_Count(self._address), getrefcount(self._storage)) == self._own_uses

    def tensor(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised, and no view of another tensor."""
        t = self._tensors[0]
        # Whoever sends a tensor to another process moves its storage to memory that both of them share.
        if t.shape != (num_rows, hidden) or t.dtype is not dtype or t.data_ptr() != self._pages_at:
            self._view(num_rows, hidden, dtype)
        out = self._tensors[torch.is_inference_mode_enabled()].detach()
        fill: bool = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if fill and torch.are_deterministic_algorithms_enabled():
            out.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)  # as torch.empty
        return out


class Recycler:
    """Blocks of one engine, freed with it. Not thread-safe: ops of one engine exclude each other."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}

    def empty_like(self, t: Tensor, num_rows: int, hidden: int) -> Tensor:
        """The same of the dtype of a CPU tensor: where the allocator has the memory, a third faster."""
        if num_rows * hidden * t.itemsize < _SMALLEST_BLOCK:
            return t.new_empty(num_rows, hidden)
        return self.empty(num_rows, hidden, t.dtype)

    def empty(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """A contiguous uninitialised CPU tensor [num_rows, hidden], as torch.empty in whatever mode is on."""
        num_bytes = num_rows * hidden * dtype.itemsize
        if num_bytes < _SMALLEST_BLOCK:
            return torch.empty(num_rows, hidden, dtype=dtype, device="cpu")  # whatever the default device is
        num_bytes = -(-num_bytes // _GRANULE) * _GRANULE
        blocks = self._blocks.setdefault(num_bytes, [])
        for block in blocks:
            if block.unused():
                return block.tensor(num_rows, hidden, dtype)
        blocks.append(_Block(num_bytes, num_rows, hidden, dtype))
        return blocks[-1].tensor(num_rows, hidden, dtype)
