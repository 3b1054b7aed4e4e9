"""Tensors over a rank's own token windows, for producers that write their rows where peers will read them.

Such a tensor is for the very next op. The previous op has waited for every peer, so no peer reads this window any more,
and the dispatch that follows takes it. After any other op, the next dispatch might take the other window
(docs/protocol.md). Later ops overwrite a window. Each counts as a change in place, so that autograd raises if it has
saved a window for a backward, instead of reading other rows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moe_rt import _engine
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidConfig, InvalidInput


def require_window(spec: BufferSpec, rank: int, num_tokens: Any, window: int | None) -> int:
    """Return `window`, the window of the next op, None if the host does not know it.

    Raises:
        InvalidConfig: windows cannot be handed out.
        InvalidInput: num_tokens is out of range.
    """
    if spec.dispatch_dtype is not None:
        got = f"a buffer with dispatch_dtype={spec.dispatch_dtype}"
        raise InvalidConfig(f"token_window: got {got}, expected None: rows are coded on their way there", rank=rank)
    most = spec.num_max_tokens_per_rank
    if type(num_tokens) is not int or not 0 <= num_tokens <= most:
        message = f"num_tokens: got {num_tokens!r}, expected an integer in [0, num_max_tokens_per_rank = {most}]"
        raise InvalidInput(message, rank=rank)
    if window is None:
        got = "a stream that is being captured, or a buffer whose ops were, in a CUDA graph"
        message = f"token_window: got {got}, expected neither: only the device knows which window a replay takes"
        raise InvalidConfig(message, rank=rank)
    return window


class TokenWindows:
    """Token windows of one rank, two of each channel, and which of them was handed out for the next op.

    Args:
        shape: sizes of the segment.
        address: address of the rank's segment.
        keep: object that keeps the segment mapped; tensors also refer to it.
    """

    def __init__(self, spec: BufferSpec, shape: _engine.Shape, address: int, device: torch.device, keep: Any) -> None:
        itemsize, num_rows = spec.dtype.itemsize, spec.num_max_tokens_per_rank
        pitch = shape.row_bytes()
        self._starts = tuple(address + shape.tokens_at(window) for window in range(2 * spec.depth))
        self._num_bytes = num_rows * pitch
        with torch.inference_mode(False):  # tensors made in inference mode never count changes, even in later modes
            self._rows = tuple(
                _bytes_at(start, self._num_bytes, device, keep)
                .view(spec.dtype)
                .view(num_rows, pitch // itemsize)[:, : spec.hidden]
                for start in self._starts
            )
        self._handed: int | None = None

    def hand_out(self, window: int, num_tokens: int) -> Tensor:
        """Return [num_tokens, H] in the next op's window, if that is a dispatch. It is no view of another tensor."""
        self._handed = window
        return self._rows[window][:num_tokens].detach()

    def touch(self, t: Tensor) -> bool:
        """True if the tensor is in a window. None starts before a window and ends in it: torch sees only windows."""
        if t.layout is not torch.strided:  # no address; what is wrong with it is found, and announced, later
            return False
        at = t.data_ptr()
        return t.numel() > 0 and any(start <= at < start + self._num_bytes for start in self._starts)

    def hold(self, t: Tensor) -> bool:
        """True if the tensor is in a window and has the values in memory."""
        return self.touch(t) and not t.is_neg()

    def problem(self, x: Tensor, window: int | None, scaled: bool) -> str:
        """Say why an op that takes `window` cannot publish these rows of a window; "" if it can."""
        strides = zip(x.shape, x.stride(), self._rows[0].stride(), strict=True)
        if scaled:
            got = "codes in a token window"
        elif self._handed is None or self._handed != window:
            got = "a token window of an earlier op"
        elif x.data_ptr() != self._starts[window] or any(n > 1 and got != own for n, got, own in strides):
            got = "part of a token window"
        else:
            return ""
        expected = "all rows of the tensor that token_window gave since the last op, or memory of their own"
        return f"x: got {got}, expected {expected}"

    def is_elsewhere(self, x: Tensor) -> bool:
        """True if rows are elsewhere although a window was handed out for them."""
        return self._handed is not None and x.numel() > 0 and not self.hold(x)

    def retire(self) -> None:
        """Invalidate the window that was handed out, because an op begins."""
        self._handed = None
        for rows in self._rows:
            increment_version(rows)


class _Memory:
    """Device memory at an address, as torch imports it from other libraries."""

    def __init__(self, address: int, num_bytes: int, keep: Any) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _bytes_at(address: int, num_bytes: int, device: torch.device, keep: Any) -> Tensor:
    if device.type != "cpu":
        return torch.as_tensor(_Memory(address, num_bytes, keep), device=device)

    class Memory(ctypes.c_char * num_bytes):  # type: ignore[misc]
        pass  # a subclass, unlike its base, takes attributes

    memory = Memory.from_address(address)
    memory.keep = keep
    return torch.frombuffer(memory, dtype=torch.uint8)
