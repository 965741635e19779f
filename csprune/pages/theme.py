"""How every picture looks: colours, marks, letters; and how it becomes SVG or PNG.

Figures are drawn in the light colours. In a page each colour becomes a CSS variable, so that the same picture
serves light and dark; colours differ in lightness, and marks in shape, for those who do not see the hue.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from csprune.errors import InputError
from csprune.measurement import REFERENCE

WIDE, NARROW = 7.4, 3.3
"""Widths of a figure in inches: for paper and screens, and for phones."""

COLOURS = {
    "ink": ("#1f2328", "#e8eaed"),
    "muted": ("#59636e", "#a3adb8"),
    "grid": ("#dde1e6", "#353c44"),
    "paper": ("#ffffff", "#15191e"),
    "singular": ("#b8460e", "#f2935a"),
    "fisher": ("#0a6ab0", "#61b4f0"),
    "whitened": ("#14774c", "#56cf9b"),
    "fisher-whitened": ("#7b3294", "#d59be8"),
    "random": ("#6e6e6e", "#b4b4b4"),
    "crimson": ("#b3123f", "#ff8fa6"),
    "teal": ("#00727f", "#4fd0dd"),
    "ochre": ("#7a5c00", "#d9b84a"),
    "indigo": ("#4b4fc4", "#a3a6ff"),
}
"""By name: the colour in light and in dark, no two alike."""

_MARKERS = {"singular": "s", "fisher": "o", "whitened": "^", "fisher-whitened": "D", "random": "x"}
# What is no method takes these in order: neighbours differ in hue and in shape.
_SERIES = {
    "fisher": "o",
    "singular": "s",
    "whitened": "^",
    "fisher-whitened": "D",
    "ochre": "v",
    "crimson": "P",
    "teal": "X",
    "indigo": "*",
}
_DESCRIPTION = {"Date": None, "Creator": None, "Format": None, "Type": None}
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["muted"][0],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": COLOURS["ink"][0],
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": COLOURS["ink"][0],
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout on every machine
    "font.size": 9,
    "grid.color": COLOURS["grid"][0],
    "grid.linewidth": 0.7,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "text.color": COLOURS["ink"][0],
    "text.parse_math": False,  # a model's name is no formula
    "xtick.color": COLOURS["muted"][0],
    "xtick.labelcolor": COLOURS["ink"][0],
    "xtick.labelsize": 8.5,
    "xtick.minor.size": 0,
    "ytick.color": COLOURS["muted"][0],
    "ytick.labelcolor": COLOURS["ink"][0],
    "ytick.labelsize": 8.5,
    "ytick.minor.size": 0,
}


def drawing() -> AbstractContextManager[None]:
    """The settings to draw in, whatever the user's own are; they are put back at the end."""
    return matplotlib.style.context(["default", _STYLE])


def colour(name: str) -> str:
    """The light colour of a method, or of `ink`, `muted`, `grid` or `paper`.

    Raises:
        InputError: A method that this version does not know.
    """
    if name not in COLOURS:
        raise InputError(f"no picture shows the method {name!r}: use the version of csprune that measured it")
    return COLOURS[name][0]


def look(method: str, **changes: Any) -> dict[str, Any]:
    """Line and marker of a method, as arguments of `Axes.plot`."""
    own = {
        "color": colour(method),
        "linestyle": "--" if method == REFERENCE else "-",
        "marker": _MARKERS[method],
        "markeredgecolor": colour(method if method == REFERENCE else "paper"),
        "markeredgewidth": 1.2 if method == REFERENCE else 0.6,
    }
    return {**own, **changes}


def looks(labels: Iterable[str], references: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Line and marker of each series of a picture, no two alike, up to 24 of them.

    Args:
        labels: Of the series in order; one that is a method's name looks as that method does everywhere.
        references: Those of them that the others are compared with: grey and dashed, as random truncation.
    """
    labels, references = list(dict.fromkeys(labels)), set(references)
    taken = {label for label in labels if label in _MARKERS}
    free = [pair for pair in _SERIES.items() if pair[0] not in taken]
    found, place, grey = {}, 0, 0
    for label in labels:
        if label in references:
            found[label] = look(REFERENCE, linestyle=("--", ":", "-.")[grey % 3])
            grey += 1
        elif label in taken:
            found[label] = look(label)
        else:
            name, marker = free[place % len(free)]
            found[label] = {
                "color": colour(name),
                "linestyle": ("-", (0, (5, 1.2, 1.2, 1.2)), (0, (1.2, 1.2)))[place // len(free) % 3],
                "marker": marker,
                "markeredgecolor": colour("paper"),
                "markeredgewidth": 0.6,
            }
            place += 1
    return found


def legend(figure: Figure, methods: Iterable[str], width: float, reference: str | None = None) -> None:
    """One legend above the picture; `reference` names a plain line that stands for random truncation."""
    handles = [Line2D([], [], label=method, **look(method)) for method in methods]
    if reference is not None:
        handles.append(Line2D([], [], label=reference, **look(REFERENCE, marker=None, linewidth=1.1)))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(handles) if width > NARROW else 2,
        columnspacing=1.4,
        handletextpad=0.5,
        borderaxespad=0,
    )


def variables(dark: bool) -> dict[str, str]:
    """The CSS variables that the pictures of a page use."""
    return {f"--{name}": pair[dark] for name, pair in COLOURS.items()}


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """A figure as an SVG element for a page: colours are CSS variables, ids begin with its name.

    Args:
        figure: Drawn within `drawing`.
        name: No other picture of the page may have it.
        label: What is to be seen, for who does not see it; plain text, already escaped for HTML.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        text = _saved(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", text)
    names = {light: key for key, (light, _) in COLOURS.items()}
    text = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda found: f"var(--{names[found.group()]})", text)
    (view_box,) = re.findall(r'viewBox="[^"]*"', text)
    head = f'<svg {view_box} role="img" aria-label="{label}">'
    return re.sub(r"<svg.*?>", lambda _: head, text, count=1, flags=re.DOTALL).strip()


def svg_file(figure: Figure) -> bytes:
    """A figure as an SVG file in light colours; letters are outlines, the same wherever it is opened."""
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "csprune"}):
        return _saved(figure, "svg", facecolor=colour("paper"))


def png_file(figure: Figure) -> bytes:
    """A figure as a PNG file in light colours, 200 dots an inch."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=200, facecolor=colour("paper"), metadata={"Software": None})
    return out.getvalue()


def _saved(figure: Figure, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, metadata=_DESCRIPTION, **options)
    return out.getvalue()
