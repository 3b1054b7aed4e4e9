"""SGLang's own DeepEP dispatchers (normal, low latency and V2), unchanged, on two CPU ranks of moe_rt."""

from __future__ import annotations

from pathlib import Path

from support.deepep_sums import run_on_cpu


def test_sums_of_all_experts() -> None:
    run_on_cpu(Path(__file__).with_name("deepep_program.py"))
