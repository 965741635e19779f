"""The spectrum and the bottom band against the float64 oracle, which shares no code with the package."""

from __future__ import annotations

import json
from dataclasses import replace

import analysis_oracle as ao
import numpy as np
import oracle
import pytest
import torch
from results_examples import estimates
from study_cases import BANDS, StudyCase, study_case

from csprune.analysis.bands import band_pairs, loss_excess, ratios, ratios_per_distance
from csprune.analysis.ends import bottom_band, top_band
from csprune.analysis.results import Result, read_result
from csprune.analysis.spectrum import consequence_spectrum, singular_values
from csprune.analysis.top_token import most_probable_token

KINDS = ("llama", "gpt_neox", "cohere", "gemma2")
EXACT = {"rtol": 1e-8, "atol": 1e-10}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> StudyCase:
    return study_case(request.param)


def projection(case: StudyCase, band: int) -> np.ndarray:
    """P_b of the oracle's own decomposition."""
    vectors = ao.folded_bands(case.folded)
    start, stop = ao.bands(vectors.shape[1], BANDS)[band]
    return ao.projector(vectors[:, start:stop])


def both(case: StudyCase, band: int, *, rescaled: bool = True) -> tuple[dict, dict]:
    """The oracle's effects of a band's change and of its references."""
    mean = case.calibration_u.mean(axis=0)
    own = ao.change(case.evaluation_u, projection(case, band), mean)
    start, stop = ao.bands(case.folded.weight.shape[1], BANDS)[band]
    bases = [each[:, : stop - start] for each in case.random_bases]
    changes = ao.random_changes(case.evaluation_u, bases, mean)
    if rescaled:
        changes = ao.to_equal_length(changes, own)
    effects = ao.effects(ao.fixed_scale(case.folded, case.evaluation_u, own), case.targets)
    return effects, ao.effects_of_all(case.folded, case.evaluation_u, changes, case.targets)


def cell(result: Result, table: int, row: str, key: str) -> float:
    (found,) = (each for each in result.tables[table].rows if each.label == row)
    value = found.cells[key]
    return value["value"] if isinstance(value, dict) else value  # type: ignore[return-value]


def test_every_bands_figures_are_the_oracles(case: StudyCase) -> None:
    for band, pair in enumerate(band_pairs(case.study)):
        own, references = both(case, band)
        for name in ("logit_distance", "fisher_term", "prediction_change", "loss_change", "top1_agreement"):
            np.testing.assert_allclose(pair.own[name], own[name], **EXACT, err_msg=name)
            np.testing.assert_allclose(pair.reference[name], references[name], **EXACT, err_msg=name)
    # Control: another band's references are not these.
    assert not np.allclose(pair.own["fisher_term"], both(case, 0)[0]["fisher_term"])


def test_the_consequence_spectrum_is_the_oracles(case: StudyCase) -> None:
    result = consequence_spectrum(case.study)
    for band in range(BANDS):
        own, references = both(case, band)
        args = (
            own["fisher_term"],
            own["logit_distance"],
            references["fisher_term"],
            references["logit_distance"],
        )
        expected = ao.consequence(*args)
        assert result.figures["consequence"][band] == pytest.approx(expected, rel=1e-8)
        median = np.median(ao.document_consequences(*args))
        assert cell(result, 0, str(band + 1), "median") == pytest.approx(median, rel=1e-8)
        for quantity in ("logit_distance", "prediction_change"):
            ratio = ao.pooled_ratio(own[quantity], references[quantity])
            assert cell(result, 0, str(band + 1), quantity) == pytest.approx(ratio, rel=1e-8)
        # Control: against references that are not rescaled the pooled figure is another one.
        loose = both(case, band, rescaled=False)[1]
        other = ao.consequence(args[0], args[1], loose["fisher_term"], loose["logit_distance"])
        assert abs(other - expected) > 1e-6


def test_the_singular_values_are_the_svds(case: StudyCase) -> None:
    result = singular_values(case.study)
    expected = np.linalg.svd(case.folded.weight, compute_uv=False)
    np.testing.assert_allclose(result.figures["singular_values"], expected, rtol=1e-6)
    shares = [cell(result, 0, str(b + 1), "share") for b in range(BANDS)]
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    start, stop = ao.bands(len(expected), BANDS)[1]
    assert cell(result, 0, "2", "share") == pytest.approx(
        np.square(expected[start:stop]).sum() / np.square(expected).sum(), rel=1e-8
    )
    assert cell(result, 0, "2", "median") == pytest.approx(np.median(expected[start:stop]), rel=1e-8)


def test_the_bottom_band_document_by_document(case: StudyCase) -> None:
    own, references = both(case, BANDS - 1)
    result = bottom_band(case.study)
    for key, expected in (
        ("logit_distance", ao.pooled_ratio(own["logit_distance"], references["logit_distance"])),
        ("prediction_change", ao.pooled_ratio(own["prediction_change"], references["prediction_change"])),
        ("loss_excess", ao.excess(own["loss_change"], references["loss_change"]).mean()),
    ):
        assert cell(result, 0, "bottom band", key) == pytest.approx(expected, rel=1e-8)
    per_unit = ao.document_consequences(
        own["fisher_term"], own["logit_distance"], references["fisher_term"], references["logit_distance"]
    )
    assert cell(result, 1, "F/D", "above") == pytest.approx(ao.share_above_one(per_unit))
    assert cell(result, 1, "F/D", "median") == pytest.approx(np.median(per_unit), rel=1e-8)
    in_total = ao.document_ratios(own["prediction_change"], references["prediction_change"])
    assert cell(result, 1, "K", "above") == pytest.approx(ao.share_above_one(in_total))
    excess = ao.excess(own["loss_change"], references["loss_change"])
    if excess.sum() > 0:
        assert result.figures["tenth_of_loss_excess"] == pytest.approx(ao.concentration(excess), rel=1e-8)
    else:
        assert result.figures["tenth_of_loss_excess"] is None
    np.testing.assert_allclose(loss_excess(band_pairs(case.study)[-1]), excess, **EXACT)


