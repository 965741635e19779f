"""An evaluation's means in every way that statements look at them: over draws, by block, by halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from csprune.bootstrap import Resampling, Statistic, ratio
from csprune.measurement import QUANTITIES, REFERENCE, Evaluation, Measurement
from csprune.statements import Family, statement

Statistics = dict[str, Statistic]
"""The means of one truncation's quantities."""

Compare = Callable[[Statistics, Statistics], Statistic | None]


@dataclass(frozen=True)
class Views:
    """The statistics of every measurement, and what the rule for statements looks at besides.

    Attributes:
        draws: With their bootstrap draws.
        blocks: In each block of more than one document alone; point estimates.
        halves: With each half of the random subspaces alone; point estimates. Empty where a half has none.
    """

    draws: list[Statistics]
    blocks: list[list[Statistics]]
    halves: list[list[Statistics]]

    def judge(
        self, compare: Compare, own: int, other: int, null: float, family: Family, *, random: bool = True
    ) -> dict[str, Any]:
        """The statement that a comparison of two measurements makes; `random`: the second is random."""
        return statement(
            compare(self.draws[own], self.draws[other]),
            null,
            family,
            blocks=[compare(view[own], view[other]) for view in self.blocks],
            halves=[compare(view[own], view[other]) for view in self.halves] if random else None,
        )


def make_views(evaluation: Evaluation, resampling: Resampling) -> tuple[Views, Statistics]:
    """Everything that statements are made of, and the unchanged model's own means."""
    measurements = evaluation.measurements
    columns = _columns(measurements)
    base = {"base_loss": evaluation.base_loss, "base_entropy": evaluation.base_entropy}
    statistics = resampling.statistics(np.column_stack([*base.values(), columns]))
    labels, sizes = np.unique(evaluation.blocks, return_counts=True)
    # A block of one document repeats nothing: it is no second look.
    blocks = [
        _points(columns[evaluation.blocks == label].mean(axis=0))
        for label, size in zip(labels, sizes, strict=True)
        if size > 1
    ]
    halves = []
    if all(each.subspaces is None or each.subspaces >= 2 for each in measurements):
        halves = [_points(resampling.observed(_columns(measurements, half))) for half in _HALVES]
    views = Views(by_measurement(statistics[len(base) :]), blocks, halves)
    return views, dict(zip(base, statistics, strict=False))


_HALVES = (lambda values: values[: len(values) // 2], lambda values: values[len(values) // 2 :])


def _columns(
    measurements: Sequence[Measurement], part: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> np.ndarray:
    """float64 [documents, measurements x quantities]; random's are means over a part of its subspaces."""
    columns = []
    for each in measurements:
        for name in QUANTITIES:
            values = each.values[name]
            columns.append(part(values).mean(axis=0) if each.method == REFERENCE else values)
    return np.stack(columns, axis=1)


def _points(values: np.ndarray) -> list[Statistics]:
    return by_measurement([Statistic(float(value), None) for value in values])


def by_measurement(statistics: Sequence[Statistic]) -> list[Statistics]:
    """Statistics of `measurements x quantities` columns, measurement by measurement."""
    width = len(QUANTITIES)
    return [
        dict(zip(QUANTITIES, statistics[start : start + width], strict=True))
        for start in range(0, len(statistics), width)
    ]


def per_unit_ratio(own: Statistics, reference: Statistics, quantity: str) -> Statistic | None:
    """How much a unit of logit distance is worth, against random truncation of the same rank.

    `(sum F / sum D) / (sum F_rand / sum D_rand)` over the documents, the random sums being means
    over the subspaces; likewise for the other quantities.

    Args:
        own: The means of the truncation's quantities.
        reference: Those of random truncation, from the same draws.
        quantity: What to measure per unit, one of `PER_UNIT`.

    Returns:
        The ratio, as `csprune.bootstrap.ratio` defines it.
    """
    return ratio(
        ratio(own[quantity], own["logit_distance"]),
        ratio(reference[quantity], reference["logit_distance"]),
    )
