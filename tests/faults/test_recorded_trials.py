"""Compare trials of `moe-rt chaos` with a record: which ones a seed draws, what each does, and what it says of ranks.

A failure of a release can then be drawn again by its seed. Pools here are fakes: they note every call, their clock
advances by an eighth of a second at each, and their ranks report what a test says. After a change on purpose, read
the difference after: python tests/faults/test_recorded_trials.py
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import assert_on_record, write_record

from moe_rt.lab.chaos import cli, node_trials, trials
from moe_rt.lab.chaos.injected_fault import InjectedFault
from moe_rt.lab.chaos.node_trials import Kill, LinkFault, Misbehaviour, Moment, Stop
from moe_rt.lab.chaos.trials import Evaluation, Freeze, Interrupt, Scarcity
from moe_rt.lab.chaos.worker import Size

RECORD = Path(__file__).with_name("recorded_trials.json")
SEEDS, TICK_S = 5, 1 / 8
NODES = (2, 1)
Reports = dict[int, dict[str, Any]]
GOOD: dict[str, Any] = {"then": "nothing", "made": True, "descriptors": 0, "threads": 0, "segments": 0}


def raised(error: str, of: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the report of a rank that raised, and that names another rank if `of` is given."""
    named = {} if of is None else {"message": f"rank {of} did it\nrank 9 waits", "peer": of}
    return {"raised": error, "then": error, **named, **more}


def each(error: str, of: int, ranks: Iterable[int] = range(3)) -> Reports:
    return {rank: raised(error, of) for rank in ranks}


class Recorder:
    """Three ranks on two nodes.

    Args:
        sessions: what ranks report in consecutive sessions, where it is not success.
        stops, news: what the pool says in turn of whether a rank is stopped, and has ended; then True, and False.
    """

    size = 3

    def __init__(
        self, *sessions: Reports, remote: bool = False, stops: tuple[bool, ...] = (), news: tuple[bool, ...] = ()
    ) -> None:
        self._sessions, self._stops, self._news = list(sessions), list(stops), list(news)
        self._reports: Reports = {}
        self.remote, self.now, self.calls = remote, 100.0, list[str]()
        self.board = SimpleNamespace(began=[91.0, 92.0, 94.0])
        self.node_of = [0, 0, 1]
        names = ("cut", "mend", "limit", "unlimit", "reboot")
        self.cluster = SimpleNamespace(**{name: self._noting(name) for name in names})
        for name in ("await_steps", "await_stop", "kill", "kill_node"):
            setattr(self, name, self._noting(name))

    def _note(self, name: str, *given: Any, **named: Any) -> None:
        words = [repr(list(value) if isinstance(value, range) else value) for value in given]
        self.calls.append(f"{name}({', '.join([*words, *(f'{key}={value!r}' for key, value in named.items())])})")
        self.now += TICK_S

    def _noting(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: self._note(name, *given, **named)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._note("sleep", seconds)
        self.now += seconds

    def session(self, ranks: Any, steps: int, *given: Any, **named: Any) -> None:
        self._note("session", ranks, "endless" if steps == trials.ENDLESS else steps, *given, **named)
        odd = self._sessions.pop(0) if self._sessions else {}
        self._last = 40 if steps == trials.ENDLESS else steps
        for rank in ranks:
            self._reports[rank] = {**GOOD, "raised": "nothing", "steps": self._last, **odd.get(rank, {})}

    def report(self, rank: int, timeout_s: float) -> dict[str, Any]:
        self._note("report", rank, timeout_s)
        return self._report(rank)

    def reports(self, ranks: Any, timeout_s: float) -> Reports:
        self._note("reports", ranks, timeout_s)
        return {rank: self._report(rank) for rank in ranks}

    def _report(self, rank: int) -> dict[str, Any]:
        found = self._reports[rank]
        if found["raised"] in ("killed", "hung"):
            return {"raised": found["raised"]}
        return found | ({} if found["raised"] == "nothing" else {"at": self.now + 2.0**-rank})

    def send_signal(self, rank: int, number: int) -> None:
        self._note("send_signal", rank, signal.Signals(number).name)

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank in range(3) if self.node_of[rank] == node]

    def stopped(self, rank: int) -> bool:
        self._note("stopped", rank)
        return self._stops.pop(0) if self._stops else True

    def has_news(self, ranks: Any) -> bool:
        self._note("has_news", ranks)
        return self._news.pop(0) if self._news else False

    def finish(self, ranks: Any) -> int:
        self._note("finish", ranks)
        return self._last

    def set_end(self, ranks: Any) -> int:
        self._note("set_end", ranks)
        return self._last


