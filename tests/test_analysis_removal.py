"""Removals of the smallest singular directions of the raw unembedding: HARP's metric, and accuracy."""

from __future__ import annotations

import analysis_oracle as oracle_of
import numpy as np
import pytest
from comparison_checks import (
    KINDS,
    case_of,
    check_comparison,
    check_json,
    claimed,
    effects_of,
    row,
    table,
    value,
)
from study_cases import SUBSPACES

from csprune.analysis.removal import harp_removal, pooled_median
from csprune.analysis.spaces import Space
from csprune.bootstrap import Resampling

SIZES = {"smallest 5%": 2, "smallest 10%": 3, "smallest 15%": 5}  # of d = 32 directions


@pytest.mark.parametrize("kind", KINDS)
def test_removals(kind: str) -> None:
    case = case_of(kind)
    result = harp_removal(case.study)
    check_json(result)
    p = case.parts
    raw = oracle_of.raw_readout(p.weight, p.bias, p.factor, p.cap)
    h = oracle_of.raw_states(case.folded, case.evaluation_u, p.gamma, p.beta)
    directions = oracle_of.folded_bands(raw, centred=False)
    drawn = Space("raw", case.study.unembedding).random(max(SIZES.values()), SUBSPACES, 0)
    assert result.figures["directions"] == SIZES
    effects = table(result, "effects")
    before = oracle_of.effects(oracle_of.fixed_scale(raw, h, 0 * h), case.targets)
    accuracy = before["right_before"].mean()
    assert value(row(effects, "unchanged").cells["accuracy"]) == pytest.approx(accuracy)
    for label, size in SIZES.items():
        # The component itself: nothing is kept of it, not even its mean.
        dh = oracle_of.change(h, oracle_of.projector(directions[:, -size:]), 0.0)
        random = oracle_of.random_changes(h, [each.vectors.numpy()[:, :size] for each in drawn], 0.0)
        own, reference = effects_of(case, dh, oracle_of.to_equal_length(random, dh), raw, h)
        check_comparison(result, table(result, "removals"), label, own, reference)
        whole = oracle_of.squared_lengths(h)
        for name, seen, changes in ((label, own, dh), (f"random, for the {label}", reference, random)):
            cells = row(effects, name).cells
            assert cells["directions"] == size
            expected = {
                "share": (oracle_of.squared_lengths(changes) / whole).mean(),
                "kept": seen["top1_agreement"].mean(),
                "rank": np.median(seen["old_top_rank"]),
                "accuracy": seen["right_after"].mean(),
                "fall": accuracy - seen["right_after"].mean(),
                "loss_change": seen["loss_change"].mean(),
                "prediction_change": seen["prediction_change"].mean(),
            }
            for key, number in expected.items():
                assert value(cells[key]) == pytest.approx(number, rel=1e-6, abs=1e-10), key
        assert result.values[f"removal.{label}.random.rank"] == pytest.approx(reference["old_top_rank"])
    assert result.values["removal.squared_length_of_h"] == pytest.approx(whole)


def test_it_is_not_the_removal_about_the_mean() -> None:
    case = case_of("phi")
    p = case.parts
    raw = oracle_of.raw_readout(p.weight, p.bias, p.factor, p.cap)
    h = oracle_of.raw_states(case.folded, case.evaluation_u, p.gamma, p.beta)
    columns = oracle_of.folded_bands(raw, centred=False)[:, -2:]
    about_mean = oracle_of.change(h, oracle_of.projector(columns), h.mean(axis=0))
    effects = oracle_of.effects(oracle_of.fixed_scale(raw, h, about_mean), case.targets)
    found = harp_removal(case.study).values["removal.smallest 5%.prediction_change"]
    assert not np.allclose(found, effects["prediction_change"], rtol=1e-2)


def test_removing_the_smallest_is_truncating_the_head() -> None:
    # dh = -P h gives the logits of W_out (I - P), Joshi et al.'s head of fewer singular values.
    case = case_of("llama")
    p = case.parts
    head = p.weight.numpy()
    left, sigma, right = np.linalg.svd(head, full_matrices=False)
    sigma[-SIZES["smallest 15%"] :] = 0
    h = oracle_of.raw_states(case.folded, case.evaluation_u, p.gamma, p.beta)
    logits = oracle_of.Logits(h @ head.T, h @ (left * sigma @ right).T, h @ head.T)
    effects = oracle_of.effects(logits, case.targets)
    result = harp_removal(case.study)
    for key, name in (("prediction_change", "prediction_change"), ("correct", "right_after")):
        assert result.values[f"removal.smallest 15%.{key}"] == pytest.approx(effects[name])


def test_the_statement_is_of_harps_removal() -> None:
    result = harp_removal(case_of("gemma2").study)
    (statement,) = result.statements
    cells = table(result, "removals").rows[0].cells
    assert claimed(statement) == [(cells["prediction_change"], "above"), (cells["loss_excess"], "above")]
    assert "HARP" in statement.text


def test_pooled_median() -> None:
    generator = np.random.default_rng(0)
    resampling = Resampling(np.repeat([1, 2], [11, 12]), draws=60, seed=3)
    values = generator.exponential(size=(4, 23))  # no ties: the middle two differ
    found = pooled_median(values, resampling)
    assert found.value == np.median(values)
    assert found.samples is not None
    counts = np.concatenate(list(resampling.counts()))
    expected = [np.median(np.repeat(values, each.astype(int), axis=1)) for each in counts]
    assert found.samples == pytest.approx(expected)
    assert len(set(expected)) > 1
    # One subspace, or equal ones: the median over documents.
    (of_documents,) = resampling.medians(values[0][:, None])
    for same in (values[:1], np.repeat(values[:1], 2, axis=0)):
        assert pooled_median(same, resampling).samples == pytest.approx(of_documents.samples)
    # Control: a mean over the subspaces first is something else.
    (of_means,) = resampling.medians(values.mean(axis=0)[:, None])
    assert not np.allclose(of_means.samples, found.samples)
