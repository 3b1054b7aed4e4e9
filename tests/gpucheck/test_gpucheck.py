"""The gpucheck command without a GPU: what it compiles, what it prints, and that a failed step ends only itself."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from device.jit_tools import require_compiler
from support.ranks import CASE_TIMEOUT_S

from moe_rt.cli import main
from moe_rt.engine.gpu import driver as gpu
from moe_rt.engine.gpu.driver import Gpu
from moe_rt.errors import InvalidConfig
from moe_rt.lab.check import child, cli, compiling, network, run, serving
from moe_rt.lab.check.compiling import Variant
from moe_rt.lab.check.kernel_code import find_disassembler, find_problems, read_orders
from moe_rt.lab.check.steps import STEPS, Check, Skipped, Step, Table, perform
from moe_rt.lab.testing.programs import Program, running

SMALL = (Variant("kernels.cu", "F32", 20, 3), Variant("not_written.cu", "F32"))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["gpucheck", *arguments])


def last_line(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout.splitlines()[-1])


def fail(check: Check) -> None:
    check.add(Table("Findings", ["a | b"], [[1]]))
    with check.part("first part"):
        raise ValueError("as it should")
    check.say("second part")


def skip(check: Check) -> None:
    raise Skipped("not here")


def crash(check: Check) -> None:
    raise KeyError("outside of every part")


@pytest.fixture
def fake_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of this file, run in this process, on a machine that seems to have a GPU."""
    for name, work in {"fail": fail, "skip": skip, "crash": crash, "work": lambda check: None}.items():
        module = type(sys)(f"gpucheck_step_{name}")
        module.check = work  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, which in {"correctness": "fail", "chains": "skip", "errors": "crash", "layer": "work"}.items():
        monkeypatch.setitem(STEPS, name, Step(name, f"gpucheck_step_{which}:check", 60, which))
    monkeypatch.setattr(run, "gpu_card", lambda device, nproc: {"gpu": "none"})
    monkeypatch.setattr(child, "run_in_child", lambda step, check, keep: perform(step, check))


def test_help() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in STEPS)


@pytest.mark.parametrize("arguments", [["--compile-only"], ["--arch", "sm_80"], ["--only", "unknown"]])
def test_usage(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


INSTEAD = "without a GPU the kernels can be compiled: moe-rt gpucheck --compile-only --arch sm_90a"


@pytest.mark.parametrize(
    ("cuda", "count", "device", "said"),
    [
        (None, 0, "cuda:0", f"torch: got {torch.__version__}, a build without CUDA, expected one with it; {INSTEAD}"),
        ("13.0", 0, "cuda:0", f"device: got cuda:0, but torch can use no GPU here; torch says: No GPUs; {INSTEAD}"),
        ("13.0", 2, "cuda:2", "device: got cuda:2, expected cuda:0 to cuda:1"),
        ("13.0", 1, "cpu", "device: got cpu, expected cuda:0 to cuda:0"),
        ("13.0", 1, "the second", "device: got the second, expected cuda:0 to cuda:0"),
    ],
)
def test_without_the_gpu_it_says_so(
    cuda: str | None, count: int, device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command reports a missing GPU in one sentence, before any step."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "init", lambda: None if count else refuse("No GPUs"))
    result = call("--device", device)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: InvalidConfig: {said}")
    assert result.output.count("\n") == 1


def refuse(why: str) -> None:
    raise RuntimeError(why)


# The message of torch 2.13.
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by"


@pytest.mark.parametrize("visible", ["", "7", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"])
def test_hidden_gpus_are_refused(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: refuse("No CUDA GPUs are available"))
    said = f"torch says: No CUDA GPUs are available, with CUDA_VISIBLE_DEVICES={visible!r}"
    assert f"torch can use no GPU here; {said}; without a GPU" in call().output
    with pytest.raises(InvalidConfig, match=re.escape(f"expected a CUDA device that torch can use; {said}")):
        Gpu()


def test_a_driver_that_torch_finds_too_old_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that torch finds too old is reported, although its GPUs are counted."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda, "init", lambda: refuse(f"{TOO_OLD} (Triggered internally at CUDAFunctions.cpp:109.)")
    )
    assert f"torch can use no GPU here; torch says: {TOO_OLD}; without a GPU" in call().output
    with pytest.raises(
        InvalidConfig, match=re.escape(f"expected a CUDA device that torch can use; torch says: {TOO_OLD}")
    ):
        Gpu()


def test_the_driver_is_asked_about_this_very_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is queried for this GPU, also if CUDA_VISIBLE_DEVICES renumbers the GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor word; do case $word in --id=*) echo "${word#--id=}, 1, 2, 3";; esac; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**37))
    known = SimpleNamespace(device=torch.device("cuda", 0), name="small", arch="sm_90a", num_sms=132, uuid="12-ab")
    monkeypatch.setattr(gpu, "Gpu", lambda device: known)
    assert run.gpu_card("cuda:0")["driver_version"] == "GPU-12-ab"


