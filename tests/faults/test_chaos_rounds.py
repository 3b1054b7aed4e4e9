"""`moe-rt chaos` draws from all of its ranges and nothing outside of them, and reports every complaint of a round."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from moe_rt.faults import POINTS
from moe_rt.lab.chaos import cli, node_trials, trials, worker
from moe_rt.lab.chaos.injected_fault import OF_FORWARDERS, InjectedFault, _judge, _of_faulty_rank, _steps_done
from moe_rt.lab.chaos.outcome import Outcome

DRAWS = 400


def drawn(draw: Callable[[random.Random], Any]) -> list[Any]:
    first, again = ([draw(random.Random(seed)) for seed in range(DRAWS)] for _ in range(2))
    assert first == again, "a seed gives a trial"
    return first


def of(values: Any) -> tuple[Any, Any]:
    values = list(values)
    return min(values), max(values)


def check_moments(moments: list[node_trials.Moment], tight: bool = False) -> None:
    assert {m.step for m in moments} == set(range(1, 9))
    low, high = of(m.after_s for m in moments)
    assert 0.0 <= low < 0.01 < 0.09 < high <= 0.1
    sizes = {(m.size.tokens, m.size.hidden, m.size.num_threads, m.size.route) for m in moments}
    if tight:
        assert sizes == {(8, 32, 1, "flat"), (8, 32, 1, "two_level")}
        assert {m.size.capacity_factor for m in moments} == {worker.TIGHT}
    else:
        assert sizes == {
            (t, h, n, r) for t in (1, 8, 64) for h in (32, 500, 4096) for n in (1, 2) for r in node_trials.ROUTES
        }
        assert {m.size.capacity_factor for m in moments} == {None}


@pytest.mark.parametrize("action", cli.ACTIONS_ON_NODES)
def test_textson_nodes(action: str) -> None:
    found = drawn(lambda pace: cli.draw_on_nodes(action, pace, [2, 1]))
    assert {trial.action for trial in found} == {action}
    if action in cli.LINKS:
        assert {trial.node for trial in found} == {0, 1}
        low, high = node_trials.SECONDS.get(action, (0.0, 0.0))
        seconds = of(trial.seconds for trial in found)
        assert low <= seconds[0] <= low + 0.05
        assert high - 0.05 <= seconds[1] <= high
        assert {trial.rate for trial in found} == set(node_trials.SLOW)
    else:
        assert {trial.rank for trial in found} == {0, 1, 2}
    if action == "interrupt":
        check_interrupts(found)
    else:
        check_moments([trial.moment for trial in found], action == "overflow")
    if action in cli.STOPS:
        assert {trial.wakes for trial in found} == {False, True}
        assert of(trial.seconds for trial in found) == pytest.approx((0.05, 0.5), abs=0.02)


def check_interrupts(found: list[trials.Interrupt]) -> None:
    assert {(trial.rank, trial.late) for trial in found} == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert {trial.where for trial in found} == set(trials.PLACES)
    assert {trial.step for trial in found} == set(range(1, 11))
    assert of(trial.after_s for trial in found) == pytest.approx((0.0, 0.2), abs=0.01)


@pytest.mark.parametrize("action", cli.ACTIONS_ON_ONE_HOST)
def test_textson_one_host(action: str) -> None:
    found = drawn(lambda pace: cli.draw_on_one_host(action, pace, 3, 1.5))
    assert {trial.action for trial in found} == {action}
    if action == "freeze":
        assert {tuple(sorted(order)) for t in found for order in (t.stopped, t.thawed)} == {(0, 1, 2)}
        assert len({t.stopped for t in found}) == len({t.thawed for t in found}) == 6
        assert {t.step for t in found} == set(range(10))
        gaps = [t.gap_s for t in found]
        assert 0.3 < gaps.count(0.0) / DRAWS < 0.7
        assert 0.9 * trials.TIMEOUT_S / 30 < max(gaps) <= round(trials.TIMEOUT_S / 30, 3), (
            "a rank runs for less than its timeout"
        )
    elif action == "interrupt":
        check_interrupts(found)
    elif action == "limit":
        assert {t.rank for t in found} == {0, 1, 2}
        more = [trials.Scarcity.draw(random.Random(seed), 3) for seed in range(9 * DRAWS)]
        rooms = {kind: of(t.room for t in more if t.kind == kind) for kind in trials.KINDS}
        assert rooms == {"descriptors": (0, 10), "memory": (2, 40), "threads": (2, 48)}
    elif action == "evaluate":
        assert {t.modes[-1] for t in found} == {"train"}
        assert {mode for t in found for mode in t.modes} == set(worker.MODES)
        assert of(len(t.modes) for t in found) == (2, 12), "an order runs twice at least"
    else:
        check_faults(action, found)


def check_faults(action: str, found: list[InjectedFault]) -> None:
    assert {t.rank for t in found} == {0, 1, 2}
    assert {t.op for t in found} == set(range(1, cli.LAST_OP + 1))
    assert {t.at for t in found} == ({"after_payload"} if action == "corrupt" else set(POINTS) - {OF_FORWARDERS})
    assert {t.do for t in found} == {"kill" if action == "heavy" else action}
    assert {t.stop_timeout_s for t in found} == {1.5}
    assert of(t.seconds for t in found) == pytest.approx((0.0, 0.1), abs=0.01)
    ballast = of(t.ballast_mib for t in found)
    assert ballast == (0, 0) if action != "heavy" else 256 <= ballast[0] < 280 < 1000 < ballast[1] <= 1024


class Pool:
    def __init__(self, kept: dict[str, int]) -> None:
        self._kept, self.open = kept, False

    def __enter__(self) -> Any:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def kept(self) -> dict[str, int]:
        return self._kept


class Trial:
    def __init__(self, action: str, number: float, complaints: tuple[str, ...] = ()) -> None:
        self.action, self.number, self.complaints = action, number, complaints
        self.text = f"{action} {number:g}"

    def run(self, pool: Any) -> Outcome[Any]:
        assert pool.open
        milliseconds = [self.number, 3 * self.number] if self.action == "kill" else []
        return Outcome(self, {0: {"raised": "nothing"}}, milliseconds, list(self.complaints))


def test_a_document_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "left_of", lambda before, look: {"threads": 0, "descriptors": -1, "processes": 2})
    shown: list[int] = []
    numbers = iter(range(1, 9))

    def draw(action: str, pace: random.Random) -> Any:
        number = next(numbers)
        return Trial(action, number, ("it hung",) if number == 2 else ())

    document = cli.run_chaos(
        lambda: Pool({"store keys": 1, "threads": 3}),
        draw,
        ("kill", "stop", "sleep"),
        4,
        6,
        lambda i, o: shown.append(i),
    )
    pace = random.Random(6)
    actions = [pace.choice(("kill", "stop", "sleep")) for _ in range(4)]
    assert shown == [0, 1, 2, 3]
    assert (document["rounds"], document["seed"]) == (4, 6)
    assert {do: summary["rounds"] for do, summary in document["actions"].items()} == {
        do: actions.count(do) for do in ("kill", "stop", "sleep")
    }
    kills = [n for i, action in enumerate(actions) if action == "kill" for n in (i + 1, 3 * i + 3)]
    assert kills
    assert document["actions"]["kill"]["worst_ms"] == max(kills)
    assert "worst_ms" not in document["actions"]["stop"]
    assert document["left_behind"] == {"threads": 3, "descriptors": -1, "processes": 2, "store keys": 1}
    assert document["complaints"] == [
        f"round 1, {actions[1]} 2: it hung",
        "3 threads left behind",
        "2 processes left behind",
        "1 store keys left behind",
    ]
    assert [wrong["trial"] for wrong in document["wrong"]] == [f"{actions[1]} 2"]


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("complaint", [[], ["rank 1 hung"]])
def test_options_reach_the_rounds(monkeypatch: pytest.MonkeyPatch, nodes: bool, complaint: list[str]) -> None:
    seen: dict[str, Any] = {}

    def run_chaos(make_pool: Any, draw: Any, actions: Any, rounds: int, seed: int, progress: Any) -> dict[str, Any]:
        seen.update(pool=make_pool(), actions=actions, rounds=rounds, seed=seed)
        progress(
            3, Outcome(Trial("kill", 1), {1: {"raised": "PeerDead"}, 0: {"raised": "killed"}}, [2.0, 5.25], ["odd"])
        )
        return {"complaints": complaint}

    monkeypatch.setattr(cli, "run_chaos", run_chaos)
    monkeypatch.setattr(cli, "NodePool", lambda nodes: ("nodes", nodes))
    monkeypatch.setattr(cli, "RankPool", lambda ranks: ("ranks", ranks))
    monkeypatch.setattr(cli, "machine_card", dict)
    words = ["--nodes", "2,1"] if nodes else ["--ranks", "4", "--timeout", "0.7"]
    done = CliRunner().invoke(cli.chaos, [*words, "--rounds", "5", "--seed", "9"])
    assert done.exit_code == bool(complaint)
    assert (seen["rounds"], seen["seed"]) == (5, 9)
    assert seen["pool"] == (("nodes", [2, 1]) if nodes else ("ranks", 4))
    assert seen["actions"] == (cli.ACTIONS_ON_NODES if nodes else cli.ACTIONS_ON_ONE_HOST)
    line, document = done.stdout.splitlines()[:2]
    assert line.split() == ["3", "kill", "1", "0:", "killed", "1:", "PeerDead", "5.2", "ms", "odd"]
    assert json.loads(document) == {"machine": {}, "complaints": complaint} | (
        {"nodes": [2, 1]} if nodes else {"ranks": 4}
    )
    CliRunner().invoke(cli.chaos, [*words, "--action", "kill", "--action", "stop"])
    assert seen["actions"] == ("kill", "stop")


def fault(at: str, do: str, op: int = 5) -> InjectedFault:
    return InjectedFault(1, op, at, do)


@pytest.mark.parametrize(
    ("at", "do", "op", "steps"),
    [
        ("in_destroy", "kill", 5, (2, 2)),
        ("in_destroy", "sleep", 5, (2, 2)),  # it leaves a step early
        ("pre_rendezvous", "sleep", 5, (3, 3)),
        ("after_payload", "sleep", 5, (3, 3)),
        ("pre_rendezvous", "kill", 5, (0, 0)),
        ("post_rendezvous", "raise", 5, (0, 0)),
        ("mid_payload", "kill", 1, (0, 0)),
        ("mid_payload", "kill", 4, (0, 1)),  # the last op of a step may have given its result
        ("mid_payload", "kill", 5, (1, 1)),
        ("in_backward", "kill", 4, (0, 0)),
        ("between_dispatch_and_combine", "kill", 2, (0, 0)),
        ("between_dispatch_and_combine", "kill", 3, (1, 1)),
        (OF_FORWARDERS, "kill", 8, (1, 2)),
    ],
)
def test_steps_that_survivors_complete(at: str, do: str, op: int, steps: tuple[int, int]) -> None:
    assert cli.OPS_OF_A_STEP == 4
    assert _steps_done(fault(at, do, op)) == steps


def test_what_the_faulty_rank_may_report() -> None:
    assert _of_faulty_rank(fault("pre_rendezvous", "stop")) == {"PeerTimeout"}
    assert _of_faulty_rank(fault("in_destroy", "stop")) == {"nothing"}
    assert _of_faulty_rank(fault("mid_read", "stop")) == {"GroupPoisoned"}
    assert _of_faulty_rank(fault("after_payload", "corrupt")) == {"CorruptPeer", "GroupPoisoned"}
    assert [_of_faulty_rank(fault("mid_read", do)) for do in ("kill", "raise", "sleep")] == [
        {"killed"}, {"FaultInjected"}, {"nothing"},
    ]  # fmt: skip


def reported(raised: str, **more: Any) -> dict[str, Any]:
    done = {"raised": raised, "then": raised, "made": True, "steps": 1, "message": ""}
    return done | dict.fromkeys(("descriptors", "threads", "segments"), 0) | more


@pytest.mark.parametrize(
    ("do", "changes", "complaints"),
    [
        ("kill", {}, []),
        ("kill", {0: reported("GroupPoisoned")}, ["rank 0 raised GroupPoisoned, expected PeerDead: "]),
        ("stop", {0: reported("GroupPoisoned")}, []),
        ("stop", {0: reported("GroupPoisoned"), 2: reported("GroupPoisoned")}, ["no rank raised PeerTimeout"]),
        ("kill", {1: reported("nothing")}, ["rank 1 raised nothing, expected killed: "]),
        ("kill", {2: reported("PeerDead", steps=0)}, ["rank 2 completed 0 steps, expected 1 to 1"]),
        ("kill", {2: reported("PeerDead", steps=2)}, ["rank 2 completed 2 steps, expected 1 to 1"]),
        ("kill", {2: reported("PeerDead", threads=1)}, ["rank 2 kept 1 threads"]),
    ],
)
def test_what_is_complained_of(do: str, changes: dict[int, dict[str, Any]], complaints: list[str]) -> None:
    given = fault("mid_payload", do)
    own = {"kill": "killed", "stop": "GroupPoisoned"}[do]
    reports = {0: reported(given.raised), 1: reported(own), 2: reported(given.raised)} | changes
    assert _judge(given, reports, [0, 2]) == complaints


def test_words_of_faults() -> None:
    assert fault("mid_read", "sleep").spec == "rank=1,op=5,at=mid_read,do=sleep=0.05"
    heavy = InjectedFault(1, 5, "mid_read", "kill", ballast_mib=300)
    assert (heavy.action, heavy.text) == ("heavy", "rank=1,op=5,at=mid_read,do=kill with 300 MiB")
    assert fault("in_destroy", "sleep").raised == "GroupClosed"
    assert str(node_trials.Moment(worker.Size(8, 32, 2, "flat"), 3, 0.25)) == "flat 8x32, 2 threads, step 3 + 0.25 s"


def test_a_document_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are rounded, and counted from before the ranks are started until all rounds are done."""
    clock = iter([10.0, 11.0])
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(cli, "_held", lambda: {"threads": 4})
    looks: list[Any] = []
    monkeypatch.setattr(cli, "left_of", lambda before, look: looks.append((before, look())) or {"threads": 0})
    actions = ("kill", "stop")
    given = iter([("kill", 1.2345), ("stop", 5), ("kill", 2.0006)])
    document = cli.run_chaos(
        lambda: Pool({"store keys": 1}),
        lambda action, pace: Trial(*next(given), ("it hung", "it leaked")),  # type: ignore[arg-type, return-value]
        actions,
        3,
        7,
        lambda i, o: None,
    )
    texts = ("kill 1.2345", "stop 5", "kill 2.0006")
    wrong = {"raised": {"0": "nothing"}, "messages": {}, "complaints": ["it hung", "it leaked"]}
    assert document == {
        "rounds": 3,
        "seed": 7,
        "seconds_per_round": 0.333,
        "actions": {"kill": {"rounds": 2, "median_ms": 2.85, "worst_ms": 6.0}, "stop": {"rounds": 1}},
        "left_behind": {"threads": 0, "store keys": 1},
        "complaints": [
            *(f"round {i}, {o}: {what}" for i, o in enumerate(texts) for what in ("it hung", "it leaked")),
            "1 store keys left behind",
        ],
        "wrong": [
            {"trial": "kill 1.2345", "milliseconds": [1.23, 3.7], **wrong},
            {"trial": "stop 5", "milliseconds": [], **wrong},
            {"trial": "kill 2.0006", "milliseconds": [2.0, 6.0], **wrong},
        ],
    }
    assert looks == [({"threads": 4}, {"threads": 4})]


