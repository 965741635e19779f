"""Text and tables as Markdown that shows what it is given letter by letter."""

from __future__ import annotations

import re
from collections.abc import Sequence


def escaped(text: str) -> str:
    """Text on one line, of which nothing is markup."""
    text = " ".join(text.split())
    return re.sub(r"([\\`*_<>|~$]|\](?=[(\[:]))", r"\\\1", text).replace("&", "&amp;")


def bullets(lines: Sequence[str]) -> list[str]:
    """A list, and the empty line after it; nothing where there are no lines."""
    return [*(f"- {escaped(line)}" for line in lines), ""] if lines else []


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of a table, the first `left` columns of it words, the others figures."""
    marks = ["---" if place < left else "---:" for place in range(len(headings))]
    return [
        f"| {' | '.join(map(escaped, headings))} |",
        f"|{'|'.join(marks)}|",
        *(f"| {' | '.join(map(escaped, row))} |" for row in rows),
    ]


def picture_links(pictures: Sequence[tuple[str, str]]) -> list[str]:
    """A list of pictures, given by file name without ending and title."""
    return [
        *(
            f"- [{escaped(title)}](pictures/{name}.svg) ([PNG](pictures/{name}.png))"
            for name, title in pictures
        ),
        "",
    ]
