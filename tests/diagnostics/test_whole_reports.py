"""A report of three ranks in full, as values, as a table and as a file; and files and consoles of commands."""

from __future__ import annotations

import io
import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diagnostics.test_fields_read import MEMBERS, RANKS, Segment
from rich.console import Console

from moe_rt import _engine
from moe_rt.diagnostics import collect, output, show
from moe_rt.diagnostics.collect import report_on
from moe_rt.diagnostics.report import REPORT_DIR, OpRecord, Report, cut, keep, last_words, readable
from moe_rt.errors import Code, InvalidConfig, Op, PeerDead

S = 1_000_000_000


def record(segment: Segment, slot: int, number: int, op: Op, code: int, *times: int, **more: int) -> None:
    """Write an op of layer tag 7 and 13 tokens; times are when it started, was announced, arrived and ended."""
    values = [number, more.get("seq", number), int(op), code, 7, 13, *times, more.get("longest_ns", 0)]
    packed = struct.pack("<2Q2iIi5qqQ", *values, more.get("peer", -1), more.get("handle", 0))
    segment.write(segment.header.op_records + 128 * slot, "<Q88s", 2, packed)


def announce(segment: Segment, kind: int, rank: int, seq: int) -> None:
    segment.write(segment.header.mailboxes + 128 * (RANKS * kind + rank), "<Q", seq)


@pytest.fixture
def segments() -> list[Segment]:
    """Rank 0 waits in its second dispatch for rank 1, which is in a combine; rank 2 was poisoned, and ended."""
    made = [Segment([], rank) for rank in range(RANKS)]
    for segment in made:
        for rank, seq in ((0, 2), (1, 1), (2, 2)):
            announce(segment, 0, rank, seq)
        for rank in range(RANKS):
            announce(segment, 1, rank, 1)
    record(made[0], 0, 1, Op.DISPATCH, 0, 1 * S, 2 * S, 3 * S, 4 * S, longest_ns=5, peer=1)
    record(made[0], 1, 2, Op.COMBINE, 0, 5 * S, 5 * S + 1, 6 * S, 7 * S, seq=1, handle=1, longest_ns=6, peer=2)
    record(made[0], 2, 3, Op.DISPATCH, 0, 8 * S, 9 * S, 0, 0, seq=2)
    record(made[1], 0, 1, Op.DISPATCH, 0, 1 * S, 2 * S, 3 * S, 4 * S)
    record(made[1], 1, 2, Op.COMBINE, 0, 5 * S, 6 * S, 7 * S, 0, seq=1, handle=1)
    record(made[2], 0, 1, Op.DISPATCH, int(Code.POISONED), 1 * S, 2 * S, 0, 4 * S)
    words = b"ValueError: odd\x1b[0m"
    made[2].write(made[2].header.last_words, f"<Q{len(words)}s", len(words), words)
    made[2].write(made[2].header.poison, "<Q", (1 + 1) << 32 | (2 + 1) << 16 | int(Code.PEER_DEAD))
    return made


class Ended:
    def has_ended(self) -> bool:
        return True


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, segments: list[Segment]) -> Report:
    letters = {100: "S", 101: "T"}
    monkeypatch.setattr(collect, "state_letter", lambda pid: letters[pid])
    monkeypatch.setattr(collect, "time", SimpleNamespace(monotonic_ns=lambda: 12 * S))
    ended: Any = Ended()
    return report_on(MEMBERS, [segment.memory for segment in segments], [None, None, ended])


def test_a_report_in_full(report: Report) -> None:
    common = dict(node=0, serves=[], problem="", closed=False, num_torn=0)
    op = dict(tag=7, num_tokens=13, longest_peer=-1, longest_ns=0, handle_seq=0, phase="", status="ok")
    first = dict(op, number=1, op="dispatch", seq=1, start_ns=1 * S, announced_ns=2 * S, arrived_ns=3 * S, end_ns=4 * S)
    second = dict(op, number=2, op="combine", seq=1, handle_seq=1, start_ns=5 * S)
    assert json.loads(report.to_json()) == dict(
        time_ns=12 * S,
        config="0xabcd",
        sizes=dict(num_experts=41, num_max_tokens=13, hidden=24, num_topk=5, elem_bytes=4),
        ranks=[
            dict(
                common, rank=0, pid=100, process="running", announced=dict(dispatch=2, combine=1), poison="",
                last_words="", waits_for=[1], state="has waited in dispatch #2 for rank 1 for 3.0 s",
                last_ops=[
                    {**first, "longest_ns": 5, "longest_peer": 1},
                    dict(
                        second, announced_ns=5 * S + 1, arrived_ns=6 * S, end_ns=7 * S, longest_ns=6, longest_peer=2,
                    ),
                    dict(
                        op, number=3, op="dispatch", seq=2, phase="wait", status="", start_ns=8 * S,
                        announced_ns=9 * S, arrived_ns=0, end_ns=0,
                    ),
                ],
            ),
            dict(
                common, rank=1, pid=101, process="stopped", announced=dict(dispatch=1, combine=1), poison="",
                last_words="", waits_for=[],
                state="is stopped (process 101), has been in combine #1 (reduce) for 7.0 s",
                last_ops=[
                    first, dict(second, phase="reduce", status="", announced_ns=6 * S, arrived_ns=7 * S, end_ns=0),
                ],
            ),
            dict(
                common, rank=2, pid=102, process="dead", announced=dict(dispatch=2, combine=1),
                poison="peer_dead, found by rank 2, concerning rank 1", last_words="ValueError: odd [0m", waits_for=[],
                state="is dead (process 102), ended dispatch #1 with poisoned 8.0 s ago",
                last_ops=[{**first, "status": "poisoned", "arrived_ns": 0}],
            ),
        ],
        stragglers=[1],
        conclusion="rank 1 has not announced dispatch #2, for which rank 0 waits; it is stopped (process 101), has "
        "been in combine #1 (reduce) for 7.0 s",
        disagreement=None,
        path="",
    )  # fmt: skip
    assert report.to_json().startswith('{\n "time_ns": 12000000000,\n "config"'), "people read it as well"


