"""The bottom band at other positions, on prose and code, in base and instruct models (paper, 3.3)."""

from __future__ import annotations

import numpy as np

from csprune.analysis.bands import band_pairs
from csprune.analysis.comparison import COLUMNS, FORMULAS, forest, per_distance
from csprune.analysis.estimates import Sample, claim
from csprune.analysis.results import (
    Cell,
    Column,
    Picture,
    Result,
    Row,
    Statement,
    Table,
    estimate_of,
    explained,
)
from csprune.analysis.study import Progress, Study
from csprune.errors import InputError


def other_conditions(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band at other positions, on code, and in another model of the pair.

    The comparison at equal length and the consequence spectrum are repeated with the state at the 8th, 32nd
    and 128th token of prose and of code, each condition with its own calibration mean; with an
    instruction-tuned model beside its base model, under the same conditions (Section 3.3, Figure 2c). A
    condition's row is judged by itself: C_b of the bottom band above one, D below random's, K and the loss
    change above it; and the band at which C_b is largest is named.
    """
    if study.conditions is None:
        raise InputError("no other conditions are given: give the study conditions=")
    rows: list[Row] = []
    statements: list[Statement] = []
    values = {}
    for name, other in study.conditions(progress):
        other.calibration.check_varied()
        other.evaluation.check_varied()
        pairs = band_pairs(other, progress)
        samples = [pair.sample(other.resampling) for pair in pairs]
        spectrum = [sample.value(per_distance("fisher_term")) for sample in samples]
        bottom = samples[-1]
        cells: dict[str, Cell] = {column.key: bottom.judge(*FORMULAS[column.key]) for column in COLUMNS}
        known = [each for each in spectrum if each is not None]
        cells["peak"] = spectrum.index(max(known)) + 1 if known else None
        cells["loss"] = Sample(
            {"loss": other.evaluation.outlook.loss.cpu().numpy()}, other.resampling
        ).estimate(lambda m: m["loss"])
        cells["documents"] = len(other.evaluation)
        rows.append(Row(name, cells))
        statements.append(
            claim(
                f"{name}: the bottom band's F per unit of logit distance is above random's",
                (estimate_of(rows[-1], "fisher_per_distance"), "above"),
            )
        )
        values |= _values(name, other)
    columns = (
        Column("fisher_per_distance", "C_b of the bottom band", "ratio"),
        Column("peak", "largest C_b at band", "count"),
        *(column for column in COLUMNS if column.key != "fisher_per_distance"),
        Column("loss", "base loss", "nats"),
        Column("documents", "documents", "count"),
    )
    table = Table(
        "conditions",
        "The bottom band under each condition",
        columns,
        rows,
        "At equal length, each condition about its own calibration mean. A family of one each.",
        "condition",
    )
    peaks = sum(row.cells["peak"] == study.bands for row in rows)
    held = sum(each.established for each in statements)
    return Result(
        "conditions",
        "Other positions and texts",
        "Section 3.3, Figure 2c, Appendix F",
        explained(other_conditions),
        [
            "The bottom band's prediction change per unit of logit distance is established above random's "
            f"under {held} "
            f"of {len(rows)} conditions, and the consequence spectrum is largest at the bottom band under "
            f"{peaks}.",
        ],
        statements,
        [table],
        [
            Picture(
                "conditions",
                "The bottom band's C_b and K under each condition",
                "At equal length, relative to random changes, with 95% intervals.",
                forest(table, ("fisher_per_distance", "prediction_change")),
                "Figure 2c",
            )
        ],
        values,
    )


def _values(name: str, study: Study) -> dict:
    """The bottom band's values by document, with the condition's own documents."""
    found = band_pairs(study)[-1].values("condition")
    return {
        **{key.replace("condition.", f"condition.{name}.", 1): each for key, each in found.items()},
        f"condition.{name}.documents": np.array(study.evaluation.document_ids),
        f"condition.{name}.blocks": study.evaluation.blocks.numpy(),
    }
