"""Functions that ranks run in the tests of reports; each returns what its rank observed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from faults.cases_faults import good_round, open_buffer
from support.ranks import meet

from moe_rt import Buffer, ThreadGroup
from moe_rt.diagnostics import Report
from moe_rt.diagnostics.collect import report_on
from moe_rt.diagnostics.elsewhere import elsewhere
from moe_rt.errors import MoeRtError

WAIT_S = 1000.0  # `moe-rt info` on waiting ranks takes a minute on a busy core


_kept: dict[int, Buffer] = {}  # a rank that frees its buffer is reported as closed


def report_when(buffer: Buffer, shows: Callable[[Report], bool]) -> Report:
    """Make reports until one shows what is asked for, however long a busy machine takes for that. Return the last."""
    deadline, report = time.monotonic() + WAIT_S, buffer.report()
    while not shows(report) and time.monotonic() < deadline:
        time.sleep(0.01)
        report = buffer.report()
    return report


def report_when_all_wait(buffer: Buffer, late: int) -> Report:
    """Return a report in which all other ranks wait for one, and for no other."""
    return report_when(buffer, lambda report: all(r.waits_for == [late] for r in report.ranks if r.rank != late))


def late_rank(group: Any, faulty_rank: int, timeout_s: float, **options: Any) -> tuple[str, Report | None, Report]:
    """The faulty rank enters its second round only after the others have timed out, however long a busy machine takes
    for that. Return the error, the report it carries, and a report made afterwards.
    """
    with open_buffer(group) as warm_up:  # a process is slow once, and the report must not count that lateness
        good_round(warm_up)
    buffer = open_buffer(group, timeout_s=timeout_s, **options)
    _kept[buffer.rank] = buffer
    good_round(buffer)
    meet(group)  # no other rank is late
    try:
        deadline = time.monotonic() + WAIT_S
        while buffer.rank == faulty_rank and time.monotonic() < deadline:
            buffer.check()
            time.sleep(0.01)
        good_round(buffer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", error.report, buffer.report()
    return "no error", None, buffer.report()


def late_until(group: Any, faulty_rank: int, path: str) -> None:
    """The faulty rank enters its second round when the file at `path` exists."""
    with open_buffer(group, timeout_s=WAIT_S) as buffer:
        good_round(buffer)
        deadline = time.monotonic() + WAIT_S
        while buffer.rank == faulty_rank and not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.05)
        good_round(buffer)


def waiting_times(group: Any, faulty_rank: int, seconds: float) -> tuple[list[int], int, list[int], Report]:
    """One rank is late for a dispatch by at least this time, and by much more than the others were for each other.

    Return the time that the dispatch waited for each peer, its duration, the times of arrival in it, and a report.
    """
    with open_buffer(group, timeout_s=WAIT_S) as buffer:
        start = time.monotonic()
        good_round(buffer)
        before = buffer.waited_ns()
        if buffer.rank == faulty_rank:
            report_when_all_wait(buffer, faulty_rank)
            time.sleep(max(seconds, 4 * (time.monotonic() - start)))
        x, idx = torch.ones(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
        start_ns = time.monotonic_ns()
        received = buffer.dispatch(x, idx, torch.ones(4, buffer.spec.num_topk))
        took_ns = time.monotonic_ns() - start_ns
        waited = [after - ns for after, ns in zip(buffer.waited_ns(), before, strict=True)]
        arrivals = buffer.timings()["arrival_ns"]
        buffer.combine(*received)
        return waited, took_ns, arrivals, buffer.report()


def swapped_segments(group: Any) -> Report:
    """Return a report on swapped mappings: each rank's segment in the other's slot."""
    with open_buffer(group) as buffer:
        good_round(buffer)
        segments = buffer._engine._segments  # type: ignore[attr-defined]
        return report_on(segments.members, segments.mappings[::-1], segments.watches)


def watched_from_a_thread(group: Any, faulty_rank: int) -> Report | None:
    """Another thread makes a report for every rank but the faulty one while that rank waits in an op."""
    with open_buffer(group, timeout_s=WAIT_S) as buffer:
        good_round(buffer)
        if buffer.rank == faulty_rank:
            meet(group)
            good_round(buffer)
            return None
        seen: list[Report] = []

        def watch() -> None:
            seen.append(report_when_all_wait(buffer, faulty_rank))
            meet(group)

        watcher = threading.Thread(target=watch)
        watcher.start()
        good_round(buffer)
        watcher.join()
        return seen[0]


def killed_rank(group: Any, faulty_rank: int) -> Report:
    buffer = open_buffer(group)
    good_round(buffer)
    if buffer.rank == faulty_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        good_round(buffer)
    except RuntimeError as error:
        return error.report
    raise AssertionError("no rank noticed")


def closing_rank(group: Any, faulty_rank: int) -> str:
    buffer = open_buffer(group)
    good_round(buffer)
    if buffer.rank == faulty_rank:
        buffer.close()
        try:
            return str(buffer.report())
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    report = report_when(buffer, lambda report: report.ranks[faulty_rank].closed)
    buffer.close()
    return report.ranks[faulty_rank].state


def good_rounds(group: Any, times: int) -> Report:
    with open_buffer(group) as buffer:
        for _ in range(times):
            good_round(buffer)
        return buffer.report()


def healthy_segment() -> bytes:
    """Return the segment of a single rank after three rounds."""
    with open_buffer(ThreadGroup.make(1)[0]) as buffer:
        for _ in range(3):
            good_round(buffer)
        return bytes(buffer._engine._segments.mappings[0])


def differing_calls(group: Any, faulty_rank: int, what: str) -> tuple[str, int]:
    """The faulty rank calls another layer or op, or passes another handle. Return the error and the `peer` it names."""
    with open_buffer(group) as buffer:
        odd = buffer.rank == faulty_rank
        x, idx = torch.randn(4, buffer.spec.hidden), torch.zeros(4, buffer.spec.num_topk, dtype=torch.int64)
        weights = torch.ones(4, buffer.spec.num_topk)
        try:
            first = buffer.dispatch(x, idx, weights, tag=2 if odd and what == "layer" else 1)
            if what == "op" and odd:
                buffer.combine(*first)
            second = buffer.dispatch(x, idx, weights, tag=1)
            buffer.combine(*(first if odd else second))
        except MoeRtError as error:
            return f"{type(error).__name__}: {error}", error.peer
    return "no error", -1


def until_it_waits_elsewhere(buffer: Buffer, late: int) -> None:
    """Return once a rank waits in another buffer, however long a busy machine takes for that."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not elsewhere(buffer._engine._segments, buffer.rank, late, 0):  # type: ignore[attr-defined]
        time.sleep(0.01)


