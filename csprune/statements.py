"""When a directional statement is established: the paper's rule (Appendix C, Inference).

"Below random's" or "above one" is established where everything lies on that side of the null value: the
interval, the intervals from each half of the draws, the point estimate of each block of documents, and the
point estimate with each half of the random subspaces, where these enter. Otherwise it is not established,
which is no statement of the opposite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from csprune.bootstrap import LEVEL, Statistic, interval
from csprune.errors import InputError

RULE = (
    "established: the Bonferroni-adjusted interval, the intervals from each half of the draws, the point "
    "estimates of every block (at least two) and those of both halves of the random subspaces, where these "
    "enter, lie on one side of the null value"
)
"""What `established` means in a report."""


@dataclass(frozen=True)
class Family:
    """Comparisons that are judged together: each at the level `1 - (1 - 0.95) / comparisons` (Bonferroni).

    Attributes:
        comparisons: How many, at least 1.
        of: What they compare, in words.
    """

    comparisons: int
    of: str

    def __post_init__(self) -> None:
        if self.comparisons < 1:
            raise InputError(f"a family of {self.comparisons} comparisons: give at least 1")

    @property
    def level(self) -> float:
        """The level of each adjusted interval."""
        return 1 - (1 - LEVEL) / self.comparisons

    def describe(self) -> dict[str, Any]:
        """What a report says of the family."""
        return {"comparisons": self.comparisons, "level": self.level, "of": self.of}


def statement(
    statistic: Statistic | None,
    null: float,
    family: Family,
    *,
    blocks: Sequence[Statistic | None],
    halves: Sequence[Statistic | None] | None,
) -> dict[str, Any]:
    """Judge on which side of the null value a statistic lies, by the paper's rule.

    Args:
        statistic: A difference or ratio with its draws; None where it is undefined.
        null: 0 for a difference, 1 for a ratio.
        family: Of the comparison.
        blocks: The statistic in each block of documents alone; with fewer than two the rule cannot hold.
        halves: The statistic with each half of the random subspaces alone, empty where there are no
            two; None where random subspaces do not enter.

    Returns:
        JSON values: `side` ("below", "above", or None at the null value itself), `adjusted_ci95` at the
        family's level, the `checks` by name (None: does not apply), and whether all make it `established`.
    """
    value = None if statistic is None else statistic.value
    side = None if value is None or value == null else "above" if value > null else "below"
    samples = None if statistic is None else statistic.samples

    def on_side(values: Sequence[float]) -> bool:
        return side is not None and all(v > null if side == "above" else v < null for v in values)

    def points(statistics: Sequence[Statistic | None]) -> bool:
        known = [s.value for s in statistics if s is not None]
        return len(known) == len(statistics) >= 2 and on_side(known)

    adjusted, of_halves = None, False
    if samples is not None:
        adjusted = interval(samples, family.level)
        parts = np.array_split(samples, 2)
        of_halves = all(len(part) and on_side(interval(part, family.level)) for part in parts)
    checks = {
        "interval": adjusted is not None and on_side(adjusted),
        "halves_of_draws": of_halves,
        "blocks": points(blocks),
        "subspaces": None if halves is None else points(halves),
    }
    return {
        "side": side,
        "adjusted_ci95": None if adjusted is None else list(adjusted),
        "checks": checks,
        "established": all(check is not False for check in checks.values()),
    }
