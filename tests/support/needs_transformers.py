"""Skip tests if Transformers or what it needs is missing, unless every tool is required."""

from __future__ import annotations

import importlib.util
import os

import pytest


def require_transformers() -> None:
    """Call this before importing what imports transformers."""
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if not missing:
        return
    reason = f"needs {' and '.join(missing)} (pip install '.[transformers]')"
    if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)
