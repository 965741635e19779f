"""The comparison at equal length: a change beside random changes (paper, Sections 2.3, 3.1 and E.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from csprune.analysis.drawn import column_of
from csprune.analysis.effects import Beside, Progress, Values, flattened, measure, paired
from csprune.analysis.estimates import Formula, Sample, claim
from csprune.analysis.results import Cell, Column, Panel, Row, Statement, Table, estimate_of
from csprune.analysis.study import States
from csprune.bootstrap import Resampling, difference, ratio
from csprune.statements import Family

COMPARED = ("logit_distance", "fisher_term", "prediction_change", "loss_change")
"""The quantities of a comparison."""

COLUMNS = (
    Column("logit_distance", "D, to random's", "ratio"),
    Column("fisher_term", "F, to random's", "ratio"),
    Column("prediction_change", "K, to random's", "ratio"),
    Column("loss_excess", "loss excess", "nats"),
    Column("fisher_per_distance", "F/D, to random's", "ratio"),
    Column("change_per_distance", "K/D, to random's", "ratio"),
)
NOTE = (
    "Ratios of sums over documents, to the mean over random subspaces. D: logit distance. F: Fisher term. K: "
    "prediction change. Loss excess: the loss change less random's, nats. With 95% intervals over documents."
)


def pooled(quantity: str) -> Formula:
    """A change's sum over documents to its references'."""
    return lambda m: ratio(m[f"own.{quantity}"], m[f"reference.{quantity}"])


def per_distance(quantity: str) -> Formula:
    """The same per unit of logit distance: `C_b` for F at equal length (paper, Section 2.3)."""
    return lambda m: ratio(
        ratio(m[f"own.{quantity}"], m["own.logit_distance"]),
        ratio(m[f"reference.{quantity}"], m["reference.logit_distance"]),
    )


def excess(quantity: str) -> Formula:
    """A change's mean over documents less its references'."""
    return lambda m: difference(m[f"own.{quantity}"], m[f"reference.{quantity}"])


FORMULAS: dict[str, tuple[Formula, float]] = {
    "logit_distance": (pooled("logit_distance"), 1.0),
    "fisher_term": (pooled("fisher_term"), 1.0),
    "prediction_change": (pooled("prediction_change"), 1.0),
    "loss_excess": (excess("loss_change"), 0.0),
    "fisher_per_distance": (per_distance("fisher_term"), 1.0),
    "change_per_distance": (per_distance("prediction_change"), 1.0),
}
"""By column: what is estimated, and its null value."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A change beside its references, measured on the same documents.

    Attributes:
        label: Of its row.
        own: By quantity float64 [documents].
        reference: By quantity float64 [subspaces, documents].
    """

    label: str
    own: Values
    reference: Values

    def sample(self, resampling: Resampling) -> Sample:
        """Both, as `own.QUANTITY` and `reference.QUANTITY`."""
        values = {f"own.{name}": self.own[name] for name in COMPARED if name in self.own}
        values |= {f"reference.{name}": self.reference[name] for name in COMPARED if name in self.reference}
        return Sample(values, resampling)

    def values(self, name: str) -> dict[str, np.ndarray]:
        """For a result's values."""
        return {f"{name}.{self.label}.{key}": each for key, each in self.own.items()} | {
            f"{name}.{self.label}.random.{key}": each for key, each in self.reference.items()
        }


def all_values(name: str, pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
    """The values of several pairs, for a result."""
    return {key: each for pair in pairs for key, each in pair.values(name).items()}


def at_equal_length(
    states: States,
    changes: Beside,
    progress: Progress | None = None,
) -> list[Pair]:
    """Measure changes beside random ones rescaled, document by document, to their length.

    Args:
        states: The documents.
        changes: By label: a change, and random ones of any length.
        progress: Called with (documents done, documents).
    """
    rescaled = {
        label: (own, [each.as_long_as(own) for each in random]) for label, (own, random) in changes.items()
    }
    return side_by_side(states, rescaled, progress)


def side_by_side(
    states: States,
    changes: Beside,
    progress: Progress | None = None,
) -> list[Pair]:
    """Measure changes beside references as they are; arguments as of `at_equal_length`."""
    seen = paired(measure(states, flattened(changes), progress), changes) if changes else {}
    return [Pair(label, own, random) for label, (own, random) in seen.items()]


def comparison_table(
    name: str,
    title: str,
    pairs: Sequence[Pair],
    resampling: Resampling,
    *,
    head: str = "",
    note: str = "",
    columns: Sequence[Column] = COLUMNS,
) -> Table:
    """One row for each pair, every estimate judged; each column is one family of comparisons."""
    family = Family(len(pairs), f"one quantity in the {len(pairs)} rows of {title!r}")
    rows = []
    for pair in pairs:
        sample = pair.sample(resampling)
        cells: dict[str, Cell] = {
            column.key: sample.judge(*FORMULAS[column.key], family) for column in columns
        }
        rows.append(Row(pair.label, cells))
    return Table(name, title, columns, rows, f"{note} {NOTE}".strip(), head)


def full_result(table: Table, label: Callable[[str], str] = str) -> list[Statement]:
    """For each row the paper's full result (E.1): D below random's, K above it, the loss excess above 0."""
    return [
        claim(
            f"{label(row.label)}: D is below random's, K and the loss change above it",
            (estimate_of(row, "logit_distance"), "below", "D"),
            (estimate_of(row, "prediction_change"), "above", "K"),
            (estimate_of(row, "loss_excess"), "above", "the loss change"),
        )
        for row in table.rows
    ]


def forest(table: Table, keys: Sequence[str] = ("logit_distance", "prediction_change")) -> list[Panel]:
    """The ratios of a comparison, a row each, as the paper's Figures 2a and 6 show them."""
    panels = []
    titles = {column.key: column.title for column in table.columns}
    for key in keys:
        linear = key == "loss_excess"
        panels.append(
            Panel(
                [column_of(table, key)],
                list(range(len(table.rows))),
                table.head,
                f"{titles[key]}{', nats' if linear else ''}",
                y_scale="linear" if linear else "log",
                line=0.0 if linear else 1.0,
                marks="points",
                x_labels=[row.label for row in table.rows],
            )
        )
    return panels
