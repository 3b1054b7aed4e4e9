"""The result as a table and as one sentence for every case."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_rt.lab.bench.cases import Case

COLUMNS = ("isolated p50", "p90", "p99", "free-running p50", "GB/s logical", "GB/s physical", "time / moe_rt")
LINK_COLUMNS = ("MB sent", "by formula", "time / least")  # for ranks on several nodes
BUSY = 0.5  # load average per core


def show_machine(card: dict[str, Any]) -> RenderableType:
    return Text.assemble(*(part for name, value in card.items() for part in ((name, "bold"), f" {value}  ")))


def show_run(run: dict[str, Any]) -> RenderableType:
    """Show one case: times of the contestants, moe_rt's own observations, and the absent contestants with reasons."""
    table = Table(title=Case(**run["case"]).title(), title_justify="left")
    table.add_column("contestant", no_wrap=True)
    for column in columns(run):
        table.add_column(column, justify="right")
    table.add_column("output")
    for result in run["results"]:
        table.add_row(*cells(run, result), "[bold red]WRONG" if result["errors"] else "ok")
    return Group(table, *(Text(line) for line in notes(run)), Text())


def cells(run: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Cells of a contestant's row, its name first."""
    isolated, free = result["isolated_us"], result["free_running_us"]
    ratio = run["ratios"].get(result["phase"], {}).get(result["contestant"])
    return [
        f"{result['contestant']} {result['phase']}".rstrip(),
        *(time(isolated[p]) for p in ("p50", "p90", "p99")),
        time(free["p50"]),
        f"{result['logical_gbps']:.2f}",
        f"{result['physical_gbps']:.2f}",
        "" if ratio is None else f"{ratio['isolated']:.2f}",
        *_link_cells(run, result),
    ]


def columns(run: dict[str, Any]) -> tuple[str, ...]:
    return COLUMNS + LINK_COLUMNS if "least_us" in run else COLUMNS


def _link_cells(run: dict[str, Any], result: dict[str, Any]) -> list[str]:
    if "link" not in result:
        return []
    sent, formula, least = result["link"]["sent"], result["link"]["formula"], run["least_us"]
    return [
        f"{fmean(sent) / 1e6:.4g}",
        "" if formula is None else f"{fmean(formula) / 1e6:.4g}",
        "" if least is None else f"{result['isolated_us']['p50'] / least:.2f}",
    ]


def notes(run: dict[str, Any]) -> list[str]:
    """Lines below a case's table."""
    moved = ", ".join(f"{name} {number / 1e6:.4g} MB" for name, number in run["bytes"].items())
    lines = [f"{run['device']}; per rank: {moved}"]
    if any(result["contestant"] == "memcpy" for result in run["results"]):
        lines.append("memcpy is a reference and no contestant: each rank copies as many bytes within its own memory")
    if "least_us" in run:
        lines.append(
            "MB sent: a node's in an iteration, at its interface, mean over nodes; by formula: without headers"
        )
        lines.append(f"a message takes {time(run['round_trip_us'])} there and back between two nodes over plain TCP")
    if run.get("least_us") is not None:
        lines.append(f"least: {time(run['least_us'])}, the links' time for each token's row once per remote node")
    own = run.get("moe_rt")
    if own is not None:
        route = f", route {own['route']}" if run["case"].get("nodes") else ""
        lines.append(f"moe_rt: {own['heap_bytes'] / 1e6:.4g} MB of symmetric memory per rank{route}")
        lines.extend(_own_lines(own))
    lines.extend(f"{name} is absent: {why}" for name, why in run["absent"].items())
    lines.extend(f"{result['contestant']}: {error}" for result in run["results"] for error in result["errors"])
    return lines


def _own_lines(own: dict[str, Any]) -> list[str]:
    lines = []
    if "breakdown" in own:
        lines.append("breakdown: " + ", ".join(f"{phase} {time(us)}" for phase, us in own["breakdown"].items()))
        known = [ns for rank in own["line_latency_ns"] for ns in rank if ns > 0] or [0.0]
        lines.append(f"a line that a peer has just written takes {min(known):.0f} to {max(known):.0f} ns to read")
        lines.append("added by Python: " + ", ".join(f"{op} {time(us)}" for op, us in own["overhead"].items()))
    for phase, share in own.get("share", {}).items():
        text = f"{share['in_ops']:.1f}% of the time in moe_rt's ops, {share['of_it_waiting']:.1f}% waiting for peers"
        lines.append(f"{phase}: {text}")
    return lines


def headline(document: dict[str, Any]) -> list[str]:
    """One sentence per case, or for the first and last case of a sweep, and one if the machine had other work."""
    runs, machine = document["runs"], document["machine"]
    said = [sentence(run) for run in (runs[:: max(1, len(runs) - 1)] if "slopes" in document else runs)]
    if machine["load_average"] > BUSY * machine["cores"]:
        load = f"a load average of {machine['load_average']:.3g} on {machine['cores']} cores"
        said.append(f"The machine had other work when this began, {load}, and the times are no measure of it.")
    return said


def sentence(run: dict[str, Any]) -> str:
    """State the case's time with moe_rt and the ratios of the others, for its last phase if it has several."""
    case = Case(**run["case"])
    what = case.in_words()[0].upper() + case.in_words()[1:]
    if wrong := sorted({result["contestant"] for result in run["results"] if result["errors"]}):
        return f"{what} had a wrong output with {', '.join(wrong)}: its times mean nothing."
    own = [result for result in run["results"] if result["contestant"] == "moe_rt"]
    if not own:
        return f"{what} was measured without moe_rt."
    phase, us = own[-1]["phase"], own[-1]["isolated_us"]["p50"]
    ratios = {name: both["isolated"] for name, both in run["ratios"].get(phase, {}).items()}
    copy = ratios.pop("memcpy", None)
    parts = [f"{'take' if case.op == 'pair' else 'takes'} {time(us)} with moe_rt{f', {phase}' if phase else ''}"]
    parts += [f"{ratio:.3g} times as long with {name}" for name, ratio in sorted(ratios.items(), key=lambda r: r[1])]
    said = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    reference = "" if copy is None else f"; a plain copy of as many bytes takes {copy:.3g} times as long"
    return f"{what} {said}{reference}."


def time(us: float) -> str:
    """Format a time with three digits and a unit."""
    for limit, divisor, unit in ((999.5, 1, "us"), (999.5e3, 1e3, "ms")):  # above, three digits round to 1000
        if us < limit:
            return f"{us / divisor:.3g} {unit}"
    return f"{us / 1e6:.3g} s"
