"""Replay recorded runs of the trainer: predict the time of each step from its routes, next to the measured one.

    python bench/plan_replay.py --out bench/results/DIRECTORY --ranks 2 --ranks 4

A step is its MoE layers and the rest. Layers are predicted by a calibration that `moe-rt bench` makes for other numbers
of tokens, from the busiest rank in each layer of the recorded step. The rest is that of a run on one rank, which uses
all cores, for each rank's tokens. Run it on an idle machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from moe_rt import routes
from moe_rt.info import machine_card
from moe_rt.lab.bench.calibrate import machine_name, measure_with_progress, write_lines
from moe_rt.lab.bench.cases import Case
from moe_rt.plan.calibration import Library, calibrate
from moe_rt.plan.distinct import owners
from moe_rt.plan.points import Row, parse
from moe_rt.train import metrics

LAYERS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, SEQ_LEN = 4, 256, 256, 16, 2, 256
SEQUENCES = 2  # of each rank in a step
STEPS, SKIPPED = 24, 4  # the first steps fill caches and pools
ITERS = 10
CALIBRATED = (128, 256, 1024)  # tokens of a rank; the trainer's 512 are not among them
OP = "layer+backward"


def train(ranks: int, directory: Path) -> list[float]:
    """Run the trainer on this many ranks with recorded routes, and return the time of each step in us."""
    batch = SEQUENCES * ranks
    words = dict(
        out=directory, num_layers=LAYERS, hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS,
        num_topk=TOPK, seq_len=SEQ_LEN, batch_size=batch, steps=STEPS, val_sequences=batch, sample_bytes=0,
        val_every=STEPS, checkpoint_every=STEPS, record_routes=directory / "routes.npz",
    )  # fmt: skip
    options = [text for name, value in words.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([*launch, "-m", "moe_rt.train", *options], check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = [row for row in metrics.read(directory / "metrics.jsonl") if "tokens_per_s" in row]
    return [1e6 * batch * SEQ_LEN / row["tokens_per_s"] for row in rows]


def lines_of(ranks: int, tokens: tuple[int, ...]) -> list[dict[str, str]]:
    """Benchmark the trainer's layer with other numbers of tokens, even and uneven."""
    sizes = dict(ranks=ranks, hidden=HIDDEN, topk=TOPK, experts=EXPERTS, intermediate=INTERMEDIATE, dtype="fp32")
    cases = [
        Case(name="replay", op="layer", tokens=count, routing=routing, **sizes)  # type: ignore[arg-type]
        for count in tokens
        for routing in ("uniform", "lognormal:1")
    ]
    return measure_with_progress(cases, ITERS, rounds=1)


def busiest_of(recorded: routes.Routes, step: int, ranks: int) -> list[float]:
    """Return the busiest rank's rows relative to the mean, for each layer of a step."""
    ids = recorded.of(micro_batch=step).topk_idx.numpy()
    owner = owners(recorded.num_experts, ranks)
    loads = [np.bincount(owner[ids[:, layer].reshape(-1)], minlength=ranks) for layer in range(ids.shape[1])]
    return [float(load.max() / load.mean()) for load in loads]


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--ranks", "sizes", type=click.IntRange(min=2), multiple=True, default=(2, 4), show_default=True)
def main(out: Path, sizes: tuple[int, ...]) -> None:
    """Measure, predict and compare."""
    out.mkdir(parents=True, exist_ok=True)
    card, found = machine_card(), []
    with tempfile.TemporaryDirectory() as scratch:
        lines = [line for ranks in (1, *sizes) for line in lines_of(ranks, CALIBRATED)]
        write_lines(out / "replay-layers.csv", lines)
        rows = [row for row in map(parse, lines) if row.op == OP]
        library = Library(calibrate(rows, date=card["date"][:10]))
        alone = statistics.median(train(1, Path(scratch) / "1")[SKIPPED:])
        rest = alone - LAYERS * predicted(library, rows, 1, 1.0)
        for ranks in sizes:
            directory = Path(scratch) / str(ranks)
            steps = train(ranks, directory)
            recorded = routes.load(directory / "routes.npz")
            replayed = [
                ranks * rest + sum(predicted(library, rows, ranks, busy) for busy in busiest_of(recorded, step, ranks))
                for step in range(SKIPPED, STEPS)
            ]
            measured, expected = statistics.median(steps[SKIPPED:]), statistics.median(replayed)
            found.append({"ranks": ranks, "measured_us": round(measured), "replayed_us": round(expected),
                          "error": round(expected / measured - 1, 4)})  # fmt: skip
            click.echo(json.dumps(found[-1]))
    figures = {"device": machine_name(card), "date": card["date"], "rest_us": round(rest), "replays": found}
    (out / "replay.json").write_text(json.dumps(figures, indent=1) + "\n")


def predicted(library: Library, rows: list[Row], ranks: int, busiest: float) -> float:
    """Return the time of a layer's forward and backward with the trainer's tokens, in us."""
    like = next(row for row in rows if row.shape.ranks == ranks)
    shape = replace(like.shape, tokens=SEQUENCES * SEQ_LEN, busiest=busiest)
    return library.predict(like.system, OP, shape).us


if __name__ == "__main__":
    main()
