"""Predictions as the tables and documents that other tools read, and those tables as measurements.

AIConfigurator reads `moe_a2a_perf.parquet`: one line for each backend, phase and shape, in microseconds. CollectiveX's
summary reads one JSON document for each case. Its predicted components are `derived` of no samples, and its outcome is
`invalid`, since nothing ran: no reader can take a prediction for a measurement.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moe_rt.errors import InvalidConfig, expect
from moe_rt.plan.answers import Configuration, Plan, shape_of
from moe_rt.plan.calibration import Estimate, Library, published
from moe_rt.plan.points import COLUMNS
from moe_rt.plan.systems import System

KEY = ("comm_backend", "phase", "comm_dtype", "ep_size", "node_num", "hidden_size", "topk", "num_experts", "sms")
AICONFIGURATOR = (*KEY, "num_tokens", "latency")
# AIConfigurator's backends: a word of a library's name, our mode, and the backend's name. It knows no others.
BACKENDS = (
    ("deepep", "normal", "deepep_ht"),
    ("deepep", "low_latency", "deepep_ll"),
    ("trtllm", "low_latency", "nvlink_one_sided"),
    ("trtllm", "normal", "nvlink_one_sided"),
)
OPS = ("dispatch", "combine")
COLLECTIVEX_VERSION = 1
STANDARD = {"p50": 0.0, "p90": 1.2816, "p95": 1.6449, "p99": 2.3263}  # deviations of a normal law


def ladder(most: int) -> list[int]:
    """Return the token counts of a table: powers of two up to `most`, and `most` itself."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


def predicted(plan: Plan, library: Library | None = None) -> Iterator[tuple[Configuration, System, str, Estimate]]:
    """Yield the time of each op of a plan's EP sizes, modes and payloads for token counts up to the plan's.

    Shapes that no calibration covers are left out.
    """
    known = library or published()
    kept = {(c.ep_size, c.mode, c.payload): c for c in (layer.configuration for layer in plan.layers)}
    for one in kept.values():
        system = plan.cluster.system(one.mode)
        for tokens in ladder(one.tokens):
            part = replace(one, tokens=tokens, chunks=1)
            for op in OPS:
                try:
                    estimate = known.predict(system, op, shape_of(plan.model, system, op, part))
                except InvalidConfig:
                    continue
                yield part, system, op, estimate


def aiconfigurator_lines(plan: Plan, library: Library | None = None) -> list[dict[str, Any]]:
    """Return a plan's predictions as lines of AIConfigurator's table.

    Raises:
        InvalidConfig: AIConfigurator has no backend for the plan's library.
    """
    lines = []
    for one, system, op, estimate in predicted(plan, library):
        line = {
            "comm_backend": backend_of(system),
            "phase": op,
            "comm_dtype": {"bf16": "bfloat16"}.get(one.payload, one.payload),
            "ep_size": one.ep_size,
            "node_num": math.ceil(one.ep_size / plan.cluster.domain),
            "hidden_size": plan.model.hidden,
            "topk": plan.model.topk,
            "num_experts": plan.model.experts,
            "sms": int(system.usual_sms) if one.mode == "normal" else 0,
            "num_tokens": one.tokens,
            "latency": round(estimate.us, 3),
        }
        lines.append(line)
    return lines


def backend_of(system: System) -> str:
    """Return AIConfigurator's name of a library in one of its modes.

    Raises:
        InvalidConfig: it has none.
    """
    for word, mode, backend in BACKENDS:
        if word in system.library.lower() and mode == system.mode:
            return backend
    raise InvalidConfig(f"library: got {system.library}, expected one that AIConfigurator knows: DeepEP or TRTLLM")


