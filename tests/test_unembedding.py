"""The folded and the centred map of every architecture, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch

import csprune.unembedding
from csprune.linalg import row_blocks
from csprune.unembedding import LogitTransform, Unembedding


def unembedding(p: tiny.Parts, dtype: torch.dtype = torch.float64) -> Unembedding:
    beta = torch.zeros_like(p.gamma) if p.beta is None else p.beta
    bias = None if p.bias is None else p.bias.to(dtype)
    transform = LogitTransform(p.factor, p.cap)
    return Unembedding(p.weight.to(dtype), bias, p.gamma, beta, p.kind == "layernorm", transform)


def fold(p: tiny.Parts, **changed: Any) -> oracle.Folded:
    arguments = {"gamma": p.gamma, "beta": p.beta, "factor": p.factor, "cap": p.cap, **changed}
    return oracle.fold(p.weight, p.bias, kind=p.kind, **arguments)


def rotation(found: Unembedding, folded: oracle.Folded) -> np.ndarray:
    """Q [q, q] with `u = Q u_oracle`: both bases span the same space, each in its own way."""
    basis = found.lift(torch.eye(found.width, dtype=torch.float64)).mT.numpy()
    return basis.T @ folded.basis


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten blocks of the vocabulary, the last one shorter."""
    monkeypatch.setattr(csprune.unembedding, "row_blocks", lambda rows: row_blocks(rows, 10))


@pytest.fixture(scope="module", params=tiny.KINDS)
def parts(request: pytest.FixtureRequest) -> tiny.Parts:
    return tiny.parts(tiny.make(request.param))


def states(p: tiny.Parts, folded: oracle.Folded, count: int = 20) -> np.ndarray:
    residual = np.random.default_rng(0).normal(size=(count, tiny.WIDTH)) + 0.3
    return oracle.states(residual, p.kind, p.eps)


def test_both_maps_are_the_oracles_in_another_basis(parts: tiny.Parts) -> None:
    found, folded = unembedding(parts), fold(parts)
    q = rotation(found, folded)
    everything = slice(None)
    assert found.width == tiny.WIDTH - (parts.kind == "layernorm") == folded.weight.shape[1]
    np.testing.assert_allclose(q @ q.T, np.eye(found.width), atol=1e-13)
    np.testing.assert_allclose(found.folded(everything).numpy() @ q, folded.uncentred, atol=1e-12)
    np.testing.assert_allclose(found.centred(everything).numpy() @ q, folded.weight, atol=1e-12)
    np.testing.assert_allclose(found.constant.numpy(), folded.constant, atol=1e-12)
    np.testing.assert_allclose(q.T @ found.gram.numpy() @ q, folded.weight.T @ folded.weight, atol=1e-10)
    # Control: a forgotten gain is seen.
    wrong = fold(parts, gamma=None)
    assert np.abs(found.folded(everything).numpy() @ q - wrong.uncentred).max() > 0.1


def test_singular_values_and_directions(parts: tiny.Parts) -> None:
    found, folded = unembedding(parts), fold(parts)
    sigma, v = oracle.directions(folded.weight)
    np.testing.assert_allclose(found.singular_values.numpy(), sigma, rtol=1e-9)
    overlap = np.abs((rotation(found, folded).T @ found.directions.numpy()).T @ v)
    np.testing.assert_allclose(overlap, np.eye(found.width), atol=1e-7)
    mapped = found.along(found.directions, torch.float64)
    np.testing.assert_allclose(mapped.norm(dim=0).numpy(), sigma, rtol=1e-9)
    # Control: without centring (or, under a cap, with it) the singular values are others.
    other = folded.uncentred * parts.factor
    if parts.cap is not None:
        other = other - other.mean(0)
    assert np.abs(oracle.directions(other)[0] / sigma - 1).max() > 1e-4


def test_centring_changes_no_probability_and_is_left_out_under_a_cap(parts: tiny.Parts) -> None:
    found = unembedding(parts)
    mean = found.centred(slice(None)).mean(0)
    if parts.cap is None:
        torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-14)
    else:
        assert float(mean.norm()) > 1e-3
        assert torch.equal(found.centred(slice(None)), found.folded(slice(None)))
    assert float(found.folded(slice(None)).mean(0).norm()) > 1e-3  # Control: it had a mean.


