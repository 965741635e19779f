"""The chain rule of K at the leading pair: exact parts, their shares, and what is said of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import analysis_oracle as ao
import numpy as np
import pytest
import study_cases
import torch

from csprune.analysis.bands import band_pairs
from csprune.analysis.chain import chain_rule
from csprune.analysis.chain_parts import (
    PARTS,
    WHOLE,
    band_parts,
    leading_pair_parts,
    parts_sample,
    share_of_excess,
)
from csprune.analysis.effects import Scene, Values
from csprune.analysis.results import Result, read_result
from csprune.analysis.study import Layout, States

KINDS = ("llama", "gpt_neox", "cohere", "granite", "gemma2")


@cache
def case(kind: str) -> study_cases.StudyCase:
    return study_cases.study_case(kind)


@cache
def parts(kind: str) -> list[tuple[Values, Values]]:
    return band_parts(case(kind).study)


@cache
def found(kind: str) -> Result:
    return chain_rule(case(kind).study)


def rows(result: Result, table: str) -> dict[str, dict]:
    chosen = next(each for each in result.tables if each.name == table)
    return {row.label: dict(row.cells) for row in chosen.rows}


@cache
def oracles(kind: str) -> list[tuple[Values, Values]]:
    """By band the oracle's parts of the change, and of random ones."""
    c = case(kind)
    directions, mean = ao.folded_bands(c.folded), c.calibration_u.mean(axis=0)
    expected = []
    for start, stop in ao.bands(directions.shape[1], c.study.bands):
        du = ao.change(c.evaluation_u, ao.projector(directions[:, start:stop]), mean)
        bases = [each[:, : stop - start] for each in c.random_bases]
        random = ao.to_equal_length(ao.random_changes(c.evaluation_u, bases, mean), du)
        own, *others = (
            ao.chain_rule(ao.fixed_scale(c.folded, c.evaluation_u, each)) for each in (du, *random)
        )
        expected.append((own, {name: np.stack([each[name] for each in others]) for name in own}))
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_sum_to_k(kind: str) -> None:
    for pair, both in zip(band_pairs(case(kind).study), parts(kind), strict=True):
        for measured, own in zip((pair.own, pair.reference), both, strict=True):
            total = np.sum([own[name] for name in PARTS], axis=0)
            np.testing.assert_allclose(total, own[WHOLE], rtol=0, atol=1e-12)
            np.testing.assert_allclose(total, measured["prediction_change"], rtol=0, atol=1e-9)
            assert min(own[name].min() for name in PARTS) >= 0
            # Control: none of them is all of it.
            assert max(own[name].sum() for name in PARTS) < 0.99 * own[WHOLE].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_is_the_divergence_that_it_is_said_to_be(kind: str) -> None:
    for both, expected in zip(parts(kind), oracles(kind), strict=True):
        for own, oracles_own in zip(both, expected, strict=True):
            for name in PARTS:
                np.testing.assert_allclose(own[name], oracles_own[name], rtol=0, atol=1e-9)


def scene(logits: torch.Tensor) -> Scene:
    """One document with these logits, [V]."""
    log_p = logits.double().log_softmax(0)[None]

    class Plain:
        log_probabilities = log_p

    candidates = log_p.topk(min(3, log_p.shape[1]), dim=1).indices
    return Scene(slice(0, 1), Plain(), torch.zeros(1, 1), candidates)  # type: ignore[arg-type]


def test_parts_are_exact_where_the_pair_has_nearly_everything_before_or_after() -> None:
    """Beside a mass outside the pair of 1e-13, a difference 1 - P2 would keep three digits."""
    for before, c in (
        ([0.0, -1.0, -30.0, -31.0], [0.0, 0.5, 25.0, 24.0]),  # next to nothing outside, then much
        ([0.0, -1.0, 0.0 - 1e-3, -2.0], [30.0, 29.0, 0.0, 0.5]),  # much outside, then next to nothing
        ([0.0, -1.0, -800.0, -900.0], [0.0, 0.5, 800.0, 1.0]),  # nothing at all in float64, then much
    ):
        logits, change = torch.tensor(before), torch.tensor([c]).double()
        found_ = leading_pair_parts(scene(logits), change)
        assert all(torch.isfinite(each).all() for each in found_.values())
        assert sum(float(found_[name]) for name in PARTS) == pytest.approx(float(found_[WHOLE]), rel=1e-13)
        after = logits.double().numpy() + np.array(c)
        expected = ao.chain_rule(ao.Logits(logits.double().numpy()[None], after[None], after[None]))
        for name in PARTS:
            assert float(found_[name]) == pytest.approx(expected[name][0], rel=1e-9, abs=1e-15)


