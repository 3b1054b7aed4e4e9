"""Benchmark figures from times, computed by hand: percentiles, bandwidths, ratios, slopes, digits, and each run's
record."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moe_rt.errors import InvalidConfig
from moe_rt.lab.bench.cases import CASES, Case
from moe_rt.lab.bench.rank import Job
from moe_rt.lab.bench.results import percentiles, rounded, slopes, summarise
from moe_rt.lab.bench.run import Settings, run, sweep_tokens
from moe_rt.lab.bench.table import COLUMNS, cells, headline, notes, time

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from ratios import GROSS, Change, changes

SETTINGS = Settings(contestants=("moe_rt",), iters=None, warmup=3, seed=0, malloc="recycle", cold=False)


def raw(contestant: str, isolated: list[float], free_running: list[float], phase: str = "") -> dict[str, Any]:
    times = {"isolated": isolated, "free_running": free_running}
    return {"contestant": contestant, "phase": phase, **times, "errors": []}


# Medians are 4, 10 and 2 us of isolated iterations, 5, 8 and 1 us of free-running ones; all ratios differ.
PAIR: dict[str, Any] = {
    "case": asdict(Case(op="pair")),
    "device": "cpu",
    "rotations": 2,
    "absent": {"mpi": "there is no mpirun"},
    "bytes": {"logical": 60_000, "physical": 20_000, "wire": 7_000},
    "results": [
        raw("a2a", [40.0, 10.0, 1.0], [2.0, 8.0, 80.0]),
        raw("moe_rt", [4.0, 3.0, 9.0], [50.0, 5.0, 1.0]),
        raw("memcpy", [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]),
    ],
}
LAYER: dict[str, Any] = {
    **PAIR,
    "case": asdict(Case(op="layer")),
    "results": [
        raw("moe_rt", [10.0], [20.0], "forward"),
        raw("moe_rt", [30.0], [60.0], "forward+backward"),
        raw("a2a", [15.0], [40.0], "forward"),
        raw("a2a", [120.0], [90.0], "forward+backward"),
    ],
}


def test_percentiles() -> None:
    """Percentiles interpolate linearly: of 101 times from 0 to 100, the p-th percentile is p, in any order."""
    assert percentiles([float(i * 37 % 101) for i in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "n": 101}
    assert percentiles([8.0, 2.0]) == {"p50": 5.0, "p90": pytest.approx(7.4), "p99": pytest.approx(7.94), "n": 2}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0, "n": 1}


def test_bandwidths_are_of_the_free_running_median() -> None:
    """60,000 bytes in 8 us are 7.5 GB/s, 20,000 are 2.5; moe_rt's 5 us make it 12 and 4."""
    a2a, moe_rt, memcpy = summarise(PAIR)["results"]
    assert (a2a["logical_gbps"], a2a["physical_gbps"]) == pytest.approx((7.5, 2.5))
    assert (moe_rt["logical_gbps"], moe_rt["physical_gbps"]) == pytest.approx((12, 4))
    assert (memcpy["logical_gbps"], memcpy["physical_gbps"]) == pytest.approx((60, 20))
    assert (a2a["isolated_us"]["p50"], a2a["free_running_us"]["p50"], a2a["free_running_us"]["n"]) == (10, 8, 3)


def test_backward_moves_as_much_again() -> None:
    """60,000 bytes in 20 us are 3 GB/s; forward and backward move 120,000, in 60 us 2 GB/s."""
    forward, both, other_forward, other_both = summarise(LAYER)["results"]
    assert [forward["logical_gbps"], forward["physical_gbps"]] == pytest.approx([3, 1])
    assert [both["logical_gbps"], both["physical_gbps"]] == pytest.approx([2, 2 / 3])
    assert other_forward["logical_gbps"] == pytest.approx(1.5)
    assert other_both["logical_gbps"] == pytest.approx(4 / 3)


def test_ratios_are_how_many_times_as_long_as_moe_rt_another_takes() -> None:
    assert summarise(PAIR)["ratios"] == {
        "": {"a2a": {"isolated": 2.5, "free_running": 1.6}, "memcpy": {"isolated": 0.5, "free_running": 0.2}}
    }
    assert summarise(LAYER)["ratios"] == {
        "forward": {"a2a": {"isolated": 1.5, "free_running": 2.0}},
        "forward+backward": {"a2a": {"isolated": 4.0, "free_running": 1.5}},
    }
    assert summarise({**PAIR, "results": PAIR["results"][::2]})["ratios"] == {}, "without moe_rt there are none"


