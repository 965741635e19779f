"""The page of results: one HTML file that needs nothing else, and what lies beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from markupsafe import Markup

from csprune.analysis.results import Picture, Result
from csprune.pages.findings import CHECKS
from csprune.pages.frame import check_target, render, twice, write_whole
from csprune.pages.results_pictures import draw
from csprune.pages.results_sections import ResultsContent, ResultsHeading, pictures_folder, results_content
from csprune.pages.results_summary import markdown_of
from csprune.pages.theme import WIDE, png_file, svg_file


def check_results_target(directory: Path, overwrite: bool, page: str = "analysis") -> None:
    """Refuse to replace files in a folder, unless they are an earlier page that may be overwritten.

    Args:
        directory: The folder; it may not exist.
        overwrite: Whether an earlier page may be replaced.
        page: The page's file name without ending.

    Raises:
        InputError: Something of a page's names is there, and is not ours or not to be replaced.
    """
    check_target(Path(directory), f"{page}.html", (f"{page}.md", pictures_folder(page)), "page", overwrite)


def write_results(
    directory: Path, heading: ResultsHeading, results: Sequence[Result], *, page: str = "analysis"
) -> list[Path]:
    """Write what a person looks at: the page, its Markdown, and the pictures as files.

    Everything is drawn before the first file is written, and each file appears whole or not at all; the
    page, which has all in itself, last. The same results give the same bytes.

    Args:
        directory: The folder, which is made if need be. Earlier files of these names are replaced.
        heading: Of all results.
        results: In the order to be read; as they were computed, or as `read_result` has them.
        page: The page's file name without ending.

    Returns:
        The paths written: `PAGE-pictures/NAME.svg` and `.png`, `PAGE.md`, `PAGE.html`.

    Raises:
        InputError: If the results cannot be shown: names that repeat, numbers that are not finite.
        CspruneError: If the files cannot be written.
    """
    return write_whole(Path(directory), rendered(directory, heading, results, page=page))


def rendered(
    directory: Path, heading: ResultsHeading, results: Sequence[Result], *, page: str = "analysis"
) -> dict[Path, bytes]:
    """All files that `write_results` writes, by path, the page last; arguments and errors as of it."""
    directory = Path(directory)
    said = results_content(heading, results, page)
    files: dict[Path, bytes] = {}
    for picture in said.pictures:
        figure = draw(picture, WIDE)
        place = directory / said.folder
        files[place / f"{picture.name}.svg"] = svg_file(figure)
        files[place / f"{picture.name}.png"] = png_file(figure)
    files[directory / f"{page}.md"] = markdown_of(said).encode()
    files[directory / f"{page}.html"] = results_page(said).encode()
    return files


def results_page(said: ResultsContent) -> str:
    """The page as HTML. What comes from results is escaped; it loads nothing and runs no script."""
    return render(
        "results.html", title=said.heading.title, content=said, checks=list(CHECKS.values()), draw=_drawn
    )


def _drawn(picture: Picture) -> Markup:
    return twice(partial(draw, picture), f"picture-{picture.name}", picture.title)
