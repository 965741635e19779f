"""The regression of the loss excess: least squares of every draw, thirds by entropy, and refusals."""

from __future__ import annotations

import json
from functools import cache

import analysis_oracle as ao
import numpy as np
import oracle
import pytest
import study_cases

from csprune.analysis.bands import bottom_pair
from csprune.analysis.relations import REGRESSORS, Regression, regression
from csprune.analysis.results import Result, read_result
from csprune.bootstrap import Resampling
from csprune.statements import Family

KINDS = ("llama", "gpt_neox", "cohere", "granite", "gemma2")


@cache
def case(kind: str) -> study_cases.StudyCase:
    return study_cases.study_case(kind)


@cache
def found(kind: str) -> Result:
    return regression(case(kind).study)


@cache
def expected(kind: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The oracle's loss excess and regressors."""
    c = case(kind)
    directions, mean = ao.folded_bands(c.folded), c.calibration_u.mean(axis=0)
    start, stop = ao.bands(directions.shape[1], c.study.bands)[-1]
    projection = ao.projector(directions[:, start:stop])
    du = ao.change(c.evaluation_u, projection, mean)
    bases = [each[:, : stop - start] for each in c.random_bases]
    random = ao.to_equal_length(ao.random_changes(c.evaluation_u, bases, mean), du)
    own = ao.effects(ao.fixed_scale(c.folded, c.evaluation_u, du), c.targets)
    others = ao.effects_of_all(c.folded, c.evaluation_u, random, c.targets)
    logits = oracle.after_cap(c.folded, oracle.before_cap(c.folded, c.evaluation_u))
    regressors = {
        "share": ao.candidates_shares(c.folded.weight, logits, projection),
        "entropy": ao.entropy(logits),
        "margin": ao.margin(logits),
    }
    return ao.excess(own["loss_change"], others["loss_change"]), regressors


def cells(result: Result, table: str) -> dict[str, dict]:
    chosen = next(each for each in result.tables if each.name == table)
    return {row.label: dict(row.cells) for row in chosen.rows}


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_and_r_squared_are_the_oracles(kind: str) -> None:
    excess, regressors = expected(kind)
    solved = ao.regression(excess, *regressors.values())
    result = found(kind)
    for (name, label), slope in zip(REGRESSORS.items(), solved[1:], strict=True):
        shown = cells(result, "slopes")[label]
        assert shown["slope"]["value"] == pytest.approx(slope, rel=1e-6, abs=1e-9)
        standardised = slope * regressors[name].std() / excess.std()
        assert shown["standardised"]["value"] == pytest.approx(standardised, rel=1e-6, abs=1e-9)
        assert shown["slope"]["null"] == 0.0
    fitted = solved[0] + sum(
        slope * each for slope, each in zip(solved[1:], regressors.values(), strict=True)
    )
    r2 = 1 - ((excess - fitted) ** 2).sum() / ((excess - excess.mean()) ** 2).sum()
    assert result.figures["r_squared"] == pytest.approx(r2, abs=1e-7)
    assert 0 < r2 < 1


@pytest.mark.parametrize("kind", KINDS)
def test_thirds_by_entropy_are_the_oracles(kind: str) -> None:
    excess, regressors = expected(kind)
    table = cells(found(kind), "thirds")
    for key, values in (("excess", excess), ("entropy", regressors["entropy"])):
        shown = [each[key]["value"] for each in table.values()]
        np.testing.assert_allclose(shown, ao.in_groups(regressors["entropy"], values, 3), atol=1e-8)
    assert [each["documents"] for each in table.values()] == [10, 10, 10]
    assert list(table) == ["lowest third", "middle third", "highest third"]


def drawn(documents: int = 60, seed: int = 0) -> tuple[dict[str, np.ndarray], np.random.Generator]:
    generator = np.random.default_rng(seed)
    x = {"share": generator.random(documents), "entropy": 3 + 0.01 * generator.normal(size=documents)}
    x["margin"] = 100 * generator.random(documents) + 20 * x["share"]
    return x, generator


def test_every_draw_is_a_least_squares_solution_of_its_own() -> None:
    x, generator = drawn()
    outcome = 2 * x["share"] - x["entropy"] + generator.normal(size=(4, 60))
    resampling = Resampling(np.repeat([1, 2], 30), 50, 3)
    fit = Regression(x, outcome, resampling)
    slopes = fit.judged(Family(3, "slopes"))
    mean = outcome.mean(axis=0)
    solutions = []
    for counts in np.concatenate(list(resampling.counts())):
        rows = np.repeat(np.arange(60), counts.astype(int))
        solutions.append(ao.regression(mean[rows], *(each[rows] for each in x.values()))[1:])
    ends = np.quantile(np.array(solutions), [0.025, 0.975], axis=0)
    for i, name in enumerate(x):
        np.testing.assert_allclose(slopes[name]["ci95"], ends[:, i], rtol=1e-6, atol=1e-8)


def test_a_true_slope_is_established_and_an_absent_one_is_not() -> None:
    x, generator = drawn(200)
    outcome = 5 * x["share"] - 0.05 * x["margin"] + 0.1 * generator.normal(size=(4, 200))
    slopes = Regression(x, outcome, Resampling(np.tile([1, 2], 100), 500, 0)).judged(Family(3, "slopes"))
    assert (slopes["share"]["established"], slopes["share"]["side"]) == (True, "above")
    assert (slopes["margin"]["established"], slopes["margin"]["side"]) == (True, "below")
    assert not slopes["entropy"]["established"]
    # Control: what half of the random subspaces contradict is not.
    outcome[2:] -= 6 * x["share"]
    slopes = Regression(x, outcome, Resampling(np.tile([1, 2], 100), 500, 0)).judged(Family(3, "slopes"))
    assert slopes["share"]["value"] > 0
    assert not slopes["share"]["checks"]["subspaces"]


@pytest.mark.parametrize("wrong", ["collinear", "constant", "few"])
def test_what_has_no_slopes_says_so(wrong: str) -> None:
    x, generator = drawn()
    documents = 60
    if wrong == "collinear":
        x["margin"] = 3 * x["share"] - x["entropy"]
    elif wrong == "constant":
        x["entropy"] = np.full(60, 0.1)
    else:
        documents = 14
        x = {name: each[:14] for name, each in x.items()}
    fit = Regression(x, generator.normal(size=(2, documents)), Resampling(np.zeros(documents, int), 20, 0))
    assert not fit.determined
    # Control: one document more is enough.
    if wrong == "few":
        x, generator = drawn(15)
        assert Regression(x, generator.normal(size=(2, 15)), Resampling(np.zeros(15, int), 20, 0)).determined


def test_a_slope_that_a_draw_leaves_open_has_no_interval() -> None:
    """A regressor that differs in one document: draws without it have no slope."""
    x, generator = drawn(20)
    x["share"] = (np.arange(20) == 3).astype(float)
    fit = Regression(x, generator.normal(size=(2, 20)), Resampling(np.zeros(20, int), 200, 0))
    slopes = fit.judged(Family(3, "slopes"))
    assert slopes["share"]["value"] is not None
    assert slopes["share"]["ci95"] is None
    assert not slopes["share"]["established"]


def test_an_analysis_of_few_documents_has_thirds_but_no_slopes() -> None:
    result = regression(study_cases.study_case("llama", evaluation=14).study)
    assert result.findings[0].startswith("There are no slopes: 14 documents")
    assert all(each["slope"]["value"] is None for each in cells(result, "slopes").values())
    assert result.statements == []
    assert [each["documents"] for each in cells(result, "thirds").values()] == [5, 4, 5]
    json.dumps(result.describe(), allow_nan=False)


def test_the_result_is_plain_data_that_it_can_be_redone_from() -> None:
    result = found("gpt_neox")
    text = json.dumps(result.describe(), allow_nan=False)
    assert read_result(json.loads(text)).describe() == json.loads(text)
    own = [result.values[f"regression.bottom.{name}"] for name in ("excess", *REGRESSORS)]
    slope = ao.regression(*own)[1]
    assert cells(result, "slopes")["contrast share"]["slope"]["value"] == pytest.approx(slope)
    pair = bottom_pair(case("gpt_neox").study, "bottom band")
    excess = pair.own["loss_change"] - pair.reference["loss_change"].mean(axis=0)
    np.testing.assert_array_equal(own[0], excess)
