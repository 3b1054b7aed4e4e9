"""Each option of `moe-rt train` reaches its field, and each value that cannot be is refused with what was expected."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from moe_rt.errors import InvalidConfig
from moe_rt.train import cli
from moe_rt.train.config import TrainConfig

# Another value of each option, and how a command line has it.
OTHERS: dict[str, tuple[Any, str]] = {
    "out": (Path("a/b"), "a/b"),
    "data": (Path("c"), "c"),
    "resume": (True, ""),
    "seed": (7, "7"),
    "num_layers": (3, "3"),
    "hidden": (64, "64"),
    "num_heads": (8, "8"),
    "intermediate": (33, "33"),
    "num_experts": (16, "16"),
    "num_topk": (1, "1"),
    "seq_len": (31, "31"),
    "tie_embeddings": (True, ""),
    "aux_loss_coef": (0.5, "0.5"),
    "z_loss_coef": (0.25, "0.25"),
    "dtype": ("bf16", "bf16"),
    "codec": ("fp8", "fp8"),
    "sums": ("invariant", "invariant"),
    "device": ("cuda", "cuda"),
    "ep": (2, "2"),
    "timeout_s": (7.5, "7.5"),
    "steps": (10, "10"),
    "batch_size": (12, "12"),
    "lr": (0.125, "0.125"),
    "min_lr_ratio": (0.75, "0.75"),
    "warmup_steps": (4, "4"),
    "weight_decay": (0.5, "0.5"),
    "grad_clip": (2.0, "2"),
    "val_every": (9, "9"),
    "val_sequences": (17, "17"),
    "checkpoint_every": (8, "8"),
    "record_routes": (Path("r.npz"), "r.npz"),
    "replay_routes": (Path("p.npz"), "p.npz"),
    "digests": (Path("d"), "d"),
    "prompt": ("class ", "class "),
    "sample_bytes": (40, "40"),
    "temperature": (1.5, "1.5"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden": 12}, "got 12, expected a multiple of 2 * num_heads = 8"),
    "num_topk": ({"num_topk": 9}, "got 9, expected at most num_experts = 8"),
    "min_lr_ratio": ({"min_lr_ratio": -0.5}, "got -0.5, expected between 0 and 1"),
    "temperature": ({"temperature": -0.5}, "got -0.5, expected at least 0"),
    "dtype": ({"dtype": "fp16"}, 'got fp16, expected "fp32" or "bf16"'),
    "device": ({"device": "tpu"}, 'got tpu, expected "cpu" or "cuda"'),
    "codec": ({"codec": "fp4"}, 'got fp4, expected "raw", "fp8" or "int8"'),
    "sums": ({"sums": "any"}, "got any, expected one of ('ranked', 'invariant')"),
    "resume": (
        {"resume": True, "record_routes": Path("r")},
        "got True, expected a whole run, whose routes are recorded or replayed",
    ),
    "prompt": ({"prompt": ""}, "got , expected at least one character"),
    "steps": ({"steps": 0}, "got 0, expected at least 1"),
    "seed": ({"seed": -1}, "got -1, expected at least 0"),
    "lr": ({"lr": 0.0}, "got 0.0, expected above 0"),
}


def given(*arguments: str) -> TrainConfig:
    """Return the options of the run that a command line starts."""
    started: list[TrainConfig] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "train", started.append)
        result = CliRunner().invoke(cli.main, list(arguments))
    assert (result.exit_code, result.output) == (0, "")
    return started[0]


def test_every_option_reaches_its_field() -> None:
    """One at a time, so that none reaches another's."""
    assert OTHERS.keys() == {field.name for field in fields(TrainConfig)}
    usual = TrainConfig()
    assert given() == usual
    for name, (value, text) in OTHERS.items():
        flag = f"--{name.replace('_', '-')}"
        assert value != getattr(usual, name)
        assert given(*([flag] if value is True else [flag, text])) == replace(usual, **{name: value}), name


def test_the_help_has_every_option_with_its_default() -> None:
    text = " ".join(CliRunner().invoke(cli.main, ["--help"], terminal_width=2000).output.split())
    for field in fields(TrainConfig):
        assert f" --{field.name.replace('_', '-')} " in text
    assert "Decoder blocks. [default: 4]" in text
    assert "--dtype [fp32|bf16] Type of computation; parameters are always fp32. [default: fp32]" in text
    assert "--out PATH Directory for metrics, plots, text sample and checkpoints. [default: runs/train]" in text


@pytest.mark.parametrize(
    ("arguments", "threads"), [("", 2), ("--sums=invariant", 1), ("--sums=invariant --device=cuda", 2)]
)
def test_invariant_sums_on_cpus_get_one_thread(monkeypatch: pytest.MonkeyPatch, arguments: str, threads: int) -> None:
    """A single rank has as many threads as the machine has cores, with which products are refused."""
    seen: list[int] = []
    monkeypatch.setattr(cli, "train", lambda config: seen.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(2)
        CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    finally:
        torch.set_num_threads(1)
    assert seen == [threads]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_came_and_what_was_expected(name: str) -> None:
    changes, says = REFUSED[name]
    with pytest.raises(InvalidConfig) as raised:
        TrainConfig(**changes)
    assert str(raised.value).startswith(f"{name}: {says} (moe-rt docs")


@pytest.mark.parametrize(
    ("error", "says"),
    [(InvalidConfig("steps: got 0"), "Error: InvalidConfig: steps: got 0 (moe-rt docs errors#invalidconfig)\n"),
     (OSError(28, "No space left on device"), "Error: OSError: [Errno 28] No space left on device\n")],
)  # fmt: skip
def test_a_run_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def fail(config: TrainConfig) -> None:
        raise error

    monkeypatch.setattr(cli, "train", fail)
    result = CliRunner().invoke(cli.main, [])
    assert (result.exit_code, result.output) == (1, says)
    assert isinstance(result.exception, SystemExit)


def test_a_record_is_plain_json() -> None:
    record = TrainConfig(data=Path("c"), lr=0.5).record()
    assert json.loads(json.dumps(record)) == record
    assert (record["out"], record["data"], record["lr"], record["ep"]) == ("runs/train", "c", 0.5, None)
    assert record.keys() == OTHERS.keys()


def test_one_expert_parallel_group_spans_all_ranks_by_default() -> None:
    assert TrainConfig(batch_size=8).check_world(4) == 4
    assert TrainConfig(batch_size=8, ep=2).check_world(4) == 2
    for ep in (-1, 0, 3, 8):
        with pytest.raises(InvalidConfig, match=f"ep: got {ep}, expected a divisor of the world size 4"):
            TrainConfig(batch_size=8, ep=ep).check_world(4)
