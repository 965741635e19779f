"""Contrast shares: sums, closed forms, drawn pairs, and what goes with them."""

from __future__ import annotations

import json
from functools import cache

import analysis_oracle as ao
import numpy as np
import oracle
import pytest
import study_cases
import tiny
import torch

from csprune.analysis.bands import band_pairs
from csprune.analysis.contrast import contrast_share
from csprune.analysis.contrast_spectra import log_correlation
from csprune.analysis.contrasts import (
    candidate_shares,
    draw_distinct,
    frequency_sample,
    leading_shares,
    subspace_shares,
    uniform_sample,
    uniform_shares,
)
from csprune.analysis.groups import group_means, ordered_groups
from csprune.analysis.results import Result, read_result
from csprune.bootstrap import Resampling, Statistic
from csprune.errors import CspruneError

KINDS = ("llama", "gpt_neox", "cohere", "granite", "gemma2")  # RMSNorm, LayerNorm, both with scales, a cap


@cache
def case(kind: str) -> study_cases.StudyCase:
    return study_cases.study_case(kind)


@cache
def found(kind: str) -> Result:
    return contrast_share(case(kind).study)


def band_projections(c: study_cases.StudyCase) -> list[np.ndarray]:
    directions = ao.folded_bands(c.folded)
    spans = ao.bands(directions.shape[1], c.study.bands)
    return [ao.projector(directions[:, start:stop]) for start, stop in spans]


def logits(c: study_cases.StudyCase, u: np.ndarray) -> np.ndarray:
    return oracle.after_cap(c.folded, oracle.before_cap(c.folded, u))


def cells(result: Result, table: str, row: str) -> dict:
    chosen = next(each for each in result.tables if each.name == table)
    return dict(next(each for each in chosen.rows if each.label == row).cells)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shares_of_a_document_sum_to_one(kind: str) -> None:
    shares = leading_shares(case(kind).study)
    assert shares.shape == (30, study_cases.BANDS)
    assert shares.min() >= 0
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, rtol=0, atol=1e-12)
    np.testing.assert_allclose(uniform_shares(case(kind).study).sum(), 1.0, rtol=0, atol=1e-12)
    # Control: the shares are of several sizes, not all a band's share of the directions.
    assert shares.std() > 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", [2, 3])
