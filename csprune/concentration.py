"""How a loss change lies over the documents: whether a few of them carry it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csprune.measurement import REFERENCE, Evaluation


@dataclass(frozen=True)
class Concentration:
    """The loss change of one truncation, document by document, in a few figures.

    Attributes:
        method: Of the truncation.
        rank: Of the truncation.
        median: The loss change of the middle document, nats.
        rising: The share of documents whose loss rises.
        top_tenth: The share of the total loss change that the tenth of the documents with the highest
            ones carries: 0.1 where all documents are alike, above 1 where the others gain on the whole;
            None where the total is not positive.
        above_random: The share of documents whose loss rises more than under random truncation of the
            same rank (the mean over its subspaces); None for random truncation itself and without it.
    """

    method: str
    rank: float
    median: float
    rising: float
    top_tenth: float | None
    above_random: float | None


def concentrations(evaluation: Evaluation) -> list[Concentration]:
    """The concentration of every measurement, in the evaluation's order."""
    references = {
        each.rank: each.per_document("loss_change")
        for each in evaluation.measurements
        if each.method == REFERENCE
    }
    found = []
    for each in evaluation.measurements:
        values = each.per_document("loss_change")
        reference = None if each.method == REFERENCE else references.get(each.rank)
        found.append(
            Concentration(
                method=each.method,
                rank=each.rank,
                median=float(np.median(values)),
                rising=float((values > 0).mean()),
                top_tenth=top_share(values),
                above_random=None if reference is None else float((values > reference).mean()),
            )
        )
    return found


def tenth(documents: int) -> int:
    """How many documents are a tenth of them: rounded, and at least one."""
    return max(1, round(documents / 10))


def top_share(values: np.ndarray) -> float | None:
    """The share of the total that the highest tenth of the values carries.

    Args:
        values: float64 [documents].

    Returns:
        `sum of the highest tenth / sum`, or None where the sum is not positive.
    """
    total = float(values.sum())
    if total <= 0:
        return None
    return float(np.sort(values)[-tenth(len(values)) :].sum()) / total
