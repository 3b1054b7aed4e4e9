"""Tables of faults word by word, the trials of their rows, and how deaths are measured."""

from __future__ import annotations

import json
import mmap
import random
import signal
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from moe_rt.errors import PeerDead
from moe_rt.lab.chaos import cli, deaths, matrix, node_matrix, outcome
from moe_rt.lab.chaos.deaths import Death
from moe_rt.lab.chaos.injected_fault import InjectedFault
from moe_rt.lab.chaos.node_trials import Kill, LinkFault, Misbehaviour, Moment, Stop
from moe_rt.lab.chaos.outcome import Outcome
from moe_rt.lab.chaos.worker import Size

CARD = {"cores": 4, "cpu": "a processor", "load_average": 1.25}
ORIGIN = "4 cores of a processor, load average 1.2, 2026-11-28, "


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "machine_card", lambda: CARD)
    monkeypatch.setattr(outcome, "date", SimpleNamespace(today=lambda: date(2026, 11, 28)))


def of(trial: Any, *raised: str, ms: tuple[float, ...] = (), complaints: tuple[str, ...] = ()) -> Outcome[Any]:
    return Outcome(trial, {r: {"raised": name} for r, name in enumerate(raised)}, list(ms), list(complaints))


def fault(at: str, do: str, op: int = 5) -> InjectedFault:
    return InjectedFault(1, op, at, do)


OUTCOMES = [
    of(fault("mid_payload", "kill"), "PeerDead", "killed", "GroupPoisoned", ms=(3.0, 4.0)),
    of(fault("mid_payload", "kill", 6), "GroupPoisoned", "killed", "GroupPoisoned", ms=(9.0,)),
    of(fault("mid_payload", "raise"), "GroupPoisoned", "FaultInjected", "GroupPoisoned", ms=(1.0, 2.0)),
    of(fault("mid_payload", "sleep"), "nothing", "nothing", "nothing"),
    of(fault("after_payload", "stop"), "PeerTimeout", "GroupPoisoned", "GroupPoisoned", ms=(50.0,)),
    of(fault("after_payload", "corrupt"), "GroupPoisoned", "CorruptPeer", "GroupPoisoned"),
    of(fault("after_payload", "kill"), "PeerDead", "killed", "PeerTimeout", ms=(20.0,)),
]


def test_the_table_of_one_host() -> None:
    assert matrix.markdown(OUTCOMES).splitlines() == [
        f"3 processes on {ORIGIN}`python -m moe_rt.lab.chaos.matrix --write docs/reliability.md`.",
        "Times run from when the faulty rank began its op until a survivor had raised, median / worst; after a kill",
        "the kernel first takes the process apart, and `post_rendezvous` includes making the buffer.",
        "",
        "| Point | `kill` | `stop` | `raise` | `corrupt` | `sleep` | ms after kill | ms after raise |",
        "|---|---|---|---|---|---|---|---|",
        "| `mid_payload` | GroupPoisoned or PeerDead |  | GroupPoisoned |  | nothing | 4.0 / 9.0 | 1.5 / 2.0 |",
        "| `after_payload` | PeerDead or PeerTimeout | PeerTimeout |  | CorruptPeer |  | 20.0 / 20.0 |  |",
        "| all | | | | | | 6.5 / 20.0 | 1.5 / 2.0 |",
    ]
    table = matrix.markdown(OUTCOMES)
    assert matrix.committed(f"<!-- matrix:begin -->\n\n{table}\n\n<!-- matrix:end -->\n| `x` | y |") == (
        matrix.classes(OUTCOMES)
    )


def test_times_of_faults() -> None:
    assert matrix.times(OUTCOMES, "kill") == [3.0, 4.0, 9.0, 20.0]
    assert matrix.times(OUTCOMES, "kill", "mid_payload") == [3.0, 4.0, 9.0]
    assert matrix.times(OUTCOMES, "raise", "after_payload") == []


