"""Donor replacement: who gives whom, what moves, and the bootstrap over linked groups."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from functools import cache

import analysis_oracle as ao
import numpy as np
import oracle
import pytest
import study_cases

from csprune.analysis import matched
from csprune.analysis.contrasts import candidate_shares
from csprune.analysis.donors import donors
from csprune.analysis.matched import matched_transfer
from csprune.analysis.pairing import (
    grouped_means,
    grouped_medians,
    linked_groups,
    matched_donors,
    random_donors,
)
from csprune.analysis.replacement import replace_bottom_band, some
from csprune.analysis.results import Result, read_result
from csprune.bootstrap import Resampling
from csprune.errors import InputError

KINDS = ("llama", "gpt_neox", "cohere", "granite", "gemma2")


@cache
def case(kind: str) -> study_cases.StudyCase:
    return study_cases.study_case(kind, documents=60)


@cache
def found(kind: str) -> Result:
    return donors(case(kind).study)


def bottom(c: study_cases.StudyCase) -> tuple[np.ndarray, list[np.ndarray]]:
    """The oracle's projection on the bottom band, and the random bases of its size."""
    directions = ao.folded_bands(c.folded)
    start, stop = ao.bands(directions.shape[1], c.study.bands)[-1]
    return ao.projector(directions[:, start:stop]), [each[:, : stop - start] for each in c.random_bases]


def cells(result: Result, table: str, row: str) -> dict:
    chosen = next(each for each in result.tables if each.name == table)
    return dict(next(each for each in chosen.rows if each.label == row).cells)


