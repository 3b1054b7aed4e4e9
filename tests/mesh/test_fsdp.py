"""FSDP2 over efsdp and moe_rt over ep train as one process does on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases_mesh as cases
import pytest
import torch
from harness import Ranks

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(
    ("efsdp", "ep", "changes"),
    [
        (2, 2, {}),
        (1, 4, {}),
        (4, 1, {}),
        (2, 2, {"num_experts": 6}),  # three experts do not divide by two ranks
        (4, 1, {"num_experts": 2}),  # fewer experts than ranks
        (2, 2, {"layout": "transposed", "interleaved": True, "biases": True}),
    ],
    ids=str,
)
def test_trains_as_one_process(make_ranks: MakeRanks, efsdp: int, ep: int, changes: dict[str, Any]) -> None:
    losses, parameters = cases.single_steps(changes)
    assert losses[-1] < losses[0]
    experts = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
    for got_losses, got, kept in make_ranks("shm", efsdp * ep).run(cases.fsdp_steps, efsdp, ep, changes):
        assert kept == experts / 4
        torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, parameters, rtol=1e-5, atol=1e-5)
