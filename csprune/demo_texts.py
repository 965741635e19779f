"""Texts that every installation has, and how text is cut into documents.

`demo` is Python's own documentation, `demo-code` the source of its standard library.
"""

import importlib
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from csprune.errors import InputError

DEMO_PIECE = 600  # characters: about 150 tokens, enough for the default window of 128


def pieces(paragraphs: Iterable[str], at_least: int) -> Iterator[str]:
    """Joins successive paragraphs by blank lines into pieces of at least `at_least` characters.

    A shorter rest at the end goes to the piece before it, so nothing is lost; only where all
    paragraphs together are too short is the one piece shorter.
    """
    held: str | None = None  # the last complete piece, which may still receive the rest
    rest: list[str] = []
    length = 0
    for paragraph in paragraphs:
        length += len(paragraph) + (2 if rest else 0)
        rest.append(paragraph)
        if length >= at_least:
            if held is not None:
                yield held
            held, rest, length = "\n\n".join(rest), [], 0
    if rest:
        held = "\n\n".join(rest if held is None else [held, *rest])
    if held is not None:
        yield held


def paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """What blank lines separate."""
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


def package(name: str, purpose: str) -> Any:
    """An optional package that a source needs, by its name.

    Raises:
        InputError: It is not installed.
    """
    # Late, for most runs need none of these packages and one of them takes seconds.
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = name.partition(".")[0]
        raise InputError(f"{purpose} needs the package {missing!r}: install it") from error


def demo_prose() -> Iterator[str]:
    """Python's own documentation topics: several hundred documents, whatever the version.

    Topics quote one another, so a paragraph that already stood somewhere is left out: no text is in
    two documents, and what is calibrated on is not evaluated on.
    """
    topics = package("pydoc_data.topics", "the demo text").topics
    known: set[str] = set()

    def unknown(paragraph: str) -> bool:
        key = " ".join(paragraph.split())
        return not (key in known or known.add(key))

    for _, text in sorted(topics.items()):
        yield from pieces(filter(unknown, paragraphs(text.split("\n"))), DEMO_PIECE)


def demo_code() -> Iterator[str]:
    """The functions and classes of Python's standard library: about three thousand documents.

    Each module's top-level definitions, its imports and constants left out, in pieces long enough for the
    default window; a definition shorter than that goes with the next one of its module.
    """
    library = Path(sysconfig.get_path("stdlib"))
    packages = [path for path in library.glob("*/*.py") if path.parent.name in sys.stdlib_module_names]
    for path in sorted([*library.glob("*.py"), *packages]):
        try:
            with tokenize.open(path) as file:
                source = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # a source file that Python itself cannot read
        yield from pieces(_definitions(source), DEMO_PIECE)


def _definitions(source: str) -> Iterator[str]:
    """Top-level functions and classes with their decorators."""
    held: list[str] = []
    decorated = False
    for line in source.split("\n"):
        starts = line.startswith(("def ", "class ", "async def ", "@"))
        outside = bool(line.strip()) and not line[0].isspace() and line[0] not in ")]}#"
        if outside and not decorated:
            if held:
                yield "\n".join(held).rstrip()
            held = []
        if held or starts:
            held.append(line)
        decorated = line.startswith("@") or (decorated and not starts)
    if held:
        yield "\n".join(held).rstrip()
