"""A CPU rank on a stand-in of its C++ engine: what reaches C++, what each status is raised as, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.routing import make_spec

from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.engine import cpu
from moe_rt.engine.cpu import CpuEngine
from moe_rt.engine.halves import Begun
from moe_rt.errors import (
    CallOrderMismatch,
    CapacityOverflow,
    Code,
    FaultInjected,
    GroupClosed,
    GroupPoisoned,
    InvalidInput,
    MoeRtError,
    Op,
    PeerDead,
    PeerTimeout,
    TooManyTokens,
)
from moe_rt.faults import Point
from moe_rt.memory.segments import Segments

RANK = 1
ARGS: Any = SimpleNamespace(num_tokens=5)


def status(code: int, **changes: Any) -> Any:
    fields = dict(code=int(code), op=1, phase=2, peer=0, seq=3, got=6, expected=7)
    return SimpleNamespace(**{**fields, **changes})


class Cpp:
    """The C++ engine; methods note their arguments and return what `returns` has under their names."""

    def __init__(self, noted: list[Any], **returns: Any) -> None:
        self.noted, self.returns = noted, returns

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.noted.append((name, *given, *([named] if named else [])))
            return self.returns.get(name)

        return call


def rank(noted: list[Any], *, num_ranks: int = 3, changes: dict[str, Any] | None = None, **returns: Any) -> Any:
    """Return an engine of rank 1, whose calls of C++ are noted."""
    engine: Any = object.__new__(CpuEngine)
    engine.spec, engine.rank, engine.timeout_s = make_spec(num_ranks, **(changes or {})), RANK, 2.5
    engine._engine, engine._windows, engine._report = Cpp(noted, **returns), None, None
    engine._fault = SimpleNamespace(at=-1)
    released = lambda: noted.append("released")  # noqa: E731
    engine._segments = Segments([1] * num_ranks, [None] * num_ranks, [b"m"] * num_ranks, on_release=released)
    engine._ops = {op: getattr(engine._engine, op.name.lower()) for op in Op if op is not Op.NONE}
    engine._capacities = {engine.spec.num_max_tokens_per_rank: 36}
    return engine


def windows(noted: list[Any]) -> Any:
    return SimpleNamespace(retire=lambda: noted.append("retire"))


@pytest.mark.parametrize("op", [Op.DISPATCH, Op.COMBINE, Op.COMBINE_BACKWARD])
def test_a_window_is_retired_before_an_op_runs(op: Op) -> None:
    noted: list[Any] = []
    engine = rank(noted)
    engine._windows = windows(noted)
    engine._run(op, ARGS, 7)
    assert noted == ["retire", (op.name.lower(), ARGS, 7)]


def test_the_status_of_an_op_is_raised() -> None:
    engine = rank([], dispatch=status(Code.CAPACITY_OVERFLOW))
    with pytest.raises(CapacityOverflow) as raised:
        engine._run(Op.DISPATCH, ARGS, 7)
    assert (raised.value.rank, raised.value.seq) == (RANK, 3)


def begun() -> Begun:
    made = Begun(Op.COMBINE, "combine", (), torch.zeros(1))
    made.args, made.tag, made.used = ARGS, 9, ()
    return made


def test_halves_reach_c_with_their_arguments() -> None:
    noted: list[Any] = []
    engine = rank(noted)
    engine._windows = windows(noted)
    engine._run_first(begun())
    engine._run_second(begun())
    assert noted == ["retire", ("begin", ARGS, 9), ("finish", ARGS, 9)]
    engine = rank([], finish=status(Code.PEER_CLOSED, peer=-1))
    with pytest.raises(GroupClosed):
        engine._run_second(begun())


def test_a_first_half_of_bad_input_is_announced_and_another_failure_is_not() -> None:
    """C++ announces every refusal of a first half but that of its own input."""
    noted: list[Any] = []
    engine = rank(noted, begin=status(Code.INVALID_INPUT, got=4, expected=8), refuse=status(0))
    with pytest.raises(InvalidInput):
        engine._run_first(begun())
    refused = {"op": Op.COMBINE, "code": Code.INVALID_INPUT, "got": 4, "expected": 8, "tag": 9}
    assert noted[1:] == [("refuse", refused)]
    noted.clear()
    engine = rank(noted, begin=status(Code.CAPACITY_OVERFLOW))
    with pytest.raises(CapacityOverflow):
        engine._run_first(begun())
    assert noted == [("begin", ARGS, 9)]


@pytest.mark.parametrize("overflow", ["raise", "drop", "retry"])
@pytest.mark.parametrize(("needed", "capacity"), [(35, 36), (36, 36), (37, 37), (90, 90)])
def test_capacity_grows_to_what_was_needed_if_ranks_retry(overflow: str, needed: int, capacity: int) -> None:
    engine = rank([], changes={"overflow": overflow, "capacity_factor": 2.0}, needed_rows=needed)
    engine._capacities = {12: 36, 6: 1}
    assert engine._grow(12) is (overflow == "retry")
    assert engine._capacities == {12: capacity if overflow == "retry" else 36, 6: 1}


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        (Code.OK, True),
        (Code.CAPACITY_OVERFLOW, True),
        (Code.CONFIG_MISMATCH, False),
        (Code.POISONED, False),
        (Code.CLOSED, False),
    ],
)
@pytest.mark.parametrize("error", [InvalidInput("x: got 1"), TooManyTokens("x: got 9")], ids=["input", "tokens"])
def test_a_refusal_is_raised_unless_the_group_has_failed(code: Code, is_refused: bool, error: MoeRtError) -> None:
    noted: list[Any] = []
    engine = rank(noted, refuse=status(code, peer=-1))
    with pytest.raises(MoeRtError) as raised:
        engine._refuse(Op.DISPATCH, 4, error, 1, 2)
    expected = Code.TOO_MANY_TOKENS if isinstance(error, TooManyTokens) else Code.INVALID_INPUT
    assert noted[0] == ("refuse", {"op": Op.DISPATCH, "code": expected, "got": 1, "expected": 2, "tag": 4})
    assert (raised.value is error) is is_refused
    if not is_refused:
        assert raised.value.__cause__ is error


def test_ops_under_way_end_before_a_whole_op() -> None:
    noted: list[Any] = []
    engine = rank(noted, changes={"depth": 2})
    engine._begun = (begun(),)
    engine._run(Op.DISPATCH, ARGS, 7)
    assert noted == [("finish", ARGS, 9), ("dispatch", ARGS, 7)]


def test_ops_under_way_end_before_a_refusal() -> None:
    noted: list[Any] = []
    engine = rank(noted, refuse=status(0))
    engine._begun = (begun(),)
    with pytest.raises(InvalidInput):
        engine._refuse(Op.DISPATCH, 4, InvalidInput("x"), 0, 0)
    assert [call[0] for call in noted] == ["finish", "refuse"]


def test_the_health_of_a_group_is_its_status() -> None:
    rank([], health=status(0)).health()
    with pytest.raises(GroupPoisoned):
        rank([], health=status(Code.POISONED, peer=-1)).health()


def test_phases_of_the_last_op() -> None:
    record = SimpleNamespace(op=2, start_ns=100, announced_ns=130, arrived_ns=200, end_ns=290)
    engine = rank([], op_record=record, arrival_ns=[1, 2], line_latency_ns=[3, 4], waited_ns=[5, 6])
    assert engine.timings() == {
        "op": "combine",
        "before_ns": 30,
        "wait_ns": 70,
        "after_ns": 90,
        "arrival_ns": [1, 2],
        "line_latency_ns": [3, 4],
    }
    assert engine.waited_ns() == [5, 6]
    record.arrived_ns = 0  # its wait failed
    assert [engine.timings()[name] for name in ("before_ns", "wait_ns", "after_ns")] == [30, 160, 0]


def test_a_report_needs_an_open_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rank([])
    engine._segments.members = [(1, 2)]
    monkeypatch.setattr(cpu, "report_on", lambda *given: given)
    assert engine.report() == ([(1, 2)], [b"m"] * 3, [None] * 3)
    engine._segments.release()
    with pytest.raises(GroupClosed) as raised:
        engine.report()
    assert raised.value.args[0] == "the buffer was closed on this rank; expected an open one"
    assert raised.value.rank == RANK


POISON = ("poison", {"code": Code.POISONED, "peer": -1})


def test_an_error_leaves_its_words_before_it_ends_the_group() -> None:
    noted: list[Any] = []
    engine = rank(noted)
    engine.poison(ValueError("bad batch"))
    assert noted == [("leave_words", b"ValueError: bad batch"), POISON]
    noted.clear()
    engine.poison()
    assert noted == [POISON]


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("why", ["", "its program ended"])
def test_a_close_says_why_and_gives_memory_back_once_no_op_uses_it(closes: bool, why: str) -> None:
    noted: list[Any] = []
    engine = rank(noted, close=closes)
    engine.close(why)
    words = [("leave_words", why.encode())] if why else []
    assert noted == [*words, ("close",), *(["released"] if closes else [])]


def test_a_closed_buffer_leaves_no_words() -> None:
    noted: list[Any] = []
    engine = rank(noted, close=False)
    engine._segments.mappings.clear()
    engine.close("its program ended")
    assert noted == [("close",)]


def test_an_injected_fault_ends_the_group_and_the_buffer_is_closed_anyway() -> None:
    noted: list[Any] = []
    engine = rank(noted, close=True)
    engine._fault = SimpleNamespace(at=int(Point.IN_DESTROY), strike=lambda: False)
    with pytest.raises(FaultInjected):
        engine.close()
    assert noted[-3:] == [POISON, ("close",), "released"]
    engine.reach(Point.POST_RENDEZVOUS)


def report(own: Any = None, calls: str = "", disagrees: bool = False) -> Any:
    """Return a report in which this rank's last op began at 50."""
    ranks = [SimpleNamespace(last_ops=own if r == RANK else None) for r in range(3)]
    disagreement = SimpleNamespace(calls=calls, outvoted=[0]) if disagrees else None
    return SimpleNamespace(ranks=ranks, disagreement=disagreement)


