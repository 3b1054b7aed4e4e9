"""sums="invariant" in the trainer: runs of 1, 2 and 4 ranks have the same bits, step for step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.ranks import Ranks
from train import cases_train as cases

from moe_rt.cli import main
from moe_rt.train import metrics

MakeRanks = Callable[[str, int], Ranks]
NUMBERS = ("loss", "grad_norm", "val_loss", "expert_load")  # without aux_loss, which is rounded on each rank


def numbers(out: Path) -> list[tuple[Any, ...]]:
    """Return what each row of a run's metrics says, apart from its speed."""
    return [
        (row["step"], name, row[name]) for row in metrics.read(out / "metrics.jsonl") for name in NUMBERS if name in row
    ]


def trained(make_ranks: MakeRanks, world: int, out: Path, changes: dict[str, Any]) -> list[tuple[Any, ...]]:
    given = {"sums": "invariant", "out": out, "batch_size": 8, "num_experts": 8, **changes}
    if world == 1:
        cases.run(None, given)
    else:
        make_ranks("shm", world).run(cases.run, given)
    return numbers(out)


def first_difference(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> str:
    return next((f"{one} and {other}" for one, other in zip(a, b, strict=True) if one != other), "")


def test_fifty_steps(make_ranks: MakeRanks, tmp_path: Path) -> None:
    alone = trained(make_ranks, 1, tmp_path / "1", {})
    assert len(alone) == 50 * 3 + 3
    for world in (2, 4):
        assert first_difference(trained(make_ranks, world, tmp_path / str(world), {}), alone) == ""


@pytest.mark.parametrize(
    "changes",
    [dict(tie_embeddings=True), dict(dtype="bf16"), dict(batch_size=12, seq_len=24, num_experts=7), dict(codec="int8")],
    ids=str,
)
def test_other_options(make_ranks: MakeRanks, tmp_path: Path, changes: dict[str, Any]) -> None:
    few = {"steps": 6, "val_every": 3, **changes}
    alone = trained(make_ranks, 1, tmp_path / "1", few)
    assert first_difference(trained(make_ranks, 4, tmp_path / "4", few), alone) == ""


def test_a_run_that_goes_on_with_other_ranks(make_ranks: MakeRanks, tmp_path: Path) -> None:
    """Its digests, of all ops and parameters, are those of one rank: `moe-rt diff` finds them equal."""
    few = {"steps": 6, "val_every": 3, "checkpoint_every": 3}
    alone = trained(make_ranks, 1, tmp_path / "1", few | {"digests": tmp_path / "d1"})
    trained(make_ranks, 2, tmp_path / "2", few | {"digests": tmp_path / "d2"})
    result = CliRunner().invoke(main, ["diff", str(tmp_path / "d1"), str(tmp_path / "d2")])
    assert (result.exit_code, result.output.split(":")[0]) == (0, "equal"), result.output
    shutil.rmtree(tmp_path / "2" / "checkpoints" / "step-00000006")
    assert first_difference(trained(make_ranks, 4, tmp_path / "2", few | {"resume": True}), alone) == ""


def test_other_sums_differ(make_ranks: MakeRanks, tmp_path: Path) -> None:
    few = {"steps": 2, "sums": "ranked"}
    alone = trained(make_ranks, 1, tmp_path / "1", few)
    assert first_difference(trained(make_ranks, 4, tmp_path / "4", few), alone)
