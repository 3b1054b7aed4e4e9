"""`moe-rt bench` without ranks: what each option changes in the ranks' job, and what screen, page and files show.

All of it is on record. After a change on purpose: python tests/bench/test_command.py
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import assert_on_record, entries, write_record

from moe_rt.cli import main
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants import find
from moe_rt.lab.bench.launch import RankFailed
from moe_rt.lab.bench.rank import Job

RECORD = Path(__file__).with_name("command.json")
CARD = {
    "cpu": "a CPU", "cores": 2, "load_average": 0.25, "moe_rt": "1.2.3", "commit": "abc1234",
    "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip
SIZES = "--ranks 2 --tokens 8 --hidden 16 --topk 2 --experts 4"
# Command lines, and what differs from the job of none of them.
OPTIONS = (
    "",
    "--case mixtral-small",
    "--case gpt-oss-small --case decode-2x1x7168",
    "--op layer --intermediate 7",
    "--op dispatch",
    "--ranks 4",
    "--tokens 3",
    "--hidden 5",
    "--topk 3",
    "--experts 5",
    "--dtype fp32",
    "--routing onehot",
    "--heap threads",
    "--heap threads --contestants mpi,moe_rt",
    "--contestants mpi,moe_rt",
    "--contestants moe_rt_flat",
    "--iters 1",
    "--iters 201",
    "--warmup 0",
    "--seed 5",
    "--malloc system",
    "--cold",
    "--nodes 2",
    "--nodes 2,3 --rate 1gbit,unlimited",
    "--nodes 2 --ranks 6",
    "--sweep tokens --max-tokens 128",
    "--op layer --trace {there}/trace.json",
    f"{SIZES} --tokens 65536",
    f"{SIZES} --tokens 16384",
    f"{SIZES} --tokens 16383",
    "--op serve",
    "--op serve --sequences 1,2 --prompts 3 --kills 4",
)
REFUSED = (
    "--ranks 0",
    "--iters 0",
    "--warmup -1",
    "--max-tokens 63",
    "--nodes 2,0",
    "--nodes two",
    "--rate 1gbit",
    "--nodes 2 --rate quickly",
    "--nodes 2 --heap shm",
    "--nodes 2 --ranks 3",
    "--sweep tokens --case mixtral-small --case gpt-oss-small",
    "--sequences 1",
    "--prompts 1 --kills 1",
    "--trace {there}/trace.json",
    "--op layer --heap loopback --trace {there}/trace.json",
    "--routing nothing",
    "--routing lognormal:-1",
    "--contestants nobody",
    "--contestants moe_rt,moe_rt,a2a,a2a",
    "--contestants moe_rt.nowhere:Nobody",
    "--topk 17",
    "--ranks 17",
    "--heap nvshmem",
    "--heap loopback",
    "--report {there}/a-file/report",
    "--contestants moe_rt",
)
# Each of these shows the file that it names.
SHOWN = {
    "--contestants moe_rt,a2a,transformers,mpi,memcpy --report {there}": "index.html",
    "--op layer --contestants moe_rt,a2a --report {there} --cold --iters 7 --malloc system": "index.html",
    "--nodes 2,4 --rate 1gbit,unlimited --contestants moe_rt,mpi --report {there}": "index.html",
    "--sweep tokens --max-tokens 256 --contestants moe_rt,memcpy --report {there}": "results.csv",
    "--sweep tokens --max-tokens 64 --contestants a2a,moe_rt --report {there}": "index.html",
    "--seed 13 --contestants moe_rt,a2a": "",  # with a wrong output
}


def raw(job: Job, case: Case) -> dict[str, Any]:
    """Return the record of a case; all times differ, also between contestants, phases and kinds."""
    phases = ("forward", "forward+backward") if case.op == "layer" else ("",)
    names = [find(name).name for name in job.contestants]
    absent = {name: f"there is no {name}" for name in names if name == "transformers"}
    results, number = [], 0
    for name in names:
        for phase in phases if name not in absent else ():
            number += 1
            us = [number * (7.0 + case.tokens) * part for part in (1.0, 0.5, 3.0, 2.25)]
            errors = ["rank 1: <off>"] * (job.seed == 13 and name == "a2a")
            results.append({"contestant": name, "phase": phase, "isolated": us, "free_running": us[:2],
                            "errors": errors})  # fmt: skip
    moved = {"logical": 1000 * case.tokens, "physical": 500 * case.tokens, "wire": 250 * case.tokens}
    record: dict[str, Any] = {"case": asdict(case), "device": "cpu", "rotations": 2, "absent": absent, "bytes": moved}
    if case.nodes:
        record |= {"least_us": 12.5 if case.rate else None, "round_trip_us": 37.5}
        for result in results:
            sent = [1e6 * (rank + 2) for rank in range(case.nodes)]
            formula = None if result["contestant"] == "mpi" else [0.9 * each for each in sent]
            result["link"] = {"sent": sent, "received": sent[::-1], "formula": formula}
    if "moe_rt" in names:
        record["line_latency_ns"] = [[0.0 if peer == rank else 40.0 + 10 * rank + peer for peer in range(case.ranks)]
                                     for rank in range(case.ranks)]  # fmt: skip
        record["moe_rt"] = {"heap_bytes": 2_500_000, "route": "two_level" if case.nodes else "flat"} | (
            {"share": {phase: {"in_ops": 12.5, "of_it_waiting": 2.5 + len(phase)} for phase in phases}}
            if case.op == "layer"
            else observed(case)
        )
    if job.trace:
        record["trace"] = [{"name": "dispatch", "ph": "X", "pid": "moe_rt 0", "tid": "send", "ts": 2000, "dur": 1500}]
    return {**record, "results": results}


def observed(case: Case) -> dict[str, Any]:
    phases = ("publish", "wait for rows", "gather", "push", "wait for partials", "reduce")
    us = {phase: float(number + case.tokens) for number, phase in enumerate(phases)}
    size = range(case.ranks)
    waits = {op: [[float(rank + peer) for peer in size] for rank in size] for op in ("dispatch", "combine")}
    lines = [[0.0 if peer == rank else 30.0 + rank for peer in size] for rank in size]
    return {"breakdown": us, "waits": waits, "line_latency_ns": lines, "overhead": {"dispatch no_grad": 12.0}}


@contextmanager
def without_ranks(launched: Callable[..., list[dict[str, Any]]]) -> Any:
    """Let the command start no rank, on a machine without GPUs that has mpirun and may make nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_rt.lab.bench.run.launch", launched)
        patch.setattr("moe_rt.lab.bench.run.find_mpirun", lambda: "/the/mpirun")
        patch.setattr("moe_rt.lab.bench.run.require_rights", lambda: None)
        patch.setattr("moe_rt.lab.bench.run.machine_card", lambda: CARD)
        patch.setattr("moe_rt.lab.bench.run.cores", lambda: [3, 5])
        patch.setattr("torch.cuda.device_count", lambda: 0)
        patch.setattr("moe_rt.lab.bench.serving.command.serve", lambda given: print(json.dumps(given)))
        if find_spec("matplotlib") is not None:
            patch.setattr("matplotlib.figure.Figure.savefig", save)
        yield


