"""Commands that write the tables of faults: what they print, when they write a table, and how they end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moe_rt.lab.chaos import matrix, node_matrix
from moe_rt.lab.chaos.injected_fault import InjectedFault
from moe_rt.lab.chaos.outcome import Outcome

NODE_ROW = "a rank raises"


def outcome(trial: Any, *raised: str, ms: tuple[float, ...] = (), complaints: tuple[str, ...] = ()) -> Outcome[Any]:
    return Outcome(trial, {r: {"raised": name} for r, name in enumerate(raised)}, list(ms), list(complaints))


def of_ranks(*complaints: str) -> list[Outcome[InjectedFault]]:
    kill = [InjectedFault(1, op, "mid_payload", "kill") for op in (5, 6)]
    corrupt = InjectedFault(1, 5, "after_payload", "corrupt")
    return [
        outcome(kill[0], "PeerDead", "killed", "GroupPoisoned", ms=(3.0, 4.0, 9.0)),
        outcome(kill[1], "GroupPoisoned", "killed", "GroupPoisoned", ms=(1.0,)),
        outcome(corrupt, "nothing", "CorruptPeer", "GroupPoisoned", complaints=complaints),
    ]


def of_nodes(routes: Any, *complaints: str) -> dict[str, dict[str, Outcome[Any]]]:
    names = dict.fromkeys(node_matrix.ROWS, "GroupPoisoned")
    return {
        name: {
            route: outcome(
                SimpleNamespace(action="raise", rank=1, text=f"{name} on {route}"), expected, "OSError", "killed",
                complaints=complaints if (name, route) == (NODE_ROW, "flat") else (),
            )
            for route in routes
        }
        for name, expected in names.items()
    }  # fmt: skip


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    sections = [f"<!-- {name}:begin -->\n\nold {name}\n\n<!-- {name}:end -->\n" for name in ("matrix", "nodes")]
    path.write_text("head\n" + "\n".join(sections) + "tail\n")
    return path


def run(module: Any, page: Path, *arguments: str) -> Result:
    return CliRunner().invoke(module.main, ["--write", str(page), *arguments])


@pytest.mark.parametrize("complaint", [(), ("rank 2 kept 1 threads", "rank 0 hung")])
def test_of_one_host(monkeypatch: pytest.MonkeyPatch, page: Path, complaint: tuple[str, ...]) -> None:
    outcomes = of_ranks(*complaint)
    monkeypatch.setattr(matrix, "measure", lambda progress: outcomes)
    before = page.read_text()
    done = run(matrix, page)
    expected = {
        "mid_payload": {"kill": "GroupPoisoned or PeerDead"},
        "after_payload": {"corrupt": "CorruptPeer or nothing"},
    }
    document = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert document["classes"] == expected
    assert [each["raised"]["0"] for each in document["outcomes"]] == ["PeerDead", "GroupPoisoned", "nothing"]
    assert document["kill_ms"] == {"median": 3.5, "worst": 9.0}
    table = next(line for line in done.stdout.splitlines() if "`mid_payload`" in line)
    assert table.endswith("| 3.5 / 9.0 |  |")
    if complaint:
        assert done.exit_code == 1
        assert "at=after_payload,do=corrupt: rank 2 kept 1 threads, rank 0 hung" in done.output
        assert page.read_text() == before, "a table of wrong outcomes is not written"
    else:
        assert done.exit_code == 0
        assert matrix.committed(page.read_text()) == expected
        assert "old nodes" in page.read_text()
        assert "old matrix" not in page.read_text()


@pytest.mark.parametrize(
    ("routes", "complaint"), [((), ()), ((), ("rank 2 hung", "rank 0 hung")), (("--route", "flat"), ())], ids=str
)
def test_over_nodes(
    monkeypatch: pytest.MonkeyPatch, page: Path, routes: tuple[str, ...], complaint: tuple[str, ...]
) -> None:
    monkeypatch.setattr(node_matrix, "measure", lambda progress, asked: of_nodes(asked, *complaint))
    before = page.read_text()
    done = run(node_matrix, page, *routes)
    measured = routes[1:] or node_matrix.ROUTES
    lines = done.stdout.splitlines()
    document = json.loads(next(line for line in lines if line.startswith("{")))
    assert document["classes"] == {name: dict.fromkeys(measured, "GroupPoisoned") for name in node_matrix.ROWS}
    assert len(document["outcomes"]) == len(node_matrix.ROWS) * len(measured)
    assert lines.index(next(line for line in lines if NODE_ROW in line)) < lines.index(
        next(line for line in lines if line.startswith("{"))
    ), "the table comes first, and the document last"
    assert done.exit_code == (1 if complaint else 0)
    if complaint:
        assert f"{NODE_ROW} on flat: rank 2 hung, rank 0 hung" in done.output
    if complaint or routes:
        assert page.read_text() == before, "only a whole and right table is written"
    else:
        assert node_matrix.committed(page.read_text()) == document["classes"]
        assert "old matrix" in page.read_text()


def test_every_route_runs_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row runs on each route, but those of forwarders, which the flat route does not have."""
    pools, progress = [], []

    class Pool:
        def __init__(self, nodes: tuple[int, ...]) -> None:
            pools.append(nodes)

        def __enter__(self) -> str:
            return "pool"

        def __exit__(self, *_: object) -> None:
            pools.append("closed")

    class Row:
        def __init__(self, moment: Any) -> None:
            self.route = moment.size.route

        def run(self, pool: Any) -> Any:
            return self.route, pool

    of_a_forwarder = InjectedFault(1, 6, node_matrix.OF_FORWARDERS, "kill")
    monkeypatch.setattr(node_matrix, "NodePool", Pool)
    monkeypatch.setattr(InjectedFault, "run", lambda fault, pool: ("two_level", pool))
    monkeypatch.setattr(node_matrix, "ROWS", {"any": Row, "proxy": lambda moment: of_a_forwarder})
    found = node_matrix.measure(progress.append, ("two_level", "flat"))
    assert found == {
        "any": {"two_level": ("two_level", "pool"), "flat": ("flat", "pool")},
        "proxy": {"two_level": ("two_level", "pool")},
    }
    assert progress == ["two_level: any", "two_level: proxy", "flat: any"]
    assert pools == [(2, 1), "closed"]
