"""Whether results can be shown: distinct names that may be file names, numbers that are numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import get_args

from csprune.analysis.results import Cell, Curve, Panel, Result, Table, Unit
from csprune.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_UNITS = get_args(Unit)


def check_results(results: Sequence[Result]) -> None:
    """Refuse results that no page can show without saying something wrong.

    Args:
        results: Of one report. They may have been read from a file that somebody changed.

    Raises:
        InputError: The first thing found, and where: names that repeat or cannot be file names, numbers
            that are not finite, curves or labels of another length than their places.
    """
    if not results:
        raise InputError("there is no result to show: name at least one analysis")
    _distinct("analysis", (result.name for result in results))
    _distinct("picture", (picture.name for result in results for picture in result.pictures))
    for result in results:
        for table in result.tables:
            _check_table(f"analysis {result.name!r}, table {table.name!r}", table)
        for picture in result.pictures:
            if not picture.panels:
                raise _refused(f"analysis {result.name!r}, picture {picture.name!r}", "has no panels")
            for panel in picture.panels:
                _check_panel(f"analysis {result.name!r}, picture {picture.name!r}", panel)
        for statement in result.statements:
            for part in statement.estimates:
                _check_cell(f"analysis {result.name!r}, statement {statement.text!r}", part)


def _refused(place: str, what: str) -> InputError:
    return InputError(f"{place} {what}: the results are damaged or of another version, make them again")


def _distinct(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name):
            raise _refused(
                f"{kind} {name!r}", "has a name that is not of letters, digits, dashes and underscores"
            )
        if name in seen:
            raise _refused(f"{kind} {name!r}", "is there twice")
        seen.add(name)


def _check_table(place: str, table: Table) -> None:
    keys = {column.key for column in table.columns}
    for column in table.columns:
        if column.unit not in _UNITS:
            raise _refused(f"{place}, column {column.key!r}", f"has the unknown unit {column.unit!r}")
    for row in table.rows:
        if unknown := sorted(set(row.cells) - keys):
            raise _refused(f"{place}, row {row.label!r}", f"has a cell of no column, {unknown[0]!r}")
        for key, cell in row.cells.items():
            _check_cell(f"{place}, row {row.label!r}, column {key!r}", cell)


def _check_cell(place: str, cell: Cell) -> None:
    if isinstance(cell, dict):
        if "value" not in cell:
            raise _refused(place, "has an estimate without a value")
        numbers = [cell["value"]]
        for name in ("ci95", "adjusted_ci95"):
            ends = cell.get(name)
            if ends is not None and len(ends) != 2:
                raise _refused(place, f"has an interval of {len(ends)} ends")
            numbers += ends or []
    else:
        numbers = [] if isinstance(cell, str) else [cell]
    _check_numbers(place, numbers)


def _check_panel(place: str, panel: Panel) -> None:
    _check_numbers(place, panel.x, known=True)
    if panel.x_labels is not None and len(panel.x_labels) != len(panel.x):
        raise _refused(place, f"has {len(panel.x_labels)} labels for {len(panel.x)} places")
    if panel.x_labels is not None and len(set(panel.x)) < len(panel.x):
        raise _refused(place, "has two labels for one place")
    for curve in panel.curves:
        _check_curve(f"{place}, curve {curve.label!r}", curve, panel)


def _check_curve(place: str, curve: Curve, panel: Panel) -> None:
    x = panel.x if curve.x is None else curve.x
    _check_numbers(place, x, known=True)
    for name, numbers in (("values", curve.y), ("lower ends", curve.low), ("upper ends", curve.high)):
        if numbers is not None and len(numbers) != len(x):
            raise _refused(place, f"has {len(numbers)} {name} for {len(x)} places")
        _check_numbers(place, numbers or ())
    if (curve.low is None) != (curve.high is None):
        raise _refused(place, "has intervals with one end")
    if panel.x_labels is not None and not set(x) <= set(panel.x):
        raise _refused(place, "has a place without a label")


def _check_numbers(place: str, numbers: Iterable[float | int | str | None], *, known: bool = False) -> None:
    for number in numbers:
        if number is None and not known:
            continue
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise _refused(place, f"has {number!r} where a finite number should be")
