"""Run each step in its own process, so that a crash or a hang ends one step. Run as a module, this is such a
process."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_rt.group.thread_ranks import ENVIRONMENT
from moe_rt.lab.check import emulated
from moe_rt.lab.check.steps import STEPS, Check, Step, perform
from moe_rt.lab.testing.programs import Program, end_with_starter, running, wait

# A process that still runs _LAST_WORDS_S before its limit dumps its threads' stacks. The step itself has twice that
# less than the limit.
_LAST_WORDS_S, _LOG_CHARS = 3.0, 6000


def run_in_child(step: Step, check: Check, keep: Path | None = None) -> dict[str, Any]:
    """Run a step in its own process and return its record. Findings made before a crash or a hang are kept.

    While the step runs they are in a directory in `keep`, where they stay if this process is killed.
    """
    with tempfile.TemporaryDirectory(prefix=f"unfinished_{step.name}_", dir=keep) as folder:
        result = Path(folder, "result.json")
        command = child_command(
            step.name,
            str(check.device),
            quick=check.quick,
            seconds=check.seconds,
            sizes=check.sizes,
            result=result,
            nproc=check.nproc,
        )
        ended, log = run_command(command, check.seconds, ENVIRONMENT if step.virtual else {})
        record = json.loads(result.read_text()) if result.is_file() else check.record(step.name, "running", 0.0)
    if record["result"] == "running":
        why = "the process ended" if ended else f"no end within {check.seconds:.0f} s"
        record.update(result="failed", error=f"{record['error']}\n{why}; it wrote\n{log[-_LOG_CHARS:]}".strip())
    return record


def child_command(
    step: str,
    device: str,
    *,
    quick: bool,
    seconds: float,
    sizes: tuple[int, ...] | None,
    result: Path,
    nproc: int = 1,
) -> list[str]:
    job = {"step": step, "device": device, "quick": quick, "seconds": seconds, "sizes": sizes, "result": str(result)}
    job["nproc"] = nproc
    return [sys.executable, "-m", "moe_rt.lab.check.child", json.dumps(job)]


def run_command(command: list[str], seconds: float, environment: Mapping[str, str]) -> tuple[bool, str]:
    """Run a command, and kill it with all its children when its time is over.

    Returns:
        True if it ended by itself, and its output.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with running([Program(command, environment, log, subprocess.STDOUT)]) as (process,):
            ended = wait(process, seconds) is not None
        log.seek(0)
        return ended, log.read()


def main(job: dict[str, Any]) -> None:
    import torch

    end_with_starter()
    result, step = Path(job["result"]), STEPS[job["step"]]
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, job["seconds"] - _LAST_WORDS_S))
    device = job["device"]
    if device == emulated.DEVICE:
        device = emulated.prepare(step.name)
    elif torch.cuda.is_available():
        torch.cuda.set_device(device)

    def save(record: dict[str, Any]) -> None:
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        partial.replace(result)

    sizes = tuple(job["sizes"]) if job["sizes"] else None
    check = Check(device, job["quick"], job["seconds"] - 2 * _LAST_WORDS_S, sizes, job["nproc"])
    check.save = lambda found: save(found.record(step.name, "running", 0.0))
    save(perform(step, check))
    faulthandler.cancel_dump_traceback_later()
    # Threads that never ended, and the device resources they hold, must not keep the process alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