def save(figure: object, file: Path | io.BytesIO, **how: Any) -> None:
    """Write how a figure would be saved."""
    text = json.dumps(how)
    file.write_text(text) if isinstance(file, Path) else file.write(text.encode())


def invoke(line: str, launched: Callable[..., list[dict[str, Any]]]) -> tuple[Result, dict[str, str]]:
    """Run a command line; return what came, and the files that it wrote."""
    with without_ranks(launched), tempfile.TemporaryDirectory() as there:
        (Path(there) / "a-file").touch()
        done = CliRunner().invoke(main, ["bench", *line.format(there=there).split()])
        files = {path.name: path.read_text() for path in sorted(Path(there).iterdir()) if path.name != "a-file"}
    for part in ("stdout_bytes", "stderr_bytes"):
        setattr(done, part, getattr(done, part).replace(there.encode(), b"there"))
    return done, files


def started(line: str) -> dict[str, Any]:
    """Return the jobs that a command line starts, the settings it shows and the names of files that it writes."""
    jobs: list[dict[str, Any]] = []
    bars: list[Any] = []

    class Bar(nullcontext["Bar"]):
        """A bar of progress that notes its length and each advance."""

        def __init__(self, console: Console, transient: bool) -> None:
            super().__init__(self)
            bars.append([console.stderr, transient])

        def add_task(self, what: str, total: float) -> int:
            bars.append([what, total])
            return 7

        def advance(self, task: int, part: float) -> None:
            bars.append([task, part])

    def launched(job: Job, mpirun: str | None, recycle: bool, progress: Callable[[float], None]) -> Any:
        own = asdict(job)
        own["cases"] = [{name: value for name, value in asdict(case).items() if value != getattr(Case(), name)}
                        for case in job.cases]  # fmt: skip
        jobs.append({**own, "mpirun": mpirun, "recycle": recycle})
        progress(0.5)
        return [raw(job, case) for case in job.cases]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_rt.lab.bench.cli.Progress", Bar)
        done, files = invoke(line, launched)
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout.splitlines()[-1])
    usual = {"settings": shown.get("settings"), "jobs": jobs, "files": files, "progress": bars}
    return usual if "settings" in shown else {"served": shown}


