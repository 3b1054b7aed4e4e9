"""One fault in one session: what was injected, what every rank then raised and how soon, and whether that is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moe_rt.chaos.crew import Crew
from moe_rt.chaos.member import OPS_OF_A_STEP, PATIENCE_S
from moe_rt.faults import VARIABLE

AFTERLIFE_STEPS = 50  # of a newer group, while a stopped rank of the old one wakes up
IN_OPS = ("mid_payload", "after_payload", "after_some_flags", "after_all_flags", "mid_read")
BETWEEN_OPS = ("between_dispatch_and_combine", "in_backward")
OUTSIDE = ("pre_rendezvous", "post_rendezvous", "in_destroy")
# What a fault must end as on the ranks that notice it themselves; who learns it from another rank: GroupPoisoned.
SURVIVORS_RAISE = {
    "kill": "PeerDead",
    "stop": "PeerTimeout",
    "raise": "GroupPoisoned",
    "corrupt": "CorruptPeer",
    "sleep": "nothing",
}


@dataclass(frozen=True)
class Strike:
    """A fault: `do` is an action of SURVIVORS_RAISE, `seconds` for how long a sleep lasts."""

    rank: int
    op: int
    at: str
    do: str
    seconds: float = 0.05

    @property
    def spec(self) -> str:
        """For MOE_RT_FAULT."""
        do = f"sleep={self.seconds}" if self.do == "sleep" else self.do
        return f"rank={self.rank},op={self.op},at={self.at},do={do}"

    @property
    def raised(self) -> str:
        """The class that survivors must raise, or "nothing"."""
        if self.do == "sleep":
            return "GroupClosed" if self.at == "in_destroy" else "nothing"  # it leaves a step early
        return SURVIVORS_RAISE[self.do]


@dataclass
class Outcome:
    """Of a strike: every rank's report (see `member.serve`), by rank, and what is wrong with them.

    Attributes:
        milliseconds: from when the culprit began the op in which it was struck until each survivor raised; of a stop,
            less timeout_s. Empty where the culprit never comes to make a buffer, or survivors raise nothing.
    """

    strike: Strike
    reports: dict[int, dict[str, Any]]
    milliseconds: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def run(crew: Crew, strike: Strike, steps: int, stop_timeout_s: float) -> Outcome:
    """A session of all ranks with the fault in it; the crew is complete again in the next one."""
    stops = strike.do == "stop"
    timeout_s = stop_timeout_s if stops else PATIENCE_S
    ranks = crew.session(range(crew.size), steps=steps, fault=strike.spec, timeout_s=timeout_s)
    survivors = [rank for rank in ranks if rank != strike.rank]
    reports = {rank: crew.report(rank, 2 * PATIENCE_S) for rank in survivors}
    began = crew.began[strike.rank]
    outcome = Outcome(strike, reports)
    if stops:
        outcome.complaints += _afterlife(crew, survivors, strike.rank)
    reports[strike.rank] = crew.report(strike.rank, 2 * PATIENCE_S)
    if strike.at != "pre_rendezvous":
        late = began + (timeout_s if stops else 0.0)
        outcome.milliseconds = [1e3 * (reports[r]["at"] - late) for r in survivors if "at" in reports[r]]
    outcome.complaints += _judge(strike, reports, survivors, steps)
    return outcome


def _afterlife(crew: Crew, survivors: list[int], stopped: int) -> list[str]:
    """The survivors make a newer group, and the stopped rank of the old one wakes up while that works."""
    crew.session(survivors, steps=AFTERLIFE_STEPS, fault="", timeout_s=PATIENCE_S)
    crew.wake(stopped)
    raised = {rank: crew.report(rank, 2 * PATIENCE_S)["raised"] for rank in survivors}
    return [f"rank {r} raised {what} in a newer group" for r, what in raised.items() if what != "nothing"]


def _judge(strike: Strike, reports: dict[int, dict[str, Any]], survivors: list[int], steps: int) -> list[str]:
    complaints = []
    raised = {rank: report["raised"] for rank, report in reports.items()}
    told = {"GroupPoisoned"} if strike.raised in ("PeerTimeout", "CorruptPeer", "GroupClosed") else set()
    for rank in survivors:
        if raised[rank] not in {strike.raised} | told:
            complaints.append(f"rank {rank} raised {raised[rank]}, expected {strike.raised}")
    if strike.raised not in raised.values():
        complaints.append(f"no rank raised {strike.raised}")
    if raised[strike.rank] not in _of_culprit(strike):
        complaints.append(f"rank {strike.rank}, struck, raised {raised[strike.rank]}")
    first, last = _steps_done(strike, steps)
    for rank, report in reports.items():
        if raised[rank] in ("killed", "hung"):
            continue
        if rank in survivors and not first <= report["steps"] <= last:
            complaints.append(f"rank {rank} completed {report['steps']} steps, expected {first} to {last}")
        if raised[rank] != "nothing" and report["then"] == "nothing" and report["made"]:
            complaints.append(f"rank {rank} completed a step after {raised[rank]}")
        if report["fds"] or report["segments"]:
            complaints.append(f"rank {rank} kept {report['fds']} descriptors and {report['segments']} segments")
    return complaints


def _of_culprit(strike: Strike) -> set[str]:
    """What the struck rank itself may report."""
    if strike.do == "stop":  # it wakes up after the group has ended
        return {{"pre_rendezvous": "PeerTimeout", "in_destroy": "nothing"}.get(strike.at, "GroupPoisoned")}
    if strike.do == "corrupt":  # it checks itself like any other rank
        return {"CorruptPeer", "GroupPoisoned"}
    return {"kill": {"killed"}, "raise": {"FaultInjected"}, "sleep": {"nothing"}}[strike.do]


def _steps_done(strike: Strike, steps: int) -> tuple[int, int]:
    """Fewest and most steps that a survivor completes: the op of the strike may still succeed, no later one."""
    if strike.at == "in_destroy":
        return steps - 1, steps - 1
    if strike.do == "sleep":
        return steps, steps
    if strike.at in OUTSIDE:
        return 0, 0
    step, op = divmod(strike.op - 1, OPS_OF_A_STEP)
    if strike.at == "between_dispatch_and_combine" and op > 1:
        step += 1
    return step, step + (op == OPS_OF_A_STEP - 1 and strike.at in IN_OPS)


def describe(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON."""
    return {
        VARIABLE: outcome.strike.spec,
        "raised": {str(rank): report["raised"] for rank, report in sorted(outcome.reports.items())},
        "milliseconds": [round(ms, 2) for ms in outcome.milliseconds],
        "complaints": outcome.complaints,
    }
