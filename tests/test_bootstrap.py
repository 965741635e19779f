"""The paired, stratified bootstrap: exactness, agreement with scipy, strata, and coverage."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from csprune.bootstrap import Resampling, Statistic, difference, interval, ratio
from csprune.errors import CspruneError, InputError

DRAWS = 20_000


def two_columns(documents: int, seed: int = 0) -> np.ndarray:
    """Two skewed, strongly correlated positive columns, [documents, 2]."""
    generator = np.random.default_rng(seed)
    shared = generator.gamma(2.0, size=documents)
    noise = generator.gamma(2.0, size=(documents, 2))
    return shared[:, None] * np.array([1.0, 2.0]) + 0.2 * noise


def ends(statistic: Statistic | None) -> np.ndarray:
    """The interval of a statistic that must have one."""
    assert statistic is not None
    found = statistic.interval()
    assert found is not None
    return np.array(found)


# With one draw at a time a matrix product adds up its columns in different orders.
@pytest.mark.parametrize("chunk_counts", [1, 1 << 20])
@pytest.mark.parametrize("columns", [2, 3, 11, 27, 33])
def test_equal_inputs_give_exactly_nothing(columns: int, chunk_counts: int) -> None:
    generator = np.random.default_rng(columns)
    values = generator.gamma(1.0, size=(101, columns))
    values[:, -1] = values[:, 0]
    resampling = Resampling(np.repeat([1, 2], [50, 51]), draws=500, chunk_counts=chunk_counts)
    first, *_, last = resampling.statistics(values)
    assert difference(first, last).value == 0
    assert difference(first, last).interval() == (0, 0)
    same = ratio(first, last)
    assert same is not None and same.value == 1
    assert same.interval() == (1, 1)
    # Control: one document that differs by one part in 10^9 is seen.
    values[7, -1] *= 1 + 1e-9
    first, *_, last = resampling.statistics(values)
    assert difference(first, last).value != 0
    assert np.ptp(ends(difference(first, last))) > 0


def test_agrees_with_scipy_on_one_block() -> None:
    values = two_columns(80)
    first, second = Resampling(np.zeros(80, dtype=int), draws=DRAWS).statistics(values)

    def scipy_interval(statistic, paired: bool = True) -> np.ndarray:
        found = scipy.stats.bootstrap(
            (values[:, 0], values[:, 1]),
            statistic,
            paired=paired,
            method="percentile",
            n_resamples=DRAWS,
            vectorized=True,
            batch=2_000,
            rng=np.random.default_rng(5),
        ).confidence_interval
        return np.array([found.low, found.high])

    def mean_difference(a, b, axis):
        return a.mean(axis=axis) - b.mean(axis=axis)

    def mean_ratio(a, b, axis):
        return a.mean(axis=axis) / b.mean(axis=axis)

    for own, theirs in (
        (difference(first, second), mean_difference),
        (ratio(first, second), mean_ratio),
    ):
        assert own is not None and own.samples is not None
        # Monte-Carlo standard error of a 2.5% quantile of a normal sample: sqrt(p (1-p) / draws)
        # over the density there (0.058 / sd). 4 of these, for a difference of two quantiles.
        tolerance = 4 * np.sqrt(2 * 0.025 * 0.975 / DRAWS) / 0.058 * own.samples.std()
        assert own.value == pytest.approx(theirs(values[:, 0], values[:, 1], axis=0), rel=1e-12)
        assert np.abs(ends(own) - scipy_interval(theirs)).max() < tolerance
        # Controls: unpaired resampling and another level are told apart at this tolerance.
        assert np.abs(ends(own) - scipy_interval(theirs, paired=False)).max() > tolerance
        assert np.abs(ends(own) - np.array(own.interval(0.9))).max() > tolerance


def test_block_effects_have_no_width_only_with_strata() -> None:
    blocks = np.repeat([1, 2], [31, 40])
    values = np.where(blocks == 1, 0.1, 0.7)[:, None]
    (stratified,) = Resampling(blocks, draws=1_000).statistics(values)
    assert stratified.interval() == (stratified.value, stratified.value)
    assert stratified.value == pytest.approx(values.mean(), rel=1e-14)
    (unstratified,) = Resampling(np.zeros_like(blocks), draws=1_000).statistics(values)
    assert np.ptp(ends(unstratified)) > 0.1


def test_a_block_of_one_document_never_varies() -> None:
    values = np.array([[5.0], [1.0], [2.0], [4.0]])
    means = Resampling(np.array([9, 1, 1, 1]), draws=2_000).means(values)
    assert means.min() == pytest.approx((5 + 3 * 1) / 4)
    assert means.max() == pytest.approx((5 + 3 * 4) / 4)


def test_means_are_means_of_multinomial_counts() -> None:
    # The identity as values reads off the counts themselves.
    blocks = np.array([1, 2, 1, 3, 2, 2, 3, 1, 3, 3])
    counts = 10 * Resampling(blocks, draws=DRAWS).means(np.eye(10))
    np.testing.assert_allclose(counts, counts.round(), atol=1e-12)
    for block, size in ((1, 3), (2, 3), (3, 4)):
        own = counts[:, blocks == block]
        np.testing.assert_allclose(own.sum(axis=1), size)
        expected = np.full((size, size), -1 / size) + np.eye(size)
        np.testing.assert_allclose(own.mean(axis=0), 1, atol=5 / np.sqrt(DRAWS))
        np.testing.assert_allclose(np.cov(own.T), expected, atol=10 / np.sqrt(DRAWS))
    # The blocks are drawn independently of each other, those of equal size too.
    between = np.cov(counts.T)[blocks[:, None] != blocks]
    np.testing.assert_allclose(between, 0, atol=5 / np.sqrt(DRAWS))


@pytest.mark.parametrize("chunk_counts", [1, 100, 333, 12_345])
def test_chunks_change_nothing(chunk_counts: int) -> None:
    blocks = np.repeat([1, 2], [23, 30])
    values = two_columns(53)
    whole = Resampling(blocks, draws=997, seed=3).means(values)
    chunked = Resampling(blocks, draws=997, seed=3, chunk_counts=chunk_counts).means(values)
    np.testing.assert_allclose(chunked, whole, rtol=1e-13)
    # Control: other draws are far away.
    other = Resampling(blocks, draws=997, seed=4).means(values)
    assert np.abs(other - whole).max() > 0.1


def test_repeats_to_the_bit_and_changes_no_argument() -> None:
    blocks, values = np.repeat([1, 2], 20), two_columns(40)
    kept = values.copy()
    resampling = Resampling(blocks, draws=300, seed=1)
    assert resampling.means(values).tobytes() == resampling.means(values).tobytes()
    again = Resampling(blocks.copy(), draws=300, seed=1)
    assert resampling.means(values).tobytes() == again.means(values).tobytes()
    np.testing.assert_array_equal(values, kept)


def test_order_of_documents_is_only_noise() -> None:
    values, blocks = two_columns(90), np.repeat([1, 2], 45)
    values[blocks == 2] += 3
    order = np.random.default_rng(2).permutation(90)
    first = ratio(*Resampling(blocks, draws=DRAWS).statistics(values))
    second = ratio(*Resampling(blocks[order], draws=DRAWS).statistics(values[order]))
    assert first is not None and second is not None and first.samples is not None
    assert first.value == pytest.approx(second.value, rel=1e-13)
    tolerance = 4 * np.sqrt(2 * 0.025 * 0.975 / DRAWS) / 0.058 * first.samples.std()
    assert np.abs(ends(first) - ends(second)).max() < tolerance
    # Control: values parted from their documents are not the same statistic.
    parted = Resampling(blocks, draws=DRAWS).statistics(np.stack([values[:, 0], values[order, 1]], axis=1))
    assert np.abs(ends(first) - ends(ratio(*parted))).max() > tolerance


def test_interval_is_of_quantiles() -> None:
    samples = np.arange(1001.0)[::-1]
    assert interval(samples) == pytest.approx((25, 975))
    assert interval(samples, 0.9) == pytest.approx((50, 950))
    for level in (0, 1, 95):
        with pytest.raises(ValueError, match="level"):
            interval(samples, level)


def test_ratio_to_what_is_not_positive() -> None:
    one = Statistic(1.0, np.ones(3))
    assert ratio(one, Statistic(0.0, np.ones(3))) is None
    assert ratio(one, Statistic(-2.0, -np.ones(3))) is None
    assert ratio(None, one) is None
    assert ratio(one, None) is None
    # Positive, but not in every draw: a value without interval, and so is what is made of it.
    unsure = ratio(one, Statistic(2.0, np.array([1.0, 0.0, 2.0])))
    assert unsure is not None and unsure.value == 0.5 and unsure.interval() is None
    further = ratio(one, unsure)
    assert further is not None and further.value == 2 and further.interval() is None
    assert difference(one, unsure).interval() is None
    # Too small to divide by: never infinite.
    assert ratio(Statistic(1e300, np.ones(3)), Statistic(1e-300, np.ones(3))) is None
    tiny = ratio(Statistic(1e300, np.full(3, 1e300)), Statistic(1.0, np.array([1, 1, 1e-300])))
    assert tiny is not None and tiny.interval() is None
    # Control.
    sure = ratio(one, Statistic(2.0, np.array([1.0, 4.0, 2.0])))
    assert sure is not None and sure.interval() is not None


def test_values_that_are_not_finite_are_counted() -> None:
    values = two_columns(10)
    values[3] = np.nan
    values[5, 1] = np.inf
    with pytest.raises(CspruneError, match=r"3 of 20 values .* in 2 of 10 documents and 2 of 2 col"):
        Resampling(np.zeros(10, dtype=int), draws=10).means(values)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="at least 2 of them, not 1"):
        Resampling(np.array([1]))
    # Nothing would vary, and every interval would have no width.
    with pytest.raises(InputError, match="each of the 2 blocks has a single document"):
        Resampling(np.array([1, 2]))
    with pytest.raises(InputError, match="at least 1 draw"):
        Resampling(np.array([1, 1]), draws=0)
    with pytest.raises(InputError, match="seed"):
        Resampling(np.array([1, 1]), seed=-1)
    with pytest.raises(ValueError, match="3 documents"):
        Resampling(np.array([1, 1, 2])).means(np.zeros((2, 1)))


@pytest.mark.slow
def test_coverage() -> None:
    """95% intervals hold the truth 93 to 97 times in 100, of a mean and of a paired ratio."""
    blocks = np.repeat([1, 2], [60, 68])
    block_effect = np.where(blocks == 1, 0.0, 3.0)
    true_mean = 2 + block_effect.mean()
    true_ratio = (true_mean + 0.4) / (2 * true_mean + 0.4)
    simulations = 2_000
    covered = np.zeros(3)
    for simulation in range(simulations):
        generator = np.random.default_rng((17, simulation))
        shared = generator.gamma(2.0, size=128) + block_effect
        noise = 0.2 * generator.gamma(2.0, size=(128, 2))
        values = np.column_stack([shared, shared + noise[:, 0], 2 * shared + noise[:, 1]])
        mean, *pair = Resampling(blocks, draws=1_000, seed=simulation).statistics(values)
        blind, *_ = Resampling(np.zeros(128, dtype=int), draws=1_000, seed=simulation).statistics(
            values[:, :1]
        )
        checks = ((mean, true_mean), (ratio(pair[0], pair[1]), true_ratio), (blind, true_mean))
        for place, (statistic, truth) in enumerate(checks):
            low, high = ends(statistic)
            covered[place] += low <= truth <= high
    mean_covered, ratio_covered, blind_covered = covered / simulations
    assert 0.93 <= mean_covered <= 0.97
    assert 0.93 <= ratio_covered <= 0.97
    # Control: without strata the block effect widens the intervals, and they hold too often.
    assert blind_covered > 0.97


@pytest.mark.parametrize("documents", [2, 7, 40])
def test_the_counts_are_the_draws_of_the_means(documents: int) -> None:
    values = np.random.default_rng(0).normal(size=(documents, 3))
    blocks = np.arange(documents) % 2 if documents > 2 else np.zeros(documents, dtype=int)
    resampling = Resampling(blocks, draws=50, chunk_counts=64)
    counts = np.concatenate(list(resampling.counts()))
    assert counts.shape == (50, documents)
    for label in np.unique(blocks):
        assert (counts[:, blocks == label].sum(axis=1) == (blocks == label).sum()).all()
    np.testing.assert_allclose(counts @ values / documents, resampling.means(values), atol=1e-12)
    assert not np.allclose(counts[::-1] @ values / documents, resampling.means(values))  # control


@pytest.mark.parametrize("documents", [2, 7, 40])
def test_medians_are_those_of_the_drawn_documents(documents: int) -> None:
    values = np.random.default_rng(1).normal(size=(documents, 2)).round(1)  # with ties
    resampling = Resampling(np.zeros(documents, dtype=int), draws=60, chunk_counts=100)
    counts = np.concatenate(list(resampling.counts())).astype(int)
    for column, found in zip(values.T, resampling.medians(values), strict=True):
        assert found.value == np.median(column)
        assert found.samples is not None
        np.testing.assert_allclose(found.samples, [np.median(np.repeat(column, n)) for n in counts])


def test_infinite_values_have_their_place_and_nan_none() -> None:
    values = np.array([[0.0], [1.0], [2.0], [np.inf], [3.0]])
    resampling = Resampling(np.zeros(5, dtype=int), draws=200)
    (found,) = resampling.medians(values)
    assert found.value == 2
    assert found.interval() is None  # some draws have an infinite one
    values[3] = np.nan
    with pytest.raises(CspruneError, match="1 of 5 values have no place in an order"):
        resampling.medians(values)
