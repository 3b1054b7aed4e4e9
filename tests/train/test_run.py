"""Whole runs from the command line: their files, their refusals, and that no rank waits for a failed one."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from rich.console import Console
from support.forked_python import commands, run_python
from torch import Tensor, nn
from train import cases_train as cases

from moe_rt import MoELayer
from moe_rt.errors import InvalidConfig, MissingPackage, MoeRtError
from moe_rt.lab.testing.ports import free_ports
from moe_rt.parallel.clip import clip_grad_norm_
from moe_rt.train import cli, loop, train
from moe_rt.train.loop import learning_rate
from moe_rt.train.metrics import Reporter

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def arguments(**changes: object) -> list[str]:
    options = {**cases.TINY, **changes}
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    return run_python(*command, env={**ENVIRONMENT, "PYTHON_EXEC": str(commands() / "python")})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("torchrun")
    result = launch(*TORCHRUN, "-m", "moe_rt.train", *arguments(out=out, steps=30, sample_bytes=20))
    assert result.returncode == 0, result.stderr
    return out, result.stdout


def test_figures_of_a_step_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the mean over bytes, and its gradients have its scale. The clock advances two seconds a step."""
    step, compared = loop.Trainer._train_step, []

    def by_hand(trainer: loop.Trainer, number: int) -> Any:
        config = trainer.config
        batch = dict(seed=config.seed, step=number, indices=trainer.rows, seq_len=config.seq_len)
        x, y = trainer.corpus.train_batch(**batch)
        out = trainer._forward(x)
        loss = F.cross_entropy(out.logits.flatten(0, 1), y.flatten())
        grads = torch.autograd.grad(loss + out.aux_loss, list(trainer.model.parameters()))
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        clock = iter([100.0, 102.0])
        with monkeypatch.context() as patch:
            patch.setattr(loop.time, "perf_counter", lambda: next(clock))
            row = step(trainer, number)
        for name, expected in {"loss": loss, "aux_loss": out.aux_loss, "grad_norm": norm}.items():
            assert row[name] == pytest.approx(expected.item(), rel=1e-4), name
        assert row["tokens_per_s"] == config.batch_size * config.seq_len / 2.0
        compared.append(number)
        return row

    monkeypatch.setattr(loop.Trainer, "_train_step", by_hand)
    train(cases.tiny(out=tmp_path, steps=2))
    assert compared == [1, 2]


def test_training_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that could not draw its curves at the end does not begin."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"training draws its curves: got no package matplotlib"):
        train(cases.tiny(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_bar_shows_no_number_before_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path / "metrics.jsonl", first_step=0, steps=2)
    assert said_by(reporter) == "training 0/2"
    reporter.validation({"step": 0, "val_loss": 5.5, "val_bpb": 8.0})
    assert said_by(reporter) == "training 0/2 val 8.000 bits/byte"
    reporter.training({"step": 1, "loss": 5.25, "tokens_per_s": 1234.5})
    assert said_by(reporter) == "training 1/2 loss 5.250 val 8.000 bits/byte 1,234 bytes/s"
    with reporter:
        pass
    again = Reporter(tmp_path / "metrics.jsonl", first_step=1, steps=2)
    assert said_by(again) == "training 1/2 loss 5.250 val 8.000 bits/byte 1,234 bytes/s"
    with again:
        pass


def said_by(reporter: Reporter) -> str:
    """Return the progress bar's words, without the bar and the time left."""
    console = Console(width=200, file=io.StringIO())
    console.print(reporter._progress.get_renderable())
    words = console.file.getvalue().split()
    return " ".join(word for word in words if word[0] not in "━╸╺-" and not re.fullmatch(r"-:--:--|\d:\d\d:\d\d", word))


def test_metrics_schema(finished: tuple[Path, str]) -> None:
    rows = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    training = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "loss" not in row]
    assert [row["step"] for row in training] == list(range(1, 31))
    assert [row["step"] for row in validation] == [0, 25, 30]
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "aux_loss", "expert_load"}
    for row in training:
        assert set(row) == keys
        assert [len(layer) for layer in row["expert_load"]] == [6, 6]
        assert [sum(layer) for layer in row["expert_load"]] == pytest.approx([1, 1])
        assert all(row[key] > 0 for key in keys - {"expert_load"})
    for row in validation:
        assert set(row) == {"step", "val_loss", "val_bpb"}
        assert row["val_bpb"] == pytest.approx(row["val_loss"] * 1.442695)
    assert training[-1]["loss"] < training[0]["loss"] - 1


