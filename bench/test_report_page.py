"""The benchmark's report states the result in a sentence, holds its figures, and cannot be lost after measuring."""

from __future__ import annotations

import copy
import csv
import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from test_bench import bench, passed

import moe_rt.lab.bench.cli
from moe_rt.cli import main
from moe_rt.lab.bench.cases import CASES
from moe_rt.lab.bench.report import write_report
from moe_rt.lab.bench.table import headline


def test_the_report_holds_its_figures(tmp_path: Path) -> None:
    sweep = ("--sweep", "tokens", "--max-tokens", "64", "--hidden", "64", "--routing", "lognormal:1.5", "--iters", "3")
    done = passed(bench(*sweep, "--contestants", "moe_rt,memcpy", "--report", str(tmp_path)))
    assert [run["case"]["tokens"] for run in done["runs"]] == [1, 64]
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert page.index("Dispatch and combine of 1 token on each of 2 ranks, 64 bf16") < page.index("<img")
    assert "http" not in page
    assert "{" not in page.partition("</style>")[2], "no document is shown as it is"
    assert "512x2048" not in page, "a changed case does not have the sizes that its name says"
    assert json.loads((tmp_path / "results.json").read_text()) == done
    assert {path.name for path in tmp_path.glob("*.svg")} == {"over_tokens.svg", "breakdown.svg", "waits-1.svg"}
    for path in tmp_path.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("}svg")
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    results = [(run, result) for run in done["runs"] for result in run["results"]]
    assert len(rows) == len(results) == 4
    for row, (run, result) in zip(rows, results, strict=True):
        assert (row["tokens"], row["contestant"]) == (str(run["case"]["tokens"]), result["contestant"])
        assert float(row["isolated_us_p90"]) == result["isolated_us"]["p90"]
        assert float(row["physical_gbps"]) == result["physical_gbps"]
        assert row["output"] == "ok"


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(moe_rt.lab.bench.cli, "run", lambda *arguments: pytest.fail("something was measured"))
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_without_matplotlib_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refused(["--report", str(tmp_path)], monkeypatch)
    assert said.startswith("Error: MissingPackage: --report draws plots: got no package matplotlib")
    assert "pip install '.[bench]'" in said


def test_a_report_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    said = refused(["--report", str(tmp_path / "file" / "report")], monkeypatch)
    assert said.startswith("Error: InvalidConfig: report: got ")
    assert "expected a directory to write in" in said


RUN: dict[str, Any] = {
    "case": vars(CASES["pair-2x512x2048"]),
    "bytes": {"logical": 1, "physical": 1},
    "device": "cpu",
    "absent": {},
    "results": [
        {
            "contestant": name,
            "phase": "",
            "isolated_us": {"p50": us, "p90": us, "p99": us},
            "free_running_us": {"p50": us},
            "logical_gbps": 1.0,
            "physical_gbps": 1.0,
            "errors": [],
        }
        for name, us in {"moe_rt": 100.0, "a2a": 250.0, "mpi": 200.0, "memcpy": 110.0}.items()
    ],
    "ratios": {"": {name: {"isolated": ratio} for name, ratio in {"a2a": 2.5, "mpi": 2.0, "memcpy": 1.1}.items()}},
}
IDLE = {"load_average": 0.2, "cores": 2}


def test_the_headline_is_a_sentence() -> None:
    (said,) = headline({"runs": [RUN], "machine": IDLE})
    assert said == (
        "Dispatch and combine of 512 tokens on each of 2 ranks, 2048 bf16 elements a token, take 100 us with moe_rt, "
        "2 times as long with mpi and 2.5 times as long with a2a; "
        "a plain copy of as many bytes takes 1.1 times as long."
    )
    alone = {**RUN, "results": RUN["results"][:1], "ratios": {}}
    assert headline({"runs": [alone], "machine": IDLE})[0].endswith("elements a token, take 100 us with moe_rt.")
    others = {**RUN, "results": RUN["results"][1:], "ratios": {}}
    assert headline({"runs": [others], "machine": IDLE})[0].endswith("was measured without moe_rt.")
    (_, busy) = headline({"runs": [RUN], "machine": {**IDLE, "load_average": 5.0}})
    assert "a load average of 5 on 2 cores" in busy


def test_a_wrong_output_is_what_the_page_says_first(tmp_path: Path) -> None:
    run = copy.deepcopy(RUN)
    run["results"][1]["errors"] = ["rank 0 <combined> wrongly"]
    page = write_report({"runs": [run], "machine": IDLE, "settings": {"cold": False, "iters": None}}, tmp_path)
    text = page.read_text()
    assert "had a wrong output with a2a: its times mean nothing." in text
    assert '<td class="wrong">WRONG</td>' in text
    assert "rank 0 &lt;combined&gt; wrongly" in text
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert [line.rpartition(",")[2] for line in lines] == ["output", "ok", "wrong", "ok", "ok"]
