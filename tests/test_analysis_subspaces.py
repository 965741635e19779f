"""Other subspaces in the bottom band's place: of other bases, of what is projected out, of the variance."""

from __future__ import annotations

from dataclasses import replace

import analysis_oracle as oracle_of
import numpy as np
import oracle
import pytest
import tiny
import torch
from comparison_checks import (
    KINDS,
    bottom_change,
    bottom_columns,
    case_of,
    check_comparison,
    check_json,
    effects_of,
    first_of,
    projection,
    row,
    study_of,
    table,
    value,
)
from study_cases import BANDS, SUBSPACES, StudyCase

from csprune.analysis.extremes import complement, coordinate_span, extreme_coordinates, outside
from csprune.analysis.near_zero import near_zero, near_zero_count
from csprune.analysis.spaces import Space
from csprune.analysis.study import Study
from csprune.analysis.subspaces import bases, principal_directions, top_variance
from csprune.errors import InputError

BOTTOM = BANDS - 1


def equal(u: np.ndarray, columns: np.ndarray, random: list[np.ndarray], mean: np.ndarray):
    """The removal of a subspace, and those of random ones at its length, of any coordinates u."""
    du = oracle_of.change(u, oracle_of.projector(columns), mean)
    return du, oracle_of.to_equal_length(oracle_of.random_changes(u, random, mean), du)


@pytest.mark.parametrize("kind", KINDS)
def test_bases(kind: str) -> None:
    case = case_of(kind)
    result = bases(case.study)
    check_json(result)
    found = table(result, "bases")
    assert [each.label for each in found.rows] == ["folded and centred", "folded", "raw"]
    u, mean = case.evaluation_u, case.calibration_u.mean(axis=0)
    for label, centred in (("folded and centred", True), ("folded", False)):
        directions = oracle_of.folded_bands(case.folded, centred=centred)
        columns = directions[:, slice(*oracle_of.bands(directions.shape[0], BANDS)[BOTTOM])]
        random = [each[:, : columns.shape[1]] for each in case.random_bases]
        check_comparison(result, found, label, *effects_of(case, *equal(u, columns, random, mean)))
    p = case.parts
    raw = oracle_of.raw_readout(p.weight, p.bias, p.factor, p.cap)
    h, of_calibration = (
        oracle_of.raw_states(case.folded, each, p.gamma, p.beta) for each in (u, case.calibration_u)
    )
    directions = oracle_of.folded_bands(raw, centred=False)
    columns = directions[:, slice(*oracle_of.bands(directions.shape[0], BANDS)[BOTTOM])]
    drawn = Space("raw", case.study.unembedding).random(columns.shape[1], SUBSPACES, 0)
    changes = equal(h, columns, [each.vectors.numpy() for each in drawn], of_calibration.mean(axis=0))
    check_comparison(result, found, "raw", *effects_of(case, *changes, raw, h))


def test_bases_differ_where_there_is_something_to_fold() -> None:
    cells = table(bases(case_of("phi").study), "bases").rows
    changes = [value(each.cells["prediction_change"]) for each in cells]
    assert len({round(each, 4) for each in changes}) == 3
    # Under a cap nothing is centred, so that the first two are one.
    first, second, _ = table(bases(case_of("gemma2").study), "bases").rows
    for key in first.cells:
        assert value(first.cells[key]) == pytest.approx(value(second.cells[key]))


