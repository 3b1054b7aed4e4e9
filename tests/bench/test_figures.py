"""Figures of a report draw the numbers of the document: bars, lines, matrices, with scales that begin at zero.

All that they draw is on record. After a change on purpose: python tests/bench/test_figures.py
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from support.figures import described
from support.recorded import assert_on_record, entries, write_record

from moe_rt.lab.bench import report
from moe_rt.lab.bench.cases import CASES

RECORD = Path(__file__).with_name("report_figures.json")
CASE = asdict(CASES["pair-2x512x2048"])


def result(contestant: str, isolated: float, free: float, phase: str = "pair") -> dict[str, Any]:
    parts = {"p50": 1.0, "p90": 1.5, "p99": 2.0}
    times = {
        kind: {part: scale * value for part, scale in parts.items()}
        for kind, value in (("isolated_us", isolated), ("free_running_us", free))
    }
    return {
        "contestant": contestant, "phase": phase, **times, "logical_gbps": isolated + 1, "physical_gbps": isolated + 2,
        "errors": ["wrong"] if contestant == "a2a" else [],
    }  # fmt: skip


def runs() -> list[dict[str, Any]]:
    first = [result("moe_rt", 10, 8), result("a2a", 20, 16), result("memcpy", 5, 4, "")]
    second = [result("moe_rt", 30, 25), result("a2a", 70, 60), result("memcpy", 9, 7, "")]
    return [{"case": CASE, "results": first}, {"case": {**CASE, "tokens": 1024}, "results": second}]


def test_medians_are_bars_from_zero() -> None:
    panels = report.medians(runs()).axes
    assert len(panels) == 2
    for axes, expected in zip(panels, ([10, 20, 5, 8, 16, 4], [30, 70, 9, 25, 60, 7]), strict=True):
        assert [bar.get_width() for bar in axes.patches] == expected
        assert {bar.get_x() for bar in axes.patches} == {0}
        places = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
        assert places == pytest.approx([-0.2, 0.8, 1.8, 0.2, 1.2, 2.2]), "free-running below isolated, and apart"
        assert max(bar.get_height() for bar in axes.patches) <= 0.4, "the two of a contestant do not overlap"
        assert [bar.get_alpha() for bar in axes.patches] == [1.0] * 3 + [0.45] * 3
        colors = [to_hex(report.COLORS[name]) for name in ("moe_rt", "a2a", "memcpy")]
        assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == 2 * colors
        assert [text.get_text() for text in axes.get_yticklabels()] == ["moe_rt pair", "a2a pair", "memcpy"]
        assert axes.get_xlim()[0] == 0
        assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first contestant is on top"
        assert [text.get_text().strip() for text in axes.texts] == [report.time(value) for value in expected]
        assert [text.xy[0] for text in axes.texts] == expected
    assert panels[0].get_title(loc="left").startswith("pair-2x512x2048: R=2 T=512")
    assert panels[1].get_title(loc="left").startswith("pair, R=2 T=1024"), "its sizes are not those of the name"


def test_times_over_tokens() -> None:
    (axes,) = report.over_tokens(runs(), {"moe_rt pair": 1.584}).axes
    moe_rt, a2a, memcpy = axes.lines
    for line, expected in ((moe_rt, [10, 30]), (a2a, [20, 70]), (memcpy, [5, 9])):
        assert list(line.get_xdata()) == [512, 1024]
        assert list(line.get_ydata()) == expected
    assert [line.get_label() for line in axes.lines] == ["moe_rt pair, slope 1.58", "a2a pair", "memcpy (reference)"]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "--"]
    assert [to_hex(line.get_color()) for line in axes.lines] == [
        to_hex(report.COLORS[name]) for name in ("moe_rt", "a2a", "memcpy")
    ]
    for area, line in zip(axes.collections, axes.lines, strict=True):
        heights = area.get_paths()[0].vertices[:, 1]
        assert (min(heights), max(heights)) == (min(line.get_ydata()), 1.5 * max(line.get_ydata())), "p50 to p90"
        assert to_hex(area.get_facecolor()[0]) == to_hex(line.get_color())
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["512", "1024"]


def test_shares_of_the_time_add_up_to_all_of_it() -> None:
    phases = ["publish", "wait", "gather", "push", "wait again", "reduce"]
    shares = [dict(zip(phases, times, strict=True)) for times in ([1.0, 2.0, 5.0, 0, 0, 0], [30.0, 9.0, 1.0, 0, 0, 0])]
    of_runs = [{**run, "moe_rt": {"breakdown": share}} for run, share in zip(runs(), shares, strict=True)]
    figure = report.breakdown(of_runs)
    (axes,) = figure.axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([12.5, 75.0, 25.0, 22.5, 62.5, 2.5] + 6 * [0])
    assert [bar.get_x() for bar in axes.patches] == pytest.approx([0, 0, 12.5, 75.0, 37.5, 97.5] + 6 * [100])
    assert [text.get_text() for text in axes.texts] == [report.time(value) for value in (1.0, 30.0, 2.0, 9.0, 5.0)]
    centers = [text.xy for text in axes.texts]
    assert centers == [pytest.approx(c) for c in ((6.25, 0), (37.5, 1), (25.0, 0), (86.25, 1), (68.75, 0))]
    assert axes.get_xlim() == (0, 100)
    assert [text.get_text() for text in figure.legends[0].texts] == phases
    assert len({to_hex(bar.get_facecolor()) for bar in axes.patches}) == 6


def test_waits_have_one_scale_from_zero() -> None:
    waits = {"dispatch": [[0.0, 4.0], [8.0, 1.0]], "combine": [[3.0, 2.0], [6.0, 3.5]]}
    *panels, bar = report.waits({"moe_rt": {"waits": waits}}).axes
    assert [axes.get_title() for axes in panels] == ["dispatch", "combine"]
    assert bar.get_ylabel() == "microseconds"
    for axes, matrix in zip(panels, waits.values(), strict=True):
        (image,) = axes.images
        assert image.get_clim() == (0, 8)
        assert image.get_array().tolist() == matrix
        texts = {text.xy: (text.get_text(), text.get_color()) for text in axes.texts}
        assert texts == {
            (peer, rank): (f"{matrix[rank][peer]:.3g}", "white" if matrix[rank][peer] > 4 else "black")
            for rank in range(2)
            for peer in range(2)
        }
        assert axes.get_xlabel() == "peer that is waited for"
        assert list(axes.get_xticks()) == list(axes.get_yticks()) == [0, 1]


def test_a_table_has_every_number_under_its_name() -> None:
    head, *rows = report.table(runs())
    assert len(rows) == 6
    row = dict(zip(head, rows[4], strict=True))
    expected = {**CASE, "tokens": 1024, "contestant": "a2a", "phase": "pair", "output": "wrong"}
    expected |= {f"{kind}_{part}": scale * value for kind, value in (("isolated_us", 70), ("free_running_us", 60))
                 for part, scale in (("p50", 1.0), ("p90", 1.5), ("p99", 2.0))}  # fmt: skip
    assert row == expected | {"logical_gbps": 71, "physical_gbps": 72}
    assert [each[-1] for each in rows] == ["ok", "wrong", "ok"] * 2


def test_contestants_have_different_colors() -> None:
    names = ["moe_rt", "a2a", "transformers", "mpi", "memcpy", "another", "a third"]
    colors = [to_rgba(report._style(name, index)["color"]) for index, name in enumerate(names)]
    assert len(set(colors)) == len(names)


def every_figure() -> dict[str, Figure]:
    """Return figures of few and many contestants, runs, phases and ranks."""
    more = [{**run, "results": [*run["results"], result("another", 5, 2), result("a third", 7, 3)]} for run in runs()]
    few = [{**more[0], "results": more[0]["results"][:2]}, more[1]]
    phases = ["publish", "wait", "gather", "push", "wait again", "reduce"]
    # 7 of 100 us get no text, 8 us do.
    shares = [dict(zip(phases, times, strict=True)) for times in ([7, 8, 15, 60, 4, 6], [1, 1, 1, 1, 1, 1])]
    observed = [{**run, "moe_rt": {"breakdown": share}} for run, share in zip(runs(), shares, strict=True)]
    many = [[float(3 * rank + peer) for peer in range(6)] for rank in range(6)]
    waits = {"dispatch": [[0.0, 4.0], [8.0, 1.0]], "combine": [[3.0, 2.0], [6.0, 3.5]]}
    return {
        "over tokens": report.over_tokens(more, {"moe_rt pair": 1.584, "a third pair": 0.5}),
        "medians of one": report.medians(more[:1]),
        "medians of two": report.medians(few),
        "breakdown": report.breakdown(observed),
        "waits of two": report.waits({"moe_rt": {"waits": waits}}),
        "waits of six": report.waits({"moe_rt": {"waits": {"dispatch": many}}}),
    }


def test_figures_are_those_on_record() -> None:
    figures = every_figure()
    assert figures.keys() == entries(RECORD).keys()
    for name, figure in figures.items():
        assert_on_record(RECORD, name, described(figure))


if __name__ == "__main__":
    write_record(RECORD, {name: described(figure) for name, figure in every_figure().items()})
