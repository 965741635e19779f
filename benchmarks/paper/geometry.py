"""Why models differ from each other: how their states lie to their unembeddings, as a section of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import why
from reports import NotApplicable, Reports
from why import LEADING

from csprune.analysis.results import Column, Result, Row, Table, Unit
from csprune.pages.results_text import shown


def geometry_result(reports: Sequence[Reports]) -> Result:
    """How the states lie to the unembedding, a column for each model."""
    return Result(
        "geometry",
        "How the states lie to the unembedding",
        "",
        " ".join((why.__doc__ or "").split()),
        [_shortly(reports), *(_finding(each) for each in reports)],
        tables=[
            Table(
                "geometry",
                "States, random subspaces and the bottom band",
                [Column(_key(i), each.name, "text") for i, each in enumerate(reports)],
                [
                    Row(label, {_key(i): write(each) for i, each in enumerate(reports)})
                    for label, write in _rows()
                ],
                "Principal directions are those of the calibration states' second moment about their mean. "
                "Random removals: of as many directions as the bottom band has, not rescaled, in expectation "
                "over all subspaces. Amplification: squared logits per unit of squared length, to the mean "
                "over all directions. Measured: on the evaluation documents, by csprune analyze.",
                "figure",
            )
        ],
    )


Value = Callable[[Reports], float]


def _rows() -> list[tuple[str, Callable[[Reports], str]]]:
    """Labels, and what stands in them."""
    leading = ", ".join(map(str, LEADING))
    rows = [
        (f"{label}: the first {leading}", _written("share", *(_of_why(key, str(n)) for n in LEADING)))
        for key, label in (
            ("second_moment", "Share of the states' variance in principal directions"),
            ("taken_from", "Share of random removals' D taken from the state along them"),
            ("moved_along", "Share of random removals' D that is a change along them"),
        )
    ]
    rows += [
        (f"Amplification of the {name}", _written("ratio", _of_why("amplification", name)))
        for name in (_FIRST, "bottom band")
    ]
    rows += [
        (f"Bottom band, to random removals: {label}", _written("ratio", _of_why("bottom_band", key)))
        for key, label in (
            ("squared_length", "squared length"),
            ("distance_per_length", "D per unit of squared length"),
            ("logit_distance", "D"),
        )
    ]
    gains = (_of_why("gain", name) for name in _GAINS)
    rows.append((f"Final norm's gain: {', '.join(_GAINS)}", _written("number", *gains)))
    rows += [
        (
            "Measured: squared length of the bottom band's change, to random's",
            _measured("ratio", "scalings", "lengths", "not rescaled", "squared_length"),
        ),
        (
            "Measured: D of the bottom band's change, to random's",
            _measured("ratio", "scalings", "scalings", "not rescaled", "logit_distance"),
        ),
        (
            "Measured: share of the states' variance in as many leading directions as a band has",
            _measured("share", "top-variance", "variance", "largest variance", "evaluation"),
        ),
    ]
    return rows


def _written(unit: Unit, *values: Value) -> Callable[[Reports], str]:
    return lambda reports: ", ".join(str(shown(value(reports), unit)) for value in values)


def _measured(unit: Unit, analysis: str, table: str, row: str, column: str) -> Callable[[Reports], str]:
    def write(reports: Reports) -> str:
        try:
            return str(shown(reports.cell(analysis, table, row, column).estimate, unit))
        except NotApplicable:
            return str(shown(None, unit))

    return write


_FIRST = "first principal direction"
_GAINS = ("smallest", "median", "largest")


def _of_why(key: str, name: str) -> Value:
    return lambda each: each.why[key][name]


def _shortly(reports: Sequence[Reports]) -> str:
    """The main figures of all models."""

    def of_all(value: Value, form: str) -> str:
        return ", ".join(f"{format(value(each), form)} ({each.name})" for each in reports)

    return (
        "The first principal direction holds this share of the states' variance: "
        f"{of_all(_of_why('second_moment', '1'), '.0%')}. The bottom band's removal has so many times the "
        f"logit distance D of a random one: {of_all(_of_why('bottom_band', 'logit_distance'), '.3g')}."
    )


def _finding(reports: Reports) -> str:
    found = reports.why
    band, amplified = found["bottom_band"], found["amplification"][_FIRST]
    return (
        f"{reports.name}: the first principal direction holds {found['second_moment']['1']:.0%} of the "
        f"states' variance and is amplified {amplified:.3g} times the mean direction; of the logit distance "
        f"of random removals {found['taken_from']['1']:.0%} is taken from the state along it, "
        f"{found['moved_along']['1']:.0%} is a change along it. The bottom band's removal has "
        f"{band['squared_length']:.3g} times the squared length of a random one, and "
        f"{band['logit_distance']:.3g} times its logit distance."
    )


def _key(model: int) -> str:
    return f"model_{model + 1}"
