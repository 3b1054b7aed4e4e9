"""`moe-rt gpucheck --emulated`: the steps run on executed kernels, and the report says that no GPU was there."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from device.jit_tools import require_compiler
from rich.console import Console, RenderableType

from moe_rt.cli import main
from moe_rt.gpucheck import emulated, run
from moe_rt.gpucheck.report import EMULATED, show, write_report
from moe_rt.gpucheck.steps import STEPS

QUICK = ("errors",)  # of one kernel that other tests run, too
WHOLE_S = 3600.0  # ends what hangs


def rehearse(folder: Path, *steps: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the document and the page."""
    require_compiler()
    only = [word for step in steps for word in ("--only", step)]
    result = CliRunner().invoke(main, ["gpucheck", "--emulated", *only, "--report", str(folder)])
    assert result.exit_code in (0, 1), result.output
    assert EMULATED in " ".join(result.output.split())
    return result.exit_code, json.loads(result.output.splitlines()[-1]), (folder / "report.md").read_text()


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


def test_a_rehearsal_says_so_everywhere(tmp_path: Path) -> None:
    """On the terminal, in the page and in the document, which on a GPU say nothing of it."""
    for told in (False, True):
        document = run.document([], {}, emulated=told)
        write_report(document, tmp_path)
        texts = [(tmp_path / "report.md").read_text(), as_text(show(document))]
        assert json.loads((tmp_path / "report.json").read_text())["emulated"] is told
        assert [EMULATED in " ".join(text.split()) for text in texts] == [told, told]
        assert ["gpucheck, emulated" in text for text in texts] == [told, told]


def as_text(shown: RenderableType) -> str:
    out = Console(width=160, file=io.StringIO())
    out.print(shown)
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_compiler()
    monkeypatch.setattr(emulated, "source_dir", lambda: tmp_path / "cuda")
    result = CliRunner().invoke(main, ["gpucheck", "--emulated"])
    assert result.exit_code == 1
    assert "expected a checkout with its tests" in result.output
    assert result.output.count("\n") == 1


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = CliRunner().invoke(main, ["gpucheck", "--emulated"])
    assert result.exit_code == 1
    assert "got no compiler no-such-compiler" in result.output
    assert result.output.count("\n") == 1


def test_emulated_compiles_for_no_gpu() -> None:
    assert CliRunner().invoke(main, ["gpucheck", "--emulated", "--compile-only", "--arch", "sm_90a"]).exit_code == 2
