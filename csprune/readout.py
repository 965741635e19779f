"""Find the final norm and the head of any causal language model, and prove them.

Nothing goes by names: the head is what `get_output_embeddings()` returns, the norm is the module whose
output the head is seen to read, the logit transform is what is seen to happen to the head's output.
Then the logits of real tokens are recomputed from the captured residuals and compared with the model's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csprune.errors import CspruneError, InputError
from csprune.hf import FactorizedHead
from csprune.linalg import READOUT_ROUNDING_FACTOR, READOUT_TOLERANCE
from csprune.norms import FinalNorm, identify_norm
from csprune.unembedding import LogitTransform, Unembedding

# Modules that may lie between the norm and the head (dropout, identity); older outputs are let go.
_RECENT_MODULES = 32
# Tokens of the proof: enough for every row of the head to matter, few enough to cost nothing.
_PROBE_TOKENS = 96
_PROBE_LENGTH = 32
_TRANSFORM_TOKENS = 8


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
    """

    model: Any
    head_name: str
    norm: FinalNorm
    unembedding: Unembedding
    tied: bool
    error: float

    @property
    def norm_module(self) -> nn.Module:
        """The final norm's module."""
        return self.model.get_submodule(self.norm.name)

    @torch.no_grad()
    def states(self, input_ids: torch.Tensor) -> torch.Tensor:
        """States u [documents, positions, q], float64, of input ids [documents, positions].

        Runs the model up to its final norm: neither norm nor head is computed by the model.

        Raises:
            CspruneError: A state is not finite; the message counts the documents.
        """
        captured: list[torch.Tensor] = []

        def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured.append(_first_tensor(args, kwargs))
            raise _Captured

        handle = self.norm_module.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.model(input_ids=input_ids.to(_input_device(self.model)), use_cache=False)
        except _Captured:
            pass
        finally:
            handle.remove()
        if not captured:
            raise CspruneError(
                f"{type(self.model).__name__} did not reach its final norm {self.norm.name}: "
                "load the model and its readout anew"
            )
        residual = captured[0].to(self.unembedding.device)
        u = self.unembedding.state(self.norm.normalise(residual))
        finite = torch.isfinite(u).flatten(1).all(1)
        if not bool(finite.all()):
            raise CspruneError(
                f"the states of {int((~finite).sum())} of {len(finite)} documents of one batch are not "
                f"finite at {self.norm.name}: the weights or the dtype overflow; try --dtype float32"
            )
        return u.reshape(*input_ids.shape, self.unembedding.width)


class _Captured(Exception):
    """Ends a forward pass at the final norm."""


@torch.no_grad()
def load_readout(model: Any, input_ids: torch.Tensor | None = None) -> Readout:
    """Find a model's readout and prove it on real tokens.

    Args:
        model: A transformers causal language model in evaluation mode, any architecture.
        input_ids: Token ids [documents, positions], at least 64 tokens, for the proof; by default 96
            ids drawn from the whole vocabulary.

    Raises:
        InputError: The model is not causal, has no final norm before its head, was truncated before,
            or its logits cannot be recomputed to `READOUT_TOLERANCE`; the message names the
            architecture and the largest difference.
    """
    name = type(model).__name__
    head = _find_head(model, name)
    input_ids = _probe_ids(model.get_input_embeddings().weight.shape[0], input_ids)
    trace = _trace(model, head, input_ids, name)
    norm_name = next(key for key, module in model.named_modules() if module is trace.norm)
    numbers = _config_floats(model.config)
    norm = identify_norm(norm_name, trace.norm, head.weight.shape[1], numbers)
    device = head.weight.device
    unembedding = Unembedding(
        head.weight,
        head.bias,
        norm.gain.to(device),
        norm.bias.to(device),
        norm.removes_mean,
        _find_transform(trace, numbers, name),
    )
    error = _prove(trace, norm, unembedding, head, name)
    tied = head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    head_name = next(key for key, module in model.named_modules() if module is head)
    readout = Readout(model, head_name, norm, unembedding, tied, error)
    _prove_causal(readout, input_ids, name)
    return readout


