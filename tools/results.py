"""Writes the documents' result tables and plot from bench/results/*/*.json, so that no figure is typed by hand.

python tools/results.py          # prints which documents differ from the files, and exits with 1 if any does
python tools/results.py --write  # makes them equal
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

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
    value = us / 1000
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
    """Bars of time over moe_rt's time, on a logarithmic axis, as SVG."""
    runs = [m for m in documents(root)[SHOWN]["runs"] if m["case"]["name"] in CASES]
    left, width, bar, top = 170, 520, 15, 44
    low, high = -1.5, 2.5  # powers of ten

    def x(ratio: float) -> float:
        return left + width * (math.log10(ratio) - low) / (high - low)

    def text(at_x: float, at_y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'

    height = top + len(runs) * (bar * len(NAMES) + 34) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="760" height="{height}" fill="white"/>',
        text(left, 16, "Dispatch + combine: how many times the time of moe_rt (logarithmic)", weight="bold"),
    ]
    for ratio in (0.1, 1, 10, 100):
        parts.append(f'<line x1="{x(ratio):.1f}" x2="{x(ratio):.1f}" y1="36" y2="{height - 8}" stroke="#dddddd"/>')
        parts.append(text(x(ratio), 31, f"{ratio:g}", "middle"))
    y = float(top)
    for measured in runs:
        times = run_times(measured)
        parts.append(text(left, y + 12, title(measured["case"]), weight="bold"))
        y += 18
        for name, label in NAMES.items():
            ratio = times[name] / times["moe_rt"]
            parts.append(text(left - 8, y + 11, label, "end"))
            begin, end = sorted((x(1), x(ratio)))
            parts.append(
                f'<rect x="{begin:.1f}" y="{y + 1:.1f}" width="{max(end - begin, 2):.1f}" height="{bar - 3}" '
                f'fill="{COLORS.get(name, "#5b7db1")}"/>'
            )
            faster = ratio < 1
            parts.append(
                text(x(ratio) + (-5 if faster else 5), y + 11, f"{ms(times[name])} ms", "end" if faster else "start")
            )
            y += bar
        y += 16
    return "\n".join((*parts, "</svg>", ""))


def between(text: str, name: str, new: str) -> str:
    """`text` with `new` between the comments results:NAME:begin and results:NAME:end."""
    begin, end = f"<!-- results:{name}:begin -->\n\n", f"\n\n<!-- results:{name}:end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"no {begin.strip()} with its end")
    return f"{before}{begin}{new}{end}{after}"


def generated(root: Path) -> dict[Path, str]:
    """Each document as the files would have it."""
    readme, long = root / "README.md", root / "bench/results/README.md"
    text = between(readme.read_text(), "table", short_table(root))
    return {
        readme: between(text, "layer", layer_sentence(root)),
        long: between(long.read_text(), "table", long_table(root)),
        root / "docs/results.svg": plot(root),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Result tables and the plot, from bench/results.")
    parser.add_argument("--write", action="store_true", help="write what differs")
    write = parser.parse_args().write
    changed = {p: text for p, text in generated(ROOT).items() if not p.is_file() or p.read_text() != text}
    for path, text in changed.items():
        print(f"{path.relative_to(ROOT)} {'written' if write else 'differs from bench/results'}")
        if write:
            path.write_text(text)
    return 0 if write else bool(changed)


if __name__ == "__main__":
    sys.exit(main())
