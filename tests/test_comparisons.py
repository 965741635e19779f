"""The figures of a report: their schema, plain loops for every one, what is established, what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from evaluations import (
    DOCUMENTS,
    SUBSPACES,
    entry_of,
    make_evaluation,
    make_values,
    replace_values,
    with_checkpoints,
)

from csprune.bootstrap import Resampling, interval
from csprune.comparisons import summarise
from csprune.errors import CspruneError, InputError
from csprune.measurement import QUANTITIES, Evaluation

COMPARISON = ["ratio", "ci95"]
DIFFERENCE = ["difference", "difference_ci95"]
STATEMENT = ["side", "adjusted_ci95", "checks", "established"]


def test_schema() -> None:
    report = summarise(make_evaluation(), draws=200)
    top = ["schema", "model", "protocol", "documents", "base_loss", "base_entropy"]
    assert list(report) == [*top, "truncations", "between_methods", "families"]
    assert report["schema"] == 1
    assert report["model"] == "some/modèl"
    assert report["documents"] == DOCUMENTS
    assert report["protocol"]["positions"] == "all"
    bootstrap = dict(report["protocol"]["bootstrap"])
    assert "established" in bootstrap.pop("rule")
    assert bootstrap == {
        "draws": 200,
        "seed": 0,
        "level": 0.95,
        "documents_by_block": {"1": 10, "2": 14},
    }
    assert list(report["base_loss"]) == list(report["base_entropy"]) == ["mean", "ci95"]
    named = [(e["method"], e["rank"], e["removed"], e["kept"]) for e in report["truncations"]]
    assert named == [
        ("fisher", 0.05, 3, 57),
        ("random", 0.05, 3, 57),
        ("fisher", 0.2, 12, 48),
        ("random", 0.2, 12, 48),
    ]
    keys = ["method", "rank", "removed", "kept", "loss", *QUANTITIES, "vs_random", "per_unit_vs_random"]
    for entry in report["truncations"]:
        assert list(entry) == keys + ["subspaces"] * (entry["method"] == "random")
        assert list(entry["vs_random"]) == list(QUANTITIES)
        assert list(entry["per_unit_vs_random"]) == [
            "fisher_term",
            "prediction_change",
            "loss_change",
        ]
        for name in ("loss", *QUANTITIES):
            low, high = entry[name]["ci95"]
            assert list(entry[name]) == ["mean", "ci95"]
            assert low < entry[name]["mean"] < high
        for comparison in entry["vs_random"].values():
            assert list(comparison) == [*COMPARISON, *DIFFERENCE, *STATEMENT]
        for comparison in entry["per_unit_vs_random"].values():
            assert list(comparison) == [*COMPARISON, *STATEMENT]
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_every_figure_against_plain_loops() -> None:
    evaluation = make_evaluation()
    draws, seed = 60, 4
    report = summarise(evaluation, draws=draws, seed=seed)
    # The draws, read off by resampling the identity: [draws, documents].
    resampling = Resampling(evaluation.blocks, draws=draws, seed=seed)
    counts = (DOCUMENTS * resampling.means(np.eye(DOCUMENTS))).round()

    def total(weights: np.ndarray, values: np.ndarray) -> float:
        result = 0.0
        for document in range(DOCUMENTS):
            if values.ndim == 1:
                result += weights[document] * values[document]
            else:
                for subspace in range(SUBSPACES):
                    result += weights[document] * values[subspace, document] / SUBSPACES
        return result

    every = [np.ones(DOCUMENTS), *counts]
    for own, reference in ((0, 1), (2, 3), (1, 1)):
        method = evaluation.measurements[own]
        entry = entry_of(report, method.method, method.rank)
        mine, random = method.values, evaluation.measurements[reference].values
        for name in QUANTITIES:
            means = [total(weights, mine[name]) / DOCUMENTS for weights in every]
            others = [total(weights, random[name]) / DOCUMENTS for weights in every]
            assert entry[name]["mean"] == pytest.approx(means[0], rel=1e-12)
            if name == "loss_change":
                losses = np.array(means) + [total(w, evaluation.base_loss) / DOCUMENTS for w in every]
                assert entry["loss"]["mean"] == pytest.approx(losses[0], rel=1e-12)
                assert entry["loss"]["ci95"] == pytest.approx(interval(losses[1:]), rel=1e-12)
            assert entry[name]["ci95"] == pytest.approx(interval(np.array(means[1:])), rel=1e-12)
            comparison = entry["vs_random"][name]
            ratios = np.array(means) / np.array(others)
            gaps = np.array(means) - np.array(others)
            assert comparison["ratio"] == pytest.approx(ratios[0], rel=1e-12)
            assert comparison["ci95"] == pytest.approx(interval(ratios[1:]), rel=1e-12)
            assert comparison["difference"] == pytest.approx(gaps[0], abs=1e-9)
            assert comparison["difference_ci95"] == pytest.approx(interval(gaps[1:]), abs=1e-9)
        for name, found in entry["per_unit_vs_random"].items():
            ratios = []
            for weights in every:
                own_rate = total(weights, mine[name]) / total(weights, mine["logit_distance"])
                other = total(weights, random[name]) / total(weights, random["logit_distance"])
                ratios.append(own_rate / other)
            assert found["ratio"] == pytest.approx(ratios[0], rel=1e-12)
            assert found["ci95"] == pytest.approx(interval(np.array(ratios[1:])), rel=1e-12)
            if own != reference:
                # Control: the mean of per-document ratios is another figure.
                per_document = (mine[name] / mine["logit_distance"]).mean() / (
                    (random[name] / random["logit_distance"]).mean()
                )
                assert found["ratio"] != pytest.approx(per_document, rel=1e-2)


def test_random_entry() -> None:
    evaluation = make_evaluation()
    report = summarise(evaluation, draws=100)
    entry = entry_of(report, "random", 0.2)
    for name in QUANTITIES:
        expected = evaluation.measurements[3].values[name].mean(axis=1)
        assert entry["subspaces"][name] == pytest.approx(expected.tolist(), rel=1e-12)
        comparison = entry["vs_random"][name]
        assert {key: comparison[key] for key in (*COMPARISON, *DIFFERENCE)} == {
            "ratio": 1,
            "ci95": [1, 1],
            "difference": 0,
            "difference_ci95": [0, 0],
        }
        assert comparison["side"] is None and not comparison["established"]
    for comparison in entry["per_unit_vs_random"].values():
        assert (comparison["ratio"], comparison["ci95"]) == (1, [1, 1])
        assert comparison["side"] is None and not comparison["established"]


def test_a_method_that_measures_like_random() -> None:
    evaluation = make_evaluation()
    same = {name: values.mean(axis=0) for name, values in evaluation.measurements[1].values.items()}
    entry = entry_of(summarise(replace_values(evaluation, 0, **same), draws=100), "fisher", 0.05)
    assert all(each["ratio"] == 1 for each in entry["vs_random"].values())
    assert all(each["difference_ci95"] == [0, 0] for each in entry["vs_random"].values())
    assert all(each["ci95"] == [1, 1] for each in entry["per_unit_vs_random"].values())


def test_random_that_lowers_the_loss_gives_null() -> None:
    evaluation = make_evaluation()
    lower = -np.abs(evaluation.measurements[1].values["loss_change"])
    report = summarise(replace_values(evaluation, 1, loss_change=lower), draws=100)
    entry = entry_of(report, "fisher", 0.05)
    comparison = entry["vs_random"]["loss_change"]
    assert comparison["ratio"] is None and comparison["ci95"] is None
    assert comparison["difference"] > 0 and comparison["difference_ci95"][0] > 0
    undefined = entry["per_unit_vs_random"]["loss_change"]
    assert undefined["ratio"] is undefined["ci95"] is undefined["side"] is undefined["adjusted_ci95"] is None
    assert not undefined["established"]
    assert entry["per_unit_vs_random"]["fisher_term"]["ci95"] is not None
    json.dumps(report, allow_nan=False)
    # Just positive on average, but not in every draw: a ratio without interval.
    values = np.where(np.arange(DOCUMENTS) % 2 == 0, 1.0, -0.9) + np.zeros((SUBSPACES, 1))
    report = summarise(replace_values(evaluation, 1, loss_change=values), draws=100)
    comparison = entry_of(report, "fisher", 0.05)["vs_random"]["loss_change"]
    assert comparison["ratio"] > 0 and comparison["ci95"] is None


def test_nothing_changed_gives_null_per_unit() -> None:
    zero = {name: np.zeros(DOCUMENTS) for name in QUANTITIES}
    report = summarise(replace_values(make_evaluation(), 0, **zero), draws=100)
    entry = entry_of(report, "fisher", 0.05)
    assert entry["vs_random"]["fisher_term"]["ratio"] == 0
    per_unit = entry["per_unit_vs_random"]["fisher_term"]
    assert per_unit["ratio"] is per_unit["ci95"] is None and not per_unit["established"]


def test_values_that_are_not_finite_are_counted() -> None:
    values = make_evaluation().measurements[1].values["fisher_term"].copy()
    values[0, 3] = np.nan
    values[2, 3] = np.inf
    values[2, 5] = -np.inf
    evaluation = replace_values(make_evaluation(), 1, fisher_term=values)
    message = r"in 2 of 24 documents \(fisher_term of random at rank 0.05: 1 NaN and 2 infinite\)"
    with pytest.raises(CspruneError, match=message):
        summarise(evaluation)


def test_bad_input() -> None:
    evaluation = make_evaluation()
    with pytest.raises(InputError, match=r"fisher at rank 0\.05 has no random truncation of 3 dir"):
        summarise(dataclasses.replace(evaluation, measurements=evaluation.measurements[::2]))
    with pytest.raises(InputError, match=r"fisher at rank 0\.05 is there 2 times"):
        dataclasses.replace(evaluation, measurements=[evaluation.measurements[0]] * 2)
    with pytest.raises(InputError, match=r"loss_change of random .* shape \(24,\)"):
        replace_values(evaluation, 1, **make_values(np.random.default_rng(0), (DOCUMENTS,)))
    with pytest.raises(InputError, match=r"fisher_term of fisher .* float32"):
        replace_values(evaluation, 0, fisher_term=np.zeros(DOCUMENTS, dtype=np.float32))
    with pytest.raises(InputError, match="quantities"):
        replace_values(evaluation, 0, other=np.zeros(DOCUMENTS))
    with pytest.raises(InputError, match="blocks"):
        dataclasses.replace(evaluation, blocks=evaluation.blocks[1:])
    one = Evaluation("m", {}, ("a",), np.array([1]), np.zeros(1), np.zeros(1), [])
    with pytest.raises(InputError, match="at least 2"):
        summarise(one)


def shifted(evaluation: Evaluation, place: int, **shifts: np.ndarray | float) -> Evaluation:
    """A measurement that is random's of the same rank plus something."""
    random = evaluation.measurements[place + 1]
    return replace_values(
        evaluation, place, **{name: random.per_document(name) + shift for name, shift in shifts.items()}
    )


