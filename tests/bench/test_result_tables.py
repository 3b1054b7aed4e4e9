"""The documents' tables from files that are written here, and the kept files against today's arithmetic."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.expect import Expectation
from moe_rt.lab.bench.traffic import bytes_moved

sys.path.extend(str(Path(__file__).resolve().parents[2] / directory) for directory in ("tools", "bench"))
import results
from transformers_layer import report

ROOT = Path(__file__).resolve().parents[2]
# Other files there are reports of gpucheck.
FILES = [path for path in sorted((ROOT / "bench/results").glob("*/*.json")) if '"runs": [' in path.read_text()]
# Medians in us. In the shown file mpi is the fastest other contestant, 2,500 / 1,000; in the other it is a2a,
# 6,400 / 2,000. memcpy, which is not a contestant, is the fastest.
SHOWN = {"moe_rt": 1000.0, "a2a": 4000.0, "transformers": 5000.0, "mpi": 2500.0, "memcpy": 999.6}
OTHER = {"moe_rt": 2000.0, "a2a": 6400.0, "transformers": 9000.0, "mpi": 8000.0, "memcpy": 100.0}
CASE = {"name": "pair-2x512x2048", "ranks": 2, "tokens": 512, "hidden": 2048, "topk": 4}
UNNAMED = {**CASE, "name": "dispatch-2x2048x7168"}


def measured(case: dict[str, Any], times: dict[str, float]) -> dict[str, Any]:
    return {
        "case": case,
        "results": [
            {"contestant": name, "isolated_us": {"p50": us, "p90": 1.0, "p99": 1.0}, "free_running_us": {"p50": 1.0}}
            for name, us in times.items()
        ],
    }


def layer(isolated: float, free_running: float, in_ops: float) -> dict[str, Any]:
    ratios = {"a2a": {"isolated": isolated, "free_running": free_running}}
    return {"ratios": {"forward": ratios}, "moe_rt": {"share": {"forward": {"in_ops": in_ops, "of_it_waiting": 0.1}}}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write results of two machines; larger ratios of excluded runs must not appear in the short table."""
    faster = {**SHOWN, "moe_rt": 10.0}
    second = {**CASE, "name": "decode-2x1x7168", "tokens": 1, "hidden": 7168, "topk": 8}
    for path, runs in {
        results.SHOWN: [measured(CASE, SHOWN), measured(UNNAMED, faster), measured(second, OTHER)],
        "another/system.json": [measured(CASE, OTHER), measured(UNNAMED, faster)],
        "another/sweep.json": [measured(CASE, faster)],
        "another/layer.json": [layer(1.2, 0.9, 3.0), layer(1.1, 1.3, 4.14)],
    }.items():
        file = tmp_path / "bench/results" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"runs": runs}))
    return tmp_path


def test_three_digits_of_milliseconds() -> None:
    said = {4.8: "0.00480", 44.7: "0.0447", 99.96: "0.100", 999.6: "1.00", 2090.0: "2.09", 9996.0: "10.0"}
    said |= {11_440.0: "11.4", 99_960.0: "100", 144_000.0: "144", 1_145_600.0: "1,146"}
    assert {us: results.ms(us) for us in said} == said


def test_the_ratio_is_that_of_the_fastest_other() -> None:
    assert results.speedup(SHOWN) == 2.5
    assert results.speedup(OTHER) == 3.2
    assert results.run_times(measured(CASE, SHOWN)) == SHOWN


def test_the_short_table(root: Path) -> None:
    """The short table shows the shown file's exchange runs without sweeps, with the range over all files."""
    assert results.short_table(root).splitlines()[2:] == [
        "| 2 ranks, 512 tokens each, rows of 2048, top-4 | 1.00 | 2.50 (MPI) | **2.5** | 2.5 to 3.2 | 4.00 | 1.00 |",
        "| 2 ranks, 1 token each, rows of 7168, top-8 | 2.00 | 6.40 (all_to_all_single) | **3.2** | 3.2 to 3.2 "
        "| 6.40 | 0.100 |",
    ]


def test_the_table_of_ratios(root: Path) -> None:
    """A row for each file and a column for each case; a case that was not measured leaves its cell empty."""
    assert results.ratio_table(root).splitlines() == [
        "| Machine and date | malloc | `pair-2x512x2048` | `dispatch-2x2048x7168` | `decode-2x1x7168` |",
        "|---|---|---|---|---|",
        "| another | as installed | 3.2 | 250.0 |  |",
        "| epyc-zen5-4core-2026-11-22 | kept | 2.5 | 250.0 | 3.2 |",
    ]


def test_all_times(root: Path) -> None:
    assert results.all_times(root).splitlines() == [
        "directory,malloc,case,moe_rt,all_to_all_single,AllToAllEP,MPI,memcpy,fastest other / moe_rt",
        "another,system,pair-2x512x2048,2.00,6.40,9.00,8.00,0.100,3.2",
        "another,system,dispatch-2x2048x7168,0.0100,4.00,5.00,2.50,1.00,250.0",
        "epyc-zen5-4core-2026-11-22,recycle,pair-2x512x2048,1.00,4.00,5.00,2.50,1.00,2.5",
        "epyc-zen5-4core-2026-11-22,recycle,dispatch-2x2048x7168,0.0100,4.00,5.00,2.50,1.00,250.0",
        "epyc-zen5-4core-2026-11-22,recycle,decode-2x1x7168,2.00,6.40,9.00,8.00,0.100,3.2",
    ]


