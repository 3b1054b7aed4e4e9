"""Plots of a run show the values of its metrics: every curve, cell, label and axis.

All that they draw is on record. After a change on purpose: python tests/train/test_plots.py
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

pytest.importorskip("matplotlib")
import matplotlib as mpl
import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from support.figures import described
from support.recorded import assert_on_record, entries, write_record

from moe_rt.train import plots

RECORD = Path(__file__).with_name("run_figures.json")

STEPS = 50
ROWS: list[dict[str, Any]] = [
    {"step": step, "loss": math.log(2) * (8 - step / 10), "expert_load": [[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]}
    for step in range(1, STEPS + 1)
]
ROWS[-1]["expert_load"] = [[0.75, 0.25, 0.0], [0.3, 0.2, 0.5]]
VALIDATIONS = [{"step": 1, "val_bpb": 7.5}, {"step": 30, "val_bpb": 8.0}, {"step": STEPS, "val_bpb": 3.25}]


@pytest.fixture
def drawn(tmp_path: Path) -> dict[str, Figure]:
    """Return the figure that is saved in each file."""
    return drawn_in(tmp_path)


def drawn_in(directory: Path) -> dict[str, Figure]:
    found: dict[str, Figure] = {}

    def save(figure: Figure, path: Path, dpi: int) -> None:
        assert "a title" in (figure.get_suptitle(), figure.axes[0].get_title()), "it is saved with its title"
        figure.set_dpi(dpi)
        found[path.name] = figure

    lines = [*ROWS[:1], VALIDATIONS[0], *ROWS[1:], *VALIDATIONS[1:]]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        plots.draw(directory, "a title", step_bytes=1234)
    return found


def test_the_loss(drawn: dict[str, Figure]) -> None:
    (axes,) = drawn["loss.png"].axes
    each, smoothed, validation = axes.lines
    bits = [8 - step / 10 for step in range(1, STEPS + 1)]
    assert list(each.get_xdata()) == list(smoothed.get_xdata()) == list(range(1, STEPS + 1))
    assert each.get_ydata() == pytest.approx(bits)
    assert smoothed.get_ydata() == pytest.approx([*bits[:-1], (bits[-2] + bits[-1]) / 2]), "a line stays one"
    assert (list(validation.get_xdata()), list(validation.get_ydata())) == ([1, 30, STEPS], [7.5, 8.0, 3.25])
    assert validation.get_linestyle() == "None"
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("7.50", (1, 7.5)), ("3.25", (STEPS, 3.25))]
    assert axes.get_ylim() == pytest.approx((0, 8.8))
    assert (axes.get_title(), axes.get_ylabel()) == ("a title", "loss (bits per byte)")
    assert axes.get_xlabel() == "optimizer step (1,234 bytes each)"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training, each step", "training, smoothed", "validation"]


def test_the_load_of_experts(drawn: dict[str, Figure]) -> None:
    figure = drawn["expert_load.png"]
    left, right, bar = figure.axes
    (image,) = left.images
    final = np.array([[0.625, 0.25, 0.125], [0.2, 0.2, 0.6]])  # of the last 5 % of the steps, two
    assert np.asarray(image.get_array()) == pytest.approx(final)
    assert isinstance(image.norm, TwoSlopeNorm)
    assert (image.norm.vmin, image.norm.vcenter, image.norm.vmax) == pytest.approx((0, 1 / 3, 2 / 3))
    cells = {text.get_position(): text.get_text() for text in left.texts}
    assert cells == {(x, y): f"{final[y, x]:.1%}" for y in range(2) for x in range(3)}
    assert (left.get_xlabel(), left.get_ylabel()) == ("expert", "layer")
    assert left.get_title() == "share of routed tokens, last 2 steps (even: 33.3%)"
    assert figure.get_suptitle() == "a title"
    assert bar.yaxis.get_major_formatter()(0.5) == "50%"
    *layers, mean = right.lines
    assert [line.get_label() for line in layers] == ["layer 0", "layer 1"]
    for line, usual, last in zip(layers, (1.5, 2.1), (2.25, 1.5), strict=True):
        assert list(line.get_xdata()) == list(range(1, STEPS + 1))
        values = line.get_ydata()
        assert values[: STEPS - 2] == pytest.approx([usual] * (STEPS - 2))
        assert values[-2] == pytest.approx((2 * usual + last) / 3)
        assert values[-1] == pytest.approx((usual + last) / 2)
    assert list(mean.get_ydata()) == [1, 1]
    assert (right.get_xlabel(), right.get_ylabel()) == ("optimizer step", "load of the busiest expert / mean load")
    assert right.get_ylim()[0] == 0.9
    assert len(right.get_legend().get_texts()) == 2


def test_a_heat_map_of_many_experts_has_no_labels() -> None:
    for experts, labels in ((16, 16), (17, 0)):
        rows = [{"step": 1, "expert_load": [[1 / experts] * experts]}]
        assert len(plots._expert_load(rows).axes[0].texts) == labels


@pytest.mark.parametrize(("busiest", "most"), [(0.5, 2 / 3), (0.9, 0.9)])
def test_colours_reach_the_busiest_expert(busiest: float, most: float) -> None:
    rows = [{"step": 1, "expert_load": [[busiest, 1 - busiest, 0.0]]}]
    assert plots._expert_load(rows).axes[0].images[0].norm.vmax == pytest.approx(most)


@pytest.mark.parametrize(
    ("values", "smoothed"),
    [
        ([3.0], [3.0]),
        ([0.0, 1.0, 8.0], [0.0, 1.0, 8.0]),  # a window of one
        ([0.0] * 39 + [3.0], [0.0] * 38 + [1.0, 1.5]),  # a window of two reaches one to each side
        ([3.0] + [0.0] * 39, [3.0, 1.0] + [0.0] * 38),
    ],
)
def test_windows_are_narrow_at_the_begin_and_cut_at_the_end(values: list[float], smoothed: list[float]) -> None:
    assert plots._smooth(np.array(values)) == pytest.approx(smoothed)


def every_figure(directory: Path) -> dict[str, Figure]:
    """Return a run's figures, and the load of 16 layers with more experts than have labels."""
    loads = [[[0.25 if expert == layer else 0.05 for expert in range(17)] for layer in range(16)] for _ in range(2)]
    rows = [{"step": step, "expert_load": load} for step, load in enumerate(loads)]
    with mpl.rc_context(mpl.rcParamsDefault):
        return {**drawn_in(directory), "many": plots._expert_load(rows)}


def test_figures_are_those_on_record(tmp_path: Path) -> None:
    figures = every_figure(tmp_path)
    assert figures.keys() == entries(RECORD).keys()
    for name, figure in figures.items():
        assert_on_record(RECORD, name, described(figure))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        write_record(RECORD, {name: described(figure) for name, figure in every_figure(Path(scratch)).items()})
