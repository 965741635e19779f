"""A truncated head in memory: the predictions that `evaluate` measures, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import tiny
import torch

import csprune
from csprune import InputError
from csprune.head import apply, factorized_head, folded_norm
from csprune.hf import FactorizedHead

KINDS = ("llama_tied", "gpt2", "gemma2", "cohere")


def build(kind: str, dtype: torch.dtype = torch.float32) -> cases.Case:
    """Of its own for every test: a truncation that is not undone would be seen by the next one."""
    return cases.build(tiny.make(kind).to(dtype))


def logits_of(this: cases.Case) -> torch.Tensor:
    with torch.no_grad():
        return this.model(input_ids=this.held_out.input_ids).logits


def snapshot(model: Any) -> dict[str, Any]:
    """Every tensor object, its content, and what is tied to what."""
    return {
        "objects": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "values": {name: v.clone() for name, v in model.state_dict().items()},
        "modules": {name: id(m) for name, m in model.named_modules(remove_duplicate=False)},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "tied": model.config.tie_word_embeddings,
        "tied_keys": dict(model.all_tied_weights_keys),
        "config": model.config.to_dict(),
    }


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    before = snapshot(model)
    yield
    after = snapshot(model)
    values, others = before.pop("values"), after.pop("values")
    assert before == after
    assert list(values) == list(others)
    assert all(torch.equal(values[name], others[name]) for name in values)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_swapped_model_predicts_what_evaluate_measures(kind: str) -> None:
    this = build(kind, torch.float64)
    truncations = [this.truncate(method, 12) for method in oracle.METHODS]
    found = csprune.evaluate(this.model, this.held_out, truncations, random_subspaces=1)
    before = logits_of(this).double()
    log_p = before.log_softmax(-1)
    targets = this.held_out.target_ids.unsqueeze(-1)
    for truncation, measured in zip(truncations, found.measurements, strict=False):
        with apply(this.model, truncation) as applied:
            assert isinstance(applied.head, FactorizedHead)
            after = logits_of(this).double()
        changed = after.log_softmax(-1)
        change = after - before
        expected = {
            "loss_change": (log_p - changed).gather(-1, targets).squeeze(-1),
            "logit_distance": (change - change.mean(-1, keepdim=True)).square().sum(-1),
            "prediction_change": (log_p.exp() * (log_p - changed)).sum(-1),
            "top1_agreement": (before.argmax(-1) == after.argmax(-1)).double(),
        }
        for name, value in expected.items():
            # Some norms compute in float32 inside a float64 model.
            np.testing.assert_allclose(
                measured.values[name], value.mean(1), rtol=1e-4, atol=1e-5, err_msg=f"{measured.name}: {name}"
            )
        # Control: the head was in effect.
        assert (measured.values["prediction_change"] > 1e-4).all()
    assert torch.equal(logits_of(this).double(), before)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_nothing_removed_gives_the_original_logits(kind: str) -> None:
    this = build(kind)
    before = logits_of(this)
    for method in ("singular", "fisher-whitened"):
        with apply(this.model, this.truncate(method, 0)):
            after = logits_of(this)
        assert (after - before).abs().max() < 2e-5 * before.abs().max()
        assert not torch.equal(after, before)  # control: by another road
    # One direction is enough to be seen.
    with apply(this.model, this.truncate("random", 1)):
        assert (logits_of(this) - before).abs().max() > 1e-2 * before.abs().max()


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_restoring_leaves_nothing_behind(kind: str) -> None:
    this = build(kind)
    truncation = this.truncate("fisher", 6)
    before = logits_of(this)
    with unchanged(this.model):
        handle = apply(this.model, truncation)
        assert not torch.equal(logits_of(this), before)
        # Control: the snapshot sees what is applied.
        with pytest.raises(AssertionError), unchanged(this.model):
            handle.restore()
        handle.restore()  # a second time does nothing
        assert torch.equal(logits_of(this), before)
    head, embedding = this.model.get_output_embeddings(), this.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == this.readout.tied
    # And it can be applied again, to the same effect, by the same truncation.
    with unchanged(this.model), apply(this.model, truncation):
        assert not torch.equal(logits_of(this), before)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_restores_too(kind: str) -> None:
    this = build(kind)
    with (
        unchanged(this.model),
        pytest.raises(KeyboardInterrupt),
        apply(this.model, this.truncate("whitened", 3)),
    ):
        raise KeyboardInterrupt
    # A failure before anything is in place leaves the model as it was.
    truncation = this.truncate("whitened", 3)
    with unchanged(this.model), pytest.raises(RuntimeError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "full_like", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        apply(this.model, truncation)


@pytest.mark.parametrize("kind", KINDS)
def test_two_at_once_and_other_models_are_refused(kind: str) -> None:
    this = build(kind)
    first, second = this.truncate("fisher", 3), this.truncate("singular", 3)
    with apply(this.model, first):
        inside = logits_of(this)
        with pytest.raises(InputError, match=r"applied to this model already: restore\(\) it first"):
            apply(this.model, second)
        assert torch.equal(logits_of(this), inside)
    other = tiny.make(kind)  # the same weights, another object
    with unchanged(other), pytest.raises(InputError, match="another model object"):
        apply(other, first)
    with apply(this.model, second):  # control
        assert not torch.equal(logits_of(this), inside)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_tying_does_not_bring_the_old_head_back(kind: str) -> None:
    this = build(kind)
    with apply(this.model, this.truncate("fisher", 5)) as applied:
        truncated = logits_of(this)
        head = applied.head
        this.model.tie_weights()
        assert this.model.get_output_embeddings() is head
        assert head.weight.shape == (tiny.VOCABULARY, this.width - 5)
        assert torch.equal(logits_of(this), truncated)
    if this.readout.tied:
        # Control: after restoring, tying ties again what somebody untied.
        dense = this.model.get_output_embeddings()
        dense.weight = torch.nn.Parameter(torch.zeros_like(dense.weight))
        this.model.tie_weights()
        assert dense.weight is this.model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", KINDS)
def test_generate_works_while_applied(kind: str) -> None:
    this = build(kind)
    prompt = this.held_out.input_ids[:2, :8]
    options = {"max_new_tokens": 12, "do_sample": False, "min_new_tokens": 12}

    def generate() -> torch.Tensor:
        return this.model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)

    before = generate()
    different = 0
    for seed in range(4):
        with apply(this.model, this.truncate("random", this.width - 1, seed)):
            tokens = generate()
            assert tokens.shape == (2, 20)
            # Greedy: each token is the truncated model's own choice, cache or no cache.
            with torch.no_grad():
                logits = this.model(input_ids=tokens).logits[:, 7:-1]
        logits[..., this.model.generation_config.eos_token_id] = -torch.inf
        assert torch.equal(logits.argmax(-1), tokens[:, 8:])
        different += not torch.equal(tokens, before)
    assert different  # control
    assert torch.equal(generate(), before)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_norm_is_folded_into_the_head(kind: str) -> None:
    this = build(kind)
    truncation = this.truncate("fisher", 4)
    p = tiny.parts(this.model)
    with apply(this.model, truncation):
        norm = this.model.get_submodule(p.norm_name)
        assert norm is p.norm
        with torch.no_grad():
            found = this.model(input_ids=this.held_out.input_ids[:1], output_hidden_states=True)
        z = found.hidden_states[-1][0]
    # What the head reads is normalised and no more.
    captured = oracle.capture(this.model, this.held_out.input_ids[0], p.norm, p.head)
    expected = oracle.states(captured.residual, p.kind, p.eps) @ this.folded.basis.T
    np.testing.assert_allclose(z, expected, atol=1e-5)
    assert np.abs(captured.head_input - expected).max() > 0.1  # control: the gain is back
    values = folded_norm(this.readout)
    assert set(values) == {name for name, _ in p.norm.named_parameters()}
    assert values["weight"] == (0.0 if kind.startswith("gemma") else 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_head_can_be_tried(dtype: torch.dtype) -> None:
    this = build("llama")
    truncation = this.truncate("whitened", 4)
    rounded = factorized_head(truncation, dtype)
    assert {p.dtype for p in rounded.parameters()} == {dtype} and not rounded.training
    assert not any(p.requires_grad for p in rounded.parameters())
    with apply(this.model, truncation):
        expected = logits_of(this)
    with apply(this.model, truncation, head=rounded.float()) as applied:
        assert applied.head is rounded
        found = logits_of(this)
    error = float((found - expected).norm() / expected.norm())
    assert error == 0 if dtype == torch.float32 else 1e-4 < error < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_model_keeps_its_dtype(kind: str) -> None:
    this = build(kind, torch.bfloat16)
    truncation = this.truncate("whitened", 3)
    with unchanged(this.model), apply(this.model, truncation) as applied:
        assert {p.dtype for p in applied.head.parameters()} == {torch.bfloat16}
        assert torch.isfinite(logits_of(this)).all()
        assert not any(m.training for m in this.model.modules())
