"""The loss curve does not depend on the distribution of experts, and equals training without moe_rt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks
from train import cases_train as cases
from train.dense_moe import DenseMoE

from moe_rt.train import metrics, train

MakeRanks = Callable[[str, int], Ranks]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    config = cases.tiny(out=tmp_path_factory.mktemp("dense"))
    train(config, make_moe=lambda layer: DenseMoE(config))
    return metrics.read(config.out / "metrics.jsonl")


def check(rows: list[Row], reference: list[Row]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in reference]
    for key in ("loss", "aux_loss", "grad_norm", "lr", "val_loss", "val_bpb"):
        got, expected = ([row[key] for row in some if key in row] for some in (rows, reference))
        assert len(expected) >= 3
        np.testing.assert_allclose(got, expected, rtol=1e-4, err_msg=key)


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1)])
def test_equals_dense_loop(make_ranks: MakeRanks, tmp_path: Path, reference: list[Row], world: int, ep: int) -> None:
    changes = {"out": tmp_path, "ep": ep}
    if world == 1:
        cases.run(None, changes)
    else:
        make_ranks("shm", world).run(cases.run, changes)
    check(metrics.read(tmp_path / "metrics.jsonl"), reference)


def test_bf16_follows_fp32(make_ranks: MakeRanks, tmp_path: Path, reference: list[Row]) -> None:
    make_ranks("shm", 2).run(cases.run, {"out": tmp_path, "dtype": "bf16"})
    got, expected = (
        [row["loss"] for row in rows if "loss" in row] for rows in (metrics.read(tmp_path / "metrics.jsonl"), reference)
    )
    np.testing.assert_allclose(got, expected, rtol=0.02)


def end_of_training(make_ranks: MakeRanks, out: Path, codec: str) -> tuple[float, float]:
    """Return the mean loss of the last 20 of 200 steps in bf16, and the validation loss."""
    changes = {"out": out, "dtype": "bf16", "steps": 200, "val_every": 200, "codec": codec}
    make_ranks("shm", 2).run(cases.run, changes)
    rows = metrics.read(out / "metrics.jsonl")
    last = [row["loss"] for row in rows if "loss" in row][-20:]
    return sum(last) / len(last), [row["val_loss"] for row in rows if "val_loss" in row][-1]


@pytest.fixture(scope="module")
def uncoded_end(make_ranks: MakeRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    return end_of_training(make_ranks, tmp_path_factory.mktemp("uncoded"), "raw")


@pytest.mark.sweep
@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_coded_rows_train_as_well(
    make_ranks: MakeRanks, tmp_path: Path, uncoded_end: tuple[float, float], codec: str
) -> None:
    """The final loss is within 1 % of the loss with rows sent as bf16."""
    np.testing.assert_allclose(end_of_training(make_ranks, tmp_path, codec), uncoded_end, rtol=0.01)


def test_loss_falls(reference: list[Row]) -> None:
    val_bpb = [row["val_bpb"] for row in reference if "val_bpb" in row]
    assert val_bpb[0] == pytest.approx(8, abs=0.1)
    assert val_bpb[-1] < 5.5


def test_initial_weights_do_not_depend_on_ranks(make_ranks: MakeRanks) -> None:
    alone = cases.initial_weights(None)
    spread = make_ranks("shm", 4).run(cases.initial_weights)
    assert set().union(*spread) == set(alone)
    for weights in spread:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, alone[name], err_msg=name)


def test_router_losses_are_trained_on(tmp_path: Path) -> None:
    busiest = []
    for coef in (0.0, 1.0):
        config = cases.tiny(out=tmp_path / str(coef), aux_loss_coef=coef)
        train(config)
        rows = [row for row in metrics.read(config.out / "metrics.jsonl") if "loss" in row]
        busiest.append(np.mean([np.max(row["expert_load"]) for row in rows[-10:]]))
    assert busiest[1] < 0.8 * busiest[0]
