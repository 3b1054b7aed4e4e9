"""Training after evaluation in any modes of torch: an op's state does not depend on the mode it was made in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import HEAPS
from ops import cases_modes as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]


def any_two(heap: str, usual_by_default: bool, slow: bool = False) -> list[Any]:
    """Return pairs of modes: each mode before the usual ones, and by default the usual ones before all others; a sweep
    has the other pairs.

    A slow mode is in all pairs or in none. Only a sweep has slow modes after unusual ones. The emulated GPU's engine
    shares the Python of CPU ranks: on it only a sweep begins with unusual modes.
    """
    found = []
    for first in cases.modes(heap):
        known = first in cases.USUAL
        seconds = [mode for mode in cases.modes(heap) if slow is (mode in cases.SLOW or first in cases.SLOW)]
        soon = [mode for mode in seconds if mode in cases.USUAL and (known or mode not in cases.SLOW)]
        others = [mode for mode in seconds if mode not in soon]
        rare = [] if known or heap != "loopback" else [pytest.mark.sweep]
        more = [] if known and usual_by_default else [pytest.mark.sweep]
        if soon:
            found.append(pytest.param(heap, first, soon, id=f"{heap}-{first}", marks=rare))
        if others:
            found.append(pytest.param(heap, first, others, id=f"{heap}-{first}-others", marks=more))
    return found


@pytest.mark.parametrize(
    ("heap", "first", "seconds"), [two for heap in HEAPS for two in any_two(heap, usual_by_default=heap == "threads")]
)
def test_a_buffer_trains_after_any_two_modes(make_ranks: MakeRanks, heap: str, first: str, seconds: list[str]) -> None:
    """Gradients equal, bit for bit, those without evaluation. Modes are global to a process: it has one rank."""
    make_ranks(heap, 2 if heap == "shm" else 1).run(cases.buffer_case, heap, first, seconds)


@pytest.mark.parametrize(("heap", "first", "seconds"), any_two("threads", usual_by_default=False))
def test_a_layer_trains_after_any_two_modes(make_ranks: MakeRanks, heap: str, first: str, seconds: list[str]) -> None:
    make_ranks(heap, 1).run(cases.layer_case, heap, first, seconds)


@pytest.mark.parametrize("make_in", ["no_grad", "inference_mode", "meta as device", "default device"])
def test_a_buffer_made_in_a_mode_trains_outside_of_it(make_ranks: MakeRanks, make_in: str) -> None:
    make_ranks("threads", 1).run(cases.made_in, make_in)
