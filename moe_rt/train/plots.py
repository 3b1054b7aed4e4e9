"""Plots of a run's metrics: the loss, and the balance of the experts."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from moe_rt.train import metrics

WINDOW = 0.05  # fraction of a run over which curves are smoothed and the final load is averaged
MAX_LABELLED = 16  # maximum experts that a heat map labels


def draw(out: Path, title: str, *, step_bytes: int) -> None:
    """Draw loss.png and expert_load.png in `out` from its metrics.jsonl; a step trains on `step_bytes` bytes."""
    rows = metrics.read(out / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "val_bpb" in row]
    loss = _loss(training, validation)
    loss.axes[0].set(title=title, xlabel=f"optimizer step ({step_bytes:,} bytes each)")
    loss.savefig(out / "loss.png", dpi=150)
    load = _expert_load(training)
    load.suptitle(title)
    load.savefig(out / "expert_load.png", dpi=150)


def _loss(training: list[metrics.Row], validation: list[metrics.Row]) -> Figure:
    steps, bits = _column(training, "step"), _column(training, "loss") / math.log(2)
    val_steps, val_bits = _column(validation, "step"), _column(validation, "val_bpb")
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, bits, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, _smooth(bits), color="tab:blue", label="training, smoothed")
    axes.plot(val_steps, val_bits, "o", color="tab:orange", label="validation")
    for i in (0, -1):
        point = (val_steps[i], val_bits[i])
        axes.annotate(f"{val_bits[i]:.2f}", point, (0, 9), textcoords="offset points", ha="center")
    axes.set(ylabel="loss (bits per byte)", ylim=(0, 1.1 * val_bits.max()))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _expert_load(training: list[metrics.Row]) -> Figure:
    load = _column(training, "expert_load")  # [steps, layers, experts]
    num_layers, num_experts = load.shape[1:]
    even, averaged = 1 / num_experts, _window(len(load))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)

    final = load[-averaged:].mean(0)
    colors = TwoSlopeNorm(vcenter=even, vmin=0, vmax=max(2 * even, final.max()))
    image = left.imshow(final, cmap="coolwarm", norm=colors, aspect="auto")
    if num_experts <= MAX_LABELLED:
        for (layer, expert), share in np.ndenumerate(final):
            left.text(expert, layer, f"{share:.1%}", ha="center", va="center", fontsize=9)
    left.set(xlabel="expert", ylabel="layer", title=f"share of routed tokens, last {averaged} steps (even: {even:.1%})")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(MaxNLocator(MAX_LABELLED, integer=True))
    figure.colorbar(image, ax=left, format=PercentFormatter(1, decimals=0))

    hues = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, num_layers))
    for layer in range(num_layers):
        busiest = _smooth(load[:, layer].max(1) / even)
        right.plot(_column(training, "step"), busiest, color=hues[layer], label=f"layer {layer}")
    right.axhline(1, color="black", linestyle=":", linewidth=1)
    right.set(
        xlabel="optimizer step", ylabel="load of the busiest expert / mean load", title="imbalance, smoothed (even: 1)"
    )
    right.set_ylim(bottom=0.9)
    right.grid(alpha=0.3)
    right.legend(ncols=1 + num_layers // 8, fontsize=8)
    return figure


def _column(rows: list[metrics.Row], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows])


def _window(length: int) -> int:
    return max(1, round(WINDOW * length))


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window around each value: narrow at the steep start of the curve, cut short at its end."""
    index = np.arange(len(values))
    reach = np.minimum(index, _window(len(values)) // 2)
    first, end = index - reach, np.minimum(index + reach + 1, len(values))
    sums = np.concatenate([[0.0], values.cumsum()])
    return (sums[end] - sums[first]) / (end - first)