def printed(report: Report, width: int = 400) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(show.show_report(report))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_the_table_of_a_report(report: Report) -> None:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed(report) if line.startswith("│")]
    assert cells == [
        [
            "0", "100", "running", "2", "1", "has waited in dispatch #2 for rank 1 for 3.0 s",
            "2 ops in 6 s: 83% in them, 33% waiting, longest for rank 2", "", "dispatch #1 ok",
        ],
        ["", "", "", "", "", "", "", "", "combine #1 ok"],
        ["", "", "", "", "", "", "", "", "dispatch #2 wait"],
        [
            "1", "101", "stopped", "1", "1", "is stopped (process 101), has been in combine #1 (reduce) for 7.0 s", "",
            "", "dispatch #1 ok",
        ],
        ["", "", "", "", "", "", "", "", "combine #1 reduce"],
        [
            "2", "102", "dead", "2", "1", "is dead (process 102), ended dispatch #1 with poisoned 8.0 s ago", "",
            "peer_dead, found by rank 2, concerning rank 1; ValueError: odd [0m", "dispatch #1 poisoned",
        ],
    ]  # fmt: skip
    lines = printed(report)
    sizes = "num_experts 41, num_max_tokens 13, hidden 24, num_topk 5, elem_bytes 4"
    assert lines[0] == f"3 ranks, {sizes}, configuration 0xabcd"
    heads = [cell.strip() for cell in lines[2].split("┃")[1:-1]]
    assert heads == ["rank", "pid", "process", "dispatch", "combine", "what it does", "lately", "poison", "last ops"]
    assert lines[-1] == report.conclusion


def test_a_table_shows_three_ops_of_each_rank(report: Report) -> None:
    """And what ranks called differently, before the conclusion."""
    many = replace(report.ranks[0], last_ops=[replace(report.ranks[0].last_ops[0], seq=n) for n in range(5)])
    differ = replace(report, ranks=[many], disagreement=collect.Disagreement("rank 0 called it", []))
    lines = printed(differ)
    assert [line.split("│")[-2].strip() for line in lines if line.startswith("│")] == [
        "dispatch #2 ok", "dispatch #3 ok", "dispatch #4 ok",
    ]  # fmt: skip
    assert lines[-2:] == ["rank 0 called it", report.conclusion]


def test_nodes_of_a_report(report: Report) -> None:
    assert show.nodes(report) == [], "of one node nothing is said"
    ranks = [replace(rank, node=node) for rank, node in zip(report.ranks, (1, 0, 1), strict=True)]
    ranks[1] = replace(ranks[1], serves=[0, 2])
    assert show.nodes(replace(report, ranks=ranks)) == [
        "node 0: rank 1 (forwards for ranks 0 and 2)", "node 1: rank 0, rank 2",
    ]  # fmt: skip


def test_a_report_without_any_segment() -> None:
    found = report_on([(0, 5), (0, 6)], [None, None], [None, None])
    assert (found.config, found.sizes, found.stragglers, found.conclusion) == ("", {}, [], "no rank waits for another")
    for number, rank in enumerate(found.ranks):
        assert (rank.rank, rank.pid, rank.process, rank.problem) == (number, 0, "unknown", "on another host")
        assert (rank.node, rank.serves, rank.announced) == (-1, [], {"dispatch": 0, "combine": 0})
        assert (rank.closed, rank.poison, rank.last_words, rank.waits_for) == (False, "", "", [])
        assert (rank.num_torn, rank.last_ops, rank.state) == (0, [], "cannot be read (on another host)")


@pytest.mark.parametrize(
    ("letter", "process"),
    [
        ("R", "running"),
        ("S", "running"),
        ("T", "stopped"),
        ("t", "stopped"),
        ("Z", "dead"),
        ("X", "dead"),
        ("", "unknown"),
    ],
)
def test_states_of_processes(monkeypatch: pytest.MonkeyPatch, letter: str, process: str) -> None:
    monkeypatch.setattr(collect, "state_letter", lambda pid: letter if pid == 9 else "?")
    (rank,) = report_on([(9, 5)], [None], [None]).ranks
    assert (rank.process, rank.problem) == (process, "not mapped here")


