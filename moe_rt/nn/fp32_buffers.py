"""Buffers that must stay fp32: what is added to them is smaller than a half's last place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class KeepsFp32(nn.Module):
    """A module whose own floating buffers are fp32, whatever it is cast to and whatever it loads, assigned or not."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsFp32:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, t in self._buffers.items():
            was = before[name]
            if t is not None and was is not None and t.dtype is not was.dtype:
                self._buffers[name] = was.to(t.device)  # what a cast has rounded away is still there
        self.keep_fp32()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.keep_fp32()

    def keep_fp32(self) -> None:
        """Makes buffers fp32 again that were replaced by others, in a way that no module sees."""
        for name, t in self._buffers.items():
            if t is not None and t.is_floating_point():
                self._buffers[name] = t.to(torch.float32)
