"""The processor of a rank: its tensors' device, the end of its work, and cold caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt.heap.thread_ranks import torch_device
from moe_rt.native.cpu import cache_bytes


class Processor:
    """A core, or a GPU.

    Args:
        device: a torch device or its name, or an object that emulates a GPU.

    Attributes:
        device: device of this rank's tensors.
        name: its name in results.
        cache_bytes: size of its last-level cache.
    """

    def __init__(self, device: Any) -> None:
        self.device = torch_device(device)
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self.name, self.cache_bytes = properties.name, properties.L2_cache_size
        else:
            self.name, self.cache_bytes = getattr(device, "name", "cpu"), cache_bytes()
        self._filler: Tensor | None = None

    def finish(self) -> None:
        """Wait for the work that this thread has queued; a CPU rank has completed it already."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def cool(self) -> None:
        """Read and write twice the size of the last-level cache, so that it holds nothing else.

        It also reads, since writes may bypass the caches.
        """
        if self._filler is None:
            self._filler = torch.zeros(2 * self.cache_bytes // 8, dtype=torch.int64, device=self.device)
        self._filler.add_(1)