def refusal(line: str) -> list[Any]:
    """Return the exit status and the message; a rank that starts fails."""

    def launched(job: Job, *arguments: Any) -> Any:
        raise RankFailed("a rank ended with status 3; see above")

    done, files = invoke(line, launched)
    assert done.stdout == ""
    assert files == {}
    message = done.stderr.splitlines()[-1]
    return [done.exit_code, message]


def shown(line: str, file: str) -> dict[str, Any]:
    """Return what the command says, and one of the files that it writes."""
    done, files = invoke(line, lambda job, *_: [raw(job, case) for case in job.cases])
    if files:
        assert json.loads(files["results.json"]) == json.loads(done.stdout.splitlines()[-1])
    saved = sorted({text for name, text in files.items() if name.endswith(".svg")})
    head, _, page = files.get(file, "").partition("</style>")
    text = re.sub(r"(?<=base64,)[^\"]+", lambda match: base64.b64decode(match[0]).decode(), page or head)
    said = [line.rstrip() for line in done.stdout.splitlines()[: -1 if files else None]]
    return {"status": done.exit_code, "error": done.stderr, "says": said, "files": sorted(files), "saved": saved,
            "file": text.splitlines()}  # fmt: skip


def everything() -> dict[str, Any]:
    return {
        **{line: started(line) for line in OPTIONS},
        **{line: refusal(line) for line in REFUSED},
        **{line: shown(line, file) for line, file in SHOWN.items()},
    }


@pytest.mark.parametrize("line", OPTIONS)
def test_options_reach_the_ranks(line: str) -> None:
    assert_on_record(RECORD, line, started(line))


@pytest.mark.parametrize("line", REFUSED)
def test_refusals_say_what_came_and_what_was_expected(line: str) -> None:
    if "--report" in line:
        pytest.importorskip("matplotlib")
    assert_on_record(RECORD, line, refusal(line))


@pytest.mark.parametrize("line", SHOWN)
def test_results_are_shown_as_on_record(line: str) -> None:
    pytest.importorskip("matplotlib")
    assert_on_record(RECORD, line, shown(line, SHOWN[line]))


def test_each_has_its_entry() -> None:
    assert entries(RECORD).keys() == {*OPTIONS, *REFUSED, *SHOWN}


if __name__ == "__main__":
    write_record(RECORD, everything())
