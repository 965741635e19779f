"""Streaming sums: any chunking, any order; the variance of nearly certain predictions."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csprune.accumulators import FisherSums, Moments, direction_moments

Q, V = 7, 41
CPU = torch.device("cpu")


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Tokens:
    """States, predictions and slopes of a few tokens, float64."""

    def __init__(self, count: int, seed: int, capped: bool) -> None:
        self.u = gaussian(count, Q, seed=seed)
        self.p = torch.softmax(3 * gaussian(count, V, seed=seed + 1), 1)
        self.slope = torch.sigmoid(gaussian(count, V, seed=seed + 2)) if capped else None
        self.directions = torch.linalg.qr(gaussian(Q, Q, seed=5)).Q
        self.mapped = gaussian(V, Q, seed=6)

    def sums(self, rows: slice) -> tuple[Moments, FisherSums]:
        moments, fisher = Moments.zeros(Q, CPU), FisherSums.zeros(Q, V, CPU)
        if len(self.u[rows]):
            moments.update(self.u[rows])
            slope = None if self.slope is None else self.slope[rows]
            fisher.update(self.u[rows], self.directions, self.p[rows], slope, self.mapped)
        return moments, fisher


def same(a: Moments | FisherSums, b: Moments | FisherSums) -> bool:
    pairs = zip(a.tensors().values(), b.tensors().values(), strict=True)
    return all(torch.allclose(x.double(), y.double(), rtol=1e-12, atol=1e-12) for x, y in pairs)


@given(
    count=st.integers(1, 80),
    seed=st.integers(0, 100),
    capped=st.booleans(),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_any_chunking_and_merge_order_is_one_shot(
    count: int, seed: int, capped: bool, cuts: list[int], order: random.Random
) -> None:
    tokens = Tokens(count, seed, capped)
    edges = [0, *sorted(min(c, count) for c in cuts), count]
    chunks = [tokens.sums(slice(a, b)) for a, b in itertools.pairwise(edges)]
    order.shuffle(chunks)
    moments, fisher = chunks[0]
    for more_moments, more_fisher in chunks[1:]:
        moments.merge(more_moments)
        fisher.merge(more_fisher)
    whole_moments, whole_fisher = tokens.sums(slice(None))
    assert same(moments, whole_moments) and same(fisher, whole_fisher)
    assert int(moments.count) == int(fisher.count) == count
    # Control: one token counted twice is seen.
    again_moments, again_fisher = tokens.sums(slice(0, 1))
    moments.merge(again_moments)
    fisher.merge(again_fisher)
    assert not same(moments, whole_moments) and not same(fisher, whole_fisher)


def test_updating_in_chunks_is_merging() -> None:
    tokens = Tokens(70, 3, capped=True)
    assert tokens.slope is not None
    moments, fisher = Moments.zeros(Q, CPU), FisherSums.zeros(Q, V, CPU)
    for part in torch.arange(70).split(33):
        moments.update(tokens.u[part])
        fisher.update(tokens.u[part], tokens.directions, tokens.p[part], tokens.slope[part], tokens.mapped)
    whole_moments, whole_fisher = tokens.sums(slice(None))
    assert same(moments, whole_moments) and same(fisher, whole_fisher)


def test_merging_leaves_the_other_sums_alone() -> None:
    a, b = Tokens(5, 1, False).sums(slice(None))[1], Tokens(5, 2, False).sums(slice(None))[1]
    before = {k: v.clone() for k, v in b.tensors().items()}
    a.merge(b)
    assert all(torch.equal(before[k], v) for k, v in b.tensors().items())
    a.merge(b)
    assert all(torch.equal(before[k], v) for k, v in b.tensors().items())


@pytest.mark.parametrize("capped", [False, True])
def test_every_sum_is_its_definition(capped: bool) -> None:
    t = Tokens(9, 4, capped)
    moments, fisher = t.sums(slice(None))
    expected = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in fisher.tensors().items()}
    for i in range(9):
        j = torch.ones(V).double() if t.slope is None else t.slope[i]
        jz = j[:, None] * t.mapped
        information = jz.mT @ (torch.diag(t.p[i]) - torch.outer(t.p[i], t.p[i])) @ jz
        x, mean = t.directions.mT @ t.u[i], jz.mT @ t.p[i]
        expected["count"] += 1
        expected["state"] += t.u[i]
        expected["probability"] += t.p[i] * j**2
        expected["outer"] += torch.outer(mean, mean)
        expected["variance"] += information.diagonal()
        expected["variance_state"] += x * information.diagonal()
        expected["variance_state2"] += x**2 * information.diagonal()
    for key, value in fisher.tensors().items():
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(moments.outer, sum(torch.outer(u, u) for u in t.u), rtol=1e-12, atol=1e-12)
    # Control: without J the variances are others.
    if capped:
        _, plain = direction_moments(t.p, None, t.mapped)
        assert not torch.allclose(plain.sum(0), fisher.variance, rtol=0.1)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("rest", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9])
def test_the_variance_of_a_nearly_certain_prediction_is_exact_in_float32(rest: float, capped: bool) -> None:
    vocabulary, width, tokens = 20_000, 16, 6  # several blocks of the vocabulary
    tail = torch.softmax(2 * gaussian(tokens, vocabulary, seed=1), 1)
    top = torch.randint(vocabulary, (tokens, 1), generator=torch.Generator().manual_seed(2))
    p64 = (tail * rest).scatter(1, top, 0.0)
    p64.scatter_(1, top, 1 - p64.sum(1, keepdim=True))
    mapped = gaussian(vocabulary, width, seed=3).float()
    slope = torch.sigmoid(gaussian(tokens, vocabulary, seed=4)).float() if capped else None
    p = p64.float()

    jz = mapped.double() if slope is None else slope.double()[:, :, None] * mapped.double()
    mean = (p64[:, :, None] * jz).sum(1)
    variance = (p64[:, :, None] * (jz - mean[:, None]) ** 2).sum(1)

    found_mean, found = direction_moments(p, slope, mapped)
    assert found.dtype == found_mean.dtype == torch.float64
    torch.testing.assert_close(found, variance, rtol=1e-5, atol=0)
    torch.testing.assert_close(found_mean, mean, rtol=0, atol=1e-6)

    # Control: the plain formula in float32 loses everything.
    jp, j2p = (p, p) if slope is None else (p * slope, p * slope**2)
    naive = j2p @ mapped.square() - (jp @ mapped).square()
    error = float(((naive.double() - variance) / variance).abs().max())
    assert error > (1e-5 if rest > 1e-5 else 1e-3 if rest > 1e-7 else 0.1)


def test_a_certain_prediction_has_no_variance() -> None:
    p = torch.zeros(2, V)
    p[:, 3] = 1.0
    mapped = gaussian(V, Q, seed=0).float()
    mean, variance = direction_moments(p, None, mapped)
    assert torch.equal(variance, torch.zeros(2, Q).double())
    assert torch.equal(mean, mapped[[3, 3]].double())
    p[:, 3:5] = 0.5  # Control
    assert bool((direction_moments(p, None, mapped)[1] > 0).all())
