"""Truncations: theorems on every method, and agreement with the oracle's dense projections."""

from __future__ import annotations

import dataclasses
from functools import cache

import cases
import numpy as np
import oracle
import pytest
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import csprune
from csprune import InputError
from csprune.linalg import haar_columns
from csprune.truncation import ALIASES, STRATEGIES, canonical_method, removed_directions

# RMSNorm; LayerNorm; RMSNorm, gain - 1 and a soft cap; LayerNorm and a logit scale.
KINDS = ("llama", "gpt2", "gemma2", "cohere")
ORTHOGONAL = ("singular", "fisher", "random")
WHITENED = ("whitened", "fisher-whitened")
METHODS = (*ORTHOGONAL, *WHITENED)


@cache
def case(kind: str) -> cases.Case:
    return cases.build(tiny.make(kind).double())


def metric_of(this: cases.Case, method: str) -> torch.Tensor:
    """What a whitened method's cost is measured in, float64 [q, q]."""
    unembedding = this.readout.unembedding
    return unembedding.gram if method == "whitened" else this.calibration.mean_fisher(unembedding)


def cost(p: torch.Tensor, metric: torch.Tensor, moment: torch.Tensor) -> float:
    """`E[ ||P (u - mu)||^2 in the metric ] = tr(P^T metric P M)`."""
    return float((p.mT @ metric @ p @ moment).trace())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=10)
