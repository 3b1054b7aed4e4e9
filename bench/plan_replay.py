"""Replay recorded runs of the trainer: predict the time of a step from its routes, next to the measured one.

    python bench/plan_replay.py --out bench/results/DIRECTORY --ranks 2 --ranks 4

A step is its MoE layers and the rest. Layers are predicted by a calibration that `moe-rt bench` makes with other
numbers of tokens, from the busiest rank in each layer of the recorded step. The rest is timed by a run whose layers
return their input: embedding, attention, head, loss, the sum of gradients over ranks, clipping, and the optimizer,
experts included. Between two uses of a layer a step touches more memory than the caches hold, so the benchmark's caches
are cold, and its memory is the system's as in the trainer. Parts that are in the directory are not measured again;
`--seconds` stops before the next part. Run it on an idle machine.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from moe_rt import routes
from moe_rt.info import machine_card
from moe_rt.lab.bench.calibrate import USUAL, cases_of, machine_name, measure_with_progress, write_lines
from moe_rt.nn.layer import MoELayer
from moe_rt.nn.router_losses import RouterAux
from moe_rt.plan.calibration import Library, calibrate
from moe_rt.plan.distinct import owners
from moe_rt.plan.points import Row, parse
from moe_rt.train import loop, metrics
from moe_rt.train.config import TrainConfig

LAYERS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, SEQ_LEN = 4, 256, 256, 16, 2, 256
SEQUENCES = 2  # of each rank in a step
STEPS, SKIPPED = 24, 4  # the first steps fill caches and pools
TURNS = 2  # runs of each kind, in turns; the least median counts, since other programs only add
ITERS = 10
CALIBRATED = (64, 256, 1024, 2048)  # tokens of a rank; the trainer's 512 are not among them
OP, LONG = "layer+backward", ("busiest", "medians_us")


def config_of(out: Path, ranks: int) -> TrainConfig:
    """Return the run on this many ranks, with as many sequences for each of them."""
    batch = SEQUENCES * ranks
    return TrainConfig(
        out=out, num_layers=LAYERS, hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, num_topk=TOPK,
        seq_len=SEQ_LEN, batch_size=batch, steps=STEPS, val_sequences=batch, sample_bytes=0, val_every=STEPS,
        checkpoint_every=STEPS,
    )  # fmt: skip


def train_here(out: Path, ranks: int, idle: bool) -> None:
    """Train as one of the ranks that torchrun started; if `idle`, with layers that return their input."""
    config = config_of(out, ranks)
    if not idle:
        return loop.train(replace(config, record_routes=out / "routes.npz"))
    MoELayer.forward = _return_input  # type: ignore[method-assign,assignment]
    return loop.train(config)


def _return_input(layer: MoELayer, x: Tensor) -> tuple[Tensor, RouterAux]:
    zero, counts = x.new_zeros(()), torch.ones(layer.config.num_experts, dtype=torch.int64)
    return x, RouterAux(zero, zero, zero, counts)


def train(ranks: int, directory: Path, idle: bool) -> list[float]:
    """Run the trainer on this many ranks, and return the time of each step in us."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = ["--worker", "--out", str(directory), "--ranks", str(ranks), *(["--idle"] if idle else [])]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([*launch, __file__, *words], check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = [row for row in metrics.read(directory / "metrics.jsonl") if "tokens_per_s" in row]
    return [1e6 * SEQUENCES * ranks * SEQ_LEN / row["tokens_per_s"] for row in rows]


def layers_of(ranks: int) -> list[dict[str, str]]:
    """Benchmark the trainer's layer with other numbers of tokens."""
    shapes = [(ranks, tokens, HIDDEN, TOPK, EXPERTS, "uniform", INTERMEDIATE) for tokens in CALIBRATED]
    cases = [replace(case, dtype="fp32") for case in cases_of(shapes, ("layer",))]
    return measure_with_progress(cases, ITERS, TURNS, replace(USUAL, malloc="system", cold=True))


