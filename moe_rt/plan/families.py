"""Formulas of the time of dispatch and combine, one per family of algorithms, with parameters that have units.

The busiest rank decides: its rows, relative to the mean, multiply the work. All families share one form,
t = join(latency, work + fill), where join(a, b) = (a^q + b^q)^(1/q) is between sum and maximum, and
fill = fill_us * work / (work + knee_us) is the time in which a pipeline reaches its full rate.
docs/planning.md derives each latency and each work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moe_rt.plan.distinct import Array
from moe_rt.plan.points import Points

Values = Mapping[str, float]
SMS_OF_CHANNELS = 24.0  # SM count at which per-token costs of channels are stated
SHARPNESS = 4.0  # exponent by which the limits of SMs and of links meet
NET_SHARPNESS = 12.0  # the same for SMs and networks, which overlap almost fully
SWITCH_SHARPNESS = 20.0  # the same power where the code itself changes to stores past the caches
CACHE_SHARPNESS = 4.0  # power of the held bytes with which the share grows that a cache does not keep


@dataclass(frozen=True)
class Parameter:
    """One constant of a family: its unit, a usual value, and the factor exp(spread) by which systems differ."""

    name: str
    unit: str
    usual: float
    spread: float


@dataclass(frozen=True)
class Family:
    """One algorithm family: its parameters, and the formula in microseconds.

    Attributes:
        noise: scatter of a measurement, in log units.
    """

    name: str
    about: str
    parameters: tuple[Parameter, ...]
    seconds: Callable[[Values, Points], Array]
    noise: float = 0.03

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(p.name for p in self.parameters)


def join(first: Array, second: Array, q: float) -> Array:
    """Return (a^q + b^q)^(1/q) elementwise, computed relative to the larger value."""
    most = np.maximum(np.maximum(first, second), 1e-12)
    return most * ((first / most) ** q + (second / most) ** q) ** (1 / q)


def _whole(p: Values, latency: Array, work: Array) -> Array:
    filled = work + p["fill"] * work / (work + p["knee"])
    return join(latency, filled, 1 + p["sharp"])


def pipelined(first: Array, second: Array, parts: Array) -> Array:
    """Return the time of two stages that pass on a batch in `parts` equal parts: one part in both, then the slower."""
    return np.maximum(first, second) + np.minimum(first, second) / parts


def blocks_of(x: Points) -> tuple[Array, Array]:
    """Return the thread blocks that DeepEP's low-latency kernels start, and the experts that share a block."""
    share = np.ceil(x.experts / x.sms_of_gpu)
    return np.ceil(x.experts / share), share


def _direct(p: Values, x: Points) -> Array:
    """One message for each (token, expert), straight into the receiver's slots."""
    messages = x.tokens * x.topk * x.row_bytes * x.busiest
    domain = np.minimum(x.domain, x.ranks)
    near = messages * np.where(x.nodes > 1, (domain - 1) / x.ranks, 1 - 1 / x.ranks) / p["B_link"] / 1e3
    far = messages * (1 - domain / x.ranks) / p["B_net"] / 1e3
    blocks, share = blocks_of(x)
    copied = messages / blocks / p["b_block"] / 1e3
    rounds = x.tokens / blocks * (p["c_round"] + p["c_byte"] * x.row_bytes / 1e3) + copied
    latency = p["t0"] + p["c_expert"] * x.experts + p["c_share"] * (share - 1)
    beyond = np.log2(np.maximum(x.nodes, 2) / 2)
    signals = x.experts * (1 - domain / x.ranks)  # counts, or flags, that each rank sends over the network
    latency = latency + np.where(x.nodes > 1, p["t_net"] + p["t_doubling"] * beyond, 0.0) + p["c_signal"] * signals
    return _whole(p, latency, join(rounds, join(near, far, SHARPNESS), 1 + p["sharp_work"]))


def _channels(p: Values, x: Points) -> Array:
    """One row for each (token, distinct rank), copied by pairs of SMs; between nodes one for each distinct node.

    Rows that come over the network are passed on in chunks, so a batch of few chunks takes both times in turn.
    """
    share = x.sms / SMS_OF_CHANNELS
    one_node = x.nodes <= 1
    moved = x.tokens * x.to_ranks * x.row_bytes * x.busiest
    rate = (p["B_link"] ** -SHARPNESS + (x.sms * p["b_sm"]) ** -SHARPNESS) ** (-1 / SHARPNESS)
    near = moved * np.where(one_node, 1 - 1 / x.ranks, 1.0) / rate / 1e3
    each = x.tokens * (p["c_token"] + p["c_row"] * x.to_ranks) / 1e3 / share
    beyond = np.log2(np.maximum(x.nodes, 2) / 2)
    latency = p["t0"] + p["c_first"] * x.to_ranks * x.row_bytes / 1e3
    latency = latency + np.where(one_node, 0.0, p["t_net"] + p["t_doubling"] * beyond)
    parts = 1 + x.tokens / (x.sms / 2) / p["chunk"]
    work = pipelined(join(each, near, 1 + p["sharp_work"]), _far(p, x), parts)
    return _whole(p, latency, work + np.where(one_node, 0.0, x.tokens * p["c_notify"] / 1e3 / share))