@given(m=st.integers(1, tiny.WIDTH - 2))
@example(m=1)
@example(m=tiny.WIDTH - 2)
def test_projection_is_idempotent_of_exact_rank_with_its_complement(method: str, kind: str, m: int) -> None:
    this = case(kind)
    q = this.width
    truncation = this.truncate(method, m, seed=3)
    projection = truncation.projection
    p, eye = projection.dense(), torch.eye(q, dtype=torch.float64)
    assert (truncation.removed, truncation.kept) == (m, q - m)
    assert torch.allclose(projection.removed_right.mT @ projection.removed_left, eye[:m, :m], atol=1e-9)
    assert torch.allclose(projection.kept_right.mT @ projection.kept_right, eye[m:, m:], atol=1e-12)
    assert relative(p @ p, p) < 1e-9
    assert relative(projection.kept_left @ projection.kept_right.mT, eye - p) < 1e-9
    values = torch.linalg.svdvals(p)
    assert values[m - 1] > 1 - 1e-9 and values[m:].max() < 1e-9 * values[0]
    # Controls: what is not idempotent, and what has another rank, is seen.
    assert relative((2 * p) @ (2 * p), 2 * p) > 0.5
    assert values[m - 1] > 1e6 * torch.linalg.svdvals(p - p[:, :1] @ p[:1] / p[0, 0])[m - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_self_adjoint_in_its_inner_product_and_in_no_other(kind: str) -> None:
    this = case(kind)
    moment = this.calibration.second_moment
    for method in METHODS:
        p = this.truncate(method, 6).projection.dense()
        asymmetry = float((p - p.mT).norm() / p.norm())
        # <P x, y> in M^-1 is x^T P^T M^-1 y: symmetric when P M is.
        whitened = float((p @ moment - moment @ p.mT).norm() / (p @ moment).norm())
        if method in ORTHOGONAL:
            assert asymmetry < 1e-12 and whitened > 1e-3, method
        else:
            assert whitened < 1e-10 and asymmetry > 1e-3, method


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", WHITENED)
def test_whitened_removal_costs_least(method: str, kind: str) -> None:
    this = case(kind)
    metric, moment = metric_of(this, method), this.calibration.second_moment
    generator = torch.Generator().manual_seed(1)
    for m in (1, 7, this.width - 2):
        projection = this.truncate(method, m).projection
        p = projection.dense()
        least = cost(p, metric, moment)
        # It is the sum of the smallest eigenvalues of M metric, those of S^T metric S.
        eigenvalues = torch.linalg.eigvals(moment @ metric).real.sort().values
        assert least == pytest.approx(float(eigenvalues[:m].sum()), rel=1e-7)
        assert least < 0.99 * float(eigenvalues[1 : m + 1].sum())  # control: not of any others
        for size in (1e-2, 0.1, 1.0):
            noise = torch.randn(2, this.width, m, generator=generator, dtype=torch.float64)
            left = projection.removed_left + size * noise[0] * projection.removed_left.norm(dim=0)
            right = projection.removed_right + size * noise[1] * projection.removed_right.norm(dim=0)
            # Another range, another null space, and both.
            for a, b in ((left, projection.removed_right), (projection.removed_left, right), (left, right)):
                other = a @ torch.linalg.solve(b.mT @ a, b.mT)
                assert relative(other @ other, other) < 1e-6
                assert cost(other, metric, moment) > least
        for other_method in METHODS:
            if other_method != method:
                other = this.truncate(other_method, m).projection.dense()
                assert cost(other, metric, moment) > least


@pytest.mark.parametrize("kind", KINDS)
def test_fisher_removes_the_directions_of_smallest_saliency(kind: str) -> None:
    this = case(kind)
    saliency, directions = this.calibration.saliency, this.calibration.directions
    m = 8
    p = this.truncate("fisher", m).projection.dense()
    removed = (directions * (p @ directions)).sum(0)  # 1 where v_i is removed, else 0
    assert torch.allclose(removed, removed.round(), atol=1e-10)
    gone = removed > 0.5
    assert int(gone.sum()) == m
    assert saliency[gone].max() < saliency[~gone].min()
    # Control: the smallest singular values are other directions.
    p = this.truncate("singular", m).projection.dense()
    removed = (directions * (p @ directions)).sum(0)
    assert torch.allclose(removed[-m:], torch.ones(m).double()) and removed[:-m].abs().max() < 1e-8
    assert not torch.equal(removed > 0.5, gone)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_dense_projections_are_the_oracles(kind: str) -> None:
    this = case(kind)
    r, h = this.basis, this.folded.basis
    np.testing.assert_allclose(r @ r.T, h @ h.T, atol=1e-13)
    for m in (2, 9):
        found = {method: r @ this.truncate(method, m).projection.dense().numpy() @ r.T for method in METHODS}
        for method in oracle.METHODS:
            expected = h @ this.oracle_projection(method, m) @ h.T
            np.testing.assert_allclose(
                found[method], expected, rtol=0, atol=1e-6 * np.linalg.norm(expected), err_msg=method
            )
            for other in METHODS:  # control: each is told from every other
                if other != method and m == 9:
                    assert np.linalg.norm(found[other] - expected) > 1e-2 * np.linalg.norm(expected)
    mean = this.basis @ this.truncate("fisher", 2).mean_state.numpy()
    np.testing.assert_allclose(mean, h @ this.statistics.mean_state, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_rank_is_the_beginning_of_a_larger_one(kind: str) -> None:
    this = case(kind)
    for method in METHODS:
        small, large = (this.truncate(method, m, seed=2).projection for m in (4, 11))
        for a, b in (
            (small.removed_left, large.removed_left),
            (small.removed_right, large.removed_right),
        ):
            assert torch.allclose(a, b[:, :4], rtol=0, atol=1e-9 * float(b.abs().max())), method
            assert not torch.allclose(a, b[:, 1:5], atol=1e-3 * float(b.abs().max())), method  # control
        # As subspaces: P_small P_large = P_large P_small = P_small.
        p, wider = small.dense(), large.dense()
        assert relative(wider @ p, p) < 1e-8 and relative(p @ wider, p) < 1e-8, method


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), width=st.integers(2, 40), data=st.data())
def test_random_columns_are_orthonormal_nested_and_seeded(seed: int, width: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, width))
    columns = haar_columns(width, count, seed)
    assert torch.allclose(columns.mT @ columns, torch.eye(count).double(), atol=1e-12)
    assert torch.allclose(haar_columns(width, width, seed)[:, :count], columns, atol=1e-12)
    assert torch.equal(haar_columns(width, count, seed), columns)
    if count < width:
        other = haar_columns(width, count, seed + 1)
        assert float((columns.mT @ other).square().sum()) < count - 1e-6  # not the same subspace


def test_random_subspaces_are_uniform() -> None:
    """Haar: E[P] = m/q, every entry of a column is symmetric, and no coordinate is preferred."""
    q, m, seeds = 5, 2, 4000
    columns = torch.stack([haar_columns(q, m, seed) for seed in range(seeds)])
    mean = (columns @ columns.mT).mean(0)
    assert torch.allclose(mean, torch.eye(q).double() * m / q, atol=0.03)
    assert columns.mean(0).abs().max() < 0.04  # its standard error is 0.007
    # Control: an isotropic vector instead of the second column is no subspace of that mean; QR's signs
    # without the correction prefer one side.
    raw = torch.stack(
        [torch.linalg.qr(torch.randn(q, m, generator=torch.Generator().manual_seed(s))).Q for s in range(200)]
    )
    assert raw.mean(0).abs().max() > 0.04


