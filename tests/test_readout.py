"""The readout of every architecture is found, proved, and refused where it cannot be proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
from torch import nn

import csprune
from csprune.errors import CspruneError, InputError
from csprune.linalg import READOUT_TOLERANCE
from csprune.readout import Readout, load_readout
from csprune.tracing import Trace, find_transform
from csprune.unembedding import LogitTransform

IDS = torch.randint(4, tiny.VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(0))


def logits_of(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def hooks_of(model: Any) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def refusal(model: Any, ids: torch.Tensor | None = None) -> str:
    """The one line with which a model is refused; it is left without hooks."""
    before = hooks_of(model)
    with pytest.raises(InputError) as error:
        load_readout(model, ids)
    assert hooks_of(model) == before
    message = str(error.value)
    assert "\n" not in message
    return message


# --- Found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_readout_is_the_one_named_by_hand(kind: str, dtype: torch.dtype) -> None:
    model = tiny.make(kind).to(dtype)
    parts, readout = tiny.parts(model), load_readout(model, IDS)
    norm, unembedding = readout.norm, readout.unembedding
    assert (norm.name, readout.head_name) == (parts.norm_name, parts.head_name)
    assert readout.norm_module is parts.norm
    assert norm.kind.lower() == parts.kind and norm.eps == parts.eps
    assert norm.gain_minus_one == kind.startswith("gemma") and norm.gain_parameter == "weight"
    assert norm.bias_parameter == (None if parts.beta is None else "bias")
    beta = torch.zeros_like(parts.gamma) if parts.beta is None else parts.beta
    assert torch.equal(norm.gain, parts.gamma) and torch.equal(norm.bias, beta)
    assert unembedding.weight.data_ptr() == parts.head.weight.data_ptr()  # by reference
    bias = unembedding.bias
    assert bias is None if parts.bias is None else bias is not None and torch.equal(bias.double(), parts.bias)
    # The exact number of the config, even where bfloat16 measures it to three digits.
    assert unembedding.transform == LogitTransform(parts.factor, parts.cap)
    assert readout.tied == (parts.head.weight is model.get_input_embeddings().weight)
    if dtype == torch.bfloat16:
        assert 1e-4 < readout.error < 1e-2
    else:
        assert readout.error < 1e-6 < READOUT_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_states_are_the_oracles_in_another_basis(kind: str, dtype: torch.dtype) -> None:
    model = tiny.make(kind).to(dtype)
    parts, readout = tiny.parts(model), load_readout(model)
    u = readout.states(IDS)
    assert u.shape == (*IDS.shape, readout.unembedding.width) and u.dtype == torch.float64
    residual = np.stack([oracle.capture(model, row, parts.norm, parts.head).residual for row in IDS])
    expected = oracle.states(residual, parts.kind, parts.eps)
    flat, other = u.flatten(0, 1).numpy(), expected.reshape(-1, expected.shape[-1])
    np.testing.assert_allclose(flat @ flat.T, other @ other.T, atol=1e-3 if dtype == torch.float32 else 1e-5)
    # Control: the other normalisation is seen.
    wrong_kind = "rmsnorm" if parts.kind == "layernorm" else "layernorm"
    wrong = oracle.states(residual, wrong_kind, parts.eps)
    wrong = wrong.reshape(-1, wrong.shape[-1])
    assert np.abs(flat @ flat.T - wrong @ wrong.T).max() > 0.05


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_model_is_left_as_it_was(kind: str) -> None:
    model = tiny.make(kind)
    before, weights = logits_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.get_rng_state()
    readout = load_readout(model, IDS)
    readout.states(IDS)
    assert hooks_of(model) == 0 and torch.equal(logits_of(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_model_that_returns_hidden_states_is_read_and_left_as_it_was() -> None:
    model = tiny.make("llama")
    plain = load_readout(model).states(IDS)
    model.config.output_hidden_states = True
    with torch.no_grad():
        before = model(input_ids=IDS).hidden_states
    assert torch.equal(load_readout(model).states(IDS), plain)
    with torch.no_grad():
        after = model(input_ids=IDS).hidden_states
    assert len(before) == len(after) == tiny.LAYERS + 1
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_hook_of_the_users_own_stays() -> None:
    model, seen = tiny.make("llama"), []
    model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    load_readout(model)
    assert hooks_of(model) == 1 and seen


@pytest.mark.parametrize("kind", ["llama", "gpt2", "llama_tied"])
def test_padded_rows_are_part_of_the_vocabulary(kind: str) -> None:
    model = tiny.make(kind)
    model.resize_token_embeddings(112, mean_resizing=False)
    unembedding = load_readout(model, IDS).unembedding
    assert unembedding.vocabulary == 112
    logits = unembedding.logits(load_readout(model).states(IDS))
    torch.testing.assert_close(logits, logits_of(model), rtol=0, atol=1e-4)
    mean = unembedding.centred(slice(None)).mean(0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-13)
    # Control: over the tokenizer's rows alone the mean is another.
    assert float(unembedding.centred(slice(0, tiny.VOCABULARY)).mean(0).abs().max()) > 1e-4


@pytest.mark.parametrize(("name", "gain"), [("OlmoForCausalLM", None), ("NemotronForCausalLM", "weight")])
def test_norms_without_parameters_or_with_gain_minus_one(name: str, gain: str | None) -> None:
    import transformers as hf

    config = getattr(hf, name.replace("ForCausalLM", "Config"))(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(hf, name)(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    readout = load_readout(model)
    assert readout.norm.kind == "LayerNorm" and readout.norm.eps == 1e-5
    assert readout.norm.gain_parameter == gain and readout.norm.gain_minus_one == (gain is not None)
    assert readout.error < 1e-6


# --- The transform --------------------------------------------------------------------------------


def transformed(change: Callable, dtype: torch.dtype, size: float = 3.0) -> Trace:
    x = size * torch.randn(96, 97, generator=torch.Generator().manual_seed(0))
    return Trace(nn.Identity(), x.to(dtype), change(x.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x, LogitTransform()),
        (lambda x: x.float(), LogitTransform()),
        (lambda x: x * 0.0625, LogitTransform(scale=0.0625)),
        (lambda x: x / 13, LogitTransform(scale=1 / 13)),
        (lambda x: torch.tanh(x / 30) * 30, LogitTransform(cap=30.0)),
    ],
    ids=["same", "cast", "scale", "division", "cap"],
)
def test_transforms_are_told_apart(dtype: torch.dtype, change: Callable, expected: LogitTransform) -> None:
    numbers = [97.0, 1.0, 30.0, 31.0, 13.0, 0.0625, 1e4]
    assert find_transform(transformed(change, dtype), numbers, "M") == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_that_hardly_bends_small_logits_is_still_seen(dtype: torch.dtype) -> None:
    def cap(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 30) * 30

    for size in (1.0, 2.0, 4.0):
        assert find_transform(transformed(cap, dtype, size), [30.0, 1.0], "M").cap == 30.0


def test_a_factor_that_no_config_holds_is_measured() -> None:
    found = find_transform(transformed(lambda x: x * 0.3217, torch.float32), [1.0, 3.0, 0.3218], "M")
    assert found.scale == pytest.approx(0.3217, rel=1e-6) and found.scale != 0.3218
    low = find_transform(transformed(lambda x: x * 0.7 * 0.45957, torch.bfloat16), [0.3235], "M")
    assert low.scale == pytest.approx(0.3217, rel=2e-3)  # not the config's number, half a percent off


@pytest.mark.parametrize("change", [torch.sin, lambda x: x + 0.5, lambda x: x.clamp(-2, 2), lambda x: x * 0])
def test_other_transforms_are_refused(change: Callable) -> None:
    with pytest.raises(InputError, match=r"^M changes its head's output by neither a constant factor"):
        find_transform(transformed(change, torch.float32), [30.0, 2.0], "M")


# --- Refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.NEGATIVE_KINDS)
def test_models_without_a_causal_head_behind_a_norm_are_refused(kind: str) -> None:
    model = tiny.make(kind)
    message = refusal(model)
    assert type(model).__name__ in message
    expected = {"t5": "encoder-decoder", "opt_no_norm": "is no norm"}.get(kind, "is not causal")
    assert expected in message


def test_a_masked_model_is_not_fooled_by_a_monotonous_text() -> None:
    same = torch.full((5, 40), 7)
    assert "is not causal" in refusal(tiny.make("bert_masked"), same)
    load_readout(tiny.make("llama"), same)  # Control


def test_a_bare_body_has_no_head() -> None:
    assert refusal(tiny.make("llama").model).startswith("LlamaModel has no output embedding")


def with_logits(change: Callable) -> Any:
    model = tiny.make("llama")
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        result.logits = change(result.logits)
        return result

    model.forward = changed
    return model


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (torch.sin, "by neither a constant factor nor a soft cap"),
        (lambda x: x + torch.arange(97), "by neither a constant factor nor a soft cap"),
        (lambda x: x[..., :90], "cuts its head's 97 rows to 90 logits"),
        (lambda _x: None, "does not run its output embedding"),
    ],
)
def test_an_unknown_change_of_the_logits_is_refused(change: Callable, expected: str) -> None:
    message = refusal(with_logits(change))
    assert message.startswith("LlamaForCausalLM") and expected in message
    assert load_readout(with_logits(lambda x: 0.25 * x)).unembedding.transform.scale == 0.25  # Control


def test_a_head_that_is_not_the_models_own_computation_is_refused() -> None:
    model = tiny.make("llama")
    model.lm_head.register_forward_hook(lambda _m, _a, out: out.roll(1, -1))
    message = refusal(model)
    assert "the logits of LlamaForCausalLM cannot be recomputed from model.norm (RMSNorm)" in message
    assert "largest difference" in message


def test_a_head_that_reads_no_modules_output_is_refused() -> None:
    model = tiny.make("llama")
    handle = model.lm_head.register_forward_pre_hook(lambda _m, args: (args[0] + 0.1,))
    assert "LlamaForCausalLM: the head Linear does not read the output of any module" in refusal(model)
    handle.remove()
    # Control: what only passes the norm's output on is seen through.
    model.lm_head.register_forward_pre_hook(lambda _m, args: (nn.Dropout(0.5).eval()(args[0]),))
    assert load_readout(model).norm.name == "model.norm"


def test_a_gain_changed_by_a_hook_is_refused() -> None:
    for change in (lambda _m, _a, out: 1.01 * out, lambda _m, _a, out: out.mul_(1.01)):
        model = tiny.make("llama")
        model.model.norm.register_forward_hook(change)
        message = refusal(model)
        assert message.startswith("LlamaForCausalLM: the head reads the output of model.norm")
        assert "differs by 9.9e-03" in message


@pytest.mark.parametrize(
    "norm", [nn.Tanh(), nn.Linear(32, 32), nn.Identity()], ids=["Tanh", "Linear", "none"]
)
def test_a_norm_that_is_no_norm_is_refused(norm: nn.Module) -> None:
    model = tiny.make("llama")
    model.model.norm = norm.eval()
    assert refusal(model).startswith("LlamaForCausalLM: the head reads the output of model.")


def test_a_norm_that_runs_twice_is_refused() -> None:
    model = tiny.make("llama")
    model.model.layers[0].input_layernorm = model.model.norm  # states() would stop at the first run
    assert "cannot be recomputed" in refusal(model)


def test_a_model_in_training_mode_is_refused() -> None:
    model = tiny.make("gpt2")
    readout = load_readout(model)
    model.transformer.drop.train()
    expected = "1 modules of GPT2LMHeadModel are in training mode: call model.eval() first"
    assert refusal(model) == expected
    with pytest.raises(InputError, match="training mode"):
        readout.states(IDS)
    readout.model.eval()
    readout.states(IDS)  # Control


def test_a_head_truncated_already_is_refused() -> None:
    model = tiny.make("llama")
    windows = csprune.read_windows(tiny.tokenizer(), tiny.texts(6), documents=4, sequence_length=32)
    readout = load_readout(model)
    truncation = csprune.truncate(readout, csprune.calibrate(model, windows), "fisher", 0.2)
    with csprune.apply(model, truncation):
        assert refusal(model).startswith("the head of LlamaForCausalLM was truncated before")
    assert load_readout(model).error == readout.error  # Control: restored


def test_token_ids_without_an_embedding_are_refused() -> None:
    ids = IDS.clone()
    ids[0, 3] = 97
    message = refusal(tiny.make("llama"), ids)
    assert "97 embedding rows" in message and "token id 97" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_of_the_head_that_are_not_finite_are_counted(value: float) -> None:
    model = tiny.make("phi")
    model.lm_head.weight.data[3, 4:7] = value
    weight = "the head's weight of PhiForCausalLM has 3 of 3104 values that are not finite"
    assert refusal(model).startswith(weight)
    model.lm_head.weight.data[3, 4:7] = 0
    model.lm_head.bias.data[2] = value
    assert refusal(model).startswith("the head's bias of PhiForCausalLM has 1 of 97 values")


def test_a_body_that_is_not_finite_is_told_from_an_unknown_architecture() -> None:
    for module in ("model.norm", "model.layers.1.mlp.down_proj"):
        model = tiny.make("llama")
        model.get_submodule(module).weight.data.view(-1)[0] = float("nan")
        with pytest.raises(
            CspruneError, match=r"^LlamaForCausalLM gives logits that are not finite for 96 of 96"
        ):
            load_readout(model)


def test_states_that_are_not_finite_are_counted_by_document() -> None:
    model = tiny.make("llama")
    readout = load_readout(model)
    model.model.embed_tokens.weight.data[int(IDS[2, 5])] = float("nan")
    documents = int((IDS[2, 5] == IDS).any(1).sum())
    with pytest.raises(CspruneError, match=f"the states of {documents} of 5 documents .* at model.norm"):
        readout.states(IDS)
    assert hooks_of(model) == 0


def test_a_model_that_no_longer_reaches_its_norm_is_an_error() -> None:
    model = tiny.make("llama")
    readout: Readout = load_readout(model)
    model.forward = lambda **_kwargs: None
    with pytest.raises(CspruneError, match="did not reach its final norm model.norm"):
        readout.states(IDS)


def test_a_readout_of_weights_changed_since_is_refused() -> None:
    """Folded once, a gain or head that is trained on would be measured and exported as it was."""
    windows = csprune.read_windows(tiny.tokenizer(), tiny.texts(6), documents=6, sequence_length=16)
    for name in ("lm_head.weight", "model.norm.weight"):
        model = tiny.make("llama")
        readout = load_readout(model)
        truncation = csprune.truncate(
            readout, csprune.calibrate(model, windows, readout=readout), "fisher", 0.2
        )
        readout.check_unchanged()  # control: reading and truncating write nothing
        with csprune.apply(model, truncation):
            readout.check_unchanged()
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        held_out = csprune.read_windows(tiny.tokenizer(), tiny.texts(6, 1), documents=6, sequence_length=16)
        for use in (
            lambda m=model, r=readout: csprune.calibrate(m, windows, readout=r),
            lambda r=readout, t=truncation: csprune.truncate(r, t.calibration, "fisher", 0.2),
            lambda m=model, t=truncation, h=held_out: csprune.evaluate(m, h, [t]),
        ):
            with pytest.raises(InputError, match="changed since its readout"):
                use()


def test_an_input_that_the_model_cannot_read_is_one_line() -> None:
    model = tiny.make("gpt2")
    readout = load_readout(model)
    longest = model.config.max_position_embeddings
    readout.states(torch.zeros(1, longest, dtype=torch.int64))  # control
    with pytest.raises(InputError, match="GPT2LMHeadModel cannot read 1 x") as caught:
        readout.states(torch.zeros(1, longest + 1, dtype=torch.int64))
    assert "\n" not in str(caught.value)
