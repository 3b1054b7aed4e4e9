"""Functions that ranks run in the tests of regrouping after a death; each returns what its rank observed."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import CASE_TIMEOUT_S
from support.rounds import one_round
from support.routing import buffer_kwargs, make_inputs, make_spec
from train.cases_train import tiny

from moe_rt import Buffer
from moe_rt.elastic import ElasticGroup
from moe_rt.errors import MoeRtError
from moe_rt.train import train
from moe_rt.train.data import Corpus

LONGER_THAN_A_CASE_S = 10 * CASE_TIMEOUT_S  # waiting for a rank that is known to be dead would hang the case


def good_rounds() -> None:
    """Run two full rounds on the default group. Seven experts divide evenly over neither three ranks nor two."""
    spec = make_spec(dist.get_world_size(), num_experts=7)
    with Buffer(None, timeout_s=30.0, **buffer_kwargs(spec)) as buffer:
        for seed in range(2):
            one_round(buffer, make_inputs(spec, [12, 0, 7][: spec.num_ranks], seed), seed)


def failing_round(victim: int, send: signal.Signals = signal.SIGKILL, timeout_s: float = 30.0) -> str:
    """Run a round that all ranks begin and the victim does not survive; return the name of the error, if any."""
    spec = make_spec(dist.get_world_size(), num_experts=7)
    try:
        with Buffer(None, timeout_s=timeout_s, **buffer_kwargs(spec)) as buffer:
            dist.barrier()
            if dist.get_rank() == victim:
                os.kill(os.getpid(), send)
            one_round(buffer, make_inputs(spec, [4] * spec.num_ranks, 0), 0)
    except MoeRtError as error:
        return type(error).__name__
    return "no error"


def num_watched() -> int:
    """Return the number of processes that this process has a descriptor of."""
    gc.collect()
    open_here = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(path.startswith("/proc/") and path.endswith("/stat") for path in open_here)


def fewer_and_fewer(group: Any, victims: list[int]) -> list[tuple[str, int, int]]:
    """Kill victims one after another, by current rank; return each error, new size and number of watched processes."""
    members, seen = ElasticGroup(), []
    for victim in victims:
        error = failing_round(victim)
        members.survivors(timeout_s=LONGER_THAN_A_CASE_S)
        good_rounds()
        seen.append((error, dist.get_world_size(), num_watched()))
    return seen


def two_die_at_once(group: Any) -> int:
    """Rank 2 is alive when rank 1 dies, but dies before it has joined the survivors."""
    members = ElasticGroup()
    failing_round(1)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    members.survivors(timeout_s=LONGER_THAN_A_CASE_S)
    good_rounds()
    return dist.get_world_size()


def late_for_the_new_group(group: Any, dies: bool) -> tuple[str, int]:
    """Rank 2 is counted as a survivor, and then dies or is delayed; all ranks call `survivors` once more."""
    _new_default_group(timeout_s=8.0)
    members, init = ElasticGroup(), dist.init_process_group

    def come_late(*args: Any, **kwargs: Any) -> None:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        formed = f"moe_rt/survivors/{members._name}/{members._attempts}/formed"
        members._store.wait([formed], timedelta(seconds=CASE_TIMEOUT_S))  # the others have given up
        init(*args, **kwargs)

    failing_round(1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(dist, "init_process_group", come_late)
        try:
            members.survivors()
            seen = "no error"
        except MoeRtError as error:
            seen = str(error)
    members.survivors(timeout_s=90.0)  # the delayed rank is late for this call also
    good_rounds()
    return seen, dist.get_world_size()


def slow_rank_is_waited_for(group: Any) -> int:
    """Rank 1 is late by less than the others wait for it."""
    members = ElasticGroup()
    time.sleep(1.0 if dist.get_rank() == 1 else 0.0)
    members.survivors(timeout_s=LONGER_THAN_A_CASE_S)
    good_rounds()
    return dist.get_world_size()


def stopped_rank_wakes_up_late(group: Any) -> tuple[str, str, int]:
    """Rank 1 stops, is excluded, wakes up during the others' new rounds, and tries to continue."""
    members, store = ElasticGroup(), _store()
    store.set(f"pid/{dist.get_rank()}", str(os.getpid()))
    dist.barrier()
    seen = failing_round(1, signal.SIGSTOP, timeout_s=2.0)
    try:
        members.survivors(timeout_s=30.0)
    except MoeRtError as error:
        return seen, str(error), 0
    if dist.get_rank() == 0:
        os.kill(int(store.get("pid/1")), signal.SIGCONT)
    for _ in range(5):
        good_rounds()
    return seen, "", dist.get_world_size()


def store_dies_with_rank_0(group: Any) -> str:
    """Rank 0, which serves the store as with `tcp://`, dies."""
    port, rank = _store(), dist.get_rank()
    if rank == 0:
        served = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port.set("port", str(served.port))
    else:
        served = dist.TCPStore("localhost", int(port.get("port")), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=served, rank=rank, world_size=3)
    members = ElasticGroup()
    failing_round(0)
    try:
        members.survivors()
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train_through_a_death(group: Any, out: Path, step: int) -> tuple[int, int]:
    """Rank 1 dies in this step; the others resume from the newest checkpoint, of which `out`-before is a copy."""
    members, rank = ElasticGroup(), dist.get_rank()
    original, calls = Corpus.train_batch, []

    def train_batch(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if rank == 1 and len(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Corpus, "train_batch", train_batch)
        try:
            train(run_of(out))
            return 0, 0
        except RuntimeError:  # MoeRtError or gloo's error
            members.survivors()
    if dist.get_rank() == 0:
        shutil.copytree(out, out.with_name(f"{out.name}-before"))
    dist.barrier()
    train(run_of(out, resume=True))
    return dist.get_rank(), dist.get_world_size()


def run_of(out: Path, **changes: Any) -> Any:
    """Return a run whose experts divide evenly over neither three ranks nor two, and whose batches divide over both."""
    return tiny(out=out, num_experts=7, steps=8, checkpoint_every=3, val_every=4, **changes)


def resume(group: Any, out: Path) -> None:
    train(run_of(out, resume=True))


def _store() -> dist.Store:
    return dist.distributed_c10d._get_process_group_store(dist.group.WORLD)


def _new_default_group(timeout_s: float) -> None:
    """Replace the default group by one of the same ranks with another gloo timeout."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), _store()
    dist.destroy_process_group()
    store, timeout = dist.PrefixStore("again", store), timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
