"""Dead, silent and leaving peers: survivors raise in time, and nothing leaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CPU_HEAPS, HEAPS
from faults import cases_failures as cases
from support.ranks import ProcessRanks, Ranks

from moe_rt.lab.testing.resources import held, left_of

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 3  # some deadlocks need three ranks
SILENCE_S = 8.0


@pytest.mark.parametrize("at", ["dispatch", "combine", "backward"])
def test_killed_peer_is_noticed(at: str) -> None:
    ranks = ProcessRanks(SIZE)
    outcomes = ranks.outcomes(cases.die_at, FAULTY_RANK, at)
    ranks.close()
    assert isinstance(outcomes[FAULTY_RANK], ChildProcessError)
    for rank in (0, 2):
        text = outcomes[rank]
        assert text.startswith("PeerDead:"), outcomes
        assert "rank 1" in text
        assert text.endswith("then PeerDead") or text.endswith("then GroupPoisoned"), text


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_silent_peer_times_out(make_ranks: MakeRanks, heap: str) -> None:
    outcomes = make_ranks(heap, SIZE).run(cases.stay_away, FAULTY_RANK, SILENCE_S)
    for rank in (0, 2):
        text, seconds = outcomes[rank]
        assert text.startswith(("PeerTimeout: dispatch #2", "GroupPoisoned: dispatch #2"))
        assert seconds > 0.9 * SILENCE_S or text.startswith("GroupPoisoned"), (
            "only who came later waits for less than the timeout"
        )
    assert any(f"rank 1 announced op 1, expected 2 within {SILENCE_S:g} s" in outcomes[r][0] for r in (0, 2))
    assert outcomes[FAULTY_RANK][0].startswith("GroupPoisoned:"), "the late rank learns that the group has ended"


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_peer_that_closed_first(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.peer_closes_first, FAULTY_RANK)
    assert texts[FAULTY_RANK] == "closed"
    expected = "rank 1 closed its buffer: it announced op 1, expected 2; a rank without tokens must call, too"
    assert any(text.startswith("GroupClosed: dispatch #2 on rank") and expected in text for text in texts), texts
    assert all(text.startswith(("GroupClosed", "GroupPoisoned", "closed")) for text in texts), texts


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_raising_rank_ends_the_group(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.raise_between_ops, FAULTY_RANK)
    assert texts[FAULTY_RANK].startswith("KeyError")
    for rank in (0, 2):
        assert texts[rank].startswith("GroupPoisoned:"), texts
        assert "rank 1 failed first" in texts[rank] or f"rank {2 - rank} failed first" in texts[rank]


@pytest.mark.parametrize("heap", HEAPS)
def test_nothing_leaks(make_ranks: MakeRanks, heap: str) -> None:
    """Nothing leaks; thread ranks share their counts, which are therefore compared while no rank runs."""
    ranks = make_ranks(heap, SIZE)
    ranks.run(cases.open_close_many, 1)
    here = held()
    outcomes = ranks.run(cases.open_close_many, 3)
    assert max(left_of(here).values()) <= 0
    for left, num_mapped in outcomes:
        assert num_mapped == 0
        assert max(left.values()) <= 0 or heap != "shm"


def test_killed_group_leaves_no_segment() -> None:
    ranks = ProcessRanks(2)
    segments = set(ranks.run(cases.keep_open)[0])
    assert segments <= mapped_by_anyone()
    for rank in range(2):
        ranks.kill(rank)
    ranks.close()
    assert not segments & mapped_by_anyone()


def mapped_by_anyone() -> set[int]:
    """Return the inodes of all segments that some process of this machine has mapped, as far as this user may see."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # exited meanwhile, or another user's
            lines = maps.read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if "/memfd:moe_rt" in line}
    return found


@pytest.mark.parametrize("num_threads", [1, 2])
def test_forked_child_is_refused(make_ranks: MakeRanks, num_threads: int) -> None:
    """A forked child is refused, also with several lanes, which are threads that a child does not have."""
    for text in make_ranks("shm", 2).run(cases.use_in_child, num_threads):
        assert text.startswith("GroupClosed:")
        assert "after fork" in text


@pytest.mark.parametrize("num_threads", [1, 2])
def test_forked_child_lets_go(make_ranks: MakeRanks, num_threads: int) -> None:
    """A forked child's copy of the engine waits for no thread of the parent, and does not announce a close."""
    assert make_ranks("shm", 2).run(cases.let_go_in_child, num_threads) == [0, 0]


def test_segment_that_does_not_fit(make_ranks: MakeRanks) -> None:
    for text in make_ranks("shm", 2).run(cases.too_large):
        assert text.startswith("OutOfSharedMemory:"), text
