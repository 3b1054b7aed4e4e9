"""The trainer records the routes of a run, and trains with them on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks
from train import cases_train as cases

from moe_rt import routes
from moe_rt.errors import InvalidConfig
from moe_rt.train import TrainConfig, metrics

MakeRanks = Callable[[str, int], Ranks]
STEPS = dict(steps=6, val_every=3)


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in metrics.read(out / "metrics.jsonl") if "loss" in row]


def test_recorded_by_two_ranks_and_replayed(make_ranks: MakeRanks, tmp_path: Path) -> None:
    file, two = tmp_path / "routes.npz", make_ranks("shm", 2)
    plain: dict[str, Any] = {"out": tmp_path / "plain", **STEPS}
    two.run(cases.run, plain | {"record_routes": file})
    loaded = routes.load(file, num_experts=6)
    tokens = cases.TINY["batch_size"] * cases.TINY["seq_len"]
    assert (len(loaded.topk_idx), loaded.num_micro_batches, loaded.num_ranks) == (6 * tokens, 6, 2)
    again = file.with_name("again.npz")
    two.run(cases.run, {"out": tmp_path / "two", **STEPS, "replay_routes": file, "record_routes": again})
    assert losses(tmp_path / "two") == losses(tmp_path / "plain")
    assert (routes.load(again).topk_idx == loaded.topk_idx).all()
    cases.run(None, {"out": tmp_path / "one", **STEPS, "replay_routes": file, "record_routes": again})
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "plain"), rtol=1e-5)
    alone = routes.load(again)
    assert (alone.num_ranks, (alone.topk_idx == loaded.topk_idx).all()) == (1, True)


def test_a_resumed_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="resume: got True, expected a whole run"):
        TrainConfig(resume=True, record_routes=tmp_path / "a.npz")
