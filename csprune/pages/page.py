"""The report a person looks at: `report.html`, one file that needs nothing else, and what lies beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from csprune.measurement import Evaluation
from csprune.pages.findings import CHECKS
from csprune.pages.frame import PICTURES_FOLDER, check_target, render, twice, write_whole
from csprune.pages.gallery import Picture
from csprune.pages.sections import Content, content
from csprune.pages.summary import summary
from csprune.pages.theme import WIDE, png_file, svg_file

PAGE_FILE = "report.html"
SUMMARY_FILE = "report.md"


def check_page_target(directory: Path, overwrite: bool) -> None:
    """Refuse to replace files in a folder, unless they are an earlier page that may be overwritten.

    Raises:
        InputError: Something of a page's names is there, and is not ours or not to be replaced.
    """
    check_target(directory, PAGE_FILE, (SUMMARY_FILE, PICTURES_FOLDER), "report", overwrite)


def write_views(
    directory: Path, reports: Sequence[tuple[dict[str, Any], Evaluation]], names: Sequence[str]
) -> list[Path]:
    """Write what a person looks at: the page, the summary, and the pictures as files.

    Everything is drawn before the first file is written, and each file appears whole or not at all; the
    page, which has all in itself, last. The same reports give the same bytes.

    Args:
        directory: The folder, which is made if need be. Earlier files of these names are replaced.
        reports: Each report with the values it was made of: one, or several to be compared.
        names: What to call reports of one model apart, their folders for instance; as many as reports.

    Returns:
        The paths written: `pictures/NAME.svg` and `.png`, `report.md`, `report.html`.

    Raises:
        InputError: If a report has a method that this version does not know.
        CspruneError: If the files cannot be written.
        ValueError: If there is no report, or there are not as many names.
    """
    if not reports or len(reports) != len(names):
        raise ValueError(f"{len(reports)} reports and {len(names)} names: give at least one, as many of both")
    directory = Path(directory)
    said = content(reports, names)
    files: dict[Path, bytes] = {}
    for picture in said.filed:
        figure = picture.draw(WIDE)
        place = directory / PICTURES_FOLDER / picture.name
        files[place.with_name(f"{picture.name}.svg")] = svg_file(figure)
        files[place.with_name(f"{picture.name}.png")] = png_file(figure)
    files[directory / SUMMARY_FILE] = summary(said).encode()
    files[directory / PAGE_FILE] = page(said).encode()
    return write_whole(directory, files)


def page(said: Content) -> str:
    """The page as HTML. What comes from reports is escaped; it loads nothing and runs no script."""
    return render("report.html", title=said.title, content=said, checks=list(CHECKS.values()), draw=_drawn)


def _drawn(picture: Picture) -> Markup:
    return twice(picture.draw, picture.name, picture.title)
