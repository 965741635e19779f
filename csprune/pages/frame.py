"""What every page shares: its templates, how its pictures stand in it, and its files, written whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from csprune.files import check_replaceable, write_files
from csprune.pages.theme import NARROW, WIDE, inline_svg, variables

PICTURES_FOLDER = "pictures"
_MARK = '<meta name="generator" content="csprune">'


def render(template: str, **content: Any) -> str:
    """A page as HTML. What comes from outside is escaped; it loads nothing and runs no script."""
    environment = Environment(
        loader=PackageLoader("csprune.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        light=variables(dark=False), dark=variables(dark=True), **content
    )


def twice(draw: Callable[[float], Figure], name: str, title: str) -> Markup:
    """A picture for a wide and for a narrow page; the style sheet shows one of them.

    Args:
        draw: From a width in inches to the figure.
        name: No other picture of the page has it.
        title: What the picture shows.
    """
    label = str(escape(f"{title}. The tables have the figures."))
    return Markup("\n").join(
        Markup('<div class="{}">{}</div>').format(
            form, Markup(inline_svg(draw(width), f"{name}-{form}", label))
        )
        for form, width in (("wide", WIDE), ("narrow", NARROW))
    )


def check_target(directory: Path, page: str, others: Sequence[str], what: str, overwrite: bool) -> None:
    """Refuse to replace files in a folder, unless they are an earlier page that may be overwritten.

    Args:
        directory: The folder; it may not exist.
        page: The page's file name.
        others: What is written beside it.
        what: The kind of page, for messages.
        overwrite: Whether an earlier one may be replaced.

    Raises:
        InputError: Something of these names is there, and is not ours or not to be replaced.
    """

    def is_page(folder: Path) -> bool:
        try:
            return _MARK in (folder / page).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return False

    check_replaceable(directory, (page, *others), is_page, what, overwrite)


def write_whole(directory: Path, files: Mapping[Path, bytes]) -> list[Path]:
    """Write a page's files in order, each whole or not at all, and make their folders.

    Raises:
        CspruneError: If they cannot be written.
    """
    names = {str(path.relative_to(directory)): data for path, data in files.items()}
    write_files(directory, names, "report's page")
    return list(files)
