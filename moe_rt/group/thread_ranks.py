"""Ranks that are threads: on the CPU, or virtual ranks of one GPU or its stand-in, each on its own stream."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moe_rt.errors import GroupClosed, GroupPoisoned
from moe_rt.group.rendezvous import ThreadGroup

# Ranks' streams must not share a hardware queue: one rank's launch would queue after another's wait. Operations that
# wait for the whole device, such as loading a kernel at its first use, must not run while a peer waits.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
_SMALL_BLOCKS, _SMALL_BYTES = 16, 1 << 20
_GRACE_S, _FOREVER_S = 10.0, 1e9
_CONSEQUENCES = (GroupPoisoned, GroupClosed, threading.BrokenBarrierError)  # consequences of another rank's failure
_streams: dict[torch.device, list[Any]] = {}


def torch_device(device: Any) -> torch.device:
    """Return the device of the tensors of ranks on `device`, which is a name or a stand-in for a GPU."""
    return device.device if hasattr(device, "device") else torch.device(device)


def on_gpu(device: Any) -> bool:
    return torch_device(device).type == "cuda"


def num_sms(device: Any) -> int:
    """Number of multiprocessors, which limits the number of virtual ranks."""
    if on_gpu(device):
        return torch.cuda.get_device_properties(torch_device(device)).multi_processor_count
    return int(device.num_sms)


def streams_of(device: Any, size: int) -> list[Any]:
    """Return a stream for each rank, always the same: torch hands streams out in turn, so they do not collide."""
    where = torch_device(device)
    if where.type != "cuda":
        return [None] * size
    taken = _streams.setdefault(where, [])
    taken.extend(torch.cuda.Stream(where) for _ in range(len(taken), size))
    return taken[:size]


class ThreadRanks:
    """Ranks that are threads of this process: on the CPU, or each on a stream of one GPU or its stand-in.

    Args:
        device: device of the ranks; see `torch_device`.
        streams: a stream for each rank, instead of new ones.
        reserve_bytes: device memory that a rank's stream gets before any rank begins. Asking the driver for more may
            wait for the whole device, and so for peers that wait for this rank.
        nodes: the node of each rank, as ThreadGroup.make takes them.
    """

    def __init__(
        self,
        size: int,
        device: Any = "cpu",
        *,
        streams: Sequence[Any] | None = None,
        reserve_bytes: int = 64 << 20,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.size, self.device, self.nodes = size, device, nodes
        self._streams, self._reserve_bytes = streams, reserve_bytes

    def run(self, work: Callable[..., Any], *arguments: Any, seconds: float = 600.0) -> list[Any]:
        """Run work(group, *arguments) on every rank and return the results.

        Raises:
            The error of the rank that failed first, not its consequences on others; TimeoutError with the stack of
            every rank that did not finish in time.
        """
        outcomes, errors = self._live(work, arguments, min(seconds, _FOREVER_S), _GRACE_S)
        if errors:  # a rank may observe a failure, and fail, before the first has left `work`
            raise next((error for error in errors if not isinstance(error, _CONSEQUENCES)), errors[0])
        return outcomes

    def outcomes(self, work: Callable[..., Any], *arguments: Any, seconds: float = 600.0) -> list[Any]:
        """Return what every rank returned or raised, or the TimeoutError. A failing rank does not end the others."""
        return self._live(work, arguments, seconds, seconds)[0]

    def _live(
        self, work: Callable[..., Any], arguments: Sequence[Any], seconds: float, grace_s: float
    ) -> tuple[list[Any], list[BaseException]]:
        """Return every rank's outcome, and the errors in order of time. After the first, ranks have grace_s left."""
        groups = ThreadGroup.make(self.size, self.device, self.nodes)
        streams = streams_of(self.device, self.size) if self._streams is None else self._streams
        outcomes: list[Any] = [None] * self.size
        errors: list[BaseException] = []
        ready, left = threading.Barrier(self.size), threading.Semaphore(0)

        def live(rank: int) -> None:
            begun = False
            try:
                with _on_stream(self.device, streams[rank], self._reserve_bytes):
                    ready.wait(seconds)
                    begun = True
                    outcomes[rank] = work(groups[rank], *arguments)
            except BaseException as error:
                outcomes[rank] = error
                errors.append(error)
                if not begun:  # otherwise ranks that are still leaving the barrier would fail there
                    ready.abort()
            finally:
                left.release()

        threads = [threading.Thread(target=live, args=(r,), name=f"rank {r}", daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + seconds
        for _ in threads:  # sleeps until one leaves: polling would disturb ranks that are timed
            left.acquire(timeout=max(0.0, deadline - time.monotonic()))
            if errors:  # the others observe it at their next op
                deadline = min(deadline, time.monotonic() + grace_s)
                break
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if stuck:
            error = _no_end([threads[rank] for rank in stuck], seconds)
            for rank in stuck:
                outcomes[rank] = error
            errors.append(error)
        return list(outcomes), list(errors)  # copies, which a rank that ends later cannot change


@contextmanager
def _on_stream(device: Any, stream: Any, reserve_bytes: int) -> Iterator[None]:
    if stream is None:
        yield
        return
    where = torch_device(device)
    # Otherwise torch runs the backwards of all ranks on one thread, where a rank's can wait for a later one.
    own_backward = torch.autograd.set_multithreading_enabled(False)
    with torch.cuda.device(where), torch.cuda.stream(stream), own_backward:
        sizes = [_SMALL_BYTES] * _SMALL_BLOCKS + [reserve_bytes] if reserve_bytes else []
        blocks = [torch.empty(size, dtype=torch.uint8, device=where) for size in sizes]
        del blocks  # torch's allocator now has them for this stream
        try:
            yield
        finally:
            stream.synchronize()


def _no_end(threads: list[threading.Thread], seconds: float) -> TimeoutError:
    frames = sys._current_frames()
    found = [(thread.name, frames.get(thread.ident or 0)) for thread in threads]
    stacks = [f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in found if frame is not None]
    names = ", ".join(str(thread.name) for thread in threads)
    return TimeoutError(f"got no end of {names} within {seconds:g} s; they are at\n" + "\n".join(stacks))
