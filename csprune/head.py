"""Swap a model's head for a truncated one in memory, and back."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from csprune.errors import InputError
from csprune.hf import FactorizedHead
from csprune.readout import Readout
from csprune.truncation import Truncation


class Applied:
    """A truncation that is in effect on its model; leaving the `with` block undoes it.

    The norm's gain is folded into the head while it is applied, so that `hidden_states[-1]` is the
    normalised residual without gain and bias.
    """

    def __init__(self, model: Any, head_name: str, undo: list[tuple[Any, str, Any]]) -> None:
        self._model = model
        self._head_name = head_name
        self._undo = undo

    @property
    def head(self) -> FactorizedHead:
        """The truncated head, while it is applied."""
        return self._model.get_submodule(self._head_name)

    def restore(self) -> None:
        """Put the original head, norm and tie back, the very same tensors; a second call does nothing."""
        while self._undo:
            owner, name, value = self._undo.pop()
            setattr(owner, name, value)

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, _type: type | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.restore()


def factorized_head(truncation: Truncation, dtype: torch.dtype) -> FactorizedHead:
    """The truncated head as a module in evaluation mode, its parameters in `dtype`."""
    unembedding = truncation.readout.unembedding
    factors = truncation.factors(dtype)
    head = FactorizedHead(unembedding.hidden, unembedding.vocabulary, truncation.kept, dtype, "meta")
    head.weight = nn.Parameter(factors.up, requires_grad=False)
    head.down = nn.Parameter(factors.down, requires_grad=False)
    head.offset = nn.Parameter(factors.offset, requires_grad=False)
    return head.eval()


def apply(model: Any, truncation: Truncation, *, head: FactorizedHead | None = None) -> Applied:
    """Truncate a model's head in memory.

    Args:
        model: The model whose readout was truncated.
        truncation: From `truncate`.
        head: The head to put in place instead of one in the model's dtype (to try rounded factors).

    Returns:
        A handle that restores the model, also as a context manager.

    Raises:
        InputError: The truncation is of another model, or one is applied already.
    """
    readout = truncation.readout
    if readout.model is not model:
        raise InputError(
            "the truncation was made of another model object: load_readout() this one and truncate it"
        )
    dense = model.get_submodule(readout.head_name)
    if isinstance(dense, FactorizedHead):
        raise InputError("a truncation is applied to this model already: restore() it first")
    head = factorized_head(truncation, dense.weight.dtype) if head is None else head
    # Everything is made before anything is put in place: a failure leaves the model as it was.
    parent, _, leaf = readout.head_name.rpartition(".")
    changes: list[tuple[Any, str, Any]] = [(model.get_submodule(parent), leaf, head)]
    for name, value in folded_norm(readout).items():
        old = getattr(readout.norm_module, name)
        new = torch.full_like(old, value)
        changes.append(
            (readout.norm_module, name, nn.Parameter(new, False) if isinstance(old, nn.Parameter) else new)
        )
    # tie_weights() would put the embedding's table back in the head's place.
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        if hasattr(config, "tie_word_embeddings"):
            changes.append((config, "tie_word_embeddings", False))
    if hasattr(model, "all_tied_weights_keys"):
        changes.append((model, "all_tied_weights_keys", {}))
    undo = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    return Applied(model, readout.head_name, undo)


def folded_norm(readout: Readout) -> dict[str, float]:
    """What each parameter of the final norm holds once the norm is folded into the head."""
    norm = readout.norm
    values: dict[str, float] = {}
    if norm.gain_parameter is not None:
        values[norm.gain_parameter] = norm.folded_gain
    if norm.bias_parameter is not None:
        values[norm.bias_parameter] = 0.0
    return values
