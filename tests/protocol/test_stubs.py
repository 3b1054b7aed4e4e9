"""The checked-in types of the compiled engine equal nanobind's output for it; `make stubs` renews them."""

from __future__ import annotations

from pathlib import Path

from nanobind.stubgen import StubGen

from moe_rt import _engine

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_those_of_the_engine() -> None:
    stubs = StubGen(_engine)
    stubs.put(_engine)
    assert (ROOT / "moe_rt/_engine.pyi").read_text() == stubs.get()