def test_the_distance_from_the_memcpy(root: Path) -> None:
    """Ranges are over batches, least first, and one token is apart from them."""
    two = {**CASE, "name": "pair-4x512x2048", "ranks": 4}
    file = root / "bench/results" / results.SHOWN
    document = json.loads(file.read_text())
    document["runs"].append(measured(two, {**SHOWN, "moe_rt": 1500.0, "a2a": 3000.0, "mpi": 2500.0}))
    file.write_text(json.dumps(document))
    said = results.memcpy_sentences(root).replace("\n", " ")
    assert "take 1.00 to 1.50 times as long as the memcpy with moe_rt, 2.50 to 2.50 times with MPI and 3.00" in said
    assert "3.00 to 4.00 times with torch's all_to_all_single" in said
    assert "fixed costs dominate: 20.0, 80.0 and 64.0 times its memcpy" in said


def test_the_sentence_on_layers(root: Path) -> None:
    """The sentence gives the minimum and maximum over both kinds of times and all phases."""
    said = results.layer_sentence(root).replace("\n", " ")
    assert "takes 0.90 to 1.30 times as long as with moe_rt, which spends 3.0 to 4.1 % of it in its ops" in said


def test_the_bars_of_the_plot(root: Path) -> None:
    """Batches only, one bar for each plotted contestant, as long as its ratio to the memcpy."""
    svg = results.plot(root)
    assert results.bars_in(svg) == ["moe_rt  1.00\u00d7", "MPI  2.50\u00d7", "all_to_all_single  4.00\u00d7"]
    assert "1 token" not in svg


def test_the_report_of_transformers_layers() -> None:
    """Ratios are taken per round, here 1 to 8: their median is 4.5, and 4 of the 8 rounds are from 3 to 6."""
    others = [12.0, 1.0, 4.0, 3.0, 8.0, 10.0, 14.0, 2.0]
    assert report(64, {"all_to_all": others, "moe_rt": [2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0]}) == (
        "T = 64: all_to_all 6.00 ms, moe_rt 1.00 ms; ratio 4.50 (3.00 to 6.00 in half of the rounds)"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kept_files_hold_what_their_times_say(path: Path) -> None:
    """Bytes, bandwidths and ratios of kept files follow from the case and the medians, to the files' four digits."""
    for run in json.loads(path.read_text())["runs"]:
        case = Case(**run["case"])
        own = {result["phase"]: result for result in run["results"] if result["contestant"] == "moe_rt"}
        assert run["bytes"]["logical"] == bytes_moved(case, [])["logical"]
        for result in run["results"]:
            moved = 2 if result["phase"] == "forward+backward" else 1
            for kind in ("logical", "physical"):
                bandwidth = moved * run["bytes"][kind] / result["free_running_us"]["p50"] / 1e3
                assert result[f"{kind}_gbps"] == pytest.approx(bandwidth, rel=2e-3)
            if result["contestant"] != "moe_rt":
                for kind, ratio in run["ratios"][result["phase"]][result["contestant"]].items():
                    others, ours = (one[f"{kind}_us"]["p50"] for one in (result, own[result["phase"]]))
                    assert ratio == pytest.approx(others / ours, rel=2e-3)


def test_kept_bytes_are_those_of_the_routing() -> None:
    """Kept bytes equal the routing's for the cases with few tokens and experts, whose routing is quick to draw."""
    for run in json.loads((ROOT / "bench/results" / results.SHOWN).read_text())["runs"]:
        case = Case(**run["case"])
        assert run["bytes"] == bytes_moved(case, Expectation(case, 0, 0, 2).traffic())


def test_kept_ratios_of_acceptance_are_those_of_the_files() -> None:
    """Each listed ratio is in the kept file of its machine, day and setting, if one exists, to the list's digits."""
    runs = defaultdict(list)
    with (ROOT / "bench/results/acceptance.csv").open() as file:
        for row in csv.DictReader(file):
            key = f"{row['machine']}-{row['date']}/{row['malloc']}.json", row["case"]
            runs[key].append([row[name] for name in (*results.OTHERS.values(), "memcpy")])
    for path, document in results.documents(ROOT).items():
        for measured in document["runs"]:
            times = results.run_times(measured)
            ratios = [times[name] / times["moe_rt"] for name in (*results.OTHERS, "memcpy")]
            listed = runs.pop((path, measured["case"]["name"]), None)
            assert listed is None or any(all(map(rounds_to, ratios, texts)) for texts in listed), ratios
    assert len(runs) == 0, "each of the list has its file"


def test_every_logged_figure_has_its_lesson() -> None:
    """Topics of log.csv are headings of the log; each row has a value and its device, and no row is there twice."""
    headings = re.findall(r"^### (.*)$", (ROOT / "docs/log.md").read_text(), re.MULTILINE)
    with (ROOT / "bench/results/log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({tuple(row.values()) for row in rows}) == len(rows) > 0
    for row in rows:
        assert row["topic"] in headings
        assert all(row[name] for name in ("date", "device", "what", "value", "unit")), row
        assert None not in row, row


def rounds_to(ratio: float, text: str) -> bool:
    """True if the ratio rounds to the text's decimals; an empty cell was not measured or not kept."""
    return text in ("", f"{ratio:.{len(text.partition('.')[2])}f}")