def _find_head(model: Any, name: str) -> nn.Linear:
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder model: csprune truncates causal language models")
    head = model.get_output_embeddings()
    if isinstance(head, FactorizedHead):
        raise InputError(f"the head of {name} was truncated before: give csprune the original model")
    weight = getattr(head, "weight", None)
    if head is None or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        raise InputError(
            f"{name} has no output embedding with a [vocabulary, hidden] weight "
            f"(get_output_embeddings() gives {type(head).__name__}): load a causal language model"
        )
    for label, tensor in (("weight", weight), ("bias", getattr(head, "bias", None))):
        if tensor is not None and (bad := int((~torch.isfinite(tensor)).sum())):
            raise InputError(
                f"the head's {label} of {name} has {bad} of {tensor.numel()} values that are not "
                "finite: the checkpoint is damaged"
            )
    return head


@dataclass
class _Trace:
    """What one forward pass of the whole model showed."""

    norm: nn.Module
    residual: torch.Tensor  # the norm's input [tokens, d]
    head_input: torch.Tensor  # [tokens, d]
    head_output: torch.Tensor  # [tokens, V]
    logits: torch.Tensor  # [tokens, V]


def _trace(model: Any, head: nn.Module, input_ids: torch.Tensor, name: str) -> _Trace:
    recent: deque[tuple[nn.Module, torch.Tensor, torch.Tensor]] = deque(maxlen=_RECENT_MODULES)
    seen: dict[str, Any] = {}

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        source = _first_tensor(args, kwargs)
        if isinstance(source, torch.Tensor) and isinstance(output, torch.Tensor):
            recent.append((module, source, output))

    def at_head(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = _first_tensor(args, kwargs)
        storage = x.untyped_storage().data_ptr()
        seen["input"] = x
        # The first module that made this storage is the norm; dropout and the like only pass it on.
        for module, source, output in recent:
            if output.untyped_storage().data_ptr() == storage and output.numel() == x.numel():
                seen["norm"], seen["residual"] = module, source
                break
        recent.clear()

    def after_head(_module: nn.Module, _args: tuple, output: torch.Tensor) -> None:
        seen["output"] = output

    with _hooks() as hooks:
        for module in model.modules():
            if module is not head:
                hooks.append(module.register_forward_hook(after, with_kwargs=True))
        hooks.append(head.register_forward_pre_hook(at_head, with_kwargs=True))
        hooks.append(head.register_forward_hook(after_head))
        result = model(input_ids=input_ids.to(_input_device(model)), use_cache=False)
    logits = getattr(result, "logits", None)
    if "input" not in seen or not isinstance(logits, torch.Tensor):
        raise InputError(f"{name} does not run its output embedding: csprune cannot follow its logits")
    if "norm" not in seen:
        raise InputError(
            f"{name}: the head {type(head).__name__} does not read the output of any module directly, "
            "so no final norm can be folded into it; csprune does not support this architecture"
        )
    width, rows = seen["input"].shape[-1], seen["output"].shape[-1]
    if logits.shape[-1] != rows:
        raise InputError(
            f"{name} cuts its head's {rows} rows to {logits.shape[-1]} logits: "
            "csprune does not support this architecture"
        )
    return _Trace(
        seen["norm"],
        seen["residual"].reshape(-1, width),
        seen["input"].reshape(-1, width),
        seen["output"].reshape(-1, rows),
        logits.reshape(-1, rows),
    )


def _find_transform(trace: _Trace, numbers: list[float], name: str) -> LogitTransform:
    """What turns the head's output into logits: nothing, a constant factor, or a soft cap."""
    # Spread over the documents; a few tokens have V numbers each to tell one transform from another.
    some = slice(None, None, max(1, len(trace.logits) // _TRANSFORM_TOKENS))
    x, logits = trace.head_output[some].double(), trace.logits[some].double()
    low = {trace.head_output.dtype, trace.logits.dtype} & {torch.bfloat16, torch.float16}
    tolerance = 1e-2 if low else 1e-5
    candidates = [LogitTransform()]
    factor = float((x * logits).sum() / x.square().sum().clamp_min(1e-300))
    # A number of the config is the exact value of what float32 only measures.
    exact = [v for n in numbers for v in (n, 1 / n) if abs(v / factor - 1) < tolerance] if factor else []
    candidates += [LogitTransform(scale=v) for v in (*exact, factor)]
    candidates += [LogitTransform(cap=v) for v in numbers if v > 0]
    best, transform = min(
        ((float((t(x) - logits).norm() / logits.norm()), t) for t in candidates),
        key=lambda pair: pair[0],
    )
    for simpler in candidates:  # an earlier candidate that fits as well is the simpler one
        if float((simpler(x) - logits).norm() / logits.norm()) <= max(2 * best, 1e-9):
            transform = simpler
            break
    if not best <= tolerance:
        raise InputError(
            f"{name} changes its head's output by neither a constant factor nor a soft cap (the nearest "
            f"differs by {best:.1e} of the logits' size): csprune does not support this architecture"
        )
    return transform


def _prove(trace: _Trace, norm: FinalNorm, unembedding: Unembedding, head: nn.Linear, name: str) -> float:
    """Recompute the logits from the residuals; the RMS error of the centred ones, relative."""
    device = unembedding.device
    u = unembedding.state(norm.normalise(trace.residual.to(device)))
    ours = unembedding.logits(u).double()
    theirs = trace.logits.to(device).double()
    if not bool(torch.isfinite(theirs).all()):
        bad = int((~torch.isfinite(theirs)).any(1).sum())
        raise CspruneError(
            f"{name} gives logits that are not finite for {bad} of {len(theirs)} tokens: "
            "the weights are damaged or the dtype overflows; try --dtype float32"
        )
    error = _relative_rms(ours, theirs)
    allowed = READOUT_TOLERANCE
    dtype = trace.head_output.dtype
    if dtype in (torch.bfloat16, torch.float16):
        h = unembedding.lift(u) * unembedding.gain + unembedding.norm_bias
        rounded = unembedding.transform(head(h.to(head.weight.dtype)).to(trace.logits.dtype).double())
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


def _prove_causal(readout: Readout, input_ids: torch.Tensor, name: str) -> None:
    """Later tokens must not change earlier states: a masked model would predict what it reads."""
    half = input_ids.shape[1] // 2
    other = input_ids.clone()
    other[:, half:] = input_ids.flip(1)[:, half:].roll(1, 0)
    before = readout.states(input_ids)[:, :half]
    change = readout.states(other)[:, :half] - before
    if float(change.norm()) > 1e-2 * float(before.norm()):
        raise InputError(
            f"{name} is not causal: its states depend on later tokens; load a causal language model "
            "(for a BERT-like decoder, with is_decoder=true)"
        )


def _probe_ids(vocabulary: int, given: torch.Tensor | None) -> torch.Tensor:
    """The beginnings of the first documents given, or random ids, `_PROBE_TOKENS` in all."""
    if given is not None:
        length = min(given.shape[1], _PROBE_LENGTH)
        documents = -(-_PROBE_TOKENS // length)
        if len(given) >= documents and length > 1:
            return given[:documents, :length]
    generator = torch.Generator().manual_seed(0)
    shape = (_PROBE_TOKENS // _PROBE_LENGTH, _PROBE_LENGTH)
    return torch.randint(vocabulary, shape, generator=generator)


def _config_floats(config: Any) -> list[float]:
    """Every positive number of the config, nested ones too, in order, without repeats."""
    found: dict[float, None] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
            found.setdefault(float(value))

    walk(config.to_dict())
    return list(found)


def _first_tensor(args: tuple, kwargs: dict) -> Any:
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)


def _input_device(model: Any) -> torch.device:
    return model.get_input_embeddings().weight.device


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
