"""What a page of results says, in order: the content that its HTML, its Markdown and the terminal share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csprune.analysis.results import Picture, Result, Statement, Table
from csprune.pages.findings import CHECKS
from csprune.pages.results_check import check_results
from csprune.pages.results_text import LEGEND, Shown, judged, shown
from csprune.pages.wording import DASH, capitalised
from csprune.statements import RULE

_STACKED = 4  # columns of intervals: of more, the intervals stand below their figures


@dataclass(frozen=True)
class ResultsHeading:
    """What is said of all results of a page.

    Attributes:
        title: Of the page: "Consequence spectrum of SmolLM2-135M-Instruct".
        done: What was done, in a sentence or two.
        facts: The protocol, names and values in the order to be read.
        versions: Of the software, likewise.
        rule: When a statement is established.
        terms: What the tables' and pictures' words mean.
    """

    title: str
    done: str
    facts: Sequence[tuple[str, str]] = ()
    versions: Sequence[tuple[str, str]] = ()
    rule: str = RULE
    terms: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class ShownTable:
    """A table as it is read.

    Attributes:
        title: What it shows.
        headings: The rows' first, then the columns'.
        rows: Labels and cells, as many cells as columns.
        words: For each column whether it is of words, not figures.
        note: What the columns are; empty where nothing is to be said.
        stacked: Whether the intervals stand below the figures for want of room.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Shown]]]
    words: Sequence[bool]
    note: str
    stacked: bool


@dataclass(frozen=True)
class Part:
    """One comparison of a statement: texts, as a table of checks has them."""

    label: str
    value: str
    interval: str
    checks: Sequence[str]
    established: str


@dataclass(frozen=True)
class Verdict:
    """A statement, and where it is made."""

    text: str
    key: str
    source: str


@dataclass(frozen=True)
class ResultSection:
    """One result.

    Attributes:
        key: Distinct in the page, for ids.
        title: A few words.
        place: In the paper; may be empty.
        findings: Sentences.
        definition: What was computed.
        pictures: As they are declared.
        tables: As they are read.
        statements: Their comparisons.
        count: How many statements are established; empty where there are none.
    """

    key: str
    title: str
    place: str
    findings: Sequence[str]
    definition: str
    pictures: Sequence[Picture]
    tables: Sequence[ShownTable]
    statements: Sequence[Part]
    count: str


@dataclass(frozen=True)
class ResultsContent:
    """A page of results.

    Attributes:
        heading: Of all.
        sections: One for each result.
        main: The first finding of each result, where there are several.
        established: Statements that are.
        open: Those that are not.
        page: The page's file name without ending.
    """

    heading: ResultsHeading
    sections: Sequence[ResultSection]
    main: Sequence[Verdict]
    established: Sequence[Verdict]
    open: Sequence[Verdict]
    page: str

    @property
    def folder(self) -> str:
        """Of the pictures; each page of a folder has its own."""
        return pictures_folder(self.page)

    @property
    def pictures(self) -> list[Picture]:
        """All of them, in order."""
        return [picture for section in self.sections for picture in section.pictures]

    @property
    def rule(self) -> str:
        """When a statement is established; empty where there are no statements."""
        return f"{capitalised(self.heading.rule)}." if self.established or self.open else ""

    @property
    def legend(self) -> str:
        """How the cells of all tables are read; empty where there are none."""
        return LEGEND if any(section.tables for section in self.sections) else ""


def pictures_folder(page: str) -> str:
    """Where the pictures of a page are, beside it."""
    return f"{page}-pictures"


def results_content(
    heading: ResultsHeading, results: Sequence[Result], page: str = "analysis"
) -> ResultsContent:
    """What the page of these results says.

    Args:
        heading: Of all of them.
        results: In the order to be read.
        page: The page's file name without ending.

    Raises:
        InputError: If they cannot be shown (`results_check`).
    """
    check_results(results)
    verdicts = [
        (each.established, Verdict(_said(each), _key(result), result.title))
        for result in results
        for each in result.statements
    ]
    return ResultsContent(
        heading,
        [_section(result) for result in results],
        [Verdict(each.findings[0], _key(each), each.title) for each in results if each.findings]
        if len(results) > 1
        else [],
        [verdict for held, verdict in verdicts if held],
        [verdict for held, verdict in verdicts if not held],
        page,
    )


def _key(result: Result) -> str:
    return f"result-{result.name}"


def _section(result: Result) -> ResultSection:
    held = sum(each.established for each in result.statements)
    return ResultSection(
        key=_key(result),
        title=result.title,
        place=result.place,
        findings=result.findings,
        definition=result.definition,
        pictures=result.pictures,
        tables=[_table(table) for table in result.tables],
        statements=[part for each in result.statements for part in _parts(each)],
        count=f"{held} of {len(result.statements)} established" if result.statements else "",
    )


def _table(table: Table) -> ShownTable:
    rows = [
        (row.label, [shown(row.cells.get(column.key), column.unit) for column in table.columns])
        for row in table.rows
    ]
    of_columns = list(zip(*(cells for _, cells in rows), strict=True)) or [()] * len(table.columns)
    return ShownTable(
        title=table.title,
        headings=[table.head, *(column.title for column in table.columns)],
        rows=rows,
        words=[column.unit == "text" for column in table.columns],
        note=table.note,
        stacked=sum(any(cell.interval for cell in cells) for cells in of_columns) > _STACKED,
    )


def _said(statement: Statement) -> str:
    """A statement; where more is known than that it is not established, that the opposite is."""
    text, against = capitalised(statement.text), statement.contradicted
    if not against:
        return text
    of = f" of {', '.join(against)}" if all(against) else ""
    return f"{text} (the opposite is established{of})"


def _parts(statement: Statement) -> list[Part]:
    count = len(statement.estimates)
    text = capitalised(statement.text)
    found = []
    for place, part in enumerate(statement.estimates, 1):
        name = part.get("of") or f"{place} of {count}"
        claimed = part.get("claimed", part.get("side"))
        held = bool(part.get("established"))
        value, interval = judged(part)
        checks = part.get("checks") or {}
        found.append(
            Part(
                label=text if count == 1 else f"{text} ({name})",
                value=value,
                interval=interval,
                checks=[_WORDS.get(checks.get(name), DASH) for name in CHECKS],
                established="opposite" if held and part.get("side") != claimed else _WORDS[held],
            )
        )
    return found


_WORDS: dict[bool | None, str] = {True: "yes", False: "no"}
