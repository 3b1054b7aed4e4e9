"""The pytest plug-in: `pytest --moe-rt-on-cpu` runs tests written for CUDA on CPU ranks."""

from __future__ import annotations

import os
from typing import Any

OPTION = "--moe-rt-on-cpu"


def pytest_addoption(parser: Any) -> None:
    """Add the option."""
    parser.addoption(OPTION, action="store_true", help="run tests written for CUDA on CPU ranks of moe_rt")


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Activate on-cpu before any conftest imports torch."""
    if OPTION in args:
        from moe_rt.lab.on_cpu import activate

        activate()


def pytest_report_header(config: Any) -> str | None:
    """Say what tests see."""
    if not os.environ.get("MOE_RT_ON_CPU"):
        return None
    from moe_rt.lab.on_cpu.hooks import which_deep_ep

    return f"moe-rt on-cpu: cuda is the CPU, nccl is gloo, deep_ep is {which_deep_ep()}"
