"""Show the result as tables on the terminal, and write report.json and report.md to a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from moe_rt.diagnostics.output import write_document

EMULATED = "EMULATED: no GPU was there; compiled kernels were executed on the CPU, and no time below is one of a GPU."
_STYLES = {"ok": "green", "skipped": "yellow", "failed": "bold red"}


def show(document: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [Text(EMULATED, "bold red")] if document["emulated"] else []
    parts += [Text(f"{name} {value}") for name, value in document["machine"].items()]
    summary = Table("step", "result", "seconds", "detail", title=_title(document), title_justify="left")
    for record in document["steps"]:
        style = _STYLES[record["result"]]
        summary.add_row(
            record["step"], Text(record["result"], style), f"{record['seconds']:.1f}", escape(record["detail"])
        )
    parts.append(summary)
    for record in document["steps"]:
        parts.extend(_table(table) for table in record["tables"])
        if record["error"]:
            parts.append(Text(f"{record['step']}: {record['error']}", "red"))
    return Group(*parts)


def _title(document: dict[str, Any]) -> str:
    return "gpucheck, emulated" if document["emulated"] else "gpucheck"


def _table(found: dict[str, Any]) -> RenderableType:
    table = Table(*found["columns"], title=found["title"], caption=found["note"] or None, title_justify="left")
    for cells in found["rows"]:
        table.add_row(*(escape(str(cell)) for cell in cells))
    return table


def write_report(document: dict[str, Any], directory: Path) -> Path:
    """Write both files and return the path of the page."""
    write_document(document, directory / "report.json")
    page = directory / "report.md"
    page.write_text(markdown(document))
    return page


def short(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the results of the steps and where the rest is, for the last line of a long output."""
    results = {record["step"]: record["result"] for record in document["steps"]}
    return {"ok": document["ok"], "emulated": document["emulated"], "steps": results, "report": str(directory)}


def markdown(document: dict[str, Any]) -> str:
    summary = {
        "title": "Steps",
        "columns": ["step", "result", "seconds", "detail"],
        "rows": [[r["step"], r["result"], f"{r['seconds']:.1f}", r["detail"]] for r in document["steps"]],
        "note": "",
    }
    machine = {"title": "Machine", "columns": ["what", "value"], "rows": list(document["machine"].items()), "note": ""}
    parts = [f"# moe-rt {_title(document)}", *([f"**{EMULATED}**"] if document["emulated"] else [])]
    parts += [f"`{document['command']}`", _markdown_table(summary), _markdown_table(machine)]
    for record in document["steps"]:
        parts += [_markdown_table(table) for table in record["tables"]]
        if record["error"]:
            parts.append(f"## {record['step']} failed\n\n~~~text\n{record['error']}\n~~~")
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: dict[str, Any]) -> str:
    lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    rows = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
    note = f"\n\n{table['note']}" if table["note"] else ""
    return f"## {table['title']}\n\n{rows}{note}"