def test_logits_are_the_oracles(parts: tiny.Parts) -> None:
    found, folded = unembedding(parts), fold(parts)
    u = states(parts, folded)
    ours = torch.from_numpy(u @ rotation(found, folded).T)
    expected = oracle.after_cap(folded, oracle.before_cap(folded, u))
    np.testing.assert_allclose(found.logits(ours).numpy(), expected, atol=1e-11)
    low = unembedding(parts, torch.bfloat16)
    logits = low.logits(ours)
    # The head is rounded to bfloat16, the product is not rounded again.
    assert low.compute_dtype == logits.dtype == torch.float32
    rounded = oracle.fold(
        low.weight.double(),
        None if low.bias is None else low.bias.double(),
        parts.gamma,
        parts.beta,
        parts.kind,
        factor=parts.factor,
        cap=parts.cap,
    )
    expected = oracle.after_cap(rounded, oracle.before_cap(rounded, u))
    np.testing.assert_allclose(logits.numpy(), expected, atol=2e-5)
    cast_after = logits.bfloat16().double().numpy()  # Control
    assert np.abs(cast_after - expected).max() > 1e-3


def test_a_weighted_gram_matrix(parts: tiny.Parts) -> None:
    found, folded = unembedding(parts), fold(parts)
    weights = torch.rand(found.vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q = rotation(found, folded)
    expected = folded.weight.T @ np.diag(weights.numpy()) @ folded.weight
    np.testing.assert_allclose(q.T @ found.weighted_gram(weights).numpy() @ q, expected, atol=1e-11)
    assert np.abs(q.T @ found.gram.numpy() @ q - expected).max() > 0.1  # Control: weights matter.


def test_the_uncentred_image_of_vectors(parts: tiny.Parts) -> None:
    found = unembedding(parts)
    vectors = torch.randn(found.width, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    image = found.folded_along(vectors, torch.float32)
    assert image.dtype == torch.float32
    expected = (found.folded(slice(None)) @ vectors).float()
    torch.testing.assert_close(image, expected, rtol=1e-6, atol=1e-6)
    if parts.cap is None:  # Control: the centred one differs.
        assert not torch.allclose(found.along(vectors, torch.float32), expected, atol=1e-3)


def test_layer_norm_states_are_coordinates_of_the_complement_of_ones() -> None:
    found = unembedding(tiny.parts(tiny.make("gpt2")))
    z = torch.randn(5, 7, tiny.WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    centred = z - z.mean(-1, keepdim=True)
    u = found.state(z)
    assert u.shape == (5, 7, tiny.WIDTH - 1)
    torch.testing.assert_close(found.lift(u), centred, rtol=0, atol=1e-13)
    torch.testing.assert_close(found.state(found.lift(u)), u, rtol=0, atol=1e-13)
    torch.testing.assert_close(u.norm(dim=-1), centred.norm(dim=-1), rtol=1e-13, atol=0)
    assert float((found.lift(u) - z).abs().max()) > 1e-3  # Control: the mean is gone.
    root_mean_square = unembedding(tiny.parts(tiny.make("llama")))
    assert root_mean_square.state(z) is z and root_mean_square.lift(z) is z


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(scale=0.3), LogitTransform(cap=2.5)])
def test_the_slope_is_the_transforms_derivative(transform: LogitTransform) -> None:
    x = torch.linspace(-6, 6, 41, dtype=torch.float64, requires_grad=True)
    logits = transform(x)
    (derivative,) = torch.autograd.grad(logits.sum(), x)
    slope = transform.slope(logits.detach())
    if transform.cap is None:
        assert slope is None and bool((derivative == transform.scale).all())
    else:
        torch.testing.assert_close(slope, derivative, rtol=0, atol=1e-14)
        at_input = transform.slope(x.detach())  # Control: it is a function of the capped logits.
        assert at_input is not None and float((at_input - derivative).abs().max()) > 0.1