def test_leaves_plots_and_text_and_says_where(finished: tuple[Path, str]) -> None:
    out, stdout = finished
    for name in ("loss.png", "expert_load.png"):
        pixels = matplotlib.image.imread(out / name)
        assert min(pixels.shape[:2]) > 300
        assert pixels.std() > 0.05, f"{name} is nearly blank"
    sample = (out / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert len(sample) > 10
    for name in ("metrics.jsonl", "loss.png", "expert_load.png", "sample.txt", "checkpoints"):
        assert str(out / name) in stdout


def test_runs_without_torchrun(tmp_path: Path) -> None:
    result = launch("-m", "moe_rt.train", *arguments(out=tmp_path, steps=2))
    assert result.returncode == 0, result.stderr
    assert "validation 8.0" in result.stdout


def test_ranks_that_cannot_be_grouped(tmp_path: Path) -> None:
    result = launch(*TORCHRUN, "-m", "moe_rt.train", *arguments(out=tmp_path / "run", ep=3))
    assert result.returncode != 0
    assert "InvalidConfig: ep: got 3, expected a divisor of the world size 2" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 36, "num_heads": 4}, "InvalidConfig: hidden: got 36, expected a multiple of 2 * num_heads = 8"),
        ({"num_topk": 7}, "InvalidConfig: num_topk: got 7, expected at most num_experts = 6"),
        ({"steps": 0}, "InvalidConfig: steps: got 0, expected at least 1"),
        ({"lr": -1.0}, "InvalidConfig: lr: got -1.0, expected above 0"),
        ({"lr": 1e30}, "got loss"),
        ({"data": "no/such/path"}, "InvalidConfig: data: got no/such/path, expected a readable file or directory"),
    ],
)
def test_bad_values(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    result = CliRunner().invoke(cli.main, arguments(out=tmp_path / "run", **changes))
    assert result.exit_code == 1
    assert message in result.output


LEAST = {
    **dict.fromkeys(("num_layers", "hidden", "num_heads", "intermediate", "num_experts", "num_topk", "seq_len"), 1),
    **dict.fromkeys(("steps", "batch_size", "val_every", "val_sequences", "checkpoint_every"), 1),
    **dict.fromkeys(("seed", "aux_loss_coef", "z_loss_coef", "warmup_steps", "weight_decay", "sample_bytes"), 0),
    **dict.fromkeys(("min_lr_ratio", "temperature"), 0),
    **dict.fromkeys(("lr", "grad_clip", "timeout_s"), 1e-9),
}
MOST = {"min_lr_ratio": 1.0, "num_topk": 6}
# Other options that these need.
WITH = {"hidden": {"hidden": 2, "num_heads": 1}, "num_experts": {"num_topk": 1}}


@pytest.mark.parametrize("name", LEAST)
def test_least_values(name: str) -> None:
    cases.tiny(**{name: LEAST[name], **WITH.get(name, {})})
    with pytest.raises(InvalidConfig, match=f"{name}: got "):
        cases.tiny(**{**WITH.get(name, {}), name: LEAST[name] - 1})


@pytest.mark.parametrize("name", MOST)
def test_largest_values(name: str) -> None:
    cases.tiny(**{name: MOST[name]})
    with pytest.raises(InvalidConfig, match=f"{name}: got "):
        cases.tiny(**{name: MOST[name] + 1})


@pytest.mark.parametrize("option", ["record_routes", "replay_routes"])
def test_routes_are_of_whole_runs(option: str) -> None:
    cases.tiny(**{option: Path("routes.npz")})
    with pytest.raises(InvalidConfig, match="resume: got True"):
        cases.tiny(**{option: Path("routes.npz")}, resume=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_options_of_the_mixtures_arrive(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    made: list[Any] = []
    monkeypatch.setattr(loop, "MoELayer", lambda config, group: made.append((config, group)))
    same = {"hidden": 24, "intermediate": 20, "num_experts": 10, "num_topk": 3, "timeout_s": 7.5}
    same |= {"aux_loss_coef": 0.25, "z_loss_coef": 0.125, "sums": "invariant"}
    ranks: Any = SimpleNamespace(share=lambda count: range(count // 3), ep_group="its group")
    loop.moe_factory(cases.tiny(**same, codec="int8", dtype=dtype, batch_size=6, seq_len=5), ranks)(0)
    ((config, group),) = made
    assert {name: getattr(config, name) for name in same} == same
    assert (config.dispatch_dtype, config.combine_dtype) == (torch.int8, torch.int8)
    assert config.dtype is (torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert (config.num_max_tokens_per_rank, group) == (10, "its group")


@pytest.mark.parametrize(("dtype", "computed"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_model_computes_in_the_type_that_was_asked_for(dtype: str, computed: torch.dtype) -> None:
    trainer: Any = object.__new__(loop.Trainer)
    trainer.config, trainer.model = cases.tiny(dtype=dtype), lambda x: (x @ x).dtype
    assert trainer._forward(torch.ones(2, 2)) is computed


def test_a_title_counts_all_experts_and_those_of_a_token() -> None:
    """It does so on every rank, which holds some of the experts."""
    trainer: Any = object.__new__(loop.Trainer)
    trainer.config = cases.tiny(hidden=128, intermediate=256, num_layers=3, num_experts=6, num_topk=2)
    layers = [object.__new__(MoELayer) for _ in range(3)]
    for layer in layers:
        nn.Module.__init__(layer)
        layer.experts = nn.Linear(128, 600, bias=False)
    trainer.model = nn.Sequential(nn.Linear(400, 300, bias=False), *layers)
    expert = 3 * 128 * 256
    total, active = (f"{(400 * 300 + 3 * n * expert) / 1e6:.2f}" for n in (6, 2))
    assert trainer._title() == f"{total} M parameters, {active} M active: 3 layers, 6 experts, top-2"


@pytest.mark.parametrize(
    ("first", "validated", "saved"),
    [(0, [0, 3, 6, 7], [2, 4, 6, 7]), (4, [6, 7], [6, 7]), (7, [], [])],
    ids=["new", "resumed", "finished"],
)
def test_what_happens_at_which_step(
    monkeypatch: pytest.MonkeyPatch, first: int, validated: list[int], saved: list[int]
) -> None:
    config = cases.tiny(
        steps=7, val_every=3, checkpoint_every=2, resume=first > 0, prompt="so ", sample_bytes=9, temperature=0.25,
        seed=5, seq_len=6,
    )  # fmt: skip
    trainer: Any = object.__new__(loop.Trainer)
    trainer.config, trainer.ranks, trainer.model, trainer.optimizer = config, SimpleNamespace(rank=1), "m", "o"
    trainer.recording = None
    found: dict[str, list[Any]] = {"validated": [], "trained": [], "saved": [], "text": [], "reported": []}
    reporter = SimpleNamespace(training=found["reported"].append)
    trainer._reporter = lambda step: contextlib.nullcontext(reporter) if step == first else pytest.fail(str(step))
    trainer._validate = lambda step, reporter: found["validated"].append(step)
    trainer._train_step = lambda step: found["trained"].append(step) or {"step": step}
    where = config.out / "checkpoints"
    monkeypatch.setattr(loop.checkpoint, "load", lambda *given: first if given == (where, "m", "o", config) else -1)
    monkeypatch.setattr(loop.checkpoint, "save", lambda *given: found["saved"].append(given))
    monkeypatch.setattr(loop, "generate", lambda forward, prompt, **given: found["text"].append((prompt, given)))
    trainer.run()
    assert found["validated"] == validated
    assert found["trained"] == list(range(first + 1, 8))
    assert found["reported"] == [{"step": step} for step in range(first + 1, 8)]
    assert found["saved"] == [(where, step, "m", "o", config) for step in saved]
    assert found["text"] == [("so ", {"num_bytes": 9, "seq_len": 6, "temperature": 0.25, "seed": 5})]


def test_a_validation_is_the_mean_over_the_bytes_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(256, (2, 2, 3), generator=generator)
    targets[0, 0, 0] = 0  # a byte like any other
    targets[1, 1, 1:] = -100  # padding
    logits = torch.randn(2, 2, 3, 256, generator=generator)
    own = sum(-logits[i].log_softmax(-1)[at][targets[i][at]] for i in (0, 1) for at in valid(targets[i]))
    monkeypatch.setattr(loop, "tree_all_reduce", lambda sums: sums[1].add_(torch.tensor([10.0, 4.0])))
    trainer: Any = object.__new__(loop.Trainer)
    trainer.config = cases.tiny()
    trainer.val_batches = [(number, targets[number]) for number in (0, 1)]
    trainer._forward = lambda number: SimpleNamespace(logits=logits[number])
    rows: list[Any] = []
    trainer._validate(7, SimpleNamespace(validation=rows.append))
    trainer._validate(8, None)
    (row,) = rows
    expected = (float(own) + 10) / (10 + 4)
    assert row == {"step": 7, "val_loss": pytest.approx(expected), "val_bpb": pytest.approx(expected / math.log(2))}


def valid(targets: Tensor) -> list[tuple[int, int]]:
    return [(i, j) for i in range(2) for j in range(3) if targets[i, j] >= 0]


class Stop(Exception):
    pass


def test_ranks_of_a_run_wait_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any) -> None:
        raise Stop(*given)

    monkeypatch.setattr(loop, "process_group", stop)
    with pytest.raises(Stop) as raised:
        train(cases.tiny(timeout_s=7.5))
    assert raised.value.args == ("cpu", 7.5)


def test_weights_are_drawn_from_the_seed_when_all_ranks_have_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    def stop(*given: Any) -> None:
        raise Stop(torch.initial_seed())

    monkeypatch.setattr(loop.data, "load", lambda *given: order.append("data"))
    monkeypatch.setattr(loop.dist, "barrier", lambda: order.append("barrier"))
    monkeypatch.setattr(loop, "Decoder", stop)
    with pytest.raises(Stop) as raised:
        train(cases.tiny(seed=5))
    assert (order, raised.value.args) == (["data", "barrier"], (5,))


@pytest.mark.parametrize("part", ["metrics.jsonl", "checkpoints"])
def test_any_part_of_an_earlier_run_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str) -> None:
    """A directory with either is not written to; to go on, neither is in the way."""

    def stop(*given: Any) -> None:
        raise Stop(*given)

    monkeypatch.setattr(loop.data, "load", stop)
    with pytest.raises(Stop):
        train(cases.tiny(out=tmp_path))
    (tmp_path / part).mkdir()
    with pytest.raises(InvalidConfig, match=r"out: got .*, which holds a run"):
        train(cases.tiny(out=tmp_path))
    with pytest.raises(Stop):
        train(cases.tiny(out=tmp_path, resume=True))


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(cli.main, arguments(out=tmp_path / "file" / "run"))
    assert result.exit_code == 1
    assert result.output.startswith("Error: NotADirectoryError: [Errno 20] Not a directory: ")


def test_an_infinite_gradient_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite gradient ends the run although the loss is finite, and no checkpoint keeps that step's weights."""

    def overflow_then_clip(model: nn.Module, max_norm: float) -> Tensor:
        next(model.parameters()).grad.fill_(math.inf)
        return clip_grad_norm_(model, max_norm)

    monkeypatch.setattr(loop, "clip_grad_norm_", overflow_then_clip)
    with pytest.raises(MoeRtError, match=r"step 1: got loss \d\S* and gradient norm inf, expected finite numbers"):
        train(cases.tiny(out=tmp_path / "run", steps=1))
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_learning_rate_warms_up_and_decays() -> None:
    config = cases.tiny(lr=1.0, min_lr_ratio=0.1, warmup_steps=10, steps=110)
    assert [learning_rate(step, config) for step in (1, 10, 60, 110)] == pytest.approx([0.1, 1.0, 0.55, 0.1])


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        pytest.param("before the forward", "rank 1 failed first: OSError: rank 1 gives up", marks=pytest.mark.sweep),
        ("before the all-reduce", "rank 1 failed first: OSError: rank 1 gives up"),
        pytest.param("killed", "PeerDead", marks=pytest.mark.sweep),
    ],
)
def test_no_rank_waits_for_a_failed_one(tmp_path: Path, how: str, cause: str) -> None:
    port = free_ports()
    script = Path(__file__).with_name("failing_rank_job.py")
    ranks = [
        subprocess.Popen(
            [commands() / "python", script, tmp_path / "run", how],
            env={
                **ENVIRONMENT,
                "PYTHONPATH": str(script.parents[1]),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": "3",
                "RANK": str(r),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(3)
    ]
    try:
        errors = [process.communicate(timeout=3000)[1] for process in ranks]  # shorter than their timeout_s
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode != 0 for process in ranks)
    for rank in (0, 2):
        assert cause in errors[rank]