@pytest.fixture
def raises(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[MoeRtError, list[Any]]]:
    """Return raises(status, report, words), which returns the error of a status, and what was asked for its words."""

    def raising(given: Any, made: Any = None, network: Any = None) -> tuple[MoeRtError, list[Any]]:
        noted: list[Any] = []
        engine = rank(noted)
        engine.report = lambda: noted.append("report") or made or report()
        engine._segments.network = network
        engine._last_words_of = lambda peer: noted.append(("words of", peer)) or "its words"
        monkeypatch.setattr(cpu, "keep", lambda made, rank: noted.append(("keep", rank)) or made)
        monkeypatch.setattr(cpu, "elsewhere", lambda segments, *given: noted.append(given) or "it waits elsewhere")
        error = engine._error(given)
        assert engine._error(given).args == error.args
        assert noted.count("report") <= 1, "it is made once"
        return error, noted[: len(noted) // 2 + 1] if "report" in noted else noted[: len(noted) // 2]

    return raising


REPORTED = ["report", ("keep", RANK)]
LAST = [SimpleNamespace(start_ns=40), SimpleNamespace(start_ns=50)]


@pytest.mark.parametrize(
    ("given", "kind", "words", "asked"),
    [
        (status(Code.POISONED, got=int(Code.POISONED)), GroupPoisoned, "its words", [("words of", 0)]),
        (status(Code.PEER_CLOSED, peer=2), GroupClosed, "(its words)", [("words of", 2)]),
        (status(Code.PEER_TIMEOUT), PeerTimeout, "it waits elsewhere", [*REPORTED, (RANK, 0, 50)]),
        (status(Code.POISONED, got=int(Code.PEER_TIMEOUT), expected=2), GroupPoisoned, "it waits elsewhere",
         [*REPORTED, (RANK, 2, 50)]),
        (status(Code.PEER_DEAD), PeerDead, "the process of rank 0 ended", REPORTED),
        (status(Code.POISONED, got=int(Code.PEER_DEAD), expected=2), PeerDead, "concerning rank 2", REPORTED),
        (status(Code.CALL_ORDER_MISMATCH), CallOrderMismatch, "rank 0 called it", REPORTED),
        (status(Code.CAPACITY_OVERFLOW), CapacityOverflow, "would receive 6 rows", []),
    ],
)  # fmt: skip
def test_words_of_a_failure(raises: Any, given: Any, kind: type, words: str, asked: list[Any]) -> None:
    made = report(LAST, "rank 0 called it", disagrees=given.code == Code.CALL_ORDER_MISMATCH)
    error, noted = raises(given, made)
    assert type(error) is kind
    assert words in str(error.args[0])
    assert noted[: len(asked)] == asked
    assert (error.report is not None) is ("report" in asked)


@pytest.mark.parametrize(
    ("late", "own", "asks"),
    [(0, LAST, True), (2, LAST, True), (3, LAST, False), (-1, LAST, False), (RANK, LAST, False), (0, [], False)],
)
def test_who_may_wait_elsewhere(raises: Any, late: int, own: list[Any], asks: bool) -> None:
    error, noted = raises(status(Code.PEER_TIMEOUT, peer=late), report(own))
    assert ((RANK, late, 50) in noted) is asks
    assert ("it waits elsewhere" in str(error)) is asks


@pytest.mark.parametrize("problem", ["", "timed out"])
def test_a_dead_peer_on_another_host_may_be_a_dead_link(raises: Any, problem: str) -> None:
    asked: list[int] = []
    network = SimpleNamespace(problem=lambda peer: asked.append(peer) or problem)
    error, _ = raises(status(Code.PEER_DEAD, peer=2), report(LAST), network)
    link = "the process of rank 2 ended, or the link to it is down (timed out): "
    assert (link in str(error)) is bool(problem)
    assert set(asked) == {2}


@pytest.mark.parametrize("peer", [-1, 0, 2, 3])
def test_last_words_are_those_of_a_rank_of_the_group(monkeypatch: pytest.MonkeyPatch, peer: int) -> None:
    engine = rank([], remote_last_words=b"of\na remote")
    engine._segments.mappings = [b"0", b"1", None]
    monkeypatch.setattr(cpu._engine, "read_segment", lambda holder: SimpleNamespace(last_words=b"of " + holder))
    assert engine._last_words_of(peer) == {0: "of 0", 2: "of a remote"}.get(peer, "")


def test_last_words_that_are_overwritten_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwritten(holder: Any) -> None:
        raise ValueError("changed")

    monkeypatch.setattr(cpu._engine, "read_segment", overwritten)
    assert rank([])._last_words_of(0) == ""


class Made:
    """Records the arguments of a C++ object."""

    def __init__(self, made: dict[str, Any], name: str) -> None:
        self.made, self.name = made, name

    def __call__(self, **given: Any) -> Any:
        self.made[self.name] = given
        return SimpleNamespace(dispatch=0, combine=1, combine_backward=2, **{"name": self.name})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("Engine", "write_segment_header", "MappedNetwork"):
        monkeypatch.setattr(cpu._engine, name, Made(found, name))
    monkeypatch.setattr(cpu, "num_cores", lambda pids: ("cores of", pids))
    monkeypatch.setattr(cpu, "cache_bytes", lambda: 77)
    return found


def engine_of(spec: BufferSpec, segments: Segments, **changes: Any) -> Any:
    fault: Any = SimpleNamespace(at=-1)
    how: dict[str, Any] = {"timeout_s": 2.5, "num_threads": 3, "isa": "auto", "fault": fault}
    return CpuEngine(spec, RANK, segments, **{**how, **changes})


@pytest.mark.parametrize("nodes", [None, (0, 1, 1)])
@pytest.mark.parametrize("network", [None, "a network"])
@pytest.mark.parametrize("overflow", ["drop", "raise"])
def test_options_reach_c(made: dict[str, Any], nodes: Any, network: Any, overflow: str) -> None:
    changes = {"dispatch_dtype": torch.int8, "combine_dtype": torch.float8_e4m3fn, "capacity_factor": 2.0}
    spec = make_spec(3, overflow=overflow, placement=[2, 0, 1, 0, 0, 0, 0, 0, 0], **changes)
    if nodes:
        spec = replace(spec, route="two_level", topology=Topology(nodes))
    watches: Any = [SimpleNamespace(descriptor=40), None, SimpleNamespace(descriptor=42)]
    segments = Segments([160, 320, 480], watches, [b""] * 3, network=network)
    segments.members = [(11, 1), (0, 0), (13, 3)]
    engine_of(spec, segments, num_threads=5, isa="some")
    header, given = made["write_segment_header"], made["Engine"]
    assert {name: header[name] for name in ("segment", "rank", "config_hash", "members", "nodes")} == {
        "segment": 320,
        "rank": RANK,
        "config_hash": spec.hash(),
        "members": segments.members,
        "nodes": list(spec.topology.nodes),
    }
    mapped = nodes is not None and network is None
    assert ("MappedNetwork" in made) is mapped
    if mapped:
        assert {name: made["MappedNetwork"][name] for name in ("segments", "rank")} == {
            "segments": [160, 320, 480],
            "rank": RANK,
        }
        assert given.pop("network").name == "MappedNetwork"
    else:
        assert given.pop("network") == network
    assert isinstance(given.pop("shape"), type(spec.shape()))
    assert given.pop("fault").at == -1
    assert given == {
        "elem": 0,
        "rank": RANK,
        "config_hash": spec.hash(),
        "expert_rank": [2, 0, 1, 0, 0, 0, 0, 0, 0],
        "node_of": list(nodes or ()),
        "segments": [0, 320, 480] if mapped else [160, 320, 480],
        "watches": [40, -1, 42],
        "timeout_s": 2.5,
        "dispatch_codec": 2,
        "combine_codec": 1,
        "drop_overflow": overflow == "drop",
        "num_lanes": 5,
        "isa": "some",
        "cache_bytes": 77,
        "near_ns": spec.tuning.near_ns,
        "stream_shares": spec.tuning.stream_shares,
        "num_cores": ("cores of", [11, 13]),
    }


def test_each_op_has_its_function_of_c(made: dict[str, Any]) -> None:
    engine = engine_of(make_spec(2), Segments([160, 320], [None] * 2, [b""] * 2))
    assert engine._ops == {Op.DISPATCH: 0, Op.COMBINE: 1, Op.DISPATCH_BACKWARD: 1, Op.COMBINE_BACKWARD: 2}
    assert engine.device == torch.device("cpu")