def test_a_difference_on_every_side_is_established() -> None:
    evaluation = shifted(make_evaluation(), 0, loss_change=-0.5, fisher_term=0.5)
    versus = entry_of(summarise(evaluation, draws=200), "fisher", 0.05)["vs_random"]
    assert (versus["loss_change"]["side"], versus["fisher_term"]["side"]) == ("below", "above")
    for name in ("loss_change", "fisher_term"):
        assert versus[name]["established"] and all(versus[name]["checks"].values())


def test_one_block_against_the_others_is_not_established() -> None:
    evaluation = make_evaluation()
    random = evaluation.measurements[1].values["loss_change"]
    evaluation = replace_values(evaluation, 1, loss_change=np.tile(random.mean(axis=0), (SUBSPACES, 1)))
    low = np.where(evaluation.blocks == 1, 0.001, -0.5)
    versus = entry_of(summarise(shifted(evaluation, 0, loss_change=low), draws=200), "fisher", 0.05)[
        "vs_random"
    ]
    found = versus["loss_change"]
    assert found["side"] == "below" and found["adjusted_ci95"][1] < 0
    assert found["checks"] == {"interval": True, "halves_of_draws": True, "blocks": False, "subspaces": True}
    assert not found["established"]


def test_one_half_of_the_subspaces_against_the_others_is_not_established() -> None:
    evaluation = make_evaluation()
    random = evaluation.measurements[1].values["loss_change"].copy()
    random[:] = random.mean(axis=0)
    random[0] -= 1.0  # of three subspaces the first is half a half by itself, the two others the other one
    evaluation = replace_values(evaluation, 1, loss_change=random)
    own = random[1:].mean(axis=0) - 0.6
    found = entry_of(summarise(replace_values(evaluation, 0, loss_change=own), draws=200), "fisher", 0.05)
    checks = found["vs_random"]["loss_change"]["checks"]
    assert checks == {"interval": True, "halves_of_draws": True, "blocks": True, "subspaces": False}
    # Control: against the mean of all three alone it would be.
    assert found["vs_random"]["loss_change"]["side"] == "below"


