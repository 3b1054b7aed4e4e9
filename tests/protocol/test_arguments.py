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
    "DispatchArgs": "DISPATCH_ARGS",
    "ScaledArgs": "SCALED_ARGS",
    "CombineArgs": "COMBINE_ARGS",
    "CombineBackwardArgs": "COMBINE_BACKWARD_ARGS",
    "EndArgs": "END_ARGS",
    "SwigluArgs": "SWIGLU_ARGS",
    "SwigluBackwardArgs": "SWIGLU_BACKWARD_ARGS",
    "Control": "CONTROL",
}
SIZES = {"Op": 4, "uint32_t": 4}  # other types have eight bytes


def fields_of(name: str) -> dict[str, int]:
    """Return field -> size, in the order of the header's list."""
    text = "".join((ROOT / "cuda" / path).read_text() for path in ("protocol/core/args.h", "gpu/exchange.h"))
    (body,) = re.findall(rf"#define MOE_RT_{STRUCTS[name]}\(FIELD\)((?:.*\\\n)*.*)", text)
    return {field: SIZES.get(kind, 8) for kind, field in re.findall(r"FIELD\(([^,]+), (\w+)\)", body)}


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
