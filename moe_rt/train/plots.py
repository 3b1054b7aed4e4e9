"""Draws a run's metrics: how the loss fell, and how evenly the experts were used."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from moe_rt.train import metrics

matplotlib.use("Agg")

WINDOW = 0.05  # the part of a run that curves are smoothed over and the final load is averaged over


def draw(out: Path, title: str) -> None:
    """Makes loss.png and expert_load.png in `out` from its metrics.jsonl."""
    rows = metrics.read(out / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "val_bpb" in row]
    _loss(training, validation, title).savefig(out / "loss.png", dpi=150)
    _expert_load(training, title).savefig(out / "expert_load.png", dpi=150)


def _loss(training: list[metrics.Row], validation: list[metrics.Row], title: str) -> Figure:
    steps, bits = _column(training, "step"), _column(training, "loss") / math.log(2)
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, bits, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, _smooth(bits), color="tab:blue", label="training, smoothed")
    val_steps, val_bits = _column(validation, "step"), _column(validation, "val_bpb")
    axes.plot(val_steps, val_bits, "o-", color="tab:orange", markersize=4, label="validation")
    axes.annotate(
        f"{val_bits[-1]:.2f}", (val_steps[-1], val_bits[-1]), xytext=(0, 8), textcoords="offset points", ha="center"
    )
    axes.set(xlabel="optimizer step", ylabel="loss (bits per byte)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _expert_load(training: list[metrics.Row], title: str) -> Figure:
    load = _column(training, "expert_load")  # [steps, layers, experts]
    num_layers, num_experts = load.shape[1:]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)

    final = load[-_window(len(load)) :].mean(0)
    image = left.imshow(final, cmap="viridis", aspect="auto", vmin=0, vmax=max(2 / num_experts, final.max()))
    for layer, expert in np.ndindex(*final.shape):
        # Dark cells need light text; viridis grows lighter with its value.
        color = "white" if image.norm(final[layer, expert]) < 0.6 else "black"
        left.text(expert, layer, f"{final[layer, expert]:.0%}", ha="center", va="center", color=color)
    left.set(xlabel="expert", ylabel="layer", xticks=range(num_experts), yticks=range(num_layers))
    left.set_title(f"share of routed tokens, last {_window(len(load))} steps (even: {1 / num_experts:.1%})")
    figure.colorbar(image, ax=left, format=PercentFormatter(1, decimals=0))

    for layer in range(num_layers):
        right.plot(_column(training, "step"), _smooth(load[:, layer].max(1) * num_experts), label=f"layer {layer}")
    right.axhline(1, color="black", linestyle=":", linewidth=1)
    right.set(xlabel="optimizer step", ylabel="busiest expert / mean", title="imbalance, smoothed (1: even)")
    right.set_ylim(bottom=0.9)
    right.grid(alpha=0.3)
    right.legend()
    return figure


def _column(rows: list[metrics.Row], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows])


def _window(length: int) -> int:
    return max(1, round(WINDOW * length))


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean of the latest values, of fewer where there are not yet that many."""
    sums = np.concatenate([[0.0], values.cumsum()])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - _window(len(values)))
    return (sums[end] - sums[start]) / (end - start)