@pytest.mark.parametrize("kind", KINDS)
def test_random_is_the_subspace_of_its_seed(kind: str) -> None:
    this = case(kind)
    found = this.truncate("random", 5, seed=7).projection
    assert torch.equal(found.removed_left, haar_columns(this.width, 5, 7))
    assert torch.equal(found.dense(), this.truncate("random", 5, seed=7).projection.dense())
    assert not torch.allclose(found.dense(), this.truncate("random", 5, seed=8).projection.dense(), atol=0.1)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_factors_are_the_corrected_truncated_readout(kind: str) -> None:
    this = case(kind)
    folded, statistics = this.folded, this.statistics
    u = np.concatenate(cases.states(this.model, this.held_out.input_ids))
    z = torch.from_numpy(u @ folded.basis.T)
    for method in oracle.METHODS:
        p = this.oracle_projection(method, 6)
        changed = u - (u - statistics.mean_state) @ p.T
        expected = changed @ folded.uncentred.T + folded.constant
        factors = this.truncate(method, 6).factors(torch.float64)
        found = (z @ factors.down.mT @ factors.up.mT + factors.offset).numpy()
        assert factors.up.shape == (tiny.VOCABULARY, this.width - 6)
        assert factors.down.shape == (this.width - 6, tiny.WIDTH)
        scale = expected.std()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale, err_msg=method)
        # Control: without the mean in the offset it is another head.
        wrong = (u - u @ p.T) @ folded.uncentred.T + folded.constant
        assert np.abs(wrong - expected).max() > 1e-3 * scale, method


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_removed_gives_the_original_logits(method: str, kind: str) -> None:
    this = case(kind)
    truncation = this.truncate(method, 0)
    assert (truncation.removed, truncation.kept, truncation.rank) == (0, this.width, 0)
    u = torch.cat([this.readout.states(this.held_out.input_ids[i : i + 1])[0] for i in range(3)])
    factors = truncation.factors(torch.float64)
    z = this.readout.unembedding.lift(u)
    expected = this.readout.unembedding.head_output(u)
    found = z @ factors.down.mT @ factors.up.mT + factors.offset
    assert torch.allclose(found, expected, atol=1e-10)
    # The logits themselves, not up to a constant for each token.
    centred = this.readout.unembedding.along(torch.eye(this.width).double(), torch.float64)
    assert this.readout.unembedding.transform.cap or not torch.allclose(
        u @ centred.mT + this.readout.unembedding.constant, expected, atol=1e-3
    )


def test_an_unvisited_direction_is_free_and_counted() -> None:
    """Fewer calibration positions than directions: no failure, and the effective rank says so."""
    model = tiny.make("llama").double()
    read = cases.windows(0, 2, length=8)
    readout = csprune.load_readout(model)
    calibration = csprune.calibrate(model, read, readout=readout)
    states = readout.states(read.input_ids).flatten(0, 1)
    for method in WHITENED:
        truncation = csprune.truncate(readout, calibration, method, removed=16)
        assert truncation.effective_rank is not None and 0 < truncation.effective_rank < 16
        # Only what the calibration never saw goes: its states are as they were.
        u = states - truncation.mean_state
        removed = u @ truncation.projection.dense().mT
        assert float(removed.norm() / u.norm()) < 1e-4
        p = truncation.projection.dense()
        assert relative(p @ p, p) < 1e-6
    plain = csprune.truncate(readout, calibration, "fisher", removed=16)
    assert plain.effective_rank is None
    u = states - plain.mean_state
    removed = u @ plain.projection.dense().mT
    assert float(removed.norm() / u.norm()) > 1e-2  # control
    assert case("llama").truncate("whitened", 3).effective_rank == tiny.WIDTH


def test_names_and_aliases() -> None:
    this = case("llama")
    for alias, method in ALIASES.items():
        assert canonical_method(alias) == method
        truncation = this.truncate(alias, 4)
        assert truncation.method == method
        assert torch.equal(truncation.projection.dense(), this.truncate(method, 4).projection.dense())
    assert canonical_method("consequence") == "fisher"
    with pytest.raises(InputError) as caught:
        this.truncate("wanda", 4)
    assert all(name in str(caught.value) for name in ("wanda", *STRATEGIES, *ALIASES))


