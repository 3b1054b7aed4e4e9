"""The program of docs/howto/serving_sglang.md works as it is typed: SGLang on two ranks answers as on one."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "serving_sglang.md"
HANG_S = 3000.0


def test_it_answers_as_one_rank_does() -> None:
    (command,) = re.findall(r"^\.venv/serving/sglang/.*serve_sglang.*$", PAGE.read_text(), re.MULTILINE)
    python, *words = shlex.split(command)
    assert (ROOT / python).resolve() == Path(sys.executable).resolve()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["same"] == answers["of"] == 5
