"""The picture of a benchmark: every paired difference with its 95% interval, metric by metric."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from csprune.bench.tables import describe, metric_name
from csprune.pages.theme import COLOURS, WIDE, colour

_MARKERS = "osD^vP*X"
_ROW, _FRAME = 0.24, 0.95
"""Inches: of one model in a row, and of a panel's title and axis."""


def forest(report: dict[str, Any]) -> Figure:
    """A panel for each metric, a row for each task and group, a mark for each checkpoint.

    Colours tell the methods, marks the checkpoints. Call it within `csprune.theme.drawing()`.

    Args:
        report: The content of `bench.json`.
    """
    rows: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for entry in report["tasks"] + report["groups"]:
        for metric in entry["metrics"]:
            name = entry.get("task") or f"{entry['group']} (all)"
            rows.setdefault(metric_name(metric), []).append((name, metric))
    models = report["models"][1:]
    heights = [_FRAME + _ROW * (len(models) + 0.6) * len(each) for each in rows.values()]
    figure = Figure(figsize=(WIDE, sum(heights) + 0.3), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (metric, found) in zip(panels, rows.items(), strict=True):
        _panel(axes, metric, found, models)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=min(3, len(models)))
    return figure


def _panel(
    axes: Axes, metric: str, found: list[tuple[str, dict[str, Any]]], models: list[dict[str, Any]]
) -> None:
    step = 0.8 / len(models)
    for place, model in enumerate(models):
        method = model["csprune"]["method"] if model["csprune"] else None
        own = [entry["outputs"][place] for _, entry in found]
        values = [each["difference"] for each in own]
        reach = [
            [value - each["difference_ci95"][0] for value, each in zip(values, own, strict=True)],
            [each["difference_ci95"][1] - value for value, each in zip(values, own, strict=True)],
        ]
        # A percentile interval need not contain the value that it is of.
        axes.errorbar(
            values,
            [row + step * (place - (len(models) - 1) / 2) for row in range(len(found))],
            xerr=[[max(0.0, each) for each in side] for side in reach],
            fmt=_MARKERS[place % len(_MARKERS)],
            color=colour(method) if method in COLOURS else colour("ink"),
            capsize=2.5,
            elinewidth=1.3,
            label=describe(model),
        )
    axes.axvline(0, color=colour("muted"), linewidth=1)
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    better = {True: ", higher is better", False: ", lower is better"}.get(found[0][1]["higher_is_better"], "")
    axes.set_title(f"{metric}{better}")
    axes.set_xlabel("difference from the original, with its 95% interval (items paired)")
