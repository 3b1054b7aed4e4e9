"""Recycled memory under fresh tensors: a large output costs a page fault for every 4 KiB unless its pages are warm.

Every tensor handed out is fresh to its user: nothing else refers to its memory. When the last tensor over a block is
gone, the block is handed out again, pages and all. Tails that nobody writes are never touched and so cost nothing.
"""

from __future__ import annotations

from sys import getrefcount

import torch
from torch import Tensor, is_anomaly_enabled
from torch._C import _storage_Use_Count
from torch.utils import deterministic

from moe_rt.heap.segments import ask_for_huge_pages_at

# Below this the allocator's own free lists recycle memory.
_SMALLEST_BLOCK = 1 << 20
_GRANULE = 1 << 21


class _Block:
    """Pages, and tensors over them of the shape last asked for: handing out one like it is a single call of torch.

    The pages are torch's own, so that whoever saves memory by it can resize a tensor's storage to nothing and back.
    """

    def __init__(self, num_bytes: int, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._num_bytes = num_bytes
        self._take_pages()
        self._view(num_rows, hidden, dtype)

    def _take_pages(self) -> None:
        self._storage = torch.UntypedStorage(self._num_bytes, device="cpu")
        ask_for_huge_pages_at(self._storage.data_ptr(), self._num_bytes)
        self._pages = self._storage.data_ptr(), self._num_bytes

    def _view(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        # An alias of an inference tensor is one for ever, and autograd forgets what is done to it; so there is a tensor
        # for either mode, whichever is on when the pages are first asked for.
        tensors = []
        for inference in (False, True):
            with torch.inference_mode(inference):
                t = torch.empty(0, dtype=dtype, device="cpu")
                tensors.append(t.set_(self._storage, 0, (num_rows, hidden), (hidden, 1)))
        self._tensors, self._viewed_as = tuple(tensors), (num_rows, hidden, dtype)
        # All tensors over a storage share its Python object, too, which has a count of its own.
        self._address = self._storage._cdata
        self._own_uses = _storage_Use_Count(self._address), getrefcount(self._storage)

    def unused(self) -> bool:
        """Whether nobody else refers to these pages."""
        return (_storage_Use_Count(self._address), getrefcount(self._storage)) == self._own_uses

    def tensor(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised, and no view of another tensor."""
        # Whoever resizes a storage has given its pages back, and whoever sends a tensor to another process has moved it
        # to memory that both of them share.
        taken = (self._storage.data_ptr(), self._storage.nbytes()) != self._pages
        if taken:
            self._take_pages()
        if taken or self._viewed_as != (num_rows, hidden, dtype):
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


def blank(t: Tensor) -> Tensor:
    """An uninitialised output whose last rows nobody will write: zero in anomaly mode, which looks at whole tensors."""
    return t.zero_() if is_anomaly_enabled() else t
