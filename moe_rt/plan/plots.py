"""Plots of a plan: time over tokens with the floor of the links, memory over EP sizes, and overflow over capacity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_rt.errors import InvalidConfig, expect
from moe_rt.extras import require
from moe_rt.plan.answers import Plan, layer_of, shape_of
from moe_rt.plan.calibration import Library
from moe_rt.plan.distinct import Array
from moe_rt.plan.routing import overflow
from moe_rt.plan.systems import gpu_of

BATCHES = tuple(2**n for n in range(0, 15))


def draw_plan(plan: Plan, shares: Array, path: Path, library: Library) -> None:
    """Draw three panels into an SVG or PNG file, by its name.

    Raises:
        MissingPackage: matplotlib is not installed.
        InvalidConfig: the name ends otherwise.
    """
    expect(path.suffix in (".svg", ".png"), "plot", path.name, "a name that ends in .svg or .png")
    require("matplotlib", "train", "--plot draws with it")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    times, memory, risk = figure.subplots(1, 3)
    _draw_times(times, plan, shares, library)
    best: dict[int, float] = {}
    for layer in plan.layers:
        size = layer.configuration.ep_size
        best[size] = min(best.get(size, np.inf), layer.memory_bytes / 1e9)
    sizes = sorted(best)
    memory.plot(sizes, [best[size] for size in sizes], marker="o")
    memory.axhline(gpu_of(plan.cluster.hardware).memory_gb, linestyle="--", color="grey", label="memory of the GPU")
    memory.set(xscale="log", xlabel="EP size", ylabel="GB of a GPU", title="weights and buffers")
    memory.legend()
    one, factors = plan.layers[0].configuration, np.linspace(1.0, 2.5, 25)
    risks = [overflow(f, one.tokens, plan.model.topk, one.ep_size, shares).probability for f in factors.tolist()]
    risk.plot(factors, np.maximum(risks, 1e-8))
    risk.set(yscale="log", xlabel="capacity_factor", ylabel="probability a step", title=f"overflow, EP {one.ep_size}")
    figure.savefig(path)


def _draw_times(axes: Any, plan: Plan, shares: Array, library: Library) -> None:
    """Draw dispatch and combine of the best configuration over tokens, their intervals, and the links' floor."""
    best = plan.layers[0].configuration
    found: dict[str, list[tuple[float, float, float, float, float]]] = {"dispatch": [], "combine": []}
    for tokens in BATCHES:
        one, system = replace(best, tokens=tokens, chunks=1), plan.cluster.system(best.mode)
        try:
            layer = layer_of(plan.model, plan.cluster, one, shares, library=library)
        except InvalidConfig:  # outside the calibrated range
            continue
        for op, estimate in (("dispatch", layer.dispatch), ("combine", layer.combine)):
            shape = shape_of(plan.model, system, op, one)
            moved = shape.to_ranks * (1 - 1 / shape.ranks) * tokens * shape.row_bytes
            floor = moved / system.gpu.link_gbs / 1e3
            found[op].append((tokens, estimate.us, estimate.p5_us, estimate.p95_us, floor))
    for op, points in found.items():
        tokens_of, us, low, high, floors = np.array(points).T
        (line,) = axes.plot(tokens_of, us, label=op)
        axes.fill_between(tokens_of, low, high, alpha=0.2, color=line.get_color())
        axes.plot(tokens_of, floors, ":", color=line.get_color(), label=f"{op}, links alone")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a GPU", ylabel="us", title=f"EP {best.ep_size}, {best.mode}")
    axes.legend()
