"""Runs a case in a dedicated process, which the stand-in for the driver may replace parts of and a fault may end."""

from __future__ import annotations

import faulthandler
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch
from device.jit_tools import require_compiler
from ptx.gpu import PtxFault, PtxGpu
from support.ranks import CASE_TIMEOUT_S, TELL_STACKS, ThreadRanks

from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.process_ranks import ProcessRanks


def isolated(case: Callable[..., Any], *args: Any) -> Any:
    """Return or raise what case(*args) does there. Both must be module-level objects, and results picklable."""
    require_compiler()
    with ProcessRanks(in_server=True) as processes:
        processes.start(0, _serve, case, args)
        try:
            outcome = pickle.loads(processes.receive(0, CASE_TIMEOUT_S))
        except TimeoutError:
            processes.send_signal(0, TELL_STACKS)
            processes.await_end(0, 2.0)
            raise
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def on_ranks(size: int, case: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
    """Run case(group, *args) in such a process, on each of several virtual ranks of one PtxGpu(**how)."""
    outcomes: list[Any] = isolated(_ranks, size, how, case, args)
    return outcomes


def run_on(gpu: PtxGpu, size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what case(group, *args) returned on each virtual rank of the GPU.

    Raises:
        PtxFault: a fault found on any rank. It has priority: the other ranks only report that the device is lost.
    """
    outcomes = ThreadRanks(size, gpu, nodes=gpu.nodes).outcomes(case, *args)
    for failure in (outcome for outcome in outcomes if isinstance(outcome, BaseException)):
        if report := gpu.fault():  # a launch on the lost device may fail before any call checks for the fault
            raise PtxFault(report) from failure
        raise failure
    return outcomes


def _ranks(size: int, how: dict[str, Any], case: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    return run_on(PtxGpu(**how), size, case, *args)


def _serve(channel: Channel, case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    faulthandler.register(TELL_STACKS, all_threads=True)
    try:
        outcome = case(*args)
    except BaseException as error:
        error.__notes__ = [traceback.format_exc()]  # add_note does not exist in Python 3.10
        outcome = error
    channel.send(pickle.dumps(outcome))
