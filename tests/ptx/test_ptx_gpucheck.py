"""`moe-rt gpucheck --emulated`: the steps run on executed kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from device.jit_tools import require_compiler

from moe_rt.cli import main
from moe_rt.lab.check import emulated
from moe_rt.lab.check.report import EMULATED
from moe_rt.lab.check.steps import STEPS

QUICK = ("errors",)  # runs one kernel, which other tests also run
WHOLE_S = 3600.0  # limit for a hang


def rehearse(folder: Path, *steps: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the document and the page."""
    require_compiler()
    only = [word for step in steps for word in ("--only", step)]
    result = CliRunner().invoke(main, ["gpucheck", "--emulated", *only, "--report", str(folder)])
    assert result.exit_code in (0, 1), result.output
    assert EMULATED in " ".join(result.output.split())
    return result.exit_code, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


def test_a_step(tmp_path: Path) -> None:
    code, document, page = rehearse(tmp_path, *QUICK)
    found = {record["step"]: (record["result"], record["error"]) for record in document["steps"]}
    assert found == dict.fromkeys(QUICK, ("ok", ""))
    assert code == 0
    assert document["emulated"] is True
    assert document["machine"]["gpu"].startswith("none")
    assert page.startswith(f"# moe-rt gpucheck, emulated\n\n**{EMULATED}**\n")


@pytest.mark.sweep
@pytest.mark.timeout(WHOLE_S)
def test_every_step(tmp_path: Path) -> None:
    _, document, _ = rehearse(tmp_path)
    found = {record["step"]: record for record in document["steps"]}
    assert found.keys() == STEPS.keys()
    failed = {step: record["error"] for step, record in found.items() if record["result"] == "failed"}
    assert not failed
    assert {step for step, record in found.items() if record["result"] == "skipped"} == set(emulated.NOT_REHEARSED)
