"""Results on record: a JSON file next to a test holds what functions return for a grid of inputs.

A test compares each result with the record, and the test file, run as a program, writes the record again. Numbers may
differ in the last digits, as those of other processors do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from moe_rt.errors import MoeRtError

DIGITS = 9
LONG = 1000  # characters of a result that has one line
REL, NEAR = 1e-5, 1e-9  # by which a number may differ, relative and absolute


def results_of(makers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return all results, or the words of refusals."""
    return {name: result_of(make) for name, make in makers.items()}


def plain(value: Any) -> Any:
    """Return a value as JSON has it, numbers with `DIGITS` digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def result_of(make: Callable[[], Any]) -> Any:
    """Return a result, or the words of a refusal."""
    try:
        return plain(make())
    except MoeRtError as error:
        return f"{type(error).__name__}: {error.args[0]}"


def every(make: Callable[..., Any], *values: Any) -> list[Any]:
    """Return the results of a function for all combinations of values, or the words of its refusals."""
    return [result_of(partial(make, *given)) for given in product(*values)]


def assert_on_record(record: Path, name: str, found: Any, rel: float = REL, near: float = NEAR) -> None:
    """Compare one result with the record."""
    changed = list(_differences(json.loads(json.dumps(found)), entries(record).get(name), name, rel, near))
    assert not changed, "\n".join([*changed, "a change on purpose is recorded by running the test file"])


def entries(record: Path) -> dict[str, Any]:
    """Return all results on record, by name."""
    return dict(json.loads(record.read_text(encoding="utf-8")))


def write_record(record: Path, results: Mapping[str, Any]) -> None:
    """Write all results, one a line; of a long one, one part a line."""
    record.write_text(_lines(results, LONG) + "\n", encoding="utf-8")


def _lines(results: Mapping[str, Any], longest: float) -> str:
    texts = []
    for name, found in results.items():
        text = json.dumps(found, ensure_ascii=False)
        parts = isinstance(found, Mapping) and len(text) > longest
        texts.append(f"{json.dumps(name, ensure_ascii=False)}: {_lines(found, math.inf) if parts else text}")
    return "{\n" + ",\n".join(texts) + "\n}"


def _differences(found: Any, recorded: Any, place: str, rel: float, near: float) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(recorded, dict):
        if found.keys() == recorded.keys() and list(found) != list(recorded):
            yield f"{place}: got the order {list(found)}, on record {list(recorded)}"
        for name in found | recorded:
            if name in found and name in recorded:
                yield from _differences(found[name], recorded[name], f"{place}.{name}", rel, near)
            else:
                yield f"{place}.{name}: {'not on record' if name in found else 'only on record'}"
    elif isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        for number, part in enumerate(found):
            yield from _differences(part, recorded[number], f"{place}[{number}]", rel, near)
    elif type(found) is float and type(recorded) in (int, float):
        if not math.isclose(found, recorded, rel_tol=rel, abs_tol=near):
            yield f"{place}: got {found}, on record {recorded}"
    elif type(found) is not type(recorded) or found != recorded:
        yield f"{place}: got {found}, on record {recorded}"
