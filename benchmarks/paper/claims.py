"""What the paper says in numbers, and how a model's figures are held against it.

A claim is a range that the paper states, a side of a null value, or a comparison that the paper reports as
not established. The other modules named `claims_...` have them, section by section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from reports import Found, NotApplicable, Reports

from csprune.analysis.results import Unit

Span = tuple[float | None, float | None]
Where = Literal["above", "below"]
Mark = Literal["reproduced", "differs", "not applicable"]

RULES = (
    "A range is reproduced where our figure lies in it, as far as its digits are printed, or our 95% "
    "interval overlaps it. Where the paper says on which side of a null value a figure lies, ours must lie "
    "there: established by the paper's rule where the paper judged it so, else as it is. What the paper "
    "reports as not established is reproduced where it is not established here either. Everything else "
    "differs; what a model does not have is not applicable."
)


@dataclass(frozen=True)
class Range:
    """Where the paper's models lie.

    Attributes:
        spans: None is no bound; several where the paper names exceptions.
        digits: Decimals that the paper prints, so that its ends may be half of the last one further; None
            for ends that are exact.
    """

    spans: tuple[Span, ...]
    digits: int | None = 2


@dataclass(frozen=True)
class Side:
    """On which side of a null value they lie, and whether by the paper's rule for statements."""

    null: float
    side: Where
    judged: bool = False


@dataclass(frozen=True)
class Open:
    """On which side of a null value they are not established to lie."""

    null: float
    side: Where


Expectation = Range | Side | Open


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        key: Distinct, for explanations.
        section: Of the paper, where it stands.
        text: What the figure is.
        said: What the paper says of it, as it is printed, and of which models if not of all ten.
        unit: Of the figure.
        expects: How it is decided.
        find: The figure in a model's reports; raises NotApplicable where the model has no such thing.
    """

    key: str
    section: str
    text: str
    said: str
    unit: Unit
    expects: Expectation
    find: Callable[[Reports], Found]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim.

    Attributes:
        mark: In the issue's words.
        found: The figure; None where it does not apply.
        reason: How it differs, or why it does not apply; empty where it is reproduced.
    """

    mark: Mark
    found: Found | None
    reason: str = ""


Verdicts = Mapping[str, Verdict]
"""Of one model, by claim."""


def between(low: float | None, high: float | None, *others: Span, digits: int | None = 2) -> Range:
    return Range(((low, high), *others), digits)


def above(null: float, *, judged: bool = False) -> Side:
    return Side(null, "above", judged)


def below(null: float, *, judged: bool = False) -> Side:
    return Side(null, "below", judged)


def decide(claim: Claim, reports: Reports) -> Verdict:
    """Hold a model's figure against a claim."""
    try:
        found = claim.find(reports)
    except NotApplicable as reason:
        return Verdict("not applicable", None, str(reason))
    reason = difference(claim.expects, found)
    return Verdict("differs" if reason else "reproduced", found, reason)


def difference(expects: Expectation, found: Found) -> str:
    """How a figure differs from what is expected; empty where it does not."""
    if isinstance(expects, Range):
        return _outside(expects, found)
    side = "above" if found.value > expects.null else "below" if found.value < expects.null else None
    held = ", established" if found.established else ""
    if isinstance(expects, Open):
        return f"{side}{held}" if side == expects.side and held else ""
    if side != expects.side:
        return f"{side}{held}" if side else "neither above nor below"
    return f"{side}, but not established" if expects.judged and found.established is False else ""


def _outside(expects: Range, found: Found) -> str:
    low, high = found.interval or (found.value, found.value)
    slack = 0.0 if expects.digits is None else 0.5 * 10.0**-expects.digits
    low, high = min(low, found.value) - slack, max(high, found.value) + slack
    if any((a is None or high >= a) and (b is None or low <= b) for a, b in expects.spans):
        return ""
    if all(b is not None and low > b for _, b in expects.spans):
        return "above"
    if all(a is not None and high < a for a, _ in expects.spans):
        return "below"
    return "between"


def at(
    analysis: str, table: str, row: str | int, column: str, absent: str = ""
) -> Callable[[Reports], Found]:
    """The figure in a cell; `absent` says why there may be no such row."""
    return lambda reports: reports.cell(analysis, table, row, column, absent)


def figure(analysis: str, key: str, absent: str) -> Callable[[Reports], Found]:
    """A figure that stands in no table; `absent` says why it may be None."""
    return lambda reports: reports.figure(analysis, key, absent)


_COMPARED: dict[str, tuple[str, Unit]] = {
    "logit_distance": ("D, to random's", "ratio"),
    "fisher_term": ("F, to random's", "ratio"),
    "prediction_change": ("K, to random's", "ratio"),
    "loss_excess": ("loss excess", "nats"),
    "fisher_per_distance": ("F/D, to random's", "ratio"),
    "squared_length": ("squared length, to random's", "ratio"),
}


def compared(
    key: str,
    section: str,
    of: str,
    where: tuple[str, str, str | int],
    said: Mapping[str, tuple[str, Expectation]],
    absent: str = "",
) -> list[Claim]:
    """Claims of one row of a comparison.

    Args:
        key: What their keys begin with.
        section: Of the paper.
        of: What is compared, as a text begins.
        where: Analysis, table and row.
        said: By column, what the paper says and expects of it.
        absent: Why there may be no such row.
    """
    return [
        Claim(
            f"{key}-{column.replace('_', '-')}",
            section,
            f"{of}: {_COMPARED[column][0]}",
            quoted,
            _COMPARED[column][1],
            expects,
            at(*where, column, absent),
        )
        for column, (quoted, expects) in said.items()
    ]


def full_result(of: str) -> dict[str, tuple[str, Expectation]]:
    """What E.1 calls the full result: D below random's, K and the loss change above it."""
    return {
        "logit_distance": (f"below 1 in {of}", below(1, judged=True)),
        "prediction_change": (f"above 1 in {of}", above(1, judged=True)),
        "loss_excess": (f"above 0 in {of}", above(0, judged=True)),
    }
