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
REL, NEAR = 1e-5, 1e-9  # by which a number may differ, relative and absolute
Results = Mapping[str, Callable[[], Any]]


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


def differences(found: Any, recorded: Any, place: str, rel: float, near: float) -> Iterator[str]:
    """Yield each place where a result is not the one on record."""
    if isinstance(found, dict) and isinstance(recorded, dict) and list(found) == list(recorded):
        for name, part in found.items():
            yield from differences(part, recorded[name], f"{place}.{name}", rel, near)
    elif isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        for number, part in enumerate(found):
            yield from differences(part, recorded[number], f"{place}[{number}]", rel, near)
    elif type(found) is float and type(recorded) in (int, float):
        if not math.isclose(found, recorded, rel_tol=rel, abs_tol=near):
            yield f"{place}: got {found}, on record {recorded}"
    elif type(found) is not type(recorded) or found != recorded:
        yield f"{place}: got {found}, on record {recorded}"


def assert_on_record(record: Path, name: str, make: Callable[[], Any], rel: float = REL, near: float = NEAR) -> None:
    """Compare one result with the record."""
    changed = list(differences(result_of(make), json.loads(record.read_text(encoding="utf-8"))[name], name, rel, near))
    assert changed == [], "a change on purpose is recorded by running the test file"


def write_record(record: Path, results: Results) -> None:
    """Write all results, one a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(result_of(make), ensure_ascii=False)}" for name, make in results.items())
    record.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
