"""If a buffer cannot be made on any rank, every rank raises immediately, and can try again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS
from faults import cases_construction as cases
from support.emulated_gpu import EmulatedGpu
from support.ranks import ProcessRanks, Ranks, ThreadRanks

from moe_rt import Buffer
from moe_rt.engine import backend
from moe_rt.errors import InvalidConfig
from moe_rt.memory import loopback
from moe_rt.memory.segments import Segments

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = cases.FAULTY_RANK, 3
AT_ONCE_S = 150.0  # init_timeout_s is 300: waiting for it takes longer


def check_outcomes(outcomes: list[Any], kind: str, words: str) -> None:
    """Check that every rank raised `kind` with these words, and none waited."""
    for text, seconds in outcomes:
        assert text.startswith(f"{kind}: "), outcomes
        assert words in text, outcomes
        assert seconds < AT_ONCE_S


def outcomes_of_others(case: Callable[..., Any], faulty_rank: int) -> list[Any]:
    """Run the case on dedicated processes, one of which will die."""
    ranks = ProcessRanks(SIZE)
    try:
        outcomes = ranks.outcomes(case)
    finally:
        ranks.close()
    assert isinstance(outcomes.pop(faulty_rank), ChildProcessError)
    return outcomes


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_threads", "2"),
        ("num_threads", 1.5),
        ("hidden", None),
        ("capacity_factor", "much"),
        ("placement", 7),
        ("timeout_s", None),
        ("init_timeout_s", "5"),
        ("init_timeout_s", float("nan")),
        ("init_timeout_s", -1),
        ("heap", []),
        ("overflow", {}),
    ],
)
def test_a_wrong_argument_of_one_rank(make_ranks: MakeRanks, heap: str, name: str, value: Any) -> None:
    outcomes = make_ranks(heap, SIZE).run(cases.wrong_argument, name, value)
    check_outcomes(outcomes, "InvalidConfig", "")
    assert all("rank 1" in text for rank, (text, _) in enumerate(outcomes) if rank != FAULTY_RANK), outcomes


def test_an_engine_that_one_rank_cannot_make(make_ranks: MakeRanks) -> None:
    check_outcomes(make_ranks("shm", SIZE).run(cases.wrong_isa), "InvalidConfig", "rank 1 could not make its engine")


def test_an_error_that_is_kept_keeps_no_memory(make_ranks: MakeRanks) -> None:
    """The rank without an engine releases its segments, and the ranks with one close it."""
    assert make_ranks("shm", SIZE).run(cases.mapped_after_wrong_isa) == [0] * SIZE


@pytest.mark.parametrize("options", [{"overflow": "retry"}, {}, {"route": "two_level"}], ids=str)
def test_an_error_that_is_kept_keeps_no_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    made: list[Segments] = []

    def allocate(*arguments: Any) -> Segments:
        made.append(real(*arguments))
        return made[-1]

    def refuse(*arguments: Any, **named: Any) -> None:
        raise InvalidConfig("no engine")

    real = loopback.allocate
    monkeypatch.setattr(loopback, "allocate", allocate)
    monkeypatch.setattr(backend, "CudaEngine", refuse)
    sizes = dict(num_max_tokens_per_rank=4, hidden=8, num_topk=1, num_experts=2, dtype=torch.float32)
    ranks = ThreadRanks(2, EmulatedGpu(), nodes=[0, 1])
    outcomes = ranks.outcomes(lambda group: Buffer(group, **sizes, **options))  # type: ignore[arg-type]
    assert all(isinstance(error, InvalidConfig) for error in outcomes), outcomes
    assert len(made) == (4 if "route" in options else 2), "between nodes there is memory for the network also"
    assert all(segments.mappings == [] for segments in made)


def test_address_space_ends_while_peers_are_mapped(make_ranks: MakeRanks) -> None:
    check_outcomes(
        make_ranks("shm", SIZE).run(cases.no_room_for_peers), "OutOfSharedMemory", "rank 1 could not reserve"
    )


def test_address_space_of_threads_ends(make_ranks: MakeRanks) -> None:
    check_outcomes(
        make_ranks("threads", SIZE).run(cases.too_large), "OutOfSharedMemory", "could not reserve a segment of"
    )


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_an_interrupt_while_working(make_ranks: MakeRanks, heap: str) -> None:
    outcomes = make_ranks(heap, SIZE).run(cases.interrupted)
    assert outcomes.pop(FAULTY_RANK)[0] == "KeyboardInterrupt: "
    check_outcomes(outcomes, "GroupPoisoned", "rank 1 gave up: KeyboardInterrupt")


def test_an_interrupt_while_waiting(make_ranks: MakeRanks) -> None:
    outcomes = make_ranks("shm", SIZE).run(cases.interrupted_in_a_wait)
    assert outcomes[FAULTY_RANK][0] == "KeyboardInterrupt: "
    assert outcomes.pop(FAULTY_RANK)[1] < AT_ONCE_S
    check_outcomes(outcomes, "GroupPoisoned", "rank 1 gave up: KeyboardInterrupt")


def gave_up(outcomes: list[Any]) -> None:
    """Check that all ranks but the faulty one report in each attempt that it did not arrive, and that it raises
    nothing."""
    assert outcomes.pop(FAULTY_RANK) == []
    for seen in outcomes:
        for text, seconds in seen:  # a busy machine may keep other ranks away as well
            assert re.search(rf"^PeerTimeout: .*ranks \[(\d, )*{FAULTY_RANK}(, \d)*\] did not come to make", text), seen
            assert seconds < AT_ONCE_S


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_rank_that_stays_away_spoils_no_later_buffer(make_ranks: MakeRanks, heap: str, times: int) -> None:
    gave_up(make_ranks(heap, SIZE).run(cases.stays_away, times))


def test_a_rank_that_stays_away_from_a_layer(make_ranks: MakeRanks) -> None:
    gave_up(make_ranks("shm", SIZE).run(cases.stays_away_from_a_layer))


def test_a_rank_of_two_groups_that_stays_away_from_one(make_ranks: MakeRanks) -> None:
    first, *others = make_ranks("shm", SIZE).run(cases.overlapping_groups)
    check_outcomes(first, "PeerTimeout", "ranks [1] did not come")
    assert others == [[], []]


@pytest.mark.parametrize(
    "case", [cases.killed_while_making, cases.killed_while_mapping, cases.killed_before_the_second]
)
def test_a_rank_that_is_killed(case: Callable[..., Any]) -> None:
    check_outcomes(outcomes_of_others(case, FAULTY_RANK), "PeerDead", "the process of rank 1 ended")


def test_a_store_that_ends() -> None:
    check_outcomes(outcomes_of_others(cases.store_ends, 0), "StoreLost", "cannot reach the group's store any more")


def test_threads_that_cross(make_ranks: MakeRanks) -> None:
    """Buffers made in crossed order complete; a client that waited inside the store would block the other thread."""
    for seen in make_ranks("shm", 2).run(cases.crossed_threads):
        assert [text for text, _ in seen] == ["no error"] * 2
        assert all(seconds < AT_ONCE_S for _, seconds in seen)


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 10**400])
def test_never_give_up(make_ranks: MakeRanks, heap: str, seconds: float) -> None:
    for name in ("init_timeout_s", "timeout_s"):
        outcomes = make_ranks(heap, SIZE).run(cases.same_argument, name, seconds)
        assert [text for text, _ in outcomes] == ["no error"] * SIZE


@pytest.mark.parametrize("by_mesh", [False, True])
def test_a_rank_that_a_group_leaves_out(make_ranks: MakeRanks, by_mesh: bool) -> None:
    member, outsider = make_ranks("shm", 2).run(cases.one_left_out, by_mesh)
    assert member == "no error"
    assert outsider.startswith("group: got a mesh" if by_mesh else "group: got one that this rank is not")


def test_a_group_that_was_destroyed(make_ranks: MakeRanks) -> None:
    for text in make_ranks("shm", 2).run(cases.destroyed):
        assert text.startswith("InvalidConfig: group: got a process group that was destroyed")