def test_candidates_shares_are_the_oracles(kind: str, other: int) -> None:
    c = case(kind)
    shares = candidate_shares(c.study, c.study.evaluation, other - 1)
    for b, projection in enumerate(band_projections(c)):
        expected = ao.candidates_shares(c.folded.weight, logits(c, c.evaluation_u), projection, other)
        np.testing.assert_allclose(shares[:, b], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_uniform_pairs_ratio_of_sums_is_the_share_of_the_squared_singular_values(kind: str) -> None:
    c = case(kind)
    shares, drawn = uniform_shares(c.study), uniform_sample(c.study)
    for b, projection in enumerate(band_projections(c)):
        mean, ratio_of_sums = ao.uniform_pair(c.folded.weight, projection)
        assert shares[b] == pytest.approx(ratio_of_sums, abs=1e-9)
        assert abs(drawn.shares[b] - mean) < 5 * drawn.errors[b] < 0.02
        # Control: the two are told apart.
        assert kind != "llama" or abs(mean - ratio_of_sums) > 5 * drawn.errors[b]
    if kind != "gemma2":  # where the map that ranks is centred
        sigma = np.square(c.study.space.singular_values.numpy())
        for b, (start, stop) in enumerate(ao.bands(len(sigma), c.study.bands)):
            assert shares[b] == pytest.approx(sigma[start:stop].sum() / sigma.sum(), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_frequency_matched_pairs_share_is_the_expected_one(kind: str) -> None:
    c = case(kind)
    drawn = frequency_sample(c.study)
    probability = ao.mean_prediction(c.folded, c.calibration_u)
    projection = band_projections(c)[-1]
    expected = ao.frequency_pair(c.folded.weight, probability, projection)
    assert abs(drawn.shares[-1] - expected) < 5 * drawn.errors[-1] < 0.02
    # Control: a pair drawn uniformly has another share.
    assert kind != "llama" or abs(ao.uniform_pair(c.folded.weight, projection)[0] - expected) > 0.01


def test_two_distinct_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    probability = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    first, second = draw_distinct(probability, 200_000, np.random.default_rng(0))
    assert (first != second).all()
    counts = np.zeros((5, 5))
    np.add.at(counts, (np.maximum(first, second), np.minimum(first, second)), 1 / len(first))
    for i in range(5):
        for j in range(i):
            expected = ao.pair_probability(probability, i, j)
            assert counts[i, j] == pytest.approx(expected, abs=5 * (expected / len(first)) ** 0.5 + 1e-12)
    with pytest.raises(CspruneError, match="certain of one and the same token"):
        draw_distinct(np.array([0.0, 1.0, 0.0]), 10, np.random.default_rng(0))


@pytest.mark.parametrize("certain", [0, 2, 4])
def test_beside_a_nearly_certain_token_the_others_are_drawn_by_their_own_mass(certain: int) -> None:
    """Others of 1e-20 vanish beside 1 in float64: they have to be summed without it."""
    probability = np.array([1e-20, 3e-20, 0.0, 0.0, 2e-20])
    probability[certain] = 1.0
    first, second = draw_distinct(probability, 30_000, np.random.default_rng(0))
    assert (first == certain).all()
    others = probability.copy()
    others[certain] = 0
    expected = others / others.sum()
    np.testing.assert_allclose(np.bincount(second, minlength=5) / 30_000, expected, atol=0.01)
    assert not np.isin(second, np.flatnonzero(others == 0)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_has_the_oracles_figures(kind: str) -> None:
    c, result = case(kind), found(kind)
    projection, before = band_projections(c)[-1], logits(c, c.evaluation_u)
    leading = ao.candidates_shares(c.folded.weight, before, projection)
    third = ao.candidates_shares(c.folded.weight, before, projection, 3)
    matched = cells(result, "pairs", "frequency-matched pair")["share"]["value"]
    uniform = ao.uniform_pair_closed_form(c.folded.weight, projection)
    for row, shares in (("leading pair", leading), ("first and third candidate", third)):
        of_row = cells(result, "pairs", row)
        assert of_row["share"]["value"] == pytest.approx(shares.mean(), abs=1e-9)
        assert of_row["to_frequency"]["value"] == pytest.approx(shares.mean() / matched, abs=1e-8)
        assert of_row["to_uniform"]["value"] == pytest.approx(shares.mean() / uniform, rel=1e-7)
    assert cells(result, "pairs", "leading pair")["to_frequency"]["null"] == 1.0
    q = c.folded.weight.shape[1]
    start, stop = ao.bands(q, c.study.bands)[-1]
    assert cells(result, "pairs", "direction at random")["share"] == pytest.approx((stop - start) / q)


@pytest.mark.parametrize("kind", KINDS)
def test_relations_over_bands_and_documents_are_the_oracles(kind: str) -> None:
    c, result = case(kind), found(kind)
    pairs = band_pairs(c.study)
    before = logits(c, c.evaluation_u)
    relative, consequences = [], []
    for pair, projection in zip(pairs, band_projections(c), strict=True):
        leading = ao.candidates_shares(c.folded.weight, before, projection).mean()
        relative.append(leading / ao.uniform_pair_closed_form(c.folded.weight, projection))
        names = ("fisher_term", "logit_distance")
        (f, d), (rf, rd) = ([side[each] for each in names] for side in (pair.own, pair.reference))
        consequences.append(ao.consequence(f, d, rf, rd))
    expected = ao.log_correlation(np.array(relative), np.array(consequences))
    assert result.figures["log_correlation"]["value"] == pytest.approx(expected, abs=1e-6)
    share = leading_shares(c.study)[:, -1]
    ratios = ao.document_ratios(pairs[-1].own["prediction_change"], pairs[-1].reference["prediction_change"])
    assert result.figures["spearman"] == pytest.approx(ao.spearman(share, ratios), abs=1e-9)
    excess = ao.excess(pairs[-1].own["loss_change"], pairs[-1].reference["loss_change"])
    tenths = [cells(result, "deciles", str(tenth + 1)) for tenth in range(10)]
    for key, values in (("share", share), ("excess", excess)):
        shown = [each[key]["value"] for each in tenths]
        np.testing.assert_allclose(shown, ao.in_groups(share, values, 10), rtol=0, atol=1e-9)
    assert sum(each["documents"] for each in tenths) == len(share)


def test_the_result_is_plain_data_that_tables_can_be_redone_from() -> None:
    result = found("gpt_neox")
    text = json.dumps(result.describe(), allow_nan=False)
    assert read_result(json.loads(text)).describe() == json.loads(text)
    shares = [result.values[f"contrast.{b + 1}.leading_share"] for b in range(study_cases.BANDS)]
    np.testing.assert_allclose(np.sum(shares, axis=0), 1.0, rtol=0, atol=1e-12)
    assert shares[-1].mean() == pytest.approx(cells(result, "pairs", "leading pair")["share"]["value"])
    assert {each.place for each in result.pictures} == {"Figure 3a", "Figure 3b", "Figures 3c and 8"}


def test_the_statement_is_established_only_where_the_leading_pair_lies_in_the_band() -> None:
    """A vocabulary whose probable tokens differ in the bottom band alone, and one where they do not."""
    for bottom in (True, False):
        c = study_cases.study_case("llama", evaluation=24)
        study = c.study
        outlook = study.evaluation.outlook
        shares = np.zeros((24, study_cases.BANDS))
        shares[:, -1 if bottom else 0] = 1.0
        shares += np.linspace(0, 1e-3, 24)[:, None]
        study.once("leading_shares", lambda shares=shares: shares)
        assert outlook.candidates.shape == (24, 3)
        (statement,) = contrast_share(study).statements
        assert statement.established == bottom
        assert statement.estimates[0]["side"] == ("above" if bottom else "below")


def test_candidates_with_one_and_the_same_vector_are_an_error() -> None:
    c = study_cases.study_case("llama")
    weight = c.study.unembedding.weight
    first, second = (int(each) for each in c.study.evaluation.outlook.candidates[0, :2])
    with torch.no_grad():
        weight[second] = weight[first]
    with pytest.raises(CspruneError, match=r"in \d+ of 30 documents the unembedding has the same vector"):
        candidate_shares(c.study, c.study.evaluation)


def test_drawn_pairs_of_equal_vectors_are_left_out_and_counted() -> None:
    model = tiny.make("llama")
    c = study_cases.study_case("llama")
    assert model.config.vocab_size == 97
    weight = c.study.unembedding.weight
    with torch.no_grad():
        weight[50:] = weight[50]
    drawn = uniform_sample(c.study, 4_000)
    expected = 47 * 46 / (97 * 96)
    assert drawn.pairs + drawn.same == 4_000
    assert drawn.same / 4_000 == pytest.approx(expected, abs=5 * (expected / 4_000) ** 0.5)
    assert np.isfinite(drawn.shares).all()
    assert drawn.shares.sum() == pytest.approx(1.0, abs=1e-12)


def test_a_random_subspaces_share_is_that_of_its_projection() -> None:
    c = case("gpt_neox")
    candidates = c.study.evaluation.outlook.candidates
    found_ = subspace_shares(c.study.random, c.study.unembedding, candidates[:, 0], candidates[:, 1])
    for shares, basis in zip(found_, c.random_bases, strict=True):
        expected = [
            ao.contrast_share(c.folded.weight, int(i), int(j), ao.projector(basis))
            for i, j in candidates[:, :2]
        ]
        np.testing.assert_allclose(shares, expected, rtol=0, atol=1e-9)


def test_groups_keep_the_order_and_their_means_are_plain_ones() -> None:
    key = np.array([3.0, 1.0, 2.0, 2.0, 5.0, 4.0, 0.0])
    groups = ordered_groups(key, 3)
    assert groups.tolist() == [1, 0, 1, 1, 2, 2, 0] or groups.tolist() == [1, 0, 0, 1, 2, 2, 0]
    resampling = Resampling(np.zeros(7, dtype=int), 400, 0)
    values = np.arange(7.0)
    means = group_means({"v": values}, groups, resampling)
    expected = ao.in_groups(key, values, 3)
    np.testing.assert_allclose([each["v"]["value"] for each in means], expected)
    # Two of seven documents are sometimes not drawn: no mean, no interval.
    assert means[0]["v"]["ci95"] is None
    assert ordered_groups(np.array([2.0, 1.0]), 10).tolist() == [1, 0]


def test_the_correlation_of_spectra_has_draws_only_where_all_are_positive() -> None:
    generator = np.random.default_rng(0)
    draws = np.exp(generator.normal(size=(2, 5, 300)))
    first, second = ([Statistic(float(each.mean()), each) for each in side] for side in draws)
    known = log_correlation(first, second)
    assert known is not None
    assert known.samples is not None
    points = [np.array([each.value for each in side]) for side in (first, second)]
    assert known.value == pytest.approx(ao.log_correlation(*points))
    assert known.samples[7] == pytest.approx(ao.log_correlation(draws[0, :, 7], draws[1, :, 7]))
    # A band that is not positive is left out of the point; in a draw it takes the interval.
    without = log_correlation([Statistic(-1.0, None), *first], [Statistic(1.0, None), *second])
    assert without is not None
    assert without.value == known.value
    first[0] = Statistic(first[0].value, np.where(np.arange(300) == 5, -1.0, draws[0, 0]))
    unsure = log_correlation(first, second)
    assert unsure is not None
    assert unsure.samples is None
    assert log_correlation(first[:2], second[:2]) is None
    flat = [Statistic(2.0, np.full(300, 2.0))] * 5
    assert log_correlation(flat, second) is None
