"""Formulas, fits and corrections give the numbers on record, for shapes on both sides of each of their conditions.

After a change on purpose: python tests/plan/test_formulas_on_record.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import REL, assert_on_record, result_of, results_of, write_record

from moe_rt.plan.calibration import usual_of
from moe_rt.plan.families import FAMILIES, blocks_of, join, pipelined
from moe_rt.plan.fit import Correction, fit, predicted, slopes_of, uncertainty
from moe_rt.plan.points import Points, Shape
from moe_rt.plan.systems import system_of

RECORD = Path(__file__).with_suffix(".json")
GPU = Shape(128, 7168, 8, 256, 8, 1, 8, 7408, 24, 132, 5.3, 1)
CPU = Shape(512, 2048, 4, 16, 4, 1, 4, 4096, 24, 2, 2.9, 1)
GPU_SHAPES = (
    GPU,
    replace(GPU, tokens=1, sms=8, busiest=1.7),
    replace(GPU, tokens=4096, experts=132, topk=2, sms=20),
    replace(GPU, tokens=8, ranks=4, domain=8, experts=64, to_ranks=2.5),
    replace(GPU, ranks=16, nodes=2, to_ranks=7.1, to_nodes=1.9, busiest=1.2),
    replace(GPU, ranks=64, nodes=8, to_ranks=7.8, to_nodes=5.2, tokens=2048, experts=288),
    replace(GPU, ranks=24, nodes=3, to_ranks=6.1, to_nodes=2.4, tokens=32768, row_bytes=14336),
)
CPU_SHAPES = (
    CPU,
    replace(CPU, tokens=1, ranks=2, to_ranks=1.5, busiest=1.4),
    replace(CPU, tokens=3000, hidden=1024, row_bytes=2048, busiest=1.3),
    replace(CPU, tokens=9000, ranks=8, to_ranks=3.5, sms_of_gpu=8),
    replace(CPU, tokens=2500, sms_of_gpu=24, to_ranks=1.0, topk=1),
    replace(CPU, tokens=100, intermediate=512, busiest=2.5),
    replace(CPU, tokens=1, topk=1, experts=128, intermediate=4096, sms_of_gpu=4),
    replace(CPU, tokens=2, hidden=1, intermediate=1, row_bytes=2),
    replace(CPU, nodes=2, to_nodes=1.7),
    replace(CPU, ranks=9, nodes=3, to_nodes=2.2, tokens=40, sms_of_gpu=4),
)
NAMES = {"direct": "low_latency", "channels": "normal", "pairs": "raw_alltoall"}


def shapes_of(family: str) -> Points:
    return Points.of(CPU_SHAPES if family == "copies" else GPU_SHAPES)


def usual(family: str) -> dict[str, float]:
    return {p.name: p.usual for p in FAMILIES[family].parameters}


def seconds(family: str) -> Any:
    """Return times by usual parameters, with the family's other facts."""
    values, x = usual(family), shapes_of(family)
    assert np.array_equal(predicted(family, values, x), FAMILIES[family].seconds(values, x))
    each = [(p.name, p.unit, p.usual, p.spread) for p in FAMILIES[family].parameters]
    return {"us": predicted(family, values, x), "noise": FAMILIES[family].noise, "parameters": each}


def fitted(family: str) -> Any:
    """Return a fit to times by other parameters, one of them an outlier, and what the fit leaves uncertain."""
    x = shapes_of(family)
    values = {name: value * (1.3 if number % 2 else 0.8) for number, (name, value) in enumerate(usual(family).items())}
    times = FAMILIES[family].seconds(values, x) * np.exp(0.05 * np.sin(np.arange(len(x.tokens))))
    times[2] *= 3
    found = fit(FAMILIES[family], x, times)
    from_there = fit(FAMILIES[family], x, times, {"t0": 50.0})
    doubt = uncertainty(FAMILIES[family], found, x, times)
    slopes = slopes_of(FAMILIES[family], found, x)
    return found, from_there, np.diag(doubt), np.diag(slopes.T @ slopes)


def slopes(family: str) -> Any:
    values, x = usual(family), shapes_of(family)
    times = FAMILIES[family].seconds(values, x)
    found = slopes_of(FAMILIES[family], values, x)
    each = [uncertainty(FAMILIES[family], values, x, times * factor) for factor in (1.001, 1.1, 2.0)]
    return found, [np.diag(one) for one in each], each[1][:3]


def corrected(residuals: list[float], scatter: float) -> Any:
    features = shapes_of("direct").features()
    made = Correction.of(features, np.array(residuals), scatter)
    asked = np.concatenate([features[:3], features[:3] + 0.7, features[:3] + 20])
    return {"spread": made.spread, "noise": made.noise, "trust": made.trust, "weights": made.weights,
            "at": made.at(asked), "near": made.near(asked)}  # fmt: skip


def usual_values() -> Any:
    """Return centres of the priors by system and op."""
    systems = [system_of("DeepEP-V1", "H100", mode, 8) for mode in ("low_latency", "normal", "raw_alltoall")]
    systems += [system_of("MORI-EP", "MI300X", "normal", 8)]
    found = {f"{s.family} {op}": usual_of(s, op) for s in systems for op in ("dispatch", "combine")}
    cpu = system_of("moe_rt", "cpu: chip, 2 cores", "copies", 4)
    ops = ("dispatch", "combine", "pair", "pair+backward", "layer", "layer+backward", "combine+backward")
    return found | {f"copies {op}": usual_of(cpu, op) for op in ops}


def helpers() -> Any:
    first, second = np.array([1.0, 3.0, 0.0, 5.0]), np.array([2.0, 3.0, 0.0, 0.0])
    x = shapes_of("direct")
    return {"join": [join(first, second, q) for q in (1, 1.5, 4)], "pipelined": pipelined(first, second, second + 1),
            "blocks": blocks_of(x), "features": x.features(), "chosen": x.at([4, 1]).tokens}  # fmt: skip


RESULTS = {
    **{f"{make.__name__} {family}": partial(make, family) for make in (seconds, fitted, slopes) for family in FAMILIES},
    "corrected": partial(corrected, [0.1, -0.2, 0.05, 0.0, 0.3, -0.1, 0.15], 0.03),
    "corrected outlier": partial(corrected, [0.01, 0.02, 0.9, 0.0, 0.0, 0.0, 0.0], 0.1),
    "corrected exact": partial(corrected, [0.0, 1e-3, 0.0, -1e-3, 0.0, 0.0, 1e-3], 0.03),
    "usual_values": usual_values,
    "helpers": helpers,
}


@pytest.mark.parametrize("name", RESULTS)
def test_numbers_are_those_on_record(name: str) -> None:
    """A fit stops near the best parameters, a little elsewhere on each processor."""
    assert_on_record(RECORD, name, result_of(RESULTS[name]), 0.02 if name.startswith("fitted") else REL)


if __name__ == "__main__":
    write_record(RECORD, results_of(RESULTS))
