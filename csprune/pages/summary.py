"""The Markdown summary of reports: `report.md`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from csprune.pages.gallery import Picture
from csprune.pages.grids import Grid
from csprune.pages.sections import Content, Section

_NO_STATEMENTS = "This report has no statements."


def summary(content: Content) -> str:
    """The page in Markdown: the same sentences and tables, the pictures by their files.

    Args:
        content: Of the page.

    Returns:
        The text, ending in a newline. Names from outside cannot break it: nothing in them is markup.
    """
    lines = [f"# {_escaped(content.title)}", ""]
    if content.overview is not None:
        lines += ["## All reports", "", *_grid(content.overview)]
    for section in content.sections:
        lines += _section(section, "##" if content.overview is None else "###", content.overview is not None)
    lines += ["## Pictures", "", *_pictures(content.filed)]
    lines += ["Everything else, with the protocol in full, is in `report.html` and `report.json`."]
    return "\n".join(lines) + "\n"


def _section(section: Section, level: str, titled: bool) -> list[str]:
    lines = [f"## {_escaped(section.label)}", ""] if titled else []
    lines += [_escaped(section.done), "", f"Base loss: {_escaped(section.base)}.", ""]
    lines += [*(f"- {_escaped(line)}" for line in section.best), ""] if section.best else []
    lines += [f"{level} Established", ""]
    if not section.judged:
        lines += [_NO_STATEMENTS, ""]
    else:
        lines += [*(f"- {_escaped(line)}" for line in section.established or ["Nothing."]), ""]
        lines += [f"{level} Not established", ""]
        lines += [
            *(
                f"- {_escaped(line)}"
                for line in section.open or ["Every comparison named here is established."]
            ),
            "",
        ]
        if section.rule:
            lines += [f"{_escaped(section.rule)}.", ""]
        lines += [*(f"- {_escaped(group.title)}: {group.count}" for group in section.groups), ""]
        notes = dict.fromkeys(group.note for group in section.groups if group.note)
        lines += [f"{_escaped('; '.join(notes))}.", ""] if notes else []
    for grid in (*section.main, *section.folded[:-1]):
        lines += [f"{level} {_escaped(grid.title)}", "", *_grid(grid)]
    return lines


def _pictures(pictures: Sequence[Picture]) -> list[str]:
    return [
        *(
            f"- [{_escaped(each.title)}](pictures/{each.name}.svg) ([PNG](pictures/{each.name}.png))"
            for each in pictures
        ),
        "",
    ]


def _grid(grid: Grid) -> list[str]:
    marks = ["---" if place < grid.left else "---:" for place in range(len(grid.headings))]
    return [
        f"| {' | '.join(map(_escaped, grid.headings))} |",
        f"|{'|'.join(marks)}|",
        *(f"| {' | '.join(map(_escaped, row))} |" for row in grid.rows),
        "",
        _escaped(grid.note),
        "",
    ]


def _escaped(text: str) -> str:
    """Text as Markdown shows it letter by letter, on one line."""
    text = " ".join(text.split())
    text = re.sub(r"([\\`*_<>|~$]|\](?=[(\[:]))", r"\\\1", text).replace("&", "&amp;")
    return text
