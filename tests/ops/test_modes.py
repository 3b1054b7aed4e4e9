"""Training after evaluation, in whatever modes of torch: nothing that an op keeps remembers the mode it was made in."""

from __future__ import annotations

from collections.abc import Callable

import cases_modes as cases
import pytest
from conftest import HEAPS
from harness import Ranks

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(("heap", "first"), [(heap, first) for heap in HEAPS for first in cases.modes(heap)])
def test_a_buffer_trains_after_any_two_modes(make_ranks: MakeRanks, heap: str, first: str) -> None:
    """Gradients bit for bit as in a run that never evaluated. Modes are a thread's or a process's: one rank of each."""
    make_ranks(heap, 2 if heap == "shm" else 1).run(cases.buffer_case, heap, first)


@pytest.mark.parametrize("first", cases.modes("threads"))
def test_a_layer_trains_after_any_two_modes(make_ranks: MakeRanks, first: str) -> None:
    make_ranks("threads", 1).run(cases.layer_case, "threads", first)


@pytest.mark.parametrize("make_in", ["no_grad", "inference_mode", "meta as device", "default device"])
def test_a_buffer_made_in_a_mode_trains_outside_of_it(make_ranks: MakeRanks, make_in: str) -> None:
    make_ranks("threads", 1).run(cases.made_in, make_in)
