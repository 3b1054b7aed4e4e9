"""A figure as plain values: its size, texts, curves, bars, cells, axes and colours, but not where a layout puts them.

A record of them shows each change of a figure, and a reader which one it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator, FuncFormatter, PercentFormatter
from support.recorded import plain

SHOWN_VALUES = (0.0, 0.5, 1.5, 2500.0)  # that the label of a tick may have


def described(figure: Figure) -> Any:
    engine = figure.get_layout_engine()
    return plain(
        {
            "inches": figure.get_size_inches(),
            "dpi": figure.get_dpi(),
            "layout": type(engine).__name__,
            "title": figure.get_suptitle(),
            "legends": [_legend(legend) for legend in figure.legends],
            "axes": [_axes(axes) for axes in figure.axes],
        }
    )


def _axes(axes: Axes) -> dict[str, Any]:
    legend = axes.get_legend()
    spec = axes.get_subplotspec()
    return {
        "titles": [axes.get_title(loc=where) for where in ("left", "center", "right")],
        "x": _axis(axes.xaxis, axes.get_xlim()),
        "y": _axis(axes.yaxis, axes.get_ylim()),
        "heights": None if spec is None else spec.get_gridspec().get_height_ratios(),
        "aspect": axes.get_aspect(),
        "spines": {name: spine.get_visible() for name, spine in axes.spines.items()},
        "lines": [
            [line.get_label() if not line.get_label().startswith("_") else "", _color(line.get_color()),
             line.get_alpha(), line.get_linewidth(), line.get_linestyle(), line.get_marker(), line.get_markersize(),
             line.get_xdata(), line.get_ydata()]
            for line in axes.lines
        ],
        "bars": [
            [bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height(), _color(bar.get_facecolor()), bar.get_alpha()]
            for bar in axes.patches
        ],
        "areas": [
            [_color(area.get_facecolor()[0]), area.get_alpha(), area.get_linewidth(),
             sorted(map(tuple, area.get_paths()[0].vertices.tolist()))]
            for area in axes.collections if len(area.get_facecolor()) == 1
        ],
        "images": [
            [np.asarray(image.get_array()), image.get_cmap().name, image.get_clim(),
             image.norm.vcenter if isinstance(image.norm, TwoSlopeNorm) else None]
            for image in axes.images
        ],
        "texts": [_text(text) for text in axes.texts],
        "legend": None if legend is None else _legend(legend),
    }  # fmt: skip


def _axis(axis: Any, limits: tuple[float, float]) -> dict[str, Any]:
    fixed = isinstance(axis.get_major_locator(), FixedLocator)
    lines = axis.get_gridlines()
    return {
        "label": axis.label.get_text(),
        "scale": [axis.get_scale(), getattr(axis.get_transform(), "base", None)],
        "limits": limits,
        "ticks": axis.get_ticklocs() if fixed else type(axis.get_major_locator()).__name__,
        "most ticks": getattr(axis.get_major_locator(), "_nbins", None),
        "whole ticks": getattr(axis.get_major_locator(), "_integer", None),
        "tick labels": [label.get_text() for label in axis.get_ticklabels()] if fixed else _formatted(axis),
        "grid": sorted({(line.get_visible(), line.get_alpha()) for line in lines}, key=str),
    }


def _formatted(axis: Any) -> list[str]:
    made = axis.get_major_formatter()
    return [made(value, 0) for value in SHOWN_VALUES] if isinstance(made, (FuncFormatter, PercentFormatter)) else []


def _text(text: Text) -> list[Any]:
    box = text.get_bbox_patch()
    around = None if box is None else [_color(box.get_facecolor()), _color(box.get_edgecolor()), box.get_boxstyle().pad]
    place = text.xy if isinstance(text, Annotation) else None
    coordinates = str(text.anncoords) if isinstance(text, Annotation) else ""
    aligned = [text.get_ha(), text.get_va(), text.get_fontsize(), _color(text.get_color())]
    return [text.get_text(), text.get_position(), place, coordinates, *aligned, around]


def _legend(legend: Legend) -> dict[str, Any]:
    texts = legend.get_texts()
    place = getattr(legend, "_outside_loc", None) or legend._loc
    sizes = sorted({text.get_fontsize() for text in texts})
    return {"texts": [text.get_text() for text in texts], "frame": legend.get_frame_on(), "columns": legend._ncols,
            "place": place, "font sizes": sizes}  # fmt: skip


def _color(color: Any) -> str:
    return to_hex(color, keep_alpha=True)