@dataclass
class Story:
    """One trial, and a pool for it."""

    trial: Any
    sessions: tuple[Reports, ...] = ()
    pool: dict[str, Any] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """Run the trial; return what it did and what came of it."""
        pool: Any = Recorder(*self.sessions, **self.pool)
        with pytest.MonkeyPatch.context() as patch:
            for module in (trials, node_trials):
                patch.setattr(module, "time", pool)
            outcome = self.trial.run(pool)
        return {
            "text": self.trial.text,
            "calls": pool.calls,
            "raised": {str(rank): report["raised"] for rank, report in outcome.reports.items()},
            "milliseconds": outcome.milliseconds,
            "complaints": outcome.complaints,
        }


MOMENT = Moment(Size(8, 500, 2, "flat", depth=2), 3, 0.25)
DEAD = each("PeerDead", 1)
KILLED = {"raised": "killed"}
HUNG = {"raised": "hung"}


def _of_one_host() -> dict[str, Story]:
    freeze = Freeze((2, 0, 1), (1, 2, 0), 0.5, 3)
    made = {"made": False, "typed": True}
    limits = {rank: raised("LimitReached", **made) for rank in range(3)}
    stories = {
        "freeze": Story(freeze),
        "freeze at an even step": Story(Freeze((0, 1, 2), (0, 1, 2), 0.0, 4)),
        "freeze, and one raises": Story(freeze, ({1: raised("PeerTimeout", 2, descriptors=1), 2: {"steps": 39}},)),
        "evaluate": Story(Evaluation(("no_grad", "autocast", "inference_mode", "no_grad", "train"))),
        "evaluate, and one is wrong": Story(Evaluation(("train",)), ({0: raised("wrong data", 0, steps=7)},)),
        "limit, and all raise": Story(Scarcity(1, "memory", 5), (limits,)),
        "limit, and one raises": Story(Scarcity(2, "threads", 5), ({2: limits[2]},)),
        "limit, and some time out": Story(
            Scarcity(0, "threads", 5), ({**limits, 1: raised("PeerTimeout", **made)}, {2: raised("PeerDead", 1)})
        ),
        "limit, and all raise what has no type": Story(
            Scarcity(0, "threads", 5), ({r: raised("OSError", made=False, typed=False) for r in range(3)},)
        ),
    }
    stories |= {f"limit of {kind}": Story(Scarcity(1, kind, 5)) for kind in trials.KINDS}
    poisoned = {**each("GroupPoisoned", 0), 0: raised("KeyboardInterrupt")}
    for where in trials.PLACES:
        stories[f"interrupt {where}"] = Story(Interrupt(0, 2, where, 4, 0.5), (poisoned,))
    late = {**poisoned, 1: raised("GroupPoisoned", 2), 2: raised("PeerDead", 1)}
    for remote in (False, True):
        where = "on another host" if remote else "on this host"
        for place in ("in_an_op", "anywhere"):
            story = Story(Interrupt(0, 2, place, 5, 0.5), (late,), {"remote": remote})
            stories[f"interrupt {place}, and the late rank {where} lost its peer"] = story
    stories["interrupt, and two ranks do not report"] = Story(
        Interrupt(1, 0, "in_an_op", 1, 0.0), ({0: KILLED, 1: HUNG, 2: raised("GroupPoisoned", 1)},)
    )
    return stories


def _of_faults() -> dict[str, Story]:
    stories = {}
    for at in ("mid_payload", "pre_rendezvous", "in_destroy"):
        steps = {"mid_payload": 1, "pre_rendezvous": 0, "in_destroy": 2}[at]
        own = {"pre_rendezvous": raised("PeerTimeout"), "in_destroy": {"raised": "nothing"}}
        for do, error, of_it in (
            ("kill", "PeerDead", KILLED),
            ("stop", "PeerTimeout", own.get(at, raised("GroupPoisoned", 0))),
            ("raise", "GroupPoisoned", raised("FaultInjected")),
        ):
            reports = {rank: {**report, "steps": steps} for rank, report in each(error, 1).items()} | {1: of_it}
            stories[f"{do} at {at}"] = Story(InjectedFault(1, 5, at, do), (reports,))
    sleep = InjectedFault(1, 5, "mid_payload", "sleep", seconds=0.25, route="two_level")
    stories["sleep"] = Story(sleep)
    stories["heavy"] = Story(InjectedFault(1, 5, "mid_payload", "kill", ballast_mib=300), ({0: raised("PeerDead", 1)},))
    stop = InjectedFault(1, 5, "mid_payload", "stop", stop_timeout_s=2.0)
    late = {rank: {**report, "steps": 1} for rank, report in each("PeerTimeout", 1).items()}
    late[1] = raised("GroupPoisoned", 0)
    stories["a stop that comes late twice"] = Story(stop, (late, late, late), {"stops": (False, False)})
    stories["a stop, and the newer group fails"] = Story(stop, (late, {2: raised("PeerDead", 0)}))
    return stories


