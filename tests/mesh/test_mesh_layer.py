"""A layer over a DeviceMesh: global shapes, the same numbers as over a process group, and refusals on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mesh import cases_mesh as cases
from support.ranks import Ranks

from moe_rt.errors import ConfigMismatch, InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_a_process_group(make_ranks: MakeRanks, size: int) -> None:
    for on_mesh, on_group in make_ranks("shm", size).run(cases.on_mesh_and_group):
        torch.testing.assert_close(on_mesh, on_group, rtol=0, atol=0)


def test_initial_parameters_do_not_depend_on_ranks(make_ranks: MakeRanks) -> None:
    [whole] = make_ranks("shm", 1).run(cases.initial)
    assert whole["experts.gate_up_proj"].shape == (8, 48, 32)
    for got in make_ranks("shm", 4).run(cases.initial):
        torch.testing.assert_close(got, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        ([0, 1, 2, 3], {"num_experts": 7}, "num_experts: got 7, expected a multiple of the mesh's 4 ranks"),
        ([[0, 1], [2, 3]], {"num_experts": 7}, "num_experts: got 7, expected a multiple of the mesh's 4 ranks"),
        (
            [0, 1, 2, 3],
            {"num_experts": 4, "placement": [1, 0, 2, 3]},
            r"placement: got \[1, 0, 2, 3\], expected contiguous",
        ),
        ([[[0, 1], [2, 3]]], {}, "group: got a mesh of 3 dimensions, expected one, as in"),
        ([1, 0, 2, 3], {}, r"group: got a mesh of ranks \[1, 0, 2, 3\], expected ascending"),
        ([[0, 2], [1, 3]], {}, r"group: got a mesh of ranks \[0, 2, 1, 3\], expected ascending"),
    ],
    ids=str,
)
def test_refusals(make_ranks: MakeRanks, ranks: Any, changes: dict[str, Any], message: str) -> None:
    for outcome in make_ranks("shm", 4).outcomes(cases.refused, ranks, changes):
        with pytest.raises(InvalidConfig, match=message):
            raise outcome


def test_one_rank_that_is_wrong_ends_all(make_ranks: MakeRanks) -> None:
    """All ranks raise if one rank's number of experts does not fit the mesh; none is left waiting."""
    outcomes = make_ranks("shm", 2).outcomes(cases.refused_on_one)
    assert all(isinstance(outcome, ConfigMismatch) for outcome in outcomes)


def test_reset_after_sharding_is_refused(make_ranks: MakeRanks) -> None:
    for outcome in make_ranks("shm", 2).outcomes(cases.reset_after_sharding):
        with pytest.raises(InvalidConfig, match=r"experts.gate_up_proj: got \(4, 48, 32\) on this rank, expected \(8,"):
            raise outcome
