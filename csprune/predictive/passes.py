"""Run a model up to its final norm, with what chosen modules read and write seen or replaced on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from csprune.readout import Readout
from csprune.tracing import first_tensor

Replace = Callable[[torch.Tensor], torch.Tensor]
"""Gives what a module is to read, or what it is to have written, in place of what it did."""


@torch.no_grad()
def residual(
    readout: Readout,
    input_ids: torch.Tensor,
    *,
    reads: tuple[nn.Module, Replace] | None = None,
    writes: tuple[nn.Module, Replace] | None = None,
    watch: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None] | None = None,
) -> torch.Tensor:
    """What the final norm reads, [documents, positions, d] in the model's dtype; no hook stays behind.

    Args:
        readout: Of the model.
        input_ids: [documents, positions].
        reads: A module, and what replaces the first tensor that it reads.
        writes: A module, and what replaces the first tensor that it gives.
        watch: Sees every module that ends: itself, its arguments by place and by name, and its output.

    Raises:
        InputError: The model cannot read these ids.
        CspruneError: The model did not reach its final norm.
    """
    handles: list[Any] = []
    if watch is not None:
        handles += [m.register_forward_hook(watch, with_kwargs=True) for m in readout.model.modules()]
    if reads is not None:
        module, replace_read = reads
        handles.append(
            module.register_forward_pre_hook(
                lambda _module, args, kwargs: _with_first(args, kwargs, replace_read), with_kwargs=True
            )
        )
    if writes is not None:
        module, replace_written = writes
        handles.append(
            module.register_forward_hook(lambda _module, _args, out: _with_first_of(out, replace_written))
        )
    try:
        return readout.residual(input_ids)
    finally:
        for handle in handles:
            handle.remove()


def written(output: Any) -> torch.Tensor | None:
    """The first tensor that a module gives, alone or in a tuple; None if there is none."""
    if isinstance(output, tuple | list):
        return first_tensor(tuple(output), {})
    return output if isinstance(output, torch.Tensor) else None


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: Replace
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with their first tensor replaced."""
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:place], replace(value), *args[place + 1 :]), kwargs
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return args, {**kwargs, key: replace(value)}
    return args, kwargs


def _with_first_of(output: Any, replace: Replace) -> Any:
    """A module's output with its first tensor replaced."""
    if isinstance(output, torch.Tensor):
        return replace(output)
    place = next(n for n, value in enumerate(output) if isinstance(value, torch.Tensor))
    return (*output[:place], replace(output[place]), *output[place + 1 :])
