"""The serving result: a table for every load, and one line for kills."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_rt.bench.serving.results import ratio
from moe_rt.bench.table import time

COLUMNS = ("tokens/s", "prepare + finalize p50", "p90", "share of the time", "adapter's Python", "time / moe_rt")


def show_load(run: dict[str, Any]) -> RenderableType:
    table = Table(title=run["title"], title_justify="left")
    table.add_column("contestant", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("as stock's", justify="right")
    table.add_column("answers")
    for result in run["results"]:
        table.add_row(*_cells(run, result), "[bold red]WRONG" if result["errors"] else "ok")
    errors = (f"{result['contestant']}: {error}" for result in run["results"] for error in result["errors"])
    return Group(table, *(Text(error) for error in errors), Text())


def show_kills(kills: dict[str, Any]) -> RenderableType:
    times = ", ".join(f"{ms:.0f}" for ms in kills["ms"])
    return Text(
        f"from SIGKILL of a rank until all of its server's {kills['requests']} requests had ended with an HTTP error: "
        f"median {kills['median']:.0f} ms, worst {kills['worst']:.0f} ms of {len(kills['ms'])}: {times}"
    )


def _cells(run: dict[str, Any], result: dict[str, Any]) -> list[str]:
    layer, adapter, times = result.get("layer_us"), result.get("adapter_us"), ratio(run, result)
    return [
        result["contestant"],
        f"{result['tokens_per_s']:.4g}",
        time(layer["p50"]) if layer else "",
        time(layer["p90"]) if layer else "",
        f"{result['share']:.1f}%" if layer else "",
        time(adapter["p50"]) if adapter else "",
        "" if times is None else f"{times:.2f}",
        f"{result['same']} of {run['load']['ranks'] * run['load']['sequences']}",
    ]
