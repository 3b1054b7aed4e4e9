"""FSDP2 over efsdp and moe_rt over ep train as one process does on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mesh import cases_mesh as cases
from support.ranks import Ranks

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize(
    ("efsdp", "ep", "changes"),
    [
        (2, 2, {}),
        (1, 4, {}),
        (4, 1, {}),
        (2, 2, {"num_experts": 6}),  # three experts do not divide by two ranks
        (4, 1, {"num_experts": 2}),  # fewer experts than ranks
        (2, 2, {"weight_layout": "transposed", "interleaved": True, "biases": True}),
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


USUAL = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize(
    ("experts", "others", "over_mesh"),
    [
        (USUAL, USUAL, True),
        (USUAL, USUAL, False),
        (USUAL, {}, True),
        ({}, USUAL, True),
        ({**USUAL, "output_dtype": torch.float32}, USUAL, True),
        ({**USUAL, "cast_forward_inputs": False}, USUAL, True),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else str(v),
)
def test_policies_of_mixed_precision(
    make_ranks: MakeRanks, experts: dict[str, Any], others: dict[str, Any], over_mesh: bool
) -> None:
    losses, _ = cases.single_steps({})
    for got, dtypes in make_ranks("shm", 4).run(cases.mixed_precision, experts, others, over_mesh):
        assert dtypes == {experts.get("param_dtype", torch.float32)}
        torch.testing.assert_close(got, losses, rtol=2e-2, atol=2e-2)
