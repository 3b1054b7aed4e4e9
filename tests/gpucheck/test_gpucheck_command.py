"""The commands gpucheck and compile reach what runs with all their options, refuse contradictions, and show results."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from moe_rt.cli import main
from moe_rt.engine.gpu import driver, nvrtc
from moe_rt.errors import CompileError, InvalidConfig
from moe_rt.lab.check import child, compiling, emulated, run
from moe_rt.lab.check.report import markdown, show, write_report
from moe_rt.lab.check.steps import STEPS, Check

DONE = {"step": "layer", "result": "ok", "seconds": 1.0, "detail": "fine", "error": "", "tables": []}


def call(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [command, *arguments])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return runs that the command starts; none of them runs a step."""
    made: list[Any] = []

    class Recorded(run.Run):
        def run(self, names: Any) -> list[dict[str, Any]]:
            made.append((self, names))
            return [DONE]

    monkeypatch.setattr(run, "Run", Recorded)
    monkeypatch.setattr(run, "gpu_card", lambda device, nproc: {"gpu": f"{nproc} of {device}"})
    monkeypatch.setattr(emulated, "tests_directory", lambda: Path("tests"))
    monkeypatch.setattr(run, "machine_card", lambda: {"date": "today"})
    return made


def fields_of(made: run.Run) -> dict[str, Any]:
    names = ("device", "quick", "sizes", "nproc", "budget_s", "patience", "num_jobs", "skipped")
    return {name: getattr(made, name) for name in names}


def test_options_reach_the_run(runs: list[Any], tmp_path: Path) -> None:
    plain = {"device": "cuda:0", "quick": False, "sizes": None, "nproc": 1, "budget_s": 470.0, "patience": 1,
             "num_jobs": 4, "skipped": {}}  # fmt: skip
    chosen = ["--device", "cuda:3", "--quick", "--sizes", "1,16", "--nproc", "3", "--budget", "1"]
    rehearsed = {**plain, "device": "emulated", "quick": True, "nproc": 2, "budget_s": 9400.0, "patience": 20,
                 "num_jobs": 1, "skipped": emulated.NOT_REHEARSED}  # fmt: skip
    expected: list[tuple[list[str], dict[str, Any]]] = [
        ([], plain),
        (chosen, {**plain, "device": "cuda:3", "quick": True, "sizes": (1, 16), "nproc": 3, "budget_s": 1.0}),
        (["--emulated"], rehearsed),
        (["--emulated", "--nproc", "4", "--budget", "7"], {**rehearsed, "nproc": 4, "budget_s": 7.0}),
    ]
    for arguments, fields in expected:
        result = call("gpucheck", *arguments, "--only", "timing", "--only", "layer", "--report", str(tmp_path))
        assert result.exit_code == 0, result.output
        made, names = runs.pop()
        assert fields_of(made) == fields
        assert names == ("timing", "layer")
        assert made.perform.func is child.run_in_child
        assert made.perform.keywords == {"keep": tmp_path}
    assert call("gpucheck").exit_code == 0
    assert runs.pop()[1] == tuple(STEPS)


def test_each_step_that_ends_is_saved(runs: list[Any], tmp_path: Path) -> None:
    """The saved document names the GPU, and says whether there was one."""
    for arguments, gpu in ((["--nproc", "2"], "2 of cuda:0"), (["--emulated"], emulated.CARD["gpu"])):
        assert call("gpucheck", *arguments, "--report", str(tmp_path)).exit_code == 0
        made, _ = runs.pop()
        assert not list(tmp_path.iterdir())
        made.save([DONE])
        document = json.loads((tmp_path / "report.json").read_text())
        assert (document["steps"], document["machine"]["gpu"]) == ([DONE], gpu)
        assert document["emulated"] == (arguments == ["--emulated"])
        for file in tmp_path.iterdir():
            file.unlink()
    call("gpucheck")
    runs.pop()[0].save([DONE])
    assert not list(tmp_path.iterdir())