@pytest.mark.parametrize(
    ("error", "process"),
    [(FileNotFoundError(), "dead"), (ProcessLookupError(), "dead"), (PermissionError(), "unknown")],
    ids=lambda value: type(value).__name__,
)
def test_states_of_processes_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, error: OSError, process: str) -> None:
    def letter(pid: int) -> str:
        raise error

    monkeypatch.setattr(collect, "state_letter", letter)
    assert report_on([(9, 5)], [None], [None]).ranks[0].process == process


def test_a_report_is_kept_in_a_file_of_its_own(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its user may read it, and no file is overwritten."""
    monkeypatch.delenv(REPORT_DIR, raising=False)
    assert keep(report, 5) is report
    monkeypatch.setenv(REPORT_DIR, str(tmp_path))
    before = os.umask(0)
    try:
        kept = keep(report, 5)
    finally:
        os.umask(before)
    path = tmp_path / f"moe_rt-rank5-{os.getpid()}-{12 * S}.json"
    assert kept == replace(report, path=str(path))
    assert str(kept) == f"{report.conclusion}\nthe whole report: {path}"
    assert str(report) == report.conclusion
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == report.to_json()
    path.write_text("precious")
    with pytest.warns(UserWarning, match=f"^{REPORT_DIR}: could not write the report: .*File exists") as warned:
        assert keep(report, 5) is report
    assert warned[0].filename == __file__
    assert path.read_text() == "precious"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


MOST = _engine.MOST_LAST_WORDS


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("odd"), b"ValueError: odd"),
        (ValueError("\n  first  \nsecond"), b"ValueError: first  "),
        (ValueError(), b"ValueError"),
        (KeyboardInterrupt(), b"KeyboardInterrupt"),
        (PeerDead("rank 1 ended"), b"PeerDead: rank 1 ended"),  # without its section of the documents
        (Unspeakable(), b"Unspeakable"),
        (ValueError("\ud800"), b"ValueError: ?"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_last_words(error: BaseException, words: bytes) -> None:
    assert last_words(error) == words


@pytest.mark.parametrize("length", [MOST - 1, MOST, MOST + 1])
def test_words_are_cut_between_characters(length: int) -> None:
    assert cut("x" * length) == b"x" * min(length, MOST)
    wide = "x" * (length - 2) + "\N{EURO SIGN}"  # of three bytes
    assert cut(wide) == (wide.encode() if length + 1 <= MOST else b"x" * min(length - 2, MOST))


def test_words_of_peers_print_on_one_line() -> None:
    assert readable(b"  a\x1b[2Kb\r\nc\xff\t ") == "a [2Kb  c\ufffd"


def test_an_op_in_words() -> None:
    fields = dict.fromkeys(OpRecord.__dataclass_fields__, 0)
    assert str(OpRecord(**{**fields, "op": "combine", "seq": 3, "number": 9})) == "combine #3"  # type: ignore[arg-type]


def test_a_console_is_wide_enough_without_a_terminal() -> None:
    assert output.console(file=io.StringIO()).width == output.WIDTH == 160
    there = output.console(file=io.StringIO(), force_terminal=True, width=70)
    assert (there.is_terminal, there.width) == (True, 70)


def test_a_directory_for_results(tmp_path: Path) -> None:
    output.make_directory(tmp_path / "a/b")
    output.make_directory(tmp_path / "a/b")
    assert list((tmp_path / "a/b").iterdir()) == []
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file/below", Path("/proc")):
        with pytest.raises(InvalidConfig, match=f"report: got {place}, expected a directory to write in: "):
            output.make_directory(place)


def test_a_document_is_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees the old or the new document, and a failure leaves the old one."""
    path = tmp_path / "of.json"
    path.write_text("old")
    seen: list[Any] = []
    replace_it = Path.replace

    def look(partial: Path, target: Path) -> Path:
        seen.append((path.read_text(), partial, partial.read_text()))
        return replace_it(partial, target)

    monkeypatch.setattr(Path, "replace", look)
    output.write_document({"a": ["é"]}, path)
    text = '{\n "a": [\n  "\\u00e9"\n ]\n}\n'
    assert seen == [("old", tmp_path / ".of.json.partial", text)]
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == (text, ["of.json"])


def test_a_section_of_a_document(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("é <!-- a:begin -->old<!-- a:end --> <!-- b:begin -->kept<!-- b:end -->\n", encoding="utf-8")
    output.replace_section(path, "a", "new")
    assert path.read_text(encoding="utf-8") == (
        "é <!-- a:begin -->\n\nnew\n\n<!-- a:end --> <!-- b:begin -->kept<!-- b:end -->\n"
    )
    for text in ("<!-- a:begin -->", "<!-- a:end -->", "<!-- a:end --><!-- a:begin -->", ""):
        with pytest.raises(ValueError, match=r"^got no section <!-- a:begin --> to <!-- a:end -->$"):
            output.with_section(text, "a", "new")
