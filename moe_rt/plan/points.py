"""Shapes of many ops as arrays, and the reading of measurements from CSV."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from moe_rt.config.tuning import Tuning
from moe_rt.errors import InvalidConfig, expect
from moe_rt.plan.distinct import Array, distinct, distinct_balanced, distinct_limited
from moe_rt.plan.systems import System, known_dtype, row_bytes, system_of

COLUMNS = (
    *("source", "library", "hardware", "nvlink_domain", "mode", "op", "ep_size", "tokens_per_rank", "hidden", "topk"),
    *("experts", "dtype", "latency_us", "bandwidth_gbs", "notes"),
)
MODES = ("low_latency", "normal", "raw_alltoall", "copies")
MODE_NAMES = (("low|ll$|decode", "low_latency"), ("normal|high|ht$|prefill", "normal"), ("raw", "raw_alltoall"))
OP_NAMES = (
    (r"pair|both|total|round.?trip|dispatch ?[+&] ?combine", "pair"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
)
MOST_LOW_LATENCY = 256  # tokens up to which a row of no mode is guessed to be of low latency
APART = 2.0  # factor by which a time with a shared cache differs from one without, at most
OPS = ("dispatch", "combine", "pair", "layer")  # pair is dispatch and combine; +backward may follow


@dataclass(frozen=True)
class Shape:
    """Sizes of one op.

    Attributes:
        ranks, nodes, domain: ranks of the group, domains of fast links that it spans, and ranks in a domain.
        row_bytes: bytes of a row as it crosses a link, scales included.
        sms: SMs that the op may use; 0 if the algorithm chooses.
        sms_of_gpu: all SMs of the GPU.
        to_ranks, to_nodes: mean distinct ranks and domains that a token visits, its own included.
        busiest: rows of the busiest rank relative to the mean.
        intermediate: inner size of the experts that an op includes; 0 for an exchange.
    """

    tokens: float
    hidden: float
    topk: float
    experts: float
    ranks: float
    nodes: float
    domain: float
    row_bytes: float
    sms: float
    sms_of_gpu: float
    to_ranks: float
    to_nodes: float
    busiest: float = 1.0
    intermediate: float = 0.0


@dataclass(frozen=True)
class Points:
    """The fields of many shapes, each as an array of one length."""

    tokens: Array
    hidden: Array
    topk: Array
    experts: Array
    ranks: Array
    nodes: Array
    domain: Array
    row_bytes: Array
    sms: Array
    sms_of_gpu: Array
    to_ranks: Array
    to_nodes: Array
    busiest: Array
    intermediate: Array

    @classmethod
    def of(cls, shapes: Iterable[Shape]) -> Points:
        """Gather shapes into arrays."""
        rows = list(shapes)
        return cls(**{f.name: np.array([getattr(row, f.name) for row in rows], float) for f in fields(cls)})

    def at(self, chosen: Array | Sequence[int]) -> Points:
        """Return the chosen points, by mask or by numbers."""
        return Points(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def features(self) -> Array:
        """Return what makes shapes similar, [points, features], in powers of two."""
        columns = (self.tokens, self.row_bytes, self.topk, self.experts, self.ranks, self.sms)
        return np.log2(np.maximum(np.stack(columns, axis=1), 0.5))


@dataclass(frozen=True)
class Row:
    """One measurement of a published or own table, with the system that it belongs to.

    Attributes:
        line_ns: time in which a CPU rank read a cache line that a peer had just written; 0 if it was not measured.
    """

    source: str
    system: System
    op: str
    shape: Shape
    latency_us: float
    line_ns: float = 0.0


def least(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each shape, with the least of its times.

    Other programs, and other virtual machines that share memory, only add. The cores of a virtual machine share a cache
    at some times and not at others, which makes small ops slower and large ones faster, by less than a factor of 2. So
    only times with a shared cache count, if a shape has any that others did not disturb more than that; between nodes,
    where TCP takes most of the time, all count.
    """
    groups: dict[tuple[str, str, Shape], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.system.key, row.op, row.shape), []).append(row)
    return [min(_near(group), key=lambda row: row.latency_us) for group in groups.values()]


def _near(group: list[Row]) -> list[Row]:
    """Return the times of a shape that count."""
    most_us = APART * min(row.latency_us for row in group)
    near = [row for row in group if row.line_ns <= Tuning().near_ns and row.latency_us < most_us]
    return near if near and group[0].shape.nodes == 1 else group