def test_the_last_line_is_the_result(runs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all of the document, or with a report its short form; the tables come before."""
    monkeypatch.setattr(sys, "argv", ["moe-rt", "gpucheck", "--quick"])
    for emulates in (False, True):
        result = call("gpucheck", *(["--emulated"] if emulates else []))
        *_, last = result.stdout.splitlines()
        document = json.loads(last)
        assert last == json.dumps(document, separators=(",", ":"))
        assert (document["ok"], document["emulated"], document["steps"]) == (True, emulates, [DONE])
        assert document["command"] == "moe-rt gpucheck --quick"
        assert result.stdout.index("fine") < result.stdout.index(last)
    result = call("gpucheck", "--report", str(tmp_path))
    assert result.stdout.splitlines()[-1] == json.dumps(
        {"ok": True, "emulated": False, "steps": {"layer": "ok"}, "report": str(tmp_path)}, separators=(",", ":")
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compile-only"], "--compile-only and --arch need each other"),
        (["--arch", "sm_90a"], "--compile-only and --arch need each other"),
        (["--compile-only", "--arch", "sm_90a", "--only", "layer"], "--compile-only is a step by itself; leave out"),
        (["--compile-only", "--arch", "sm_90a", "--emulated"], "--compile-only runs nothing, and --emulated compiles"),
        (["--sizes", "0"], "got '0', expected numbers of ranks such as 1,2,8"),
        (["--sizes", "1,,2"], "got '1,,2', expected numbers of ranks such as 1,2,8"),
        (["--sizes", "-1"], "got '-1', expected numbers of ranks such as 1,2,8"),
        (["--sizes", "2,x"], "got '2,x', expected numbers of ranks such as 1,2,8"),
        (["--nproc", "0"], "0 is not in the range x>=1"),
        (["--budget", "0.5"], "0.5 is not in the range x>=1"),
    ],
)
def test_contradictions_are_refused(runs: list[Any], arguments: list[str], said: str) -> None:
    result = call("gpucheck", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    assert not runs


def test_spaces_between_numbers_of_ranks(runs: list[Any]) -> None:
    assert call("gpucheck", "--sizes", " 1, 2").exit_code == 0
    assert runs.pop()[0].sizes == (1, 2)


def test_compile_only_needs_a_toolkit_but_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled anew, those over NCCL among them; the record is the only one, and is saved."""
    seen: list[Any] = []

    def compile_all(archs: Any, variants: Any, check: Check, *, cache: bool) -> None:
        seen.append((archs, variants, check.seconds, cache))
        check.announce("1 of 1")
        if "sm_80" in archs:
            raise ValueError("a source is missing")

    monkeypatch.setattr(run, "gpu_card", lambda *given: pytest.fail("no GPU is needed"))
    monkeypatch.setattr(nvrtc, "find_toolkit", lambda library=None: seen.append(library.name))
    monkeypatch.setattr(compiling, "find_toolkit", lambda library: None)
    monkeypatch.setattr(compiling, "compile_all", compile_all)
    every = (*compiling.VARIANTS, *compiling.GIN_VARIANTS)
    for arch, status, result in (("sm_90a", 0, "ok"), ("sm_80", 1, "failed")):
        found = call("gpucheck", "--compile-only", "--arch", arch, "--arch", "sm_120a", "--report", str(tmp_path))
        assert found.exit_code == status
        assert seen == ["NVSHMEM", ((arch, "sm_120a"), every, 900.0, False)]
        assert found.stderr == "1 of 1\n"
        document = json.loads((tmp_path / "report.json").read_text())
        (record,) = document["steps"]
        assert (record["step"], record["result"], document["ok"]) == ("compile-only", result, status == 0)
        assert 0 <= record["seconds"] < 60
        assert "gpu" not in document["machine"]
        seen.clear()


@pytest.mark.parametrize("arguments", [["--compile-only", "--arch", "sm_90a"], ["--emulated"]])
def test_a_missing_toolkit_is_one_sentence(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(library: Any = None) -> None:
        raise CompileError("no NVRTC here")

    monkeypatch.setattr(nvrtc, "find_toolkit", missing)
    monkeypatch.setattr(emulated, "find_toolkit", missing)
    result = call("gpucheck", *arguments)
    assert result.exit_code == 1
    kind = "InvalidConfig: --emulated: " if arguments == ["--emulated"] else "CompileError: "
    assert result.output.startswith(f"Error: {kind}no NVRTC here")


def test_kernels_over_nccl_are_compiled_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(library: Any) -> None:
        raise CompileError(f"no {library.name} here")

    monkeypatch.setattr(compiling, "find_toolkit", missing)
    check = Check(None)
    assert compiling.over_gin(check) == ()
    (said,) = check.details
    assert said.startswith("not compiled for NCCL's network: no NCCL here")
    monkeypatch.setattr(compiling, "find_toolkit", lambda library: None)
    check = Check(None)
    assert (compiling.over_gin(check), check.details) == (compiling.GIN_VARIANTS, [])


def test_what_is_compiled_into_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that gpucheck runs, or what buffers of the given sizes load; failures are written and give the status."""
    seen: list[Any] = []

    def compile_all(archs: Any, variants: Any, check: Check, *, cache: bool) -> None:
        seen.append((archs, variants, check.seconds, cache, os.environ["MOE_RT_CACHE"]))
        check.announce("1 of 1")
        (into / "a.cubin").touch()
        if "sm_80" in archs:
            check.failures.append("kernels.cu: it does not compile")

    into = tmp_path / "kernels"
    monkeypatch.setenv("MOE_RT_CACHE", "replaced by the command")
    monkeypatch.setattr(nvrtc, "find_toolkit", lambda library=None: seen.append(library.name))
    monkeypatch.setattr(compiling, "compile_all", compile_all)
    last = f"1 compiled sources in {into}; on the other machine: MOE_RT_CACHE={into}\n"
    every = (*compiling.VARIANTS, *compiling.NEEDED)
    sizes = ["--hidden", "64", "--topk", "2", "--dtype", "fp16", "--rows-as", "fp8"]
    for arch, more, variants in (("sm_90a", [], every), ("sm_90a", sizes, compiling.variants_for("F16", 64, 2, "fp8")),
                                 ("sm_80", sizes[:4], compiling.variants_for("Bf16", 64, 2, None))):  # fmt: skip
        result = call("compile", "--into", str(into), "--arch", arch, "--arch", "sm_100a", *more)
        assert seen == ["NVSHMEM", ((arch, "sm_100a"), variants, 1800.0, True, str(into))]
        assert (result.exit_code, result.stdout) == (int(arch == "sm_80"), last)
        failed = "kernels.cu: it does not compile\n" if arch == "sm_80" else ""
        assert result.stderr == f"1 of 1\n{failed}"
        seen.clear()
    for words in (["--hidden", "64"], ["--topk", "2"]):
        result = call("compile", "--into", str(into), "--arch", "sm_90a", *words)
        assert result.exit_code == 2
        assert "--hidden and --topk need each other" in result.output
    (tmp_path / "file").touch()
    result = call("compile", "--into", str(tmp_path / "file" / "x"), "--arch", "sm_90a")
    assert result.exit_code == 1
    assert result.output.startswith("Error: InvalidConfig: report: got")
    assert not seen


TABLE = {"title": "Findings", "columns": ["what", "us"], "rows": [["a|b", 1.5], ["[red]c", 2]], "note": "medians"}
DOCUMENT = {
    "ok": False,
    "emulated": False,
    "command": "moe-rt gpucheck",
    "machine": {"gpu": "small", "date": "today"},
    "steps": [
        {**DONE, "seconds": 1.25, "tables": [TABLE, {**TABLE, "title": "More", "note": ""}]},
        {**DONE, "step": "errors", "result": "failed", "detail": "", "error": "ValueError: [no]"},
    ],
}
PAGE = """# moe-rt gpucheck

`moe-rt gpucheck`

## Steps

| step | result | seconds | detail |
| --- | --- | --- | --- |
| layer | ok | 1.2 | fine |
| errors | failed | 1.0 |  |

## Machine

| what | value |
| --- | --- |
| gpu | small |
| date | today |

## Findings

| what | us |
| --- | --- |
| a\\|b | 1.5 |
| [red]c | 2 |

medians

## More

| what | us |
| --- | --- |
| a\\|b | 1.5 |
| [red]c | 2 |

## errors failed

~~~text
ValueError: [no]
~~~
"""
SHOWN = """gpu small
date today
gpucheck
 step    result  seconds  detail
 layer   ok      1.2      fine
 errors  failed  1.0
Findings
 what    us
 a|b     1.5
 [red]c  2
  medians
More
 what    us
 a|b     1.5
 [red]c  2
errors: ValueError: [no]
"""


def test_a_whole_report(tmp_path: Path) -> None:
    assert markdown(DOCUMENT) == PAGE
    assert write_report(DOCUMENT, tmp_path) == tmp_path / "report.md"
    assert (tmp_path / "report.md").read_text() == PAGE
    assert json.loads((tmp_path / "report.json").read_text()) == DOCUMENT


def test_a_whole_report_on_a_terminal() -> None:
    """Borders aside, it shows the machine, all results and all tables; names of styles are text like any other."""
    out = Console(width=100, file=io.StringIO(), force_terminal=True, no_color=False, legacy_windows=False)
    with out.capture() as captured:
        out.print(show(DOCUMENT))
    styled = captured.get()
    for text in ("\x1b[32mok", "\x1b[1;31mfailed", "\x1b[31merrors: ValueError"):
        assert text in styled
    out = Console(width=100, file=io.StringIO())
    out.print(show(DOCUMENT))
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.replace("┃", " ").replace("│", " ").split() for line in lines if line.strip(" ━─┏┓┡┩┳╇└┘┴")] == [
        line.split() for line in SHOWN.splitlines()
    ]
    assert lines[2] == "gpucheck" + " " * (len(lines[2]) - 8)


def test_a_run_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step gets its own limit, or what is left; one that finds less than 10 s is not begun."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock.now))
    given: list[Any] = []
    announced: list[str] = []
    saved: list[list[str]] = []

    def perform(step: Any, check: Check) -> dict[str, Any]:
        given.append((step.name, check.device, check.quick, check.seconds, check.sizes, check.nproc))
        clock.now += {"smoke": 290.0, "errors": 100.0, "timing": 0.5, "loads": 0.25}[step.name]
        return check.record(step.name, "ok", 7.0)

    made = run.Run(perform, "gpu", True, (3,), 5, 400.5, 3.0, announce=announced.append,
                   save=lambda records: saved.append([r["step"] for r in records]))  # fmt: skip
    records = made.run(("processes", "loads", "timing", "errors", "smoke"))
    limits = {"smoke": 240.0, "errors": 110.5, "timing": 10.5, "loads": 10.0}
    assert given == [(name, "gpu", True, seconds, (3,), 5) for name, seconds in limits.items()]
    took = [("smoke", "ok", 290.0), ("errors", "ok", 100.0), ("timing", "ok", 0.5), ("loads", "ok", 0.25)]
    assert [(r["step"], r["result"], r["seconds"]) for r in records] == [*took, ("processes", "skipped", 0.0)]
    assert records[-1]["detail"] == "no time left of the 400 s for all steps; run it by itself with --only"
    assert announced == [f"{name}: {STEPS[name].title}" for name in limits]
    assert saved == [[r["step"] for r in records[: n + 1]] for n in range(5)]


def test_the_card_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what torch and nvidia-smi report; without that tool it is shorter."""
    asked: list[Any] = []

    def smi(command: list[str], **how: Any) -> Any:
        asked.append((command, how))
        return SimpleNamespace(stdout="590.1, 1980 MHz, 3201 MHz, 700.00 W\n")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "why_there_is_none", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=3 << 29))
    known = SimpleNamespace(device=torch.device("cuda", 1), name="small", arch="sm_90a", num_sms=132, uuid="12-ab")
    monkeypatch.setattr(driver, "Gpu", lambda device: known)
    monkeypatch.setattr(subprocess, "run", smi)
    card = {"gpu": "small", "arch": "sm_90a", "sms": 132, "gpu_gib": 1.5}
    of_tool = {"driver_version": "590.1", "clocks.max.sm": "1980 MHz", "clocks.max.mem": "3201 MHz"}
    assert run.gpu_card("cuda:1", 2) == {**card, **of_tool, "power.limit": "700.00 W"}
    query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    ((command, how),) = asked
    assert command == ["nvidia-smi", query, "--format=csv,noheader", "--id=GPU-12-ab"]
    assert (how["check"], how["text"], how["capture_output"]) == (True, True, True)
    assert run.gpu_card("cuda").keys() >= card.keys()
    for error in (OSError("no such tool"), subprocess.TimeoutExpired("nvidia-smi", 10)):
        monkeypatch.setattr(subprocess, "run", lambda *given, error=error, **how: (_ for _ in ()).throw(error))
        assert run.gpu_card("cuda:0") == card
    with pytest.raises(InvalidConfig, match="device: got cuda:2, expected cuda:0 to cuda:1"):
        run.gpu_card("cuda:2")
    with pytest.raises(InvalidConfig, match="--nproc: got 3, but torch finds 2 GPUs here"):
        run.gpu_card("cuda:0", 3)


def test_the_document_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "machine_card", lambda: {"gpu": "of the machine", "date": "today"})
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    versions = {"triton": "3.4", "nvidia-nvshmem-cu13": "3.3"}

    def version(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError
        return versions[package]

    monkeypatch.setattr(run, "version", version)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moe-rt", "gpucheck", "--quick"])
    skipped, failed = ({**DONE, "result": result} for result in ("skipped", "failed"))
    for records, ok in (([], True), ([DONE, skipped], True), ([DONE, failed, skipped], False)):
        assert run.document(records, {"gpu": "small", "sms": 7}) == {
            "ok": ok,
            "emulated": False,
            "command": "moe-rt gpucheck --quick",
            "machine": {"gpu": "of the machine", "sms": 7, "date": "today", "cuda_of_torch": "12.8",
                        "nvidia-nvshmem-cu13": "3.3", "triton": "3.4"},
            "steps": records,
        }  # fmt: skip
