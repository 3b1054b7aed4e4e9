"""Measurements on a GPU: sizes and least bytes of a timed pair, clocks, a plain copy's speed, the profiler's events."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rt.config.tuning import Tuning
from moe_rt.lab.testing.rounds import WrongOutput

TIMEOUT_S = 20.0
_FEW_TOKENS = 1024  # of all ranks together; chance may send more of them than usual to one rank


@dataclass(frozen=True)
class Load:
    """One set of sizes. With many tokens on several ranks, recv_x is not sized for the worst case, which would take
    most of the memory.

    Attributes:
        raises: True if too many rows are an error rather than dropped, so that every rank reads every count.
        num_sms: maximum number of blocks of a launch; None for all that fit.
        rings: True if rows go through shared memory when blocks are few (docs/cuda.md).
    """

    ranks: int
    tokens: int = 4096
    hidden: int = 7168
    topk: int = 8
    experts: int = 64
    raises: bool = False
    num_sms: int | None = None
    rings: bool = True

    def buffer_kwargs(self) -> dict[str, Any]:
        return {
            "num_max_tokens_per_rank": self.tokens,
            "hidden": self.hidden,
            "num_topk": self.topk,
            "num_experts": self.experts,
            "dtype": torch.bfloat16,
            "capacity_factor": None if self._worst else 1.5,
            "overflow": "raise" if self._worst or self.raises else "drop",
            "num_sms": self.num_sms,
            "tuning": Tuning() if self.rings else Tuning(ring_blocks=0),
            "timeout_s": TIMEOUT_S,
        }

    def capacity_bytes(self) -> int:
        """Bytes of recv_x on one rank."""
        balanced = self.tokens * self.topk * self.hidden * 2
        return self.ranks * balanced if self._worst else balanced * 3 // 2

    @property
    def _worst(self) -> bool:
        """True if recv_x has room for the tokens of all ranks."""
        return self.ranks == 1 or self.ranks * self.tokens <= _FEW_TOKENS


# Launch -> its role. These four launches are one dispatch and one combine.
ROLES = {
    "dispatch_send": "publish",
    "dispatch_receive": "gather",
    "combine_send": "push",
    "combine_receive": "reduce",
}
OPS = {"dispatch": ("dispatch_send", "dispatch_receive"), "combine": ("combine_send", "combine_receive")}
TARGETS = {"dispatch_receive": 0.85, "combine_send": 0.85}
_COPIED_BYTES = 1 << 29  # all sources together: far more than any cache holds
_RUNS, _WARM_UP = 20, 5


def fewest_bytes(num_tokens: int, num_pulled: int, num_kept: int, row_bytes: int) -> dict[str, int]:
    """Least bytes of each launch, summed over ranks: every row is read once and written once. Lists and headers are not
    counted.

    Args:
        num_tokens: tokens dispatched by all ranks.
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
    """Count the distinct ranks of each token, summed over tokens. Experts are placed in equal contiguous blocks."""
    owner = topk_idx // (num_experts // num_ranks)
    return sum(int((owner == rank).any(dim=1).sum()) for rank in range(num_ranks))


class CopyCeiling:
    """Bytes per second of torch's copy on the device for a given number of bytes, counting both reads and writes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, float] = {}

    def of(self, num_bytes: int) -> float:
        """Measure once per number of bytes. Sources take turns, and the cache is overwritten before each copy."""
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
    """Time between two points of the current stream."""

    def __init__(self) -> None:
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self.begin.record()

    def stop(self) -> None:
        self.end.record()

    def seconds(self) -> float:
        """Return the elapsed time. Call it once the stream has passed both points."""
        return float(self.begin.elapsed_time(self.end)) / 1e3


class Flush:
    """Overwrites the caches' contents, which also gives the host a head start on the device."""

    def __init__(self, device: torch.device, num_bytes: int = 1 << 29) -> None:
        self._memory: Any = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def run(self) -> None:
        self._memory.zero_()


RANGE = "moe_rt measured"
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "CtxSynchronize", "StreamWaitValue")


def kernels(events: Any) -> list[Any]:
    """Events that ran on the device.

    Raises:
        WrongOutput: no event ran there, which means that the profiler cannot see the device.
    """
    found = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    if not found:
        raise WrongOutput("the profiler: got no kernels, expected some; CUPTI may lack the permission to record them")
    return found


def host_waits(events: Any) -> list[str]:
    """Calls inside the recorded RANGE that wait for the device, and copies from it."""
    marks = [e.time_range for e in events if e.name == RANGE and e.device_type.name == "CPU"]
    if len(marks) != 1:
        raise WrongOutput(f"the profiler: got {len(marks)} ranges, expected 1")
    waits = [
        e.name
        for e in events
        if e.device_type.name == "CPU"
        and e.name.startswith(("cuda", "cu"))
        and (e.name.endswith(_WAITS) or e.name in ("cudaMemcpy", "cuMemcpyDtoH", "cuMemcpyDtoH_v2"))
        and marks[0].start <= e.time_range.start <= marks[0].end
    ]
    return waits + [e.name for e in kernels(events) if "DtoH" in e.name]
