"""A stand-in for torch.cuda without a GPU: clocks instead of events, so that timing code can run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from support.emulated_gpu import EmulatedGpu

from moe_rt.engine.gpu.driver import Launches


class TimedGpu(EmulatedGpu):
    """Records when each launch began and ended, in microseconds, as the profiler reports it."""

    def __init__(self) -> None:
        super().__init__(num_sms=24)  # gpucheck tries 8 and 24
        self.events: list[Any] = []

    def kernels(self, *what: Any, **how: Any) -> Any:
        return TimedKernels(super().kernels(*what, **how), self.events)


class TimedKernels:
    def __init__(self, kernels: Any, events: list[Any]) -> None:
        self._kernels, self._events = kernels, events

    def launch(self, launches: Launches, **how: Any) -> None:
        for name, blocks in launches:
            start = time.perf_counter() * 1e6
            self._kernels.launch([(name, blocks)], **how)
            self._events.append(device_event(name, start, time.perf_counter() * 1e6))


def device_event(name: str, start: float, end: float, device: str = "CUDA", annotation: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=start, end=end),
    )


class ClockEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        pass

    def elapsed_time(self, other: ClockEvent) -> float:
        return (other.at - self.at) * 1e3


class SmallFlush:
    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        pass

    def run(self) -> None:
        pass


class Patch(Protocol):
    def setattr(self, target: Any, name: str, value: Any) -> None: ...


def stand_in(patch: Patch, gpu: Any) -> None:
    """Replace torch.cuda and the profiler by those of `gpu`, for as long as the patch lasts."""

    class Profile:
        def __init__(self, **options: Any) -> None:
            pass

        def __enter__(self) -> Profile:
            gpu.events.clear()
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def events(self) -> list[Any]:
            return list(gpu.events)

    @contextlib.contextmanager
    def record_function(name: str) -> Iterator[None]:
        start = time.perf_counter() * 1e6
        yield
        gpu.events.append(device_event(name, start, time.perf_counter() * 1e6, "CPU", annotation=True))

    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    patch.setattr(torch.cuda, "Stream", lambda device=None: stream)
    patch.setattr(torch.cuda, "Event", ClockEvent)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    patch.setattr(torch.profiler, "profile", Profile)
    patch.setattr(torch.profiler, "record_function", record_function)
