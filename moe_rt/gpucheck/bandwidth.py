"""How many bytes each launch must move at least, and how fast this GPU copies as many."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

# launch -> what it does. These four are a pair of dispatch and combine.
ROLES = {
    "dispatch_send": "publish",
    "dispatch_receive": "gather",
    "combine_send": "push",
    "combine_receive": "reduce",
}
OPS = {"dispatch": ("dispatch_send", "dispatch_receive"), "combine": ("combine_send", "combine_receive")}
TARGETS = {"dispatch_receive": 0.85, "combine_send": 0.85}
_COPIED_BYTES = 1 << 29  # all sources together: far more than any cache keeps
_RUNS, _WARM_UP = 20, 5


def fewest_bytes(num_tokens: int, num_pulled: int, num_kept: int, row_bytes: int) -> dict[str, int]:
    """By launch, summed over ranks: every row is read once and written once, lists and headers not counted.

    Args:
        num_tokens: dispatched by all ranks.
        num_pulled: (token, destination rank) pairs.
        num_kept: rows received.
    """
    rows = {
        "dispatch_send": 2 * num_tokens,
        "dispatch_receive": num_pulled + num_kept,
        "combine_send": num_kept + num_pulled,
        "combine_receive": num_pulled + num_tokens,
    }
    return {name: n * row_bytes for name, n in rows.items()}


def count_pulled(topk_idx: Tensor, num_experts: int, num_ranks: int) -> int:
    """Distinct ranks over all tokens; experts lie in equal contiguous blocks."""
    owner = topk_idx // (num_experts // num_ranks)
    return sum(int((owner == rank).any(dim=1).sum()) for rank in range(num_ranks))


class CopyCeiling:
    """Bytes per second of torch's copy on the device, read and written counted, for as many bytes as asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, float] = {}

    def of(self, num_bytes: int) -> float:
        """Measured once for each number of bytes; sources take turns, and the cache is overwritten before each."""
        if num_bytes not in self._known:
            self._known[num_bytes] = self._measure(max(1, num_bytes // 2))
        return self._known[num_bytes]

    def _measure(self, half: int) -> float:
        count = max(2, min(8, -(-_COPIED_BYTES // half)))
        sources = [torch.ones(half, dtype=torch.uint8, device=self._device) for _ in range(count)]
        targets = [torch.empty_like(source) for source in sources]
        flush = Flush(self._device)
        timers = [Timer() for _ in range(_WARM_UP + _RUNS)]
        for i, timer in enumerate(timers):
            flush.run()
            timer.start()
            targets[i % count].copy_(sources[i % count])
            timer.stop()
        torch.cuda.synchronize(self._device)
        return 2 * half / statistics.median(timer.seconds() for timer in timers[_WARM_UP:])


class Timer:
    """The time between two points of the current stream."""

    def __init__(self) -> None:
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self.begin.record()

    def stop(self) -> None:
        self.end.record()

    def seconds(self) -> float:
        """Once both points have been passed."""
        return float(self.begin.elapsed_time(self.end)) / 1e3


class Flush:
    """Overwrites what caches hold of others, which also gives the host a head start on the device."""

    def __init__(self, device: torch.device, num_bytes: int = 1 << 29) -> None:
        self._memory: Any = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def run(self) -> None:
        self._memory.zero_()
