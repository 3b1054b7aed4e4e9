"""MOE_RT_FAULT: it also works on ranks that are threads, and malformed values are refused on every rank; the stall
warning."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable

import pytest
from faults import cases_failures
from faults import cases_injected as cases
from support.ranks import ProcessRanks, Ranks

from moe_rt.diagnostics.collect import _process_state
from moe_rt.errors import InvalidConfig
from moe_rt.faults import planned

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 3
IN_OPS = ("mid_payload", "after_payload", "after_some_flags", "after_all_flags", "mid_read")


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("op", [5, 6, 7, 8])
@pytest.mark.parametrize("at", IN_OPS)
def test_raising_threads(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, at: str, op: int, num_threads: int
) -> None:
    monkeypatch.setenv("MOE_RT_FAULT", f"rank={FAULTY_RANK},op={op},at={at},do=raise")
    texts = make_ranks("threads", SIZE).run(cases.three_steps, num_threads)
    name = ("dispatch", "combine", "combine_backward", "dispatch_backward")[op - 5]
    number = 4 if op > 6 else 3  # combine_backward shares numbers with dispatch
    assert texts[FAULTY_RANK].startswith(f"FaultInjected: {name} #{number} on rank 1: failed as MOE_RT_FAULT asked")
    for rank in (0, 2):
        assert texts[rank].startswith("GroupPoisoned:"), texts
        assert "rank 1 failed first: FaultInjected" in texts[rank]


@pytest.mark.parametrize("at", IN_OPS)
def test_a_slow_thread_changes_nothing(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    monkeypatch.setenv("MOE_RT_FAULT", f"rank={FAULTY_RANK},op=6,at={at},do=sleep=0.05")
    assert make_ranks("threads", SIZE).run(cases.three_steps) == ["no error"] * SIZE


def test_a_fault_strikes_once(make_ranks: MakeRanks) -> None:
    """The fault fires once, though three steps have six backward ops that match. A second stop ends the rank, as it may
    repeat."""
    ranks, over, stops = make_ranks("shm", SIZE), threading.Event(), 0
    assert isinstance(ranks, ProcessRanks)
    stopped = ranks.pids[FAULTY_RANK]

    def wake() -> None:
        nonlocal stops
        while not over.wait(0.01):
            if _process_state(stopped) == "stopped":
                stops += 1
                os.kill(stopped, signal.SIGCONT if stops == 1 else signal.SIGKILL)  # Linux resumes it immediately

    waker = threading.Thread(target=wake, daemon=True)
    waker.start()
    assert ranks.run(cases.three_steps_with, f"rank={FAULTY_RANK},at=in_backward,do=stop") == ["no error"] * SIZE
    over.set()
    waker.join()
    assert stops == 1


@pytest.mark.parametrize("op", [1, 2, 3, 4])
def test_nonsense_from_a_thread_is_noticed(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, op: int) -> None:
    monkeypatch.setenv("MOE_RT_FAULT", f"rank={FAULTY_RANK},op={op},at=after_payload,do=corrupt")
    texts = make_ranks("threads", SIZE).run(cases.three_steps)
    assert any(text.startswith("CorruptPeer:") and "control data of rank 1" in text for text in texts), texts
    assert all(text.startswith(("CorruptPeer:", "GroupPoisoned:")) for text in texts), texts


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "fields: got ['nonsense']"),
        ("at=mid_read,do=kill", "rank: got , expected a number"),
        ("rank=3,at=mid_read,do=kill", "rank: got 3, expected [0, 3)"),
        ("rank=0,op=0,at=mid_read,do=kill", "op: got 0, expected at least 1"),
        ("rank=0,op=x,at=mid_read,do=kill", "op: got x, expected a number"),
        ("rank=0,at=none,do=kill", "at: got none, expected one of pre_rendezvous"),
        ("rank=0,at=mid_read,do=explode", "do: got explode, expected kill"),
        ("rank=0,at=mid_read,do=kill=1", "do: got kill=1, expected kill"),
        ("rank=0,at=mid_read,do=sleep", "do: got sleep, expected kill"),
        ("rank=0,at=mid_read,do=sleep=nan", "sleep: got nan, expected seconds"),
        ("rank=0,at=mid_read,do=corrupt", "at: got mid_read, expected after_payload"),
    ],
)
def test_a_spec_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, spec: str, message: str) -> None:
    monkeypatch.setenv("MOE_RT_FAULT", spec)
    for rank in range(SIZE):
        with pytest.raises(InvalidConfig, match=re.escape(f"MOE_RT_FAULT: {message}")):
            planned(rank, SIZE, on_cpu=True)


def test_a_spec_is_refused_together(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RT_FAULT", "rank=7,at=mid_read,do=raise")
    texts = make_ranks("threads", SIZE).run(cases.three_steps)
    assert len(texts) == SIZE
    assert all(text.startswith("InvalidConfig: MOE_RT_FAULT: rank: got 7, expected [0, 3)") for text in texts)


def test_cuda_ranks_refuse_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RT_FAULT", "rank=0,at=mid_read,do=raise")
    for rank in range(SIZE):
        with pytest.raises(InvalidConfig, match="expected none on CUDA ranks"):
            planned(rank, SIZE, on_cpu=False)


def test_a_wait_warns_once_at_a_tenth_of_its_timeout(make_ranks: MakeRanks, capfd: pytest.CaptureFixture[str]) -> None:
    make_ranks("threads", 2).run(cases_failures.stay_away, FAULTY_RANK, 4.0)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "dispatch #2 on rank 0" in line]
    assert warnings == ["moe_rt: dispatch #2 on rank 0 has waited 0.4 s for rank 1; PeerTimeout after 4 s"]
