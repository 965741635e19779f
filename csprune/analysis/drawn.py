"""Estimates as a picture's curve."""

from __future__ import annotations

from collections.abc import Sequence

from csprune.analysis.results import Cell, Curve, Estimate, Table


def curve_of(
    label: str, cells: Sequence[Cell], x: Sequence[float] | None = None, *, reference: bool = False
) -> Curve:
    """Estimates with their intervals, plain numbers without.

    Args:
        label: In the legend.
        cells: Of a table.
        x: Places; None for those of the picture.
        reference: Drawn as what others are compared with.
    """
    found = [_estimate(each) for each in cells]
    ends = [each["ci95"] or (None, None) for each in found]
    low, high = [low for low, _ in ends], [high for _, high in ends]
    return Curve(label, [each["value"] for each in found], x, low, high, reference)


def _estimate(cell: Cell) -> Estimate:
    if isinstance(cell, dict):
        return cell
    return {"value": None if isinstance(cell, str) else cell, "ci95": None}


def column_of(table: Table, key: str, label: str = "", *, reference: bool = False) -> Curve:
    """A column of a table from its first to its last row."""
    return curve_of(label, [row.cells.get(key) for row in table.rows], reference=reference)
