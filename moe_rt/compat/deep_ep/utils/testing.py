"""DeepEP's timers. They time the whole function on the host, since CPU ranks launch no kernels to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# Bounds of calls: a time on the host needs few, and no kernel has to warm up.
MOST_WARMUPS, MOST_TESTS = 3, 10


def flush_l2_cache(enabled: bool = True) -> None:
    """Do nothing: `bench` times the host."""


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Return the mean, least and largest seconds of at most MOST_TESTS calls, without the first."""
    for _ in range(min(num_warmups, MOST_WARMUPS)):
        fn()
    times = []
    for _ in range(min(num_tests, MOST_TESTS)):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    times = times[1:] or times
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Return seconds of one call in place of each kernel's: a number, or a list for each period."""
    if barrier_comm_profiling:
        (barrier or dist.barrier)()
    seconds = bench(fn, 0, 1)[0]
    each: Any = seconds if num_kernels_per_period == 1 else [seconds] * num_kernels_per_period
    return each if isinstance(kernel_names, str) else [each] * len(kernel_names)
