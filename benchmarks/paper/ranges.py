"""Pictures of the paper's ranges with the models' figures beside them."""

from __future__ import annotations

from collections.abc import Sequence

from claims import Claim, Range, Verdict, Verdicts
from reports import Reports

from csprune.analysis.results import Curve, Panel, Picture, Unit

_LEAST = 3  # of fewer ranges the table is easier to read
_UNITS: dict[Unit, str] = {"ratio": "ratios", "share": "shares", "nats": "nats", "number": "numbers"}


def range_pictures(
    name: str,
    title: str,
    claims: Sequence[Claim],
    reports: Sequence[Reports],
    verdicts: Sequence[Verdicts],
) -> list[Picture]:
    """The ranges of a section's claims and the models' figures beside them; a picture for each unit.

    Args:
        name: What the pictures' names begin with.
        title: Of the section.
        claims: Of the section, as they are numbered.
        reports: Of the models.
        verdicts: Of each model.
    """
    pictures = []
    for unit, of_unit in _UNITS.items():
        ranges = {
            f"{number}. {claim.text}": claim
            for number, claim in enumerate(claims, 1)
            if claim.unit == unit and _bounds(claim)
        }
        if len(ranges) < _LEAST:
            continue
        curves = [_range_curve(list(ranges.values()), unit)]
        curves += [
            _model_curve(each.name, [found[claim.key] for claim in ranges.values()])
            for each, found in zip(reports, verdicts, strict=True)
        ]
        panel = Panel(
            curves,
            list(range(len(ranges))),
            "claim",
            of_unit,
            y_scale="log" if unit == "ratio" else "linear",
            line=1.0 if unit == "ratio" else 0.0,
            marks="points",
            x_labels=list(ranges),
        )
        pictures.append(
            Picture(
                f"{name}-{unit}",
                f"{title}: figures beside the paper's ranges, {of_unit}",
                "Of each claim the paper's range, its exceptions left out, and what was found, with 95% "
                "intervals.",
                [panel],
            )
        )
    return pictures


def _bounds(claim: Claim) -> tuple[float, float] | None:
    """The range of a claim that has two ends and a width."""
    if not isinstance(claim.expects, Range):
        return None
    low, high = claim.expects.spans[0]
    return None if low is None or high is None or low == high else (low, high)


def _range_curve(claims: Sequence[Claim], unit: Unit) -> Curve:
    ends = [found for claim in claims if (found := _bounds(claim))]
    middles = [(low * high) ** 0.5 if unit == "ratio" else (low + high) / 2 for low, high in ends]
    return Curve(
        "the paper", middles, low=[low for low, _ in ends], high=[high for _, high in ends], reference=True
    )


def _model_curve(name: str, verdicts: Sequence[Verdict]) -> Curve:
    found = [each.found for each in verdicts]
    ends = [each.interval or (None, None) if each else (None, None) for each in found]
    return Curve(
        name,
        [each.value if each else None for each in found],
        low=[low for low, _ in ends],
        high=[high for _, high in ends],
    )