def test_faults_of_the_matrix() -> None:
    """Points in an op are tried in each kind of op of the second step; data can be corrupted at one point."""
    found = [(f.at, f.op, f.do) for f in matrix.injected_faults()]
    assert {(f.rank, f.ballast_mib, f.route) for f in matrix.injected_faults()} == {(1, 0, "auto")}
    in_ops = ["mid_payload", "after_payload", "after_some_flags", "after_all_flags", "mid_read"]
    ops = {
        "pre_rendezvous": [1], "post_rendezvous": [1], **{at: [5, 6, 7] for at in in_ops},
        "between_dispatch_and_combine": [5], "in_backward": [5], "in_destroy": [1],
    }  # fmt: skip
    actions = ("kill", "stop", "raise", "corrupt", "sleep")
    assert found == [
        (at, op, do)
        for at, numbers in ops.items()
        for op in numbers
        for do in actions
        if do != "corrupt" or at == "after_payload"
    ]


def test_the_matrix_is_run_on_three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Pool:
        def __init__(self, ranks: int) -> None:
            calls.append(ranks)

        def __enter__(self) -> str:
            return "pool"

        def __exit__(self, *_: object) -> None:
            calls.append("closed")

    monkeypatch.setattr(matrix, "RankPool", Pool)
    monkeypatch.setattr(InjectedFault, "run", lambda fault, pool: (fault, pool))
    seen: list[Any] = []
    found: Any = matrix.measure(seen.append)
    assert found == [(each, "pool") for each in matrix.injected_faults()]
    assert seen == list(matrix.injected_faults())
    assert calls == [3, "closed"]


