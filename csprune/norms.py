"""Identify a final norm by what it computes, whatever its class and parameters are called."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from csprune.errors import InputError
from csprune.linalg import NORM_TOLERANCE

# Epsilons that architectures write into their code rather than their config (OLMo, MPT).
_USUAL_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class FinalNorm:
    """A LayerNorm or RMSNorm: `h = gain * normalise(r) + bias`.

    Attributes:
        name: The module's name in the model.
        removes_mean: LayerNorm; otherwise RMSNorm.
        eps: Added to the mean square.
        gain: float64 [d], as it multiplies.
        bias: float64 [d], zero where the norm has none.
        gain_parameter: Name of the parameter that holds the gain, or None (OLMo has none).
        bias_parameter: Name of the parameter that holds the bias, or None.
        gain_minus_one: The parameter holds `gain - 1` (Gemma, Nemotron).
    """

    name: str
    removes_mean: bool
    eps: float
    gain: torch.Tensor
    bias: torch.Tensor
    gain_parameter: str | None
    bias_parameter: str | None
    gain_minus_one: bool

    @property
    def kind(self) -> str:
        """For people: "LayerNorm" or "RMSNorm"."""
        return "LayerNorm" if self.removes_mean else "RMSNorm"

    @property
    def folded_gain(self) -> float:
        """What the gain's parameter holds once the gain is folded into the head."""
        return 0.0 if self.gain_minus_one else 1.0

    def normalise(self, residual: torch.Tensor) -> torch.Tensor:
        """`z` [..., d] in float64 of residuals [..., d] of any dtype (paper, Appendix A)."""
        return _normalise(residual, self.removes_mean, self.eps)


def _normalise(residual: torch.Tensor, removes_mean: bool, eps: float) -> torch.Tensor:
    x = residual.to(torch.float64)
    if removes_mean:
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def identify_norm(
    name: str, module: nn.Module, hidden: int, config_numbers: list[float], architecture: str
) -> FinalNorm:
    """Find the normalisation, parameters and epsilon that reproduce a module.

    The module is copied to float32 and read at synthetic inputs: some with a mean (which tells
    LayerNorm from RMSNorm), some so small that epsilon matters. Every assignment of its [d]-shaped
    parameters to gain, gain - 1 and bias is tried, with every small number among its attributes and
    in the model's config as epsilon.

    Args:
        name: The module's name.
        module: The module whose output the head reads; it is left as it is.
        hidden: d.
        config_numbers: Numbers of the model's config, candidates for epsilon.
        architecture: The model's class, for messages.

    Returns:
        The norm, its gain and bias as exact as the module holds them, on the CPU.

    Raises:
        InputError: Nothing reproduces it to `NORM_TOLERANCE`; the message has the best attempt.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, 24, hidden, generator=generator) + 0.5
    probe[:, 12:] *= 1e-3
    twin = copy.deepcopy(module).float()
    device = next(itertools.chain(twin.parameters(), twin.buffers()), torch.zeros(1)).device
    where = f"{architecture}: the head reads the output of {name} ({type(module).__name__})"
    try:
        with torch.no_grad():
            output = twin(probe.to(device))
    except Exception:  # whatever does not take one tensor [.., d] is no norm
        output = None
    if not isinstance(output, torch.Tensor) or output.shape != probe.shape:
        raise InputError(
            f"{where}, which is no norm: csprune truncates heads that follow a LayerNorm or an RMSNorm"
        )
    target = output.double().cpu()
    vectors = {
        key: value.detach().double().cpu()
        for key, value in itertools.chain(module.named_parameters(), module.named_buffers())
        if value.shape == (hidden,)
    }
    own = [v for v in vars(module).values() if isinstance(v, float)]
    epsilons = {0.0, *_USUAL_EPSILONS, *(v for v in own + config_numbers if 0 < v < 0.1)}

    best: tuple[float, FinalNorm] | None = None
    for removes_mean, eps in itertools.product((False, True), sorted(epsilons)):
        z = _normalise(probe, removes_mean, eps)
        for gain_key, minus_one, bias_key in _assignments(list(vectors)):
            gain = torch.ones(hidden).double() if gain_key is None else vectors[gain_key] + minus_one
            bias = torch.zeros(hidden).double() if bias_key is None else vectors[bias_key]
            error = float((z * gain + bias - target).norm() / target.norm().clamp_min(1e-300))
            if best is None or error < best[0]:
                norm = FinalNorm(name, removes_mean, eps, gain, bias, gain_key, bias_key, bool(minus_one))
                best = (error, norm)
    assert best is not None  # the loops above are never empty
    if not best[0] <= NORM_TOLERANCE:
        raise InputError(
            f"{where}, which is neither a LayerNorm nor an RMSNorm: the nearest, {best[1].kind}, differs by "
            f"{best[0]:.1e} of its size; csprune cannot fold it"
        )
    return best[1]


def _assignments(keys: list[str]) -> Iterator[tuple[str | None, int, str | None]]:
    """(gain parameter, 1 if it holds gain - 1, bias parameter), simplest first."""
    for gain, bias in itertools.product((None, *keys), repeat=2):
        if gain is not None and gain == bias:
            continue
        yield gain, 0, bias
        if gain is not None:
            yield gain, 1, bias
