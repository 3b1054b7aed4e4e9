"""Simulation of one expert-parallel group, event by event, and its composition to very many ranks.

Each rank's port sends its rows to each peer in turn, each receiver's port takes them, and a signal follows. An op of a
rank ends when all signals that it waits for have come and its own port is done. Vectors over ranks replace an event
queue, because each port's order is known beforehand: a rotation, as kernels use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_rt.errors import expect
from moe_rt.plan.distinct import Array

GAMMA = 0.5772156649015329  # Euler's constant, the mean of a standard Gumbel variable


@dataclass(frozen=True)
class Ports:
    """Rates and delays of a group.

    Attributes:
        link_gbs, net_gbs: rate of a rank's port to ranks of its domain, and to others.
        start_us: time before the first byte leaves.
        signal_us: delay of a signal.
        noise: log standard deviation of each rank's rate.
        straggler, slower: chance that a rank is slow, and its factor.
    """

    link_gbs: float
    net_gbs: float = 0.0
    start_us: float = 5.0
    signal_us: float = 2.0
    noise: float = 0.0
    straggler: float = 0.0
    slower: float = 1.0

    def __post_init__(self) -> None:
        for name in ("link_gbs", "slower"):
            expect(getattr(self, name) > 0, name, getattr(self, name), "a positive number")
        for name in ("net_gbs", "start_us", "signal_us", "noise", "straggler"):
            expect(getattr(self, name) >= 0, name, getattr(self, name), "a number >= 0")
        expect(self.straggler <= 1, "straggler", self.straggler, "a probability")


@dataclass(frozen=True)
class Step:
    """Times of one simulated op in us.

    Attributes:
        arrives: when each rank begins, [R].
        sends: begin and end of each transfer, [R, R] from source to destination; equal if no bytes move.
        ends: when each rank has all it waits for, [R].
    """

    arrives: Array
    begins: Array
    sends: Array
    ends: Array

    @property
    def us(self) -> float:
        """Time from the last arrival to the last end, the cost that a step sees."""
        return float(self.ends.max() - self.arrives.max())


def exchange(
    traffic: Array, ports: Ports, *, domain: int | None = None, arrives: Array | None = None,
    rng: np.random.Generator | None = None,
) -> Step:  # fmt: skip
    """Simulate one dispatch or combine.

    Args:
        traffic: bytes from each rank to each rank, [R, R].
        domain: ranks that fast links join; all, unless given.
        arrives: when each rank begins, [R]; together, unless given.
        rng: draws noise and stragglers, which are left out without it.

    Raises:
        InvalidConfig: traffic is not square or negative, or ranks use a network whose rate is 0.
    """
    square = traffic.ndim == 2 and traffic.shape[0] == traffic.shape[1] and bool((traffic >= 0).all())
    expect(square, "traffic", f"shape {list(traffic.shape)}", "bytes >= 0, [R, R]")
    ranks = len(traffic)
    near = np.equal.outer(np.arange(ranks) // (domain or ranks), np.arange(ranks) // (domain or ranks))
    crosses = bool((traffic * ~near).sum() > 0)
    expect(not crosses or ports.net_gbs > 0, "net_gbs", ports.net_gbs, "a positive number: rows cross the network")
    rate = np.where(near, ports.link_gbs, ports.net_gbs if crosses else ports.link_gbs) * 1e3  # bytes per us
    slow = np.ones(ranks)
    if rng is not None:
        slow = np.exp(ports.noise * rng.standard_normal(ranks))
        slow = slow * np.where(rng.random(ranks) < ports.straggler, ports.slower, 1.0)
    began = np.zeros(ranks) if arrives is None else np.asarray(arrives, float)
    lasts = traffic / rate * slow[:, None]
    np.fill_diagonal(lasts, 0.0)
    return _events(lasts, near, began, ports)


def _events(lasts: Array, near: Array, began: Array, ports: Ports) -> Step:
    """Play the transfers round by round; in each, every rank sends to another rank and receives from another."""
    ranks = len(lasts)
    sender = np.stack([began + ports.start_us] * 2)  # when each rank's port to its domain and to the network is free
    receiver = np.zeros((2, ranks))
    begins, ends = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    source = np.arange(ranks)
    for to in _rotation(near):
        port = np.where(near[source, to], 0, 1)
        start = sender[port, source]
        last = lasts[source, to]
        # A receiver's port takes bytes at its own rate, after what came to it before.
        end = np.maximum(receiver[port, to], start) + last
        end = np.where(last > 0, end, start)
        begins[source, to], ends[source, to] = start, end
        sender[port, source] = np.where(last > 0, np.maximum(start + last, end - last), start)
        receiver[port, to] = np.maximum(receiver[port, to], end)
    own = began + ports.start_us
    received = np.where(np.eye(ranks, dtype=bool), own[:, None], ends + ports.signal_us)
    return Step(began, begins, ends, np.maximum(received.max(0), sender.max(0)))


def _rotation(near: Array) -> Iterator[npt.NDArray[np.int64]]:
    """Yield each round's destinations: rank l of a domain goes round the ranks of each domain from l on."""
    ranks, size = len(near), int(near[0].sum())
    source = np.arange(ranks)
    if ranks % size:
        yield from ((source + k) % ranks for k in range(1, ranks))
        return
    domain, local = source // size, source % size
    for away in range(ranks // size):
        for turn in range(0 if away else 1, size):
            yield (domain + away) % (ranks // size) * size + (local + turn) % size


def closed_form_us(traffic: Array, ports: Ports, domain: int | None = None) -> float:
    """Return the time of even traffic without noise: start, the busiest port, and a signal."""
    ranks = len(traffic)
    near = np.equal.outer(np.arange(ranks) // (domain or ranks), np.arange(ranks) // (domain or ranks))
    inside = np.where(near & ~np.eye(ranks, dtype=bool), traffic, 0)
    outside = np.where(near, 0, traffic)
    times = [np.maximum(inside.sum(1), inside.sum(0)).max() / ports.link_gbs / 1e3]
    if ports.net_gbs:
        times.append(np.maximum(outside.sum(1), outside.sum(0)).max() / ports.net_gbs / 1e3)
    return float(ports.start_us + max(times) + ports.signal_us)


def slowest_of(mean_us: float, deviation_us: float, groups: int) -> float:
    """Return the mean time of the slowest of many independent groups, by extreme values.

    The maximum of n normal times tends to Gumbel's law with location b = F^-1(1 - 1/n) and scale
    a = F^-1(1 - 1/(n e)) - b, so its mean is b + 0.5772 a. For n = 1 it is the mean itself.

    Raises:
        InvalidConfig: groups is not positive, or a time is negative.
    """
    expect(groups > 0, "groups", groups, "a positive number")
    expect(mean_us >= 0 and deviation_us >= 0, "mean_us", f"{mean_us} and {deviation_us}", "times >= 0")
    if groups == 1 or deviation_us == 0:
        return mean_us
    if groups == 2:
        return mean_us + deviation_us / math.sqrt(math.pi)
    normal = NormalDist()
    b = normal.inv_cdf(1 - 1 / groups)
    a = normal.inv_cdf(1 - 1 / (groups * math.e)) - b
    return mean_us + deviation_us * (b + GAMMA * a)


def write_trace(step: Step, path: Path) -> None:
    """Write a step as a trace that Perfetto opens: a row for each rank's port, and its wait."""
    events: list[dict[str, Any]] = []
    for source, destination in zip(*np.nonzero(step.sends > step.begins), strict=True):
        begin, end = float(step.begins[source, destination]), float(step.sends[source, destination])
        name = f"to rank {destination}"
        events.append(dict(name=name, ph="X", pid=int(source), tid="port", ts=begin, dur=end - begin))
    for rank, (begin, end) in enumerate(zip(step.arrives.tolist(), step.ends.tolist(), strict=True)):
        events.append(dict(name="op", ph="X", pid=rank, tid="op", ts=begin, dur=end - begin))
        events.append(dict(name="process_name", ph="M", pid=rank, args={"name": f"rank {rank}"}))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}), encoding="utf-8")
