"""The benchmark runs on every case and catches wrong output, and its ratios are not much worse than the baseline.

A plain `pytest` does not run these tests; `pytest bench` does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ratios import changes

from moe_rt.cli import main
from moe_rt.info import machine_card
from moe_rt.lab.bench import launch
from moe_rt.lab.bench.cases import CASES
from moe_rt.lab.bench.contestants import ON_ONE_HOST
from moe_rt.lab.bench.rank import Job
from moe_rt.lab.bench.results import slopes
from moe_rt.lab.bench.trace import STEPS
from moe_rt.lab.testing import programs

HERE = Path(__file__).parent
BASELINE = HERE / "baseline.json"
IN_MEMORY = Path("/dev/shm")
QUICK = ("--iters", "2", "--warmup", "1")


OPS = ("dispatch", "combine", "dispatch_backward", "combine_backward")


def bench(*arguments: str) -> Result:
    """Run the command in this process, since most of a short benchmark is importing torch. Its ranks are processes."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return CliRunner().invoke(main, ["bench", *arguments], env={"PYTHONPATH": os.pathsep.join(paths)})


def document(done: Result) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def passed(done: Result) -> dict[str, Any]:
    tables, _, _ = done.stdout.rstrip().rpartition("\n")
    assert done.exit_code == 0, tables + done.stderr
    return document(done)


@pytest.fixture(scope="module")
def every_case() -> dict[str, Any]:
    """All cases with their own experts and rows, but few tokens, on ranks that fit two cores: name -> run."""
    names = [argument for name in CASES for argument in ("--case", name)]
    done = passed(bench(*names, "--ranks", "2", "--tokens", "3", "--intermediate", "16", *QUICK))
    return {run["case"]["name"].removesuffix("*"): run for run in done["runs"]}


@pytest.mark.parametrize("name", CASES)
def test_every_case_runs_with_right_outputs(every_case: dict[str, Any], name: str) -> None:
    run = every_case[name]
    present = {result["contestant"] for result in run["results"]}
    assert present | set(run["absent"]) == set(ON_ONE_HOST)
    assert {"moe_rt", "memcpy"} - {"memcpy" if run["case"]["op"] == "layer" else ""} <= present
    for result in run["results"]:
        assert result["errors"] == []
        assert 0 < result["isolated_us"]["p50"] <= result["isolated_us"]["p99"]
        assert result["free_running_us"]["p50"] > 0


def test_skewed_routing_on_more_ranks_than_cores() -> None:
    """Only the first rank receives tokens; ranks have 3, 2 and 2 experts."""
    sizes = ("--routing", "onehot", "--ranks", "3", "--tokens", "17", "--experts", "7", "--topk", "3", "--hidden", "40")
    run = passed(bench(*sizes, *QUICK, "--contestants", "moe_rt,a2a,mpi,memcpy"))["runs"][0]
    assert run["bytes"]["logical"] == 3 * run["bytes"]["physical"]


def test_a_trace_of_routing_on_thread_ranks_with_another_payload(tmp_path: Path) -> None:
    import numpy as np

    trace = tmp_path / "trace.npy"
    np.save(trace, np.array([[0, 5], [3, 1], [5, 2]]))
    sizes = ("--routing", f"trace:{trace}", "--tokens", "9", "--experts", "6", "--hidden", "24")
    other = ("--heap", "threads", "--op", "combine", "--dtype", "fp64")
    run = passed(bench(*sizes, "--topk", "2", *other, *QUICK, "--contestants", "moe_rt,a2a,memcpy"))["runs"][0]
    assert run["bytes"]["logical"] == 9 * 2 * 24 * 8
    assert set(run["absent"]) == {"a2a"}
    refused = bench(*sizes, "--topk", "3", "--contestants", "moe_rt")
    assert refused.exit_code == 1
    assert "got K = 2 in " in refused.stderr
    assert "expected K = 3" in refused.stderr


def test_a_trace_of_a_layer(tmp_path: Path) -> None:
    """Lanes of each rank show its ops. In chunks a rank computes between the halves of some ops of each kind."""
    sizes = ["--tokens", "16", "--hidden", "32", "--iters", "1", "--warmup", "0"]
    names = ["--contestants", "moe_rt,moe_rt_chunks"]
    path = tmp_path / "trace.json"
    result = bench("--case", "layer-qwen3-small", *sizes, *names, "--trace", str(path))
    assert result.exit_code == 0, result.output
    assert "trace" not in json.loads(result.output.splitlines()[-1])["runs"][0]
    events = json.loads(path.read_text())["traceEvents"]
    shown = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert shown == {f"rank {rank}, {name}" for rank in (0, 1) for name in ("moe_rt", "moe_rt_chunks")}
    for rank in (0, 1):
        for name, num_chunks in (("moe_rt", 1), ("moe_rt_chunks", 4)):
            seen = [each for each in events if each["pid"] == f"{name} {rank}" and each["ph"] == "X"]
            assert all(each["dur"] >= 0 for each in seen)
            ops = {op: [each for each in seen if (each["tid"], each["name"]) == ("send", op)] for op in OPS}
            assert {op: len(sent) for op, sent in ops.items()} == dict.fromkeys(OPS, STEPS * num_chunks)
            for op, sent in ops.items():
                ends = [each for each in seen if (each["tid"], each["name"]) == ("receive", op)]
                between = [
                    each
                    for a, b in zip(sent, ends, strict=True)
                    for each in seen
                    if each["tid"] == "compute" and a["ts"] + a["dur"] <= each["ts"] <= b["ts"]
                ]
                assert bool(between) == (num_chunks > 1), op


