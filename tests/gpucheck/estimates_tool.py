"""The tool that writes estimates into docs/cuda_estimates.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def estimates_tool() -> Any:
    spec = importlib.util.spec_from_file_location("estimates_tool", ROOT / "tools/estimates.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
