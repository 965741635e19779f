"""`evaluate` against the oracle, on every kind of model; what must not matter; what is refused."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import tiny
import torch

import csprune
from csprune import CspruneError, Evaluation, InputError, changes, evaluation
from csprune.linalg import haar_columns
from csprune.measurement import QUANTITIES

# RMSNorm; LayerNorm; RMSNorm, gain - 1 and a soft cap; LayerNorm and a logit scale.
KINDS = ("llama", "gpt2", "gemma2", "cohere")
SIZES = (2, 7)
SUBSPACES = 3


@cache
def case(
    kind: str, dtype: torch.dtype = torch.float64, positions: str = "all", skip_first: int = 0
) -> cases.Case:
    return cases.build(tiny.make(kind).to(dtype), positions=positions, skip_first=skip_first)


def run(this: cases.Case, truncations: list[csprune.Truncation] | None = None, **options: Any) -> Evaluation:
    if truncations is None:
        truncations = [this.truncate(method, m) for m in SIZES for method in oracle.METHODS]
    settings = {
        "positions": this.positions,
        "skip_first": this.skip_first,
        "random_subspaces": SUBSPACES,
        "batch_size": 4,  # does not divide the number of documents
        **options,
    }
    return csprune.evaluate(this.model, this.held_out, truncations, **settings)


def compare(found: Evaluation, expected: Evaluation, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    np.testing.assert_allclose(found.base_loss, expected.base_loss, rtol=rtol)
    assert len(found.measurements) == len(expected.measurements)
    for mine, other in zip(found.measurements, expected.measurements, strict=True):
        assert (mine.method, mine.rank, mine.removed, mine.kept) == (
            other.method,
            other.rank,
            other.removed,
            other.kept,
        )
        for name in QUANTITIES:
            np.testing.assert_allclose(mine.values[name], other.values[name], rtol=rtol, atol=atol)


def compare_with_oracle(this: cases.Case, found: Evaluation, rtol: float, atol: float) -> None:
    labels, projections = [], []
    for each in found.measurements:
        if each.method != "random":
            labels.append((each, None))
            projections.append(this.oracle_projection(each.method, each.removed))
            continue
        for seed in range(SUBSPACES):
            basis = haar_columns(this.width, each.removed, seed).numpy()
            labels.append((each, seed))
            projections.append(this.oracle_projection("random", each.removed, basis))
    expected = this.oracle_values(projections)
    np.testing.assert_allclose(found.base_loss, expected[0]["loss"], rtol=rtol)
    np.testing.assert_allclose(found.base_entropy, expected[0]["entropy"], rtol=rtol)
    assert np.abs(found.base_entropy - found.base_loss).max() > 0.01  # control: it is not the loss
    for (measurement, seed), values in zip(labels, expected, strict=True):
        for name in QUANTITIES:
            mine = measurement.values[name]
            np.testing.assert_allclose(
                mine if seed is None else mine[seed],
                values[name],
                rtol=rtol,
                atol=atol,
                err_msg=f"{name} of {measurement.name}",
            )
    # Control: it is not that all methods are alike, or all documents.
    changes = np.array([m.per_document("loss_change") for m in found.measurements])
    assert np.abs(np.diff(changes, axis=0)).max(axis=1).min() > 1e-3
    assert changes.std(axis=1).min() > 1e-4


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_four_methods_and_random_are_the_oracles(kind: str) -> None:
    this = case(kind)
    found = run(this)
    named = [(m.method, m.removed) for m in found.measurements]
    assert sorted(named) == sorted((name, m) for m in SIZES for name in (*oracle.METHODS, "random"))
    compare_with_oracle(this, found, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_float32_models_are_measured_to_float32(kind: str) -> None:
    """Judged by a float64 oracle on the same float32 model's residuals."""
    this = case(kind, torch.float32)
    compare_with_oracle(this, run(this), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("positions", "skip_first"), [("last", 0), ("all", 5), ("last", 5)])