def _far(p: Values, x: Points) -> Array:
    """Return the time of one row for each (token, distinct other node) over the network; 0 on one node."""
    return x.busiest * x.tokens * x.to_nodes * (1 - 1 / np.maximum(x.nodes, 1)) * x.row_bytes / p["B_net"] / 1e3


def _one_sided(p: Values, x: Points) -> Array:
    """One row for each (token, distinct rank), written by all SMs over one switched fabric."""
    rows = x.tokens * x.to_ranks * x.busiest
    near = (x.tokens * p["c_token"] + rows * p["c_row"] + rows * (1 - 1 / x.ranks) * x.row_bytes / p["B_link"]) / 1e3
    latency = p["t0"] + p["t_doubling"] * np.log2(x.ranks / 8 + 1) + np.where(x.nodes > 1, p["t_net"], 0.0)
    return _whole(p, latency, join(near, _far(p, x), NET_SHARPNESS))


def _pairs(p: Values, x: Points) -> Array:
    """One block of equal size for each pair of ranks: a plain all-to-all, the floor of every exchange."""
    work = (x.ranks - 1) * (p["c_peer"] + x.row_bytes / p["B_link"] / 1e3)
    return _whole(p, np.full_like(work, p["t0"]), work)


def _copies(p: Values, x: Points) -> Array:
    """Copy rows between processes of one machine, whose cores, caches and memory all ranks share.

    Cores and memory work at the same time. The busiest core decides on the first: ranks take turns on it. Each token,
    each visit (a token on a rank) and each entry (a token at an expert) has a cost, next to the copies of rows from
    caches. What all ranks touch and the last-level cache does not keep goes through memory, at a rate that all cores
    share, or at a part of it if few cores have all the rows.
    """
    turns = np.ceil(x.ranks / x.sms_of_gpu)  # ranks that take turns on one core
    of_core = turns * x.busiest  # ranks that wait share the core with the busiest one: they spin, and yield in turn
    tokens, visits, entries = x.tokens * turns, x.tokens * x.to_ranks * of_core, x.tokens * x.topk * of_core
    from_peers = x.to_ranks * (1 - 1 / x.ranks)
    counted = tokens * p["c_token"] + visits * p["c_visit"] + entries * p["c_entry"]
    copied = (tokens + entries) / p["B_copy"] + visits * (1 - 1 / x.ranks) / p["B_peer"]
    core = (counted + copied * x.row_bytes) / 1e3

    each = x.ranks * x.tokens * x.row_bytes / 1e6  # all tokens' rows once, in MB
    new = _missed(each, p["inputs"])
    missed = _missed(each * (2 + x.topk), p["cache"])
    streamed = 1 / (1 + (p["stream"] / np.maximum(each * x.topk, 1e-9)) ** SWITCH_SHARPNESS)
    passes = p["a_entry"] * (1 - streamed * (1 - p["past"]))
    moved = each * (new * p["a_token"] + missed * (p["a_visit"] * from_peers + passes * x.topk))
    memory = moved / p["B_memory"] * 1e3 * np.maximum(1, of_core / (x.ranks * p["one_core"]))
    latency = (p["t0"] + p["t_peer"] * (x.ranks - 1)) * turns
    return latency + join(core, memory, 1 + p["sharp"]) + _products(p, x, turns) + _crossing(p, x, turns)


def _missed(held_mb: Array, cache_mb: float) -> Array:
    """Return the share of the bytes held that a cache of this size does not keep."""
    return 1 / (1 + (cache_mb / np.maximum(held_mb, 1e-9)) ** CACHE_SHARPNESS)


def _crossing(p: Values, x: Points, turns: Array) -> Array:
    """Return the time that cores take to pass rows between emulated nodes over TCP; 0 within one.

    Rows of neighbouring tokens travel together, so messages are as many as runs of tokens that visit the other node.
    """
    share = x.to_nodes * (1 - 1 / np.maximum(x.nodes, 1)) / np.maximum(x.nodes - 1, 1)  # of tokens, for each other node
    rows = x.tokens * share * np.maximum(x.nodes - 1, 1) * turns
    each = p["c_far"] + p["c_run"] * (1 - share) + x.row_bytes / p["B_net"] / 1e3
    return np.where(x.nodes > 1, p["t_net"] + rows * each, 0.0)


def _products(p: Values, x: Points, turns: Array) -> Array:
    """Return the time of the busiest rank's experts: operations, the reading of weights, and calls; 0 without any.

    Experts that receive rows read their weights; all have gradients, zeros included.
    """
    rows, local = x.tokens * x.topk * np.maximum(turns, x.busiest), x.experts / x.ranks * turns
    inner = x.hidden * x.intermediate
    chosen = 1 - (1 - x.topk / x.experts) ** (x.ranks * x.tokens)  # share of the experts that receive a row
    read = local * (chosen + p["grads"]) * 3 * inner * x.row_bytes / x.hidden
    calls = np.where(inner > 0, p["t_layer"] * turns + local * p["c_expert"], 0.0)
    return rows * 6 * inner / p["F_products"] / 1e3 + read / p["B_weights"] / 1e3 + calls


