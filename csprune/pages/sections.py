"""What a page says of each report, in order: the content that its HTML and its Markdown share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from csprune.measurement import Evaluation
from csprune.pages import findings, gallery, grids
from csprune.pages.findings import Group
from csprune.pages.gallery import Picture
from csprune.pages.grids import Grid
from csprune.pages.wording import Report, capitalised, distinct_labels


@dataclass(frozen=True)
class Section:
    """One report.

    Attributes:
        key: Distinct in the page, for ids.
        label: What the page calls it.
        done: What was measured, in words.
        base: The unchanged model's loss.
        best: The least costly method, a sentence for each rank.
        established: Sentences that the statements carry.
        open: What they do not decide.
        judged: Whether the report has statements at all.
        rule: When a statement is established.
        pictures: To be drawn.
        main: The tables that are always open.
        folded: Those that are folded.
        groups: The statements with their checks.
        protocol: Every setting, by its dotted name.
        versions: Of the software, likewise.
    """

    key: str
    label: str
    done: str
    base: str
    best: Sequence[str]
    established: Sequence[str]
    open: Sequence[str]
    judged: bool
    rule: str
    pictures: Sequence[Picture]
    main: Sequence[Grid]
    folded: Sequence[Grid]
    groups: Sequence[Group]
    protocol: Sequence[tuple[str, str]]
    versions: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Content:
    """A page: several reports side by side, or one alone.

    Attributes:
        title: Of the page.
        sections: One for each report.
        pictures: Those that set several reports side by side; none for one.
        overview: The table that does; None for one.
    """

    title: str
    sections: Sequence[Section]
    pictures: Sequence[Picture]
    overview: Grid | None

    @property
    def filed(self) -> Sequence[Picture]:
        """The pictures that become files: of the only report, or those that set several side by side."""
        return self.pictures or self.sections[0].pictures


def content(reports: Sequence[tuple[Report, Evaluation]], names: Sequence[str]) -> Content:
    """What the page of these reports says.

    Args:
        reports: Each report with the values it was made of.
        names: What to call reports of one model apart, their folders for instance.
    """
    found = [report for report, _ in reports]
    labels = distinct_labels(found, names)
    several = len(reports) > 1
    sections = [
        _section(report, evaluation, label, place if several else None)
        for place, ((report, evaluation), label) in enumerate(zip(reports, labels, strict=True), 1)
    ]
    return Content(
        title=f"{len(reports)} truncation reports" if several else f"Truncating the head of {labels[0]}",
        sections=sections,
        pictures=gallery.of_reports(found, labels) if several else [],
        overview=grids.comparison(found, labels) if several else None,
    )


def _section(report: Report, evaluation: Evaluation, label: str, place: int | None) -> Section:
    pictures = gallery.of_report(report, evaluation)
    held, undecided = findings.conclusions(report)
    statements = findings.groups(report)
    protocol = dict(report["protocol"])
    versions = protocol.pop("versions", {})
    checkpoints = grids.checkpoints(report)
    per_unit = grids.per_unit(report)
    return Section(
        key="report" if place is None else f"report-{place}",
        label=label,
        done=findings.done(report),
        base=findings.base(report),
        best=findings.least_costly(report),
        established=held,
        open=undecided,
        judged=bool(statements),
        rule=capitalised(str(protocol.get("bootstrap", {}).get("rule", ""))),
        pictures=pictures if place is None else gallery.among_others(pictures, place),
        main=[grids.costs(report), grids.over_documents(evaluation), *([checkpoints] if checkpoints else [])],
        folded=[*([per_unit] if per_unit.rows else []), grids.all_intervals(report)],
        groups=statements,
        protocol=flattened(protocol),
        versions=flattened(versions),
    )


def flattened(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested JSON as dotted names and texts: `{"a": {"b": 1}}` is `a.b`, `1`."""
    if isinstance(value, dict) and value:
        return [
            pair
            for key, inner in value.items()
            for pair in flattened(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        return [pair for place, inner in enumerate(value) for pair in flattened(inner, f"{prefix}.{place}")]
    return [(prefix, _text(value))]


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return "none" if value == {} else str(value)