@given(width=st.integers(2, 5000), data=st.data())
def test_rank_is_the_rounded_share_that_is_removed(width: int, data: st.DataObject) -> None:
    removed = data.draw(st.integers(1, width - 1))
    assert removed_directions(removed / width, width) == removed
    rank = data.draw(st.floats(0.51 / width, 1 - 0.51 / width))
    assert 1 <= removed_directions(rank, width) <= width - 1
    assert abs(removed_directions(rank, width) - rank * width) <= 0.5


def test_ranks_that_cannot_be() -> None:
    this = case("llama")
    for rank in (0, 0.0, 1, 1.0, -0.1, 1.5, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(InputError, match="is not between 0 and 1"):
            csprune.truncate(this.readout, this.calibration, "fisher", rank)
    for rank, removes in ((0.01, 0), (0.5 / 32, 0), (0.99, 32)):
        with pytest.raises(InputError, match=f"removes {removes}: .* from 0.031 to 0.96875"):
            csprune.truncate(this.readout, this.calibration, "fisher", rank)
    # What the message offers is possible.
    for rank in (0.031, 0.96875):
        assert csprune.truncate(this.readout, this.calibration, "fisher", rank).rank == rank
    for removed in (-1, 32, 100):
        with pytest.raises(InputError, match=f"removed = {removed} "):
            this.truncate("fisher", removed)
    with pytest.raises(InputError, match="either rank or removed"):
        csprune.truncate(this.readout, this.calibration, "fisher")
    with pytest.raises(InputError, match="either rank or removed"):
        csprune.truncate(this.readout, this.calibration, "fisher", 0.2, removed=3)


def test_a_foreign_calibration_is_refused() -> None:
    this = case("llama")
    with pytest.raises(InputError, match="31 directions and 97 tokens, the model 32 and 97"):
        csprune.truncate(this.readout, case("gpt2").calibration, "fisher", 0.2)
    other = cases.build(tiny.make("llama", seed=1).double())
    with pytest.raises(InputError, match="weights differ"):  # same sizes, other weights
        csprune.truncate(this.readout, other.calibration, "whitened", 0.2)
    # Control: its own is not, whatever the objects are.
    again = csprune.load_readout(this.model)
    copied = dataclasses.replace(this.calibration)
    assert csprune.truncate(again, copied, "whitened", 0.2).removed == 6


def test_overlap_counts_shared_directions() -> None:
    this = case("llama")
    singular, fisher = this.truncate("singular", 9), this.truncate("fisher", 9)
    directions = this.readout.unembedding.directions
    chosen = [
        {int(i) for i in (directions.mT @ each.projection.removed_left).abs().amax(1).gt(0.5).nonzero()}
        for each in (singular, fisher)
    ]
    assert len(chosen[0]) == len(chosen[1]) == 9 and chosen[0] != chosen[1]  # control
    assert csprune.overlap(singular, fisher) == pytest.approx(len(chosen[0] & chosen[1]) / 9)
    # Nested removals contain one another; the share is of the first.
    smaller = this.truncate("whitened", 3)
    larger = this.truncate("whitened", 9)
    assert csprune.overlap(smaller, larger) == pytest.approx(1)
    assert csprune.overlap(larger, smaller) == pytest.approx(3 / 9)


def test_overlap_of_random_subspaces_is_their_share_on_average() -> None:
    this = case("llama")
    singular = this.truncate("singular", 8)
    shares = [csprune.overlap(this.truncate("random", 8, seed), singular) for seed in range(60)]
    # E ||B^T A||^2 / m = n / q for A uniform.
    assert np.mean(shares) == pytest.approx(8 / this.width, abs=0.03) and np.ptp(shares) > 0.02
    with pytest.raises(InputError, match="two readouts"):
        csprune.overlap(singular, case("gpt2").truncate("singular", 8))


def test_no_new_truncation_while_one_is_applied() -> None:
    this = cases.build(tiny.make("llama"))
    truncation = this.truncate("fisher", 4)
    with (
        csprune.apply(this.model, truncation),
        pytest.raises(InputError, match=r"applied .* restore\(\) it"),
    ):
        this.truncate("fisher", 5)
    assert this.truncate("fisher", 5).removed == 5
