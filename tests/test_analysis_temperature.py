"""Softmax temperatures and the Brier divergence: the oracle's figures, and the high-temperature limit."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import analysis_oracle as ao
import numpy as np
import pytest
import study_cases

from csprune.analysis.bands import bottom_observed, bottom_pair
from csprune.analysis.results import Result, read_result
from csprune.analysis.temperature import TEMPERATURES, brier_divergence, temperatures

KINDS = ("llama", "gpt_neox", "cohere", "granite", "gemma2")


@cache
def case(kind: str) -> study_cases.StudyCase:
    return study_cases.study_case(kind)


@cache
def found(kind: str) -> Result:
    return temperatures(case(kind).study)


@cache
def changes(kind: str) -> tuple[ao.Logits, list[ao.Logits]]:
    """The oracle's bottom band change, and random ones of its length."""
    c = case(kind)
    directions, mean = ao.folded_bands(c.folded), c.calibration_u.mean(axis=0)
    start, stop = ao.bands(directions.shape[1], c.study.bands)[-1]
    du = ao.change(c.evaluation_u, ao.projector(directions[:, start:stop]), mean)
    bases = [each[:, : stop - start] for each in c.random_bases]
    random = ao.to_equal_length(ao.random_changes(c.evaluation_u, bases, mean), du)
    own, *others = (ao.fixed_scale(c.folded, c.evaluation_u, each) for each in (du, *random))
    return own, others


def column(result: Result, key: str) -> list[Any]:
    """Values of a column that estimates have; a plain number of the limit's row as it is."""
    found_ = [row.cells[key] for row in result.tables[0].rows]
    return [each["value"] if isinstance(each, dict) else each for each in found_]


def ratios(result: Result) -> list[float]:
    return column(result, "ratio")


@pytest.mark.parametrize("kind", KINDS)
def test_k_at_each_temperature_is_the_oracles(kind: str) -> None:
    own, random = changes(kind)
    result = found(kind)
    for temperature, shown in zip(TEMPERATURES, ratios(result), strict=False):
        expected, others = (
            ao.divergence_at(own, temperature),
            np.stack([ao.divergence_at(each, temperature) for each in random]),
        )
        name = f"temperatures.bottom.{temperature:g}"
        np.testing.assert_allclose(result.values[name], expected, rtol=0, atol=1e-9)
        assert shown == pytest.approx(ao.pooled_ratio(expected, others), rel=1e-6)
    k = bottom_pair(case(kind).study, "bottom band").own["prediction_change"]
    np.testing.assert_allclose(result.values["temperatures.bottom.1"], k, rtol=0, atol=1e-9)
    # Control: temperatures do differ.
    assert max(ratios(result)) / min(ratios(result)) > 1.01


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_is_the_ratio_of_the_logit_distances_and_is_met(kind: str) -> None:
    c = case(kind)
    pair = bottom_pair(c.study, "bottom band")
    limit = ao.pooled_ratio(pair.own["logit_distance"], pair.reference["logit_distance"])
    assert ratios(found(kind))[-1] == pytest.approx(limit, rel=1e-6)
    hot = 1e4

    def far(scene, change):
        return {"k": hot**2 * scene.divergence(change, hot)}

    own, random = bottom_observed(c.study, far, None)
    vocabulary = c.study.unembedding.vocabulary
    expected = pair.own["logit_distance"] / (2 * vocabulary)
    # To first order in 1/T what is left is the third cumulant; rounding is 1e-16 T^2 = 1e-8.
    np.testing.assert_allclose(own["k"], expected, rtol=1e-3)
    assert ao.pooled_ratio(own["k"], random["k"]) == pytest.approx(limit, rel=1e-3)
    # Control: at T = 1 it is not met.
    assert np.abs(pair.own["prediction_change"] / expected - 1).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_how_far_each_temperature_is_from_the_limit(kind: str) -> None:
    result, vocabulary = found(kind), case(kind).study.unembedding.vocabulary
    own, random = changes(kind)
    for place, temperature in enumerate(TEMPERATURES):
        for key, logits in (("own", [own]), ("random", random)):
            k = np.mean([ao.divergence_at(each, temperature) for each in logits])
            centred = [(each.after - each.before) for each in logits]
            d = np.mean([((x - x.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) for x in centred])
            expected = temperature**2 * k / (d / (2 * vocabulary))
            assert column(result, key)[place] == pytest.approx(expected, rel=1e-6)
    apart = [abs(each - 1) for each in column(result, "random")]
    assert apart[4] < apart[0]
    assert apart[5] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_brier_divergence_is_the_oracles(kind: str) -> None:
    c = case(kind)
    own, random = changes(kind)
    targets = np.zeros(len(c.evaluation_u), dtype=int)
    expected = ao.effects(own, targets)["brier"]
    others = np.stack([ao.effects(each, targets)["brier"] for each in random])
    result = brier_divergence(c.study)
    np.testing.assert_allclose(result.values["brier.bottom.brier"], expected, rtol=0, atol=1e-9)
    assert column(result, "ratio")[0] == pytest.approx(ao.pooled_ratio(expected, others), rel=1e-6)
    assert column(result, "own")[0] == pytest.approx(expected.mean(), abs=1e-9)
    ratio = result.tables[0].rows[0].cells["ratio"]
    assert isinstance(ratio, dict)
    assert ratio["ci95"][0] < ratio["value"] < ratio["ci95"][1]


def test_the_results_are_plain_data() -> None:
    for result in (found("gpt_neox"), brier_divergence(case("gpt_neox").study)):
        text = json.dumps(result.describe(), allow_nan=False)
        assert read_result(json.loads(text)).describe() == json.loads(text)
        for each in result.values.values():
            assert each.shape in ((30,), (study_cases.SUBSPACES, 30))
    (picture,) = found("gpt_neox").pictures
    (panel,) = picture.panels
    assert picture.place == "Figure 3d"
    assert list(panel.x) == list(TEMPERATURES)
    assert panel.curves[1].y == [ratios(found("gpt_neox"))[-1]] * len(TEMPERATURES)
