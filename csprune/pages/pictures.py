"""The pictures of reports: what truncations cost, against their size and against random truncation.

Each takes reports and a width in inches, `theme.WIDE` or `theme.NARROW`, and gives a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from csprune.comparisons import PER_UNIT
from csprune.measurement import REFERENCE
from csprune.pages.scales import amount_axis, rank_axis, rank_limits, ratio_axis, share_axis
from csprune.pages.theme import NARROW, WIDE, colour, drawing, legend, look
from csprune.pages.wording import (
    QUANTITY_NAMES,
    Report,
    entries_of,
    methods_of,
    percent,
    ranks_of,
    shortened,
    times,
)

Entry = dict[str, Any]
Pick = Callable[[Entry], Entry]
"""From an entry of `truncations` to a mapping with `ratio` and `ci95`."""

_LOSS_LABEL = "loss change, nats"


def loss_against_rank(report: Report, width: float = WIDE) -> Figure:
    """Every loss change with its interval; random truncation as the range of its subspaces and their mean."""
    with drawing():
        figure = Figure(figsize=(width, 3.9))
        axes = figure.add_subplot()
        shown = _lines(axes, report, "loss_change")
        amount_axis(axes, "y", shown, _LOSS_LABEL)
        legend(figure, methods_of(report), width)
        return figure


def agreement_against_rank(report: Report, width: float = WIDE) -> Figure:
    """How often the most probable token stays the same, with its interval."""
    with drawing():
        figure = Figure(figsize=(width, 3.3))
        axes = figure.add_subplot()
        share_axis(axes, "y", _lines(axes, report, "top1_agreement"))
        axes.set_ylabel("top token kept")
        legend(figure, methods_of(report), width)
        return figure


def _lines(axes: Axes, report: Report, quantity: str) -> list[float]:
    """A quantity against the rank, a line for each method; all values that are to be seen."""
    ranks, methods = ranks_of(report), methods_of(report)
    shown: list[float] = []
    for method in methods:
        entries = entries_of(report, method)
        places = _places([entry["rank"] for entry in entries], methods.index(method), methods, ranks)
        values = [entry[quantity]["mean"] for entry in entries]
        shown += values
        if method == REFERENCE and all("subspaces" in entry for entry in entries):
            shown += _band(axes, [(entry["rank"], entry["subspaces"][quantity]) for entry in entries], ranks)
        shown += _intervals(axes, places, [entry[quantity]["ci95"] for entry in entries], method)
        axes.plot(places, values, **look(method))
    rank_axis(axes, ranks)
    return shown


def _places(own: Sequence[float], place: int, methods: Sequence[str], ranks: Sequence[float]) -> list[float]:
    """Where a method's marks stand: at its ranks, a little apart, so that no interval hides another.

    Random truncation's are at the ranks themselves, as its band is; but not where there is a single rank.
    """
    if methods[place] == REFERENCE and len(ranks) > 1:
        return list(own)
    others = sum(method != REFERENCE for method in methods)
    apart = 1.12 if len(ranks) == 1 else (max(ranks) / min(ranks)) ** 0.01
    return [rank * apart ** (place - others // 2 + 0.5) for rank in own]


def _band(
    axes: Axes, subspaces: Sequence[tuple[float, Sequence[float]]], ranks: Sequence[float]
) -> list[float]:
    """The range of the random subspaces' means, drawn a little beyond the outer ranks."""
    places = [rank for rank, _ in subspaces]
    lows, highs = [min(values) for _, values in subspaces], [max(values) for _, values in subspaces]
    before, after = rank_limits(ranks)
    middle = (
        np.sqrt(np.array([before * places[0], after * places[-1]])) if len(ranks) > 1 else [before, after]
    )
    axes.fill_between(
        [middle[0], *places, middle[1]],
        [lows[0], *lows, lows[-1]],
        [highs[0], *highs, highs[-1]],
        color=colour(REFERENCE),
        alpha=0.28,
        linewidth=0,
    )
    return lows + highs


def _intervals(
    axes: Axes, places: Sequence[float], ends: Sequence[Sequence[float] | None], method: str
) -> list[float]:
    """Upright 95% intervals, and the ends of those that exist."""
    known = [(place, *pair) for place, pair in zip(places, ends, strict=True) if pair is not None]
    if known:
        axes.vlines(*zip(*known, strict=True), color=colour(method), linewidth=1.6, alpha=0.75)
    return [end for _, low, high in known for end in (low, high)]


