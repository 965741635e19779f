"""Which pictures a page has: their names, titles, captions, and how each is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.figure import Figure

from csprune.comparisons import PER_UNIT
from csprune.concentration import tenth
from csprune.measurement import REFERENCE, Evaluation
from csprune.pages.document_pictures import loss_over_documents, share_of_top_tenth
from csprune.pages.pictures import (
    agreement_against_rank,
    loss_against_distance,
    loss_against_rank,
    per_unit,
    relative_to_random,
    without_ratio,
)
from csprune.pages.wording import QUANTITY_NAMES, Report, capitalised, methods_of

_INTERVALS = (
    "Upright strokes: 95% intervals over documents; where none is seen, it is shorter than the mark. "
    "Marks of one rank stand a little apart, so that none hides another."
)


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Attributes:
        name: Of its files and of its place in the page; letters, digits and hyphens.
        title: What it shows.
        caption: What is to be seen in it, defined.
        draw: From a width in inches to the figure.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[float], Figure]


def of_report(report: Report, evaluation: Evaluation) -> list[Picture]:
    """The pictures of one report."""
    left_out = without_ratio(report, "per_unit_vs_random", PER_UNIT)
    found = [
        Picture(
            "loss",
            "What each truncation costs",
            f"Loss change against the share of directions removed. {_INTERVALS} Dashed: {REFERENCE} "
            "truncation, the mean over its subspaces; the grey band is the range of the subspaces' means.",
            partial(loss_against_rank, report),
        ),
        Picture(
            "distance",
            "How far the logits move, and what that costs",
            "Loss change against the logit distance D, a mark for each truncation, larger where more is "
            "removed; a method's marks are joined. To the left of another at the same height: as costly, "
            "though the logits move less.",
            partial(loss_against_distance, report),
        ),
    ]
    if methods_of(report) != [REFERENCE]:
        found.append(
            Picture(
                "per-unit",
                "What a unit of logit distance is worth",
                "Fisher term, prediction change and loss change per unit of logit distance D, as ratios "
                f"to random truncation of the same size (dashed, 1). {_INTERVALS}{_left_out(left_out)}",
                partial(per_unit, report),
            )
        )
    return [
        *found,
        Picture(
            "documents",
            "Where the loss change lies over the documents",
            "Every document's loss change in ascending order. Dashed: random truncation, for each "
            "document the mean over the subspaces. A curve that is flat and rises only at its right end "
            "is carried by few documents.",
            partial(loss_over_documents, evaluation),
        ),
        Picture(
            "top-tenth",
            "Whether a few documents carry it",
            f"The share of the total loss change that the {tenth(len(evaluation.document_ids)):,} "
            "documents with the highest ones carry: 10% where all documents are alike, above 100% where "
            "the others gain on the whole. A total near zero makes the share large.",
            partial(share_of_top_tenth, evaluation),
        ),
        Picture(
            "agreement",
            "How often the top token stays",
            f"The share of positions at which the most probable token stays the same. {_INTERVALS}",
            partial(agreement_against_rank, report),
        ),
    ]


def of_reports(reports: Sequence[Report], labels: Sequence[str]) -> list[Picture]:
    """The pictures that set several reports side by side (the paper's Figure 4)."""
    found = []
    for name, quantity, more in (
        ("comparison-loss", "loss_change", "Above 1: removing these directions costs more than random ones."),
        ("comparison-distance", "logit_distance", "Below 1: the logits move less than in random directions."),
    ):
        left_out = [
            f"{label}: {', '.join(ratios)}"
            for label, report in zip(labels, reports, strict=True)
            if (ratios := without_ratio(report, "vs_random", (quantity,)))
        ]
        title = f"{capitalised(QUANTITY_NAMES[quantity])} relative to random truncation"
        found.append(
            Picture(
                name,
                title,
                f"{title} of the same size (dashed, 1), a panel for each report, all on one scale. {more} "
                f"{_INTERVALS}{_left_out(left_out)}",
                partial(relative_to_random, list(reports), list(labels), quantity),
            )
        )
    return found


def among_others(pictures: Sequence[Picture], place: int) -> list[Picture]:
    """Those of a report's pictures that a page of several reports repeats, with names of their own."""
    kept = [each for each in pictures if each.name in ("loss", "distance", "documents")]
    return [replace(each, name=f"report-{place}-{each.name}") for each in kept]


def _left_out(ratios: Sequence[str]) -> str:
    """The sentence that names the ratios a picture cannot show."""
    if not ratios:
        return ""
    return f" Left out, for they are not positive or not defined: {'; '.join(ratios)}."
