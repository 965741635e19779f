"""A model's reports, and the figures in them: what `run.py` wrote for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csprune.analysis.files import read_analysis
from csprune.analysis.results import Cell, Result, Row
from csprune.errors import InputError

FILES = ("spectrum/spectrum.json", "analysis/analysis.json", "truncations/report.json", "why.json")
"""Of `csprune spectrum`, `csprune analyze`, `csprune evaluate` and `why.py`, in a model's folder."""


class NotApplicable(Exception):
    """A model has no such figure; the message says why."""


@dataclass(frozen=True)
class Found:
    """A figure.

    Attributes:
        value: As its column's unit has it.
        interval: 95%, over documents or of what was drawn; None where it has none.
        established: Whether it is on which side of its null value it lies; None where nothing was judged.
    """

    value: float
    interval: tuple[float, float] | None = None
    established: bool | None = None

    @property
    def estimate(self) -> dict[str, Any]:
        """As a table's cell."""
        return {
            "value": self.value,
            "ci95": None if self.interval is None else list(self.interval),
            **({} if self.established is None else {"established": self.established}),
        }

    def times(self, factor: float) -> Found:
        """In another unit; no statement is made of it."""
        ends = None if self.interval is None else sorted(factor * end for end in self.interval)
        return Found(factor * self.value, None if ends is None else (ends[0], ends[1]))

    def less_than_one(self) -> Found:
        """The rest of a share."""
        ends = None if self.interval is None else (1 - self.interval[1], 1 - self.interval[0])
        return Found(1 - self.value, ends)


class Reports:
    """All that was written for a model.

    Args:
        name: Of the model.
        spectrum: The report of `csprune spectrum`, without its results.
        results: Of it and of `csprune analyze`.
        truncations: The report of `csprune evaluate`.
        why: Of `why.py`.
    """

    def __init__(
        self,
        name: str,
        spectrum: dict[str, Any],
        results: Iterable[Result],
        truncations: dict[str, Any],
        why: dict[str, Any],
    ) -> None:
        self.name = name
        self.spectrum = spectrum
        self.results = {each.name: each for each in results}
        self.truncations = truncations
        self.why = why

    @classmethod
    def read(cls, folder: Path) -> Reports:
        """Those of a folder.

        Raises:
            InputError: A file is missing, is no report, or is of another version.
        """
        spectrum, of_spectrum = read_analysis((folder / FILES[0]).parent, "spectrum")
        _, of_analysis = read_analysis((folder / FILES[1]).parent, "analysis")
        truncations, why = (_read(folder / name) for name in FILES[2:])
        return cls(folder.name, spectrum, [*of_spectrum, *of_analysis], truncations, why)

    @property
    def bands(self) -> int:
        return self.spectrum["protocol"]["bands"]

    def rows(self, analysis: str, table: str) -> list[Row]:
        """The rows of a table.

        Raises:
            InputError: The analysis or the table is not there.
        """
        result = self.results.get(analysis)
        found = next((each for each in result.tables if each.name == table), None) if result else None
        if found is None:
            raise InputError(f"{self.name} has no table {table!r} of the analysis {analysis!r}: run it again")
        return list(found.rows)

    def row(self, analysis: str, table: str, row: str | int, absent: str = "") -> Row:
        """A row by its place, its label, or the end of it."""
        rows = self.rows(analysis, table)
        if isinstance(row, int):
            found = rows[row] if -len(rows) <= row < len(rows) else None
        else:
            exact = (each for each in rows if each.label == row)
            found = next(exact, next((each for each in rows if each.label.endswith(row)), None))
        if found is None:
            raise NotApplicable(absent or f"there is no {row!r}")
        return found

    def cell(self, analysis: str, table: str, row: str | int, column: str, absent: str = "") -> Found:
        """The figure in a cell."""
        return as_found(self.row(analysis, table, row, absent).cells.get(column), absent)

    def figure(self, analysis: str, key: str, absent: str) -> Found:
        """A figure that stands in no table."""
        if analysis not in self.results or key not in self.results[analysis].figures:
            raise InputError(f"{self.name} has no {key!r} of the analysis {analysis!r}: run it again")
        return as_found(self.results[analysis].figures[key], absent)

    def truncation(self, method: str, rank: float) -> dict[str, Any]:
        """A method's entry in the report of truncations."""
        for each in self.truncations["truncations"]:
            if each["method"] == method and each["rank"] == rank:
                return each
        raise InputError(f"{self.name} has no truncation {method} at {rank:.0%}: run it again")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): run the model again") from error


def as_found(cell: Cell, absent: str = "") -> Found:
    """A cell's figure."""
    value = cell["value"] if isinstance(cell, dict) else cell
    if value is None or isinstance(value, str):
        raise NotApplicable(absent or "it is undefined: what it is relative to is not positive")
    if not isinstance(cell, dict):
        return Found(float(value))
    ends = cell.get("ci95")
    return Found(float(value), None if ends is None else (ends[0], ends[1]), cell.get("established"))
