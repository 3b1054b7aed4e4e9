"""The report: one self-contained HTML page, and next to it the document that it was made from, a table and plots."""

from __future__ import annotations

import base64
import csv
import html
import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moe_rt.bench import plots
from moe_rt.bench.cases import Case
from moe_rt.bench.headline import headline
from moe_rt.bench.table import cells, columns, notes
from moe_rt.testing.output import make_directory, write_document

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
        plot = plots.over_tokens(runs, document["slopes"])
        parts.append(_section("Time over tokens", plot, directory / "over_tokens.svg"))
    else:
        parts.append(_section("Medians", plots.medians(runs), directory / "medians.svg"))
    parts.append("<h2>All figures</h2>")
    parts.extend(_run(run) for run in runs)
    observed = [run for run in runs if "breakdown" in run.get("moe_rt", {})]
    if observed:
        parts.append(_section("Where moe_rt's time goes", plots.breakdown(observed), directory / "breakdown.svg"))
        for number, run in enumerate(observed[-1:] if "slopes" in document else observed, start=1):
            title = f"Who waits for whom: {plots.label(run)}"
            parts.append(_section(title, plots.waits(run), directory / f"waits-{number}.svg"))
    parts.append("<h2>How it was measured</h2>")
    parts.append(_facts({SETTINGS[name]: _in_words(value) for name, value in document["settings"].items()}))
    parts.append(_facts(document["machine"]))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>moe_rt benchmark</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>moe_rt benchmark</h1>\n{body}\n</body></html>\n"
    )


def _section(title: str, figure: Figure, beside: Path) -> str:
    """Return the figure for the page, and save it as a separate scalable file."""
    figure.savefig(beside, metadata={"Date": None})
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
