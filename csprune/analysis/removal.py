"""Removals of the smallest singular directions of the raw unembedding, by HARP's metric and by accuracy."""

from __future__ import annotations

import numpy as np
import torch

from csprune.analysis.comparison import Pair, all_values, at_equal_length, comparison_table, forest
from csprune.analysis.effects import Values, leading_token, observe_beside
from csprune.analysis.estimates import Sample, as_estimate, claim
from csprune.analysis.phrases import compared, figure
from csprune.analysis.results import Cell, Column, Picture, Result, Row, Table, estimate_of, explained
from csprune.analysis.spaces import Change, Space
from csprune.analysis.study import Progress, Study
from csprune.bootstrap import Resampling, Statistic, difference, median_of_counted
from csprune.errors import InputError

FRACTIONS = (0.05, 0.10, 0.15)
"""Of the singular directions: HARP's default is the first, Joshi et al.'s removals are all three."""

_TOKEN = ("kept", "correct", "rank")
_SHARE = "share of squared length"


def pooled_median(values: np.ndarray, resampling: Resampling) -> Statistic:
    """The median over documents and random subspaces together, with its draws of documents.

    Args:
        values: Finite, float64 [subspaces, documents]; a document is drawn with all its subspaces.
        resampling: The draws of documents.
    """
    order = np.argsort(values, axis=None, kind="stable")
    ascending, document = values.ravel()[order], order % values.shape[1]
    samples = [median_of_counted(ascending, counts[:, document]) for counts in resampling.counts()]
    return Statistic(float(np.median(values)), np.concatenate(samples))


def harp_removal(study: Study, progress: Progress | None = None) -> Result:
    """Removing the raw unembedding's smallest singular directions, as HARP and Joshi et al. do.

    The state h = gamma * z + beta, which the head reads, loses its component along the right singular
    directions of W_out with the smallest singular values, dh = -P h: the component itself, not its deviation
    from a mean (Appendix G). HARP (Hu et al., 2026) removes 5% of the directions and reports that the leading
    tokens stay; Joshi et al. (2025) remove the smallest 5, 10 and 15% of the singular values and report that
    accuracy hardly changes. Each removal stands beside random ones: the component of h in a Haar-random
    subspace of the same dimension, rescaled document by document to the removal's length. Judged is that K
    and the loss change of HARP's removal are above theirs.

    HARP's metric: the share of documents in which the most probable token stays the most probable one, and
    the median rank of that token after the removal, over documents; for random removals, over documents and
    random subspaces together. Accuracy: the most probable token is the true next one. The share of |h|^2
    that a subspace carries is a mean over documents; a random subspace carries its share of the dimensions
    on average.
    """
    space = Space("raw", study.unembedding)
    h = space.coordinates(study.evaluation.u)
    removals = _removals(study, space, h)
    pairs = at_equal_length(study.evaluation, removals, progress)
    table = comparison_table(
        "removals",
        "Removals of the smallest singular directions, at equal length",
        pairs,
        study.resampling,
        head="directions",
    )
    at_length = {
        label: (own, [each.as_long_as(own) for each in random]) for label, (own, random) in removals.items()
    }
    tokens = observe_beside(study.evaluation, at_length, leading_token, progress)
    squared = h.square().sum(1).cpu().numpy()
    effects = _effects(study, removals, pairs, tokens, squared)
    return Result(
        "removal",
        "HARP's and Joshi's removals",
        "Appendix G",
        explained(harp_removal),
        _findings(table, effects),
        [
            claim(
                "HARP's removal: K and the loss change are above those of random removals of its length",
                *((estimate_of(table.rows[0], key), "above") for key in ("prediction_change", "loss_excess")),
            )
        ],
        [table, effects],
        [
            Picture(
                "removal",
                "Removals of the smallest singular directions beside random ones of the same length",
                "Ratios of sums over documents to random removals, and the loss excess over theirs, with 95% "
                "intervals.",
                forest(table, ("logit_distance", "prediction_change", "loss_excess")),
            )
        ],
        _values(pairs, tokens) | {"removal.squared_length_of_h": squared},
        {"directions": {label: own.subspace.size for label, (own, _) in removals.items()}},
    )


