"""The two ends of the spectrum: the bottom band at equal length, and the top band's total effect.

(Paper, Sections 3.1 and E.2, Figures 2 and 7.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from csprune.analysis.bands import band_pairs, bottom_pair, loss_excess, ratios, ratios_per_distance
from csprune.analysis.comparison import (
    COMPARED,
    all_values,
    comparison_table,
    full_result,
    per_distance,
    side_by_side,
)
from csprune.analysis.drawn import curve_of
from csprune.analysis.effects import Progress
from csprune.analysis.estimates import Sample, as_estimate
from csprune.analysis.phrases import figure, times
from csprune.analysis.results import Column, Curve, Panel, Picture, Result, Row, Table, explained
from csprune.analysis.study import Study
from csprune.concentration import top_share


def bottom_band(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band at equal length: what it does beside random changes, in all and document by document.

    The state's component in the band with the smallest singular values is replaced by its calibration mean,
    du = -P_B (u - mu); random changes are rescaled document by document to its length (Section 3.1, Figure
    2a). The full result holds where D is below random's, and K and the loss change are above it (E.1).
    Document by document: the share of documents in which the band exceeds the mean of its references, in
    total and per unit of logit distance (Figure 2b), and the share of the summed loss excess that the tenth
    of documents with the largest excess carries: above 100% where the others together have a negative one
    (E.2, Figure 7b).
    """
    pair = bottom_pair(study, "bottom band", progress)
    table = comparison_table(
        "equal-length",
        "The bottom band at equal length",
        [pair],
        study.resampling,
    )
    excess = loss_excess(pair)
    per_document = {
        "F/D": ratios_per_distance(pair, "fisher_term"),
        "K/D": ratios_per_distance(pair, "prediction_change"),
        "K": ratios(pair, "prediction_change"),
        "D": ratios(pair, "logit_distance"),
    }
    above = {name: (each > 1).astype(np.float64) for name, each in per_document.items()}
    above["loss change"] = (excess > 0).astype(np.float64)
    shares = Sample(above, study.resampling)
    medians = study.resampling.medians(np.stack([*per_document.values(), excess], axis=1))
    rows = [
        Row(
            name,
            {
                "above": shares.estimate(lambda m, name=name: m[name]),
                "median": as_estimate(medians[i]) if name in per_document else None,
                "excess": None if name in per_document else as_estimate(medians[i]),
            },
        )
        for i, name in enumerate(above)
    ]
    documents = Table(
        "documents",
        "Document by document",
        (
            Column("above", "documents above random's", "share"),
            Column("median", "median ratio", "ratio"),
            Column("excess", "median excess", "nats"),
        ),
        rows,
        "A document's ratio is that of the band's value to the mean over its random changes.",
        "quantity",
    )
    tenth = top_share(excess)
    cells = table.rows[0].cells
    findings = [
        f"At equal length the bottom band's logit distance is {times(cells['logit_distance'])}, its "
        f"prediction change {times(cells['prediction_change'])}, and the loss excess "
        f"{figure(cells['loss_excess'], '+.3f')} nats.",
        f"Per unit of logit distance it exceeds random's in {above['F/D'].mean():.0%} of documents, in "
        f"total in {above['K'].mean():.0%}.",
    ]
    if tenth is not None:
        findings.append(
            f"The tenth of documents with the largest loss excess carries {tenth:.0%} of its sum."
        )
    return Result(
        "bottom-band",
        "The bottom band at equal length",
        "Section 3.1, Figure 2a and b; E.2, Figure 7b",
        explained(bottom_band),
        findings,
        full_result(table),
        [table, documents],
        [
            Picture(
                "bottom-band",
                "The bottom band beside random changes of the same length",
                "Ratios of sums over documents, with 95% intervals: below one, less than random changes.",
                [_side_by_side(table.rows[0])],
                "Figure 2a",
            ),
            Picture(
                "bottom-band-documents",
                "The bottom band's effect, document by document",
                "Documents in ascending order of each figure: their ratios to the mean of their own random "
                "changes, and their loss excess.",
                [
                    _ascending({k: per_document[k] for k in ("F/D", "K")}, "ratio to random's", ratio=True),
                    _ascending({"": excess}, "loss excess, nats", ratio=False),
                ],
                "Figures 2b and 7b",
            ),
        ],
        replace(pair, label=str(study.bands)).values("bottom"),
        {"tenth_of_loss_excess": tenth},
    )