def test_random_donors_are_others_of_the_same_block_and_each_gives_once() -> None:
    blocks = np.repeat([1, 2, 1, 2], [5, 9, 3, 2])
    chosen = random_donors(blocks, 0)
    assert sorted(chosen) == list(range(19))
    assert (chosen != np.arange(19)).all()
    assert (blocks[chosen] == blocks).all()
    np.testing.assert_array_equal(chosen, random_donors(blocks, 0))
    assert (chosen != random_donors(blocks, 1)).any()
    # Every other document of the block is as likely as any.
    counts = Counter(int(random_donors(np.zeros(4, int), seed)[0]) for seed in range(900))
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 240
    with pytest.raises(InputError, match="block 2 has a single document"):
        random_donors(np.array([1, 1, 2]), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_matched_donors_are_those_of_the_smallest_hash(kind: str) -> None:
    c = case(kind)
    states = c.study.calibration
    logits = oracle.after_cap(c.folded, oracle.before_cap(c.folded, c.calibration_u))
    recipients, chosen = matched_donors(states.outlook.candidates.numpy(), states.document_ids)
    expected = {}
    for i, own in enumerate(states.document_ids):
        keys = {
            hashlib.sha256((own + other).encode()).hexdigest(): j
            for j, other in enumerate(states.document_ids)
            if j != i and ao.is_matched(logits, i, j)
        }
        if keys:
            expected[i] = keys[min(keys)]
    assert dict(zip(recipients.tolist(), chosen.tolist(), strict=True)) == expected
    assert 5 < len(expected) < 60  # control: some have one, some have none


@pytest.mark.parametrize("kind", KINDS)
def test_replacements_do_what_the_oracle_says(kind: str) -> None:
    c = case(kind)
    study = c.study
    projection, bases = bottom(c)
    given = random_donors(study.evaluation.blocks.numpy(), study.seed)
    shown = replace_bottom_band(study, study.evaluation, some(study.evaluation, given), "x")
    pairs = list(enumerate(given.tolist()))
    expected = ao.donor_transfer(c.folded, c.evaluation_u, pairs, projection, bases)
    np.testing.assert_allclose(shown.gap, expected["gap"], atol=1e-8)
    np.testing.assert_allclose(shown.shift, expected["shift"], atol=1e-8)
    np.testing.assert_allclose(shown.random_shift.mean(axis=0), expected["random_shift"], atol=1e-8)
    np.testing.assert_array_equal(shown.adopted, expected["adopted"])
    np.testing.assert_allclose(shown.random_adopted.mean(axis=0), expected["random_adopted"])
    np.testing.assert_array_equal(shown.rank, expected["donor_rank"])
    # The whole comparison is of the same changes.
    du = ao.change(c.evaluation_u, projection, c.evaluation_u[given])
    effects = ao.effects(ao.fixed_scale(c.folded, c.evaluation_u, du), c.targets)
    for name in ("logit_distance", "fisher_term", "prediction_change", "loss_change"):
        np.testing.assert_allclose(shown.pair.own[name], effects[name], rtol=1e-7, atol=1e-9)
    lengths = shown.pair.reference["squared_length"]
    np.testing.assert_allclose(
        lengths, np.broadcast_to(ao.squared_lengths(du), lengths.shape), rtol=1e-9, atol=1e-12
    )
    # Control: another donor does something else.
    other = replace_bottom_band(study, study.evaluation, some(study.evaluation, given[given]), "x")
    assert np.abs(other.shift - shown.shift).max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_random_donors_figures_are_the_oracles(kind: str) -> None:
    c, result = case(kind), found(kind)
    projection, bases = bottom(c)
    given = result.values["donors.random donors.donor"].astype(int)
    expected = ao.donor_transfer(c.folded, c.evaluation_u, list(enumerate(given)), projection, bases)
    shown = cells(result, "random", "random donors")
    beyond = expected["shift"] - expected["random_shift"]
    assert shown["fraction"]["value"] == pytest.approx(ao.pooled_fraction(expected["gap"], beyond), abs=1e-8)
    assert shown["adopted"]["value"] == pytest.approx(expected["adopted"].mean())
    assert shown["random_adopted"]["value"] == pytest.approx(expected["random_adopted"].mean())
    logits = oracle.after_cap(c.folded, oracle.before_cap(c.folded, c.evaluation_u))
    same = logits.argmax(axis=1) == logits.argmax(axis=1)[given]
    assert shown["already"]["value"] == pytest.approx(same.mean())


@pytest.mark.parametrize("kind", KINDS)
def test_matched_donors_figures_are_the_oracles(kind: str) -> None:
    c, result = case(kind), found(kind)
    projection, bases = bottom(c)
    states = c.study.calibration
    recipients, chosen = matched_donors(states.outlook.candidates.numpy(), states.document_ids)
    pairs = list(zip(recipients.tolist(), chosen.tolist(), strict=True))
    expected = ao.donor_transfer(c.folded, c.calibration_u, pairs, projection, bases)
    groups = ao.linked_groups(pairs)
    shown = cells(result, "matched", "all eligible")
    assert (shown["documents"], shown["groups"]) == (len(pairs), len(set(groups)))
    assert result.figures == {"eligible": len(pairs), "groups": len(set(groups))}
    fraction, predicted = expected["fraction"], expected["predicted"]
    assert shown["fraction"]["value"] == pytest.approx(np.median(fraction), abs=1e-7)
    assert shown["predicted"]["value"] == pytest.approx(np.median(predicted), abs=1e-8)
    assert shown["surplus"]["value"] == pytest.approx(np.median(fraction - predicted), abs=1e-7)
    assert shown["adopted"]["value"] == pytest.approx(expected["adopted"].mean())
    assert shown["random_adopted"]["value"] == pytest.approx(expected["random_adopted"].mean())
    rank = expected["donor_rank"]
    assert rank.min() >= 2
    for label, inside in (("2nd", rank == 2), ("3rd to 100th", (rank > 2) & (rank <= 100))):
        row = cells(result, "matched", label)
        assert row["documents"] == inside.sum()
        if inside.any():
            assert row["fraction"]["value"] == pytest.approx(np.median(fraction[inside]), abs=1e-7)
        else:
            assert "fraction" not in row
    assert cells(result, "matched", "lower")["documents"] == 0  # 97 tokens have no place 101
    # A band of everything closes the whole gap.
    everything = ao.donor_transfer(c.folded, c.calibration_u, pairs[:3], np.eye(len(projection)), bases)
    np.testing.assert_allclose(everything["shift"], everything["gap"], atol=1e-8)


def test_pairs_are_one_group_where_documents_link_them() -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        recipients = generator.permutation(40)[:12]
        chosen = np.array([generator.choice(np.delete(np.arange(40), each)) for each in recipients])
        groups = linked_groups(recipients, chosen)
        expected = ao.linked_groups(list(zip(recipients.tolist(), chosen.tolist(), strict=True)))
        same = groups[:, None] == groups[None]
        np.testing.assert_array_equal(same, np.array(expected)[:, None] == np.array(expected)[None])
        assert sorted(set(groups)) == list(range(groups.max() + 1))
    # A recipient that is another's donor links two pairs, too.
    assert linked_groups(np.array([0, 1, 5]), np.array([1, 2, 6])).tolist() == [0, 0, 1]
    assert linked_groups(np.array([], dtype=int), np.array([], dtype=int)).tolist() == []


def test_medians_and_means_are_those_of_the_drawn_groups_documents() -> None:
    generator = np.random.default_rng(0)
    groups = np.array([0, 0, 0, 1, 2, 2, 3])
    values = generator.normal(size=(7, 2))
    medians, means = (function(values, groups, 40, 5) for function in (grouped_medians, grouped_means))
    counts = np.concatenate(list(Resampling(np.zeros(4, int), 40, 5).counts())).astype(int)
    for draw, count in enumerate(counts):
        rows = np.concatenate([np.repeat(np.flatnonzero(groups == g), n) for g, n in enumerate(count)])
        for column in range(2):
            drawn, mean = medians[column].samples, means[column].samples
            assert drawn is not None
            assert mean is not None
            assert drawn[draw] == pytest.approx(np.median(values[rows, column]))
            assert mean[draw] == pytest.approx(values[rows, column].mean())
    assert medians[0].value == np.median(values[:, 0])
    # Control: drawing documents instead gives narrower intervals than drawing groups of equal ones.
    alike = np.repeat(generator.normal(size=6), 10)[:, None]
    (by_group,) = grouped_medians(alike, np.repeat(np.arange(6), 10), 500, 0)
    (by_document,) = grouped_medians(alike, np.arange(60), 500, 0)
    assert by_group.samples is not None
    assert by_document.samples is not None
    assert by_group.samples.std() > 1.5 * by_document.samples.std()


def test_a_single_group_has_no_interval() -> None:
    for function in (grouped_medians, grouped_means):
        (single,) = function(np.array([[1.0], [2.0]]), np.array([0, 0]), 40, 5)
        assert single.value == 1.5
        assert single.samples is None


def test_without_an_eligible_document_there_is_a_sentence() -> None:
    study = case("llama").study
    one = some(study.calibration, np.zeros(5, dtype=int))
    result = donors(replace(study, calibration=one))
    expected = (
        "None of 5 calibration documents has a runner-up that is the most probable token of another one, so "
        "that there are no matched donors."
    )
    assert result.findings[-1] == expected
    assert cells(result, "matched", "all eligible") == {"documents": 0, "groups": 0}
    assert result.figures == {"eligible": 0, "groups": 0}
    assert not any("matched" in each.text for each in result.statements)
    json.dumps(result.describe(), allow_nan=False)


def test_the_prediction_of_the_contrast_is_exact_for_states_that_differ_along_it() -> None:
    """Where donor and recipient differ along w_1 - w_2 alone, the band closes its share of the gap."""
    c = case("llama")
    projection, _ = bottom(c)
    weight, u = c.folded.weight, c.calibration_u[:1]
    logits = oracle.after_cap(c.folded, oracle.before_cap(c.folded, u))
    first, second = ao.leading(logits[0])[:2]
    contrast = weight[first] - weight[second]
    donor = u[0] - 0.1 * contrast
    shift = contrast @ ao.change(u, projection, donor)[0]
    gap = contrast @ (donor - u[0])
    expected = shift / gap
    shares = candidate_shares(c.study, c.study.calibration)
    assert shares[0, -1] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_matched_statement_needs_both_halves_of_the_groups(
    monkeypatch: pytest.MonkeyPatch, sign: int
) -> None:
    """Fractions that are set: all above zero establish it; negative ones in one half of the groups do not."""
    study = case("gpt_neox").study
    real = matched._pairs

    def set_fractions(*arguments):
        pairs = real(*arguments)
        fraction = np.where(pairs.second_half, sign * 0.3, 0.5) + 0.01 * np.arange(len(pairs.rank))
        return replace(pairs, fraction=np.tile(fraction, (4, 1)))

    monkeypatch.setattr(matched, "_pairs", set_fractions)
    (statement,) = matched_transfer(study).statements
    (estimate,) = statement.estimates
    assert statement.established == (sign > 0)
    assert estimate["checks"]["blocks"] == (sign > 0)
    assert estimate["checks"]["subspaces"] or sign < 0


def test_the_result_is_plain_data() -> None:
    result = found("gpt_neox")
    text = json.dumps(result.describe(), allow_nan=False)
    assert read_result(json.loads(text)).describe() == json.loads(text)
    documents = result.values["donors.matched donors.documents"].tolist()
    assert set(documents) < set(case("gpt_neox").study.calibration.document_ids)
    for name, each in result.values.items():
        expected = len(documents) if name.startswith("donors.matched donors.") else 30
        assert each.shape[-1] == expected
    fraction = result.values["donors.matched donors.fraction"].mean(axis=0)
    shown = cells(result, "matched", "all eligible")["fraction"]["value"]
    assert np.median(fraction) == pytest.approx(shown)