def busiest_of(recorded: routes.Routes, step: int, ranks: int) -> list[float]:
    """Return the busiest rank's rows relative to the mean, for each layer of a step."""
    ids = recorded.of(micro_batch=step).topk_idx.numpy()
    owner = owners(recorded.num_experts, ranks)
    loads = [np.bincount(owner[ids[:, layer].reshape(-1)], minlength=ranks) for layer in range(ids.shape[1])]
    return [float(load.max() / load.mean()) for load in loads]


def measured(out: Path, ranks: int) -> dict[str, Any]:
    """Measure steps with and without layers on this many ranks, and return their medians in us with the loads."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(TURNS):
            for idle in times:
                steps = train(ranks, Path(scratch) / f"{turn}-{idle}", idle)
                times[idle].append(statistics.median(steps[SKIPPED:]))
        recorded = routes.load(Path(scratch) / "0-False" / "routes.npz")  # equal seeds, so equal routes
    busiest = [busiest_of(recorded, step, ranks) for step in range(SKIPPED, STEPS)]
    rest_us, measured_us = round(min(times[True])), round(min(times[False]))
    return {
        "ranks": ranks, "measured_us": measured_us, "rest_us": rest_us, "busiest": np.round(busiest, 3).tolist(),
        "medians_us": {"rest": np.round(times[True]).tolist(), "steps": np.round(times[False]).tolist()},
    }  # fmt: skip


def replayed(part: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Return a measured run with the time that routes, layers and the rest predict for its median step."""
    ranks = part["ranks"]
    like = next(row for row in rows if row.shape.ranks == ranks)
    library = Library(calibrate([row for row in rows if row.shape.ranks == ranks], date="replayed"))

    def layer(busiest: float) -> float:
        shape = replace(like.shape, tokens=SEQUENCES * SEQ_LEN, busiest=busiest)
        return library.predict(like.system, OP, shape).us

    layers = statistics.median(sum(map(layer, step)) for step in part["busiest"])
    expected = part["rest_us"] + layers
    found = {"layers_us": round(layers), "replayed_us": round(expected)}
    return part | found | {"error": round(expected / part["measured_us"] - 1, 4)}


def _kept(path: Path) -> Any:
    """Return what an earlier call measured; None if it did not."""
    if not path.exists():
        return None
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--ranks", "sizes", type=click.IntRange(min=1), multiple=True, default=(2, 4), show_default=True)
@click.option("--seconds", default=200.0, show_default=True, help="Time after which nothing new is measured.")
@click.option("--worker", is_flag=True, hidden=True)
@click.option("--idle", is_flag=True, hidden=True)
def main(out: Path, sizes: tuple[int, ...], seconds: float, worker: bool, idle: bool) -> None:
    """Measure, predict and compare."""
    if worker:
        return train_here(out, sizes[0], idle)
    out.mkdir(parents=True, exist_ok=True)
    ends, card, found = time.monotonic() + seconds, machine_card(), []
    for ranks in sizes:
        table, run = out / f"replay-layers-{ranks}.csv", out / f"replay-{ranks}.json"
        if not table.exists() and time.monotonic() < ends:
            write_lines(table, layers_of(ranks))
        if not run.exists() and time.monotonic() < ends:
            run.write_text(json.dumps(measured(out, ranks)) + "\n")
        lines, part = _kept(table), _kept(run)
        if lines is None or part is None:
            return click.echo(f"{ranks} ranks: not all is measured; run it again")
        found.append(replayed(part, [row for row in map(parse, lines) if row.op == OP]))
        click.echo(json.dumps({name: value for name, value in found[-1].items() if name not in LONG}))
    kept = [{name: value for name, value in one.items() if name not in LONG} for one in found]
    figures = {"device": machine_name(card), "date": card["date"], "replays": kept}
    (out / "replay.json").write_text(json.dumps(figures, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
