"""The bottom band beside random changes scaled in three ways."""

from __future__ import annotations

import analysis_oracle as oracle_of
import pytest
from comparison_checks import (
    KINDS,
    bottom_change,
    bottom_columns,
    case_of,
    check_comparison,
    check_json,
    claimed,
    effects_of,
    first_of,
    row,
    table,
    value,
)
from study_cases import StudyCase

from csprune.analysis.scalings import EQUAL, MATCHED, UNRESCALED, matched_coefficient, reference_scalings
from csprune.analysis.study import Study
from csprune.errors import InputError


def coefficient(case: StudyCase) -> float:
    band = bottom_columns(case)
    bases = [each[:, : band.shape[1]] for each in case.random_bases]
    mean = case.calibration_u.mean(axis=0)
    return oracle_of.calibration_coefficient(case.calibration_u, oracle_of.projector(band), bases, mean)


@pytest.mark.parametrize("kind", KINDS)
def test_three_scalings_are_the_oracles(kind: str) -> None:
    case = case_of(kind)
    result = reference_scalings(case.study)
    check_json(result)
    du, random = bottom_change(case)
    scaled = {
        EQUAL: oracle_of.to_equal_length(random, du),
        MATCHED: coefficient(case) * random,
        UNRESCALED: random,
    }
    comparison, lengths = table(result, "scalings"), table(result, "lengths")
    assert [each.label for each in comparison.rows] == list(scaled)
    squared = oracle_of.squared_lengths(du)
    for label, changes in scaled.items():
        own, reference = effects_of(case, du, changes)
        check_comparison(result, comparison, label, own, reference)
        cells, of_random = row(lengths, label).cells, oracle_of.squared_lengths(changes)
        assert value(cells["squared_length"]) == pytest.approx(oracle_of.pooled_ratio(squared, of_random))
        for name in ("logit_distance", "fisher_term", "prediction_change"):
            expected = oracle_of.consequence(own[name], squared, reference[name], of_random)
            assert value(cells[name]) == pytest.approx(expected)


def test_what_the_scalings_leave_alone() -> None:
    # Without a cap D is a quadratic form: per unit of squared length it does not see a common coefficient.
    case = case_of("phi")
    lengths = table(reference_scalings(case.study), "lengths")
    matched, unrescaled, equal = (row(lengths, each).cells for each in (MATCHED, UNRESCALED, EQUAL))
    assert value(equal["squared_length"]) == pytest.approx(1, abs=1e-12)
    assert value(matched["logit_distance"]) == pytest.approx(value(unrescaled["logit_distance"]), rel=1e-12)
    # Controls: K is not quadratic, and document by document other documents weigh more.
    assert value(matched["prediction_change"]) != pytest.approx(
        value(unrescaled["prediction_change"]), rel=1e-4
    )
    assert value(equal["logit_distance"]) != pytest.approx(value(unrescaled["logit_distance"]), rel=1e-4)


def test_the_coefficient_is_the_calibration_documents() -> None:
    case = case_of("llama")
    study = case.study
    found = matched_coefficient(study)
    assert found == pytest.approx(coefficient(case), rel=1e-10)
    deviation = study.calibration.u - study.mean
    size = study.band(-1).size
    drawn = [each.removal(deviation).scaled(found) for each in study.references(size)]
    squared = sum(float(each.squared_length.mean()) for each in drawn) / len(drawn)
    assert squared == pytest.approx(float(study.band(-1).removal(deviation).squared_length.mean()), rel=1e-10)
    # Control: the evaluation documents would give another one.
    other = Study(study.readout, study.evaluation, study.evaluation, study.bands, study.subspaces)
    assert matched_coefficient(other) != pytest.approx(found, rel=1e-3)


def test_one_calibration_document_has_no_coefficient() -> None:
    study = case_of("llama").study
    alone = Study(study.readout, first_of(study.calibration, 1), study.evaluation, study.bands)
    with pytest.raises(InputError, match="1 calibration documents do not differ"):
        reference_scalings(alone)


def test_statements_are_the_full_result_of_each_row() -> None:
    result = reference_scalings(case_of("gemma2").study)
    for statement, of_row in zip(result.statements, table(result, "scalings").rows, strict=True):
        assert of_row.label in statement.text
        parts = [of_row.cells[key] for key in ("logit_distance", "prediction_change", "loss_excess")]
        assert claimed(statement) == list(zip(parts, ("below", "above", "above"), strict=True))
        sides = [part["side"] for part in parts]  # type: ignore[index]
        held = all(part["established"] for part in parts)  # type: ignore[index]
        assert statement.established == (held and sides == ["below", "above", "above"])
