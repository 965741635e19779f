"""Truncations as they are stored and loaded, against the same truncations in memory."""

from __future__ import annotations

import copy
from pathlib import Path

import cases
import exports
import numpy as np
import pytest
import tiny
import torch

import csprune
from csprune import CspruneError, InputError, stored
from csprune.measurement import QUANTITIES

# RMSNorm; LayerNorm; RMSNorm, gain - 1 and a soft cap; LayerNorm and a logit scale.
KINDS = ("llama", "gpt2", "gemma2", "cohere")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("positions", "skip_first"), [("all", 0), ("last", 0), ("all", 5)])
def test_a_model_with_the_truncated_head_measures_as_the_truncation(
    kind: str, positions: str, skip_first: int
) -> None:
    this = cases.build(tiny.make(kind).double(), positions=positions, skip_first=skip_first)
    settings = {"positions": positions, "skip_first": skip_first}
    other = copy.deepcopy(this.model)
    twin = csprune.load_readout(other)
    for method in ("fisher", "whitened"):
        expected = csprune.evaluate(
            this.model, this.held_out, [this.truncate(method, 7)], random_subspaces=1, **settings
        ).measurements[0]
        with csprune.apply(other, csprune.truncate(twin, this.calibration, method, removed=7)):
            found = stored.measure_loaded(other, this.readout, this.held_out, **settings)
        for name in QUANTITIES:
            # The models' own norms compute in float32.
            np.testing.assert_allclose(found[name], expected.values[name], rtol=2e-5, atol=1e-6, err_msg=name)
    # Control: another truncation is told apart, and none at all changes nothing.
    with csprune.apply(other, csprune.truncate(twin, this.calibration, "singular", removed=7)):
        control = stored.measure_loaded(other, this.readout, this.held_out, **settings)
    assert np.abs(control["loss_change"] - found["loss_change"]).max() > 1e-3
    nothing = stored.measure_loaded(other, this.readout, this.held_out, **settings)
    for name in QUANTITIES[:-1]:
        np.testing.assert_allclose(nothing[name], 0, atol=1e-6)
    np.testing.assert_array_equal(nothing["top1_agreement"], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_checkpoint_as_it_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    source = tiny.save(tiny.make("llama").to(dtype), tmp_path / "source")
    model = exports.load(source, dtype=torch.float32)
    truncation = exports.truncated(model, "fisher-whitened")
    held_out = csprune.read_windows(tiny.tokenizer(), tiny.texts(6, 1), documents=6, sequence_length=16)
    out = exports.export_quickly(source, truncation, tmp_path / "out")
    (expected, _) = csprune.evaluate(model, held_out, [truncation], random_subspaces=1).measurements
    loaded = exports.load(out, dtype=torch.float32)
    found = stored.measure_loaded(loaded, truncation.readout, held_out)
    gap = np.abs(found["loss_change"] - expected.values["loss_change"]).max()
    assert gap < 1e-5 if dtype == torch.float32 else 1e-5 < gap < 0.05
    # What rounding costs is what `stored_loss` says without the checkpoint.
    base = csprune.evaluate(model, held_out, [truncation], random_subspaces=1).base_loss
    ours = stored.stored_loss(truncation, held_out, dtype) - base
    np.testing.assert_allclose(found["loss_change"], ours, atol=1e-5)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    this = cases.build(tiny.make("gemma2").double())
    other = copy.deepcopy(this.model)
    with csprune.apply(
        other, csprune.truncate(csprune.load_readout(other), this.calibration, "fisher", removed=5)
    ):
        whole = stored.measure_loaded(other, this.readout, this.held_out)
        monkeypatch.setattr(stored, "tokens_at_once", lambda _vocabulary: 3)
        parts = stored.measure_loaded(other, this.readout, this.held_out)
    for name in QUANTITIES:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4, atol=1e-6)


def test_what_cannot_be_measured() -> None:
    this = cases.build(tiny.make("llama"))
    wider = tiny.make("llama", vocab_size=tiny.VOCABULARY + 8)
    with pytest.raises(InputError, match="made from this model"):
        stored.measure_loaded(wider, this.readout, this.held_out)
    broken = copy.deepcopy(this.model)
    with torch.no_grad():
        broken.get_output_embeddings().weight[3] = torch.nan
    tokens = this.held_out.input_ids.numel()
    with pytest.raises(CspruneError, match=rf"the logits of {tokens} of {tokens} tokens"):
        stored.measure_loaded(broken, this.readout, this.held_out)


def test_the_loss_as_stored_is_the_exported_checkpoints(tmp_path: Path) -> None:
    """What rounding the factors to bfloat16 costs is measured, not passed over."""
    source = tiny.save(tiny.make("llama").bfloat16(), tmp_path / "source")
    model = exports.load(source, dtype=torch.float32)
    truncation = exports.truncated(model, "fisher-whitened")
    held_out = csprune.read_windows(tiny.tokenizer(), tiny.texts(6, 1), documents=6, sequence_length=16)
    out = exports.export_quickly(source, truncation, tmp_path / "out")
    with torch.no_grad():
        logits = exports.load(out, dtype=torch.float32)(held_out.input_ids).logits.double()
    theirs = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), held_out.target_ids, reduction="none"
    ).mean(1)
    ours = stored.stored_loss(truncation, held_out, torch.bfloat16, batch_size=4)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)
    # Control: the exact truncation's loss is another.
    exact = stored.stored_loss(truncation, held_out, torch.float64)
    assert np.abs(exact - ours).max() > 1e-4
