"""A final norm is recognised by what it computes, whatever its class and parameters are called."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from csprune.errors import InputError
from csprune.norms import FinalNorm, identify_norm

D = 24


class Norm(nn.Module):
    """LayerNorm or RMSNorm with parameters of any name; `offset` is added to the stored gain."""

    def __init__(self, mean: bool, eps: float, offset: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.mean, self.offset, self.hidden_epsilon = mean, offset, torch.tensor([eps])
        self.odd_name = nn.Parameter(torch.randn(D, generator=generator))
        self.register_buffer("moved", torch.randn(D, generator=generator) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float()
        if self.mean:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.hidden_epsilon)
        x = x * (self.odd_name.float() + self.offset)
        return (x if self.moved is None else x + self.moved.float()).to(dtype)


def find(module: nn.Module, *numbers: float) -> FinalNorm:
    return identify_norm("body.final", module, D, list(numbers), "SomeForCausalLM")


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_form_is_recognised(mean: bool, offset: float, bias: bool, dtype: torch.dtype) -> None:
    module = Norm(mean, 3e-5, offset, bias).to(dtype)
    module.odd_name.data /= 3  # in float64 no float32 number any more
    module.hidden_epsilon = torch.tensor([3e-5])
    before = copy.deepcopy(module.state_dict())
    found = find(module, 512.0, 3e-5, 2e-5)
    assert (found.name, found.removes_mean, found.eps) == ("body.final", mean, 3e-5)
    assert found.kind == ("LayerNorm" if mean else "RMSNorm")
    assert (found.gain_parameter, found.gain_minus_one) == ("odd_name", offset == 1.0)
    assert found.bias_parameter == ("moved" if bias else None)
    # Exactly as the module holds them, float64 included.
    assert torch.equal(found.gain, module.odd_name.detach().double() + offset)
    assert torch.equal(found.bias, torch.zeros(D).double() if not bias else module.moved.double())
    assert found.folded_gain == 1.0 - offset
    for key, value in module.state_dict().items():
        assert value.dtype == dtype and torch.equal(value, before[key])


@pytest.mark.parametrize("mean", [False, True])
def test_the_normalised_residual_is_what_the_norm_computes(mean: bool) -> None:
    module = Norm(mean, 1e-5, 1.0, True)
    found = find(module)
    x = 0.02 * torch.randn(50, D, generator=torch.Generator().manual_seed(9)) + 0.01
    with torch.no_grad():
        expected = module(x).double()
    z = found.normalise(x)
    assert z.dtype == torch.float64
    torch.testing.assert_close(z * found.gain + found.bias, expected, rtol=0, atol=5e-6)
    # Control: another epsilon is seen at residuals of this size.
    other = FinalNorm(**{**vars(found), "eps": 1e-6})
    assert float((other.normalise(x) * found.gain + found.bias - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, torch.finfo(torch.float32).eps])
def test_usual_epsilons_need_not_stand_in_the_config(eps: float) -> None:
    assert find(Norm(True, eps)).eps == eps


def test_an_unusual_epsilon_must_stand_somewhere() -> None:
    with pytest.raises(InputError, match="differs by"):
        find(Norm(True, 7e-4), 512.0)
    assert find(Norm(True, 7e-4), 7e-4).eps == 7e-4
    module = Norm(True, 7e-4)
    module.own_epsilon = 7e-4
    assert find(module).eps == 7e-4


def test_a_norm_without_parameters() -> None:
    found = find(nn.LayerNorm(D, elementwise_affine=False))
    assert (found.gain_parameter, found.bias_parameter) == (None, None)
    assert torch.equal(found.gain, torch.ones(D).double())


class Wrapped(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.norm, self.change = nn.LayerNorm(D), change

    def forward(self, x):
        return self.change(self.norm(x))


@pytest.mark.parametrize(
    "module",
    [
        nn.Tanh(),
        nn.Linear(D, D),
        nn.Identity(),
        Wrapped(lambda y: y.clamp(-1, 1)),
        Wrapped(lambda y: 1.01 * y),
        Wrapped(lambda y: y + y.roll(1, 1)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_norm_is_refused_with_the_nearest(module: nn.Module) -> None:
    with pytest.raises(InputError) as error:
        find(module)
    message = str(error.value)
    assert message.startswith(
        f"SomeForCausalLM: the head reads the output of body.final ({type(module).__name__})"
    )
    assert "neither a LayerNorm nor an RMSNorm: the nearest" in message and "\n" not in message


@pytest.mark.parametrize(
    "module",
    [nn.Linear(D, D - 1), nn.Linear(D + 1, D), nn.MultiheadAttention(D, 2), Wrapped(lambda y: (y,))],
    ids=["narrower", "wider", "more arguments", "tuple"],
)
def test_what_does_not_map_states_to_states_is_refused(module: nn.Module) -> None:
    with pytest.raises(InputError, match=r"^SomeForCausalLM: .*body\.final.* is no norm: [^\n]*$"):
        find(module)


def test_a_hook_that_changes_the_gain_is_part_of_what_it_computes() -> None:
    module = nn.LayerNorm(D)
    assert find(module).kind == "LayerNorm"  # Control
    handle = module.register_forward_hook(lambda _m, _a, out: 1.001 * out)
    with pytest.raises(InputError, match="differs by 1.0e-03"):
        find(module)
    handle.remove()
    assert find(module).kind == "LayerNorm"