@pytest.mark.parametrize("words", [["--ranks", "4", "--timeout", "0.7"], ["--nodes", "2,1"], []], ids=str)
def test_what_the_command_prints(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """A line for each round, then one line of JSON; complaints are the error."""
    monkeypatch.setattr(cli, "machine_card", lambda: {"cpu": "a processor"})
    drawn_by: list[Any] = []

    def run_chaos(make_pool: Any, draw: Any, *given: Any) -> dict[str, Any]:
        drawn_by.append((make_pool.args, draw("kill", random.Random(1))))
        progress = given[-1]
        reports = {2: {"raised": "killed"}, 0: {"raised": "PeerDead"}}
        progress(7, Outcome(Trial("kill", 1), reports, [2.0, 15.25], ["a", "b"]))
        progress(10, Outcome(Trial("stop", 1), {}, [], []))
        return {"complaints": ["a", "b"]}

    monkeypatch.setattr(cli, "run_chaos", run_chaos)
    done = CliRunner().invoke(cli.chaos, words)
    sizes = {"nodes": [2, 1]} if "--nodes" in words else {"ranks": 4 if words else 3}
    said = f"{'0: PeerDead  2: killed':58}"
    document = {"machine": {"cpu": "a processor"}, **sizes, "complaints": ["a", "b"]}
    assert done.stdout.splitlines() == [
        f"   7  {'kill 1':62} {said} {'   15.2 ms':>10}  a; b",
        f"  10  {'stop 1':62} {'':58} {'':>10}  ",
        json.dumps(document, separators=(",", ":")),
    ]
    assert done.stderr == "Error: a; b\n"
    pace = random.Random(1)
    if "--nodes" in words:
        expected: Any = cli.draw_on_nodes("kill", pace, [2, 1])
    else:
        expected = cli.draw_on_one_host("kill", pace, 4 if words else 3, 0.7 if words else 0.5)
    assert drawn_by == [((*sizes.values(),), expected)]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2,2", [2, 2]), ("1,1,10", [1, 1, 10]), ("3", None), ("1,0", None), ("1,-1", None), (",", None)],
)
def test_numbers_of_ranks_on_nodes(monkeypatch: pytest.MonkeyPatch, text: str, numbers: list[int] | None) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cli, "run_chaos", lambda make_pool, *given: seen.append(make_pool.args) or {"complaints": []})
    done = CliRunner().invoke(cli.chaos, ["--nodes", text])
    assert (done.exit_code, seen) == ((0, [(numbers,)]) if numbers else (2, []))
    if not numbers:
        said = f"Error: Invalid value for '--nodes': got {text!r}, expected the ranks of two nodes or more, such as 2,2"
        assert done.stderr.splitlines()[-1] == said


def test_an_action_of_nodes_on_one_host() -> None:
    done = CliRunner().invoke(cli.chaos, ["--action", "cut", "--action", "blink", "--action", "kill"])
    *_, said = done.stderr.splitlines()
    assert done.exit_code == 2
    expected = ", ".join(cli.ACTIONS_ON_ONE_HOST)
    assert said == f"Error: Invalid value for --action: got ['blink', 'cut'], expected of {expected}"