def read_rows(path: Path, guess: bool = False) -> tuple[list[tuple[int, Row]], list[tuple[int, str]]]:
    """Read a table of measurements.

    Args:
        guess: True to guess unknown GPUs, modes and types, as `parse` does.

    Returns:
        (line, row) for each row that can be understood, and (line, reason) for each other one.

    Raises:
        InvalidConfig: the file lacks a column.
    """
    rows: list[tuple[int, Row]] = []
    refused: list[tuple[int, str]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        expect(not missing, str(path), f"no column {', '.join(missing)}", f"the columns {', '.join(COLUMNS)}")
        for number, fields_of in enumerate(reader, 2):
            try:
                rows.append((number, parse(fields_of, guess)))
            except InvalidConfig as error:
                refused.append((number, error.args[0]))
    return rows, refused


def parse(fields_of: Mapping[str, str | None], guess: bool = False) -> Row:
    """Return one measurement from the fields of a line.

    Libraries test with the sizes that replace empty ones: 128 tokens (low latency) or 4096 (normal), 7168 elements,
    and 8 of 256 experts.

    Args:
        guess: True to guess what else is unknown: the GPU (`gpu_of`), the mode by the number of tokens, one domain of
            ranks, and bf16 rows.

    Raises:
        InvalidConfig: a field is missing, negative or senseless; names the field, what was got and what is expected.
    """
    text = {name: (fields_of.get(name) or "").strip() for name in COLUMNS}
    text["mode"] = _known(text["mode"], MODE_NAMES)
    if guess and text["mode"] not in MODES:
        text["mode"] = "low_latency" if _number(text, "tokens_per_rank", 128.0) <= MOST_LOW_LATENCY else "normal"
    expect(text["mode"] in MODES, "mode", text["mode"] or "nothing", f"one of {MODES}")
    usual = 72.0 if re.search("NVL72|GB[23]00", text["hardware"]) else 8.0
    domain = _number(text, "nvlink_domain", usual)
    system = system_of(text["library"], text["hardware"], text["mode"], domain, guess)
    ranks = _number(text, "ep_size", domain if guess else None)
    if guess and not known_dtype(text["dtype"]):
        text["dtype"] = "bf16"
    if text["mode"] == "raw_alltoall":
        found = re.search(r"(\d+) bytes per pair", text["notes"])
        size = float(found[1]) if found else 0.0
        shape = Shape(1, size, 1, ranks, ranks, 1, ranks, size, 0, system.sms, ranks, 1)
        return Row(text["source"], system, "alltoall", shape, _number(text, "latency_us"))
    op = _known(text["op"], OP_NAMES)
    if text["mode"] == "copies" and text["op"].removesuffix("+backward") in OPS:
        op = text["op"]
    fits = op in OPS[:3] or text["mode"] == "copies"
    expect(fits and bool(op), "op", text["op"] or "nothing", "dispatch, combine or pair")
    shape = _shape(text | {"op": op}, system, ranks)
    line = re.search(r"\bline (\d+) ns", text["notes"])
    return Row(text["source"], system, op, shape, _latency(text, shape), float(line[1]) if line else 0.0)


def _known(name: str, names: Sequence[tuple[str, str]]) -> str:
    """Return the project's word for one that a table uses; the word itself if no pattern matches."""
    return next((word for pattern, word in names if re.match(pattern, name.lower())), name)


def _shape(text: Mapping[str, str], system: System, ranks: float) -> Shape:
    tokens = _number(text, "tokens_per_rank", 128.0 if text["mode"] == "low_latency" else 4096.0)
    hidden, topk = _number(text, "hidden", 7168.0), _number(text, "topk", 8.0)
    experts = max(ranks, _number(text, "experts", 256.0))  # a rank without an expert has a copy of one
    nodes = _note(text["notes"], "nodes", max(1.0, math.ceil(ranks / system.domain)))
    domain = max(1.0, ranks / nodes)
    units, whole = (int(experts), int(topk)), int(ranks)
    to_nodes, to_ranks = distinct(int(nodes), *units), distinct(whole, *units)
    if "round-robin" in text["notes"] or "trtllm" in text["library"].lower():  # as its benchmark routes
        to_ranks = float(distinct_balanced(whole, int(topk)))
    groups = re.search(r"group-limited top-min\(nodes,(\d+)\)", text["notes"])
    if groups and nodes > 1:
        kept = min(int(nodes), int(groups[1]))
        to_nodes = distinct_limited(int(nodes), *units, int(nodes), kept)
        to_ranks = distinct_limited(whole, *units, int(nodes), kept)
    return Shape(
        tokens=tokens,
        hidden=hidden,
        topk=topk,
        experts=experts,
        ranks=ranks,
        nodes=nodes,
        domain=domain,
        row_bytes=row_bytes(system, "dispatch" if text["op"] == "pair" else text["op"], text["dtype"], hidden),
        sms=_note(text["notes"], "sms", _counted_sms(text["notes"], system.usual_sms)),
        sms_of_gpu=system.sms,
        to_ranks=_note(text["notes"], "to_ranks", to_ranks),
        to_nodes=to_nodes,
        busiest=_note(text["notes"], "busiest", 1.0),
        intermediate=_note(text["notes"], "intermediate", 0.0),
    )


def _latency(text: Mapping[str, str], shape: Shape) -> float:
    """Return the time; where a table has only a bandwidth, from the logical bytes that such tables count."""
    if text["latency_us"] or not text["bandwidth_gbs"]:
        return _number(text, "latency_us")
    expect(text["op"] != "pair", "latency_us", "nothing for a pair", "a time: bandwidths count the bytes of one op")
    visits = shape.to_nodes if shape.nodes > 1 else shape.to_ranks
    rows = shape.topk if text["mode"] == "low_latency" else visits
    return shape.tokens * rows * shape.row_bytes / _number(text, "bandwidth_gbs") / 1e3


def _note(notes: str, name: str, otherwise: float) -> float:
    found = re.search(rf"\b{name}=(\d+(?:\.\d+)?)", notes)
    return float(found[1]) if found else otherwise


def _counted_sms(notes: str, otherwise: float) -> float:
    found = re.search(r"\b(\d+) ?SMs?\b", notes)
    return float(found[1]) if found else otherwise


def _number(text: Mapping[str, str], name: str, otherwise: float | None = None) -> float:
    given = text[name]
    if not given and otherwise is not None:
        return otherwise
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    expect(math.isfinite(value) and value > 0, name, given or "nothing", "a positive number")
    return value
