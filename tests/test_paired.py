"""Paired statistics: against scipy, against lm-eval's own functions, and what may not be paired."""

from __future__ import annotations

import dataclasses
import math
from math import comb

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from csprune import CspruneError
from csprune.bench.harness import Item
from csprune.bench.paired import (
    DRAWS,
    Difference,
    check_pairs,
    check_value,
    combine,
    compare,
    flips,
    paired_mean,
    replicates,
)
from csprune.bench.tasks import Aggregation

MEAN = Aggregation("mean", lambda values: sum(values) / len(values))


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_models_difference_from_itself_is_nothing() -> None:
    values = random().normal(size=50).tolist()
    assert paired_mean(values, values) == Difference(0.0, 0.0, (0.0, 0.0))
    assert compare("x", MEAN, values, [values]) == [Difference(0.0, 0.0, (0.0, 0.0))]
    middle = Aggregation(None, lambda v: sorted(v)[len(v) // 2])
    assert compare("x", middle, values, [values]) == [Difference(0.0, 0.0, (0.0, 0.0))]
    same = flips([0, 1, 1], [0.0, 1.0, True])
    assert same is not None and (same.gained, same.lost, same.unchanged, same.p_value) == (0, 0, 3, 1.0)


@given(st.integers(0, 10_000), st.integers(2, 200))
def test_a_means_difference_is_the_paired_t_interval(seed: int, items: int) -> None:
    rng = random(seed)
    first = rng.normal(size=items)
    second = first + 0.3 * rng.normal(size=items) + 0.1
    ours = paired_mean(first.tolist(), second.tolist())
    reference = scipy.stats.ttest_rel(second, first)
    low, high = reference.confidence_interval(0.95)
    assert ours.value == pytest.approx(second.mean() - first.mean(), abs=1e-12)
    assert ours.value / ours.stderr == pytest.approx(reference.statistic, rel=1e-9)
    assert ours.interval == pytest.approx((low, high), rel=1e-9, abs=1e-12)


def test_pairing_is_what_makes_it_sharp() -> None:
    """Models that agree on most items: the paired standard error is far below the unpaired one."""
    rng = random(1)
    first = rng.integers(0, 2, 400)
    second = np.where(rng.random(400) < 0.03, 1 - first, first)
    ours = paired_mean(first.tolist(), second.tolist()).stderr
    unpaired = math.hypot(*(each.std(ddof=1) / 20 for each in (first, second)))
    assert 0 < ours < unpaired / 3
    shuffled = paired_mean(first.tolist(), rng.permutation(second).tolist()).stderr
    assert shuffled == pytest.approx(unpaired, rel=0.1)  # control: of other items' answers it is not


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Small differences of correlated right and wrong answers, 1,000 benchmarks of 80 items."""
    rng = random(2)
    held = 0
    for _ in range(1000):
        first = rng.random(80) < 0.7
        second = np.where(first, rng.random(80) < 0.9, rng.random(80) < 0.15)  # truth: 0.675 - 0.7
        low, high = paired_mean(first.tolist(), second.tolist()).interval
        held += low <= -0.025 <= high
    assert 920 <= held <= 975


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 60))
def test_flips_are_counted_and_tested_exactly(gained: int, lost: int, unchanged: int) -> None:
    found = flips([0] * gained + [1] * lost + [1] * unchanged, [1] * gained + [0] * lost + [1] * unchanged)
    assert found is not None and (found.gained, found.lost, found.unchanged) == (gained, lost, unchanged)
    changed = gained + lost
    tail = sum(comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed
    assert found.p_value == pytest.approx(min(1.0, 2 * tail), rel=1e-9)


def test_only_right_and_wrong_flip() -> None:
    assert flips([0.5, 1], [0, 1]) is None
    assert flips([(0, 1), (1, 1)], [(0, 1), (1, 1)]) is None
    assert flips(["a", "b"], ["a", "c"]) is None


def perplexity_items(items: int, seed: int) -> list[list[tuple[float, int]]]:
    """Log-likelihoods of two models, the second a little worse, with the same weights."""
    rng = random(seed)
    weights = rng.integers(3, 40, items)
    first = -rng.gamma(3, 2, items) * weights
    second = first - 0.05 * weights * rng.random(items)
    return [
        [(float(value), int(weight)) for value, weight in zip(values, weights, strict=True)]
        for values in (first, second)
    ]


@pytest.mark.parametrize("name", ["perplexity", "weighted_perplexity", "bits_per_byte"])
def test_perplexities_from_sums_are_lm_evals(name: str) -> None:
    """The same draws through lm-eval's own function, draw by draw."""
    import lm_eval.api.metrics as metrics

    models = perplexity_items(30, seed=3)
    values = models if name != "perplexity" else [[pair[0] / 100 for pair in model] for model in models]
    function = getattr(metrics, name)
    ours = replicates(Aggregation(name, function), values, 40, seed=4)
    theirs = replicates(Aggregation(None, function), values, 40, seed=4)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert len(np.unique(ours[:, 0])) == 40  # control: draws differ


def test_the_bootstrap_pairs_the_models() -> None:
    """Of a mean it finds nearly the closed standard error; drawn apart, several times as much."""
    rng = random(5)
    first = rng.normal(size=300)
    second = first + 0.1 * rng.normal(size=300)
    own_mean = Aggregation(None, lambda v: float(np.mean(v)))
    (found,) = compare("x", own_mean, first.tolist(), [second.tolist()])
    closed = paired_mean(first.tolist(), second.tolist())
    assert found.value == pytest.approx(closed.value, abs=1e-12)
    assert found.stderr == pytest.approx(closed.stderr, rel=0.1)
    assert found.interval == pytest.approx(closed.interval, abs=closed.stderr / 2)
    apart = replicates(own_mean, [second.tolist()], DRAWS, 6) - replicates(
        own_mean, [first.tolist()], DRAWS, 7
    )
    assert apart.std() > 5 * found.stderr


def test_the_seed_decides_the_draws() -> None:
    models = perplexity_items(20, seed=8)
    bits = Aggregation("bits_per_byte", lambda v: -sum(a for a, _ in v) / sum(b for _, b in v) / math.log(2))
    found = [compare("x", bits, models[0], models[1:], seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_what_has_no_standard_error_is_refused() -> None:
    with pytest.raises(CspruneError, match="x has 1 item"):
        compare("x", MEAN, [1], [[0]])
    undefined = Aggregation(None, lambda v: float("nan") if len(set(v)) < 2 else 1.0)
    with pytest.raises(CspruneError, match=r"x is no number in \d+ of 1000 resamplings"):
        compare("x", undefined, [0, 1, 1], [[0, 1, 1]])


def test_items_must_give_the_reported_value() -> None:
    check_value("acc of t", 0.25, 0.25 + 1e-13, 4)
    for reported, again in ((0.25, 0.2501), (math.nan, math.nan), (math.inf, math.inf)):
        with pytest.raises(CspruneError, match=r"lm-eval reports .* for acc of t, but its 4 items give"):
            check_value("acc of t", reported, again, 4)


def test_tasks_combine_as_independent_parts() -> None:
    rng = random(9)
    pieces = [(rng.normal(size=n), rng.normal(size=n) + 0.2) for n in (30, 90)]
    parts = [paired_mean(first.tolist(), second.tolist()) for first, second in pieces]
    by_size = combine(parts, [0.25, 0.75], [30, 90])
    pooled = np.concatenate([second - first for first, second in pieces])
    assert by_size.value == pytest.approx(pooled.mean(), abs=1e-12)
    variances = [np.var(second - first, ddof=1) for first, second in pieces]
    assert by_size.stderr == pytest.approx(math.sqrt((30 * variances[0] + 90 * variances[1]) / 120**2))
    # With weights 1 and -1 it is Welch's t-test of two samples.
    changes = [second - first for first, second in pieces]
    welch = scipy.stats.ttest_ind(*changes, equal_var=False).confidence_interval(0.95)
    assert combine(parts, [1.0, -1.0], [30, 90]).interval == pytest.approx((welch.low, welch.high), rel=1e-9)
    alone = combine(parts[:1], [1.0], [30])
    assert (alone.value, alone.stderr) == pytest.approx((parts[0].value, parts[0].stderr))
    assert alone.interval == pytest.approx(parts[0].interval)
    nothing = Difference(0.0, 0.0, (0.0, 0.0))
    assert combine([nothing, nothing], [0.5, 0.5], [3, 3]) == nothing


def items(count: int = 6) -> list[Item]:
    return [Item(i, "none", (f"d{i}", f"p{i}", f"t{i}"), {"acc": float(i % 2)}) for i in range(count)]


def changed(place: int, **fields: object) -> list[Item]:
    found = items()
    found[place] = dataclasses.replace(found[place], **fields)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (items(5), "1 missing of 6"),
        (items(8), "2 too many of 6"),
        ([*items(5), items()[4]], "1 missing, 1 too many of 6"),
        (items()[::-1], "6 in another order of 6"),
        (changed(1, hashes=("other", "p1", "t1")), "1 of another document of 6"),
        (changed(1, hashes=("d1", "other", "t1")), "1 of another prompt of 6"),
        (changed(1, hashes=("d1", "p1", "other")), "1 of another target of 6"),
        (changed(1, values={"acc": 1.0, "f1": 1.0}), "1 with other metrics of 6"),
        (changed(1, filter="strict"), "1 missing, 1 too many of 6"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_count(other: list[Item], message: str) -> None:
    with pytest.raises(CspruneError, match=rf"out did not answer the same items of task .*\({message}\)"):
        check_pairs("task", items(), other, "out")


def test_pairs_pass_whatever_the_answers() -> None:
    check_pairs("task", items(), changed(1, values={"acc": 0.0}), "out")
    twice = [*items(), items()[0]]
    with pytest.raises(CspruneError, match="1 repeated of 7"):
        check_pairs("task", twice, twice, "out")
