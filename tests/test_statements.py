"""The paper's rule for a directional statement, condition by condition."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from csprune.bootstrap import Resampling, Statistic, difference
from csprune.errors import InputError
from csprune.statements import Family, statement

ONE = Family(1, "one comparison")
NORMAL = np.random.default_rng(0).normal(size=4000)


def point(value: float) -> Statistic:
    return Statistic(value, None)


def judged(statistic: Statistic | None, null: float = 0, family: Family = ONE, **options) -> dict:
    settings = {"blocks": [point(1.0), point(1.0)], "halves": [point(1.0), point(1.0)], **options}
    return statement(statistic, null, family, **settings)


CLEAR = Statistic(1.0, 1.0 + 0.1 * NORMAL)


def test_everything_on_one_side_is_established() -> None:
    found = judged(CLEAR)
    assert found["side"] == "above" and found["established"]
    mirrored = Statistic(-1.0, -CLEAR.samples)  # type: ignore[operator]
    below = [point(-1.0)] * 2
    found = judged(mirrored, blocks=below, halves=below)
    assert found["side"] == "below" and found["established"]
    # Against another null value it is the other side's.
    assert judged(CLEAR, null=2.0, blocks=below, halves=below)["side"] == "below"


@pytest.mark.parametrize(
    ("check", "options"),
    [
        ("blocks", {"blocks": [point(1.0), point(-1e-9)]}),
        ("blocks", {"blocks": [point(1.0), point(0.0)]}),
        ("blocks", {"blocks": [point(1.0), None]}),
        ("blocks", {"blocks": [point(1.0)]}),
        ("subspaces", {"halves": [point(-0.1), point(1.0)]}),
        ("subspaces", {"halves": []}),
    ],
)
def test_each_condition_alone_undoes_it(check: str, options: dict) -> None:
    found = judged(CLEAR, **options)
    assert not found["established"]
    assert [name for name, held in found["checks"].items() if held is False] == [check]


def test_a_half_of_the_draws_alone_undoes_it() -> None:
    # One draw in 40 is at most in the tails: all of those below 0 are in the second half.
    samples = np.ones(4000)
    samples[-80:] = -1.0
    found = judged(Statistic(1.0, samples))
    assert found["checks"]["interval"] and not found["checks"]["halves_of_draws"]
    assert not found["established"]


def test_the_interval_must_clear_the_null_value() -> None:
    found = judged(Statistic(0.1, 0.1 + 0.1 * NORMAL))
    assert found["side"] == "above" and not found["checks"]["interval"] and not found["established"]


def test_a_family_asks_for_more() -> None:
    # 2.5 standard errors from 0: alone it is established, among twenty it is not.
    statistic = Statistic(0.25, 0.25 + 0.1 * NORMAL)
    assert judged(statistic)["established"]
    found = judged(statistic, family=Family(20, "twenty comparisons"))
    assert not found["established"] and found["adjusted_ci95"][0] < 0
    assert Family(20, "x").level == pytest.approx(0.9975)
    with pytest.raises(InputError, match="at least 1"):
        Family(0, "none")


def test_nothing_is_said_of_what_is_undefined_or_nothing() -> None:
    for statistic in (None, Statistic(0.0, NORMAL), Statistic(0.0, np.zeros(100))):
        found = judged(statistic)
        assert found["side"] is None and not found["established"]
    # Without draws (a ratio undefined in some) the side is seen, never established.
    found = judged(point(1.0))
    assert found["side"] == "above" and found["adjusted_ci95"] is None and not found["established"]


def test_subspaces_that_do_not_enter_are_no_condition() -> None:
    found = judged(CLEAR, halves=None)
    assert found["checks"]["subspaces"] is None and found["established"]


@pytest.mark.slow
@pytest.mark.parametrize("comparisons", [1, 12])
def test_false_statements_are_rare(comparisons: int) -> None:
    """Where nothing differs, one side or the other is established in at most the family's share of 5%."""
    family, rounds = Family(comparisons, "simulated"), 1500
    generator = np.random.default_rng(comparisons)
    blocks = np.repeat([1, 2], 60)
    false = 0
    for seed in range(rounds):
        values = generator.gamma(2.0, size=(120, 2))
        first, second = Resampling(blocks, draws=1000, seed=seed).statistics(values)
        of_blocks = [point(float(np.diff(values[blocks == b].mean(axis=0))[0])) for b in (1, 2)]
        gap = difference(second, first)
        false += judged(gap, family=family, blocks=of_blocks, halves=None)["established"]
        # Control: with a real difference of one standard deviation it is always seen.
        if seed < 20:
            moved = dataclasses.replace(gap, value=gap.value + 1.4, samples=gap.samples + 1.4)
            shifted = [point(each.value + 1.4) for each in of_blocks]
            assert judged(moved, family=family, blocks=shifted, halves=None)["established"]
    assert false / rounds <= 0.05 / comparisons + 3 * np.sqrt(0.05 / comparisons / rounds)
