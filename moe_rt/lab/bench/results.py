"""Figures from raw times: percentiles, bandwidths, ratios to moe_rt, the slope over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# Sizes of a sweep that take less than this multiple of the smallest one's time show latency, not cost per token.
ABOVE_FLOOR = 4.0


def summarise(record: dict[str, Any]) -> dict[str, Any]:
    """Return the public form of a rank's record: times in microseconds, bandwidths in GB/s of one rank."""
    results = [_result(raw, record["bytes"]) for raw in record["results"]]
    return {**record, "results": results, "ratios": _ratios(results)}


def _result(raw: dict[str, Any], num_bytes: dict[str, int]) -> dict[str, Any]:
    free_running = percentiles(raw["free_running"])
    # Backward moves as many bytes as forward.
    times_moved = 2 if raw["phase"] == "forward+backward" else 1
    per_second = times_moved / (free_running["p50"] * 1e3)
    link = {"link": raw["link"]} if "link" in raw else {}
    return {
        "contestant": raw["contestant"],
        "phase": raw["phase"],
        "isolated_us": percentiles(raw["isolated"]),
        "free_running_us": free_running,
        "logical_gbps": num_bytes["logical"] * per_second,
        "physical_gbps": num_bytes["physical"] * per_second,
        **link,
        "errors": raw["errors"],
    }


def percentiles(times: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(times, [50, 90, 99]).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "n": len(times)}


def _ratios(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """phase -> contestant -> its median time over moe_rt's: above one if moe_rt is faster. memcpy is a reference, which
    moe_rt may beat."""
    own = {result["phase"]: result for result in results if result["contestant"] == "moe_rt"}
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for result in results:
        if result["phase"] in own and result["contestant"] != "moe_rt":
            ratios.setdefault(result["phase"], {})[result["contestant"]] = {
                kind: result[f"{kind}_us"]["p50"] / own[result["phase"]][f"{kind}_us"]["p50"]
                for kind in ("isolated", "free_running")
            }
    return ratios


def slopes(runs: list[dict[str, Any]]) -> dict[str, float]:
    """contestant -> log-log slope, least squares over tokens, of its isolated median above the latency floor.

    The first run, a single token, is the floor: every other size takes that long plus the time of its tokens.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for run in runs:
        for result in run["results"]:
            name = " ".join(filter(None, (result["contestant"], result["phase"])))
            series.setdefault(name, []).append((run["case"]["tokens"], result["isolated_us"]["p50"]))
    found = {}
    for name, points in series.items():
        floor = points[0][1]
        above = [(tokens, us - floor) for tokens, us in points if us >= ABOVE_FLOOR * floor]
        if len(above) >= 2:
            tokens, us = zip(*above, strict=True)
            found[name] = float(np.polyfit(np.log(tokens), np.log(us), 1)[0])
    return found


def rounded(value: Any) -> Any:
    """Return the document with four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    return value