def write_table(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Write lines of AIConfigurator's table as .csv, or as .parquet if pyarrow is installed.

    Raises:
        InvalidConfig: the name ends otherwise, or pyarrow is missing.
    """
    expect(path.suffix in (".csv", ".parquet"), "export", path.name, "a name that ends in .csv or .parquet")
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, AICONFIGURATOR)
            writer.writeheader()
            writer.writerows(lines)
        return
    pyarrow = _pyarrow()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(lines)), path)


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read AIConfigurator's table from .csv or .parquet.

    Raises:
        InvalidConfig: a column is missing, or pyarrow is for .parquet.
    """
    if path.suffix == ".parquet":
        lines = _pyarrow().parquet.read_table(path).to_pylist()
    else:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    missing = [name for name in AICONFIGURATOR if lines and name not in lines[0]]
    expect(not missing, "columns", f"no column {', '.join(missing)}", ", ".join(AICONFIGURATOR))
    return lines


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidConfig("export: got .parquet without pyarrow, expected it installed, or .csv") from error
    return pyarrow


def measurements(lines: Iterable[dict[str, Any]], library: str, hardware: str, source: str) -> list[dict[str, str]]:
    """Return lines of AIConfigurator's table in the planner's columns, so that `moe-rt calibrate --csv` reads them."""
    made = []
    for line in lines:
        mode = "normal" if line["comm_backend"] == "deepep_ht" else "low_latency"
        nodes = int(line["node_num"])
        sms = f"; sms={int(line['sms'])}" if int(line["sms"] or 0) else ""
        dtype = {"bfloat16": "bf16", "default": ""}.get(line["comm_dtype"], line["comm_dtype"])
        values = (
            *(source, library, hardware, -(-int(line["ep_size"]) // nodes), mode, line["phase"], line["ep_size"]),
            *(line["num_tokens"], line["hidden_size"], line["topk"], line["num_experts"]),
            "bf16" if line["phase"] == "combine" else dtype,
            *(line["latency"], "", f"nodes={nodes}{sms}"),
        )
        made.append({name: str(value) for name, value in zip(COLUMNS, values, strict=True)})
    return made


def collectivex_cases(plan: Plan, library: Library | None = None) -> list[dict[str, Any]]:
    """Return a plan's predictions as CollectiveX's documents, one for each EP size, mode and payload."""
    cases: dict[tuple[int, str, str], dict[int, dict[str, Estimate]]] = {}
    for one, _, op, estimate in predicted(plan, library):
        points = cases.setdefault((one.ep_size, one.mode, one.payload), {})
        points.setdefault(one.tokens, {})[op] = estimate
    return [_case(plan, *key, points) for key, points in cases.items()]


def _case(plan: Plan, ep_size: int, mode: str, payload: str, points: dict[int, dict[str, Estimate]]) -> dict[str, Any]:
    cluster, model = plan.cluster, plan.model
    nodes = math.ceil(ep_size / cluster.domain)
    factors = {
        "backend": cluster.system(mode).library,
        "ep": ep_size,
        "experts": model.experts,
        "gpus_per_node": min(ep_size, cluster.domain),
        "hidden": model.hidden,
        "ladder": " ".join(map(str, points)),
        "mode": mode.replace("_", "-"),
        "nodes": nodes,
        "phase": "prefill" if mode == "normal" else "decode",
        "precision": payload,
        "routing": "uniform",
        "scale_up_domain": cluster.domain,
        "suite": "moe-rt-plan",
        "topk": model.topk,
        "workload": model.name,
    }
    words = ("backend", "workload", "mode", "phase", "ep", "routing", "precision")
    sku = cluster.hardware
    return {
        "version": COLLECTIVEX_VERSION,
        "record_type": "case-attempt",
        "generated_at": datetime.now(timezone.utc).isoformat(),
        "identity": {
            "attempt_ordinal": 1,
            "case_factors": {"case": factors, "sku": sku},
            "case_id": "-".join([sku, *(str(factors[word]) for word in words)]).lower().replace(" ", "-"),
        },
        "measurement": {
            "combine_dtype": "bf16",
            "dispatch_dtype": payload,
            "payload_unit": "token-rank",
            "rows": [_row(tokens, found) for tokens, found in sorted(points.items()) if len(found) == len(OPS)],
            "sampling": {"samples_per_component": 0},
        },
        "implementation": {"name": factors["backend"], "maturity": "predicted"},
        "topology": {name: factors[name] for name in ("gpus_per_node", "nodes", "scale_up_domain")},
        "outcome": {"status": "invalid", "reasons": ["predicted by moe-rt plan, not measured"]},
    }


def _row(tokens: int, found: dict[str, Estimate]) -> dict[str, Any]:
    components = {op: _component(found[op].us, found[op].p95_us) for op in OPS}
    both = (sum(found[op].us for op in OPS), sum(found[op].p95_us for op in OPS))
    return {"tokens_per_rank": tokens, "components": components | {"roundtrip": _component(*both)}}


def _component(us: float, p95_us: float) -> dict[str, Any]:
    """Return a component whose percentiles are those of the prediction: log-normal through its median and p95."""
    spread = math.log(p95_us / us) / STANDARD["p95"]
    percentiles = {name: round(us * math.exp(spread * at), 3) for name, at in STANDARD.items()}
    return {
        "availability": "derived",
        "origin": "moe-rt-plan",
        "percentiles_us": percentiles,
        "sample_count": 0,
    }


def export(plan: Plan, path: Path, library: Library | None = None) -> str:
    """Write a plan's predictions: AIConfigurator's table as .csv or .parquet, else a folder of CollectiveX documents.

    Returns:
        What was written, in words.

    Raises:
        InvalidConfig: the table has no backend for the plan's library, or pyarrow is missing for .parquet.
    """
    if path.suffix in (".csv", ".parquet"):
        lines = aiconfigurator_lines(plan, library)
        write_table(lines, path)
        return f"{path}: {len(lines)} lines of AIConfigurator's moe_a2a table"
    expect(not path.suffix, "export", path.name, "FILE.csv, FILE.parquet or a folder without a suffix")
    path.mkdir(parents=True, exist_ok=True)
    cases = collectivex_cases(plan, library)
    for case in cases:
        (path / f"{case['identity']['case_id']}.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")
    return f"{path}: {len(cases)} documents of CollectiveX"
