"""Ops and launches receive structs by field name: each field is at its C++ offset, and none is missing."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from moe_rt import _engine

ROOT = Path(__file__).resolve().parents[2]
STRUCTS = {
    "DispatchArgs": "protocol/core/args.h",
    "ScaledArgs": "protocol/core/args.h",
    "CombineArgs": "protocol/core/args.h",
    "CombineBackwardArgs": "protocol/core/args.h",
    "EndArgs": "protocol/core/args.h",
    "SwigluArgs": "protocol/core/args.h",
    "SwigluBackwardArgs": "protocol/core/args.h",
    "Control": "gpu/exchange.h",
}
SIZES = {"Op": 4, "uint32_t": 4}  # other types have eight bytes


def fields_of(name: str) -> dict[str, int]:
    """Return field -> size, in the order of the header."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", (ROOT / "cuda" / STRUCTS[name]).read_text(), re.S)
    assert body is not None
    fields = {}
    for line in re.sub(r"//[^\n]*", "", body[1]).split(";")[:-1]:
        kind, *names = re.findall(r"[\w:*]+", line.replace("const ", ""))
        if kind in STRUCTS:  # set later, by a property
            continue
        fields.update({field.strip("*"): SIZES.get(kind, 8) for field in names if field.strip("*")})
    return fields


@pytest.mark.parametrize("name", STRUCTS)
def test_each_name_fills_its_own_field(name: str) -> None:
    sizes = fields_of(name)
    values = {field: 1 + i for i, field in enumerate(sizes)}
    args: Any = getattr(_engine, name)(**values)
    at = args.address
    for field, size in sizes.items():
        at += -at % size
        kind = ctypes.c_uint32 if size == 4 else ctypes.c_uint64
        assert kind.from_address(at).value == values[field], field
        at += size


def test_scales_are_set_later() -> None:
    """Scales follow all other fields, and are zero until set."""
    names = fields_of("ScaledArgs")
    args = _engine.DispatchArgs(**dict.fromkeys(fields_of("DispatchArgs"), 1))
    here = (ctypes.c_uint64 * len(names)).from_address(args.address + 8 * len(fields_of("DispatchArgs")))
    assert list(here) == [0] * len(names)
    args.scaled = _engine.ScaledArgs(**{field: 5 + i for i, field in enumerate(names)})
    assert list(here) == [5 + i for i in range(len(names))]


@pytest.mark.parametrize("name", STRUCTS)
def test_no_field_is_forgotten_or_made_up(name: str) -> None:
    values = dict.fromkeys(fields_of(name), 0)
    make: Any = getattr(_engine, name)
    for field in values:
        with pytest.raises(TypeError):
            make(**{other: value for other, value in values.items() if other != field})
    with pytest.raises(TypeError):
        make(**values, another=0)
    with pytest.raises(TypeError):
        make(*values.values())
