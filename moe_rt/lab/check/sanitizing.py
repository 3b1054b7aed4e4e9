"""Run compute-sanitizer on rounds of one rank: accesses out of bounds, and races in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from moe_rt.lab.check.child import child_command, run_command
from moe_rt.lab.check.steps import Check, Skipped
from moe_rt.lab.testing.rounds import WrongOutput

TOOL, TOOL_S = "compute-sanitizer", 150.0
TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
# Every tensor is its own allocation, so an access outside of it is noticed. Only kernels that run are instrumented.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
_SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (?P<errors>\d+) errors?"),
    re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((?P<errors>\d+) errors?, \d+ warnings?\)"),
)


def check(check: Check) -> None:
    tool = find_tool()
    if tool is None:
        raise Skipped(f"{TOOL} is not on PATH; it is part of the CUDA toolkit")
    deadline = time.monotonic() + check.seconds
    for name, options in TOOLS.items():
        with check.part(name):
            seconds = max(1.0, min(TOOL_S, deadline - time.monotonic()))
            check.say(f"{name}: {sanitize([tool, '--tool', name, *options], str(check.device), seconds)}")


def find_tool() -> str | None:
    places = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in [os.environ.get("CUDA_HOME")] if home)]
    return shutil.which(TOOL, path=os.pathsep.join(places))


def sanitize(tool: list[str], device: str, seconds: float) -> str:
    """Run the quick correctness step of one rank under a tool and return the tool's summary. Virtual ranks need kernels
    that run concurrently, and a tool may run them one after another.

    Raises:
        WrongOutput: the tool found something or printed no summary, or the step failed under it.
    """
    with tempfile.TemporaryDirectory(prefix="moe_rt_gpucheck_") as folder:
        result = Path(folder, "result.json")
        command = child_command("correctness", device, quick=True, seconds=seconds, sizes=(1,), result=result)
        ended, log = run_command([*tool, "--target-processes", "all", *command], seconds, ENVIRONMENT)
        if not ended:
            raise WrongOutput(f"got no end within {seconds:.0f} s; last words:\n{log[-4000:]}")
        summary = judge(log)
        if not result.is_file() or '"result": "ok"' not in result.read_text():
            raise WrongOutput(f"the step failed under the tool, whose summary is {summary!r}:\n{log[-4000:]}")
    return summary


def judge(log: str) -> str:
    """Return the summary line of a clean run.

    Raises:
        WrongOutput: the log has no summary, or it counts errors.
    """
    found = [match for summary in _SUMMARIES for match in summary.finditer(log)]
    if not found:
        raise WrongOutput(f"got no summary of the tool, expected one:\n{log[-4000:]}")
    if any(int(match["errors"]) for match in found):
        raise WrongOutput(f"{'; '.join(match[0] for match in found)}:\n{_first_report(log)}")
    return found[-1][0]


def _first_report(log: str) -> str:
    lines = [line for line in log.splitlines() if line.startswith("=========")]
    return "\n".join(lines[:60])
