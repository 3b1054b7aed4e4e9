"""Run cases in the environments that tools/install_third_party.py makes, with the real packages."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.tool_environments import ROOT, python_of

TIMEOUT_S = 3000
REAL_JOB = Path(__file__).with_name("real_job.py")


def third_party_python(name: str) -> Path:
    """Return the Python of the environment of tools/third_party/<name>.txt."""
    pins = ROOT / "tools" / "third_party" / f"{name}.txt"
    return python_of("third_party", name, pins, "tools/install_third_party.py")


def run_real(name: str, job_file: Path = REAL_JOB, **cases: tuple[Any, ...]) -> Callable[[str], Any]:
    """Run cases of real_job.py, or of another file, in that environment, each given as (case, *arguments). One process
    runs all of them, so packages are imported once.

    The returned function takes a case's name and returns its result, or fails with what it raised.
    """
    job = json.dumps([(case, arguments) for case, *arguments in cases.values()])
    command = [third_party_python(name), job_file, job]
    places = os.pathsep.join(map(str, (ROOT / "tests", job_file.parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    outcomes = dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))

    def result(of: str) -> Any:
        value, error = outcomes[of]
        assert error is None, error
        return value

    return result
