"""The Markdown summary of reports: `report.md`."""

from __future__ import annotations

from csprune.pages.grids import Grid
from csprune.pages.markdown import bullets, escaped, picture_links, table
from csprune.pages.sections import Content, Section

_NO_STATEMENTS = "This report has no statements."


def summary(content: Content) -> str:
    """The page in Markdown: the same sentences and tables, the pictures by their files.

    Args:
        content: Of the page.

    Returns:
        The text, ending in a newline. Names from outside cannot break it: nothing in them is markup.
    """
    lines = [f"# {escaped(content.title)}", ""]
    if content.overview is not None:
        lines += ["## All reports", "", *_grid(content.overview)]
    for section in content.sections:
        lines += _section(section, "##" if content.overview is None else "###", content.overview is not None)
    lines += ["## Pictures", "", *picture_links([(each.name, each.title) for each in content.filed])]
    lines += ["Everything else, with the protocol in full, is in `report.html` and `report.json`."]
    return "\n".join(lines) + "\n"


def _section(section: Section, level: str, titled: bool) -> list[str]:
    lines = [f"## {escaped(section.label)}", ""] if titled else []
    lines += [escaped(section.done), "", f"Base loss: {escaped(section.base)}.", ""]
    lines += bullets(section.best)
    lines += [f"{level} Established", ""]
    if not section.judged:
        lines += [_NO_STATEMENTS, ""]
    else:
        lines += bullets(section.established or ["Nothing."])
        lines += [f"{level} Not established", ""]
        lines += bullets(section.open or ["Every comparison named here is established."])
        if section.rule:
            lines += [f"{escaped(section.rule)}.", ""]
        lines += bullets([f"{group.title}: {group.count}" for group in section.groups])
        notes = dict.fromkeys(group.note for group in section.groups if group.note)
        lines += [f"{escaped('; '.join(notes))}.", ""] if notes else []
    for grid in (*section.main, *section.folded[:-1]):
        lines += [f"{level} {escaped(grid.title)}", "", *_grid(grid)]
    return lines


def _grid(grid: Grid) -> list[str]:
    return [*table(grid.headings, grid.rows, grid.left), "", escaped(grid.note), ""]
