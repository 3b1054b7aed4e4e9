"""The report: one self-contained HTML page, and next to it the document that it was made from, a table and plots."""

from __future__ import annotations

import base64
import csv
import html
import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rt.diagnostics.output import make_directory, write_document
from moe_rt.lab.bench.cases import CASES, Case
from moe_rt.lab.bench.table import cells, columns, headline, notes, time

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
    axes.set_xticks(tokens, [str(t) for t in tokens])
    of = f"{runs[0]['case']['op']}, isolated: microseconds, lower is better"
    axes.set(yscale="log", xlabel="tokens per rank", ylabel=of)
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
    axes.margins(x=0.15)
    axes.set(xlim=(0, None), xlabel="median time, lower is better; solid: isolated, pale: free-running")
    axes.xaxis.set_major_formatter(lambda us, _: time(us) if us else "0")
    axes.invert_yaxis()
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
    axes.set(xlim=(0, 100), xlabel="percent of the engine's time")
    axes.invert_yaxis()
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
        ticks = range(size)
        axes.set(xticks=ticks, yticks=ticks, xlabel="peer that is waited for", ylabel="rank that waits", title=op)
    figure.colorbar(image, ax=figure.axes, label="microseconds")
    return figure


def _style(contestant: str, index: int) -> dict[str, Any]:
    if contestant == "memcpy":
        return {"color": COLORS["memcpy"], "linestyle": "--", "marker": ""}
    return {"color": COLORS.get(contestant, f"C{index}"), "marker": "o", "markersize": 3}


def _fill(style: dict[str, Any]) -> dict[str, Any]:
    return {"color": style["color"], "linewidth": 0}


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
.headline { font-size: 1.25rem }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 1rem }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child, .facts td { text-align: left }
.wrong { color: #b00; font-weight: bold }
.notes { font-size: 13px; color: #555 }
img { max-width: 100% }
"""
# Labels of the fields of run.Settings, and of the launcher.
SETTINGS = {
    "contestants": "contestants",
    "iters": "iterations",
    "warmup": "untimed iterations first",
    "seed": "seed of inputs and routing",
    "malloc": "freed memory",
    "cold": "caches filled with other data before each isolated iteration",
    "started_by": "ranks started by",
}


def write_report(document: dict[str, Any], directory: Path) -> Path:
    """Write results.json and, made from it, results.csv, the plots as SVG and index.html; return the path of the
    page."""
    make_directory(directory)
    write_document(document, directory / "results.json")
    with (directory / "results.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(table(document["runs"]))
    page = directory / "index.html"
    page.write_text(_page(document, directory), encoding="utf-8")
    return page


def table(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """A header, and a row for each run and contestant: the case's fields, then the measurements."""
    times = [(kind, part) for kind in ("isolated_us", "free_running_us") for part in ("p50", "p90", "p99")]
    rates = ["logical_gbps", "physical_gbps"]
    head = [*runs[0]["case"], "contestant", "phase", *(f"{kind}_{part}" for kind, part in times), *rates, "output"]
    rows = [
        [*run["case"].values(), result["contestant"], result["phase"]]
        + [result[kind].get(part) for kind, part in times]
        + [*(result[rate] for rate in rates), "wrong" if result["errors"] else "ok"]
        for run in runs
        for result in run["results"]
    ]
    return [head, *rows]


def _page(document: dict[str, Any], directory: Path) -> str:
    runs = document["runs"]
    parts = [f'<p class="headline">{html.escape(text)}</p>' for text in headline(document)]
    if "slopes" in document:
        plot = over_tokens(runs, document["slopes"])
        parts.append(_section("Time over tokens", plot, directory / "over_tokens.svg"))
    else:
        parts.append(_section("Medians", medians(runs), directory / "medians.svg"))
    parts.append("<h2>All figures</h2>")
    parts.extend(_run(run) for run in runs)
    observed = [run for run in runs if "breakdown" in run.get("moe_rt", {})]
    if observed:
        parts.append(_section("Where moe_rt's time goes", breakdown(observed), directory / "breakdown.svg"))
        for number, run in enumerate(observed[-1:] if "slopes" in document else observed, start=1):
            title = f"Who waits for whom: {label(run)}"
            parts.append(_section(title, waits(run), directory / f"waits-{number}.svg"))
    parts.append("<h2>How it was measured</h2>")
    parts.append(_facts({SETTINGS[name]: _in_words(value) for name, value in document["settings"].items()}))
    parts.append(_facts(document["machine"]))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>moe_rt benchmark</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>moe_rt benchmark</h1>\n{body}\n</body></html>\n"
    )


def _section(title: str, figure: Figure, image: Path) -> str:
    """Return the figure for the page, and save it as a separate scalable file."""
    figure.savefig(image, metadata={"Date": None})
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    data = base64.b64encode(png.getvalue()).decode()
    name = html.escape(title)
    return f'<h2>{name}</h2>\n<img alt="{name}" src="data:image/png;base64,{data}">'


def _run(run: dict[str, Any]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("contestant", *columns(run), "output"))
    rows = "\n".join(f"<tr>{_row(cells(run, result))}{_verdict(result)}</tr>" for result in run["results"])
    said = "<br>".join(html.escape(text) for text in notes(run))
    title = html.escape(Case(**run["case"]).title())
    return f'<h3>{title}</h3>\n<table><tr>{head}</tr>\n{rows}</table>\n<p class="notes">{said}</p>'


def _verdict(result: dict[str, Any]) -> str:
    return '<td class="wrong">WRONG</td>' if result["errors"] else "<td>ok</td>"


def _facts(facts: dict[str, Any]) -> str:
    rows = "\n".join(f"<tr>{_row([name, str(value)])}</tr>" for name, value in facts.items())
    return f'<table class="facts">{rows}</table>'


def _row(texts: list[str]) -> str:
    return "".join(f"<td>{html.escape(text)}</td>" for text in texts)


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "200 of small ops, 20 of large ones"
    return ", ".join(value) if isinstance(value, (list, tuple)) else str(value)
