"""Reports describe each state, from states that are made up, and their lists end where they must."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rt.diagnostics import collect, elsewhere
from moe_rt.diagnostics.report import KINDS, OpRecord, RankReport, name_ranks
from moe_rt.errors import Code, Op

S = 1_000_000_000


def op(number: int = 1, name: str = "dispatch", **changes: Any) -> OpRecord:
    fields = dict(
        number=number, op=name, seq=number, tag=0, num_tokens=4, phase="", status="ok", start_ns=1 * S,
        announced_ns=2 * S, arrived_ns=3 * S, end_ns=4 * S, longest_peer=-1, longest_ns=0, handle_seq=0,
    )  # fmt: skip
    return OpRecord(**{**fields, **changes})


def rank(number: int, *ops: OpRecord, waits_for: tuple[int, ...] = (), **announced: int) -> RankReport:
    return RankReport(
        rank=number, node=0, serves=[], pid=number + 100, process="running", problem="",
        announced={**dict.fromkeys(KINDS, 0), **announced}, closed=False, poison="", last_words="",
        waits_for=list(waits_for), state=f"state {number}", num_torn=0, last_ops=list(ops),
    )  # fmt: skip


def callers(*tags: int) -> list[RankReport]:
    return [rank(number, op(tag=tag)) for number, tag in enumerate(tags)]


def test_a_disagreement_shows_four_calls() -> None:
    assert collect.disagreement(callers(1, 1, 1)) is None
    of_four, of_five = collect.disagreement(callers(1, 2, 3, 4)), collect.disagreement(callers(1, 2, 3, 4, 5, 6))
    assert of_four is not None
    assert of_five is not None
    four = "; ".join(f"rank {number} called dispatch #1 of layer tag {number + 1}" for number in range(4))
    assert of_four.calls == four
    assert of_five.calls == f"{four}; and 2 more calls"


@pytest.mark.parametrize(
    ("tags", "outvoted"),
    [
        ((1, 2), []),
        ((1, 1, 2), [2]),
        ((2, 1, 1), [0]),
        ((1, 1, 2, 2), []),
        ((1, 1, 2, 3), []),
        ((1, 2, 1, 3, 1), [1, 3]),
    ],
)
def test_a_majority_is_more_than_half(tags: tuple[int, ...], outvoted: list[int]) -> None:
    found = collect.disagreement(callers(*tags))
    assert found is not None
    assert found.outvoted == outvoted


def test_the_first_op_that_differs_is_shown() -> None:
    """Ops of one number are compared; one that was refused may not know its handle, and is compared with none."""
    same, late = op(1), op(9, tag=3)
    here = rank(0, same, op(2, "combine", handle_seq=1), op(3, tag=1), late)
    there = rank(1, same, op(2, "combine", handle_seq=0, tag=8), op(3, tag=2), op(9, tag=4))
    found = collect.disagreement([here, there])
    assert found is not None
    assert found.calls == "rank 0 called dispatch #3 of layer tag 1; rank 1 called dispatch #3 of layer tag 2"
    handles = [rank(r, op(2, "combine", handle_seq=r + 1)) for r in range(2)]
    found = collect.disagreement(handles)
    assert found is not None
    assert found.calls.startswith("rank 0 called combine #2 of layer tag 0 (handle of dispatch #1); rank 1")
    assert collect.disagreement([rank(0, op(1, tag=1)), rank(1, op(2, tag=2))]) is None, "neither has called both"


@pytest.mark.parametrize(
    ("name", "kind"), [("dispatch", 0), ("combine_backward", 0), ("combine", 1), ("dispatch_backward", 1)]
)
def test_a_rank_waits_for_announcements_of_the_kind_of_its_op(name: str, kind: int) -> None:
    announced = [[7, 6, 7], [7, 6, 7]]
    announced[1 - kind] = [6, 7, 6]
    segment: Any = SimpleNamespace(announced=announced, announcers=[[0, 1, 2]] * 2)
    assert collect._missing(segment, [op(6), op(7, name, phase="wait", status="", arrived_ns=0, end_ns=0)]) == [1]


@pytest.mark.parametrize(
    ("name", "kind"), [("dispatch", 0), ("combine_backward", 0), ("combine", 1), ("dispatch_backward", 1)]
)
def test_a_conclusion_says_what_a_rank_has_not_done(name: str, kind: int) -> None:
    waiting = op(7, name, phase="wait", status="", end_ns=0)
    for done, verb in ((6, "announced"), (7, "passed on"), (8, "passed on")):
        ranks = [rank(0, waiting, waits_for=(1,)), rank(1, **{KINDS[kind]: done, KINDS[1 - kind]: 9 - done})]
        said = collect._conclude(ranks, [1])
        assert said == f"rank 1 has not {verb} {name} #7, for which rank 0 waits; it state 1"
        ranks.append(rank(2, waiting, waits_for=(1, 0)))
        assert "for which ranks 0 and 2 wait; it state 1" in collect._conclude(ranks, [1])


def test_a_conclusion_has_four_lines_and_the_rest_as_a_number() -> None:
    waiting = rank(9, op(phase="wait"), waits_for=tuple(range(6)))
    ranks = [*(rank(number) for number in range(6)), waiting]
    assert collect._conclude(ranks, []) == "no rank waits for another"
    assert len(collect._conclude(ranks, [0, 1, 2, 3]).splitlines()) == 4
    lines = collect._conclude(ranks, [0, 1, 2, 3, 4, 5]).splitlines()
    assert len(lines) == 5
    assert lines[3].startswith("rank 3 has not announced")
    assert lines[4] == "and 2 more"


SEGMENT: Any = SimpleNamespace()


@pytest.mark.parametrize(
    ("process", "closed", "segment", "waits_for", "last", "words"),
    [
        ("running", False, None, [], None, "cannot be read (gone)"),
        ("dead", False, None, [], None, "is dead (process 5), cannot be read (gone)"),
        ("stopped", True, SEGMENT, [], None, "is stopped (process 5), has closed its buffer, has begun no op"),
        ("unknown", False, SEGMENT, [], None, "has begun no op"),
        ("running", False, SEGMENT, [0, 2], op(phase="wait"), "has waited in dispatch #1 for ranks 0 and 2 for 8.0 s"),
        ("running", False, SEGMENT, [], op(phase="wait"), "has been in dispatch #1 (wait) for 9.0 s"),
        ("running", False, SEGMENT, [1], op(phase="gather"), "has been in dispatch #1 (gather) for 9.0 s"),
        ("running", False, SEGMENT, [], op(), "last finished dispatch #1 6.0 s ago"),
        ("running", False, SEGMENT, [1], op(status="poisoned"), "ended dispatch #1 with poisoned 6.0 s ago"),
    ],
)
def test_states(
    process: str, closed: bool, segment: Any, waits_for: list[int], last: OpRecord | None, words: str
) -> None:
    view = collect._View(5, process, segment, "gone")
    assert collect._state(view, closed, waits_for, last, 10 * S) == words


def test_times() -> None:
    assert collect._seconds(S - 1) == "1e+03 ms"
    assert collect._seconds(S) == "1.0 s"
    assert collect._seconds(1_234_567) == "1.23 ms"


@pytest.mark.parametrize(
    ("times", "phase"),
    [((0, 0, 0), "publish"), ((2, 0, 0), "wait"), ((2, 3, 0), "gather"), ((2, 3, 4), ""), ((0, 0, 4), "")],
)
def test_phases_follow_from_times(times: tuple[int, int, int], phase: str) -> None:
    announced, heard, end = times
    found: Any = SimpleNamespace(**vars(op()), code=int(Code.POISONED))
    del found.phase, found.status
    found.op, found.announced_ns, found.arrived_ns, found.end_ns = int(Op.DISPATCH), announced, heard, end
    record = collect._op_record(found)
    assert (record.op, record.phase) == ("dispatch", phase)
    assert record.status == ("poisoned" if end else "")
    found.op = int(Op.COMBINE)
    seconds = {"publish": "push", "gather": "reduce"}
    assert collect._op_record(found).phase == seconds.get(phase, phase)
    found.op = found.code = 99
    assert collect._op_record(found).op == "op 99"
    assert collect._op_record(found).status == ("code 99" if end else "")


@pytest.mark.parametrize(
    ("code", "announced_ns", "arrived_ns", "end_ns", "expected"),
    [
        (Code.OK, 1, 0, 0, [0, 3]),  # it waits
        (Code.OK, 0, 0, 0, []),  # it has not announced
        (Code.OK, 1, 2, 0, []),  # all have come
        (Code.OK, 1, 2, 3, []),
        (Code.PEER_TIMEOUT, 1, 0, 3, [0, 3]),
        (Code.CONFIG_MISMATCH, 1, 2, 3, [0, 3]),  # the first code of a failure of the group
        (Code.INVALID_ROUTING, 1, 2, 3, []),  # a refusal, after which the group goes on
    ],
)
def test_who_is_missing(code: Code, announced_ns: int, arrived_ns: int, end_ns: int, expected: list[int]) -> None:
    status = code.name.lower() if end_ns else ""
    last = op(5, status=status, announced_ns=announced_ns, arrived_ns=arrived_ns, end_ns=end_ns)
    segment: Any = SimpleNamespace(
        announced=[[4, 5, 6, 0, 4], [9] * 5],
        announcers=[[0, 1, 2, 3, 3], [4] * 5],
    )
    assert collect._missing(segment, [op(4), last]) == expected
    assert collect._missing(segment, []) == []


def test_poison() -> None:
    status: Any = SimpleNamespace(got=int(Code.OK), peer=1, expected=2)
    assert collect._poison(status) == ""
    status.got = int(Code.PEER_DEAD)
    assert collect._poison(status) == "peer_dead, found by rank 1, concerning rank 2"
    status.expected = 0
    assert collect._poison(status) == "peer_dead, found by rank 1, concerning rank 0"
    status.expected = -1
    assert collect._poison(status) == "peer_dead, found by rank 1"


def test_names_of_ranks() -> None:
    assert [name_ranks(r) for r in ([3], [0, 3], [0, 1, 3])] == ["rank 3", "ranks 0 and 3", "ranks 0, 1 and 3"]


@pytest.mark.parametrize(
    ("dead", "closed", "stragglers"),
    [((), (), [1, 2]), ((2,), (), [2]), ((), (1,), [1]), ((2,), (1,), [1, 2]), ((0,), (), [1, 2])],
)
def test_the_dead_and_the_closed_come_before_the_late(
    monkeypatch: pytest.MonkeyPatch, dead: tuple[int, ...], closed: tuple[int, ...], stragglers: list[int]
) -> None:
    """Ranks 0 and 3 wait for ranks 1 and 2."""
    ranks = [
        replace(
            rank(r, op(phase="wait", status="", end_ns=0), waits_for=(1, 2) if r in (0, 3) else ()),
            process="dead" if r in dead else "running",
            closed=r in closed,
        )
        for r in range(4)
    ]
    view = SimpleNamespace(segment=None)
    monkeypatch.setattr(collect, "_look_at", lambda *given: view)
    monkeypatch.setattr(collect, "_rank_report", lambda number, *given: ranks[number])
    report = collect.report_on([(1, 1)] * 4, [None] * 4, [None] * 4)
    assert report.stragglers == stragglers
    assert report.ranks == ranks
    assert [line.split()[1] for line in report.conclusion.splitlines()] == [str(r) for r in stragglers]


def test_what_any_segment_says_of_a_rank() -> None:
    """The largest number that it announced to any rank, and that it has closed, in any of them."""
    segments: Any = [
        SimpleNamespace(closed_to=closed, announced=announced, nodes=[0, 0, 1])
        for closed, announced in (
            ([False, False, False], [[3, 1, 2], [4, 4, 5]]),
            ([False, True, False], [[2, 2, 2], [5, 3, 6]]),
            ([False, False, False], [[1, 0, 4], [0, 5, 0]]),
        )
    ]
    view: Any = SimpleNamespace(segment=None, pid=7, process="running", problem="not mapped here")
    found = [collect._rank_report(r, view, segments, 9 * S) for r in range(3)]
    assert [each.announced for each in found] == [
        {"dispatch": 3, "combine": 5}, {"dispatch": 2, "combine": 5}, {"dispatch": 4, "combine": 6}
    ]  # fmt: skip
    assert [each.closed for each in found] == [False, True, False]
    assert [(each.rank, each.node, each.problem) for each in found] == [
        (r, node, "not mapped here") for r, node in enumerate((0, 0, 1))
    ]


def test_nothing_is_known_of_a_rank_without_another_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_others", lambda *given: iter(()))
    segments: Any = None
    assert elsewhere.elsewhere(segments, 0, 1, 0) == ""
