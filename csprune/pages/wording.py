"""Numbers and names of a report as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from csprune.measurement import REFERENCE

QUANTITY_NAMES = {
    "loss_change": "loss change",
    "logit_distance": "logit distance D",
    "fisher_term": "Fisher term F",
    "prediction_change": "prediction change K",
    "top1_agreement": "top-1 agreement",
}

DASH = "\N{EN DASH}"
"""Stands where there is no figure."""

Report = dict[str, Any]
"""The content of a `report.json`."""


def number(value: float) -> str:
    """A number as an axis or a sentence has it: no zeros at the end, a real minus sign."""
    return _minus(f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:g}")


def nats(value: float, sign: bool = True) -> str:
    """Nats with four decimals; where these would be nearly all zeros, with two figures."""
    if value != 0 and abs(value) < 0.00095:
        text = f"{value:+.2g}"
    else:
        text = f"{value:+.4f}" if abs(value) < 9.99995 else f"{value:+.3f}"
    return _minus(text if sign else text.removeprefix("+"))


def figure(value: float) -> str:
    """Three figures or more, thousands separated."""
    if abs(value) >= 1000:
        return _minus(f"{value:,.0f}") if abs(value) < 1e7 else _minus(f"{value:.2e}")
    if abs(value) >= 10:
        return _minus(f"{value:.1f}")
    return nats(value, sign=False)


def times(value: float) -> str:
    """A ratio with three figures."""
    return _minus(f"{value:#.3g}".rstrip(".") if 0.001 <= abs(value) < 1000 else f"{value:.2g}")


def percent(share: float) -> str:
    """A share in percent: 0.05 is 5%, 0.125 is 12.5%."""
    return _minus(f"{100 * share:.6g}%")


def share(value: float) -> str:
    """A measured share in percent with one decimal."""
    return _minus(f"{value:.1%}")


def interval(ends: Sequence[float] | None, write: Callable[[float], str] = nats) -> str:
    """The ends of an interval in brackets, or a dash where there is none."""
    return DASH if ends is None else f"[{write(ends[0])}, {write(ends[1])}]"


def with_interval(value: float | None, ends: Sequence[float] | None, write: Callable[[float], str]) -> str:
    """A figure and its interval; a dash where there is no figure."""
    if value is None:
        return DASH
    return write(value) if ends is None else f"{write(value)} {interval(ends, write)}"


def capitalised(text: str) -> str:
    """The text with a capital first letter; the symbols in it keep theirs."""
    return text[:1].upper() + text[1:]


def listing(parts: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = list(parts)
    return f"{', '.join(others)} and {last}" if others else last


def counted(count: int, what: str) -> str:
    """`1 document`, `2 documents`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def methods_of(report: Report) -> list[str]:
    """The methods of a report in its order, the reference last."""
    found = dict.fromkeys(entry["method"] for entry in report["truncations"])
    return sorted(found, key=lambda method: method == REFERENCE)


def ranks_of(report: Report) -> list[float]:
    """The ranks of a report, ascending."""
    return sorted({entry["rank"] for entry in report["truncations"]})


def entries_of(report: Report, method: str) -> list[dict[str, Any]]:
    """The truncations of a method by ascending rank."""
    own = [entry for entry in report["truncations"] if entry["method"] == method]
    return sorted(own, key=lambda entry: entry["rank"])


def by_rank(report: Report) -> list[dict[str, Any]]:
    """All truncations by ascending rank, the reference last at each."""
    return [
        entry
        for rank in ranks_of(report)
        for method in methods_of(report)
        for entry in entries_of(report, method)
        if entry["rank"] == rank
    ]


def distinct_labels(reports: Sequence[Report], names: Sequence[str]) -> list[str]:
    """What to call each report on a page of several: its model, with its name where models repeat."""
    models = [short_name(str(report["model"])) for report in reports]
    labels = [
        model if models.count(model) == 1 else f"{model} ({name})"
        for model, name in zip(models, names, strict=True)
    ]
    return [
        label if labels.count(label) == 1 else f"{label} #{place}" for place, label in enumerate(labels, 1)
    ]


def short_name(model: str) -> str:
    """A model's name: a hub id as it is, of a local path its last part."""
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model
    return re.split(r"[/\\]", model.rstrip("/\\"))[-1] or model if is_path else model


def shortened(text: str, longest: int) -> str:
    """A name cut in its middle where it is too long for its place."""
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    return f"{text[: longest - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{text[-tail:]}"


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")