def test_report_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(run.Run, "run", lambda *arguments: pytest.fail("a step was run"))
    monkeypatch.setattr(run, "gpu_card", lambda device, nproc: {})
    result = call("--report", str(tmp_path / "file" / "report"))
    assert result.exit_code == 1
    assert "InvalidConfig: report: got" in result.output


def test_failing_step_ends_only_itself(fake_steps: None, tmp_path: Path) -> None:
    names = ("correctness", "chains", "errors", "layer")
    result = call(*(word for name in names for word in ("--only", name)), "--report", str(tmp_path / "report"))
    assert result.exit_code == 1
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    assert not document["ok"]
    records = {record["step"]: record for record in document["steps"]}
    assert [records[name]["result"] for name in names] == ["failed", "skipped", "failed", "ok"]
    assert "ValueError: as it should" in records["correctness"]["error"]
    assert records["correctness"]["detail"] == "second part", "the part after the failing one runs"
    assert records["chains"]["detail"] == "not here"
    assert "KeyError" in records["errors"]["error"]
    assert last_line(result) == {
        "ok": False,
        "emulated": False,
        "steps": {"correctness": "failed", "layer": "ok", "errors": "failed", "chains": "skipped"},
        "report": str(tmp_path / "report"),
    }
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| a \\| b |" in page
    assert "ValueError: as it should" in page
    assert document["machine"]["date"] in page


def test_what_is_not_rehearsed_is_skipped(fake_steps: None) -> None:
    records = run.Run(perform, "cpu", patience=2, skipped={"errors": "not here"}).run(("errors", "layer"))
    assert [(r["step"], r["result"], r["detail"]) for r in records] == [
        ("layer", "ok", ""),
        ("errors", "skipped", "not here"),
    ]


def test_without_failures_the_status_is_0(fake_steps: None) -> None:
    result = call("--only", "layer", "--only", "chains")
    assert result.exit_code == 0
    assert last_line(result)["ok"]


def test_no_step_gets_more_than_what_is_left(fake_steps: None) -> None:
    """A step without time is skipped, which is no failure of what it checks."""
    result = call("--only", "layer", "--budget", "5")
    (record,) = last_line(result)["steps"]
    assert (result.exit_code, record["result"]) == (0, "skipped")
    assert "no time left of the 5 s" in record["detail"]


def test_the_report_is_written_after_every_step(fake_steps: None, tmp_path: Path) -> None:
    """A run that is killed leaves a whole report of the steps that have ended."""
    there: list[list[str]] = []

    def look(check: Check) -> None:
        document = json.loads((tmp_path / "report.json").read_text())
        there.append([record["step"] for record in document["steps"]])

    sys.modules["gpucheck_step_skip"].check = look  # type: ignore[attr-defined]
    call("--only", "layer", "--only", "chains", "--only", "correctness", "--report", str(tmp_path))
    assert [steps[0] for steps in there] == ["correctness"], "the first step had ended"


