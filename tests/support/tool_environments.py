"""Environments that `make tools` makes under the running one, for tests that need other packages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python_of(kind: str, name: str, requirements: Path, tool: str) -> Path:
    """Return the interpreter of <kind>/<name>, installed from `requirements`; skip the test without it, or fail if
    tools are required."""
    home = Path(sys.prefix) / kind / name
    there = home / requirements.name  # a copy, written when the environment was complete
    if there.is_file() and there.read_text() == requirements.read_text():
        return home / "bin" / "python"
    reason = f"got no environment of {requirements.name}, expected one made by {tool}"
    if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