def test_positions(kind: str, positions: str, skip_first: int) -> None:
    this = case(kind, torch.float64, positions, skip_first)
    found = run(this)
    compare_with_oracle(this, found, rtol=1e-6, atol=1e-8)
    # Control: other positions, other figures.
    other = run(this, positions="all", skip_first=0)
    assert not np.allclose(found.base_loss, other.base_loss, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 97), (1, 40), (5, 1), (7, 96), (1000, 13)], ids=lambda n: str(n)
)
def test_chunks_blocks_and_batches_do_not_matter(
    kind: str, tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = dataclasses.replace(case(kind), held_out=cases.windows(20, 3))
    truncations = [this.truncate("fisher", 2), this.truncate("fisher", 9)]
    expected = run(this, truncations, random_subspaces=1)
    for batch_size in (1, 2):  # the model's own float32 parts
        compare(run(this, truncations, random_subspaces=1, batch_size=batch_size), expected, 1e-5, 1e-5)
    calls: list[int] = []
    whole = changes.Prediction.of

    def counted(unembedding: Any, u: torch.Tensor, targets: torch.Tensor) -> changes.Prediction:
        calls.append(len(u))
        return whole(unembedding, u, targets)

    monkeypatch.setattr(changes.Prediction, "of", counted)
    monkeypatch.setattr(evaluation, "tokens_at_once", lambda _vocabulary: tokens)
    monkeypatch.setattr(changes, "_BLOCK_ELEMENTS", min(tokens, 3 * cases.LENGTH) * rows)
    compare(run(this, truncations, random_subspaces=1), expected)
    assert sum(calls) == 3 * cases.LENGTH and max(calls) == min(tokens, 3 * cases.LENGTH)  # it was in chunks


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_one_call_are_each_alone(kind: str) -> None:
    this = case(kind)
    sizes = (1, 4, 15)
    for order in (sizes, sizes[::-1]):
        found = run(this, [this.truncate(method, m) for m in order for method in ("fisher", "whitened")])
        for each in found.measurements:
            alone = run(
                this, [this.truncate("fisher" if each.method == "random" else each.method, each.removed)]
            )
            (expected,) = [m for m in alone.measurements if m.method == each.method]
            for name in QUANTITIES:
                np.testing.assert_allclose(each.values[name], expected.values[name], rtol=1e-9, atol=1e-10)
    # Control: the ranks differ.
    values = [m.values["logit_distance"] for m in found.measurements if m.method == "whitened"]
    assert (values[0] > values[1]).all() and (values[1] > values[2]).all()


def test_two_ranks_of_one_size_are_two_entries() -> None:
    this = case("llama")
    ranks = (0.2, 0.201)
    truncations = [csprune.truncate(this.readout, this.calibration, "fisher", rank) for rank in ranks]
    found = run(this, truncations)
    assert [(m.method, m.rank) for m in found.measurements] == [
        ("fisher", 0.2),
        ("fisher", 0.201),
        ("random", 0.2),
        ("random", 0.201),
    ]
    for name in QUANTITIES:
        first, second = (m.values[name] for m in found.measurements[:2])
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_removed_changes_nothing_at_all(kind: str, dtype: torch.dtype) -> None:
    this = case(kind, dtype)
    found = run(this, [this.truncate("whitened", 0), this.truncate("whitened", 3)])
    for each in found.measurements:
        if each.removed == 0:
            assert each.kept == this.width
            for name in QUANTITIES:
                assert (each.values[name] == (name == "top1_agreement")).all(), (each.method, name)
        else:  # control
            assert (each.values["fisher_term"] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "granite"])
