"""One call makes ranks that are threads: results in rank order, the failure that was the cause, an end in time."""

from __future__ import annotations

import threading

import pytest
import torch
from support.emulated_gpu import EmulatedGpu

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import GroupClosed, GroupPoisoned, InvalidConfig
from moe_rt.group import thread_ranks

SIZE = 3
SIZES = dict(num_max_tokens_per_rank=2, hidden=8, num_topk=1, num_experts=SIZE, dtype=torch.float32)


def exchange(group: ThreadGroup, factor: float) -> float:
    """Send each rank's number to the next rank and back."""
    device = getattr(group.device, "device", "cpu")
    x = torch.full((1, 8), float(group.rank), device=device)
    idx = torch.tensor([[(group.rank + 1) % SIZE]], device=device)
    with Buffer(group, **SIZES) as buffer:
        recv_x, weights, handle = buffer.dispatch(x, idx, torch.ones(1, 1, device=device))
        return buffer.combine(recv_x * factor, weights, handle)[0, 0].item()


@pytest.mark.parametrize("device", ["cpu", EmulatedGpu()], ids=["threads", "loopback"])
def test_results_are_in_rank_order(device: object) -> None:
    assert ThreadGroup.run(exchange, SIZE, 2.0, device=device) == [0.0, 2.0, 4.0]
    assert ThreadGroup.run(lambda group: group.topology.num_nodes, 2, nodes=[0, 1]) == [2, 2]
    with pytest.raises(InvalidConfig, match="nodes"):
        ThreadGroup.run(exchange, SIZE, 2.0, nodes=[0, 1])


def test_the_cause_is_raised_though_another_rank_has_failed_before() -> None:
    """The cause is raised although rank 0 observes the failure, and its thread ends, before the cause has left rank
    1."""
    heard = []

    def fails(group: ThreadGroup) -> None:
        try:
            with Buffer(group, **SIZES) as buffer:
                if group.rank == 1:
                    raise ValueError("bad batch")
                buffer.dispatch(torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        except GroupPoisoned as error:
            heard.append(error.peer)
            raise
        except ValueError:
            for thread in threading.enumerate():
                if thread.name in ("rank 0", "rank 2"):
                    thread.join(60)
            raise

    with pytest.raises(ValueError, match="bad batch"):
        ThreadGroup.run(fails, SIZE)
    assert heard == [1, 1]


def test_ranks_that_do_not_end_are_shown() -> None:
    end = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"(?s)got no end of rank 1 within 3 s.*end\.wait"):
            ThreadGroup.run(lambda group: group.rank == 1 and end.wait(), 2, timeout_s=3.0)
    finally:
        end.set()


def test_every_option_of_a_run_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[object] = []

    class Noting:
        def __init__(self, *given: object, **named: object) -> None:
            arrived.extend([given, named])

        def run(self, *given: object, **named: object) -> None:
            arrived.extend([given, named])

    monkeypatch.setattr(thread_ranks, "ThreadRanks", Noting)
    gpu = EmulatedGpu()
    ThreadGroup.run(exchange, 2, 3.0, "more", device=gpu, nodes=[0, 1], timeout_s=7.5)
    assert arrived == [(2, gpu), {"nodes": [0, 1]}, (exchange, 3.0, "more"), {"seconds": 7.5}]
    made = ThreadGroup.make(3, gpu, nodes=[0, 1, 1])
    assert [(g.rank, g.size, g.device, g.topology.nodes) for g in made] == [(r, 3, gpu, (0, 1, 1)) for r in range(3)]


@pytest.mark.parametrize("first", [GroupPoisoned, GroupClosed, threading.BrokenBarrierError])
def test_a_cause_that_comes_second_is_raised(first: type[Exception]) -> None:
    failed = threading.Event()

    def fails(group: ThreadGroup) -> None:
        if group.rank == 1:
            try:
                raise first("a consequence")
            finally:
                threading.Timer(0.05, failed.set).start()
        failed.wait(60.0)
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        ThreadGroup.run(fails, 2)
    with pytest.raises(first, match="alone"):
        ThreadGroup.run(raises, 1, first("alone"))


def test_ranks_that_end_after_a_failure_are_waited_for() -> None:
    """Rank 0 has ended. Rank 1 fails, and rank 2 ends a little later."""
    failed = threading.Event()

    def work(group: ThreadGroup) -> str:
        if group.rank == 1:
            threading.Timer(0.3, failed.set).start()
            raise ValueError("bad batch")
        if group.rank == 2:
            failed.wait(60.0)
        return f"rank {group.rank} ended"

    outcomes, errors = thread_ranks.ThreadRanks(3)._live(work, (), 60.0, 30.0)
    assert (outcomes[0], outcomes[2]) == ("rank 0 ended", "rank 2 ended")
    assert [str(error) for error in errors] == ["bad batch"]


def test_a_failure_after_a_rank_has_ended_ends_the_run() -> None:
    ended, over = threading.Event(), threading.Event()

    def work(group: ThreadGroup) -> None:
        if group.rank == 0:
            threading.Timer(0.3, ended.set).start()
        elif group.rank == 1:
            ended.wait(60.0)
            raise ValueError("bad batch")
        else:
            over.wait(3600.0)

    _, errors = thread_ranks.ThreadRanks(3)._live(work, (), 3600.0, 0.1)
    over.set()
    failed, stuck = errors
    assert str(failed) == "bad batch"
    assert isinstance(stuck, TimeoutError), "rank 2 had not ended"


def raises(group: ThreadGroup, error: Exception) -> None:
    raise error


def test_after_a_failure_the_time_of_the_run_is_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may have ten seconds to end, but not beyond the limit of the run."""
    monkeypatch.setattr(thread_ranks, "_GRACE_S", 30.0)
    end, ended = threading.Event(), []

    def work(group: ThreadGroup) -> None:
        if group.rank == 0:
            raise ValueError("bad batch")
        end.wait(20.0)
        ended.append(group.rank)

    with pytest.raises(ValueError, match="bad batch"):
        ThreadGroup.run(work, 2, timeout_s=3.0)
    assert ended == []
    end.set()
