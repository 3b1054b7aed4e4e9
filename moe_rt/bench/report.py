"""The report: one HTML page that holds its figures, and the document it was made from."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.text import Text

from moe_rt.bench import plots
from moe_rt.bench.table import console, show_machine, show_run

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre { font-size: 12px; line-height: 1.3; overflow-x: auto; background: #f6f6f6; padding: .8rem }
img { max-width: 100% }
"""


def write_report(document: dict[str, Any], directory: Path) -> Path:
    """Writes index.html and results.json, and returns the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = directory / "index.html"
    page.write_text(_page(document), encoding="utf-8")
    return page


def _page(document: dict[str, Any]) -> str:
    runs = document["runs"]
    parts = [_text(show_machine(document["machine"])), _text(Text(str(document["settings"])))]
    if "slopes" in document:
        parts.append(_section("Time over tokens", plots.over_tokens(runs, document["slopes"])))
    else:
        parts.append(_section("Medians", plots.medians(runs)))
    observed = [run for run in runs if "breakdown" in run.get("moe_rt", {})]
    if observed:
        parts.append(_section("Where moe_rt's time goes", plots.breakdown(observed)))
        shown = observed[-1:] if "slopes" in document else observed
        parts.extend(_section(f"Who waits for whom: {run['case']['name']}", plots.waits(run)) for run in shown)
    parts.append("<h2>Tables</h2>")
    parts.extend(_text(show_run(run)) for run in runs)
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>moe_rt benchmark</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>moe_rt benchmark</h1>\n{body}\n</body></html>\n"
    )


def _section(title: str, figure: Figure) -> str:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    data = base64.b64encode(png.getvalue()).decode()
    name = html.escape(title)
    return f'<h2>{name}</h2>\n<img alt="{name}" src="data:image/png;base64,{data}">'


def _text(renderable: RenderableType) -> str:
    out = io.StringIO()
    console(file=out).print(renderable)
    return f"<pre>{html.escape(out.getvalue())}</pre>"
