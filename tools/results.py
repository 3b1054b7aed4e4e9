"""Writes the documents' result tables, sentences and plot from bench/results/*/*.json, so no figure is typed by hand.

python tools/results.py          # prints which documents differ from the files, and exits with 1 if any does
python tools/results.py --write  # makes them equal
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from moe_rt.diagnostics.output import with_section

ROOT = Path(__file__).resolve().parents[1]
SHOWN = "epyc-zen5-4core-2026-11-22/recycle.json"  # the newest machine, with the settings that help the others most
BATCHES = ("pair-2x512x2048", "pair-4x512x2048", "pair-2x2048x7168")
ONE_TOKEN = "decode-2x1x7168"
CASES = (*BATCHES, ONE_TOKEN)
OTHERS = {"a2a": "all_to_all_single", "transformers": "AllToAllEP", "mpi": "MPI"}
NAMES = {"moe_rt": "moe_rt", **OTHERS, "memcpy": "memcpy"}
PLOTTED = {"moe_rt": "#1b7f5c", "mpi": "#5b7db1", "a2a": "#b0b0b0"}
ON_A_GPU = "bench/results/h200-2026-11-27/report.json"  # written by moe-rt gpucheck
RANKS_SHOWN = (1, 8)
MALLOC = {"recycle": "kept", "system": "as installed"}

Times = dict[str, float]  # contestant -> median of isolated iterations, us


def run_times(measured: dict[str, Any]) -> Times:
    return {result["contestant"]: result["isolated_us"]["p50"] for result in measured["results"]}


def documents(root: Path) -> dict[str, dict[str, Any]]:
    """Output of `moe-rt bench` for every kept run of the exchange, by directory/file."""
    paths = sorted((*root.glob("bench/results/*/recycle.json"), *root.glob("bench/results/*/system.json")))
    return {f"{path.parent.name}/{path.name}": json.loads(path.read_text()) for path in paths}


def shown_runs(root: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Runs of the shown file whose case is in `names`, in the order of the file."""
    return [measured for measured in documents(root)[SHOWN]["runs"] if measured["case"]["name"] in names]


def speedup(times: Times) -> float:
    """Time of the fastest other contestant divided by the time of moe_rt."""
    return min(times[name] for name in OTHERS) / times["moe_rt"]


def over_memcpy(times: Times, name: str) -> float:
    """Time of a contestant divided by the time to copy the fewest bytes that the exchange must move."""
    return times[name] / times["memcpy"]


def three_digits(value: float) -> str:
    """Format with three significant digits, and with all digits before the point."""
    value = float(f"{value:.3g}") if value < 100 else value
    return f"{value:,.0f}" if value >= 100 else f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def ms(us: float) -> str:
    return three_digits(us / 1000)


def title(case: dict[str, Any]) -> str:
    tokens = "1 token" if case["tokens"] == 1 else f"{case['tokens']} tokens"
    return f"{case['ranks']} ranks, {tokens} each, rows of {case['hidden']}, top-{case['topk']}"


def short_table(root: Path) -> str:
    """Four cases of the newest machine, with the range of the ratio over all files."""
    lines = [
        "| Dispatch + combine in bf16, ms "
        "| moe_rt | fastest other | ratio | ratio in all runs | all_to_all_single | memcpy |",
        "|---|---|---|---|---|---|---|",
    ]
    every = [measured for document in documents(root).values() for measured in document["runs"]]
    for measured in shown_runs(root, CASES):
        case, times = measured["case"], run_times(measured)
        name = min(OTHERS, key=lambda other: times[other])
        ratios = [speedup(run_times(m)) for m in every if m["case"]["name"] == case["name"]]
        lines.append(
            f"| {title(case)} | {ms(times['moe_rt'])} | {ms(times[name])} ({OTHERS[name]}) | **{speedup(times):.1f}** "
            f"| {min(ratios):.1f} to {max(ratios):.1f} | {ms(times['a2a'])} | {ms(times['memcpy'])} |"
        )
    return "\n".join(lines)


def memcpy_sentences(root: Path) -> str:
    """Distance of each plotted contestant from the memcpy, for batches and for one token."""
    batches = [run_times(measured) for measured in shown_runs(root, BATCHES)]
    (one,) = (run_times(measured) for measured in shown_runs(root, (ONE_TOKEN,)))
    ranges = {}
    for name in PLOTTED:
        ratios = [over_memcpy(times, name) for times in batches]
        ranges[name] = f"{three_digits(min(ratios))} to {three_digits(max(ratios))}"
    token = {name: three_digits(over_memcpy(one, name)) for name in PLOTTED}
    return (
        f"Batches take {ranges['moe_rt']} times as long as the memcpy with moe_rt, {ranges['mpi']} times with MPI and "
        f"{ranges['a2a']}\ntimes with torch's all_to_all_single. One token per rank is not plotted, since fixed costs "
        f"dominate: {token['moe_rt']}, {token['mpi']} and\n{token['a2a']} times its memcpy, in the same order."
    )


