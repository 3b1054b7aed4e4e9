"""Buffers that must stay fp32, because their increments are below the precision of 16-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class KeepsFp32(nn.Module):
    """A module whose own floating-point buffers stay fp32 when it is cast and when it loads, with assign=True also."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsFp32:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, t in self._buffers.items():
            was = before[name]
            if t is not None and was is not None and t.dtype is not was.dtype:
                self._buffers[name] = was.to(t.device)  # undoes the rounding of the cast
        self.keep_fp32()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.keep_fp32()

    def keep_fp32(self) -> None:
        """Cast floating-point buffers to fp32 again, in case they were replaced without a call of this module."""
        for name, t in self._buffers.items():
            if t is not None and t.is_floating_point():
                self._buffers[name] = t.to(torch.float32)
