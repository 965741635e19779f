"""The scales of a result's panels: which values they show, and where the names of places stand."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes

from csprune.analysis.results import Curve, Panel
from csprune.pages.scales import linear_axis, logarithmic_axis

MARKED = 26
"""Places: more marks on a line would hide it."""

LETTER = 0.08
"""Inches of a letter of a label, on average."""


def values(numbers: Sequence[float | None] | None, count: int = 0) -> np.ndarray:
    """Numbers as float64, NaN where undefined; so many NaN where there are none."""
    if numbers is None:
        return np.full(count, np.nan)
    return np.array([np.nan if each is None else each for each in numbers], dtype=np.float64)


def places(curve: Curve, panel: Panel) -> np.ndarray:
    """Where the values of a curve stand, float64."""
    return values(panel.x if curve.x is None else curve.x)


def showable(curve: Curve, panel: Panel) -> np.ndarray:
    """The values that the panel's scales can show, float64, NaN for the others."""
    x, y = places(curve, panel), values(curve.y)
    shown = y > 0 if panel.y_scale == "log" else np.isfinite(y)
    if panel.x_scale == "log" and not panel.x_labels:
        shown &= x > 0
    return np.where(shown, y, np.nan)


def left_out(panel: Panel) -> int:
    """How many values of a panel its logarithmic scales cannot show."""
    return sum(
        int((np.isfinite(values(curve.y)) & ~np.isfinite(showable(curve, panel))).sum())
        for curve in panel.curves
    )


def scale_values(axes: Axes, which: str, panels: Sequence[Panel], room: float) -> None:
    """Give an axis the scale of the values of panels that share it.

    Args:
        axes: To be scaled.
        which: "x" for a forest, else "y".
        panels: All with the same scale.
        room: Length of the axis in inches.
    """
    known, ends = [], []
    for panel in panels:
        known += [] if panel.line is None else [panel.line]
        for curve in panel.curves:
            known += values(curve.y).tolist()
            ends += [*values(curve.low).tolist(), *values(curve.high).tolist()]
    _scale(axes, which, known, ends, panels[0].y_scale, room)


def _scale(
    axes: Axes,
    which: str,
    known: Sequence[float],
    ends: Sequence[float],
    scale: str,
    room: float,
    whole: bool = False,
) -> None:
    """A scale that has room for values and ends of intervals.

    A logarithmic one shows the ends as far as a tenth of the smallest value, as `ratio_axis` does.
    """
    most = max(2, min(8, int(room / (0.55 if which == "x" else 0.28))))
    if scale == "log":
        shown = [value for value in known if value > 0]
        shown += [end for end in ends if shown and end > min(shown) / 10]
        if shown:
            logarithmic_axis(axes, which, min(shown), max(shown), most=most)
            return
    shown = [value for value in (*known, *ends) if np.isfinite(value)] if scale == "linear" else []
    linear_axis(axes, which, min(shown, default=0.0), max(shown, default=1.0), most, whole)


def scale_places(axes: Axes, panel: Panel, own: Sequence[np.ndarray], room: float) -> None:
    """Give the horizontal axis the scale of the places, numbers or names.

    Args:
        axes: To be scaled.
        panel: Not a forest.
        own: The places of each curve.
        room: Width of the panel in inches.
    """
    if panel.x_labels:
        _names(axes, panel, room)
        return
    every = np.concatenate([np.zeros(0), *own]) if panel.curves else values(panel.x)
    if panel.marks == "points":
        # Marks of one place stand a little apart: there must be room for them at both ends.
        every = np.concatenate([beside(every, panel, side) for side in (-0.5, 0.5)])
    shared = np.unique(np.concatenate([np.zeros(0), *own]))
    whole = len(shared) > 1 and not np.any(shared % 1)
    _scale(axes, "x", every.tolist(), [], panel.x_scale, room, whole)


def beside(x: np.ndarray, panel: Panel, apart: float) -> np.ndarray:
    """Places moved by a part of the smallest distance between the places of a panel.

    Args:
        x: float64 [places].
        panel: Whose places are shared by its curves, or not: then they stay.
        apart: The part of the distance.
    """
    shared = np.unique(values(panel.x))
    if panel.equal or len(panel.curves) < 2 or not 0 < len(shared) <= MARKED:
        return x
    if panel.x_scale == "log" and not panel.x_labels:
        steps = np.diff(np.log(shared[shared > 0]))
        return x * np.exp(apart * min(steps, default=0.3))
    return x + apart * min(np.diff(shared), default=1.0)


def names_room(panel: Panel, room: float) -> float:
    """The room for each name under a panel, inches."""
    places = np.unique(values(panel.x))
    if len(places) < 2:
        return room - 0.7
    span = (places[-1] - places[0]) * len(places) / (len(places) - 1)
    return (room - 0.7) * float(np.diff(places).min() / span)


def names_level(panel: Panel, room: float) -> bool:
    """Whether names under a panel are read without turning the page: their words have room."""
    words = [word for label in panel.x_labels or () for word in label.split()]
    return max(map(len, words), default=0) * LETTER <= names_room(panel, room)


def _names(axes: Axes, panel: Panel, room: float) -> None:
    """Names under their places: side by side if there is room, else upright, as many as can be read."""
    labels = list(panel.x_labels or ())
    each = names_room(panel, room)
    step = max(1, int(np.ceil(0.14 / each)))
    level = names_level(panel, room)
    low, high = min(panel.x), max(panel.x)
    margin = (high - low) * 0.5 / max(1, len(labels) - 1) if high > low else 0.5
    if panel.x_scale == "log" and low > 0:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.1, high * 1.1)
    else:
        axes.set_xlim(low - margin, high + margin)
    shown = list(zip(panel.x, labels, strict=True))[::step]
    axes.set_xticks(
        [place for place, _ in shown],
        [fill(name, max(1, int(each / LETTER)) if level else 24) for _, name in shown],
        rotation=0 if level else 90,
    )
    axes.minorticks_off()
    axes.grid(visible=False, axis="x")


def scale_equal(axes: Axes, x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> None:
    """A square of the same scale on both axes, with the same ticks."""
    middles, spans = [], []
    for numbers in (x, y):
        every = np.concatenate([np.zeros(0), *numbers])
        every = every[np.isfinite(every)]
        low, high = (every.min(), every.max()) if len(every) else (0.0, 1.0)
        middles.append((low + high) / 2)
        spans.append(high - low)
    half = 0.54 * max(spans) or 1.0
    axes.set_aspect("equal", adjustable="box")
    for which, middle in zip("xy", middles, strict=True):
        linear_axis(axes, which, middle - half, middle + half, most=5)
        axes.set(**{f"{which}lim": (middle - half, middle + half)})
