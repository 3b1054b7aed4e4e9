"""What is imported when: torch, which takes a second, by what needs it alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import moe_rt

LOOK = "import sys; import moe_rt, moe_rt.cli, moe_rt.nodes.cli; sys.exit('torch' in sys.modules)"
NAMES = "import moe_rt; missing = {*moe_rt.__all__} - {*dir(moe_rt)}; assert not missing, missing"


@pytest.mark.parametrize("code", [LOOK, NAMES], ids=["torch", "names"])
def test_in_a_new_process(code: str) -> None:
    """Commands that start ranks leave torch to these; a public name can be found before it has been asked for."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_public_names_and_no_others() -> None:
    assert all(getattr(moe_rt, name).__name__ == name for name in moe_rt.__all__)
    with pytest.raises(AttributeError, match="module 'moe_rt' has no attribute 'Bufer'"):
        _ = moe_rt.Bufer
