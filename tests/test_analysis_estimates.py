"""Estimates from a sample: what is judged, by which parts of it, and composite statements."""

from __future__ import annotations

import numpy as np
import pytest

from csprune.analysis.estimates import Sample, as_estimate, claim
from csprune.bootstrap import Resampling, difference, ratio
from csprune.statements import Family

DOCUMENTS, SUBSPACES = 60, 4
BLOCKS = np.repeat([1, 2], DOCUMENTS // 2)


def sample(**values: np.ndarray) -> Sample:
    return Sample(values, Resampling(BLOCKS, draws=400))


def normal(mean: float, seed: int, *shape: int) -> np.ndarray:
    return mean + 0.1 * np.random.default_rng(seed).normal(size=shape or (DOCUMENTS,))


def excess(m):
    return difference(m["own"], m["random"])


def test_a_clear_difference_is_established_and_no_difference_is_not() -> None:
    clear = sample(own=normal(1, 0), random=normal(0, 1, SUBSPACES, DOCUMENTS)).judge(excess, 0.0)
    assert clear["established"] and clear["side"] == "above" and clear["null"] == 0
    low, high = clear["ci95"]
    assert low < clear["value"] < high
    same = normal(1, 0)
    none = sample(own=same, random=np.tile(same, (SUBSPACES, 1))).judge(excess, 0.0)
    assert not none["established"] and none["side"] is None and none["value"] == 0


def test_each_part_of_the_rule_can_fail_alone() -> None:
    own, random = normal(1, 0), normal(0, 1, SUBSPACES, DOCUMENTS)
    against = own.copy()
    against[BLOCKS == 2] -= 1.2
    judged = sample(own=against + 0.1, random=random).judge(excess, 0.0)
    assert judged["checks"]["interval"] and not judged["checks"]["blocks"] and not judged["established"]
    half = random.copy()
    half[: SUBSPACES // 2] += 1.5
    judged = sample(own=own, random=half - 0.2).judge(excess, 0.0)
    assert judged["checks"]["interval"] and not judged["checks"]["subspaces"] and not judged["established"]
    # Where random subspaces do not enter, their halves are not looked at.
    judged = sample(own=own, random=half.mean(axis=0) - 0.2).judge(excess, 0.0, random=False)
    assert judged["checks"]["subspaces"] is None and judged["established"]


def test_a_larger_family_asks_for_more() -> None:
    barely = sample(own=normal(0.03, 3), random=np.zeros((SUBSPACES, DOCUMENTS)))
    alone, of_many = barely.judge(excess, 0.0), barely.judge(excess, 0.0, Family(1000, "many"))
    assert alone["adjusted_ci95"][0] > of_many["adjusted_ci95"][0]
    assert alone["ci95"] == of_many["ci95"]


def test_random_values_enter_by_their_mean_over_subspaces() -> None:
    random = normal(2, 4, SUBSPACES, DOCUMENTS)
    found = sample(own=normal(1, 5), random=random).estimate(lambda m: m["random"])
    assert found["value"] == pytest.approx(random.mean())


def test_a_ratio_to_nothing_is_no_figure() -> None:
    found = sample(own=normal(1, 0), random=-normal(1, 1)).judge(lambda m: ratio(m["own"], m["random"]), 1.0)
    assert found["value"] is None and found["ci95"] is None and not found["established"]
    assert as_estimate(None) == {"value": None, "ci95": None}


def test_a_composite_statement_needs_every_part_on_its_side() -> None:
    above = sample(own=normal(1, 0), random=normal(0, 1, SUBSPACES, DOCUMENTS)).judge(excess, 0.0)
    below = sample(own=normal(-1, 0), random=normal(0, 1, SUBSPACES, DOCUMENTS)).judge(excess, 0.0)
    assert claim("both", (above, "above"), (below, "below")).established
    wrong = claim("a wrong side", (above, "above", "this"), (below, "above", "that"))
    assert not wrong.established and wrong.contradicted == ["that"]
    assert claim("both", (above, "above"), (below, "below")).contradicted == []
    assert not claim("a part open", (above, "above"), ({**below, "established": False}, "below")).established
