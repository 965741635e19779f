"""Find the final norm and the head of any causal language model, and prove them.

The head is what `get_output_embeddings()` returns; the norm and the logit transform are seen in one forward
pass (`csprune.tracing`). Then the logits of real tokens are recomputed from the states that the calibration
and the evaluation use, and compared with the model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from csprune.errors import CspruneError, InputError
from csprune.hf import FactorizedHead
from csprune.linalg import CAUSAL_TOLERANCE, READOUT_ROUNDING_FACTOR, READOUT_TOLERANCE
from csprune.norms import FinalNorm, identify_norm
from csprune.tracing import (
    Trace,
    config_numbers,
    find_transform,
    first_tensor,
    forward_errors,
    input_device,
    trace,
)
from csprune.unembedding import Unembedding

# Tokens of the proof: enough for every row of the head to matter, few enough to cost nothing.
_PROBE_TOKENS = 96
_PROBE_LENGTH = 32


@dataclass(frozen=True)
class Readout:
    """A model's final norm, head and logit transform, found and proved.

    Attributes:
        model: The model, by reference.
        head_name: Name of the head's module, e.g. `lm_head`.
        norm: The final norm.
        unembedding: The folded and the centred map, decomposed on demand.
        tied: The head's weight is the input embedding's.
        error: RMS error of the recomputed centred logits, in units of their RMS.
        weights: What was folded, each with how often it had been written to by then.
    """

    model: Any
    head_name: str
    norm: FinalNorm
    unembedding: Unembedding
    tied: bool
    error: float
    weights: tuple[tuple[torch.Tensor, int], ...] = ()

    def check_unchanged(self) -> None:
        """Refuse a readout whose head or norm was trained or edited in place since it was loaded.

        Raises:
            InputError: The weights differ from those that were folded.
        """
        if any(_writes(tensor) != count for tensor, count in self.weights):
            raise InputError(
                f"the head or the final norm of {type(self.model).__name__} was changed since its readout "
                "was loaded: load_readout() it anew, and calibrate with that"
            )

    @property
    def norm_module(self) -> nn.Module:
        """The final norm's module."""
        return self.model.get_submodule(self.norm.name)

    @torch.no_grad()
    def residual(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the final norm reads, [documents, positions, d] in the model's dtype, of input ids.

        Runs the model up to its final norm: neither norm nor head is computed by the model. No hook stays.

        Raises:
            InputError: The model cannot read these ids.
            CspruneError: The model did not reach its final norm.
        """
        captured: list[torch.Tensor] = []

        def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured.append(first_tensor(args, kwargs))
            raise _Captured

        handle = self.norm_module.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with forward_errors(type(self.model).__name__, input_ids):
                self.model(input_ids=input_ids.to(input_device(self.model)), use_cache=False)
        except _Captured:
            pass
        finally:
            handle.remove()
        if not captured:
            raise CspruneError(
                f"{type(self.model).__name__} did not reach its final norm {self.norm.name}: "
                "load the model and its readout anew"
            )
        # Here, where a hook that asked for gradients still has them: outside, they are off again.
        return captured[0].reshape(*input_ids.shape, -1)

    @torch.no_grad()
    def states(self, input_ids: torch.Tensor) -> torch.Tensor:
        """States u [documents, positions, q], float64, of input ids [documents, positions].

        Raises:
            InputError: The model is in training mode.
            CspruneError: A state is not finite; the message counts the documents.
        """
        _check_mode(self.model)
        residual = self.residual(input_ids).to(self.unembedding.device)
        u = self.unembedding.state(self.norm.normalise(residual))
        finite = torch.isfinite(u).flatten(1).all(1)
        if not bool(finite.all()):
            raise CspruneError(
                f"the states of {int((~finite).sum())} of {len(finite)} documents of one batch are not "
                f"finite at {self.norm.name}: the weights or the dtype overflow; try --dtype float32"
            )
        return u


def _writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


class _Captured(Exception):
    """Ends a forward pass at the final norm."""


@torch.no_grad()
def load_readout(model: Any, input_ids: torch.Tensor | None = None) -> Readout:
    """Find a model's readout and prove it on real tokens.

    Args:
        model: A transformers causal language model in evaluation mode, any architecture.
        input_ids: Token ids [documents, positions] for the proof, which reads the beginnings of the first
            few, 96 tokens; if there are fewer, 96 ids drawn from the whole vocabulary.

    Returns:
        The readout. The model is as it was: no hook stays, and its weights are held by reference.

    Raises:
        InputError: The model is in training mode, is not causal, has no final norm before its head, was
            truncated before, has no embedding for a token, or its logits cannot be recomputed to
            `READOUT_TOLERANCE`; the message names the architecture and the largest difference.
        CspruneError: Logits or states that are not finite, with counts.
    """
    name = type(model).__name__
    head = _find_head(model, name)
    _check_mode(model)
    input_ids = _probe_ids(model.get_input_embeddings().weight.shape[0], input_ids, name)
    seen = trace(model, head, input_ids, name)
    names = {module: key for key, module in model.named_modules()}
    numbers = config_numbers(model.config)
    norm = identify_norm(names[seen.norm], seen.norm, head.weight.shape[1], numbers, name)
    device = head.weight.device
    unembedding = Unembedding(
        head.weight,
        getattr(head, "bias", None),
        norm.gain.to(device),
        norm.bias.to(device),
        norm.removes_mean,
        find_transform(seen, numbers, name),
    )
    tied = head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    # Views share the count of writes, and stay what was folded while a truncation is applied.
    folded = [t.detach() for module in (head, seen.norm) for t in module.parameters()]
    weights = tuple((t, _writes(t)) for t in folded)
    readout = Readout(model, names[head], norm, unembedding, tied, float("nan"), weights)
    u = readout.states(input_ids)
    readout = replace(readout, error=_prove(seen, u.flatten(0, 1), readout, head, name))
    _prove_causal(readout, input_ids, u, name)
    return readout


def _check_mode(model: Any) -> None:
    """Dropout makes every forward pass another model; switching it off is not ours to do."""
    # Resizing a vocabulary leaves new tables in training mode, which means nothing to them.
    indifferent = (nn.Linear, nn.Embedding, FactorizedHead)
    training = sum(m.training for m in model.modules() if not isinstance(m, indifferent))
    if training:
        raise InputError(
            f"{training} modules of {type(model).__name__} are in training mode: call model.eval() first"
        )


def _find_head(model: Any, name: str) -> Any:
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder model: csprune truncates causal language models")
    head = model.get_output_embeddings()
    if isinstance(head, FactorizedHead):
        raise InputError(f"the head of {name} was truncated before: give csprune the original model")
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise InputError(
            f"{name} has no output embedding with a floating [vocabulary, hidden] weight "
            f"(get_output_embeddings() gives {type(head).__name__}): load a causal language model"
        )
    for label, tensor in (("weight", weight), ("bias", getattr(head, "bias", None))):
        if tensor is not None and (bad := int((~torch.isfinite(tensor)).sum())):
            raise InputError(
                f"the head's {label} of {name} has {bad} of {tensor.numel()} values that are not "
                "finite: the checkpoint is damaged"
            )
    return head


def _prove(seen: Trace, u: torch.Tensor, readout: Readout, head: nn.Module, name: str) -> float:
    """Recompute the logits of states u [tokens, q]; the RMS error of the centred ones, relative."""
    unembedding, norm = readout.unembedding, readout.norm
    ours = unembedding.logits(u).double()
    theirs = seen.logits.to(unembedding.device).double()
    error = _relative_rms(ours, theirs)
    allowed = READOUT_TOLERANCE
    if seen.head_output.dtype in (torch.bfloat16, torch.float16):
        h = unembedding.lift(u) * unembedding.gain + unembedding.norm_bias
        rounded = unembedding.transform(head(h.to(unembedding.weight.dtype)).to(seen.logits.dtype).double())
        allowed = max(allowed, READOUT_ROUNDING_FACTOR * _relative_rms(ours, rounded))
    if not error <= allowed:
        raise InputError(
            f"the logits of {name} cannot be recomputed from {norm.name} ({norm.kind}) and its head: RMS "
            f"error {error:.1e} of their size (allowed {allowed:.1e}), largest difference "
            f"{float((ours - theirs).abs().max()):.3g}; csprune does not support this architecture"
        )
    return error


def _relative_rms(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    centred = theirs - theirs.mean(-1, keepdim=True)
    difference = ours - ours.mean(-1, keepdim=True) - centred
    return float(difference.norm() / centred.norm().clamp_min(1e-300))


def _prove_causal(readout: Readout, input_ids: torch.Tensor, u: torch.Tensor, name: str) -> None:
    """Later tokens must not change earlier states: a masked model would predict what it reads."""
    half = input_ids.shape[1] // 2
    other = input_ids.clone()
    # Every later token becomes another one, whatever the text.
    other[:, half:] = (other[:, half:] + 1) % readout.model.get_input_embeddings().weight.shape[0]
    before = u[:, :half]
    change = readout.states(other)[:, :half] - before
    if float(change.norm()) > CAUSAL_TOLERANCE * float(before.norm()):
        raise InputError(
            f"{name} is not causal: its states depend on later tokens; load a causal language model "
            "(for a BERT-like decoder, with is_decoder=true)"
        )


def _probe_ids(vocabulary: int, given: torch.Tensor | None, name: str) -> torch.Tensor:
    """The beginnings of the first documents given, or random ids, `_PROBE_TOKENS` in all."""
    if given is not None:
        length = min(given.shape[1], _PROBE_LENGTH)
        documents = -(-_PROBE_TOKENS // length)
        if len(given) >= documents and length > 1:
            given = given[:documents, :length]
            if int(given.max()) >= vocabulary:
                raise InputError(
                    f"{name} has {vocabulary} embedding rows, but the text holds token id "
                    f"{int(given.max())}: use the tokenizer that belongs to the model"
                )
            return given
    generator = torch.Generator().manual_seed(0)
    shape = (_PROBE_TOKENS // _PROBE_LENGTH, _PROBE_LENGTH)
    return torch.randint(vocabulary, shape, generator=generator)