def test_one_subspace_or_one_block_establishes_nothing() -> None:
    evaluation = shifted(make_evaluation(), 0, loss_change=-0.5)
    measurements = [
        dataclasses.replace(each, values={name: values[:1] for name, values in each.values.items()})
        if each.method == "random"
        else each
        for each in evaluation.measurements
    ]
    one = dataclasses.replace(evaluation, measurements=measurements)
    found = entry_of(summarise(one, draws=50), "fisher", 0.05)["vs_random"]["loss_change"]
    assert found["checks"]["subspaces"] is False and not found["established"]
    one = dataclasses.replace(evaluation, blocks=np.ones(DOCUMENTS, dtype=np.int64))
    found = entry_of(summarise(one, draws=50), "fisher", 0.05)["vs_random"]["loss_change"]
    assert found["checks"]["blocks"] is False and not found["established"]


def test_families_widen_the_intervals() -> None:
    methods = ("singular", "fisher", "whitened", "random")
    report = summarise(make_evaluation(methods=methods), draws=2000)
    families = report["families"]
    assert families["vs_random"]["comparisons"] == families["per_unit_vs_random"]["comparisons"] == 6
    assert families["between_methods"]["comparisons"] == 6 == len(report["between_methods"])
    assert families["vs_random"]["level"] == pytest.approx(1 - 0.05 / 6)
    for entry in report["truncations"]:
        if entry["method"] != "random":
            found = entry["vs_random"]["loss_change"]
            low, high = found["difference_ci95"]
            assert found["adjusted_ci95"][0] < low and high < found["adjusted_ci95"][1]