# --- Extreme coordinates --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_coordinates(kind: str) -> None:
    case = case_of(kind)
    study = case.study
    result = extreme_coordinates(study)
    check_json(result)
    comparison, listed = table(result, "extreme-coordinates"), table(result, "coordinates")
    u, mean = case.evaluation_u, case.calibration_u.mean(axis=0)
    count = study.space.width // 4
    z = case.calibration_u @ case.folded.basis.T
    assert len(result.statements) == 2
    du, random = bottom_change(case)
    check_comparison(
        result,
        comparison,
        "whole band",
        *effects_of(case, du, oracle_of.to_equal_length(random, du)),
    )
    for by, words, size in (
        ("mean_square", "mean squares", (z**2).mean(axis=0)),
        ("variance", "variances", z.var(axis=0)),
    ):
        expected = oracle_of.extreme_coordinates(case.folded, case.calibration_u, count, by)
        chosen = result.figures["coordinates"][by]
        assert sorted(chosen) == expected
        assert list(size[chosen]) == sorted(size[chosen], reverse=True)
        assert [each.cells[by] for each in listed.rows[:-1]] == [str(each) for each in chosen]
        together = listed.rows[-1].cells[f"{by}_share"]
        assert together == pytest.approx(size[expected].sum() / size.sum())
        assert sum(value(each.cells[f"{by}_share"]) for each in listed.rows[:-1]) == pytest.approx(together)
        span = oracle_of.coordinate_span(case.folded, expected)
        columns = oracle_of.outside(bottom_columns(case), span)
        of_package = coordinate_span(study.unembedding, torch.tensor(chosen))
        drawn = study.space.random(columns.shape[1], SUBSPACES, 0, complement(of_package))
        random = [case.vectors(each.vectors) for each in drawn]
        for each in random:  # in the oracle's complement of E
            assert np.abs(span.T @ each).max() < 1e-10
        label = f"without the {count} largest {words}"
        check_comparison(result, comparison, label, *effects_of(case, *equal(u, columns, random, mean)))


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_what_is_projected_out_does_not_move(kind: str) -> None:
    study = case_of(kind).study
    unembedding, chosen = study.unembedding, torch.tensor([1, 5, 20])
    span = coordinate_span(unembedding, chosen)
    left = outside(study.band(-1).vectors, span)
    drawn = study.space.random(left.shape[1], 2, 0, complement(span))
    for subspace in (study.space.subspace(left), *drawn):
        assert torch.allclose(
            subspace.vectors.mT @ subspace.vectors, torch.eye(subspace.size, dtype=torch.float64)
        )
        moved = unembedding.lift(subspace.removal(study.deviation).vectors())
        assert float(moved[:, chosen].abs().max()) < 1e-12
    # Control: the band itself moves them.
    own = unembedding.lift(study.removal(-1).vectors())
    assert float(own[:, chosen].abs().max()) > 1e-3
    # What is left of the band and what was taken out span the band and E together.
    both = torch.linalg.matrix_rank(torch.cat([study.band(-1).vectors, span], 1))
    assert int(both) == left.shape[1] + 3
    projections = projection(span) + projection(complement(span))
    assert projections == pytest.approx(np.eye(study.space.width), abs=1e-12)
    # Coordinates of z are not coordinates of u where a LayerNorm mixes them.
    of_u = torch.eye(study.space.width, dtype=torch.float64)[:, chosen]
    assert np.allclose(projection(span), projection(of_u), atol=1e-6) == (kind == "llama")


def test_directions_inside_are_dropped() -> None:
    eye = torch.eye(6, dtype=torch.float64)
    mixed = torch.stack([eye[:, 0], (eye[:, 1] + eye[:, 3]) / 2**0.5], 1)
    left = outside(mixed, eye[:, :2])
    assert projection(left) == pytest.approx(np.diag([0.0, 0, 0, 1, 0, 0]))
    assert outside(eye[:, :2], eye[:, :2]).shape == (6, 0)
    assert outside(eye[:, 4:], eye[:, :2]).shape == (6, 2)


