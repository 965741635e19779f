"""Where a loss change lies over the documents: whether a few of them carry it (the paper's E.2)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from csprune.concentration import concentrations
from csprune.measurement import REFERENCE, Evaluation, Measurement
from csprune.pages.scales import amount_axis, ratio_axis
from csprune.pages.theme import NARROW, WIDE, colour, drawing, legend, look
from csprune.pages.wording import percent

_POINTS = 201  # of a curve at most; it passes through the least and the greatest document


def loss_over_documents(evaluation: Evaluation, width: float = WIDE) -> Figure:
    """The documents' loss changes in ascending order, a panel for each rank."""
    with drawing():
        ranks = _ranks(evaluation)
        columns = min(len(ranks), 3 if width > NARROW else 1)
        rows = -(-len(ranks) // columns)
        figure = Figure(figsize=(width, (3.2 if columns > 1 else 2.3) * rows + 0.6))
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        places = list(grid.flat)
        shown: list[float] = []
        for axes, rank in zip(places, ranks, strict=False):
            axes.set_title(f"{percent(rank)} removed")
            for each in _ordered(evaluation):
                if each.rank != rank:
                    continue
                values = each.per_document("loss_change")
                levels = np.linspace(0, 1, min(len(values), _POINTS))
                curve = np.quantile(values, levels)
                shown += curve.tolist()
                axes.plot(100 * levels, curve, **look(each.method, marker=None))
                # One mark in the middle, by which the curve is known without its colour.
                axes.plot([50], [np.median(values)], **look(each.method, linestyle="none"))
        for axes in places[len(ranks) :]:
            axes.remove()
        for place, axes in enumerate(places[: len(ranks)]):
            amount_axis(axes, "y", shown, "loss change of a document, nats")
            figure.supylabel(axes.get_ylabel(), fontsize=9, color=colour("ink"))
            axes.set_ylabel("")
            axes.set_xlim(0, 100)
            axes.set_xticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100%"])
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("documents, lowest first" if place >= len(ranks) - columns else "")
        legend(figure, dict.fromkeys(each.method for each in _ordered(evaluation)), width)
        return figure


def share_of_top_tenth(evaluation: Evaluation, width: float = WIDE) -> Figure:
    """The share of each loss change that the tenth of the documents with the highest ones carries."""
    with drawing():
        ranks = _ranks(evaluation)
        methods = list(dict.fromkeys(each.method for each in _ordered(evaluation)))
        rows = [(rank, method) for rank in ranks for method in methods]
        found = {(each.rank, each.method): each for each in concentrations(evaluation)}
        rows = [row for row in rows if row in found]
        figure = Figure(figsize=(width, 0.21 * len(rows) + 0.16 * len(ranks) + 0.9))
        axes = figure.add_subplot()
        known: list[float] = []
        heights: list[float] = []
        for place, (rank, method) in enumerate(rows):
            height = -place - 0.8 * ranks.index(rank)
            heights.append(height)
            value = found[rank, method].top_tenth
            if value is None:
                note = "the total is not positive"
                axes.text(0.105, height, note, va="center", fontsize=8, color=colour("muted"))
                continue
            known.append(value)
            axes.hlines(height, 0.1, value, color=colour(method), linewidth=1.2)
            axes.plot([value], [height], **look(method, linestyle="none"))
        for value in (0.1, 1.0):  # all documents alike; the whole total
            if value <= max([0.1, *known]) * 1.05:
                axes.axvline(value, color=colour("muted"), linewidth=0.9, linestyle=":")
        ratio_axis(axes, "x", [0.1, *known], write=percent)
        axes.set_ylim(min(heights) - 0.7, 0.7)
        axes.set_yticks(heights, [f"{method}  {percent(rank)}" for rank, method in rows])
        axes.tick_params("y", length=0)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        figure.supxlabel(
            "carried by the highest tenth of documents\n(10%: all documents alike)",
            fontsize=9,
            color=colour("ink"),
        )
        return figure


def _ranks(evaluation: Evaluation) -> list[float]:
    return sorted({each.rank for each in evaluation.measurements})


def _ordered(evaluation: Evaluation) -> list[Measurement]:
    """The measurements, the reference last."""
    return sorted(evaluation.measurements, key=lambda each: each.method == REFERENCE)