def test_methods_are_compared_pair_by_pair() -> None:
    evaluation = make_evaluation(methods=("singular", "random", "fisher", "whitened"))
    report = summarise(evaluation, draws=200)
    pairs = [(each["rank"], each["first"], each["second"]) for each in report["between_methods"]]
    expected = [("singular", "fisher"), ("singular", "whitened"), ("fisher", "whitened")]
    assert pairs == [(rank, *pair) for rank in (0.05, 0.2) for pair in expected]
    found = report["between_methods"][1]
    gap = evaluation.measurements[0].values["loss_change"] - evaluation.measurements[3].values["loss_change"]
    assert found["difference"] == pytest.approx(gap.mean(), rel=1e-9)
    (statistic,) = Resampling(evaluation.blocks, draws=200).statistics(gap[:, None])
    assert found["difference_ci95"] == pytest.approx(statistic.interval(), rel=1e-9)
    assert found["checks"]["subspaces"] is None  # random subspaces do not enter


def test_checkpoints_stand_beside_their_truncation() -> None:
    evaluation = with_checkpoints(make_evaluation())
    report = summarise(evaluation, draws=200)
    same, other = report["checkpoints"]
    assert (same["name"], same["method"], same["rank"]) == ("fisher-0.05", "fisher", 0.05)
    assert same["same_calibration"] and same["dtype"] == "float32"
    first = evaluation.measurements[0].values
    for name in QUANTITIES:
        mine = evaluation.checkpoints[0].measurement.values[name]
        assert same[name]["mean"] == pytest.approx(mine.mean(), rel=1e-12)
        assert same["in_memory"][name]["mean"] == pytest.approx(first[name].mean(), rel=1e-12)
        assert same["in_memory"][name]["difference"] == pytest.approx((mine - first[name]).mean(), rel=1e-9)
    # A random checkpoint is one subspace: the mean of several is not its counterpart.
    assert other["in_memory"] is None and not other["same_calibration"]
    # Control: without checkpoints there is no such part.
    assert "checkpoints" not in summarise(make_evaluation(), draws=50)
    with pytest.raises(InputError, match="fisher-0.05 is there 2 times"):
        dataclasses.replace(evaluation, checkpoints=evaluation.checkpoints[:1] * 2)


def test_a_block_of_one_document_is_no_second_look() -> None:
    evaluation = shifted(make_evaluation(), 0, loss_change=-0.5)
    blocks = np.where(np.arange(DOCUMENTS) == 0, 1, 2)
    found = entry_of(summarise(dataclasses.replace(evaluation, blocks=blocks), draws=50), "fisher", 0.05)
    checks = found["vs_random"]["loss_change"]["checks"]
    assert checks == {"interval": True, "halves_of_draws": True, "blocks": False, "subspaces": True}