def test_a_band_inside_its_extreme_coordinates_leaves_nothing() -> None:
    # Nearly all gain is taken from eight coordinates: they are the bottom band; they are also the largest.
    model = tiny.make("llama").double()
    with torch.no_grad():
        tiny.parts(model).norm.weight[:8] *= 1e-9
    study = study_of(model, case_of("llama"))
    factors = torch.ones(study.space.width, dtype=torch.float64)
    factors[:8] = 100
    large = Study(
        study.readout,
        replace(study.calibration, u=study.calibration.u * factors),
        study.evaluation,
        BANDS,
        SUBSPACES,
        draws=50,
    )
    result = extreme_coordinates(large)
    assert sorted(result.figures["coordinates"]["variance"]) == list(range(8))
    assert [each.label for each in table(result, "extreme-coordinates").rows] == ["whole band"]
    assert "The band lies in its coordinates of the 8 largest variances." in result.findings
    assert not result.statements


def test_one_calibration_document_has_no_variances() -> None:
    study = case_of("llama").study
    alone = Study(study.readout, first_of(study.calibration, 1), study.evaluation, BANDS, SUBSPACES, draws=50)
    result = extreme_coordinates(alone)
    check_json(result)
    assert set(result.figures["coordinates"]) == {"mean_square"}
    assert "The calibration states' coordinates have no variances." in result.findings


# --- Near-zero directions -------------------------------------------------------------------------


def nulled(kind: str) -> tuple[StudyCase, Study]:
    """A model whose norm hardly passes three coordinates, on the states of a case."""
    case, model = case_of(kind), tiny.make(kind).double()
    with torch.no_grad():
        tiny.parts(model).norm.weight[[2, 11, 29]] = 1e-4
    p = tiny.parts(model)
    study = study_of(model, case)
    folded = oracle.fold(p.weight, p.bias, p.gamma, p.beta, p.kind, factor=p.factor, cap=p.cap)
    return replace(case, model=model, study=study, folded=folded, parts=p), study


# A LayerNorm's states have no mean, so that three coordinates are two directions.
@pytest.mark.parametrize(("kind", "count"), [("llama", 3), ("phi", 2), ("granite", 3), ("cohere", 2)])
def test_near_zero_directions(kind: str, count: int) -> None:
    case, study = nulled(kind)
    result = near_zero(study)
    check_json(result)
    sigma, directions = oracle_of.right_singular(case.folded.weight)
    start, stop = oracle_of.bands(len(sigma), BANDS)[BOTTOM]
    near = oracle_of.near_zero(sigma, start, stop)
    assert near == list(range(stop - count, stop))
    assert result.figures["near_zero"] == count
    cells = table(result, "directions").rows[0].cells
    assert (cells["count"], cells["directions"]) == (count, stop - start)
    assert cells["median"] == pytest.approx(np.median(sigma[start:stop]))
    u, mean = case.evaluation_u, case.calibration_u.mean(axis=0)
    shares = oracle_of.carried(u, mean, directions[:, near], directions[:, start:stop])
    assert (value(cells["mean_share"]), value(cells["sum_share"])) == pytest.approx(shares, rel=1e-6)
    columns = directions[:, start : stop - count]
    drawn = study.space.random(columns.shape[1], SUBSPACES, 0, study.space.directions[:, :-count])
    random = [case.vectors(each.vectors) for each in drawn]
    for each in random:  # outside the near-zero directions
        assert np.abs(directions[:, near].T @ each).max() < 1e-6
    check_comparison(
        result,
        table(result, "near-zero"),
        f"without {count} near-zero directions",
        *effects_of(case, *equal(u, columns, random, mean)),
    )
    du, random_changes = bottom_change(case)
    check_comparison(
        result,
        table(result, "near-zero"),
        "whole band",
        *effects_of(case, du, oracle_of.to_equal_length(random_changes, du)),
    )
    assert f"{count} of the bottom band's {stop - start} directions have" in result.findings[0]


def test_no_near_zero_directions() -> None:
    result = near_zero(case_of("llama").study)
    check_json(result)
    assert result.figures["near_zero"] == 0
    assert [each.label for each in table(result, "near-zero").rows] == ["whole band"]
    assert "mean_share" not in table(result, "directions").rows[0].cells
    assert result.findings == ["None of the bottom band's 8 directions has a singular value near zero."]
    assert not result.statements


