"""Recycled memory for outputs: a large output costs a page fault per 4 KiB unless its pages are warm.

Every tensor handed out is fresh: nothing else refers to its memory. When the last tensor over a block is freed, the
block is handed out again with its pages. Tails that are not written are never touched and cost nothing.
"""

from __future__ import annotations

from sys import getrefcount

import torch
from torch import Tensor, is_anomaly_enabled
from torch._C import _storage_Use_Count
from torch.utils import deterministic

from moe_rt.config.tuning import Tuning
from moe_rt.memory.segments import ask_for_huge_pages_at

_GRANULE = 1 << 21  # a huge page


class _Block:
    """Pages, and tensors over them of the shape last asked for: handing out the same shape is one call of torch.

    torch owns the pages, so that code that saves memory can resize a tensor's storage to zero and back.
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
        # An alias of an inference tensor stays one, and autograd ignores changes to it. Keep one tensor for each mode:
        # the pages may first be requested in either.
        tensors = []
        for inference in (False, True):
            with torch.inference_mode(inference):
                t = torch.empty(0, dtype=dtype, device="cpu")
                tensors.append(t.set_(self._storage, 0, (num_rows, hidden), (hidden, 1)))
        self._tensors, self._viewed_as = tuple(tensors), (num_rows, hidden, dtype)
        # All tensors over a storage also share its Python object, with its own reference count.
        self._address = self._storage._cdata
        self._own_uses = _storage_Use_Count(self._address), getrefcount(self._storage)

    def unused(self) -> bool:
        """True if nothing else refers to these pages."""
        return (_storage_Use_Count(self._address), getrefcount(self._storage)) == self._own_uses

    def tensor(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that is no view of another one."""
        # A user may have resized the storage, which frees its pages, or sent a tensor to another process, which moves
        # it to shared memory.
        taken = (self._storage.data_ptr(), self._storage.nbytes()) != self._pages
        if taken:
            self._take_pages()
        if taken or self._viewed_as != (num_rows, hidden, dtype):
            self._view(num_rows, hidden, dtype)
        out = self._tensors[torch.is_inference_mode_enabled()].detach()
        fill: bool = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if fill and torch.are_deterministic_algorithms_enabled():
            out.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)  # like torch.empty
        return out


class Recycler:
    """Blocks of one engine, freed with it. Not thread-safe: an engine runs one op at a time.

    Args:
        smallest: size of the smallest block, in bytes; the allocator's own free lists recycle smaller ones.
    """

    def __init__(self, smallest: int = Tuning.recycled_bytes) -> None:
        self._smallest = smallest
        self._blocks: dict[int, list[_Block]] = {}

    def empty_like(self, t: Tensor, num_rows: int, hidden: int) -> Tensor:
        """Return `empty` of a CPU tensor's dtype; small outputs take a third less time."""
        if num_rows * hidden * t.itemsize < self._smallest:
            return t.new_empty(num_rows, hidden)
        return self.empty(num_rows, hidden, t.dtype)

    def empty(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Return a contiguous uninitialised CPU tensor [num_rows, hidden], like torch.empty in the current mode."""
        num_bytes = num_rows * hidden * dtype.itemsize
        if num_bytes < self._smallest:
            return torch.empty(num_rows, hidden, dtype=dtype, device="cpu")  # whatever the default device is
        num_bytes = -(-num_bytes // _GRANULE) * _GRANULE
        blocks = self._blocks.setdefault(num_bytes, [])
        for block in blocks:
            if block.unused():
                return block.tensor(num_rows, hidden, dtype)
        blocks.append(_Block(num_bytes, num_rows, hidden, dtype))
        return blocks[-1].tensor(num_rows, hidden, dtype)


def blank(t: Tensor) -> Tensor:
    """Zero an output in anomaly mode, which checks whole tensors: its last rows are never written."""
    return t.zero_() if is_anomaly_enabled() else t