_COMMON = (
    Parameter("fill", "us", 5.0, 1.0),
    Parameter("knee", "us", 40.0, 1.0),
    Parameter("sharp", "1", 0.25, 0.8),
)
_DOUBLING = Parameter("t_doubling", "us", 3.0, 0.8)
_LINK = Parameter("B_link", "GB/s", 330.0, 0.5)
_NET = Parameter("B_net", "GB/s", 45.0, 0.15)

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "direct",
            "one message per token and expert (low latency)",
            (
                Parameter("t0", "us", 9.0, 0.6),
                Parameter("c_expert", "us", 0.013, 0.5),
                Parameter("c_round", "us", 1.5, 0.5),
                Parameter("c_byte", "ns/B", 0.06, 1.0),
                Parameter("b_block", "GB/s", 25.0, 0.5),
                Parameter("c_share", "us", 1.0, 1.0),
                Parameter("sharp_work", "1", 1.0, 0.8),
                _LINK,
                _NET,
                Parameter("t_net", "us", 8.0, 0.6),
                _DOUBLING,
                Parameter("c_signal", "us", 0.03, 0.8),
                *_COMMON,
            ),
            _direct,
        ),
        Family(
            "channels",
            "one row per token and distinct rank, by pairs of SMs (normal mode)",
            (
                Parameter("t0", "us", 35.0, 0.6),
                Parameter("c_token", "ns", 20.0, 1.0),
                Parameter("c_row", "ns", 2.0, 1.0),
                Parameter("c_first", "ns/B", 0.1, 1.0),
                Parameter("b_sm", "GB/s", 15.0, 0.25),
                Parameter("sharp_work", "1", 0.5, 1.5),
                Parameter("B_link", "GB/s", 330.0, 0.15),
                _NET,
                Parameter("t_net", "us", 30.0, 0.6),
                Parameter("c_notify", "ns", 5.0, 1.0),
                Parameter("chunk", "1", 16.0, 0.7),
                Parameter("t_doubling", "us", 15.0, 0.8),
                *_COMMON,
            ),
            _channels,
        ),
        Family(
            "one_sided",
            "one row per token and distinct rank, by all SMs (one-sided puts)",
            (
                Parameter("t0", "us", 20.0, 0.6),
                Parameter("c_token", "ns", 2.0, 1.0),
                Parameter("c_row", "ns", 1.5, 1.0),
                Parameter("B_link", "GB/s", 400.0, 0.5),
                Parameter("t_doubling", "us", 1.0, 0.8),
                _NET,
                Parameter("t_net", "us", 30.0, 0.6),
                *_COMMON,
            ),
            _one_sided,
        ),
        Family(
            "copies",
            "rows copied through memory that processes of one machine share",
            (
                Parameter("t0", "us", 4.0, 0.7),
                Parameter("t_peer", "us", 3.0, 0.7),
                Parameter("c_token", "ns", 20.0, 0.5),
                Parameter("c_visit", "ns", 40.0, 0.7),
                Parameter("c_entry", "ns", 15.0, 0.7),
                Parameter("B_copy", "GB/s", 80.0, 0.5),
                Parameter("B_peer", "GB/s", 17.0, 0.5),
                Parameter("cache", "MB", 28.0, 0.3),
                Parameter("inputs", "MB", 6.0, 0.3),
                Parameter("B_memory", "GB/s", 50.0, 0.4),
                Parameter("a_token", "1", 3.0, 0.3),
                Parameter("a_visit", "1", 0.5, 0.3),
                Parameter("a_entry", "1", 2.0, 0.3),
                Parameter("stream", "MB", 26.8, 0.05),
                Parameter("past", "1", 0.5, 0.2),
                Parameter("one_core", "1", 0.7, 0.2),
                Parameter("sharp", "1", 0.5, 0.5),
                Parameter("F_products", "GFLOP/s", 150.0, 0.7),
                Parameter("B_weights", "GB/s", 8.0, 0.5),
                Parameter("grads", "1", 1e-6, 0.5),
                Parameter("c_expert", "us", 10.0, 1.0),
                Parameter("t_layer", "us", 300.0, 1.0),
                Parameter("t_net", "us", 200.0, 0.7),
                Parameter("c_far", "us", 2.0, 1.0),
                Parameter("c_run", "us", 5.0, 1.0),
                Parameter("B_net", "GB/s", 1.0, 0.7),
            ),
            _copies,
            noise=0.1,  # of medians on CPUs that other programs use too
        ),
        Family(
            "pairs",
            "one block per pair of ranks (raw all-to-all)",
            (
                Parameter("t0", "us", 5.0, 0.8),
                Parameter("c_peer", "us", 0.1, 1.0),
                Parameter("B_link", "GB/s", 300.0, 1.0),
                *_COMMON,
            ),
            _pairs,
        ),
    )
}
