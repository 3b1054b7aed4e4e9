"""What a rank computes on: where its tensors live, when its work is done, and how its caches get cold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_rt.heap.thread_ranks import torch_device
from moe_rt.native.cpu import cache_bytes


class Processor:
    """A core, or a GPU.

    Args:
        device: a torch device or its name, or an object that stands in for a GPU.

    Attributes:
        device: where this rank's tensors live.
        name: what it is called in results.
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
        """Waits for what this thread has queued; a CPU rank has done it already."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def cool(self) -> None:
        """Reads and writes twice as many bytes as the last-level cache has, so that it holds nothing else.

        Reads, too, as writing alone may pass by the caches.
        """
        if self._filler is None:
            self._filler = torch.zeros(2 * self.cache_bytes // 8, dtype=torch.int64, device=self.device)
        self._filler.add_(1)