def top_band(study: Study, progress: Progress | None = None) -> Result:
    """The total effect of removing the top and the bottom band, and their consequence.

    Each band's component is replaced by its calibration mean, beside random removals of the same dimension
    that are not rescaled. The top band may cost as much or more in total, by its large logit distance, while
    its prediction change per unit of logit distance is a small fraction of the bottom band's (E.2).
    """
    ends = {"top band": study.removal(0), "bottom band": study.removal(study.bands - 1)}
    changes = {label: (own, study.random_removals(own)) for label, own in ends.items()}
    pairs = side_by_side(study.evaluation, changes, progress)
    equal = band_pairs(study, progress)
    rows = []
    for pair, beside in zip(pairs, (equal[0], equal[-1]), strict=True):
        sample = Sample({name: pair.own[name] for name in COMPARED}, study.resampling)
        cells = {name: sample.estimate(lambda m, name=name: m[name]) for name in COMPARED}
        cells["random"] = Sample({"r": pair.reference["loss_change"]}, study.resampling).estimate(
            lambda m: m["r"]
        )
        cells["consequence"] = beside.sample(study.resampling).estimate(per_distance("fisher_term"))
        rows.append(Row(pair.label, cells))
    table = Table(
        "ends",
        "Removing the top and the bottom band",
        (
            Column("loss_change", "loss change", "nats"),
            Column("random", "random removal's", "nats"),
            Column("logit_distance", "D", "number"),
            Column("fisher_term", "F", "number"),
            Column("prediction_change", "K", "number"),
            Column("consequence", "C_b", "ratio"),
        ),
        rows,
        "Means over documents of the removals as they are; C_b at equal length. D in "
        "logit\N{SUPERSCRIPT TWO}, F and K in nats.",
    )
    top, bottom = (float(pair.own["loss_change"].mean()) for pair in pairs)
    return Result(
        "top-band",
        "The top band's total effect",
        "E.2",
        explained(top_band),
        [
            f"Removing the top band changes the loss by {top:+.3f} nats, removing the bottom band by "
            f"{bottom:+.3f}."
        ],
        tables=[table],
        values=all_values("removal", pairs),
    )


def _side_by_side(row: Row) -> Panel:
    """The ratios of one comparison in one panel."""
    shown = {
        "logit distance D": "logit_distance",
        "Fisher term F": "fisher_term",
        "prediction change K": "prediction_change",
        "F/D": "fisher_per_distance",
        "K/D": "change_per_distance",
    }
    return Panel(
        [curve_of("", [row.cells[key] for key in shown.values()])],
        list(range(len(shown))),
        "",
        "ratio to random's",
        y_scale="log",
        line=1.0,
        marks="points",
        x_labels=list(shown),
    )


def _ascending(figures: Mapping[str, np.ndarray], title: str, *, ratio: bool) -> Panel:
    """Documents in ascending order of each figure; what is infinite or not positive is left out of ratios."""
    documents = len(next(iter(figures.values())))
    curves = []
    for label, values in figures.items():
        shown = [float(v) if np.isfinite(v) and (v > 0 or not ratio) else None for v in np.sort(values)]
        curves.append(Curve(label, shown))
    return Panel(
        curves,
        ((np.arange(documents) + 0.5) / documents).tolist(),
        "share of documents",
        title,
        y_scale="log" if ratio else "linear",
        line=1.0 if ratio else 0.0,
    )
