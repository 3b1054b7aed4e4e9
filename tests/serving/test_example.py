"""The example of docs/howto/serving.md works as it is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_answers_as_one_rank_does() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "serve_vllm.py"], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks answer as one does: True" in done.stdout