def test_near_zero_is_beside_the_median() -> None:
    sigma = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.041, 0.039], dtype=torch.float64)  # median 0.75
    assert near_zero_count(sigma, 1.0) == 0
    assert near_zero_count(torch.cat([sigma, sigma[-1:] / 2]), 1.0) == 1  # median 0.7
    assert near_zero_count(1e-3 * torch.cat([sigma, sigma[-1:] / 2]), 1.0) == 1
    # Most of the band is a null space: its values are rounding, and none stands apart.
    assert near_zero_count(1e-9 * sigma, 1.0) is None


def test_a_null_band_is_said_to_be_one() -> None:
    model = tiny.make("llama").double()
    with torch.no_grad():
        tiny.parts(model).norm.weight[:8] = 0.0
    result = near_zero(study_of(model, case_of("llama")))
    check_json(result)
    assert result.figures["near_zero"] is None
    assert result.findings[0].startswith("The bottom band's median singular value is itself zero")


# --- The largest variance -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_top_variance(kind: str) -> None:
    case = case_of(kind)
    result = top_variance(case.study)
    check_json(result)
    u, mean = case.evaluation_u, case.calibration_u.mean(axis=0)
    band = bottom_columns(case)
    columns = {
        "bottom band": band,
        "largest variance": oracle_of.top_variance(case.calibration_u, mean, band.shape[1]),
    }
    random = [each[:, : band.shape[1]] for each in case.random_bases]
    found, shares = table(result, "top-variance"), table(result, "variance")
    per_unit = []
    for label, each in columns.items():
        own, reference = effects_of(case, *equal(u, each, random, mean))
        check_comparison(result, found, label, own, reference)
        per_unit.append(value(row(found, label).cells["fisher_per_distance"]))
        cells = row(shares, label).cells
        for key, states in (("calibration", case.calibration_u), ("evaluation", u)):
            carried = (((states - mean) @ each) ** 2).sum() / ((states - mean) ** 2).sum()
            assert value(cells[key]) == pytest.approx(carried)
    (statement,) = result.statements
    assert value(statement.estimates[0]) == pytest.approx(per_unit[0] / per_unit[1])
    # No other subspace of that size carries as much of the calibration states' variance.
    of_band, of_variance = (each.cells["calibration"] for each in shares.rows)
    assert isinstance(of_band, float) and isinstance(of_variance, float)
    assert of_band < of_variance < 1


def test_fewer_calibration_documents_than_directions() -> None:
    case = case_of("phi")
    study = case.study
    few = Study(study.readout, first_of(study.calibration, 4), study.evaluation, BANDS, SUBSPACES, draws=50)
    result = top_variance(few)
    check_json(result)
    assert result.figures["directions"] == 3
    cells = row(table(result, "variance"), "largest variance").cells
    assert cells["calibration"] == pytest.approx(1)
    assert "vary in 3 directions only, fewer than the band's 8" in result.findings[-1]
    mean = case.calibration_u[:4].mean(axis=0)
    columns = oracle_of.top_variance(case.calibration_u[:4], mean, 3)
    random = [each[:, :3] for each in case.random_bases]
    effects = effects_of(case, *equal(case.evaluation_u, columns, random, mean))
    check_comparison(result, table(result, "top-variance"), "largest variance", *effects)
    with pytest.raises(InputError, match="1 calibration documents do not differ"):
        top_variance(Study(study.readout, first_of(study.calibration, 1), study.evaluation, BANDS))


def test_principal_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    wide = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    found = principal_directions(low @ wide)
    assert found.shape == (7, 3)
    assert found.mT @ found == pytest.approx(torch.eye(3, dtype=torch.float64), abs=1e-12)
    assert low @ wide @ found @ found.mT == pytest.approx(low @ wide, abs=1e-12)
    variances = (low @ wide @ found).square().sum(0)
    assert list(variances) == sorted(variances, reverse=True)
