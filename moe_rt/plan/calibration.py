"""Calibrations: fitted parameters of one system and op, kept as JSON, and the predictions that they support.

A calibration states its source, device, date, units and residuals. `Library.predict` looks for the calibration of the
same system; without one it takes a system with the same links and scales their rate by data sheets, with a wider
interval; without that it refuses.
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
from moe_rt.plan.fit import Correction, fit
from moe_rt.plan.points import Points, Row, Shape
from moe_rt.plan.systems import System, gpu_of

VERSION = 1
P95 = 1.645  # standard deviations from the median to the 95th percentile
AWAY, TRANSFER = 0.12, 0.2  # log errors seen away from calibrated shapes, and on another GPU or library
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
        return Correction.of(np.array(self.features), np.array(self.residuals))

    def times(self, x: Points, link_scale: float = 1.0) -> tuple[Array, Array]:
        """Return medians in us and their log standard deviations, both [n].

        Args:
            link_scale: rate of another GPU's links relative to this one's; other than 1 drops the correction.
        """
        values = dict(self.parameters)
        if "B_link" in values:
            values["B_link"] *= link_scale
        formula = FAMILIES[self.family].seconds(values, x)
        mean, spread = self.correction.at(x.features())
        near = np.clip(1 - (spread / max(self.correction.spread, 1e-6)) ** 2, 0, 1)
        if link_scale != 1:
            return formula, np.hypot(spread, AWAY)
        return formula * np.exp(mean), np.sqrt(spread**2 + AWAY**2 * (1 - near))

    def check_range(self, shape: Shape) -> None:
        """Raise InvalidConfig, naming the field, if a shape is too far from every calibrated one."""
        measured = np.array(self.features)
        names = ("tokens", "row_bytes", "topk", "experts", "ranks", "sms")
        asked = Points.of([shape]).features()[0]
        for name, at, low, high in zip(names, asked, measured.min(0), measured.max(0), strict=True):
            fits = low - np.log2(BEYOND) <= at <= high + np.log2(BEYOND)
            bounds = f"{2**low / BEYOND:.4g} to {2**high * BEYOND:.4g}, {BEYOND:g} times beyond {self.name}"
            expect(bool(fits), name, f"{2**at:.4g}", bounds)


def calibrate(rows: Sequence[Row], *, source: str, device: str, date: str) -> list[Calibration]:
    """Fit one calibration for each system and op among measurements.

    Raises:
        InvalidConfig: `rows` is empty.
    """
    expect(bool(rows), "measurements", "none", "at least one")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.system.key, row.op), []).append(row)
    made = []
    for members in groups.values():
        system, op = members[0].system, members[0].op
        family = FAMILIES[system.family]
        x, measured = Points.of(row.shape for row in members), np.array([row.latency_us for row in members])
        parameters = fit(family, x, measured, usual_of(system, op))
        left = np.log(measured / family.seconds(parameters, x))
        features, residuals = _merged(x.features(), left)
        error = np.abs(np.exp(-left) - 1)
        made.append(
            Calibration(
                VERSION, system.library, system.hardware, system.mode, op, system.family, system.gpu.link,
                system.network, int(x.nodes.min()), int(x.nodes.max()),
                {name: float(f"{value:.6g}") for name, value in parameters.items()},
                round(float(np.median(error)), 4), round(float(np.quantile(error, 0.95)), 4),
                np.round(features, 4).tolist(), np.round(residuals, 4).tolist(), source, device, date,
            )
        )  # fmt: skip
    return made


def usual_of(system: System, op: str) -> dict[str, float]:
    """Return centres of the priors that the data sheet or the op decide."""
    share = 0.8 if system.family == "channels" else 0.7
    usual = {} if system.family == "copies" else {"B_link": share * system.gpu.link_gbs}
    if op == "combine" and system.family == "channels":
        usual |= {"c_token": 50.0, "sharp_work": 7.0, "c_first": 0.25, "fill": 100.0, "knee": 200.0, "sharp": 0.1}
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
        return [Calibration(**document) for document in documents]
    except TypeError as error:
        raise InvalidConfig(f"calibration {path}: got {error}, expected the fields of a calibration") from error


class Library:
    """A set of calibrations to predict with."""

    def __init__(self, calibrations: Sequence[Calibration]) -> None:
        self.calibrations = list(calibrations)

    def choose(self, system: System, op: str, nodes: float) -> Calibration:
        """Return the most similar calibration.

        Raises:
            InvalidConfig: no calibration has the same links and algorithm family.
        """
        fitting = [
            one
            for one in self.calibrations
            if one.op == op and one.family == system.family and one.link == system.gpu.link
            and (system.family != "copies" or one.hardware == system.hardware)
        ]  # fmt: skip
        known = sorted({f"{one.family} over {one.link}" for one in self.calibrations})
        text = f"{op} of {system.family} over {system.gpu.link} ({system.hardware})"
        expect(bool(fitting), "link class", text, f"a calibrated one: {', '.join(known)}")

        def unlike(one: Calibration) -> tuple[float, bool, bool, bool, bool, str]:
            spans = one.least_nodes == 1 if nodes <= 1 else one.most_nodes > 1
            return (
                abs(math.log(self.link_scale(one, system))),
                not spans,
                one.library != system.library,
                one.mode != system.mode,
                one.hardware != system.hardware,
                one.name,
            )

        return min(fitting, key=unlike)

    @staticmethod
    def link_scale(one: Calibration, system: System) -> float:
        """Return the rate of a system's links, by data sheets, relative to those of a calibration."""
        return system.gpu.link_gbs / gpu_of(one.hardware).link_gbs

    def network(self, one: Calibration, system: System) -> Calibration:
        """Return a calibration that measured the system's network: the given one, or the most similar other.

        Raises:
            InvalidConfig: no calibration of this op crossed such a network.
        """
        crossed = [c for c in self.calibrations if c.most_nodes > 1 and c.network == system.network and c.op == one.op]
        known = sorted({c.network for c in self.calibrations if c.most_nodes > 1})
        got = f"{system.network} between nodes ({system.hardware})"
        expect(bool(crossed), "link class", got, f"a calibrated network: {', '.join(known) or 'none'}")
        return one if one in crossed else min(crossed, key=lambda c: (c.family == "direct", c.name))

    def predict(self, system: System, op: str, shape: Shape) -> Estimate:
        """Predict the time of one op.

        Raises:
            InvalidConfig: nothing with such links is calibrated, or the shape is far outside the calibrated range.
        """
        best = self.choose(system, op, shape.nodes)
        best.check_range(shape)
        scale, basis = self.link_scale(best, system), best.name
        own = best.library == system.library and best.hardware == system.hardware
        if shape.nodes > 1 and (over := self.network(best, system)) is not best:
            crossing = {name: over.parameters[name] for name in ("B_net", "t_net")}
            best, own, basis = replace(best, parameters=best.parameters | crossing), False, f"{basis}; {over.name}"
        median, spread = best.times(Points.of([shape]), scale)
        wide = float(np.exp(P95 * np.hypot(spread[0], 0.0 if own else TRANSFER)))
        us = float(median[0])
        return Estimate(us, us / wide, us * wide, basis + (f"; links scaled by {scale:.2f}" if scale != 1 else ""))


@cache
def published() -> Library:
    """Return the calibrations of published systems that the package carries."""
    folder = files("moe_rt.plan") / "data"
    found = sorted((path for path in folder.iterdir() if path.name.endswith(".json")), key=lambda path: path.name)
    return Library([one for path in found for one in load(path)])
