"""The trained LayerNorm model of tests/data/neox: every stage, on a learned gain, bias and spectrum.

The tiny models elsewhere have every parameter drawn at random; here the final state's coordinates are as
uneven, and the predictions as sharp, as training makes them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from commands import csprune_command
from exports import export_quickly, load, logits, relative_error
from safetensors.torch import load_file

import csprune
from csprune.head import factorized_head
from csprune.linalg import haar_columns
from csprune.measurement import QUANTITIES

FIXTURE = Path(__file__).parent / "data" / "neox"
LENGTH, DOCUMENTS, SUBSPACES = 64, 16, 2
# A small model leaves many directions nearly unused: it takes more than the usual 0.2 to change it.
RANKS = (0.2, 0.6)
NORM = "gpt_neox.final_layer_norm"
HEAD = "embed_out"  # in the checkpoint; transformers calls the module lm_head


@dataclasses.dataclass(frozen=True)
class Neox:
    """The model, its readout by the package and by the oracle, and two texts.

    Attributes:
        windows: by block, `calibration` and `confirmation`.
        states: by block, the oracle's [LENGTH, q] of each document.
        rotation: [q, q], from the package's coordinates to the oracle's, which have another basis.
    """

    model: Any
    tokenizer: Any
    readout: csprune.Readout
    folded: oracle.Folded
    windows: dict[str, csprune.Windows]
    states: dict[str, list[np.ndarray]]
    rotation: np.ndarray

    @property
    def norm(self) -> torch.nn.LayerNorm:
        return self.model.gpt_neox.final_layer_norm


def capture(model: Any, ids: torch.Tensor) -> oracle.Captured:
    return oracle.capture(model, ids, model.gpt_neox.final_layer_norm, model.get_output_embeddings())


def fold(model: Any, **replaced: Any) -> oracle.Folded:
    norm, head = model.gpt_neox.final_layer_norm, model.get_output_embeddings()
    parts = {"gamma": norm.weight.detach(), "beta": norm.bias.detach()} | replaced
    return oracle.fold(head.weight.detach(), None, **parts, kind="layernorm")


@pytest.fixture(scope="module")
def neox() -> Neox:
    return read(FIXTURE)


def read(folder: Path) -> Neox:
    loaded = csprune.load_model(str(folder))  # stored in half precision, computing in float32
    model = loaded.model
    windows = {
        block: csprune.read_windows(
            loaded.tokenizer, "demo", documents=DOCUMENTS, sequence_length=LENGTH, block=block
        )
        for block in ("calibration", "confirmation")
    }
    eps = model.gpt_neox.final_layer_norm.eps
    states = {
        block: [oracle.states(capture(model, ids).residual, "layernorm", eps) for ids in each.input_ids]
        for block, each in windows.items()
    }
    readout, folded = csprune.load_readout(model, windows["calibration"].input_ids), fold(model)
    eye = torch.eye(readout.unembedding.width, dtype=torch.float64)
    rotation = folded.basis.T @ readout.unembedding.lift(eye).mT.numpy()
    return Neox(model, loaded.tokenizer, readout, folded, windows, states, rotation)


def test_the_fixture_is_small_and_trained(neox: Neox) -> None:
    assert sum(path.stat().st_size for path in FIXTURE.iterdir()) <= 8e6
    stored = load_file(FIXTURE / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    # Better than the best prediction without memory of this very text, which was not trained on.
    text = neox.windows["confirmation"]
    x = [oracle.before_cap(neox.folded, u) for u in neox.states["confirmation"]]
    losses = [
        -oracle.log_softmax(row)[np.arange(LENGTH), targets]
        for row, targets in zip(x, text.target_ids.numpy(), strict=True)
    ]
    shares = np.unique(text.target_ids.numpy(), return_counts=True)[1] / text.target_ids.numel()
    assert np.mean(losses) < -np.sum(shares * np.log(shares))
    # Every LayerNorm has learned: no gain is still one, no bias still nought.
    norms = [m for m in neox.model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 2 * neox.model.config.num_hidden_layers + 1
    for norm in norms:
        assert norm.weight.std().item() > 0.05 and norm.bias.std().item() > 0.05


def test_the_readout_is_proved_and_needs_gain_and_bias(neox: Neox) -> None:
    readout, norm = neox.readout, neox.norm
    assert (readout.norm.name, readout.norm.kind, readout.tied) == (NORM, "LayerNorm", False)
    assert readout.unembedding.width == neox.model.config.hidden_size - 1
    torch.testing.assert_close(readout.norm.gain, norm.weight.detach().double())
    torch.testing.assert_close(readout.norm.bias, norm.bias.detach().double())
    assert readout.error < 1e-5
    seen = torch.from_numpy(capture(neox.model, neox.windows["calibration"].input_ids[0]).head_output)
    u = neox.states["calibration"][0]

    def error(**replaced: Any) -> float:
        ours = oracle.before_cap(fold(neox.model, **replaced), u)
        return relative_error(torch.from_numpy(ours), seen)

    assert error() < 1e-5
    # Controls: without the one or the other it is visibly another model.
    assert error(gamma=None) > 0.05
    assert error(beta=None) > 0.01


def agree(one: float, other: float) -> bool:
    return abs(one - other) <= max(1e-3 * abs(other), 1e-5)


@pytest.mark.parametrize("positions", ["all", "last"])
def test_every_method_has_the_oracles_figures(neox: Neox, positions: str) -> None:
    calibration = csprune.calibrate(neox.model, neox.windows["calibration"], positions, readout=neox.readout)
    truncations = [
        csprune.truncate(neox.readout, calibration, method, rank)
        for rank in RANKS
        for method in oracle.METHODS
    ]
    held_out = neox.windows["confirmation"]
    found = csprune.evaluate(
        neox.model, held_out, truncations, positions=positions, random_subspaces=SUBSPACES
    )

    statistics = oracle.statistics(neox.folded, neox.states["calibration"], positions=positions)
    rows, projections = [], []
    for each in found.measurements:
        for seed in range(each.subspaces or 1):
            drawn = haar_columns(neox.readout.unembedding.width, each.removed, seed).numpy()
            chosen = {"folded": neox.folded, "statistics": statistics, "basis": neox.rotation @ drawn}
            rows.append((each, seed))
            projections.append(oracle.projection(each.method, each.removed, **chosen))
    expected = oracle.evaluate(
        neox.folded,
        neox.states["confirmation"],
        list(held_out.target_ids.numpy()),
        projections,
        statistics.mean_state,
        positions=positions,
    )
    assert len(found.measurements) == len(RANKS) * len(csprune.STRATEGIES)
    assert agree(found.base_loss.mean(), expected[0]["loss"].mean())
    for (each, seed), values in zip(rows, expected, strict=True):
        for quantity in QUANTITIES:
            mine = each.values[quantity] if each.subspaces is None else each.values[quantity][seed]
            assert agree(mine.mean(), values[quantity].mean()), (each.name, quantity)
    # Control: neither another method nor another rank agrees as well.
    distances = [values["logit_distance"].mean() for values in expected]
    for i, one in enumerate(distances):
        assert not any(agree(one, other) for other in distances[:i])
    # No theorem, but what makes the model worth testing on: it is not indifferent to what is removed.
    for rank in RANKS:
        change = {
            m.method: m.per_document("prediction_change").mean() for m in found.measurements if m.rank == rank
        }
        reference = change.pop("random")
        assert len(change) == len(oracle.METHODS) and max(change.values()) < reference / 3


def test_each_criterion_is_best_at_what_it_minimises(neox: Neox) -> None:
    """Theorems about means over the calibration's own positions, in the oracle's quantities."""
    calibration = csprune.calibrate(neox.model, neox.windows["calibration"], readout=neox.readout)
    statistics = oracle.statistics(neox.folded, neox.states["calibration"])
    deviations = np.concatenate(neox.states["calibration"]) - statistics.mean_state
    distance: dict[str, float] = {}
    fisher: dict[str, float] = {}
    for method in csprune.STRATEGIES:
        p = csprune.truncate(neox.readout, calibration, method, RANKS[1]).projection.dense().numpy()
        du = -deviations @ (neox.rotation @ p @ neox.rotation.T).T
        distance[method] = float(np.sum((du @ neox.folded.weight.T) ** 2, axis=1).mean())
        fisher[method] = float(0.5 * np.sum((du @ statistics.mean_fisher) * du, axis=1).mean())
    for cost, best in ((distance, "whitened"), (fisher, "fisher-whitened")):
        others = [value for method, value in cost.items() if method != best]
        assert len(others) == len(csprune.STRATEGIES) - 1 and 1.02 * cost[best] < min(others)


def test_applied_and_restored(neox: Neox) -> None:
    truncation = truncated(neox)
    ids = neox.windows["confirmation"].input_ids[:4]
    before = logits(neox.model, ids)
    gain, bias = neox.norm.weight, neox.norm.bias
    with csprune.apply(neox.model, truncation):
        assert bool((neox.norm.weight == 1).all()) and bool((neox.norm.bias == 0).all())
        during = logits(neox.model, ids)
    # The definition: the removed component replaced by its mean.
    u = neox.readout.states(ids)
    p, mu = truncation.projection.dense(), truncation.mean_state
    expected = neox.readout.unembedding.logits(u - (u - mu) @ p.mT)
    assert relative_error(during, expected) < 1e-5
    assert relative_error(during, before) > 0.01  # control: something was removed
    assert neox.norm.weight is gain and neox.norm.bias is bias
    assert torch.equal(logits(neox.model, ids), before)


def truncated(neox: Neox, method: str = "fisher-whitened", documents: int = DOCUMENTS) -> csprune.Truncation:
    windows = csprune.read_windows(
        neox.tokenizer, "demo", documents=documents, sequence_length=LENGTH, block="calibration"
    )
    calibration = csprune.calibrate(neox.model, windows, readout=neox.readout)
    return csprune.truncate(neox.readout, calibration, method, RANKS[1])


def check_export(
    neox: Neox, truncation: csprune.Truncation, source: Path, out: Path, dtype: torch.dtype
) -> None:
    """What is stored, and that it computes what the truncation does with its factors rounded so."""
    was, now = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in now.values()} == {dtype}
    assert set(now) == set(was) | {f"{HEAD}.down", f"{HEAD}.offset"}
    for name in set(was) - {f"{HEAD}.weight", f"{NORM}.weight", f"{NORM}.bias"}:
        assert torch.equal(was[name], now[name]), name
    assert bool((now[f"{NORM}.weight"] == 1).all()) and bool((now[f"{NORM}.bias"] == 0).all())
    assert now[f"{HEAD}.weight"].shape == (neox.readout.unembedding.vocabulary, truncation.kept)

    ids = neox.windows["confirmation"].input_ids[:4]
    reloaded = logits(load(out, dtype=torch.float32), ids)
    with csprune.apply(neox.model, truncation):
        exact = logits(neox.model, ids)
    rounded_head = factorized_head(truncation, dtype).float()
    with csprune.apply(neox.model, truncation, head=rounded_head):
        rounded = logits(neox.model, ids)
    assert relative_error(reloaded, rounded) < 1e-5
    # Control: the rounding shows, and is no larger than the dtype's own.
    assert 1e-5 < relative_error(reloaded, exact) < 4 * torch.finfo(dtype).eps


def test_compress_stores_float16_as_it_was(neox: Neox, tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = ["--documents", "8", "--evaluation-documents", "8", "--sequence-length", LENGTH]
    options = ["--rank", str(RANKS[1]), "--method", "fisher-whitened", *map(str, small), "-o", out]
    run = csprune_command("compress", FIXTURE, *options)
    assert run.status == 0, run.err
    truncation = truncated(neox, documents=8)
    check_export(neox, truncation, FIXTURE, out, torch.float16)
    report = json.loads((out / "report.json").read_text())
    entry = next(e for e in report["truncations"] if e["method"] == "fisher-whitened")
    assert (entry["removed"], entry["kept"]) == (truncation.removed, truncation.kept)
    windows = csprune.read_windows(
        neox.tokenizer, "demo", documents=8, sequence_length=LENGTH, block="confirmation"
    )
    losses = []
    for model in (neox.model, load(out, dtype=torch.float32)):
        flat = logits(model, windows.input_ids).flatten(0, 1)
        losses.append(float(torch.nn.functional.cross_entropy(flat, windows.target_ids.flatten())))
    assert report["base_loss"]["mean"] == pytest.approx(losses[0], abs=1e-4)
    assert report["export"]["stored_loss_change"] == pytest.approx(losses[1] - losses[0], abs=2e-4)
    assert entry["loss_change"]["mean"] == pytest.approx(losses[1] - losses[0], abs=2e-3)
    assert abs(losses[1] - losses[0]) > 5e-3  # control: the two are not the same model


def test_export_stores_bfloat16_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "source"
    loaded = csprune.load_model(str(FIXTURE))
    loaded.model.bfloat16().save_pretrained(source)
    loaded.tokenizer.save_pretrained(source)
    neox = read(source)
    truncation = truncated(neox, "whitened", documents=8)
    check_export(
        neox, truncation, source, export_quickly(source, truncation, tmp_path / "out"), torch.bfloat16
    )