def layer_sentence(root: Path) -> str:
    """Ratio for a whole layer, where matrix products dominate."""
    ratios, shares = [], []
    for path in sorted(root.glob("bench/results/*/layer.json")):
        for measured in json.loads(path.read_text())["runs"]:
            ratios += [phase["a2a"][kind] for phase in measured["ratios"].values() for kind in phase["a2a"]]
            shares += [phase["in_ops"] for phase in measured["moe_rt"]["share"].values()]
    return (
        f"A whole layer on CPU ranks is at parity, since matrix products dominate. With all_to_all_single it takes "
        f"{min(ratios):.2f} to\n{max(ratios):.2f} times as long as with moe_rt, which spends {min(shares):.1f} to "
        f"{max(shares):.1f} % of it in its ops (`moe-rt bench --case layer-qwen3-small`)."
    )


def ratio_table(root: Path) -> str:
    """Speedup over the fastest other contestant: a row for each kept file, a column for each case."""
    every = documents(root)
    cases = list(
        dict.fromkeys(measured["case"]["name"] for document in every.values() for measured in document["runs"])
    )
    lines = [
        "| Machine and date | malloc | " + " | ".join(f"`{case}`" for case in cases) + " |",
        "|---|---|" + "---|" * len(cases),
    ]
    for path, document in every.items():
        directory, file = path.split("/")
        ratios = {measured["case"]["name"]: f"{speedup(run_times(measured)):.1f}" for measured in document["runs"]}
        cells = " | ".join(ratios.get(case, "") for case in cases)
        lines.append(f"| {directory} | {MALLOC[file.removesuffix('.json')]} | {cells} |")
    return "\n".join(lines)


def gpu_table(root: Path) -> str:
    """Pairs of virtual ranks on one GPU next to torch and to copies, by number of ranks and tokens.

    Ops issued one by one count only for one rank: hosts of several took longer to issue them than they ran.
    """
    steps = {step["step"]: step for step in json.loads((root / ON_A_GPU).read_text())["steps"]}
    loads = steps["loads"]["tables"][0]
    lines = [
        "| Ranks on the GPU | tokens of each | dispatch + combine | replayed in a graph | torch | copies |",
        "|---|---|---|---|---|---|",
    ]
    rows = (dict(zip(loads["columns"], row, strict=True)) for row in loads["rows"])
    for row in sorted(rows, key=lambda row: (row["ranks"], row["tokens"])):
        if row["ranks"] in RANKS_SHOWN:
            issued = three_digits(row["dispatch"] + row["combine"]) if row["ranks"] == 1 else ""
            others = map(three_digits, (row["pair in a graph"], row["torch"], row["copies"]))
            lines.append(f"| {row['ranks']} | {row['tokens']} | {issued} | {' | '.join(others)} |")
    return "\n".join(lines)


def all_times(root: Path) -> str:
    """Medians of every kept run in ms, as CSV."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["directory", "malloc", "case", *NAMES.values(), "fastest other / moe_rt"])
    for path, document in documents(root).items():
        directory, name = path.split("/")
        for measured in document["runs"]:
            times = run_times(measured)
            cells = [ms(times[contestant]).replace(",", "") for contestant in NAMES]
            table.writerow(
                [directory, name.removesuffix(".json"), measured["case"]["name"], *cells, f"{speedup(times):.1f}"]
            )
    return file.getvalue()


def plot(root: Path) -> str:
    """Bars of time divided by the memcpy's time, on a linear axis, as SVG: a group of bars for each batch."""
    runs = shown_runs(root, BATCHES)
    figure = Figure(figsize=(8, 0.5 + 1.2 * len(runs)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(PLOTTED)
    for offset, (name, color) in enumerate(PLOTTED.items()):
        ratios = [over_memcpy(run_times(measured), name) for measured in runs]
        places = [group + (offset - (len(PLOTTED) - 1) / 2) * height for group in range(len(runs))]
        bars = axes.barh(places, ratios, height=0.9 * height, color=color)
        axes.bar_label(bars, [f"{NAMES[name]}  {three_digits(ratio)}\u00d7" for ratio in ratios], padding=4)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(runs)), [title(measured["case"]).replace("each, ", "each\n") for measured in runs])
    axes.invert_yaxis()
    longest = max(over_memcpy(run_times(measured), name) for measured in runs for name in PLOTTED)
    axes.set_xlim(0, 1.4 * longest)  # space for the labels of the bars
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time of dispatch + combine, divided by a memcpy of the fewest bytes (black line)")
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe_rt"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def bars_in(svg: str) -> list[str]:
    """Labels of the bars. They depend only on results, while other markup changes with the version of matplotlib."""
    return re.findall(r">([^<>]*\u00d7)</text>", svg)


def differs(path: Path, text: str) -> bool:
    if not path.is_file():
        return True
    there = path.read_text()
    return bars_in(there) != bars_in(text) if path.suffix == ".svg" else there != text


def generated(root: Path) -> dict[Path, str]:
    """Expected text of each document, computed from the files."""
    readme, benchmarks, kept = root / "README.md", root / "docs/benchmarks.md", root / "bench/results/README.md"
    gpus = root / "docs/cuda.md"
    summary = f"{memcpy_sentences(root)}\n\n{layer_sentence(root)}"
    return {
        readme: with_section(readme.read_text(), "results:summary", summary),
        benchmarks: with_section(benchmarks.read_text(), "results:table", short_table(root)),
        kept: with_section(kept.read_text(), "results:table", ratio_table(root)),
        gpus: with_section(gpus.read_text(), "results:gpu", gpu_table(root)),
        root / "bench/results/exchange.csv": all_times(root),
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
