"""Cells and estimates of results as text: as many digits as an estimate's interval gives meaning to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from csprune.analysis.results import Cell, Estimate, Unit
from csprune.pages.wording import DASH

STAR = "*"
"""Behind an estimate whose statement is established."""

LEGEND = (
    f"In brackets: 95% intervals, in the unit of the figure. {STAR}: it is established on which side of its "
    f"null value the figure lies. {DASH}: undefined, or it does not apply."
)

_MINUS = "\N{MINUS SIGN}"
_FIGURES = 3  # of the largest of an estimate's numbers
_ROUNDING = 1e-9  # an interval narrower than this, beside its value, is no interval but rounding
_LEAST, _MOST = 1e-6, 1e7  # beyond these powers of ten are easier to read than digits
_SUFFIX: dict[Unit, str] = {"ratio": "x", "share": "%"}


@dataclass(frozen=True)
class Shown:
    """A cell as it is read.

    Attributes:
        value: The figure with its unit, a text, or a dash.
        interval: In brackets, without the unit; empty where there is none.
        established: The statement that it is part of is established.
    """

    value: str
    interval: str = ""
    established: bool = False

    def __str__(self) -> str:
        """On one line: `3.41x* [3.10, 3.72]`."""
        return " ".join(filter(None, (self.value + STAR * self.established, self.interval)))


def shown(cell: Cell, unit: Unit) -> Shown:
    """A cell as its column's unit has it.

    Args:
        cell: An estimate, a number, a text, or None.
        unit: `Column.unit`.
    """
    if isinstance(cell, dict):
        value, ends = cell["value"], cell.get("ci95")
        if value is None:
            return Shown(DASH)
        write = _writer(value, ends, unit)
        interval = "" if ends is None else f"[{write(ends[0])}, {write(ends[1])}]"
        return Shown(write(value) + _SUFFIX.get(unit, ""), interval, bool(cell.get("established")))
    if cell is None:
        return Shown(DASH)
    if isinstance(cell, str):
        return Shown(cell)
    if isinstance(cell, bool):
        return Shown("yes" if cell else "no")
    if isinstance(cell, int) and unit in ("count", "number", "text"):
        return Shown(f"{cell:,}".replace("-", _MINUS))
    return Shown(_writer(cell, None, unit)(cell) + _SUFFIX.get(unit, ""))


def judged(part: Estimate) -> tuple[str, str]:
    """The value of a statement's part, and its interval at the family's level.

    A part does not tell its unit: where its null value is 1 it is a ratio, where it is 0 the sign matters.
    """
    unit: Unit = "ratio" if part.get("null") == 1 else "nats" if part.get("null") == 0 else "number"
    found = shown({"value": part["value"], "ci95": part.get("adjusted_ci95")}, unit)
    return found.value, found.interval or DASH


def _writer(value: float, ends: Sequence[float] | None, unit: Unit) -> Callable[[float], str]:
    """How to write the numbers of one estimate, without the unit: all with the same decimals.

    Three figures of the largest number, and as many decimals as it takes to tell the interval's ends apart.
    Two figures of a value that is far smaller than them, but at most one decimal more for it: what the
    interval leaves open needs no digits.
    """
    scale = 100.0 if unit == "share" else 1.0
    numbers = [scale * number for number in (value, *(ends or ()))]
    largest = max(map(abs, numbers))
    decimals = max(_decimals(largest, _FIGURES), 1 if unit == "share" else 0)
    half = (max(numbers) - min(numbers)) / 2
    if half > _ROUNDING * largest:
        decimals = max(decimals, min(_decimals(half, 1), decimals + 4))
    decimals = min(max(decimals, _decimals(abs(numbers[0]), 2)), decimals + 1)
    sign = "+" if unit == "nats" else ""
    form = f"{sign}.2e" if largest >= _MOST or 0 < largest < _LEAST else f"{sign},.{decimals}f"
    return lambda number: f"{scale * number:{form}}".replace("-", _MINUS)


def _decimals(size: float, figures: int) -> int:
    """Decimals that show so many figures of a number; none of zero."""
    if size == 0:
        return figures - 1
    rounded = float(f"{size:.{figures - 1}e}")  # 9.996 has two decimals, not three
    return max(0, figures - 1 - int(np.floor(np.log10(rounded))))
