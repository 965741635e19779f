"""Watch one forward pass: what the head reads and gives, and what the model makes of it.

Nothing goes by names: the norm is the module whose output the head is seen to read, the logit transform
is what is seen to happen to the head's output.
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
from csprune.linalg import TRANSFORM_LOW_TOLERANCE, TRANSFORM_TOLERANCE
from csprune.unembedding import LogitTransform

# Modules that may lie between the norm and the head (dropout, identity); older outputs are let go.
_RECENT_MODULES = 32
# Tokens that tell one transform from another: each has V numbers.
_TRANSFORM_TOKENS = 8


@dataclass
class Trace:
    """What one forward pass of the whole model showed.

    Attributes:
        norm: The module whose output the head reads.
        head_output: [tokens, V], in the head's dtype.
        logits: [tokens, V], as the model returns them.
    """

    norm: nn.Module
    head_output: torch.Tensor
    logits: torch.Tensor


@torch.no_grad()
def trace(model: Any, head: nn.Module, input_ids: torch.Tensor, name: str) -> Trace:
    """Run a model once and see what its head reads; no hook stays behind.

    Args:
        model: The model.
        head: Its output embedding.
        input_ids: [documents, positions].
        name: The architecture's name, for messages.

    Raises:
        InputError: The head is not run, reads no module's output, or its rows are cut.
        CspruneError: Logits that are not finite, with the count of tokens.
    """
    recent: deque[tuple[nn.Module, torch.Tensor]] = deque(maxlen=_RECENT_MODULES)
    seen: dict[str, Any] = {}

    def after(module: nn.Module, _args: tuple, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            recent.append((module, output))

    def at_head(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = first_tensor(args, kwargs)
        storage = x.untyped_storage().data_ptr()
        # The first module that made this storage is the norm; dropout and the like only pass it on.
        makers = (m for m, y in recent if y.untyped_storage().data_ptr() == storage)
        seen["norm"] = next(makers, None)
        recent.clear()

    def after_head(_module: nn.Module, _args: tuple, output: torch.Tensor) -> None:
        seen["output"] = output

    with _hooks() as hooks:
        for module in model.modules():
            if module is not head:
                hooks.append(module.register_forward_hook(after))
        hooks.append(head.register_forward_pre_hook(at_head, with_kwargs=True))
        hooks.append(head.register_forward_hook(after_head))
        with forward_errors(name, input_ids):
            result = model(input_ids=input_ids.to(input_device(model)), use_cache=False)
    logits = getattr(result, "logits", None)
    if "output" not in seen or not isinstance(logits, torch.Tensor):
        raise InputError(f"{name} does not run its output embedding: csprune cannot follow its logits")
    if seen["norm"] is None:
        raise InputError(
            f"{name}: the head {type(head).__name__} does not read the output of any module directly, "
            "so no final norm can be folded into it; csprune does not support this architecture"
        )
    rows = seen["output"].shape[-1]
    if logits.shape[-1] != rows:
        raise InputError(
            f"{name} cuts its head's {rows} rows to {logits.shape[-1]} logits: "
            "csprune does not support this architecture"
        )
    logits = logits.reshape(-1, rows)
    if bad := int((~torch.isfinite(logits)).any(1).sum()):
        raise CspruneError(
            f"{name} gives logits that are not finite for {bad} of {len(logits)} tokens: "
            "the weights are damaged or the dtype overflows; try --dtype float32"
        )
    return Trace(seen["norm"], seen["output"].reshape(-1, rows), logits)


def find_transform(seen: Trace, numbers: list[float], name: str) -> LogitTransform:
    """What turns the head's output into logits: nothing, a constant factor, or a soft cap.

    Args:
        seen: What the model did.
        numbers: Of the model's config: the exact values of what is only measured here, and every cap.
        name: The architecture's name, for messages.

    Raises:
        InputError: None of the three; the message has the nearest one's error.
    """
    # Spread over the documents.
    some = slice(None, None, max(1, len(seen.logits) // _TRANSFORM_TOKENS))
    output, logits = seen.head_output[some], seen.logits[some].double()
    x = output.double()
    # Passing a number on rounds nothing, whatever the dtype: where it is seen, nothing else needs a look.
    if torch.equal(x, logits):
        return LogitTransform()
    low = {seen.head_output.dtype, seen.logits.dtype} & {torch.bfloat16, torch.float16}
    tolerance = TRANSFORM_LOW_TOLERANCE if low else TRANSFORM_TOLERANCE

    def error(transform: LogitTransform) -> float:
        # In the model's own dtype, rounding as its code does, the right one is exact; a cap that hardly bends
        # these logits would otherwise drown in the rounding of bfloat16.
        tries = (transform(output).double(), transform(x))
        return min(float((t - logits).norm() / logits.norm().clamp_min(1e-300)) for t in tries)

    candidates = [LogitTransform(cap=v) for v in numbers]
    measured = float((x * logits).sum() / x.square().sum().clamp_min(1e-300))
    if measured:
        scale = LogitTransform(scale=measured)
        exact = [v for n in numbers for v in (n, 1 / n) if abs(v / measured - 1) < tolerance]
        nearest = min((LogitTransform(scale=v) for v in exact), key=error, default=scale)
        # The measured factor is the best by construction; the true one is hardly worse.
        candidates.append(nearest if error(nearest) <= 2 * error(scale) else scale)
    best = min(candidates, key=error, default=LogitTransform())
    if not error(best) <= tolerance:
        raise InputError(
            f"{name} changes its head's output by neither a constant factor nor a soft cap (the nearest "
            f"differs by {error(best):.1e} of the logits' size): csprune does not support this architecture"
        )
    return best


def config_numbers(config: Any) -> list[float]:
    """Every positive number of a model's config, nested ones too, in order, without repeats."""
    found: dict[float, None] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
            found.setdefault(float(value))

    walk(config.to_dict())
    return list(found)


def first_tensor(args: tuple, kwargs: dict) -> Any:
    """What a module reads, however it was passed; None if there is no tensor."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)


def input_device(model: Any) -> torch.device:
    """Where input ids belong."""
    return model.get_input_embeddings().weight.device


@contextmanager
def forward_errors(name: str, input_ids: torch.Tensor) -> Iterator[None]:
    """Give what a model raises at an input it cannot take one form.

    Raises:
        InputError: With the architecture, the input's shape and the model's own reason.
    """
    try:
        yield
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        if isinstance(error, torch.OutOfMemoryError) or "memory" in reason:
            raise
        documents, length = input_ids.shape
        raise InputError(
            f"{name} cannot read {documents} x {length} tokens ({type(error).__name__}: {reason}): "
            "choose a shorter --sequence-length, or the architecture is not supported"
        ) from error


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
