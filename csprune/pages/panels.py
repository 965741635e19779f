"""One panel of a result's picture: its scales, and lines, steps, points or a cloud on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from csprune.analysis.results import Curve, Panel
from csprune.pages.panel_scales import (
    MARKED,
    beside,
    names_level,
    places,
    scale_equal,
    scale_places,
    showable,
    values,
)
from csprune.pages.theme import colour

Looks = Mapping[str, Mapping[str, Any]]
"""Of `theme.looks`, by a curve's label."""

_CLOUD = 80  # points: more are dots, for as many marks would hide each other
_CROWD = 8  # curves: more are thin, and told apart by colour and stroke alone


def is_forest(panel: Panel, room: float) -> bool:
    """Whether labelled points are drawn as rows, with the labels on the left.

    Args:
        panel: To be drawn.
        room: Its width in inches.
    """
    if panel.marks != "points" or not panel.x_labels:
        return False
    return len(panel.x_labels) > 5 or not names_level(panel, room)


def has_marks(panel: Panel) -> bool:
    """Whether the curves of a panel have marks."""
    return panel.marks == "points" or (panel.marks == "lines" and len(panel.curves) <= _CROWD)


def is_cloud(panel: Panel, curve: Curve) -> bool:
    """Whether a curve is drawn as dots."""
    return panel.marks == "points" and len(curve.y) > _CLOUD


def draw_forest(axes: Axes, panel: Panel, looks: Looks, letters: int) -> None:
    """Labelled points in rows from top to bottom; the value axis must have been scaled.

    Args:
        axes: To be drawn on.
        panel: With `x_labels`.
        looks: By label.
        letters: How many of them a line of a label has.
    """
    rows = {x: -row for row, x in enumerate(panel.x)}
    _null(axes.axvline, panel)
    for place, curve in enumerate(panel.curves):
        # The first curve is the uppermost, as in the legend.
        height = values([rows[float(x)] for x in places(curve, panel)]) - _apart(place, len(panel.curves))
        _points(axes, showable(curve, panel), height, curve, panel, looks[curve.label], upright=False)
    axes.set_ylim(-len(panel.x) + 0.4, 0.6)
    axes.set_yticks(list(rows.values()), [fill(each, letters) for each in panel.x_labels or ()])
    axes.tick_params("y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def draw_panel(axes: Axes, panel: Panel, looks: Looks, room: float) -> None:
    """Everything but a forest; the value axis must have been scaled.

    Args:
        axes: To be drawn on.
        panel: What is drawn.
        looks: By label.
        room: Width of the panel in inches.
    """
    own = [places(curve, panel) for curve in panel.curves]
    if panel.equal:
        scale_equal(axes, own, [values(curve.y) for curve in panel.curves])
    else:
        scale_places(axes, panel, own, room)
    _null(axes.axhline, panel)
    # What others are compared with lies below them.
    for place, (curve, x) in enumerate(zip(panel.curves, own, strict=True)):
        look = {"zorder": 2.0 if curve.reference else 2.5, **looks[curve.label]}
        y = showable(curve, panel)
        if is_cloud(panel, curve):
            _dots(axes, x, y, look)
        elif panel.marks == "points":
            x = x if curve.x is not None else beside(x, panel, _apart(place, len(panel.curves)))
            _points(axes, x, y, curve, panel, look, upright=True)
        else:
            _line(axes, x, y, curve, panel, look, place)


def _apart(place: int, count: int) -> float:
    """How far a curve's marks stand beside their place, in units of the distance between places."""
    return (place - (count - 1) / 2) * min(0.18, 0.7 / count)


def _ends(axes: Axes, curve: Curve, which: str) -> tuple[np.ndarray, np.ndarray]:
    """The ends of a curve's intervals, cut off at the edges of the axes."""
    lowest, highest = axes.get_xlim() if which == "x" else axes.get_ylim()
    count = len(curve.y)
    low, high = values(curve.low, count), values(curve.high, count)
    return np.clip(low, lowest, highest), np.clip(high, lowest, highest)


def _points(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    curve: Curve,
    panel: Panel,
    look: Mapping[str, Any],
    *,
    upright: bool,
) -> None:
    """Marks with their intervals as strokes."""
    low, high = _ends(axes, curve, "y" if upright else "x")
    known = np.isfinite(x) & np.isfinite(y) & np.isfinite(low) & np.isfinite(high)
    stroke = axes.vlines if upright else axes.hlines
    along = (x if upright else y)[known]
    stroke(along, low[known], high[known], color=look["color"], linewidth=1.5, alpha=0.75, zorder=2.2)
    axes.plot(x, y, **{**look, "linestyle": "none", "alpha": 0.8 if len(x) > MARKED else 1.0})


def _dots(axes: Axes, x: np.ndarray, y: np.ndarray, look: Mapping[str, Any]) -> None:
    """A cloud as one path of round strokes of hardly any length: a hundredth of as many marks' bytes."""
    known = np.isfinite(x) & np.isfinite(y)
    starts = np.column_stack([x, y])[known]
    ends = starts + np.array([4e-4 * float(np.diff(axes.get_xlim())[0]), 0.0])
    vertices = np.stack([starts, ends], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO], len(starts))
    dots = PathPatch(
        Path(vertices, codes),
        fill=False,
        edgecolor=look["color"],
        linewidth=2.0,
        alpha=0.55,
        capstyle="round",
        snap=False,
        zorder=look["zorder"],
    )
    axes.add_patch(dots)


def _line(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    curve: Curve,
    panel: Panel,
    look: Mapping[str, Any],
    place: int,
) -> None:
    """A line or steps with a light band; marks where there is room, and on values that stand alone."""
    crowd = len(panel.curves) > _CROWD
    known = np.isfinite(x) & np.isfinite(y)
    low, high = _ends(axes, curve, "y")
    whole = known & np.isfinite(low) & np.isfinite(high)
    steps = panel.marks == "steps"
    axes.fill_between(
        x,
        low,
        high,
        where=whole.tolist(),
        step="mid" if steps else None,
        color=look["color"],
        alpha=0.08 if crowd else 0.17,
        linewidth=0,
        zorder=1.8,
    )
    shape = {"drawstyle": "steps-mid", "solid_joinstyle": "miter"} if steps else {}
    every = 1 if len(x) <= MARKED else (place * len(x) // 40 % max(1, len(x) // 6), len(x) // 6)
    marked = has_marks(panel)
    axes.plot(
        x,
        y,
        **{
            **look,
            **shape,
            "marker": look["marker"] if marked else None,
            "markevery": every if marked else None,
            "markersize": 4.5,
            "linewidth": 1.1 if crowd else 1.5,
        },
    )
    before, after = np.r_[False, known[:-1]], np.r_[known[1:], False]
    alone = known & ~before & ~after
    axes.vlines(x[alone & whole], low[alone & whole], high[alone & whole], color=look["color"], linewidth=1.2)
    axes.plot(x[alone], y[alone], **{**look, "linestyle": "none", "markersize": 4.5})


def _null(draw: Callable[..., Any], panel: Panel) -> None:
    """The line at the null value."""
    if panel.line is not None and (panel.y_scale == "linear" or panel.line > 0):
        draw(panel.line, color=colour("muted"), linewidth=0.9, zorder=1.6)