def test_a_vocabulary_of_two_tokens_is_all_pair() -> None:
    found_ = leading_pair_parts(scene(torch.tensor([1.0, 0.2])), torch.tensor([[0.3, -0.4]]).double())
    assert float(found_["within"]) == pytest.approx(float(found_[WHOLE]))
    assert float(found_["within"]) > 0.01
    assert float(found_["rest"]) == 0
    assert float(found_["between"]) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_has_the_oracles_shares(kind: str) -> None:
    result, (own, random) = found(kind), oracles(kind)[-1]
    whole, random_whole = (np.sum([each[name] for name in PARTS], axis=0) for each in (own, random))
    table = rows(result, "parts")
    for name, label in PARTS.items():
        cells = table[label]
        assert cells["own"]["value"] == pytest.approx(own[name].mean(), abs=1e-9)
        assert cells["random"]["value"] == pytest.approx(random[name].mean(), abs=1e-9)
        pooled, _ = ao.part_share_difference(own[name], whole, random[name], random_whole)
        assert cells["difference"]["value"] == pytest.approx(pooled, abs=1e-8)
    for label, (own, random) in zip(rows(result, "bands"), oracles(kind), strict=True):
        whole, random_whole = (np.sum([each[name] for name in PARTS], axis=0) for each in (own, random))
        pooled, mean = ao.part_share_difference(own["within"], whole, random["within"], random_whole)
        cells = rows(result, "bands")[label]
        assert cells["within"]["value"] == pytest.approx(pooled, abs=1e-8)
        assert cells["within_mean"]["value"] == pytest.approx(mean, abs=1e-7)
        assert cells["between"]["value"] == pytest.approx(own["between"].sum() / whole.sum(), abs=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_are_the_differences_of_the_bands_figures(kind: str) -> None:
    result = found(kind)
    bands, (within, between) = rows(result, "bands"), rows(result, "ends").values()
    top, bottom = bands["1"], bands[str(study_cases.BANDS)]
    expected = bottom["within"]["value"] - top["within"]["value"]
    assert within["difference"]["value"] == pytest.approx(expected, abs=1e-12)
    expected = top["between"]["value"] - bottom["between"]["value"]
    assert between["difference"]["value"] == pytest.approx(expected, abs=1e-12)
    assert abs(expected) > 1e-3  # control


def test_the_parts_shares_of_an_excess_are_the_oracles_and_exist_only_with_one() -> None:
    with_excess = []
    for kind in KINDS:
        for both, (own, random) in zip(parts(kind), oracles(kind), strict=True):
            sample = parts_sample(*both, case(kind).study.resampling)
            shares = {name: sample.estimate(share_of_excess(name))["value"] for name in PARTS}
            whole, random_whole = (np.sum([each[name] for name in PARTS], axis=0) for each in (own, random))
            with_excess.append((whole - random_whole.mean(axis=0)).sum() > 0)
            if not with_excess[-1]:
                assert set(shares.values()) == {None}
                continue
            assert sum(shares.values()) == pytest.approx(1)
            for name, shown in shares.items():
                expected = ao.part_of_excess(own[name], whole, random[name], random_whole)
                assert shown == pytest.approx(expected, rel=1e-6)
    assert set(with_excess) == {True, False}  # control: the tiny models have bands of both kinds


def test_an_excess_is_put_in_a_sentence() -> None:
    """With the bands in reverse order the top one, which has an excess, is the bottom one."""
    kind = next(
        kind for kind in KINDS if parts(kind)[0][0][WHOLE].sum() > parts(kind)[0][1][WHOLE].mean(axis=0).sum()
    )
    layout = case(kind).study.layout
    turned = Layout(layout.unembedding, layout.bands, layout.subspaces, layout.seed)
    turned.__dict__["band_subspaces"] = layout.band_subspaces[::-1]
    result = chain_rule(replace(case(kind).study, _layout=turned))
    table = rows(result, "parts")
    shares = [table[label]["of_excess"]["value"] for label in PARTS.values()]
    assert sum(shares) == pytest.approx(1)
    assert list(result.pictures[0].panels[1].curves[0].y) == shares
    assert result.findings[0] == (
        f"Of the bottom band's K beyond its random changes', {shares[0]:.0%} lies between the leading pair "
        f"and the rest, {shares[1]:.0%} within the pair, {shares[2]:.0%} among the rest."
    )


def test_without_an_excess_there_are_no_shares_of_it() -> None:
    c = study_cases.study_case("llama")
    study = c.study
    # Calibrate and evaluate on the same state: nothing is changed, by the band or by anything.
    one = study.evaluation
    same = States(
        one.unembedding,
        one.position,
        one.u[:1].expand_as(one.u).clone(),
        one.targets,
        one.blocks,
        one.document_ids,
    )
    result = chain_rule(study.beside(same, same))
    assert result.findings[0].startswith("The bottom band's K is not above its random changes'")
    for label in PARTS.values():
        assert rows(result, "parts")[label]["of_excess"]["value"] is None
    assert not any(each.established for each in result.statements)
    assert len(result.pictures[0].panels) == 1
    json.dumps(result.describe(), allow_nan=False)


def test_the_result_is_plain_data_that_tables_can_be_redone_from() -> None:
    result = found("gpt_neox")
    text = json.dumps(result.describe(), allow_nan=False)
    assert read_result(json.loads(text)).describe() == json.loads(text)
    bottom = str(study_cases.BANDS)
    own = {name: result.values[f"chain.{bottom}.{name}"] for name in (WHOLE, *PARTS)}
    share = own["within"].sum() / own[WHOLE].sum()
    assert rows(result, "parts")[PARTS["within"]]["share"]["value"] == pytest.approx(share)
    assert result.values[f"chain.{bottom}.random.rest"].shape == (study_cases.SUBSPACES, 30)
