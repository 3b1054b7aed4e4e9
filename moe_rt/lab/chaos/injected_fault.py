"""One fault in one session: the errors that every rank then raised, how soon, and whether they are right."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from moe_rt.faults import POINTS
from moe_rt.lab.chaos.outcome import Outcome, after_all, not_raised
from moe_rt.lab.chaos.rank_pool import RankPool
from moe_rt.lab.chaos.worker import OPS_OF_A_STEP, PATIENCE_S

STEPS = 3
STOP_TIMEOUT_S = 0.5
INIT_TIMEOUT_S = 0.5  # if a rank stays away; otherwise a loaded machine needs more time
AFTERLIFE_STEPS = 50  # steps of a newer group, while a stopped rank of the old one wakes up
OF_FORWARDERS = "before_passing_on"  # inside an op of the two-level route
IN_OPS = ("mid_payload", "after_payload", "after_some_flags", "after_all_flags", "mid_read")
BETWEEN_OPS = ("between_dispatch_and_combine", "in_backward")
OUTSIDE = ("pre_rendezvous", "post_rendezvous", "in_destroy")
POINTS_OF_ONE_HOST = tuple(at for at in POINTS if at != OF_FORWARDERS)
# Errors on ranks that notice the fault themselves. Ranks notified by another rank raise GroupPoisoned.
SURVIVORS_RAISE = {
    "kill": "PeerDead",
    "stop": "PeerTimeout",
    "raise": "GroupPoisoned",
    "corrupt": "CorruptPeer",
    "sleep": "nothing",
}


@dataclass(frozen=True)
class InjectedFault:
    """A fault. `do` is an action of SURVIVORS_RAISE.

    Attributes:
        seconds: duration of a sleep.
        ballast_mib: memory of the faulty rank, which the kernel frees when it is killed.
        stop_timeout_s: timeout_s of the group of a stopped rank.
        route: route of the rows.
    """

    rank: int
    op: int
    at: str
    do: str
    seconds: float = 0.05
    ballast_mib: int = 0
    stop_timeout_s: float = STOP_TIMEOUT_S
    route: str = "auto"

    @property
    def spec(self) -> str:
        """Value for MOE_RT_FAULT."""
        do = f"sleep={self.seconds}" if self.do == "sleep" else self.do
        return f"rank={self.rank},op={self.op},at={self.at},do={do}"

    @property
    def raised(self) -> str:
        """Class that survivors must raise, or "nothing"."""
        if self.do == "sleep":
            return "GroupClosed" if self.at == "in_destroy" else "nothing"  # it leaves a step early
        return SURVIVORS_RAISE[self.do]

    @property
    def action(self) -> str:
        """Name among the actions of `moe-rt chaos`."""
        return "heavy" if self.ballast_mib else self.do

    @property
    def text(self) -> str:
        """One-line description."""
        return f"{self.spec} with {self.ballast_mib} MiB" if self.ballast_mib else self.spec

    def run(self, pool: RankPool) -> Outcome[InjectedFault]:
        """Run a session of all ranks with the fault in it.

        The outcome's milliseconds run from the faulty rank's start of the op until each survivor raised, less timeout_s
        for a stop. They are empty if the faulty rank never makes a buffer.
        """
        timeout_s = self.stop_timeout_s if self.do == "stop" else PATIENCE_S
        outcome = self._session(pool, timeout_s)
        while outcome is None:  # on a busy machine a wait may expire before any rank has stopped
            timeout_s = min(10 * timeout_s, PATIENCE_S)
            outcome = self._session(pool, timeout_s)
        return outcome

    def _session(self, pool: RankPool, timeout_s: float) -> Outcome[InjectedFault] | None:
        """`run`, or None if a timeout_s shorter than PATIENCE_S ended the group before the rank was stopped."""
        stops, away, ranks = self.do == "stop", self.at == "pre_rendezvous", range(pool.size)
        init_timeout_s = INIT_TIMEOUT_S if away and stops else PATIENCE_S
        ballast = {self.rank: {"ballast_mib": self.ballast_mib}}
        times = {"timeout_s": timeout_s, "init_timeout_s": init_timeout_s}
        pool.session(ranks, STEPS, ballast, fault=self.spec, sizes={"route": self.route}, **times)
        survivors = [rank for rank in ranks if rank != self.rank]
        reports = pool.reports(survivors, 2 * PATIENCE_S)
        if timeout_s < PATIENCE_S:
            pool.await_stop(self.rank)
            if not pool.stopped(self.rank):
                pool.report(self.rank, 2 * PATIENCE_S)
                return None
        began = pool.board.began[self.rank]
        outcome = Outcome(self, reports)
        if stops:
            outcome.complaints += _afterlife(pool, survivors, self.rank)
        reports[self.rank] = pool.report(self.rank, 2 * PATIENCE_S)
        if not away:
            late = began + (timeout_s if stops else 0.0)
            outcome.milliseconds = [1e3 * (reports[r]["at"] - late) for r in survivors if "at" in reports[r]]
        outcome.complaints += _judge(self, reports, survivors)
        return outcome


def _afterlife(pool: RankPool, survivors: list[int], stopped: int) -> list[str]:
    """The survivors make a newer group, and the stopped rank of the old one wakes up while that works."""
    pool.session(survivors, AFTERLIFE_STEPS)
    pool.send_signal(stopped, signal.SIGCONT)
    reports = pool.reports(survivors, 2 * PATIENCE_S)
    return [f"in a newer group {text}" for text in not_raised(reports, survivors, {"nothing"})]


def _judge(fault: InjectedFault, reports: dict[int, dict[str, Any]], survivors: list[int]) -> list[str]:
    of_peers = {"GroupPoisoned"} if fault.raised in ("PeerTimeout", "CorruptPeer", "GroupClosed") else set()
    complaints = not_raised(reports, survivors, {fault.raised} | of_peers)
    complaints += not_raised(reports, [fault.rank], _of_faulty_rank(fault))
    if fault.raised not in {report["raised"] for report in reports.values()}:
        complaints.append(f"no rank raised {fault.raised}")
    first, last = _steps_done(fault)
    for rank in survivors:
        steps = reports[rank].get("steps", first)
        if not first <= steps <= last:
            complaints.append(f"rank {rank} completed {steps} steps, expected {first} to {last}")
    return complaints + after_all(reports)


def _of_faulty_rank(fault: InjectedFault) -> set[str]:
    """Reports that are allowed for the faulty rank."""
    if fault.do == "stop":  # it wakes up after the group has ended
        return {{"pre_rendezvous": "PeerTimeout", "in_destroy": "nothing"}.get(fault.at, "GroupPoisoned")}
    if fault.do == "corrupt":  # it verifies its own data as any other rank does
        return {"CorruptPeer", "GroupPoisoned"}
    return {"kill": {"killed"}, "raise": {"FaultInjected"}, "sleep": {"nothing"}}[fault.do]


def _steps_done(fault: InjectedFault) -> tuple[int, int]:
    """Least and largest number of steps that a survivor completes: the faulty op may still succeed, later ones may
    not."""
    if fault.at == "in_destroy":
        return STEPS - 1, STEPS - 1
    if fault.do == "sleep":
        return STEPS, STEPS
    if fault.at in OUTSIDE:
        return 0, 0
    step, op = divmod(fault.op - 1, OPS_OF_A_STEP)
    if fault.at == "between_dispatch_and_combine" and op > 1:
        step += 1
    return step, step + (op == OPS_OF_A_STEP - 1 and fault.at in (*IN_OPS, OF_FORWARDERS))
