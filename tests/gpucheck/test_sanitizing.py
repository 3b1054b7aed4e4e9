"""The step that runs another one under compute-sanitizer: its command, and the parser of its summaries."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import CASE_TIMEOUT_S

from moe_rt.lab.check import sanitizing
from moe_rt.lab.check.steps import Check, Skipped
from moe_rt.lab.testing.rounds import WrongOutput


def test_sanitizer_summaries() -> None:
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizing.judge(clean) == "ERROR SUMMARY: 0 errors"
    raced = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert sanitizing.judge(raced).startswith("RACECHECK SUMMARY")
    with pytest.raises(WrongOutput, match="3 error"):
        sanitizing.judge("========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n")
    with pytest.raises(WrongOutput, match="no summary"):
        sanitizing.judge("killed")


@pytest.mark.parametrize("errors", [(3, 0), (0, 3), (0, 3, 0)], ids=str)
def test_errors_of_any_process_count(errors: tuple[int, ...]) -> None:
    with pytest.raises(WrongOutput, match="3 error"):
        sanitizing.judge("".join(f"========= ERROR SUMMARY: {number} errors\n" for number in errors))


def test_sanitizer_runs_the_step_under_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / sanitizing.TOOL
    tool.write_text(
        '#!/bin/sh\nwhile [ "$1" != --target-processes ]; do shift; done\nshift 2\n'
        '"$@" && echo "========= ERROR SUMMARY: 0 errors"\n'
    )
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitizing, "TOOL_S", CASE_TIMEOUT_S)
    check = Check("cpu", seconds=CASE_TIMEOUT_S)
    sanitizing.check(check)
    assert not check.failures
    assert check.details == [f"{name}: ERROR SUMMARY: 0 errors" for name in sanitizing.TOOLS]


def test_a_tool_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizing, "run_command", lambda *given: (False, "========= ERROR SUMMARY: 0 errors\n"))
    with pytest.raises(WrongOutput, match=r"got no end within 3 s; last words:\n=+ ERROR SUMMARY"):
        sanitizing.sanitize(["tool"], "cpu", 3.0)


def test_sanitizer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(Skipped, match="not on PATH"):
        sanitizing.check(Check("cuda:0"))
