"""The statistics of an evaluation: means, comparisons with random truncation and between methods.

All come from one paired bootstrap over documents; what a report calls established follows
`csprune.statements`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from csprune.bootstrap import DRAWS, LEVEL, Resampling, Statistic, difference, ratio
from csprune.errors import InputError
from csprune.measurement import QUANTITIES, REFERENCE, Evaluation, Measurement
from csprune.statements import RULE, Family
from csprune.views import Compare, Views, by_measurement, make_views, per_unit_ratio

SCHEMA = 1

PER_UNIT = ("fisher_term", "prediction_change", "loss_change")
"""The quantities whose size per unit of logit distance is compared with random truncation."""


def summarise(evaluation: Evaluation, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """Means, comparisons with random truncation of the same rank and between methods, with 95% intervals.

    All intervals are percentile intervals of one paired bootstrap over documents, stratified by
    block; random subspaces are not resampled. How it was done is added to the protocol under
    `bootstrap`. A ratio is None where what it divides by is not positive, and its interval is None
    where that is not positive in some draw: so even random against itself has no ratio of loss
    changes where random truncation lowered the loss.

    Every comparison says on which side of no effect it lies and whether that is `established`. The families
    of the Bonferroni adjustment are: the differences from random of one quantity over all methods
    and ranks; the per-unit ratios of one quantity, likewise; the loss differences of all pairs of methods.

    Args:
        evaluation: The per-document values.
        draws: Bootstrap draws.
        seed: Seeds them.

    Returns:
        The content of `report.json`, JSON values only.

    Raises:
        CspruneError: If a value is not finite.
        InputError: If `random` was not measured at a rank, or there are fewer than 2 documents.
    """
    evaluation.check_finite()
    references = _references(evaluation)
    resampling = Resampling(evaluation.blocks, draws=draws, seed=seed)
    views, base = make_views(evaluation, resampling)
    measurements = evaluation.measurements
    compared = max(1, sum(each.method != REFERENCE for each in measurements))
    pairs = [
        (i, j)
        for i, j in combinations(range(len(measurements)), 2)
        if measurements[i].rank == measurements[j].rank
        and REFERENCE not in (measurements[i].method, measurements[j].method)
    ]
    families = {
        "vs_random": Family(compared, "one quantity's differences from random, over all methods and ranks"),
        "per_unit_vs_random": Family(
            compared, "one per-unit ratio against random, over all methods and ranks"
        ),
        "between_methods": Family(
            max(1, len(pairs)), "the loss differences of all pairs of methods, over all ranks"
        ),
    }
    bootstrap = {
        "draws": draws,
        "seed": seed,
        "level": LEVEL,
        "documents_by_block": {
            str(label): int(count)
            for label, count in zip(*np.unique(evaluation.blocks, return_counts=True), strict=True)
        },
        "rule": RULE,
    }
    return {
        "schema": SCHEMA,
        "model": evaluation.model,
        "protocol": {**evaluation.protocol, "bootstrap": bootstrap},
        "documents": len(evaluation.document_ids),
        **{name: _mean(statistic) for name, statistic in base.items()},
        "truncations": [
            _entry(evaluation, i, references[each.rank], views, base["base_loss"], families, resampling)
            for i, each in enumerate(measurements)
        ],
        "between_methods": [_pair(measurements, i, j, views, families["between_methods"]) for i, j in pairs],
        "families": {name: family.describe() for name, family in families.items()},
        **({"checkpoints": _checkpoints(evaluation, resampling)} if evaluation.checkpoints else {}),
    }


def _references(evaluation: Evaluation) -> dict[float, int]:
    """Where the random truncation of each rank stands among the measurements."""
    places = {
        each.rank: place for place, each in enumerate(evaluation.measurements) if each.method == REFERENCE
    }
    for each in evaluation.measurements:
        place = places.get(each.rank)
        if place is None or evaluation.measurements[place].removed != each.removed:
            raise InputError(
                f"{each.name} has no {REFERENCE} truncation of {each.removed} directions beside "
                f"it: evaluate {REFERENCE} at the same rank too"
            )
    return places


def _entry(
    evaluation: Evaluation,
    own: int,
    reference: int,
    views: Views,
    base_loss: Statistic,
    families: dict[str, Family],
    resampling: Resampling,
) -> dict[str, Any]:
    """One truncation of the report."""
    measurement, figures, random = evaluation.measurements[own], views.draws[own], views.draws[reference]
    entry: dict[str, Any] = {
        "method": measurement.method,
        "rank": measurement.rank,
        "removed": measurement.removed,
        "kept": measurement.kept,
        "loss": _mean(_sum(base_loss, figures["loss_change"])),
    }
    entry |= {name: _mean(figures[name]) for name in QUANTITIES}
    entry["vs_random"] = {
        name: {
            **_ratio(ratio(figures[name], random[name])),
            **_difference(difference(figures[name], random[name])),
            **views.judge(_difference_of(name), own, reference, 0, families["vs_random"]),
        }
        for name in QUANTITIES
    }
    entry["per_unit_vs_random"] = {
        name: {
            **_ratio(per_unit_ratio(figures, random, name)),
            **views.judge(_per_unit_of(name), own, reference, 1, families["per_unit_vs_random"]),
        }
        for name in PER_UNIT
    }
    if measurement.method == REFERENCE:
        entry["subspaces"] = {
            name: resampling.observed(measurement.values[name].T).tolist() for name in QUANTITIES
        }
    return entry


def _pair(
    measurements: Sequence[Measurement], i: int, j: int, views: Views, family: Family
) -> dict[str, Any]:
    """The loss difference of two methods at one rank."""
    compare = _difference_of("loss_change")
    return {
        "rank": measurements[i].rank,
        "first": measurements[i].method,
        "second": measurements[j].method,
        **_difference(difference(views.draws[i]["loss_change"], views.draws[j]["loss_change"])),
        **views.judge(compare, i, j, 0, family, random=False),
    }


def _checkpoints(evaluation: Evaluation, resampling: Resampling) -> list[dict[str, Any]]:
    """The exported checkpoints as loaded, each beside the same truncation in memory."""
    in_memory = {(each.method, each.rank): each for each in evaluation.measurements}
    entries = []
    for stored in evaluation.checkpoints:
        own = stored.measurement
        # A random checkpoint is one subspace, the measurement in memory a mean over several.
        beside = None if own.method == REFERENCE else in_memory.get((own.method, own.rank))
        columns = [evaluation.base_loss + own.per_document("loss_change")]
        columns += [own.per_document(name) for name in QUANTITIES]
        if beside is not None:
            columns += [beside.per_document(name) for name in QUANTITIES]
        loss, *rest = resampling.statistics(np.stack(columns, axis=1))
        figures, *reference = by_measurement(rest)
        entry: dict[str, Any] = {
            "path": stored.path,
            "name": Path(stored.path).name,
            "method": own.method,
            "rank": own.rank,
            "removed": own.removed,
            "kept": own.kept,
            "dtype": stored.dtype,
            "weights_sha256": stored.weights,
            "same_calibration": stored.same_calibration,
            "loss": _mean(loss),
            **{name: _mean(figures[name]) for name in QUANTITIES},
            "in_memory": None,
        }
        if beside is not None:
            entry["in_memory"] = {
                name: {
                    "mean": reference[0][name].value,
                    **_difference(difference(figures[name], reference[0][name])),
                }
                for name in QUANTITIES
            }
        entries.append(entry)
    return entries


def _difference_of(quantity: str) -> Compare:
    return lambda own, other: difference(own[quantity], other[quantity])


def _per_unit_of(quantity: str) -> Compare:
    return lambda own, reference: per_unit_ratio(own, reference, quantity)


def _sum(first: Statistic, second: Statistic) -> Statistic:
    """The sum of two means, draw by draw."""
    return difference(first, Statistic(-second.value, None if second.samples is None else -second.samples))


def _mean(statistic: Statistic) -> dict[str, Any]:
    return {"mean": statistic.value, "ci95": _ends(statistic)}


def _ratio(statistic: Statistic | None) -> dict[str, Any]:
    return {"ratio": None if statistic is None else statistic.value, "ci95": _ends(statistic)}


def _difference(statistic: Statistic) -> dict[str, Any]:
    return {"difference": statistic.value, "difference_ci95": _ends(statistic)}


def _ends(statistic: Statistic | None) -> list[float] | None:
    """The 95% interval as JSON has it."""
    ends = None if statistic is None else statistic.interval(LEVEL)
    return None if ends is None else list(ends)