def test_wrong_outputs_fail_the_benchmark() -> None:
    """Every cheat is caught in every op, even if a single contestant is wrong, by one bit, or in one token of one
    rank."""
    cases = ("--case", "pair-2x512x2048", "--case", "combine-2x2048x7168", "--case", "layer-qwen3-small")
    sizes = ("--tokens", "32", "--hidden", "64", "--topk", "4", "--experts", "16", "--intermediate", "32")
    cheats = ("Honest", "Zeros", "Stale", "Misrouted", "Unweighted", "OneWrongBit", "OneWrongToken", "Nan", "Late")
    names = ",".join(["moe_rt", *(f"cheats:{name}" for name in cheats)])
    done = bench(*cases, *sizes, *QUICK, "--contestants", names)
    assert done.exit_code == 1
    assert "an output was wrong" in done.stderr
    pair, combine, layer = ({r["contestant"] for r in run["results"] if r["errors"]} for run in document(done)["runs"])
    on_one_rank = {"one wrong token", "nan", "late"}
    assert pair == {"zeros", "stale", "misrouted", "unweighted", "one wrong bit"} | on_one_rank
    assert {"unweighted"} | on_one_rank <= combine
    assert {"misrouted"} | on_one_rank <= layer
    assert not {"moe_rt", "honest"} & (combine | layer)


def test_a_rank_that_fails_ends_the_benchmark() -> None:
    done = bench("--tokens", "4", "--contestants", "cheats:Broken", "--iters", "1")
    assert done.exit_code == 1
    assert "RankFailed" in done.stderr
    unknown = bench("--contestants", "nobody")
    assert unknown.exit_code == 1
    assert "expected one of moe_rt" in unknown.stderr


def job_of(rank: str) -> Path:
    """Directory that a rank's program was given."""
    return Path(Path(f"/proc/{rank}/cmdline").read_text().rstrip("\0").rpartition("\0")[2])


def test_sigterm_leaves_nothing_behind() -> None:
    """No ranks and no files in memory remain."""
    command = [sys.executable, "-m", "moe_rt", "bench", "--contestants", "moe_rt", "--iters", str(10**6)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        deadline = time.monotonic() + 600
        directories: set[Path] = set()
        while {d.parent for d in directories} != {IN_MEMORY}:  # ranks are forked before they execute their program
            assert time.monotonic() < deadline
            time.sleep(0.05)
            ranks = children.read_text().split()
            directories = {job_of(rank) for rank in ranks} if len(ranks) == 2 else set()
        (directory,) = directories
        assert directory.exists()
        process.terminate()
        assert process.wait(600) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert not directory.exists()


def test_sigterm_while_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are just being started are ended as well."""
    job = Job([CASES["pair-2x512x2048"]], ["moe_rt"], [0], iters=1, warmup=0, seed=0, cold=False)
    started = []

    def start(program: programs.Program) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
        os.kill(os.getpid(), signal.SIGTERM)
        started.append(process)
        return process

    monkeypatch.setattr(programs, "start", start)
    with pytest.raises(SystemExit):
        launch.launch(job, None, recycle=False, progress=lambda part: None)
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2


def test_the_slope_is_that_of_the_time_above_the_floor() -> None:
    def sweep(time: Callable[[int], float]) -> list[dict[str, Any]]:
        return [
            {"case": {"tokens": t}, "results": [{"contestant": "it", "phase": "", "isolated_us": {"p50": time(t)}}]}
            for t in (1, 64, 128, 1024, 8192)
        ]

    assert slopes(sweep(lambda t: 20 + t / 2)) == {"it": pytest.approx(1, abs=1e-2)}
    assert slopes(sweep(lambda t: 20 + t**1.2)) == {"it": pytest.approx(1.2, abs=1e-2)}
    assert slopes(sweep(lambda t: 20)) == {}


def test_no_gross_regression(capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios of the others' times to moe_rt's: its speed-up over a2a, and over the memcpy reference. More is better."""
    isa = machine_card()["isa"]
    baseline: dict[str, dict[str, float]] = json.loads(BASELINE.read_text()).get(isa)
    if baseline is None:
        pytest.skip(f"no baseline for {isa}")
    names = [argument for name in baseline for argument in ("--case", name)]
    done = passed(bench(*names, "--iters", "5", "--warmup", "1", "--contestants", "moe_rt,a2a,memcpy"))
    found = list(changes(done["runs"], baseline))
    with capsys.disabled():
        print("", *found, sep="\n", end="")
    assert {change.case for change in found} == set(baseline)
    assert not [str(change) for change in found if change.gross]
