"""Estimates from per-document values: ratios and differences of means, medians, slopes, with their intervals.

One paired bootstrap over documents, stratified by block, serves everything that is estimated from one sample
(`csprune.bootstrap`); a directional statement follows `csprune.statements`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from csprune.analysis.results import Estimate, Statement
from csprune.bootstrap import LEVEL, Resampling, Statistic
from csprune.statements import Family, statement

Means = Mapping[str, Statistic]
"""Means over documents by name."""

Formula = Callable[[Means], Statistic | None]
"""What is estimated, of the means: built of `csprune.bootstrap.ratio` and `difference`."""

ONE = Family(1, "a single comparison")


class Sample:
    """Per-document values by name, and what can be estimated from their means.

    Args:
        values: float64 [documents], or [subspaces, documents] where random subspaces enter; their mean over
            the subspaces is what a formula sees.
        resampling: The draws of documents.
    """

    def __init__(self, values: Mapping[str, np.ndarray], resampling: Resampling) -> None:
        self.values = dict(values)
        self.resampling = resampling

    @cached_property
    def means(self) -> dict[str, Statistic]:
        """With their draws."""
        columns = [_mean(each) for each in self.values.values()]
        return dict(zip(self.values, self.resampling.statistics(np.stack(columns, axis=1)), strict=True))

    @cached_property
    def _blocks(self) -> list[dict[str, Statistic]]:
        """Point estimates of each block of more than one document: one repeats nothing."""
        blocks = self.resampling.blocks
        labels, sizes = np.unique(blocks, return_counts=True)
        return [
            {name: _point(_mean(each)[blocks == label]) for name, each in self.values.items()}
            for label, size in zip(labels, sizes, strict=True)
            if size > 1
        ]

    @cached_property
    def _halves(self) -> list[dict[str, Statistic]]:
        """Point estimates with each half of the random subspaces; none where one is empty."""
        counts = {len(each) for each in self.values.values() if each.ndim == 2}
        if not counts or min(counts) < 2:
            return []

        def half(part: Callable[[np.ndarray], np.ndarray]) -> dict[str, Statistic]:
            return {
                name: _point(_mean(part(each)) if each.ndim == 2 else each)
                for name, each in self.values.items()
            }

        return [half(lambda each: each[: len(each) // 2]), half(lambda each: each[len(each) // 2 :])]

    def value(self, formula: Formula) -> float | None:
        """A figure alone, for which nothing is drawn."""
        found = formula({name: _point(_mean(each)) for name, each in self.values.items()})
        return None if found is None else found.value

    def estimate(self, formula: Formula) -> Estimate:
        """A figure with its pointwise 95% interval."""
        return as_estimate(formula(self.means))

    def judge(self, formula: Formula, null: float, family: Family = ONE, *, random: bool = True) -> Estimate:
        """A figure with its interval, and the statement that it lies on one side of the null value.

        Args:
            formula: Of the means.
            null: 0 of a difference, 1 of a ratio.
            family: What it is judged together with.
            random: Random subspaces enter: both halves of them must agree.
        """
        statistic = formula(self.means)
        judged = statement(
            statistic,
            null,
            family,
            blocks=[formula(view) for view in self._blocks],
            halves=[formula(view) for view in self._halves] if random else None,
        )
        return {**as_estimate(statistic), "null": null, **judged}


def as_estimate(statistic: Statistic | None) -> Estimate:
    """A statistic as JSON has it; an infinite one, the median of ratios to nothing, is undefined."""
    if statistic is None or not np.isfinite(statistic.value):
        return {"value": None, "ci95": None}
    ends = statistic.interval(LEVEL)
    return {"value": statistic.value, "ci95": None if ends is None else list(ends)}


def _mean(values: np.ndarray) -> np.ndarray:
    """Over subspaces, float64 [documents]."""
    return values.mean(axis=0) if values.ndim == 2 else values


def _point(values: np.ndarray) -> Statistic:
    return Statistic(float(values.mean()), None)


def claim(text: str, *parts: tuple[Estimate, str] | tuple[Estimate, str, str]) -> Statement:
    """A statement that every part lies on its claimed side, "above" or "below" its null value.

    A composite statement needs each of its parts (paper, Appendix C); theirs have a third item, their name.
    """
    named = [{**part, "claimed": side, "of": name[0] if name else ""} for part, side, *name in parts]
    held = all(part["established"] and part["side"] == part["claimed"] for part in named)
    return Statement(text, held, named)
