"""Ends a server whose process was killed where vLLM goes on without it: without its API server, or its coordinator.

vLLM's coordinator, engines and workers outlive an API server that gets SIGKILL. Without the coordinator nobody wakes an
engine that is idle: some requests are never answered. Each of these processes watches its parent, therefore, and the
API server watches the coordinator. Processes are watched by descriptors, not by PR_SET_PDEATHSIG: that strikes when the
thread ends that has started them, as a program's own may.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.coordinator import DPCoordinator, DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

logger = init_logger("vllm.moe_rt")
_GRACE_S = 5.0  # for vLLM's own way of ending at SIGTERM, which a rank amid a step does not come to
_coordinate, _serve, _work = DPCoordinatorProc.run_coordinator, EngineCoreProc.run_engine_core, WorkerProc.worker_main


def install() -> None:
    """Replace what vLLM's processes run, and what makes the coordinator."""
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    WorkerProc.worker_main = staticmethod(run_worker)
    DPCoordinator.__init__ = watched(DPCoordinator.__init__)


def run_coordinator(*args: Any, **kwargs: Any) -> Any:
    """Run vLLM's for as long as the parent lives. Spawned processes find these three functions by name."""
    end_with_parent()
    return _coordinate(*args, **kwargs)


def run_engine_core(*args: Any, **kwargs: Any) -> Any:
    """Run vLLM's for as long as the parent lives."""
    end_with_parent()
    return _serve(*args, **kwargs)


def run_worker(*args: Any, **kwargs: Any) -> Any:
    """Run vLLM's for as long as the parent lives."""
    end_with_parent()
    return _work(*args, **kwargs)


def end_with_parent() -> None:
    """End this process, from now on, when the process that multiprocessing calls its parent ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    try:
        pidfd = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    if os.getppid() != parent.pid:  # it had ended before, and the number is another one's
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_end_after, args=(pidfd,), name="moe_rt-parent", daemon=True).start()


def _end_after(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    logger.error("moe_rt: the process that has started this one was killed; this one ends, too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def watched(make: Callable[..., None]) -> Callable[..., None]:
    """Return DPCoordinator.__init__ after which this process ends the engines if the coordinator is killed.

    vLLM then does as for any engine that dies: requests end with errors, and the server ends.
    """

    @wraps(make)
    def make_and_watch(coordinator: DPCoordinator, *args: Any, **kwargs: Any) -> None:
        make(coordinator, *args, **kwargs)
        threading.Thread(target=_end_engines_after, args=(coordinator,), name="moe_rt-coordinator", daemon=True).start()

    return make_and_watch


def _end_engines_after(coordinator: DPCoordinator) -> None:
    multiprocessing.connection.wait([coordinator.proc.sentinel])
    if not coordinator._finalizer.alive:  # vLLM ends it itself
        return
    logger.error("moe_rt: vLLM's coordinator was killed, without which idle engines do not wake up; the server ends")
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore"):
            child.kill()
