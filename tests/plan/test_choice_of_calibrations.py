"""The calibration that differs least is chosen: family first, then link, nodes, library, rate, mode and hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_rt.errors import InvalidConfig
from moe_rt.plan.calibration import Calibration, Library, published
from moe_rt.plan.systems import system_of

SYSTEM = system_of("DeepEP-V1", "H100 + IB", "normal", 8)
EQUAL = replace(
    next(one for one in published().calibrations if (one.family, one.op) == ("channels", "dispatch")),
    library="DeepEP-V1", hardware="H100 + IB", link="nvlink", network="ib", least_nodes=1, most_nodes=4,
)  # fmt: skip
# Differences, the most important first; nodes as (asked for, least and most calibrated).
DIFFERENCES: dict[str, dict[str, Any]] = {
    "family": {"family": "direct"},
    "link": {"link": "xgmi"},
    "nodes": {},
    "library": {"library": "Another"},
    "rate": {"hardware": "H800 + IB"},
    "mode": {"mode": "low_latency"},
    "hardware": {"hardware": "H100"},
}


def differing(names: list[str], nodes: int) -> Calibration:
    changes: dict[str, Any] = {}
    for name in names:
        changes = DIFFERENCES[name] | changes
    if "nodes" in names:
        changes |= {"least_nodes": 2} if nodes == 1 else {"most_nodes": 1}
    return replace(EQUAL, **changes)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_all_later_differences_together_matter_less(name: str, nodes: int) -> None:
    later = list(DIFFERENCES)[list(DIFFERENCES).index(name) + 1 :]
    worse, better = differing([name], nodes), differing(later, nodes)
    for calibrations in ([worse, better], [better, worse]):
        assert Library(calibrations, guess=True).choose(SYSTEM, "dispatch", nodes) is better


@pytest.mark.parametrize(("near", "far"), [("B200", "H800"), ("H200", "B200"), ("H200", "H800")])
def test_the_nearer_rate_is_chosen_whether_faster_or_slower(near: str, far: str) -> None:
    """A B200's links are twice as fast as an H100's, and an H800's 2.25 times as slow."""
    one, other = (replace(EQUAL, hardware=hardware) for hardware in (near, far))
    for calibrations in ([one, other], [other, one]):
        assert Library(calibrations).choose(SYSTEM, "dispatch", 1) is one


def test_what_has_another_op_or_runs_on_other_processors_is_never_chosen() -> None:
    copies = system_of("moe_rt", "cpu: chip, 2 cores", "copies", 2)
    own = replace(EQUAL, family="copies", link="shared memory", hardware=copies.hardware, mode="copies")
    elsewhere = replace(own, hardware="cpu: other, 2 cores")
    combine = replace(EQUAL, op="combine")
    library = Library([elsewhere, combine, own, EQUAL], guess=True)
    assert library.choose(copies, "dispatch", 1) is own
    assert library.choose(SYSTEM, "dispatch", 1) is EQUAL
    assert library.choose(SYSTEM, "combine", 1) is combine
    for calibrations, system in (([elsewhere, EQUAL], copies), ([own, combine], SYSTEM)):
        with pytest.raises(InvalidConfig, match=r"link class: got dispatch of .*, expected a calibrated one: "):
            Library(calibrations, guess=True).choose(system, "dispatch", 1)
