"""The report a person looks at: `report.html`, one file that needs nothing else, and what lies beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from csprune.errors import CspruneError
from csprune.files import atomic_file, check_replaceable
from csprune.measurement import Evaluation
from csprune.pages.findings import CHECKS
from csprune.pages.gallery import Picture
from csprune.pages.sections import Content, content
from csprune.pages.summary import summary
from csprune.pages.theme import NARROW, WIDE, inline_svg, png_file, svg_file, variables

PAGE_FILE = "report.html"
SUMMARY_FILE = "report.md"
PICTURES_FOLDER = "pictures"
_MARK = '<meta name="generator" content="csprune">'


def check_page_target(directory: Path, overwrite: bool) -> None:
    """Refuse to replace files in a folder, unless they are an earlier page that may be overwritten.

    Raises:
        InputError: Something of a page's names is there, and is not ours or not to be replaced.
    """
    names = (PAGE_FILE, SUMMARY_FILE, PICTURES_FOLDER)
    check_replaceable(directory, names, _is_page, "report", overwrite)


def _is_page(directory: Path) -> bool:
    try:
        return _MARK in (directory / PAGE_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


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
    try:
        (directory / PICTURES_FOLDER).mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            with atomic_file(path) as temporary:
                temporary.write_bytes(data)
    except OSError as error:
        raise CspruneError(
            f"the report's page cannot be written to {directory} ({error.strerror or error}): "
            "give another folder or make room there"
        ) from error
    return list(files)


def page(said: Content) -> str:
    """The page as HTML. What comes from reports is escaped; it loads nothing and runs no script."""
    environment = Environment(
        loader=PackageLoader("csprune.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        content=said,
        checks=list(CHECKS.values()),
        draw=_drawn,
        light=variables(dark=False),
        dark=variables(dark=True),
    )


def _drawn(picture: Picture) -> Markup:
    """A picture twice, for a wide and a narrow page; the style sheet shows one of them."""
    label = str(escape(f"{picture.title}. The tables have the figures."))
    return Markup("\n").join(
        Markup('<div class="{}">{}</div>').format(
            form, Markup(inline_svg(picture.draw(width), f"{picture.name}-{form}", label))
        )
        for form, width in (("wide", WIDE), ("narrow", NARROW))
    )