def printed(module: Any, monkeypatch: pytest.MonkeyPatch, measured: Any, *words: str) -> tuple[list[str], list[str]]:
    def measure(progress: Callable[[Any], None], *given: Any) -> Any:
        progress(SimpleNamespace(spec="a trial") if module is matrix else "a trial")
        return measured

    monkeypatch.setattr(module, "measure", measure)
    done = CliRunner().invoke(module.main, words)
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_what_the_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, then one line of JSON; progress and complaints go to stderr."""
    bad = of(fault("mid_read", "stop"), "PeerTimeout", "GroupPoisoned", ms=(1.234,), complaints=("a", "b"))
    out, err = printed(matrix, monkeypatch, [*OUTCOMES, bad])
    assert "\n".join(out[:-1]) == matrix.markdown([*OUTCOMES, bad])
    document = json.loads(out[-1])
    assert out[-1] == json.dumps(document, separators=(",", ":"))
    assert document["outcomes"] == [o.describe() for o in [*OUTCOMES, bad]]
    assert document["outcomes"][-1] == {
        "trial": "rank=1,op=5,at=mid_read,do=stop", "raised": {"0": "PeerTimeout", "1": "GroupPoisoned"},
        "messages": {}, "milliseconds": [1.23], "complaints": ["a", "b"],
    }  # fmt: skip
    assert (document["classes"], document["kill_ms"]) == (
        matrix.classes([*OUTCOMES, bad]), {"median": 6.5, "worst": 20.0},
    )  # fmt: skip
    assert err == ["a trial", "Error: rank=1,op=5,at=mid_read,do=stop: a, b"]
    rows = {"a row": {"flat": bad, "two_level": bad}}
    out, err = printed(node_matrix, monkeypatch, rows)
    assert "\n".join(out[:-1]) == node_matrix.markdown(rows)  # type: ignore[arg-type]
    assert json.loads(out[-1]) == {
        "outcomes": [bad.describe()] * 2, "classes": {"a row": dict.fromkeys(("flat", "two_level"), "PeerTimeout")},
    }  # fmt: skip
    assert out[-1] == json.dumps(json.loads(out[-1]), separators=(",", ":"))
    assert err == ["a trial", "Error: " + "; ".join(["rank=1,op=5,at=mid_read,do=stop: a, b"] * 2)]


MOMENT = Moment(Size(route="two_level"), 3, 0.0)


def test_the_rows_over_nodes() -> None:
    """The faulty rank has a neighbour on its node where its process must be seen, and none where a link matters."""
    forwarded = [
        InjectedFault(1, op, "before_passing_on", do, route="two_level") for do, op in (("kill", 6), ("kill", 7))
    ]
    assert [row(MOMENT) for row in node_matrix.ROWS.values()] == [
        Kill("kill", 1, MOMENT),
        Kill("ranks", 1, MOMENT),
        Kill("node", 2, MOMENT),
        Stop("stop", 2, MOMENT, 0.0, True),
        Stop("pause", 1, MOMENT, 0.2, False),
        LinkFault("cut", 1, MOMENT, 0.0, ""),
        LinkFault("blink", 1, MOMENT, 0.3, ""),
        LinkFault("lossy", 1, MOMENT, 0.3, "5mbit"),
        Misbehaviour("raise", 1, MOMENT),
        Misbehaviour("abort", 2, MOMENT),
        Misbehaviour("close", 1, MOMENT),
        Misbehaviour("order", 2, MOMENT),
        Misbehaviour("input", 2, MOMENT),
        Misbehaviour("overflow", 1, MOMENT),
        *forwarded,
        InjectedFault(1, 6, "before_passing_on", "raise", route="two_level"),
    ]


def test_the_moment_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[Moment] = []

    class Pool:
        def __init__(self, nodes: tuple[int, ...]) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

    def row(moment: Moment) -> Any:
        moments.append(moment)
        return SimpleNamespace(run=lambda pool: "done")

    monkeypatch.setattr(node_matrix, "NodePool", Pool)
    monkeypatch.setattr(node_matrix, "ROWS", {"row": row})
    assert node_matrix.measure(lambda text: None) == {"row": {"flat": "done", "two_level": "done"}}
    assert moments == [Moment(Size(route=r, capacity_factor=1.5), 3, 0.0) for r in ("flat", "two_level")]


def test_the_table_over_nodes() -> None:
    """The faulty rank's own error and notices of others are left out, unless there is nothing else."""

    def trial(action: str, rank: int | None = 1) -> Any:
        return SimpleNamespace(action=action, text=action, **({} if rank is None else {"rank": rank}))

    rows = {
        "kill": {r: of(trial("kill"), "PeerDead", "killed", "GroupPoisoned") for r in ("flat", "two_level")},
        "raise": {"two_level": of(trial("raise"), "GroupPoisoned", "ValueError", "GroupPoisoned")},
        "order": {"flat": of(trial("order"), "GroupPoisoned", "CallOrderMismatch")},
        "cut": {"flat": of(trial("cut", None), "PeerDead", "PeerTimeout", "killed")},
        "none": {},
    }
    assert node_matrix.markdown(rows).splitlines() == [  # type: ignore[arg-type]
        f"3 processes on {ORIGIN}`python -m moe_rt.lab.chaos.node_matrix --write docs/reliability.md`.",
        "",
        "| What happens | `flat` | `two_level` |",
        "|---|---|---|",
        "| kill | PeerDead | PeerDead |",
        "| raise |  | GroupPoisoned |",
        "| order | CallOrderMismatch |  |",
        "| cut | PeerDead or PeerTimeout |  |",
        "| none |  |  |",
    ]
    table = node_matrix.markdown(rows)  # type: ignore[arg-type]
    text = f"| a | b | c |\n<!-- nodes:begin -->\n\n{table}\n\n<!-- nodes:end -->\n| d | e | f |"
    assert node_matrix.committed(text) == node_matrix.classes(rows)  # type: ignore[arg-type]


