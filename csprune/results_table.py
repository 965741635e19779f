"""Results for the terminal: findings, tables and statements, in as many columns as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from csprune.analysis.results import Result
from csprune.pages.results_sections import (
    ResultSection,
    ResultsHeading,
    ShownTable,
    Verdict,
    results_content,
)
from csprune.pages.results_text import Shown

_LABEL = 30  # columns that the labels of rows take at most; longer ones are broken
_TABLED = 6  # results whose tables a person still reads in a terminal; of more, the sentences alone


def results_table(results: Sequence[Result], heading: ResultsHeading) -> RenderableType:
    """Results for the terminal.

    Tables keep their figures whole in 80 columns: where these do not fit side by side, the intervals stand
    below their figures, and what still has no room follows in a table of its own. Of more than six results
    only the findings and statements are shown: their tables are for the page.

    Args:
        results: In the order to be read.
        heading: Of all of them.

    Returns:
        What `rich.print` takes.

    Raises:
        InputError: If the results cannot be shown (`pages.results_check`).
    """
    content = results_content(heading, results)
    parts: list[RenderableType] = [Text(heading.title, style="bold"), Text(heading.done)]
    tabled = len(results) <= _TABLED
    for section in content.sections:
        parts += _section(section, tabled)
    for title, verdicts, style in (
        ("Established", content.established, "green"),
        ("Not established", content.open, "yellow"),
    ):
        if content.established or content.open:
            parts += [Text(), Text(f"{title}: {len(verdicts)}", style=f"bold {style}")]
            parts += [_item(_said(each, len(content.sections) > 1)) for each in verdicts]
    notes = [each for each in (content.legend if tabled else "", content.rule) if each]
    return Group(*parts, *([Text()] if notes else []), *(Text(each, style="dim") for each in notes))


def _section(section: ResultSection, tabled: bool) -> list[RenderableType]:
    title = Text(section.title, style="bold")
    if section.place:
        title.append(f"  {section.place}", style="not bold dim")
    parts: list[RenderableType] = [Text(), title, *(_item(each) for each in section.findings)]
    for table in section.tables if tabled else []:
        parts += [Text(), Text(table.title), _Fitted(table)]
        parts += [Text(table.note, style="dim")] if table.note else []
    return parts


def _said(verdict: Verdict, several: bool) -> str:
    return f"{verdict.text} ({verdict.source})" if several else verdict.text


def _item(text: str) -> Table:
    """One of several sentences; its further lines stand below its first word."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text("-"), Text(text))
    return grid


@dataclass(frozen=True)
class _Fitted:
    """A table in as many columns as the terminal has."""

    table: ShownTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for stacked in (False, True):
            blocks = self._blocks(options.max_width, stacked)
            if len(blocks) <= 1:
                break
        for place, columns in enumerate(blocks):
            if place:
                yield Text()
            yield self._block(columns, stacked)

    def _blocks(self, width: int, stacked: bool) -> list[list[int]]:
        """The columns of each part of the table that fits side by side, at least one in each."""
        labels = min(_LABEL, max((cell_len(label) for label, _ in self.table.rows), default=0))
        labels = max(labels, _longest_word(self.table.headings[0]))
        blocks: list[list[int]] = []
        used = width + 1
        for column in range(len(self.table.headings) - 1):
            own = 2 + self._width(column, stacked)
            if used + own > width:
                blocks.append([])
                used = labels
            blocks[-1].append(column)
            used += own
        return blocks or [[]]

    def _width(self, column: int, stacked: bool) -> int:
        cells = (line for _, row in self.table.rows for line in _text(row[column], stacked).split("\n"))
        heading = _longest_word(self.table.headings[1 + column])
        widest = max((cell_len(line) for line in cells), default=0)
        # Words may be broken, figures not.
        return max(heading, min(widest, _LABEL) if self.table.words[column] else widest)

    def _block(self, columns: Sequence[int], stacked: bool) -> Table:
        body = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False)
        body.add_column(Text(self.table.headings[0]), max_width=_LABEL, overflow="fold")
        for column in columns:
            words = self.table.words[column]
            body.add_column(
                Text(self.table.headings[1 + column]),
                justify="left" if words else "right",
                min_width=None if words else self._width(column, stacked),
                max_width=_LABEL if words else self._width(column, stacked),
                overflow="fold",
            )
        for label, cells in self.table.rows:
            body.add_row(Text(label), *(Text(_text(cells[column], stacked)) for column in columns))
        return body


def _text(cell: Shown, stacked: bool) -> str:
    text = str(cell)
    return text.replace(f" {cell.interval}", f"\n{cell.interval}") if stacked and cell.interval else text


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)
