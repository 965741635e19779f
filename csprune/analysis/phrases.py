"""Figures of a comparison in a sentence."""

from __future__ import annotations

from csprune.analysis.results import Cell, Row


def figure(cell: Cell, form: str) -> str:
    """A figure in a Python format, or "undefined" where it does not exist: a ratio to nothing."""
    value = cell["value"] if isinstance(cell, dict) else cell
    return "undefined" if value is None else format(value, form)


def times(cell: Cell) -> str:
    """A ratio to random's: "3.41 times random's"."""
    shown = figure(cell, ".2f")
    return shown if shown == "undefined" else f"{shown} times random's"


def compared(row: Row) -> str:
    """D, K and the loss excess of a row of a comparison."""
    cells = row.cells
    return (
        f"the change's logit distance D is {times(cells['logit_distance'])}, its prediction change K "
        f"{times(cells['prediction_change'])}, the loss excess {figure(cells['loss_excess'], '+.3f')} nats"
    )


def counted(number: int, thing: str) -> str:
    """A count with its noun: "1 direction", "3 directions"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def capital(label: str) -> str:
    """A label at the beginning of a sentence."""
    return label[:1].upper() + label[1:]