def test_what_becomes_of_the_most_probable_token(case: StudyCase) -> None:
    own, references = both(case, BANDS - 1)
    result = most_probable_token(case.study)
    for row, seen in (("bottom band", own), ("random, of its length", references)):
        changed = 1 - seen["top1_agreement"]
        assert cell(result, 0, row, "changed") == pytest.approx(changed.mean())
        if changed.any():
            share = seen["to_runner_up"].mean() / changed.mean()
            assert cell(result, 0, row, "runner_up") == pytest.approx(share)
        assert cell(result, 0, row, "accuracy") == pytest.approx(seen["right_after"].mean())
        fall = seen["right_before"].mean() - seen["right_after"].mean()
        assert cell(result, 0, row, "fall") == pytest.approx(fall)


def test_the_ends_in_total(case: StudyCase) -> None:
    result = top_band(case.study)
    for row, band in (("top band", 0), ("bottom band", BANDS - 1)):
        own, references = both(case, band, rescaled=False)
        for key in ("loss_change", "logit_distance", "fisher_term", "prediction_change"):
            assert cell(result, 0, row, key) == pytest.approx(own[key].mean(), rel=1e-8)
        assert cell(result, 0, row, "random") == pytest.approx(references["loss_change"].mean(), rel=1e-8)


def test_the_consequence_does_not_depend_on_the_size_of_the_singular_values() -> None:
    """Section 2.3: an overall factor of one band's sigma cancels from its F/D at a given prediction."""
    case = study_case("llama")
    own, references = both(case, 0)
    doubled = {name: 4 * own[name] for name in ("fisher_term", "logit_distance")}  # D and F go as sigma^2
    args = (references["fisher_term"], references["logit_distance"])
    before = ao.consequence(own["fisher_term"], own["logit_distance"], *args)
    assert ao.consequence(doubled["fisher_term"], doubled["logit_distance"], *args) == pytest.approx(before)


def test_results_survive_json_and_have_finite_estimates(case: StudyCase) -> None:
    for analysis in (consequence_spectrum, bottom_band, most_probable_token, top_band, singular_values):
        result = analysis(case.study)
        text = json.dumps(result.describe(), allow_nan=False)
        again = read_result(json.loads(text))
        assert json.dumps(again.describe(), allow_nan=False) == text
        assert result.definition and result.place and result.findings
        for name, estimate in estimates(result):
            assert estimate["value"] is not None, name
            if estimate["ci95"] is not None and "above" not in name:
                low, high = estimate["ci95"]
                assert low <= estimate["value"] <= high, name


def test_a_change_of_zero_length_is_compared_with_nothing() -> None:
    """A document at the mean itself is not changed, by a band or at random: its ratios say "as random"."""
    case = study_case("llama")
    u = case.study.evaluation.u.clone()
    u[0] = case.study.mean
    still = replace(case.study, evaluation=replace(case.study.evaluation, u=u))
    pair = band_pairs(still)[-1]
    assert pair.own["prediction_change"][0] == 0 and (pair.reference["prediction_change"][:, 0] == 0).all()
    assert ratios(pair, "prediction_change")[0] == 1 == ratios_per_distance(pair, "fisher_term")[0]
    assert np.isfinite(consequence_spectrum(still).figures["consequence"]).all()


def test_references_are_as_long_as_the_change_and_nested(case: StudyCase) -> None:
    own = case.study.removal(1)
    for each in case.study.random_removals(own):
        rescaled = each.as_long_as(own)
        torch.testing.assert_close(rescaled.squared_length, own.squared_length)
        assert each.subspace.size == own.subspace.size
        mapped = rescaled.vectors() @ torch.from_numpy(np.eye(own.subspace.vectors.shape[0]))
        torch.testing.assert_close(mapped.square().sum(1), own.squared_length)
    assert not torch.allclose(each.squared_length, own.squared_length)  # control: not by itself


def test_the_oracle_folds_as_the_study_does(case: StudyCase) -> None:
    states = case.study.evaluation.u.numpy() @ case.basis
    np.testing.assert_allclose(states, case.evaluation_u, atol=1e-12)
    logits = oracle.after_cap(case.folded, oracle.before_cap(case.folded, case.evaluation_u))
    log_p = oracle.log_softmax(logits)
    outlook = case.study.evaluation.outlook
    np.testing.assert_allclose(outlook.loss, -log_p[np.arange(len(log_p)), case.targets], atol=1e-10)
    np.testing.assert_allclose(outlook.entropy, ao.entropy(logits), atol=1e-10)
    np.testing.assert_allclose(outlook.margin, ao.margin(logits), atol=1e-10)
    np.testing.assert_array_equal(outlook.candidates[:, 0], logits.argmax(axis=1))
