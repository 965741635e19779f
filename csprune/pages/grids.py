"""The tables of the report's page and summary: headings and cells as text, before HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from csprune.comparisons import PER_UNIT
from csprune.concentration import Concentration, concentrations, tenth
from csprune.measurement import QUANTITIES, REFERENCE, Evaluation
from csprune.pages.wording import (
    DASH,
    QUANTITY_NAMES,
    Report,
    by_rank,
    entries_of,
    figure,
    methods_of,
    nats,
    percent,
    ranks_of,
    share,
    times,
    with_interval,
)


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        name: For links; distinct within a report.
        title: What it shows.
        headings: One for each column.
        rows: Cells, as many as headings.
        note: What the columns are.
        left: How many of the first columns are words, not figures.
        grouped: Whether the first column names groups of rows.
    """

    name: str
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    left: int = 2
    grouped: bool = True


def costs(report: Report) -> Grid:
    """What every truncation costs."""
    rows = []
    for entry in by_rank(report):
        loss, distance = entry["vs_random"]["loss_change"], entry["vs_random"]["logit_distance"]
        own = entry["method"] == REFERENCE
        rows.append(
            [
                percent(entry["rank"]),
                entry["method"],
                with_interval(entry["loss_change"]["mean"], entry["loss_change"]["ci95"], nats),
                DASH if own else with_interval(loss["ratio"], loss["ci95"], times),
                figure(entry["logit_distance"]["mean"]),
                DASH if own else with_interval(distance["ratio"], distance["ci95"], times),
                figure(entry["fisher_term"]["mean"]),
                figure(entry["prediction_change"]["mean"]),
                share(entry["top1_agreement"]["mean"]),
            ]
        )
    return Grid(
        "costs",
        "What each truncation costs",
        ["removed", "method", "loss change", "to random's", "D", "to random's", "F", "K", "top-1"],
        rows,
        "Loss change, F (Fisher term) and K (prediction change) in nats, D (logit distance) in logit^2, "
        "with 95% intervals over documents in brackets. To random's: the ratio to random truncation of "
        "the same size, a dash where that is not positive. Top-1: how often the most probable token "
        f"stays. {REFERENCE}: the mean over its subspaces.",
    )


def per_unit(report: Report) -> Grid:
    """What a unit of logit distance is worth, against random truncation."""
    rows = [
        [
            percent(entry["rank"]),
            entry["method"],
            *(
                with_interval(each["ratio"], each["ci95"], times)
                for each in (entry["per_unit_vs_random"][name] for name in PER_UNIT)
            ),
        ]
        for entry in by_rank(report)
        if entry["method"] != REFERENCE
    ]
    return Grid(
        "per-unit",
        "What a unit of logit distance is worth",
        ["removed", "method", "F / D", "K / D", "loss change / D"],
        rows,
        "Ratios to random truncation of the same size, of sums over documents, with 95% intervals. "
        "Above 1: moving the logits as far costs more than in random directions.",
    )


def over_documents(evaluation: Evaluation) -> Grid:
    """Whether a few documents carry the loss changes."""
    found = sorted(concentrations(evaluation), key=lambda each: (each.rank, each.method == REFERENCE))
    count = len(evaluation.document_ids)
    return Grid(
        "documents",
        "Where the loss change lies over the documents",
        ["removed", "method", "middle document", "loss rises", "highest tenth carries", "above random's"],
        [_document_row(each) for each in found],
        f"Middle document: the median loss change, nats. Loss rises: the share of the {count:,} documents. "
        f"Highest tenth carries: the share of the total loss change that the {tenth(count):,} documents "
        "with the highest ones carry: 10% where all are alike, above 100% where the others gain on the "
        "whole, a dash where the total is not positive; a total near zero makes it large. Above random's: "
        "the share of documents that lose more than under random truncation of the same size. Shares of "
        "these documents, without intervals.",
    )


def _document_row(each: Concentration) -> list[str]:
    return [
        percent(each.rank),
        each.method,
        nats(each.median),
        share(each.rising),
        DASH if each.top_tenth is None else share(each.top_tenth),
        DASH if each.above_random is None else share(each.above_random),
    ]


def checkpoints(report: Report) -> Grid | None:
    """Exported checkpoints as loaded, beside the same truncation in memory; None where there are none."""
    entries = report.get("checkpoints")
    if not entries:
        return None
    rows = []
    for entry in entries:
        memory = entry["in_memory"]
        gap = memory and memory["loss_change"]
        rows.append(
            [
                entry["name"],
                f"{entry['method']}, {percent(entry['rank'])}",
                entry["dtype"],
                with_interval(entry["loss_change"]["mean"], entry["loss_change"]["ci95"], nats),
                DASH if not gap else nats(gap["mean"]),
                DASH if not gap else with_interval(gap["difference"], gap["difference_ci95"], nats),
                figure(entry["logit_distance"]["mean"]),
                share(entry["top1_agreement"]["mean"]),
                DASH if not gap else "yes" if entry["same_calibration"] else "no",
            ]
        )
    return Grid(
        "checkpoints",
        "Exported checkpoints as they load",
        [
            *("checkpoint", "truncation", "dtype", "loss change", "in memory", "difference"),
            *("D", "top token kept", "same calibration"),
        ],
        rows,
        "Loss change in nats. In memory: the same truncation before it was stored; difference: the "
        "checkpoint's less that, with its 95% interval. Only with the same calibration is that the cost "
        "of storing alone.",
        left=3,
        grouped=False,
    )


def comparison(reports: Sequence[Report], labels: Sequence[str]) -> Grid:
    """Every report at every rank in one row: random's loss change, and each method's relative to it."""
    methods = list(dict.fromkeys(m for report in reports for m in methods_of(report) if m != REFERENCE))
    rows = []
    for label, report in zip(labels, reports, strict=True):
        for rank in ranks_of(report):
            at = {m: e for m in methods_of(report) for e in entries_of(report, m) if e["rank"] == rank}
            random = at.get(REFERENCE)
            rows.append(
                [
                    label,
                    percent(rank),
                    DASH if random is None else nats(random["loss_change"]["mean"]),
                    *(_relative(at.get(method)) for method in methods),
                ]
            )
    return Grid(
        "comparison",
        "Loss change relative to random truncation",
        ["report", "removed", f"{REFERENCE}, nats", *methods],
        rows,
        f"The loss change of {REFERENCE} truncation in nats; methods: ratio of their loss "
        "change to it, with its 95% interval. A dash: not measured, or random's is not positive.",
    )


def _relative(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return DASH
    found = entry["vs_random"]["loss_change"]
    return with_interval(found["ratio"], found["ci95"], times)


def all_intervals(report: Report) -> Grid:
    """Every mean with its interval."""
    write = {name: nats for name in QUANTITIES} | {"logit_distance": figure, "top1_agreement": share}
    return Grid(
        "means",
        "Every mean with its interval",
        ["removed", "method", "directions", "loss", *(QUANTITY_NAMES[name] for name in QUANTITIES)],
        [
            [
                percent(entry["rank"]),
                entry["method"],
                f"{entry['removed']:,} of {entry['removed'] + entry['kept']:,}",
                with_interval(entry["loss"]["mean"], entry["loss"]["ci95"], lambda v: nats(v, sign=False))
                if "loss" in entry
                else DASH,
                *(with_interval(entry[n]["mean"], entry[n]["ci95"], write[n]) for n in QUANTITIES),
            ]
            for entry in by_rank(report)
        ],
        "Means over documents with 95% intervals: nats, but D in logit^2 and top-1 agreement a share of "
        "positions.",
    )