def _removals(study: Study, space: Space, h: torch.Tensor) -> dict[str, tuple[Change, list[Change]]]:
    """By label, each removal and random ones of its dimension, not rescaled; all nested."""
    sizes = [max(1, round(fraction * space.width)) for fraction in FRACTIONS]
    if sizes[-1] >= space.width:
        raise InputError(
            f"the head reads {space.width} numbers, of which no {FRACTIONS[-1]:.0%} can be removed: "
            "leave out the analysis `removal`"
        )
    smallest = space.subspace(space.directions[:, -sizes[-1] :].flip(1))
    random = space.random(sizes[-1], study.subspaces, study.seed)
    return {
        f"smallest {fraction:.0%}": (
            smallest.first(size).removal(h),
            [each.first(size).removal(h) for each in random],
        )
        for fraction, size in zip(FRACTIONS, sizes, strict=True)
    }


def _effects(
    study: Study,
    removals: dict[str, tuple[Change, list[Change]]],
    pairs: list[Pair],
    tokens: dict[str, tuple[Values, Values]],
    squared: np.ndarray,
) -> Table:
    """What each removal does, and random ones of its length."""
    correct = study.evaluation.correct
    before = Sample({"correct": correct}, study.resampling)
    rows = [Row("unchanged", {"accuracy": before.estimate(lambda m: m["correct"])})]
    for pair in pairs:
        own, random = removals[pair.label]
        seen, seen_random = tokens[pair.label]
        carried = own.squared_length.cpu().numpy() / squared
        by_chance = np.stack([each.squared_length.cpu().numpy() for each in random]) / squared
        rank = as_estimate(study.resampling.medians(seen["rank"][:, None])[0])
        rank_random = as_estimate(pooled_median(seen_random["rank"], study.resampling))
        for label, measured, looked, share, median in (
            (pair.label, pair.own, seen, carried, rank),
            (f"random, for the {pair.label}", pair.reference, seen_random, by_chance, rank_random),
        ):
            sample = Sample(
                {
                    "share": share,
                    "kept": looked["kept"],
                    "correct": looked["correct"],
                    "before": correct,
                    "loss_change": measured["loss_change"],
                    "prediction_change": measured["prediction_change"],
                },
                study.resampling,
            )
            cells: dict[str, Cell] = {
                "directions": own.subspace.size,
                "rank": median,
                "accuracy": sample.estimate(lambda m: m["correct"]),
                "fall": sample.estimate(lambda m: difference(m["before"], m["correct"])),
            }
            for key in ("share", "kept", "loss_change", "prediction_change"):
                cells[key] = sample.estimate(lambda m, key=key: m[key])
            rows.append(Row(label, cells))
    return Table(
        "effects",
        "What the removals do",
        (
            Column("directions", "directions", "count"),
            Column("share", _SHARE, "share"),
            Column("kept", "top token kept", "share"),
            Column("rank", "its median rank", "number"),
            Column("accuracy", "accuracy", "share"),
            Column("fall", "fall of accuracy", "share"),
            Column("loss_change", "loss change", "nats"),
            Column("prediction_change", "K", "nats"),
        ),
        rows,
        f"{_SHARE}: what the subspace carries, a mean over documents; of random ones before their removal "
        "is rescaled. Top token: the most probable one of the unchanged prediction.",
        "removal",
    )


def _findings(table: Table, effects: Table) -> list[str]:
    unchanged, harp, random = effects.rows[:3]
    after = [figure(row.cells["accuracy"], ".1%") for row in effects.rows[1::2]]
    beside = [figure(row.cells["accuracy"], ".1%") for row in effects.rows[2::2]]
    return [
        f"HARP's removal takes {figure(harp.cells['share'], '.1%')} of |h|\N{SUPERSCRIPT TWO} away; beside "
        f"random removals of its length {compared(table.rows[0])}.",
        f"The most probable token stays first in {figure(harp.cells['kept'], '.0%')} of documents, under "
        f"random removals in {figure(random.cells['kept'], '.0%')}; its median rank is "
        f"{figure(harp.cells['rank'], ',.0f')} and {figure(random.cells['rank'], ',.0f')}.",
        f"Without the smallest 5, 10 and 15% of the singular directions accuracy is {', '.join(after)}, of "
        f"{figure(unchanged.cells['accuracy'], '.1%')} before; under random removals of the same length "
        f"{', '.join(beside)}.",
    ]


def _values(pairs: list[Pair], tokens: dict[str, tuple[Values, Values]]) -> dict[str, np.ndarray]:
    """For the result's values."""
    found = all_values("removal", pairs)
    for label, (own, random) in tokens.items():
        found |= {f"removal.{label}.{key}": own[key] for key in _TOKEN}
        found |= {f"removal.{label}.random.{key}": random[key] for key in _TOKEN}
    return found
