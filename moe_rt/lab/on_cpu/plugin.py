"""The pytest plug-in: `pytest -p moe_rt.lab.on_cpu.plugin` runs tests written for CUDA on CPU ranks."""

from __future__ import annotations

from typing import Any

from moe_rt.lab.on_cpu.hooks import activate, which_deep_ep


def pytest_load_initial_conftests(early_config: Any) -> None:
    """Activate on-cpu before any conftest imports torch."""
    activate()


def pytest_report_header(config: Any) -> str:
    """Say what tests see."""
    return f"moe-rt on-cpu: cuda is the CPU, nccl is gloo, deep_ep is {which_deep_ep()}"