def sweep_of(isolated: dict[int, float], phase: str = "") -> list[dict[str, Any]]:
    """Return one run for each number of tokens; other percentiles and free-running times have no slope."""
    other = {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    return [
        {
            "case": {"tokens": tokens},
            "results": [
                {"contestant": "it", "phase": phase, "isolated_us": {**other, "p50": us}, "free_running_us": other},
                {"contestant": "still", "phase": phase, "isolated_us": other, "free_running_us": other},
            ],
        }
        for tokens, us in isolated.items()
    ]


def test_slopes() -> None:
    """A slope is fitted to the times above the floor of 10 us: 30 us at 64 tokens, 120 us at 128 and 480 us at 256 grow
    as the square.

    The 20 us at 32 tokens are latency, being less than four times the floor, and would distort it.
    """
    assert slopes(sweep_of({1: 10, 32: 30, 64: 40, 128: 130, 256: 490})) == {"it": pytest.approx(2)}
    assert slopes(sweep_of({1: 10, 32: 39.9, 64: 40, 128: 70, 256: 130}, "forward")) == {"it forward": pytest.approx(1)}
    assert slopes(sweep_of({1: 10, 64: 40, 128: 70})) == {"it": pytest.approx(1)}
    assert slopes(sweep_of({1: 10, 64: 39, 128: 40})) == {}, "one point has no slope"


def test_digits() -> None:
    said = {0.1234: "0.123 us", 1.0: "1 us", 999.4: "999 us", 999.5: "1 ms", 1234.0: "1.23 ms", 56_789.0: "56.8 ms"}
    said |= {999_400.0: "999 ms", 999_500.0: "1 s", 1_234_567.0: "1.23 s", 98_765_432.0: "98.8 s"}
    assert {us: time(us) for us in said} == said
    assert rounded({"a": [1.23456, 123456, 0.000123456], "b": (1.23456,), "c": "1.23456"}) == {
        "a": [1.235, 123456, 0.0001235],
        "b": (1.23456,),
        "c": "1.23456",
    }
    assert math.isnan(rounded(math.nan))


def test_the_table_has_each_figure_in_its_column() -> None:
    isolated = ("isolated p50", "p90", "p99")
    assert (*isolated, "free-running p50", "GB/s logical", "GB/s physical", "time / moe_rt") == COLUMNS
    measured = summarise(PAIR)
    # p90 is 0.8 of the way from the middle one of three to the last, p99 0.98: 10 + 24 and 10 + 29.4.
    assert [cells(measured, result) for result in measured["results"]] == [
        ["a2a", "10 us", "34 us", "39.4 us", "8 us", "7.50", "2.50", "2.50"],
        ["moe_rt", "4 us", "8 us", "8.9 us", "5 us", "12.00", "4.00", ""],
        ["memcpy", "2 us", "2 us", "2 us", "1 us", "60.00", "20.00", "0.50"],
    ]
    layer = summarise(LAYER)
    assert [cells(layer, result)[0::7] for result in layer["results"]][2:] == [
        ["a2a forward", "1.50"],
        ["a2a forward+backward", "4.00"],
    ]


def test_the_notes_below_the_table() -> None:
    measured = summarise(PAIR)
    measured["moe_rt"] = {
        "heap_bytes": 2_500_000,
        "breakdown": {"publish": 1.0, "gather": 2000.0},
        "line_latency_ns": [[0.0, 40.0, 20.0], [60.0, 0.0, 0.0]],
        "overhead": {"dispatch no_grad": 12.0},
        "share": {"forward": {"in_ops": 12.5, "of_it_waiting": 5.25}},
    }
    measured["results"][0]["errors"] = ["rank 1: off"]
    assert notes(measured) == [
        "cpu; per rank: logical 0.06 MB, physical 0.02 MB, wire 0.007 MB",
        "memcpy is a reference and no contestant: each rank copies as many bytes within its own memory",
        "moe_rt: 2.5 MB of symmetric memory per rank",
        "breakdown: publish 1 us, gather 2 ms",
        "a line that a peer has just written takes 20 to 60 ns to read",
        "added by Python: dispatch no_grad 12 us",
        "forward: 12.5% of the time in moe_rt's ops, 5.2% waiting for peers",
        "mpi is absent: there is no mpirun",
        "a2a: rank 1: off",
    ]


def test_the_headline_takes_isolated_medians_of_the_last_phase() -> None:
    idle = {"load_average": 1.0, "cores": 2}
    (pair,) = headline({"runs": [summarise(PAIR)], "machine": idle})
    assert pair.endswith(
        "take 4 us with moe_rt and 2.5 times as long with a2a; a plain copy of as many bytes takes 0.5 times as long."
    )
    (layer,) = headline({"runs": [summarise(LAYER)], "machine": idle})
    assert layer.endswith("takes 30 us with moe_rt, forward+backward and 4 times as long with a2a.")
    assert len(headline({"runs": [summarise(PAIR)] * 4, "slopes": {}, "machine": idle})) == 2, "the first and the last"
    assert len(headline({"runs": [summarise(PAIR)] * 4, "machine": {**idle, "load_average": 1.1}})) == 5


def test_each_run_gets_the_record_of_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases run in groups with the same ranks and iterations; a case requested twice has two records."""
    jobs: list[Job] = []

    def launched(job: Job, mpirun: str | None, recycle: bool, progress: Any) -> list[dict[str, Any]]:
        jobs.append(job)
        return [
            {**copy.deepcopy(PAIR), "case": asdict(case), "results": [raw("moe_rt", [10.0 * len(jobs) + i], [1.0])]}
            for i, case in enumerate(job.cases)
        ]

    monkeypatch.setattr("moe_rt.lab.bench.run.launch", launched)
    small = CASES["decode-2x1x7168"]
    other = CASES["pair-2x512x2048"]
    four = CASES["pair-4x512x2048"]
    cases = [small, other, four, small, other.changed(tokens=3), other]
    document = run(cases, SETTINGS, sweep=False, progress=print)
    assert [run["case"] for run in document["runs"]] == [asdict(case) for case in cases]
    # small ops: [small, small, changed] with 200 iterations, in the first job; then two ranks and four with 20
    assert [(len(job.cases), job.iters, job.cases[0].ranks) for job in jobs] == [(3, 200, 2), (2, 20, 2), (1, 20, 4)]
    assert [run["results"][0]["isolated_us"]["p50"] for run in document["runs"]] == [10, 20, 30, 11, 12, 21]
    assert document["settings"]["started_by"] == "python"
    assert "slopes" not in document


def test_two_contestants_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants of one name are refused, as ratios would be ambiguous; so is one without a name."""
    monkeypatch.setattr("moe_rt.lab.bench.run.launch", lambda *arguments: pytest.fail("something was measured"))
    for names, said in {
        ("moe_rt", "a2a", "a2a"): "got a2a more than once",
        ("moe_rt", "moe_rt.lab.bench.contestants.moe:MoeRt"): "got moe_rt more than once",
        ("moe_rt.lab.bench.contestants.base:Exchange",): "has a name",
    }.items():
        with pytest.raises(InvalidConfig, match=said):
            run([Case()], replace(SETTINGS, contestants=names), sweep=False, progress=print)


def test_small_ops_have_more_iterations() -> None:
    """Small ops have less than 2**20 bytes of rows, and run more iterations. 512 tokens of 4 experts in rows of 256
    bf16 elements have exactly that many."""
    iterations = []

    def launched(job: Job, *_: Any) -> list[dict[str, Any]]:
        iterations.append(job.iters)
        return [PAIR]

    for sizes, settings in (
        ({"hidden": 256}, SETTINGS),
        ({"hidden": 255}, SETTINGS),
        ({"hidden": 255, "dtype": "fp32"}, SETTINGS),
        ({"hidden": 255}, replace(SETTINGS, iters=7)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moe_rt.lab.bench.run.launch", launched)
            run([Case(**sizes)], settings, sweep=False, progress=print)
    assert iterations == [20, 200, 20, 7]


def test_a_sweep_begins_with_one_token() -> None:
    assert [case.tokens for case in sweep_tokens(Case(), 512)] == [1, 64, 128, 256, 512]
    assert [case.tokens for case in sweep_tokens(Case(), 511)] == [1, 64, 128, 256]


def test_a_ratio_that_fell_to_less_than_half_is_gross() -> None:
    """A ratio of isolated times that fell to less than half is gross; more is better, so no rise is."""
    before = {"x": {"a2a": 5.0, "memcpy": 1.0}, "y": {"a2a": 3.2}}
    runs = [
        {"case": {"name": name}, "ratios": {"": {"a2a": {"isolated": 2.5, "free_running": 9.0}, "memcpy": both}}}
        for name, both in {"y": {}, "x": {"isolated": 0.49, "free_running": 9.0}}.items()
    ]
    found = list(changes(runs, before))
    assert found == [
        Change("y", "a2a", before=3.2, now=2.5),
        Change("x", "a2a", before=5.0, now=2.5),
        Change("x", "memcpy", before=1.0, now=0.49),
    ]
    assert [change.gross for change in found] == [False, False, True]
    assert not Change("x", "a2a", before=1.0, now=2.5).gross
    assert GROSS == 2
    assert str(found[1]) == "x: a2a / moe_rt 2.5, baseline 5, 50%"
    with pytest.raises(KeyError):
        list(changes([{"case": {"name": "x"}, "ratios": {}}], before))