def crossed_buffers(group: Any) -> str:
    """Rank 0 uses the first buffer first, rank 1 the second; rank 0 times out first."""
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    try:
        with open_buffer(group, timeout_s=60.0 if rank else 1.0) as one, open_buffer(group, timeout_s=60.0) as two:
            if rank == 0:
                until_it_waits_elsewhere(one, late=1)
            for buffer in (two, one) if rank else (one, two):
                good_round(buffer)
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def crossed_with_some(group: Any) -> str:
    """Rank 1 uses a buffer of ranks 1 and 2 first, ranks 0 and 2 that of all three; rank 0, then rank 2 times out."""
    rank, some, ends = group.rank(), dist.new_group([1, 2]), dist.new_group([0, 2])
    text = "no error"
    with ExitStack() as opened:
        all_three = opened.enter_context(open_buffer(group, timeout_s=60.0 if rank else 2.0))
        buffers = [all_three] if rank == 0 else [all_three, opened.enter_context(open_buffer(some, timeout_s=60.0))]
        dist.barrier(group)
        try:
            if rank == 0:
                until_it_waits_elsewhere(all_three, late=1)
                report_when(all_three, lambda report: report.ranks[2].waits_for != [])
            for buffer in reversed(buffers) if rank == 1 else buffers:
                good_round(buffer)
        except MoeRtError as error:
            text = f"{type(error).__name__}: {error}"
        if rank != 1:
            dist.barrier(ends)  # rank 1 stays in the buffer of two until both have looked where it waits
    return text


def late_beside_a_used_buffer(group: Any) -> str:
    """Rank 1 is late in one buffer, until rank 0 gives up, and has waited in another before."""
    with open_buffer(group) as one, open_buffer(group, timeout_s=1.0) as two:
        good_round(one)
        deadline = time.monotonic() + WAIT_S
        try:
            while two.rank == 1 and time.monotonic() < deadline:
                two.check()
                time.sleep(0.01)
            good_round(two)
        except MoeRtError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def one_batch_less(group: Any, faulty_rank: int) -> str:
    with open_buffer(group) as buffer:
        try:
            for _ in range(1 if buffer.rank == faulty_rank else 2):
                good_round(buffer)
                buffer.check()
            deadline = time.monotonic() + WAIT_S
            while buffer.rank != faulty_rank and time.monotonic() < deadline:  # an op on CUDA returns before it fails
                buffer.check()
        except MoeRtError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
