"""Figures of the report."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rt.bench.cases import CASES, Case
from moe_rt.bench.table import time

matplotlib.use("agg")
matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

COLORS = {"moe_rt": "#0072b2", "a2a": "#d55e00", "transformers": "#cc79a7", "mpi": "#009e73", "memcpy": "black"}
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
PHASE_COLORS = ("#0072b2", "#bbbbbb", "#56b4e9", "#d55e00", "#dddddd", "#f0a860")


def _name(result: dict[str, Any]) -> str:
    return " ".join(filter(None, (result["contestant"], result["phase"])))


def over_tokens(runs: list[dict[str, Any]], slopes: dict[str, float]) -> Figure:
    """Isolated median over tokens, log-log, p50 to p90 shaded; the reference copy is dashed."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    tokens = [run["case"]["tokens"] for run in runs]
    for index, first in enumerate(runs[0]["results"]):
        series = [run["results"][index]["isolated_us"] for run in runs]
        style = _style(first["contestant"], index)
        slope = slopes.get(_name(first))
        text = _name(first) + (" (reference)" if first["contestant"] == "memcpy" else "")
        text += "" if slope is None else f", slope {slope:.2f}"
        axes.plot(tokens, [p["p50"] for p in series], label=text, **style)
        axes.fill_between(tokens, [p["p50"] for p in series], [p["p90"] for p in series], alpha=0.15, **_fill(style))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel(f"{runs[0]['case']['op']}, isolated: microseconds, lower is better")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def medians(runs: list[dict[str, Any]]) -> Figure:
    """One panel per case: isolated and free-running medians of every contestant, as bars from zero."""
    heights = [max(1.6, 0.45 + 0.42 * len(run["results"])) for run in runs]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    panels = figure.subplots(len(runs), squeeze=False, height_ratios=heights)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _median_bars(axes, run)
    return figure


def _median_bars(axes: Axes, run: dict[str, Any]) -> None:
    results = run["results"]
    places = np.arange(len(results))
    for offset, kind, alpha in ((-0.2, "isolated_us", 1.0), (0.2, "free_running_us", 0.45)):
        values = [result[kind]["p50"] for result in results]
        colors = [_style(result["contestant"], i)["color"] for i, result in enumerate(results)]
        axes.barh(places + offset, values, height=0.36, color=colors, alpha=alpha)
        for place, value in zip(places + offset, values, strict=True):
            axes.annotate(f" {time(value)}", (value, place), va="center", fontsize=8, bbox=BEHIND_TEXT)
    axes.set_yticks(places, [_name(result) for result in results])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda us, _: time(us) if us else "0")
    axes.set_xlabel("median time, lower is better; solid: isolated, pale: free-running")
    axes.set_title(label(run), loc="left")


def label(run: dict[str, Any]) -> str:
    """Name and sizes of a case; sizes only if the case was changed or is a point of a sweep."""
    case = Case(**run["case"])
    return f"{case.name}: {case.sizes()}" if CASES.get(case.name) == case else f"{case.op}, {case.sizes()}"


def breakdown(runs: list[dict[str, Any]]) -> Figure:
    """Time of moe_rt's pair by phase."""
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(runs)), layout="constrained")
    axes = figure.add_subplot()
    shares = [run["moe_rt"]["breakdown"] for run in runs]
    left = np.zeros(len(runs))
    for phase, color in zip(shares[0], PHASE_COLORS, strict=True):
        widths = np.array([100 * share[phase] / sum(share.values()) for share in shares])
        axes.barh(range(len(runs)), widths, left=left, label=phase, color=color)
        for place, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > 7:
                text = time(shares[place][phase])
                axes.annotate(text, (start + width / 2, place), ha="center", va="center", fontsize=7)
        left += widths
    axes.set_yticks(range(len(runs)), [label(run) for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("percent of the engine's time")
    figure.legend(ncols=6, frameon=False, loc="outside upper center")
    return figure


def waits(run: dict[str, Any]) -> Figure:
    """Matrix of the time that each rank waited for each peer; a row sums to the rank's whole wait."""
    matrices = run["moe_rt"]["waits"]
    size = len(next(iter(matrices.values())))
    side = max(2.6, 0.5 * size)
    figure = Figure(figsize=(2.4 + 2 * side, side + 0.4), layout="constrained")
    top = max(max(map(max, matrix)) for matrix in matrices.values())
    for axes, (op, matrix) in zip(figure.subplots(1, len(matrices), squeeze=False)[0], matrices.items(), strict=True):
        image = axes.imshow(matrix, cmap="Blues", vmin=0, vmax=top)
        for rank in range(size):
            for peer in range(size):
                value = matrix[rank][peer]
                color = "white" if value > top / 2 else "black"
                axes.annotate(f"{value:.3g}", (peer, rank), ha="center", va="center", color=color, fontsize=8)
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        axes.set_xlabel("peer that is waited for")
        axes.set_ylabel("rank that waits")
        axes.set_title(op)
    figure.colorbar(image, ax=figure.axes, label="microseconds")
    return figure


def _style(contestant: str, index: int) -> dict[str, Any]:
    if contestant == "memcpy":
        return {"color": COLORS["memcpy"], "linestyle": "--", "marker": ""}
    return {"color": COLORS.get(contestant, f"C{index}"), "marker": "o", "markersize": 3}


def _fill(style: dict[str, Any]) -> dict[str, Any]:
    return {"color": style["color"], "linewidth": 0}
