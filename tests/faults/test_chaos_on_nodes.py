"""The fault matrix over emulated nodes, by either route, a few rounds of chaos there, and the checks of their
outcomes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from support.forked_python import run_python
from support.needs_nodes import new_cluster

from moe_rt.cli import main
from moe_rt.errors import CapacityOverflow, InvalidRouting, MoeRtError
from moe_rt.lab.chaos import node_trials
from moe_rt.lab.chaos.node_matrix import ROWS, committed
from moe_rt.lab.chaos.node_trials import Moment, Stop, judged
from moe_rt.lab.chaos.worker import Size, misbehave
from moe_rt.lab.testing.rounds import WrongOutput
from moe_rt.memory import ucx

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def rights() -> None:
    new_cluster(1, name="rights").down()


def last_line(*command: str) -> dict[str, Any]:
    """Return the document that a command prints last."""
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("route", ["two_level", pytest.param("flat", marks=pytest.mark.sweep)])
def test_the_committed_table_is_what_happens(route: str) -> None:
    """The committed table agrees with the matrix, and every rank raises what it must."""
    matrix = last_line("-m", "moe_rt.lab.chaos.node_matrix", "--route", route)
    assert [outcome for outcome in matrix["outcomes"] if outcome["complaints"]] == []
    table = committed((ROOT / "docs/reliability.md").read_text())
    assert set(table) == set(ROWS)
    assert {name: row for name, row in matrix["classes"].items() if row} == {
        name: {route: row[route]} for name, row in table.items() if route in row
    }


def test_chaos() -> None:
    """Every round injects another fault, of which two leave the group intact."""
    words = [word for action in ("node", "flap", "order", "input", "pause") for word in ("--action", action)]
    document = last_line("-m", "moe_rt", "chaos", "--nodes", "1,2", "--rounds", "5", "--seed", "5", *words)
    assert document["complaints"] == []
    assert document["nodes"] == [1, 2]
    assert sum(action["rounds"] for action in document["actions"].values()) == 5
    assert set(document["left_behind"]) >= {"descriptors", "processes", "namespaces"}
    assert document["left_behind"]["store keys"] == 0, "a negative count would hide keys that are left"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2"], "got '2', expected the ranks of two nodes or more"),
        (["--nodes", "2,x"], "got '2,x', expected the ranks of two nodes or more"),
        (["--nodes", "2,0"], "got '2,0', expected the ranks of two nodes or more"),
        (["--nodes", "1,1", "--action", "heavy"], "got ['heavy'], expected of kill, ranks, node"),
        (["--action", "cut"], "got ['cut'], expected of kill, stop, raise"),
    ],
)
def test_odd_options_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["chaos", *words])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_without_ucx_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "_LIBRARY", "libnowhere.so.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["chaos", "--nodes", "1,1", "--rounds", "1"])
    assert result.exit_code == 1
    assert "pip install '.[ucx]'" in result.output
    assert result.output.count("\n") == 1


def report(raised: str, message: str = "", **changes: Any) -> dict[str, Any]:
    done = {"raised": raised, "message": message, "then": raised, "made": True}
    return done | dict.fromkeys(("descriptors", "threads", "segments"), 0) | changes


@pytest.mark.parametrize(
    ("of_rank_0", "complaint"),
    [
        (report("PeerDead", "the process of rank 1 ended"), ""),
        (report("PeerTimeout", "rank 1 announced nothing"), "rank 0 raised PeerTimeout, expected PeerDead"),
        (report("hung"), "rank 0 raised hung, expected PeerDead"),
        (report("wrong data", "out"), "rank 0 raised wrong data, expected PeerDead"),
        (report("PeerDead", "the process of rank 2 ended\nrank 1 is late"), "rank 0 blames none of ranks [1]"),
        (report("PeerDead", "the process of rank 10 ended"), "rank 0 blames none of ranks [1]"),
        (report("PeerDead", "rank 1", then="nothing"), "rank 0 completed a step after PeerDead"),
        (report("PeerDead", "rank 1", descriptors=2), "rank 0 kept 2 descriptors"),
    ],
)
def test_what_is_complained_of(of_rank_0: dict[str, Any], complaint: str) -> None:
    complaints = judged({0: of_rank_0}, [0], {"PeerDead"}, lambda rank: [1])
    assert complaints == [] if not complaint else complaints[0].startswith(complaint), complaints


@pytest.mark.parametrize(("named", "complaint"), [(2, ""), (1, "no rank names rank 2"), (0, "rank 0 blames none of")])
def test_who_is_blamed_for_a_stop(named: int, complaint: str) -> None:
    """A stop must be blamed on rank 2, or by some rank on a rank that waits for it; no rank blames itself."""
    late_reports = {rank: report("PeerTimeout", f"combine #1: rank {named} is late") for rank in (0, 1)}
    if named == 0:
        late_reports[1] = report("PeerTimeout", "combine #1: rank 2 is late")
    pool = Mock(size=3, **{"has_news.return_value": False, "reports.return_value": late_reports})
    again = {rank: report("nothing", steps=5) for rank in (0, 1)}
    pool.reports.side_effect = lambda ranks, _: late_reports if pool.kill.call_count == 0 else again
    found = Stop("stop", 2, Moment(Size(1, 32, 1, "flat"), 1, 0.0), 0.0, wakes=False).run(pool).complaints
    assert any(text.startswith(complaint) for text in found) if complaint else found == [], found


def test_a_blink_that_has_lasted_too_long_is_judged_as_a_flap_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, moment = iter([0.0, 1.5, 10.0, 10.4]), Mock()
    monkeypatch.setattr(node_trials, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setattr(node_trials, "survived", lambda *_: "survived")
    flapped = Mock(return_value=SimpleNamespace(complaints=[]))
    monkeypatch.setattr(node_trials.LinkFault, "_flapped", flapped)
    blink = node_trials.LinkFault("blink", 1, moment, 0.3, "")
    assert blink.run(Mock()) == "survived"
    assert (flapped.call_count, moment.await_in.call_count) == (1, 2)
    clock = iter([0.0, 1.5])
    flapped.return_value.complaints.append("rank 0 hung")
    assert blink.run(Mock()).complaints == ["rank 0 hung"]


@pytest.mark.parametrize(
    ("act", "right", "wrong"),
    [("input", InvalidRouting, CapacityOverflow), ("overflow", CapacityOverflow, InvalidRouting)],
)
def test_what_is_not_refused_as_it_must_be_is_reported(
    act: str, right: type[MoeRtError], wrong: type[MoeRtError]
) -> None:
    spec = SimpleNamespace(num_max_tokens_per_rank=4, num_experts=2, num_topk=1, hidden=8)

    def dispatch_that(raises: MoeRtError | None) -> Any:
        return SimpleNamespace(rank=0, spec=spec, dispatch=Mock(side_effect=raises, return_value=None))

    misbehave(dispatch_that(right("as it must")), act, True, 0)
    with pytest.raises(WrongOutput, match=f"{act}: None"):
        misbehave(dispatch_that(None), act, True, 0)
    with pytest.raises(WrongOutput, match=f"{act}: <class"):
        misbehave(dispatch_that(wrong("the other one's")), act, True, 0)
