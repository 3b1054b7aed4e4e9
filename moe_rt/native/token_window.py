"""Tensors over a rank's own token windows, for producers that write their rows where peers will read them.

Such a tensor is for the very next op. The op before has waited for every peer, so that nobody reads this window any
more, and the dispatch that follows takes it; after any other op, the next dispatch might take the other one
(docs/protocol.md). What lies in a window is overwritten by later ops: each of them counts as a change in place, so that
autograd raises where it has kept a window for a backward, instead of reading other rows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moe_rt import _engine
from moe_rt.config.spec import BufferSpec


class TokenWindows:
    """Both windows of one rank, and which of them was handed out for the next op.

    Args:
        shape: of the segment.
        address: of the rank's segment.
        keep: what keeps the segment mapped; tensors hold it, too.
    """

    def __init__(self, spec: BufferSpec, shape: _engine.Shape, address: int, device: torch.device, keep: Any) -> None:
        itemsize, num_rows = spec.dtype.itemsize, spec.num_max_tokens_per_rank
        pitch = shape.row_bytes()
        self._starts = tuple(address + shape.tokens_at(window) for window in range(2))
        self._num_bytes = num_rows * pitch
        with torch.inference_mode(False):  # or autograd would forget what is done to them, whatever mode comes later
            self._rows = tuple(
                _bytes_at(start, self._num_bytes, device, keep)
                .view(spec.dtype)
                .view(num_rows, pitch // itemsize)[:, : spec.hidden]
                for start in self._starts
            )
        self._handed: int | None = None

    def hand_out(self, window: int, num_tokens: int) -> Tensor:
        """[num_tokens, H] over what the next op publishes, if that is a dispatch. No view of another tensor."""
        self._handed = window
        return self._rows[window][:num_tokens].detach()

    def touch(self, t: Tensor) -> bool:
        """Return whether the tensor is in a window. None begins before one and ends in it: torch sees windows only."""
        if t.layout is not torch.strided:  # it has no address; what is wrong with it is said, and to peers, later
            return False
        at = t.data_ptr()
        return t.numel() > 0 and any(start <= at < start + self._num_bytes for start in self._starts)

    def hold(self, t: Tensor) -> bool:
        """Return whether the tensor is in a window, and reads as its memory does."""
        return self.touch(t) and not t.is_neg()

    def why_not(self, x: Tensor, window: int | None) -> str:
        """What is wrong with rows that lie in a window and are to be published by an op that takes `window`; or ""."""
        if self._handed is None or self._handed != window:
            return "a token window of an earlier op"
        strides = zip(x.shape, x.stride(), self._rows[window].stride(), strict=True)
        if x.data_ptr() != self._starts[window] or any(n > 1 and got != own for n, got, own in strides):
            return "part of a token window"
        return ""

    def beside(self, x: Tensor) -> bool:
        """Whether rows lie elsewhere, though a window was handed out for them."""
        return self._handed is not None and x.numel() > 0 and not self.hold(x)

    def retire(self) -> None:
        """An op begins: what was handed out is the past."""
        self._handed = None
        for rows in self._rows:
            increment_version(rows)


class _Memory:
    """Device memory by its address, as torch takes it from other libraries."""

    def __init__(self, address: int, num_bytes: int, keep: Any) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _bytes_at(address: int, num_bytes: int, device: torch.device, keep: Any) -> Tensor:
    if device.type != "cpu":
        return torch.as_tensor(_Memory(address, num_bytes, keep), device=device)

    class Memory(ctypes.c_char * num_bytes):  # type: ignore[misc]
        pass  # which, unlike its base, may be given an attribute

    memory = Memory.from_address(address)
    memory.keep = keep
    return torch.frombuffer(memory, dtype=torch.uint8)
