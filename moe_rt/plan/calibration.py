"""Calibrations: fitted parameters of one system and op, kept as JSON, and the predictions that they support.

A calibration states its source, device, date, units and residuals. `Library.predict` looks for the calibration of the
same system; without one it takes a system with the same links and scales their rate by data sheets, with a wider
interval; without that it refuses, or guesses if asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from moe_rt.errors import InvalidConfig, expect
from moe_rt.plan.distinct import Array
from moe_rt.plan.families import FAMILIES
from moe_rt.plan.fit import P95, Correction, fit, slopes_of, uncertainty
from moe_rt.plan.points import Points, Row, Shape, least
from moe_rt.plan.systems import System, gpu_of, row_bytes

VERSION = 3
# Log errors seen in folds left out: between calibrated shapes, for each doubling beyond them, and on another GPU or
# library.
AWAY, OUTSIDE, TRANSFER = 0.05, 0.08, 0.33
# Parameters that a calibration on one node takes from one that crossed the network; of another family only the rate.
_CROSSING = ("B_net", "t_net", "t_doubling", "c_signal", "chunk", "c_notify")
LEAST_LATENCY = 0.4  # part of a calibrated latency that remains on a faster GPU
GUESS = 0.67  # log error that is assumed where no calibration has the links or the algorithm
BEYOND = 16.0  # factor beyond the calibrated range up to which a formula may be used


@dataclass(frozen=True)
class Estimate:
    """Predicted time of one op in microseconds: its median, and the interval that holds 90 %.

    Attributes:
        basis: the calibration that was used, in words.
    """

    us: float
    p5_us: float
    p95_us: float
    basis: str


@dataclass(frozen=True)
class Calibration:
    """Parameters fitted to the measurements of one system and op, with the residuals.

    Attributes:
        link, network: classes of its links within and between domains.
        most_nodes: domains that the largest measured group spans; 1 leaves the network's parameters unmeasured.
        parameters: fitted values by name; families.py has units.
        covariance: of the parameters' logarithms, lower triangle by rows.
        features, residuals: shapes of the measurements [n][6], and log(measured / formula), [n].
        source, device, date: origin of the measurements.
    """

    version: int
    library: str
    hardware: str
    mode: str
    op: str
    family: str
    link: str
    network: str
    least_nodes: int
    most_nodes: int
    parameters: dict[str, float]
    median_error: float
    p95_error: float
    covariance: list[float]
    features: list[list[float]]
    residuals: list[float]
    source: str
    device: str
    date: str

    @property
    def name(self) -> str:
        """The system and op in words."""
        return f"{self.library}, {self.hardware}, {self.mode}, {self.op}"

    @cached_property
    def correction(self) -> Correction:
        """The correction of the formula near measured shapes."""
        return Correction.of(np.array(self.features), np.array(self.residuals), FAMILIES[self.family].noise)

    @cached_property
    def doubt(self) -> Array:
        """The covariance of the parameters' logarithms, as a matrix."""
        size = len(self.parameters)
        below = np.zeros((size, size))
        below[np.tril_indices(size)] = self.covariance
        return below + np.tril(below, -1).T

    def times(self, x: Points, link_scale: float = 1.0, later_us: float = 0.0) -> tuple[Array, Array]:
        """Return medians in us and their log standard deviations, both [n].

        Args:
            link_scale: rate of another GPU's links relative to this one's; other than 1 drops the correction.
            later_us: latency of another GPU's kernels less this one's.
        """
        values = dict(self.parameters)
        if "B_link" in values:
            values["B_link"] *= link_scale
        values["t0"] = max(values["t0"] + later_us, LEAST_LATENCY * values["t0"])
        family = FAMILIES[self.family]
        formula, slopes = family.seconds(values, x), slopes_of(family, values, x)
        unsure = np.einsum("ij,jk,ik->i", slopes, self.doubt, slopes)
        measured, asked = np.array(self.features), x.features()
        beyond = np.maximum(np.maximum(measured.min(0) - asked, asked - measured.max(0)), 0)
        unsure = unsure + AWAY**2 + (OUTSIDE**2 * beyond**2).sum(1)
        if link_scale != 1:
            return formula, np.sqrt(unsure)
        mean, spread = self.correction.at(asked)
        far = 1 - self.correction.near(asked)
        return formula * np.exp(mean), np.sqrt(spread**2 + far * unsure)

    def check_range(self, shape: Shape) -> None:
        """Raise InvalidConfig, naming the field, if a shape is too far from every calibrated one."""
        measured = np.array(self.features)
        names = ("tokens", "row_bytes", "topk", "experts", "ranks", "sms")
        asked = Points.of([shape]).features()[0]
        for name, at, low, high in zip(names, asked, measured.min(0), measured.max(0), strict=True):
            fits = low - np.log2(BEYOND) <= at <= high + np.log2(BEYOND)
            bounds = f"{2**low / BEYOND:.4g} to {2**high * BEYOND:.4g}, {BEYOND:g} times beyond {self.name}"
            expect(bool(fits), name, f"{2**at:.4g}", bounds)


