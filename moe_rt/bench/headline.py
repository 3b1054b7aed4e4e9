"""The result as one sentence per case."""

from __future__ import annotations

from typing import Any

from moe_rt.bench.cases import Case
from moe_rt.bench.table import time

BUSY = 0.5  # load average per core


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