def test_only_untimed_steps_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step and each timed one run by themselves, the others together."""
    steps = {
        name: Step(name, "", 60, "", timed=name.startswith("timed")) for name in ("a", "b", "timed", "c", "timed2")
    }
    monkeypatch.setattr(run, "STEPS", steps)
    together, running, lock = threading.Barrier(2, timeout=CASE_TIMEOUT_S), set[str](), threading.Lock()
    seen: dict[str, set[str]] = {}

    def work(step: Step, check: Check) -> dict[str, Any]:
        with lock:
            running.add(step.name)
        if step.name in "bc":
            together.wait()
        with lock:
            seen[step.name] = set(running)
        if step.name in "bc":
            together.wait()
        with lock:
            running.remove(step.name)
        return check.record(step.name, "ok", 0.0)

    records = run.Run(work, "cpu", num_jobs=2).run(tuple(steps))
    assert [record["step"] for record in records] == list(steps)
    assert seen == {"a": {"a"}, "b": {"b", "c"}, "c": {"b", "c"}, "timed": {"timed"}, "timed2": {"timed2"}}


def test_sizes_reach_the_step(fake_steps: None) -> None:
    seen: list[Any] = []
    sys.modules["gpucheck_step_work"].check = lambda check: seen.append(check.sizes)  # type: ignore[attr-defined]
    assert call("--only", "layer", "--sizes", "1,8").exit_code == 0
    assert call("--only", "layer").exit_code == 0
    assert seen == [(1, 8), None]
    result = call("--sizes", "1,x")
    assert (result.exit_code, "got '1,x', expected numbers of ranks" in result.output) == (2, True)


def test_rows_of_a_step_that_is_cut_short_are_kept() -> None:
    saved: list[list[Any]] = []
    check = Check("cpu")
    check.save = lambda found: saved.append(found.record("x", "running", 0.0)["tables"][0]["rows"])
    rows = check.begin("Cases", ["case"])
    rows.append(["first"])
    rows.append(["second"])
    assert saved == [[], [["first"]], [["first"], ["second"]]]


def test_compile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.setattr(compiling, "VARIANTS", SMALL)
    monkeypatch.setattr(compiling, "LARGEST", SMALL[0])
    result = call("--compile-only", "--arch", "sm_90a")
    assert result.exit_code == 0, result.stdout
    assert "1 of 2: kernels.cu" in result.stderr, "progress"
    (record,) = last_line(result)["steps"]
    kernels, code, orders = record["tables"]
    assert {row[5] for row in kernels["rows"]} >= {"dispatch_send", "dispatch_receive", "combine_send"}
    assert all(row[4] == "sm_90a" and 0 < row[6] <= 128 for row in kernels["rows"])
    assert len(orders["rows"]) == len(kernels["rows"])
    assert len(code["rows"]) == (len(kernels["rows"]) if find_disassembler() else 0)
    assert ("machine code was not read" in record["detail"]) == (find_disassembler() is None)
    assert "no source not_written.cu" in record["detail"]


def test_what_does_not_compile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.setattr(compiling, "VARIANTS", (Variant("kernels.cu", "NoSuchElement", 20, 3),))
    result = call("--compile-only", "--arch", "sm_90a")
    assert result.exit_code == 1
    (record,) = last_line(result)["steps"]
    assert "NoSuchElement" in record["error"]


PTX = """
.visible .entry dispatch_send(.param .b64 p) {
  ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
  st.v2.b64 [%rd2], {%rd3, %rd4};
  ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
  st.local.v4.f32 [%rd2], {%f1, %f2, %f3, %f4};
  ld.global.v2.u32 {%r1, %r2}, [%rd1];
  atom.add.acq_rel.gpu.u32 %r1,[%rd1],%r2;
  st.release.sys.b64 [%rd1],%rd2;
}
.func helper() { st.release.sys.b64 [%rd1],%rd2; }
.visible .entry dispatch_receive(.param .b64 p) {
  ld.acquire.sys.b64 %rd1,[%rd2];
  atom.add.relaxed.gpu.u32 %r1,[%rd1],%r2;
}
"""


def test_ptx_is_read_by_entry() -> None:
    orders = read_orders(PTX)
    send, receive = orders["dispatch_send"], orders["dispatch_receive"]
    assert (send.wide_loads, send.wide_stores, send.releases, send.acquires, send.last_block) == (1, 1, 1, 0, 1)
    assert (receive.wide_loads, receive.releases, receive.acquires, receive.last_block) == (0, 0, 1, 0)
    problems = find_problems(orders)
    assert "dispatch_receive: got no loads of 16 bytes" in problems
    assert "got no kernel combine_send" in problems
    assert not [p for p in problems if p.startswith("dispatch_send")]


def test_step_in_a_process_of_its_own() -> None:
    record = child.run_in_child(STEPS["correctness"], Check("cpu", quick=True, seconds=CASE_TIMEOUT_S))
    assert (record["result"], record["error"]) == ("ok", "")
    assert len(record["tables"][0]["rows"]) == 34


def test_findings_of_a_step_outlive_their_starter(tmp_path: Path) -> None:
    """Rows that a step has found are in the report's directory before the step ends."""
    start = (
        "from pathlib import Path; from moe_rt.lab.check import child; "
        "from moe_rt.lab.check.steps import STEPS, Check; "
        f"child.run_in_child(STEPS['correctness'], Check('cpu', seconds={CASE_TIMEOUT_S}), Path({str(tmp_path)!r}))"
    )
    with running([Program([sys.executable, "-c", start], {})]) as (process,):
        while not (found := [p for p in tmp_path.glob("unfinished_correctness_*/result.json") if rows_in(p)]):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    assert rows_in(found[0])[0][3] == "equal"


