"""Transformers' Trainer has the same losses and weights on two ranks as in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support.forked_python import commands, run_python
from support.needs_transformers import require_transformers

require_transformers()

from integrations.transformers_models import tiny_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

JOB = str(Path(__file__).with_name("transformers_trainer_job.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def train(num_ranks: int, model: Path, out: Path) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step."""
    launcher = [*TORCHRUN, str(num_ranks)] if num_ranks > 1 else []
    environment = {**os.environ, "PYTHON_EXEC": str(commands() / "python"), "PYTHONPATH": str(Path(JOB).parents[1])}
    done = run_python(*launcher, JOB, model, out, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(result.removeprefix("RESULT "))


def test_trains_as_one_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("qwen3_moe")).save_pretrained(tmp_path / "model")
    one, two = (train(ranks, tmp_path / "model", tmp_path / f"out{ranks}") for ranks in (1, 2))
    assert len(one) == 3
    for expected, got in zip(one, two, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / f"out{r}" / "final").state_dict() for r in (1, 2))
    # Adam's first steps have the size of the learning rate for any gradient, so a few weights differ more.
    for name, weight in before.items():
        assert float((after[name] - weight).norm() / weight.norm()) < 1e-3, name
