"""The Markdown of a page of results."""

from __future__ import annotations

from collections.abc import Sequence

from csprune.analysis.results import Picture, Result
from csprune.pages.markdown import bullets, escaped, table
from csprune.pages.results_sections import (
    ResultsContent,
    ResultSection,
    ResultsHeading,
    ShownTable,
    Verdict,
    results_content,
)


def results_markdown(heading: ResultsHeading, results: Sequence[Result], page: str = "analysis") -> str:
    """The page in Markdown: the same sentences and tables, the pictures by their files.

    Args:
        heading: Of all results.
        results: In the order to be read.
        page: The page's file name without ending.

    Returns:
        The text, ending in a newline. Names from outside cannot break it: nothing in them is markup.

    Raises:
        InputError: If the results cannot be shown.
    """
    return markdown_of(results_content(heading, results, page))


def markdown_of(content: ResultsContent) -> str:
    """The Markdown of a page's content."""
    lines = [f"# {escaped(content.heading.title)}", "", escaped(content.heading.done), ""]
    several = len(content.sections) > 1
    if content.main:
        lines += ["## Main findings", "", *_verdicts(content.main, False)]
    if content.established or content.open:
        held, undecided = content.established, content.open
        lines += [f"## Established ({len(held)})", "", *(_verdicts(held, several) or ["Nothing.", ""])]
        lines += [f"## Not established ({len(undecided)})", ""]
        lines += _verdicts(undecided, several) or ["Every statement is established.", ""]
        lines += [escaped(content.rule), ""]
    if content.heading.terms:
        lines += ["## Terms", "", *bullets([f"{name}: {meaning}" for name, meaning in content.heading.terms])]
    for section in content.sections:
        lines += _section(section, content.folder)
    lines += [escaped(content.legend), ""] if content.legend else []
    for title, pairs in (("Protocol", content.heading.facts), ("Versions", content.heading.versions)):
        if pairs:
            lines += [f"## {title}", "", *bullets([f"{name}: {value}" for name, value in pairs])]
    return "\n".join(lines).rstrip("\n") + "\n"


def _verdicts(verdicts: Sequence[Verdict], several: bool) -> list[str]:
    return bullets([f"{each.text} ({each.source})" if several else each.text for each in verdicts])


def _section(section: ResultSection, folder: str) -> list[str]:
    lines = [f"## {escaped(section.title)}", ""]
    lines += [f"Paper: {escaped(section.place)}", ""] if section.place else []
    lines += bullets(section.findings)
    for picture in section.pictures:
        lines += _picture(picture, folder)
    for each in section.tables:
        lines += _table(each)
    return [*lines, f"Definition: {escaped(section.definition)}", ""]


def _picture(picture: Picture, folder: str) -> list[str]:
    file = f"{folder}/{picture.name}"
    title, caption = escaped(picture.title), escaped(picture.caption)
    return [f"![{title}]({file}.png)", "", f"**{title}** {caption} ([SVG]({file}.svg))", ""]


def _table(shown: ShownTable) -> list[str]:
    rows = [[label, *map(str, cells)] for label, cells in shown.rows]
    note = [escaped(shown.note), ""] if shown.note else []
    return [f"### {escaped(shown.title)}", "", *table(shown.headings, rows, left=1), "", *note]