def _of_nodes() -> dict[str, Story]:
    stories = {}
    for action, dead in (("kill", [1]), ("ranks", [0, 1]), ("node", [0, 1])):
        reports = DEAD | dict.fromkeys(dead, KILLED)
        stories[f"{action} on nodes"] = Story(Kill(action, 1, MOMENT), (reports,))
    wrong = {0: raised("PeerDead", 2), 1: {"raised": "nothing"}, 2: HUNG}
    stories["kill on nodes, and all is wrong"] = Story(Kill("kill", 1, MOMENT), (wrong, {0: raised("PeerDead", 2)}))
    stories["pause"] = Story(Stop("pause", 1, MOMENT, 0.5, False))
    stories["pause, and one raises"] = Story(Stop("pause", 1, MOMENT, 0.5, False), ({0: raised("PeerDead", 1)},))
    late = each("PeerTimeout", 2)
    for wakes in (False, True):
        stop, name = Stop("stop", 2, MOMENT, 0.0, wakes), f"a stop for ever, {wakes=}"
        stories[name] = Story(stop, (late,))
        stories[f"{name}, and the newer group fails"] = Story(stop, (late, {1: raised("PeerDead", 0)}))
    stop = Stop("stop", 2, MOMENT, 0.0, True)
    stories["a stop that no rank names"] = Story(stop, ({0: raised("PeerTimeout", 1), 1: raised("PeerDead", 0)},))
    stories["a stop, and one names itself"] = Story(stop, ({**late, 0: raised("PeerTimeout", 0)},))
    stories["a stop that comes late"] = Story(stop, (late, late), {"stops": (False,)})
    stories["a stop after which a rank has raised"] = Story(stop, (late, late, late), {"news": (True, True)})
    for action in cli.LINKS:
        fault = LinkFault(action, 1, MOMENT, 0.5, "5mbit")
        cut = {0: raised("PeerDead", 2), 1: raised("PeerDead", 2), 2: raised("PeerDead", 0)}
        stories[f"{action} of a link"] = Story(fault, (cut,) if action == "cut" else ())
        some = {0: raised("GroupPoisoned", 1), 1: raised("PeerDead", 0), 2: {"steps": 39}}
        stories[f"{action} of a link, and some raise"] = Story(fault, (some, {0: raised("PeerTimeout", 1)}))
    for action, (own, others) in node_trials.RAISED.items():
        reports = {rank: raised(min(others), 1) for rank in range(3)} | {1: raised(min(own))}
        if action in node_trials.REFUSED:
            reports = {}
        stories[f"{action} of a rank"] = Story(Misbehaviour(action, 1, MOMENT), (reports,))
        odd = {0: raised("PeerTimeout", 2), 1: raised("OSError", 1), 2: {"steps": 11}}
        stories[f"{action} of a rank, and all is wrong"] = Story(Misbehaviour(action, 1, MOMENT), (odd,))
    found = {0: raised("GroupPoisoned", 2), 1: raised("GroupPoisoned", 2), 2: raised("CallOrderMismatch", 0)}
    stories["order, which a right rank detects"] = Story(Misbehaviour("order", 1, MOMENT), (found,))
    return stories


def drawn() -> dict[str, list[str]]:
    """Return the trials that each action draws from a few seeds."""
    paces = [partial(random.Random, seed) for seed in range(SEEDS)]
    on_nodes = {a: [repr(cli.draw_on_nodes(a, pace(), NODES)) for pace in paces] for a in cli.ACTIONS_ON_NODES}
    here = {a: [repr(cli.draw_on_one_host(a, pace(), 3, 1.5)) for pace in paces] for a in cli.ACTIONS_ON_ONE_HOST}
    return {f"{a} on nodes": found for a, found in on_nodes.items()} | {f"{a} here": f for a, f in here.items()}


def told(stories: Callable[[], dict[str, Story]]) -> dict[str, Any]:
    return {name: story.told() for name, story in stories().items()}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "drawn from seeds": drawn,
    "of one host": partial(told, _of_one_host),
    "of faults": partial(told, _of_faults),
    "of nodes": partial(told, _of_nodes),
}


@pytest.mark.parametrize("part", PARTS)
def test_trials_are_those_on_record(part: str) -> None:
    assert_on_record(RECORD, part, PARTS[part]())


if __name__ == "__main__":
    write_record(RECORD, {part: make() for part, make in PARTS.items()})
