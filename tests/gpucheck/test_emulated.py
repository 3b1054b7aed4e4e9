"""`moe-rt gpucheck --emulated` reports that it ran without a GPU. tests/ptx runs the steps."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from device.jit_tools import require_compiler
from rich.console import Console, RenderableType

from moe_rt.cli import main
from moe_rt.lab.check import emulated, run
from moe_rt.lab.check.report import EMULATED, show, write_report


def test_a_rehearsal_says_so_everywhere(tmp_path: Path) -> None:
    """The terminal, the page and the document all say so; with a GPU none does."""
    for expected in (False, True):
        document = run.document([], {}, emulated=expected)
        write_report(document, tmp_path)
        texts = [(tmp_path / "report.md").read_text(), as_text(show(document))]
        assert json.loads((tmp_path / "report.json").read_text())["emulated"] is expected
        assert [EMULATED in " ".join(text.split()) for text in texts] == [expected, expected]
        assert ["gpucheck, emulated" in text for text in texts] == [expected, expected]


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