def loss_against_distance(report: Report, width: float = WIDE) -> Figure:
    """What moving the logits so far costs: a mark for each truncation, larger where more is removed."""
    with drawing():
        figure = Figure(figsize=(width, 4.1))
        axes = figure.add_subplot()
        ranks = ranks_of(report)
        across: list[float] = []
        upward: list[float] = []
        for method in methods_of(report):
            entries = entries_of(report, method)
            x = [entry["logit_distance"]["mean"] for entry in entries]
            y = [entry["loss_change"]["mean"] for entry in entries]
            axes.plot(x, y, **look(method, marker=None, linewidth=1.1, alpha=0.8))
            for entry, a, b in zip(entries, x, y, strict=True):
                size = 4 + 4 * ranks.index(entry["rank"]) / max(1, len(ranks) - 1)
                axes.plot([a], [b], **look(method, linestyle="none", markersize=size))
                if method == REFERENCE and entry["rank"] in (ranks[0], ranks[-1]):
                    axes.annotate(
                        percent(entry["rank"]),
                        (a, b),
                        (6, -4),
                        textcoords="offset points",
                        va="top",
                        fontsize=8,
                        color=colour("muted"),
                    )
            across, upward = across + x, upward + y
        amount_axis(
            axes, "x", across, "logit distance D, logit\N{SUPERSCRIPT TWO}", most=7 if width > NARROW else 4
        )
        amount_axis(axes, "y", upward, _LOSS_LABEL)
        legend(figure, methods_of(report), width)
        return figure


def per_unit(report: Report, width: float = WIDE) -> Figure:
    """What a unit of logit distance is worth, relative to random truncation of the same rank."""
    panels = [
        (f"{name.replace('_', ' ').capitalize()} / D", report, _pick("per_unit_vs_random", name))
        for name in PER_UNIT
    ]
    return _ratio_panels(panels, width, "ratio to random truncation", columns=3 if width > NARROW else 1)


def relative_to_random(
    reports: Sequence[Report], labels: Sequence[str], quantity: str, width: float = WIDE
) -> Figure:
    """The paper's Figure 4: a quantity relative to random truncation, a panel for each report."""
    columns = min(len(reports), 3 if width > NARROW else 2)
    longest = round((width - 0.9) * 9 / columns)  # letters that a panel has room for
    panels = [
        (shortened(label, longest), report, _pick("vs_random", quantity))
        for label, report in zip(labels, reports, strict=True)
    ]
    return _ratio_panels(panels, width, f"{QUANTITY_NAMES[quantity]},\nratio to random truncation", columns)


def without_ratio(report: Report, group: str, quantities: Sequence[str]) -> list[str]:
    """The ratios that no logarithmic axis can show, as a caption lists them.

    Args:
        report: Of one evaluation.
        group: `vs_random` or `per_unit_vs_random`.
        quantities: Those that the picture shows.
    """
    found = []
    for method in methods_of(report):
        for entry in entries_of(report, method) if method != REFERENCE else []:
            for name in quantities:
                ratio = entry[group][name]["ratio"]
                if ratio is None or ratio <= 0:
                    value = "undefined" if ratio is None else times(ratio)
                    what = f", {QUANTITY_NAMES[name]}" if len(quantities) > 1 else ""
                    found.append(f"{method} at {percent(entry['rank'])}{what} ({value})")
    return found


def _pick(group: str, quantity: str) -> Pick:
    return lambda entry: entry[group][quantity]


def _ratio_panels(
    panels: Sequence[tuple[str, Report, Pick]], width: float, label: str, columns: int
) -> Figure:
    """Ratios against the rank, a panel each, all on the same logarithmic scale with a line at 1."""
    with drawing():
        rows = -(-len(panels) // columns)
        height = (2.2 if columns == 1 else 2.5) * rows + 0.9
        figure = Figure(figsize=(width, height))
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        methods = list(dict.fromkeys(m for _, report, _ in panels for m in methods_of(report)))
        methods = [method for method in methods if method != REFERENCE]
        ranks = sorted({rank for _, report, _ in panels for rank in ranks_of(report)})
        shown: list[float] = []
        limits: list[float] = []
        left_out = 0
        for axes, (title, report, pick) in zip(grid.flat, panels, strict=False):
            axes.set_title(title)
            axes.axhline(1, **look(REFERENCE, marker=None, linewidth=1.1))
            for method in methods:
                entries = entries_of(report, method)
                ratios = [pick(entry)["ratio"] for entry in entries]
                usable = [value is not None and value > 0 for value in ratios]
                left_out += usable.count(False)
                places = _places([e["rank"] for e in entries], methods.index(method), methods, ranks)
                values = [value if good else np.nan for value, good in zip(ratios, usable, strict=True)]
                ends = [
                    pick(entry)["ci95"] if good else None for entry, good in zip(entries, usable, strict=True)
                ]
                shown += [value for value, good in zip(values, usable, strict=True) if good]
                limits += _intervals(axes, places, ends, method)
                axes.plot(places, values, **look(method))
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()
        ratio_axis(grid[0, 0], "y", shown, limits)
        for place, axes in enumerate(list(grid.flat)[: len(panels)]):
            rank_axis(axes, ranks)
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("directions removed" if place >= len(panels) - columns else "")
        figure.supylabel(label, fontsize=9, color=colour("ink"))
        legend(figure, methods, width, f"{REFERENCE} = 1")
        if left_out:
            figure.supxlabel(
                f"Left out, not a positive number: {left_out} of the ratios",
                fontsize=8,
                color=colour("muted"),
            )
        return figure
