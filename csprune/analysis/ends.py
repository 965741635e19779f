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
from csprune.analysis.effects import Progress, leading_token, observe, stacked
from csprune.analysis.estimates import Sample, as_estimate, claim
from csprune.analysis.phrases import figure, times
from csprune.analysis.results import Column, Curve, Panel, Picture, Result, Row, Table, explained
from csprune.analysis.study import Study
from csprune.bootstrap import difference, ratio
from csprune.concentration import top_share
from csprune.statements import Family


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
    pair = bottom_pair(study, progress)
    table = comparison_table(
        "equal-length",
        "The bottom band at equal length",
        [replace(pair, label="bottom band")],
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
                "changes, "
                "and their loss excess.",
                [
                    _ascending({k: per_document[k] for k in ("F/D", "K")}, "ratio to random's", ratio=True),
                    _ascending({"": excess}, "loss excess, nats", ratio=False),
                ],
                "Figures 2b and 7b",
            ),
        ],
        pair.values("bottom"),
        {"tenth_of_loss_excess": tenth},
    )


def most_probable_token(study: Study, progress: Progress | None = None) -> Result:
    """What the bottom band's change does to the most probable token, beside random changes of its length.

    The share of documents in which another token becomes the most probable one; of these, the share in which
    it is the unchanged prediction's runner-up; and top-1 accuracy, how often the most probable token is the
    true next one, before and after (E.2, Figure 7a).
    """
    own = study.removal(study.bands - 1)
    random = [each.as_long_as(own) for each in study.random_removals(own)]
    changes = {"band": own, **{f"random {i}": each for i, each in enumerate(random)}}
    seen = observe(study.evaluation, changes, leading_token, progress)
    reference = stacked(seen, [name for name in changes if name != "band"])
    candidates = study.evaluation.outlook.candidates
    correct = (candidates[:, 0] == study.evaluation.targets).double().cpu().numpy()
    values = {
        f"{who}.{key}": each
        for who, figures in (("band", seen["band"]), ("random", reference))
        for key, each in figures.items()
        if key != "rank"
    } | {"unchanged.correct": correct}
    values |= {f"{who}.changed": 1 - values[f"{who}.kept"] for who in ("band", "random")}
    sample = Sample(values, study.resampling)
    family = Family(2, "changes of the most probable token, and of accuracy, beside random changes'")
    rows = []
    for who, label in (("band", "bottom band"), ("random", "random, of its length")):
        rows.append(
            Row(
                label,
                {
                    "changed": sample.estimate(lambda m, who=who: m[f"{who}.changed"]),
                    "runner_up": sample.estimate(
                        lambda m, who=who: ratio(m[f"{who}.runner_up"], m[f"{who}.changed"])
                    ),
                    "accuracy": sample.estimate(lambda m, who=who: m[f"{who}.correct"]),
                    "fall": sample.estimate(
                        lambda m, who=who: difference(m["unchanged.correct"], m[f"{who}.correct"])
                    ),
                },
            )
        )
    more = sample.judge(lambda m: difference(m["band.changed"], m["random.changed"]), 0.0, family)
    rows.append(
        Row(
            "difference",
            {
                "changed": more,
                "accuracy": sample.judge(
                    lambda m: difference(m["band.correct"], m["random.correct"]), 0.0, family
                ),
            },
        )
    )
    table = Table(
        "top-token",
        "The most probable token",
        (
            Column("changed", "replaced", "share"),
            Column("runner_up", "of these, by the runner-up", "share"),
            Column("accuracy", "accuracy", "share"),
            Column("fall", "fall of accuracy", "share"),
        ),
        rows,
        "Shares of documents. Accuracy: the most probable token is the true next one.",
    )
    return Result(
        "top-token",
        "The most probable token",
        "E.2, Figure 7a",
        explained(most_probable_token),
        [
            "The bottom band's change replaces the most probable token in "
            f"{values['band.changed'].mean():.0%} of "
            f"documents, random changes of its length in {values['random.changed'].mean():.0%}."
        ],
        [
            claim(
                "the bottom band's change replaces the most probable token more often than random changes",
                (more, "above"),
            )
        ],
        [table],
        values=values,
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
        "logit\N{SUPERSCRIPT TWO}, F and K "
        "in nats.",
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