def rows_in(path: Path) -> list[list[Any]]:
    tables = json.loads(path.read_text())["tables"]
    return list(tables[0]["rows"]) if tables else []


def test_process_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is ended leaves what it has written. Its time starts here when it has written something."""
    has_written, wait = tmp_path / "has_written", child.wait

    def wait_from_there(process: Any, seconds: float) -> int | None:
        while not has_written.exists():
            assert process.poll() is None
            time.sleep(0.01)
        return wait(process, seconds)

    monkeypatch.setattr(child, "wait", wait_from_there)
    command = ["sh", "-c", 'echo begun; touch "$1"; exec sleep "$2"', "sh", str(has_written), str(CASE_TIMEOUT_S)]
    assert child.run_command(command, 0.1, {}) == (False, "begun\n")


def test_crash_of_a_process_is_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "child_command", lambda *a, **k: [sys.executable, "-c", "import os; os.abort()"])
    record = child.run_in_child(STEPS["layer"], Check("cpu", seconds=CASE_TIMEOUT_S))
    assert record["result"] == "failed"
    assert "the process ended" in record["error"]


@pytest.mark.parametrize("size", [1, 2])
def test_processes_of_the_network_step(size: int) -> None:
    network.run_processes("cpu", size, "shm", CASE_TIMEOUT_S)


def test_failing_process_of_the_network_step_is_quoted() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1: got exit status 1.*InvalidConfig"):
        network.run_processes("cpu", 1, "loopback", CASE_TIMEOUT_S)


def test_network_step_without_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(network.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(network, "mps_is_running", lambda: False)
    monkeypatch.setattr(network, "run_processes", lambda device, size, heap, seconds: asked.append(size))
    check = Check("cuda:0")
    network.check(check)
    assert asked == [1]
    assert check.details[-1] == network.NO_MPS


def test_serving_step_without_vllm() -> None:
    with pytest.raises(Skipped, match="vllm is not installed"):
        serving.check(Check("cuda:0"))


def test_progress_is_no_part_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    cli._run("cuda", True, 1, False, None, None, None, lambda records: None).announce("smoke: the smallest rounds")
    assert capsys.readouterr() == ("", "smoke: the smallest rounds\n")
