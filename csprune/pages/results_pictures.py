"""The pictures of results, from their declarations: panels, one legend, what cannot be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from csprune.analysis.results import Panel, Picture
from csprune.pages.panel_scales import LETTER, left_out, names_level, scale_values, showable
from csprune.pages.panels import Looks, draw_forest, draw_panel, has_marks, is_cloud, is_forest
from csprune.pages.theme import NARROW, WIDE, colour, drawing, looks


def draw(picture: Picture, width: float = WIDE) -> Figure:
    """A picture as a figure.

    Panels stand side by side on a wide page, three at most, and below each other on a narrow one. Panels
    with the same scale and title of values share their axis. Labelled points become rows where the labels
    would not fit below them.

    Args:
        picture: As `results_check.check_results` accepts it.
        width: In inches: `theme.WIDE` or `theme.NARROW`.
    """
    with drawing():
        plan = _Plan.of(picture, width)
        shared = looks(
            (curve.label for panel in picture.panels for curve in panel.curves),
            (curve.label for panel in picture.panels for curve in panel.curves if curve.reference),
        )
        labels = {name: fill(name, int(width / LETTER) - 6) for name in shared if name}
        columns = _legend_columns(list(labels), width)
        rows = -(-len(labels) // columns)
        lines = rows * max((label.count("\n") + 1 for label in labels.values()), default=0)
        figure = Figure(figsize=(width, sum(plan.row_heights) + 0.17 * lines + (0.25 if labels else 0.1)))
        grid = figure.subplots(
            plan.rows, plan.columns, squeeze=False, gridspec_kw={"height_ratios": plan.row_heights}
        )
        flat = list(grid.flat)
        for axes in flat[len(picture.panels) :]:
            axes.remove()
        for place, axes in enumerate(flat[: len(picture.panels)]):
            _draw_one(axes, picture.panels, place, plan, shared)
        if labels:
            figure.legend(
                handles=[
                    Line2D([], [], **{**_in_legend(name, picture, shared), "label": label})
                    for name, label in labels.items()
                ],
                loc="outside upper left",
                ncols=columns,
                columnspacing=1.4,
                handletextpad=0.5,
                handlelength=2.2,
                borderaxespad=0,
                alignment="left",
            )
        if lost := sum(map(left_out, picture.panels)):
            figure.supxlabel(
                fill(f"Left out, not a positive number: {lost} of the values", int(width / 0.07)),
                fontsize=8,
                color=colour("muted"),
            )
        return figure


@dataclass(frozen=True)
class _Plan:
    """How a picture is laid out.

    Attributes:
        rows: Of panels.
        columns: Of panels.
        room: Width of one panel, inches.
        heights: Of each panel, inches.
        forest: Whether each panel is one.
        letters: In a line of a forest's label.
    """

    rows: int
    columns: int
    room: float
    heights: Sequence[float]
    forest: Sequence[bool]
    letters: int

    @classmethod
    def of(cls, picture: Picture, width: float) -> _Plan:
        panels = picture.panels
        columns = 1 if width <= NARROW else {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
        if any(len(panel.x_labels or ()) > 12 and panel.marks != "points" for panel in panels):
            columns = min(columns, 2)  # names stand at every place
        room = width / columns
        letters = 18 if columns > 2 or width <= NARROW else 30
        forest = [is_forest(panel, room) for panel in panels]
        heights = [
            _forest_height(panel, letters) if rows else _height(panel, columns, room)
            for panel, rows in zip(panels, forest, strict=True)
        ]
        return cls(-(-len(panels) // columns), columns, room, heights, forest, letters)

    @property
    def row_heights(self) -> list[float]:
        """Of the rows of panels, inches."""
        return [max(self.heights[row * self.columns :][: self.columns]) for row in range(self.rows)]


def _height(panel: Panel, columns: int, room: float) -> float:
    if panel.equal:
        return min(room, 4.6) + 0.05
    height = {1: 3.3 if room > NARROW else 2.5, 2: 2.8}.get(columns, 2.6)
    if panel.x_labels and not names_level(panel, room):
        height += min(24, max(map(len, panel.x_labels))) * LETTER * 0.8
    return height


def _forest_height(panel: Panel, letters: int) -> float:
    curves = len(panel.curves)
    lines = max(fill(label, letters).count("\n") + 1 for label in panel.x_labels or [""])
    row = max(0.24 + 0.11 * (curves - 1), 0.15 * lines + 0.06)
    return 0.85 + row * len(panel.x)


def _draw_one(axes: Axes, panels: Sequence[Panel], place: int, plan: _Plan, shared: Looks) -> None:
    """A panel with its titles."""
    panel, forest = panels[place], plan.forest[place]
    alike = [
        each
        for each, rows in zip(panels, plan.forest, strict=True)
        if not panel.equal
        and (each.y_title, each.y_scale, each.equal, rows) == (panel.y_title, panel.y_scale, False, forest)
    ]
    across = max(12, int((plan.room - 0.6) / LETTER))
    upward = max(12, int((plan.heights[place] - 0.4) / LETTER))
    axes.set_title(fill(panel.title, int(across * 0.85)))
    if not any(np.isfinite(showable(curve, panel)).any() for curve in panel.curves):
        axes.set_axis_off()
        why = "positive" if left_out(panel) else "defined"
        axes.text(0, 0.5, fill(f"Nothing to show: no value is {why}.", across), transform=axes.transAxes)
        return
    scale_values(axes, "x" if forest else "y", alike or [panel], plan.room if forest else plan.heights[place])
    if forest:
        draw_forest(axes, panel, shared, plan.letters)
        axes.set_xlabel(fill(panel.y_title, across))
        axes.set_ylabel(fill(panel.x_title, upward))
        before = panels[place - 1] if place % plan.columns else None
        if before is not None and plan.forest[place - 1] and before.x_labels == panel.x_labels:
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")
    else:
        draw_panel(axes, panel, shared, plan.room)
        axes.set_xlabel(fill(panel.x_title, across))
        axes.set_ylabel(fill(panel.y_title, upward))
        if place % plan.columns and len(alike) == len(panels):
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")


def _in_legend(name: str, picture: Picture, shared: Looks) -> dict[str, Any]:
    """A curve's line and mark, as far as the panels have them."""
    own = [panel for panel in picture.panels if any(curve.label == name for curve in panel.curves)]
    look = dict(shared[name])
    if all(panel.marks == "points" for panel in own):
        look["linestyle"] = "none"
    if not any(map(has_marks, own)):
        look["marker"] = None
    if all(is_cloud(panel, curve) for panel in own for curve in panel.curves if curve.label == name):
        look.update(marker="o", markeredgecolor=look["color"])
    return look


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """As many as fit."""
    widest = max(map(len, labels), default=1) * LETTER + 0.6
    return max(1, min(len(labels), int((width - 0.2) / widest), 6))