class Killed:
    """Two ranks of which one is killed; calls are noted, and the clock advances by a second at each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.calls: list[Any] = []
        self.now, self._answers = 100.0, list(answers)
        monkeypatch.setattr(deaths, "time", self)
        monkeypatch.setattr(deaths, "ProcessRanks", lambda: self)

    def note(self, *what: Any) -> None:
        self.calls.append(what)
        self.now += 1.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.note("sleep", seconds)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.note("closed")

    def start(self, rank: int, work: Any, *given: Any) -> None:
        assert work is deaths._live
        assert Path(given[1]).name == "store"
        assert Path(given[1]).parent.is_dir()
        assert Path(given[1]).parent.name.startswith("moe_rt_deaths_"), "what a killed program leaves has its name"
        self.note("start", rank, given[0], given[2])

    def receive(self, rank: int, timeout_s: float) -> bytes:
        self.note("receive", rank, timeout_s)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send_signal(self, rank: int, number: int) -> None:
        self.note("signal", rank, number)

    def await_end(self, rank: int, timeout_s: float) -> None:
        self.note("await_end", rank, timeout_s)


def test_one_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """The survivor has waited for a while when its peer is killed, and both times count from there."""
    ranks = Killed(monkeypatch, b"ready", b"ready", b'{"raised": "PeerDead", "at": 105.25}')
    assert deaths.kill_one(0.5, random.Random(3)) == Death(0.5, "PeerDead", 250.0, 2000.0)
    assert ranks.calls == [
        ("start", 0, 0, 0.0), ("start", 1, 1, 0.5), ("receive", 0, 120.0), ("receive", 1, 120.0),
        ("sleep", random.Random(3).uniform(0.05, 0.15)), ("signal", 1, signal.SIGKILL), ("await_end", 1, 60.0),
        ("receive", 0, 120.0), ("closed",),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (EOFError(), "rank 1: got its end, expected a message"),
        (TimeoutError(), "rank 1: got nothing for 120 s, expected a message"),
    ],
)
def test_a_rank_without_a_message(monkeypatch: pytest.MonkeyPatch, answer: Exception, words: str) -> None:
    ranks = Killed(monkeypatch, b"ready", answer)
    with pytest.raises(click.ClickException) as raised:
        deaths.kill_one(0.0, random.Random(1))
    assert raised.value.message == words
    assert ranks.calls[-1] == ("closed",)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("error", "raised"), [(PeerDead("it ended"), "PeerDead"), (None, "nothing")])
def test_the_life_of_a_rank_that_waits(
    monkeypatch: pytest.MonkeyPatch, rank: int, error: Exception | None, raised: str
) -> None:
    """Both do one round first. Rank 1 holds memory and waits to be killed; rank 0 begins an op without it."""
    did: list[Any] = []
    memory = SimpleNamespace(close=lambda: did.append("freed"))
    shares = {name: getattr(mmap, name) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_POPULATE")}

    class Buffer:
        def __init__(self, group: Any, **options: Any) -> None:
            did.append((group, options))

        def dispatch(self, x: Any, topk_idx: Any, weights: Any) -> Any:
            did.append(("dispatch", tuple(x.shape), topk_idx.tolist(), weights.tolist()))
            if "ready" in did and error is not None:
                raise error
            return "rows", "weights", "handle"

        def combine(self, *given: Any) -> None:
            did.append(("combine", *given))

    def mapped(fd: int, size: int, flags: int) -> Any:
        did.append(("mmap", fd, size, flags))
        return memory

    def send(message: bytes) -> None:
        did.append(message.decode() if message == b"ready" else json.loads(message))

    monkeypatch.setattr(deaths, "Buffer", Buffer)
    monkeypatch.setattr(deaths, "mmap", SimpleNamespace(mmap=mapped, **shares))
    monkeypatch.setattr(
        deaths, "time", SimpleNamespace(monotonic=lambda: 7.5, sleep=lambda s: did.append(("sleep", s)))
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda number: did.append(("threads", number)))
    monkeypatch.setattr(
        deaths, "dist", SimpleNamespace(init_process_group=lambda *given, **named: did.append((given, named)))
    )
    channel: Any = SimpleNamespace(send=send)
    deaths._live(channel, rank, "/a/store", 0.25 * rank)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    sizes = dict(num_max_tokens_per_rank=8, hidden=32, num_topk=1, num_experts=2, dtype=torch.float32, timeout_s=60.0)
    dispatch = ("dispatch", (8, 32), [[0]] * 8, [[1.0]] * 8)
    assert did == [
        ("threads", 1), (("gloo",), {"init_method": "file:///a/store", "rank": rank, "world_size": 2}),
        ("mmap", -1, 2**28 if rank else 1, flags), (None, sizes), dispatch, ("combine", "rows", "weights", "handle"),
        "ready", *([("sleep", 120.0), "freed"] if rank else []), dispatch,
        {"raised": raised, "at": 7.5}, ("sleep", 60.0),
    ]  # fmt: skip


DEATHS = [Death(0.0, "PeerDead", 1.0, 2.0), Death(0.0, "PeerDead", 3.0, 5.0), Death(2.5, "PeerDead", 7.0, 90.0)]
HEAD = [
    "Milliseconds from the kill, median / worst.",
    "",
    "| GiB of the process killed | Kills | until its peer raised `PeerDead` | until nothing was left of it |",
    "|---|---|---|---|",
]


@pytest.mark.parametrize("wrong", [False, True])
def test_the_table_of_deaths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: bool) -> None:
    """It is printed and written even if a survivor raised another error, which the exit status shows."""
    seeds: list[Any] = []
    raised = {2.5: "GroupPoisoned", 0.0: "nothing"} if wrong else {}

    def kill_one(gib: float, pace: random.Random) -> Death:
        seeds.append((gib, pace.random()))
        return Death(gib, raised.get(gib, "PeerDead"), 1.0 + len(seeds), 2.0 * len(seeds))

    monkeypatch.setattr(deaths, "kill_one", kill_one)
    page = tmp_path / "page.md"
    page.write_text("<!-- deaths:begin -->\n\nold\n\n<!-- deaths:end -->\n")
    words = ["--gib", "0", "--gib", "2.5", "--kills", "2", "--seed", "4", "--write", str(page)]
    done = CliRunner().invoke(deaths.main, words)
    pace = random.Random(4)
    assert seeds == [(gib, pace.random()) for gib in (0.0, 0.0, 2.5, 2.5)]
    table = [
        f"2 processes on {ORIGIN}`python -m moe_rt.lab.chaos.deaths --gib 0 --gib 2.5 --kills 2`.", *HEAD,
        "| 0 | 2 | 2.5 / 3.0 | 3.0 / 4.0 |", "| 2.5 | 2 | 4.5 / 5.0 | 7.0 / 8.0 |",
    ]  # fmt: skip
    *lines, last = done.stdout.splitlines()
    assert lines == table
    assert page.read_text() == "<!-- deaths:begin -->\n\n{}\n\n<!-- deaths:end -->\n".format("\n".join(table))
    assert last == json.dumps(json.loads(last), separators=(",", ":"))
    assert json.loads(last)[2] == {
        "gib": 2.5, "raised": raised.get(2.5, "PeerDead"), "noticed_ms": 4.0, "gone_ms": 6.0,
    }  # fmt: skip
    assert done.exit_code == int(wrong)
    said = ["Error: survivors raised GroupPoisoned, nothing, expected PeerDead"]
    assert done.stderr.splitlines() == (said if wrong else [])


def test_a_table_of_deaths_of_one_size() -> None:
    assert deaths.markdown(DEATHS, "it").splitlines() == [
        f"2 processes on {ORIGIN}`it`.", *HEAD, "| 0 | 2 | 2.0 / 3.0 | 3.5 / 5.0 |",
        "| 2.5 | 1 | 7.0 / 7.0 | 90.0 / 90.0 |",
    ]  # fmt: skip
    for words in (["--kills", "0"], ["--gib", "-1"]):
        assert CliRunner().invoke(deaths.main, words).exit_code == 2


def test_resources_that_a_program_of_trials_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its children, and the namespaces of networks that carry its number."""
    monkeypatch.setattr(cli, "NETNS", tmp_path)
    monkeypatch.setattr(cli.os, "getpid", lambda: 77)
    for name in ("chaos_77-0", "chaos_77-1", "chaos_771-0", "other"):
        (tmp_path / name).touch()
    monkeypatch.setattr(cli, "held", lambda: {"threads": 5})
    monkeypatch.setattr(
        cli, "Path", lambda path: SimpleNamespace(read_text=lambda: {"/proc/self/task/77/children": "4 5 6 "}[path])
    )
    assert cli._held() == {"threads": 5, "processes": 3, "namespaces": 2}
