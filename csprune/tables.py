"""The report of an evaluation as tables for a person: Markdown and the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from csprune.measurement import REFERENCE

_HEADINGS = ("rank", "method", "loss change", "D", "F", "K", "top-1")


def markdown(report: dict[str, Any]) -> str:
    """The report as a short Markdown text with one table, for a model card."""
    lines = [
        f"{_headline(report)}.",
        "",
        f"| {' | '.join(_HEADINGS)} |",
        f"|{'---|' * len(_HEADINGS)}",
        *(f"| {' | '.join(row)} |" for row in _rows(report)),
        "",
        _legend(),
    ]
    return "\n".join(lines) + "\n"


def table(report: dict[str, Any]) -> Table:
    """The report as a table for the terminal; it fits 80 columns."""
    result = Table(
        title=Text(f"{report['model']}: {_headline(report)}"),
        title_justify="left",
        caption=Text(_legend()),
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for heading in _HEADINGS:
        left = heading in ("rank", "method")
        result.add_column(heading, justify="left" if left else "right", no_wrap=True)
    previous = ""
    for row in _rows(report):
        # One block of rows for each rank, random last in it: what a row is to be compared with.
        if previous and row[0] != previous:
            result.add_row()
        cells = ["" if row[0] == previous else row[0], *row[1:]]
        style = "italic" if row[1] == REFERENCE else None
        result.add_row(*map(Text, cells), style=style)
        previous = row[0]
    return result


def _headline(report: dict[str, Any]) -> str:
    base = report["base_loss"]
    low, high = base["ci95"]
    return f"base loss {base['mean']:.4f} [{low:.4f}, {high:.4f}] nats on {report['documents']:,} documents"


def _legend() -> str:
    return (
        "Loss change, F (Fisher term) and K (prediction change) in nats, D (logit distance) in "
        "logit^2. top-1: the most probable token stays the same. In brackets: 95% intervals over "
        f"documents. {REFERENCE}: the mean over random subspaces of the same size."
    )


def _rows(report: dict[str, Any]) -> list[list[str]]:
    """The cells of both tables, by rank, random last within each."""
    entries = sorted(report["truncations"], key=lambda each: each["method"] == REFERENCE)
    rows = []
    for entry in sorted(entries, key=lambda each: each["rank"]):
        low, high = entry["loss_change"]["ci95"]
        rows.append(
            [
                f"{entry['rank']:g}",
                entry["method"],
                f"{_nats(entry['loss_change']['mean'])} [{_nats(low)}, {_nats(high)}]",
                _figure(entry["logit_distance"]["mean"]),
                _figure(entry["fisher_term"]["mean"]),
                _figure(entry["prediction_change"]["mean"]),
                f"{entry['top1_agreement']['mean']:.1%}",
            ]
        )
    return rows


def _nats(value: float) -> str:
    """A signed loss change, seven characters wide up to a hundred nats."""
    return f"{value:+.4f}" if abs(value) < 9.99995 else f"{value:+.3f}"


def _figure(value: float) -> str:
    """Three figures or more in at most seven characters, no zero that is none."""
    if abs(value) >= 999_999.5:
        return f"{value:.1e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 0.001 or value == 0:
        return f"{value:.4f}"
    return f"{value:.1e}"
