"""Training continues from a checkpoint of two ranks on any number; another model's checkpoint is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh import cases_mesh as cases
from support.ranks import Ranks
from torch import Tensor

from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]
Saved = tuple[str, dict[str, Tensor], list[float]]


@pytest.fixture(scope="module")
def saved(make_ranks: MakeRanks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = str(tmp_path_factory.mktemp("checkpoint") / "two")
    return path, *make_ranks("shm", 2).run(cases.save_then_step, path, {})[0]


@pytest.mark.parametrize("size", [None, 1, 2, 4])
def test_goes_on_with_any_number_of_ranks(make_ranks: MakeRanks, saved: Saved, size: int | None) -> None:
    """Loaded parameters and later losses equal the saved run's. None: plain tensors, without torch.distributed."""
    path, parameters, losses = saved
    if size is None:
        results: list[Any] = [cases.load_then_step(None, path, {})]
    else:
        results = make_ranks("shm", size).run(cases.load_then_step, path, {})
    assert parameters["layers.0.moe.experts.down_proj"].shape[0] == 8
    assert parameters["layers.0.moe.router.balance_bias"].count_nonzero() == 8
    for got, got_losses in results:
        torch.testing.assert_close(got, parameters, rtol=0, atol=0)
        torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=0)
    if size == 2:
        assert results[0][1] == losses, "bit for bit on as many ranks"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4}, "num_experts: got 4, expected 8 as in model.layers.0.moe.router.weight"),
        ({"intermediate": 16}, r"experts.gate_up_proj: got \[8, 32, 32\], expected \[8, 48, 32\]"),
        ({"weight_layout": "split"}, "experts.w1: got no such tensor"),
    ],
    ids=str,
)
def test_refuses_another_model(make_ranks: MakeRanks, saved: Saved, changes: dict[str, Any], message: str) -> None:
    for outcome in make_ranks("shm", 2).outcomes(cases.load_then_step, saved[0], changes):
        with pytest.raises(InvalidConfig, match=message):
            raise outcome


@pytest.mark.parametrize("num_experts", [8, 6])
def test_fsdp_saves_the_global_tensors(make_ranks: MakeRanks, tmp_path: Path, num_experts: int) -> None:
    """FSDP saves global tensors, also of three experts over two ranks, for one process and for another mesh."""
    path, changes, ranks = str(tmp_path / "fsdp"), {"num_experts": num_experts}, make_ranks("shm", 4)
    saved = ranks.run(cases.save_fsdp, path, changes)[0]
    assert all(tensor.any() for tensor in saved.values())
    for got in (cases.load_fsdp(None, path, changes), *ranks.run(cases.load_fsdp, path, changes)):
        torch.testing.assert_close(got, saved, rtol=0, atol=0)
