"""Find where a checkpoint keeps the head and the final norm of a loaded model.

Stored names may differ from the modules' (transformers renames on loading, and a checkpoint of the bare model
lacks the causal one's prefix), so that every tensor is proved by its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from csprune.checkpoint import Checkpoint
from csprune.errors import InputError
from csprune.head import folded_norm
from csprune.linalg import row_blocks
from csprune.readout import Readout

# As safetensors names them: what the factors can be stored in.
_HEAD_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Placement:
    """Where the checkpoint keeps what changes.

    Attributes:
        head: Prefix of the head's tensors.
        file: File that the factors go to.
        norm: Stored name of each of the final norm's parameters.
        dtype: Of the head, which its factors keep.
    """

    head: str
    file: str
    norm: dict[str, str]
    dtype: torch.dtype


def find_placement(checkpoint: Checkpoint, readout: Readout) -> Placement:
    """Find the head and the norm in the checkpoint by name or, where names differ, by their values.

    Args:
        checkpoint: Of the model's folder.
        readout: Of the model that was loaded from it, its head in place and unchanged.

    Raises:
        InputError: The tensors are not there or differ: the checkpoint is another model's, or the model was
            changed since; or the head is stored in a dtype that csprune does not write.
    """
    weight = readout.unembedding.weight
    head = _find_head(checkpoint, readout)
    norm = {parameter: _find_vector(checkpoint, readout, parameter) for parameter in folded_norm(readout)}
    stored = head if head in checkpoint.weight_map else _find_table(checkpoint, weight)
    if checkpoint.dtypes[stored] not in _HEAD_DTYPES:
        raise InputError(
            f"{stored} is stored as {checkpoint.dtypes[stored]}: csprune truncates heads in bfloat16, "
            "float16 or float32"
        )
    dtype = _HEAD_DTYPES[checkpoint.dtypes[stored]]
    # A tied head's factors go where the norm is: the embedding's file is then only copied.
    near = head if head in checkpoint.weight_map else next(iter(norm.values()), stored)
    return Placement(head.removesuffix(".weight"), checkpoint.weight_map[near], norm, dtype)


def _find_head(checkpoint: Checkpoint, readout: Readout) -> str:
    """The head's stored name; the module's own where a tied one is not stored."""
    weight = readout.unembedding.weight
    name = f"{readout.head_name}.weight"
    if name in checkpoint.weight_map:
        if not _same_values(checkpoint, name, weight):
            raise _foreign(checkpoint, f"another {name}")
        return name
    if readout.tied:
        return name
    # The table of an untied model may have the head's values all the same, but not its name.
    model = readout.model
    table = model.get_input_embeddings()
    embedding = next(key for key, module in model.named_modules() if module is table)
    same = [k for k in _same_tensors(checkpoint, weight) if not _ends_alike(k, f"{embedding}.weight")]
    if len(same) != 1:
        raise _foreign(checkpoint, f"{len(same)} tensors of the head's values")
    return same[0]


def _find_table(checkpoint: Checkpoint, weight: torch.Tensor) -> str:
    """The stored input embedding of a tied model."""
    same = _same_tensors(checkpoint, weight)
    if not same:
        raise _foreign(checkpoint, "no tensor of the tied head's values")
    return same[0]


def _find_vector(checkpoint: Checkpoint, readout: Readout, parameter: str) -> str:
    """The stored name of a parameter of the final norm."""
    name = f"{readout.norm.name}.{parameter}"
    same = _same_tensors(checkpoint, getattr(readout.norm_module, parameter))
    if name in same:
        return name
    # Norms that were never trained have equal values: the name that ends as the module's does is meant.
    named = [key for key in same if _ends_alike(key, name)] or same
    if len(named) != 1:
        raise _foreign(checkpoint, f"{len(named)} tensors of the values of {name}")
    return named[0]


def _ends_alike(a: str, b: str) -> bool:
    """Whether one name is the other without its first parts."""
    return f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")


def _same_tensors(checkpoint: Checkpoint, value: torch.Tensor) -> list[str]:
    shape = tuple(value.shape)
    return [k for k, s in checkpoint.shapes.items() if s == shape and _same_values(checkpoint, k, value)]


def _same_values(checkpoint: Checkpoint, name: str, value: torch.Tensor) -> bool:
    if checkpoint.shapes[name] != tuple(value.shape):
        return False
    stored = checkpoint.tensor(name)
    return all(
        torch.equal(stored[rows].to(value.dtype), value[rows].to("cpu")) for rows in row_blocks(len(value))
    )


def _foreign(checkpoint: Checkpoint, found: str) -> InputError:
    return InputError(
        f"{checkpoint.folder} has {found}: it is not what the truncated model was loaded from, or the "
        "model was changed since; give its own folder"
    )
