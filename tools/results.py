"""Writes the documents' result tables and plot from bench/results/*/*.json, so that no figure is typed by hand.

python tools/results.py          # prints which documents differ from the files, and exits with 1 if any does
python tools/results.py --write  # makes them equal
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from moe_rt.testing.output import with_section

ROOT = Path(__file__).resolve().parents[1]
SHOWN = "epyc-zen5-4core-2026-11-22/recycle.json"  # the newest machine, with the settings that help the others most
CASES = ("pair-2x512x2048", "pair-4x512x2048", "pair-2x2048x7168", "decode-2x1x7168")
OTHERS = {"a2a": "all_to_all_single", "transformers": "AllToAllEP", "mpi": "MPI"}
NAMES = {"moe_rt": "moe_rt", **OTHERS, "memcpy": "memcpy (reference)"}
COLORS = {"moe_rt": "#1b7f5c", "memcpy": "#b0b0b0"}
MALLOC = {"recycle": "kept", "system": "as installed"}

Times = dict[str, float]  # contestant -> median of isolated iterations, us


def run_times(measured: dict[str, Any]) -> Times:
    return {result["contestant"]: result["isolated_us"]["p50"] for result in measured["results"]}


def documents(root: Path) -> dict[str, dict[str, Any]]:
    """What `moe-rt bench` said in every kept run of the exchange, by directory/file."""
    paths = sorted((*root.glob("bench/results/*/recycle.json"), *root.glob("bench/results/*/system.json")))
    return {f"{path.parent.name}/{path.name}": json.loads(path.read_text()) for path in paths}


def speedup(times: Times) -> float:
    """How many times as long as moe_rt the fastest of the others takes."""
    return min(times[name] for name in OTHERS) / times["moe_rt"]


def ms(us: float) -> str:
    """Three digits, more where there are more before the point."""
    value = float(f"{us / 1000:.3g}") if us < 1e5 else us / 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def title(case: dict[str, Any]) -> str:
    tokens = "1 token" if case["tokens"] == 1 else f"{case['tokens']} tokens"
    return f"{case['ranks']} ranks, {tokens} each, rows of {case['hidden']}, top-{case['topk']}"


def short_table(root: Path) -> str:
    """Four cases of the newest machine, and between what the ratio lies in all files."""
    lines = [
        "| Dispatch + combine in bf16, ms "
        "| moe_rt | fastest other | ratio | ratio in all runs | all_to_all_single | memcpy |",
        "|---|---|---|---|---|---|---|",
    ]
    every = [measured for document in documents(root).values() for measured in document["runs"]]
    for measured in documents(root)[SHOWN]["runs"]:
        case, times = measured["case"], run_times(measured)
        if case["name"] not in CASES:
            continue
        name = min(OTHERS, key=lambda other: times[other])
        ratios = [speedup(run_times(m)) for m in every if m["case"]["name"] == case["name"]]
        lines.append(
            f"| {title(case)} | {ms(times['moe_rt'])} | {ms(times[name])} ({OTHERS[name]}) | **{speedup(times):.1f}** "
            f"| {min(ratios):.1f} to {max(ratios):.1f} | {ms(times['a2a'])} | {ms(times['memcpy'])} |"
        )
    return "\n".join(lines)


def layer_sentence(root: Path) -> str:
    """What is left of the ratio in a whole layer, where matrix products dominate."""
    ratios, shares = [], []
    for path in sorted(root.glob("bench/results/*/layer.json")):
        for measured in json.loads(path.read_text())["runs"]:
            ratios += [phase["a2a"][kind] for phase in measured["ratios"].values() for kind in phase["a2a"]]
            shares += [phase["in_ops"] for phase in measured["moe_rt"]["share"].values()]
    return (
        f"A whole layer on CPU ranks is at parity, since matrix products dominate: with all_to_all_single it takes "
        f"{min(ratios):.2f} to\n{max(ratios):.2f} times as long as with moe_rt, which spends {min(shares):.1f} to "
        f"{max(shares):.1f} % of it in its ops (`moe-rt bench --case layer-qwen3-small`)."
    )


def long_table(root: Path) -> str:
    lines = [
        "| Machine and date | malloc | Case | " + " | ".join(NAMES.values()) + " | fastest other / moe_rt |",
        "|---|---|---|" + "---|" * (len(NAMES) + 1),
    ]
    for path, document in documents(root).items():
        directory, file = path.split("/")
        for measured in document["runs"]:
            times = run_times(measured)
            cells = " | ".join(ms(times[name]) for name in NAMES)
            lines.append(
                f"| {directory} | {MALLOC[file.removesuffix('.json')]} | `{measured['case']['name']}` | {cells} "
                f"| {speedup(times):.1f} |"
            )
    return "\n".join(lines)


def plot(root: Path) -> str:
    """Bars of time over moe_rt's time, on a logarithmic axis, as SVG; each has its time beside it."""
    runs = [m for m in documents(root)[SHOWN]["runs"] if m["case"]["name"] in CASES]
    figure = Figure(figsize=(8, 1.5 * len(runs)), layout="constrained")
    for axes, measured in zip(figure.subplots(len(runs), sharex=True), runs, strict=True):
        times = run_times(measured)
        ratios = [times[name] / times["moe_rt"] for name in NAMES]
        colors = [COLORS.get(name, "#5b7db1") for name in NAMES]
        bars = axes.barh(list(NAMES.values()), [ratio - 1 for ratio in ratios], left=1, color=colors)
        axes.bar_label(bars, [f"{ms(times[name])} ms" for name in NAMES], padding=4)
        axes.axvline(1, color=COLORS["moe_rt"])
        axes.set(xscale="log", xlim=(0.01, 1000))
        axes.set_title(title(measured["case"]), loc="left", fontsize=10)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("dispatch + combine: how many times the time of moe_rt, logarithmic", fontsize=10)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe_rt"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def times_in(svg: str) -> list[str]:
    """All that can be wrong in a plot: how the rest is drawn changes from one version of matplotlib to the next."""
    return re.findall(r">([^<>]* ms)</text>", svg)


def differs(path: Path, text: str) -> bool:
    if not path.is_file():
        return True
    there = path.read_text()
    return times_in(there) != times_in(text) if path.suffix == ".svg" else there != text


def generated(root: Path) -> dict[Path, str]:
    """Each document as the files would have it."""
    readme, long = root / "README.md", root / "bench/results/README.md"
    text = with_section(readme.read_text(), "results:table", short_table(root))
    return {
        readme: with_section(text, "results:layer", layer_sentence(root)),
        long: with_section(long.read_text(), "results:table", long_table(root)),
        root / "docs/results.svg": plot(root),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Result tables and the plot, from bench/results.")
    parser.add_argument("--write", action="store_true", help="write what differs")
    write = parser.parse_args().write
    changed = {p: text for p, text in generated(ROOT).items() if differs(p, text)}
    for path, text in changed.items():
        print(f"{path.relative_to(ROOT)} {'written' if write else 'differs from bench/results'}")
        if write:
            path.write_text(text)
    return 0 if write else bool(changed)


if __name__ == "__main__":
    sys.exit(main())