def test_a_head_fifty_times_as_large(kind: str, dtype: torch.dtype) -> None:
    """Nearly all mass on one token, and changes of hundreds of nats that no float32 exp can hold."""
    model = tiny.make(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 50
    this = cases.build(model.to(dtype))
    found = run(this, [this.truncate("singular", 1), this.truncate("singular", 25)])
    # Logits of several hundred have float32 errors of 3e-5, which no sum over them can undo;
    # test_measures has the sums themselves.
    compare_with_oracle_at(this, found, rtol=1e-6 if dtype == torch.float64 else 1e-4)
    # Control: these are large changes of sharp predictions.
    assert found.measurements[1].values["prediction_change"].max() > 20
    assert max(m.values["logit_distance"].max() for m in found.measurements) > 88**2


def compare_with_oracle_at(this: cases.Case, found: Evaluation, rtol: float) -> None:
    projections = [
        this.oracle_projection(m.method, m.removed) for m in found.measurements if m.method != "random"
    ]
    for mine, values in zip(found.measurements, this.oracle_values(projections), strict=False):
        for name in QUANTITIES:
            scale = np.abs(values[name]).max()
            np.testing.assert_allclose(
                mine.values[name],
                values[name],
                rtol=rtol,
                atol=rtol * scale + 1e-15,
                err_msg=f"{name} of {mine.name}",
            )


def test_what_is_recorded() -> None:
    this = case("llama")
    calls: list[tuple[int, int]] = []
    found = run(
        this,
        seed=3,
        name="some/model",
        protocol={"name": "quick"},
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(0, 6), (4, 6), (6, 6)]
    assert found.model == "some/model"
    assert found.document_ids == this.held_out.document_ids
    assert found.blocks.tolist() == this.held_out.blocks.tolist()
    record = found.protocol
    assert (record["positions"], record["seed"], record["random_subspaces"]) == ("all", 3, SUBSPACES)
    assert record["name"] == "quick" and record["calibration"]["tokens"] == 10 * cases.LENGTH
    assert record["evaluation"]["identity"] == this.held_out.identity
    # Subspace i has seed 3 + i: here it is the truncation of that seed itself, and not of another.
    random = next(m for m in found.measurements if m.method == "random" and m.removed == 7)
    for i in range(SUBSPACES):
        (p,) = this.oracle_values([truncation_of(this, 7, 3 + i)])
        np.testing.assert_allclose(random.values["loss_change"][i], p["loss_change"], rtol=1e-6)
    other = this.oracle_values([truncation_of(this, 7, 9)])[0]
    assert not np.allclose(random.values["loss_change"][0], other["loss_change"], rtol=1e-2)


def truncation_of(this: cases.Case, removed: int, seed: int) -> np.ndarray:
    """The oracle's coordinates of P of `truncate(..., "random", seed=seed)`."""
    change = this.folded.basis.T @ this.basis
    return change @ this.truncate("random", removed, seed=seed).projection.dense().numpy() @ change.T


def test_the_same_call_gives_the_same_bytes() -> None:
    this = case("gpt2")
    first, second, other = run(this), run(this), run(this, seed=1)
    for a, b, c in zip(first.measurements, second.measurements, other.measurements, strict=True):
        for name in QUANTITIES:
            assert a.values[name].tobytes() == b.values[name].tobytes()
        assert (a.values["loss_change"].tobytes() == c.values["loss_change"].tobytes()) == (
            a.method != "random"
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    """Never a document less."""
    this = cases.build(tiny.make("llama"))
    truncations = [this.truncate("fisher", 3)]
    run(this, truncations)  # control: it is the weight
    this.model.lm_head.weight.data[5] = bad  # behind the back of check_unchanged()
    with pytest.raises(CspruneError, match=r"logits of \d+ of \d+ tokens .* not finite") as caught:
        run(this, truncations)
    assert "\n" not in str(caught.value)


def test_states_that_are_not_finite_are_an_error() -> None:
    this = cases.build(tiny.make("llama"))
    truncations = [this.truncate("fisher", 3)]
    first = int(this.held_out.input_ids[0, 0])
    with torch.no_grad():
        this.model.model.embed_tokens.weight[first] = torch.nan
    with pytest.raises(CspruneError, match=r"states of \d+ of \d+ documents"):
        run(this, truncations)


def test_documents_that_calibrated_are_refused() -> None:
    this = case("llama")
    mixed = cases.windows(cases.CALIBRATION_DOCUMENTS - 2, 6)
    with pytest.raises(InputError, match="^2 of 6 evaluation documents also calibrated"):
        run(dataclasses.replace(this, held_out=mixed))
    run(dataclasses.replace(this, held_out=cases.windows(cases.CALIBRATION_DOCUMENTS, 2)))  # control


def test_what_cannot_be_evaluated() -> None:
    this, other = case("llama"), case("llama", torch.float32)
    fisher = this.truncate("fisher", 3)
    with pytest.raises(InputError, match="another model object"):
        run(this, [fisher, other.truncate("fisher", 3)])
    with pytest.raises(InputError, match="another model object"):
        csprune.evaluate(other.model, this.held_out, [fisher])
    elsewhere = csprune.calibrate(this.model, cases.windows(30, 8), readout=this.readout)
    with pytest.raises(InputError, match="different calibrations"):
        run(this, [fisher, csprune.truncate(this.readout, elsewhere, "whitened", removed=3)])
    with pytest.raises(InputError, match="fisher at rank 0.09375 is there 2 times"):
        run(this, [fisher, fisher])
    with pytest.raises(InputError, match="at least one truncation"):
        run(this, [])
    with pytest.raises(InputError, match="random_subspaces must be at least 1"):
        run(this, [fisher], random_subspaces=0)
    with pytest.raises(InputError, match="unknown positions 'first'"):
        run(this, [fisher], positions="first")
    with pytest.raises(InputError, match=f"skip_first {cases.LENGTH}"):
        run(this, [fisher], skip_first=cases.LENGTH)
    with pytest.raises(InputError, match="batch size 0"):
        run(this, [fisher], batch_size=0)
    # Random truncations need not be given, and may be.
    assert [m.method for m in run(this, [this.truncate("random", 3)]).measurements] == ["random"]


def test_evaluating_while_a_truncation_is_applied_is_the_same() -> None:
    this = cases.build(tiny.make("gpt2"))
    truncation = this.truncate("fisher", 6)
    expected = run(this, [truncation])
    with csprune.apply(this.model, truncation):
        compare(run(this, [truncation]), expected, rtol=0, atol=0)
