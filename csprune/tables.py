"""The report of an evaluation as tables for a person: Markdown and the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from csprune.measurement import REFERENCE

_HEADINGS = ("rank", "method", "loss change", "D", "F", "K", "top-1")
_STORED_HEADINGS = ("checkpoint", "loss change", "in memory", "difference")
_STORED_LEGEND = "Checkpoints as they load; in memory: the same truncation, not stored."
_OTHER_CALIBRATION = "+: made from another calibration than this run's."
# Sentences of one line each, so that none is broken in a terminal of 80 columns.
_LEGEND = (
    "Loss change in nats, with its 95% interval over documents.",
    f"method*: its loss change is established to differ from {REFERENCE}'s.",
    "D: logit distance, logit^2. F: Fisher term, nats. K: prediction change, nats.",
    "top-1: how often the most probable token stays the same.",
    f"{REFERENCE}: the mean over random subspaces of the same size.",
)


def markdown(report: dict[str, Any]) -> str:
    """The report as a short Markdown text with one table, for a model card."""
    lines = [
        f"{_headline(report)}.",
        "",
        f"| {' | '.join(_HEADINGS)} |",
        f"|{'---|' * len(_HEADINGS)}",
        *(f"| {' | '.join(row)} |" for row in _rows(report)),
        "",
        " ".join(_LEGEND),
        *_stored_markdown(report),
    ]
    return "\n".join(lines) + "\n"


def table(report: dict[str, Any]) -> Group:
    """The report for the terminal: a headline, the table, and what its columns are; it fits 80 columns."""
    body = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in _HEADINGS:
        left = heading in ("rank", "method")
        body.add_column(heading, justify="left" if left else "right", no_wrap=True)
    previous = ""
    for row in _rows(report):
        # One block of rows for each rank, random last in it: what a row is to be compared with.
        if previous and row[0] != previous:
            body.add_row()
        cells = ["" if row[0] == previous else row[0], *row[1:]]
        style = "italic" if row[1] == REFERENCE else None
        body.add_row(*map(Text, cells), style=style)
        previous = row[0]
    return Group(
        Text(report["model"], style="bold"),
        Text(_headline(report)),
        Text(),
        body,
        Text(),
        *(Text(line, style="dim") for line in _LEGEND),
        *_stored_table(report),
    )


def _headline(report: dict[str, Any]) -> str:
    base = report["base_loss"]
    low, high = base["ci95"]
    return f"base loss {base['mean']:.4f} [{low:.4f}, {high:.4f}] nats on {report['documents']:,} documents"


def _rows(report: dict[str, Any]) -> list[list[str]]:
    """The cells of both tables, by rank, random last within each."""
    entries = sorted(report["truncations"], key=lambda each: each["method"] == REFERENCE)
    rows = []
    for entry in sorted(entries, key=lambda each: each["rank"]):
        low, high = entry["loss_change"]["ci95"]
        mark = "*" if entry["vs_random"]["loss_change"]["established"] else ""
        rows.append(
            [
                f"{entry['rank']:g}",
                entry["method"] + mark,
                f"{_nats(entry['loss_change']['mean'])} [{_nats(low)}, {_nats(high)}]",
                _figure(entry["logit_distance"]["mean"]),
                _figure(entry["fisher_term"]["mean"]),
                _figure(entry["prediction_change"]["mean"]),
                f"{entry['top1_agreement']['mean']:.1%}",
            ]
        )
    return rows


def _stored_rows(report: dict[str, Any]) -> list[list[str]]:
    """Exported checkpoints beside the same truncations in memory."""
    rows = []
    for entry in report.get("checkpoints", []):
        beside = entry["in_memory"]
        row = [entry["name"], _nats(entry["loss_change"]["mean"]), "-", "-"]
        if beside is not None:
            note = "" if entry["same_calibration"] else "+"
            change = beside["loss_change"]
            low, high = (f"{end:+.0e}" for end in change["difference_ci95"])
            row[0] += note
            row[2:] = [_nats(change["mean"]), f"{change['difference']:+.0e} [{low}, {high}]"]
        rows.append(row)
    return rows


def _stored_markdown(report: dict[str, Any]) -> list[str]:
    if "checkpoints" not in report:
        return []
    rows = [_STORED_HEADINGS, ["---"] * len(_STORED_HEADINGS), *_stored_rows(report)]
    return ["", *(f"| {' | '.join(row)} |" for row in rows), "", " ".join(_stored_legend(report))]


def _stored_legend(report: dict[str, Any]) -> list[str]:
    other = any(entry["in_memory"] and not entry["same_calibration"] for entry in report["checkpoints"])
    return [_STORED_LEGEND, *([_OTHER_CALIBRATION] if other else [])]


def _stored_table(report: dict[str, Any]) -> list[Any]:
    if "checkpoints" not in report:
        return []
    body = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in _STORED_HEADINGS:
        left = heading == _STORED_HEADINGS[0]
        body.add_column(heading, justify="left" if left else "right", overflow="fold")
    for row in _stored_rows(report):
        body.add_row(*map(Text, row))
    legend = (Text(line, style="dim") for line in _stored_legend(report))
    return [Text(), body, Text(), *legend]


def _nats(value: float) -> str:
    """A signed loss change, seven characters wide below a hundred nats."""
    if 0 < abs(value) < 0.00005:
        return f"{value:+.0e}"
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
