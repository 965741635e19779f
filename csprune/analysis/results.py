"""What an analysis found: tables, curves and values of documents, before anything is drawn.

A result is plain data. Its JSON form is what a report keeps, and all that a page is made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

Unit = Literal["ratio", "nats", "share", "number", "count", "text"]
"""How a cell reads: `3.41x`, `+0.12`, `43%`, `0.97`, `1,204`, as it is."""

Estimate: TypeAlias = dict[str, Any]
"""`{"value": float | None, "ci95": [low, high] | None}`; where a statement is made of it also `null`, `side`,
`adjusted_ci95`, `checks` and `established` (`csprune.statements`)."""

Cell: TypeAlias = Estimate | float | int | str | None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: In the rows' cells.
        title: A heading of a few words.
        unit: How its cells read.
    """

    key: str
    title: str
    unit: Unit


@dataclass(frozen=True)
class Row:
    """A row: what it is of, and its cells by column; a column that it lacks does not apply."""

    label: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: Distinct within a result, for links.
        title: What it shows.
        columns: From left to right, after the rows' labels.
        rows: From top to bottom.
        note: What the columns are, in units.
        head: Heading of the labels.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""
    head: str = ""


@dataclass(frozen=True)
class Curve:
    """A line or a set of points.

    Attributes:
        label: In the legend; empty where there is a single one.
        y: Values, None where undefined.
        x: Places; None for those of the picture.
        low: Lower ends of intervals, or None.
        high: Upper ends.
        reference: Drawn as what others are compared with (random).
    """

    label: str
    y: Sequence[float | None]
    x: Sequence[float] | None = None
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    reference: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        curves: What is drawn.
        x: Places that the curves share.
        x_title: With units.
        y_title: With units.
        title: Above the panel, where a picture has several.
        x_scale: "linear" or "log".
        y_scale: Likewise; "log" also tells that values are ratios.
        line: A horizontal line at the null value, or None.
        marks: "lines", "points" (a cloud), or "steps".
        x_labels: Names of the places instead of numbers.
        equal: One length of both axes is the same number (clouds of a geometry).
    """

    curves: Sequence[Curve]
    x: Sequence[float]
    x_title: str
    y_title: str
    title: str = ""
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    line: float | None = None
    marks: Literal["lines", "points", "steps"] = "lines"
    x_labels: Sequence[str] | None = None
    equal: bool = False


@dataclass(frozen=True)
class Picture:
    """A picture of one or several panels side by side (stacked on a narrow page).

    Attributes:
        name: File name without ending, distinct within a report: letters, digits and dashes.
        title: A sentence of what it shows.
        caption: What is drawn, with units; full sentences.
        panels: From left to right.
        place: The paper's figure, or empty.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    place: str = ""


@dataclass(frozen=True)
class Statement:
    """A directional statement, decided by the paper's rule.

    Attributes:
        text: What is claimed, a clause without a full stop: "K is above random's at equal length".
        established: Whether every part of it is.
        estimates: The parts, each with its checks, its `claimed` side, and what it is `of`.
    """

    text: str
    established: bool
    estimates: Sequence[Estimate]

    @property
    def contradicted(self) -> list[str]:
        """Names of the parts of which the opposite is established; empty names of unnamed ones."""
        return [
            part.get("of", "")
            for part in self.estimates
            if part.get("established") and part.get("side") != part.get("claimed", part.get("side"))
        ]


@dataclass(frozen=True)
class Result:
    """What one analysis found.

    Attributes:
        name: Of the analysis, as `--what` takes it.
        title: A few words.
        place: In the paper: "Section 3.2, Figure 1b".
        definition: What was computed, in full sentences.
        findings: Sentences with the main figures, filled in by the analysis.
        statements: What was claimed and whether it is established.
        tables: In the order to be read.
        pictures: Likewise.
        values: Per-document values that the figures can be redone from, float64 [documents] or
            [subspaces, documents]; of other documents than the evaluation's only with their own ids under
            the name `NAME.documents`, as strings, and their blocks, if they have any, under `NAME.blocks`.
        figures: What does not fit a table: by name, JSON values.
    """

    name: str
    title: str
    place: str
    definition: str
    findings: Sequence[str] = ()
    statements: Sequence[Statement] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """All but the per-document values, as JSON has it."""
        plain = {**vars(self), "values": {}}
        described = asdict(Result(**plain))
        del described["values"]
        return described


def read_result(described: Mapping[str, Any]) -> Result:
    """The result of a `describe`d one, without values of documents.

    Raises:
        KeyError, TypeError, ValueError: It is not one.
    """
    return Result(
        **{
            **described,
            "statements": [Statement(**each) for each in described["statements"]],
            "tables": [
                Table(
                    **{
                        **each,
                        "columns": [Column(**column) for column in each["columns"]],
                        "rows": [Row(**row) for row in each["rows"]],
                    }
                )
                for each in described["tables"]
            ],
            "pictures": [
                Picture(**{**each, "panels": [_panel(panel) for panel in each["panels"]]})
                for each in described["pictures"]
            ],
        }
    )


def _panel(described: Mapping[str, Any]) -> Panel:
    return Panel(**{**described, "curves": [Curve(**curve) for curve in described["curves"]]})


def estimate_of(row: Row, key: str) -> Estimate:
    """A cell that is an estimate.

    Raises:
        TypeError: It is none.
    """
    cell = row.cells[key]
    if not isinstance(cell, dict):
        raise TypeError(f"{key} of {row.label!r} is no estimate: {cell!r}")
    return cell


def explained(analysis: Callable[..., Result]) -> str:
    """What an analysis computes: its docstring after the first line, a paragraph a line."""
    _, _, rest = inspect.cleandoc(analysis.__doc__ or "").partition("\n\n")
    return "\n".join(" ".join(paragraph.split()) for paragraph in rest.split("\n\n"))
