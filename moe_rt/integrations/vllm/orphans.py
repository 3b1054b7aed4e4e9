"""Ends a server whose API server or coordinator was killed, since vLLM would continue without it.

vLLM's coordinator, engines and workers outlive an API server that gets SIGKILL. Without the coordinator no process
wakes an idle engine, so some requests are never answered. Therefore each of these processes watches its parent, and the
API server watches the coordinator. Processes are watched through descriptors, because PR_SET_PDEATHSIG fires when the
thread that started them ends, which may be earlier.
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
_GRACE_S = 5.0  # for vLLM's own shutdown at SIGTERM, which a rank inside a step does not reach
_coordinate, _serve, _work = DPCoordinatorProc.run_coordinator, EngineCoreProc.run_engine_core, WorkerProc.worker_main


def install() -> None:
    """Replace the main functions of vLLM's processes, and the constructor of its coordinator."""
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    WorkerProc.worker_main = staticmethod(run_worker)
    DPCoordinator.__init__ = watched(DPCoordinator.__init__)


def run_coordinator(*args: Any, **kwargs: Any) -> Any:
    """Run vLLM's coordinator while the parent lives. Spawned processes find these three functions by name."""
    end_with_parent()
    return _coordinate(*args, **kwargs)


def run_engine_core(*args: Any, **kwargs: Any) -> Any:
    """Run vLLM's engine core while the parent lives."""
    end_with_parent()
    return _serve(*args, **kwargs)


def run_worker(*args: Any, **kwargs: Any) -> Any:
    """Run vLLM's worker while the parent lives."""
    end_with_parent()
    return _work(*args, **kwargs)


def end_with_parent() -> None:
    """End this process when the process that multiprocessing calls its parent ends, from now on."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    try:
        pidfd = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    if os.getppid() != parent.pid:  # it ended earlier, and its pid was reused
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
    """Return DPCoordinator.__init__ with a thread that ends the engines if the coordinator is killed.

    vLLM then handles that like the death of any engine: requests end with errors, and the server ends.
    """

    @wraps(make)
    def make_and_watch(coordinator: DPCoordinator, *args: Any, **kwargs: Any) -> None:
        make(coordinator, *args, **kwargs)
        threading.Thread(target=_end_engines_after, args=(coordinator,), name="moe_rt-coordinator", daemon=True).start()

    return make_and_watch


def _end_engines_after(coordinator: DPCoordinator) -> None:
    multiprocessing.connection.wait([coordinator.proc.sentinel])
    if not coordinator._finalizer.alive:  # vLLM has ended it
        return
    logger.error("moe_rt: vLLM's coordinator was killed, without which idle engines do not wake up; the server ends")
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore"):
            child.kill()