def calibrate(rows: Sequence[Row], *, date: str, source: str = "", device: str = "") -> list[Calibration]:
    """Fit one calibration for each system and op among measurements.

    A second fit starts from what the first one found for similar systems: measurements of one seldom decide all
    parameters. Of repeated measurements on CPU ranks the least counts (`least`); published ones are means already.

    Args:
        source, device: origin of the measurements; what the rows state, unless given.

    Raises:
        InvalidConfig: `rows` is empty.
    """
    expect(bool(rows), "measurements", "none", "at least one")
    copies = [row for row in rows if row.system.family == "copies"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (*(row for row in rows if row.system.family != "copies"), *least(copies)):
        groups.setdefault((row.system.key, row.op), []).append(row)
    members = list(groups.values())
    alone = [_fit(group, usual_of(group[0].system, group[0].op)) for group in members]
    return [_calibration(group, _fit(group, _pooled(group, members, alone)), source, device, date) for group in members]


def _fit(group: Sequence[Row], usual: dict[str, float]) -> dict[str, float]:
    measured = np.array([row.latency_us for row in group])
    return fit(FAMILIES[group[0].system.family], Points.of(row.shape for row in group), measured, usual)


def _pooled(
    group: Sequence[Row], members: Sequence[Sequence[Row]], alone: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return centres of the priors: geometric means of what other systems of the family have, those of the GPU first.

    Systems that measured one node only and others do not inform each other: SMs forward rows between nodes. Rates of
    links are scaled by data sheets.
    """
    system, op = group[0].system, group[0].op
    found: list[tuple[bool, dict[str, float]]] = []
    for other, values in zip(members, alone, strict=True):
        far = {max(row.shape.nodes for row in rows) > 1 for rows in (group, other)}
        names = [(s.family, s.gpu.link, rows[0].op) for s, rows in ((system, group), (other[0].system, other))]
        alike = names[0] == names[1] and len(far) == 1
        if other is not group and alike:
            scale = system.gpu.link_gbs / other[0].system.gpu.link_gbs
            scaled = {name: value * (scale if name == "B_link" else 1.0) for name, value in values.items()}
            found.append((other[0].system.hardware == system.hardware, scaled))
    near = [values for same, values in found if same] or [values for _, values in found]
    if not near:
        return usual_of(system, op)
    return {name: math.exp(sum(math.log(values[name]) for values in near) / len(near)) for name in near[0]}


def _calibration(
    members: Sequence[Row], parameters: dict[str, float], source: str, device: str, date: str
) -> Calibration:
    """Return the calibration of one system and op with its residuals."""
    system, op = members[0].system, members[0].op
    x, measured = Points.of(row.shape for row in members), np.array([row.latency_us for row in members])
    left = np.log(measured / FAMILIES[system.family].seconds(parameters, x))
    features, residuals = _merged(x.features(), left)
    error = np.abs(np.exp(-left) - 1)
    doubt = uncertainty(FAMILIES[system.family], parameters, x, measured)
    below = doubt[np.tril_indices(len(doubt))]
    return Calibration(
        VERSION, system.library, system.hardware, system.mode, op, system.family, system.gpu.link,
        system.network, int(x.nodes.min()), int(x.nodes.max()),
        {name: float(f"{value:.6g}") for name, value in parameters.items()},
        round(float(np.median(error)), 4), round(float(np.quantile(error, 0.95)), 4),
        [float(f"{value:.3g}") for value in below], np.round(features, 4).tolist(), np.round(residuals, 4).tolist(),
        source or ", ".join(sorted({row.source for row in members})), device or system.hardware, date,
    )  # fmt: skip


def usual_of(system: System, op: str) -> dict[str, float]:
    """Return centres of the priors that the data sheet or the op decide."""
    if system.family == "copies":
        return _usual_copies(op)
    share = 0.8 if system.family == "channels" else 0.7
    usual = {"B_link": share * system.gpu.link_gbs}
    if op == "combine" and system.family == "direct":
        usual |= {"c_round": 0.4, "c_byte": 0.015}  # nothing is cast, unlike in dispatch
    if op == "combine" and system.family == "channels":
        usual |= {"c_token": 50.0, "sharp_work": 7.0, "c_first": 0.25, "fill": 100.0, "knee": 200.0, "sharp": 0.1}
    return usual


# Times that the exchanges of an op, in turn, pass each token's row, each row of a peer and each expert's row through
# memory if no cache keeps it: a row that is written is first read, unless it is written past the caches. Last, the
# part of the passes of experts' rows that remains then.
_PASSES = {
    "dispatch": (3.0, 0.5, 2.0, 0.5),
    "combine": (1.0, 2.0, 1.0, 1.0),
    "pair": (4.0, 2.5, 3.0, 0.67),
    "pair+backward": (10.0, 5.0, 7.0, 0.7),
    "layer": (4.0, 2.5, 12.0, 0.9),
    "layer+backward": (10.0, 5.0, 60.0, 0.9),
}


def _usual_copies(op: str) -> dict[str, float]:
    """Return the costs of an op that consists of several exchanges: each has all costs of one.

    Combine writes past the caches much earlier than dispatch. Gradients add autograd's calls and copies. A layer's
    router works on every token, and its experts pass rows through memory.
    """
    exchanges = {"dispatch": 1.0, "combine": 1.0, "pair": 2.0, "layer": 2.0}.get(op, 5.0)
    usual = dict(zip(("a_token", "a_visit", "a_entry", "past"), _PASSES.get(op, _PASSES["pair"]), strict=True))
    for parameter in FAMILIES["copies"].parameters:
        name, value = parameter.name, parameter.usual
        if name in ("t0", "t_peer", "c_token", "c_visit", "c_entry"):
            usual[name] = value * exchanges
        elif name in ("B_copy", "B_peer"):
            usual[name] = value / exchanges
    if op == "combine":
        usual["cache"] = 6.0
    if op.startswith("layer"):
        usual["cache"] = 4.0
        usual |= {"c_token": 100 * exchanges, "c_entry": 30 * exchanges}
        usual |= {"t_layer": 150 * exchanges, "F_products": 300 / exchanges}
    if op == "layer+backward":
        usual["grads"] = 0.2
    return usual


def _merged(features: Array, residuals: Array) -> tuple[Array, Array]:
    """Average the residuals of equal shapes, so that repeated lines do not count as more knowledge."""
    unique, index = np.unique(np.round(features, 4), axis=0, return_inverse=True)
    index = index.reshape(-1)
    return unique, np.bincount(index, residuals) / np.bincount(index)


def save(calibrations: Iterable[Calibration], path: Path) -> None:
    """Write calibrations as one JSON document."""
    path.write_text(json.dumps([asdict(one) for one in calibrations], separators=(",", ":")) + "\n", encoding="utf-8")


def load(path: Path | Traversable) -> list[Calibration]:
    """Read calibrations.

    Raises:
        InvalidConfig: the file is not a list of calibrations of this version, or has other fields.
    """
    try:
        documents: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        versions = {document.get("version") for document in documents}
    except (ValueError, AttributeError) as error:
        raise InvalidConfig(f"calibration {path}: got {error}, expected a JSON list of calibrations") from error
    expect(versions <= {VERSION}, f"calibration {path}: version", sorted(map(str, versions)), str(VERSION))
    try:
        found = [Calibration(**document) for document in documents]
    except TypeError as error:
        raise InvalidConfig(f"calibration {path}: got {error}, expected the fields of a calibration") from error
    for one in found:
        expect(one.family in FAMILIES, f"calibration {path}: family", one.family, f"one of {', '.join(FAMILIES)}")
        unlike = ", ".join(sorted(set(FAMILIES[one.family].names) ^ set(one.parameters)))
        wanted = f"those of {one.family}; calibrate again with this version"
        expect(not unlike, f"calibration {path}: parameters", f"other ones ({unlike})", wanted)
    return found


class Library:
    """A set of calibrations to predict with.

    Args:
        guess: True to predict links, families and ranges that no calibration covers from the most similar one, with an
            interval of a factor of three in both directions; False to refuse them.
    """

    def __init__(self, calibrations: Sequence[Calibration], guess: bool = False) -> None:
        self.calibrations, self.guess = list(calibrations), guess

    def choose(self, system: System, op: str, nodes: float) -> Calibration:
        """Return the most similar calibration.

        Raises:
            InvalidConfig: no calibration has the same links and algorithm family, and none may be guessed.
        """
        same = [one for one in self.calibrations if one.op == op and ("copies" in {one.family, system.family}) == (
            one.family == system.family == "copies" and one.hardware == system.hardware)]  # fmt: skip
        fitting = [one for one in same if one.family == system.family and one.link == system.gpu.link]
        known = sorted({f"{one.family} over {one.link}" for one in self.calibrations})
        text = f"{op} of {system.family} over {system.gpu.link} ({system.hardware})"
        expect(bool(same if self.guess else fitting), "link class", text, f"a calibrated one: {', '.join(known)}")

        def unlike(one: Calibration) -> tuple[bool, bool, bool, bool, float, bool, bool, str]:
            spans = one.least_nodes == 1 if nodes <= 1 else one.most_nodes > 1
            return (
                one.family != system.family,
                one.link != system.gpu.link,
                not spans,
                one.library != system.library,
                abs(math.log(self.link_scale(one, system))),
                one.mode != system.mode,
                one.hardware != system.hardware,
                one.name,
            )

        return min(fitting or same, key=unlike)

    @staticmethod
    def link_scale(one: Calibration, system: System) -> float:
        """Return the rate of a system's links, by data sheets, relative to those of a calibration."""
        return system.gpu.link_gbs / gpu_of(one.hardware).link_gbs

    def later_us(self, one: Calibration, system: System) -> float:
        """Return how much longer the system's GPU takes to start an op and to signal than that of a calibration.

        It is the mean difference of the latencies of libraries that are calibrated on both GPUs, in the same mode and
        op. A launch, and the way to a peer and back, cost every kernel alike; 0 if no library was measured on both.
        """
        own, other = gpu_of(one.hardware).name, system.gpu.name
        if own == other:
            return 0.0
        latency: dict[str, dict[tuple[str, str, str], float]] = {own: {}, other: {}}
        for each in self.calibrations:
            if each.family != "copies" and (name := gpu_of(each.hardware).name) in latency:
                latency[name][each.library, each.mode, each.op] = each.parameters["t0"]
        both = latency[own].keys() & latency[other].keys()
        return sum(latency[other][key] - latency[own][key] for key in both) / max(len(both), 1)

    def network(self, one: Calibration, system: System) -> Calibration:
        """Return a calibration that measured the system's network: the given one, or the most similar other.

        Raises:
            InvalidConfig: no calibration of this op crossed such a network, and none may be guessed.
        """
        some = [c for c in self.calibrations if c.most_nodes > 1 and c.op == one.op]
        crossed = [c for c in some if c.network == system.network]
        known = sorted({c.network for c in self.calibrations if c.most_nodes > 1})
        got = f"{system.network} between nodes ({system.hardware})"
        wanted = f"a calibrated network: {', '.join(known) or 'none'}"
        expect(bool(some if self.guess else crossed), "link class", got, wanted)
        return one if one in crossed else min(crossed or some, key=lambda c: (c.family == "direct", c.name))

    def predict(self, system: System, op: str, shape: Shape) -> Estimate:
        """Predict the time of one op; of a pair, as the sum of dispatch and combine unless pairs are calibrated.

        Raises:
            InvalidConfig: nothing with such links is calibrated, or the shape is far outside the calibrated range.
        """
        if op == "pair" and system.family != "copies":
            back = replace(shape, row_bytes=row_bytes(system, "combine", "bf16", shape.hidden))
            return _sum(self.predict(system, "dispatch", shape), self.predict(system, "combine", back))
        best = self.choose(system, op, shape.nodes)
        if not self.guess:
            best.check_range(shape)
        scale, basis = self.link_scale(best, system), best.name
        unlike = 0.0 if best.library == system.library and best.hardware == system.hardware else TRANSFER
        if (best.family, best.link) != (system.family, system.gpu.link):
            unlike, basis = GUESS, f"guessed from {basis}"
        if shape.nodes > 1 and (over := self.network(best, system)) is not best:
            names = _CROSSING if over.family == best.family else _CROSSING[:1]
            crossing = {name: over.parameters[name] for name in names if name in over.parameters}
            best, basis = replace(best, parameters=best.parameters | crossing), f"{basis}; {over.name}"
            unlike = max(unlike, TRANSFER)
            if over.network != system.network:
                unlike, basis = GUESS, f"{basis} guessed for {system.network}"
        median, spread = best.times(Points.of([shape]), scale, self.later_us(best, system))
        wide = float(np.exp(P95 * np.hypot(spread[0], unlike)))
        us = float(median[0])
        return Estimate(us, us / wide, us * wide, basis + (f"; links scaled by {scale:.2f}" if scale != 1 else ""))


def _sum(first: Estimate, second: Estimate) -> Estimate:
    """Return the time of two ops that follow each other; their errors come from the same causes, so they add."""
    return Estimate(
        us=first.us + second.us,
        p5_us=first.p5_us + second.p5_us,
        p95_us=first.p95_us + second.p95_us,
        basis=f"{first.basis} + {second.basis}",
    )


@cache
def published() -> Library:
    """Return the calibrations of published systems that the package carries."""
    folder = files("moe_rt.plan") / "data"
    found = sorted((path for path in folder.iterdir() if path.name.endswith(".json")), key=lambda path: path.name)
    return Library([one for path in found for one in load(path)])
