"""Instruction sets of the row primitives, for tests that run on each; one that this machine lacks is a skip."""

from __future__ import annotations

import pytest

from moe_rt import _engine

INSTRUCTION_SETS = [
    pytest.param(isa, marks=pytest.mark.skipif(isa not in _engine.isas(), reason=f"got no {isa} in this processor"))
    for isa in ("portable", "avx2", "avx512")
]
