"""The last MLP is found by what it does in every architecture, and refused where it cannot be told."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import nn

from csprune.errors import InputError
from csprune.predictive.last_mlp import LastMLP, find_last_mlp
from csprune.predictive.passes import residual
from csprune.readout import load_readout

IDS = torch.randint(4, tiny.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(3))

# What reads the MLP's input and what writes its output, by hand.
NAMED = {
    "phi": ("model.layers.1.mlp", "model.layers.1.mlp"),
    "gpt_neox": ("gpt_neox.layers.1.mlp", "gpt_neox.layers.1.post_mlp_dropout"),
    "gpt2": ("transformer.h.1.mlp", "transformer.h.1.mlp"),
    "opt": ("model.decoder.layers.1.fc1", "model.decoder.layers.1.fc2"),
    "falcon": ("transformer.h.1.mlp", "transformer.h.1.mlp"),
    "bloom": ("transformer.h.1.mlp", "transformer.h.1.mlp"),
    "stablelm": ("model.layers.1.mlp", "model.layers.1.dropout"),
    **dict.fromkeys(
        ("gemma2", "gemma3", "olmo2"), ("model.layers.1.mlp", "model.layers.1.post_feedforward_layernorm")
    ),
}
PLAIN = ("model.layers.1.mlp", "model.layers.1.mlp")


def hooks_of(model: Any) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def found(kind: str, **overrides: Any) -> LastMLP:
    return find_last_mlp(load_readout(tiny.make(kind, **overrides)))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_last_mlp_is_the_one_named_by_hand(kind: str) -> None:
    model = tiny.make(kind)
    before = hooks_of(model)
    mlp = find_last_mlp(load_readout(model))
    assert (mlp.reads, mlp.writes) == NAMED.get(kind, PLAIN)
    assert mlp.factor == 1.0
    assert hooks_of(model) == before


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox", "opt"])
def test_it_is_found_in_bfloat16(kind: str) -> None:
    mlp = find_last_mlp(load_readout(tiny.make(kind).to(torch.bfloat16)))
    assert (mlp.reads, mlp.writes) == NAMED.get(kind, PLAIN)


def test_a_constant_factor_is_measured() -> None:
    assert found("granite", residual_multiplier=0.22).factor == pytest.approx(0.22, rel=1e-5)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_what_is_added_to_the_write_arrives_and_what_is_read_is_bent(kind: str) -> None:
    mlp = found(kind)
    base = mlp.run(IDS)
    change = torch.randn(base.written.shape, generator=torch.Generator().manual_seed(0))
    arrived = mlp.run(IDS, change_written=change)
    torch.testing.assert_close(arrived.residual - base.residual, change, atol=1e-4, rtol=1e-4)
    assert torch.equal(arrived.read, base.read)
    # At the input nothing arrives as it is, and only the changed position moves.
    change[:, 5:] = 0
    change[:, :4] = 0
    moved = mlp.run(IDS, change_read=change).residual - base.residual
    assert float(moved[:, 4].abs().max()) > 1e-3
    # Rounding of the batch as a whole is all that the others show.
    assert float(moved[:, 5:].abs().max()) < 1e-4 and float(moved[:, :4].abs().max()) < 1e-4


def test_attention_is_no_mlp() -> None:
    """The control: in a parallel block its output arrives too, and is refused for mixing positions."""
    readout = load_readout(tiny.make("gpt_neox"))
    attention = readout.model.get_submodule("gpt_neox.layers.1.attention.dense")
    base = residual(readout, IDS)
    after = residual(readout, IDS, writes=(attention, lambda y: y + 1))
    torch.testing.assert_close(after - base, torch.ones_like(base), atol=1e-4, rtol=0)
    assert "attention" not in find_last_mlp(readout).writes


def test_an_mlp_that_learned_to_stay_nearly_straight_is_found() -> None:
    model = tiny.make("llama")
    with torch.no_grad():
        gate = model.get_submodule("model.layers.1.mlp.gate_proj")
        gate.weight.mul_(0.02)
    assert find_last_mlp(load_readout(model)).reads == PLAIN[0]


class _Linear(nn.Module):
    """An "MLP" by name alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x)


class _Rescaling(nn.Module):
    """An MLP whose block does not pass on what it writes: it is divided by its size afterwards."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(*args, **kwargs)
        if isinstance(out, tuple):
            return (torch.tanh(out[0]), *out[1:])
        return torch.tanh(out)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)


class _Two(nn.Module):
    """Two MLPs side by side, each seen to write."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def refusal(model: Any) -> str:
    readout = load_readout(model.eval())
    before = hooks_of(model)
    with pytest.raises(InputError) as error:
        find_last_mlp(readout)
    assert hooks_of(model) == before
    message = str(error.value)
    assert "\n" not in message and message.startswith(f"{type(model).__name__}: ")
    assert "logits, final and post" in message
    return message


def test_what_is_called_an_mlp_and_is_linear_is_refused() -> None:
    model = tiny.make("llama")
    model.model.layers[1].mlp = _Linear(tiny.WIDTH)
    assert "no module is seen" in refusal(model)


def test_a_block_that_changes_what_the_mlp_wrote_is_refused() -> None:
    model = tiny.make("llama")
    model.model.layers[1] = _Rescaling(model.model.layers[1])
    assert "no module is seen" in refusal(model)


def test_two_mlps_as_one_module_are_one_and_seen_apart_are_refused() -> None:
    model = tiny.make("llama")
    layer = model.model.layers[1]
    layer.mlp = _Two(layer.mlp, tiny.make("llama", seed=1).model.layers[1].mlp)
    assert find_last_mlp(load_readout(model.eval())).reads == PLAIN[0]
    # The same two, without a module around them.
    layer.first, layer.second = layer.mlp.first, layer.mlp.second
    layer.mlp = nn.Identity()

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        x = layer.input_layernorm(hidden_states)
        hidden_states = hidden_states + layer.self_attn(hidden_states=x, **kwargs)[0]
        x = layer.post_attention_layernorm(hidden_states)
        return hidden_states + layer.first(x) + layer.second(x)

    layer.forward = forward
    message = refusal(model)
    assert "model.layers.1.first and model.layers.1.second" in message
