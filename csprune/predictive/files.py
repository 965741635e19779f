"""The folder of predictive subspaces: bases as safetensors, and `subspace.json`, which comes last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from csprune.files import check_replaceable, write_files
from csprune.predictive.subspaces import SpannedSubspace, Subspace

SUBSPACE_FILE = "subspace.json"
BASES_FILE = "subspace.safetensors"
SCHEMA = 1


def check_subspace_target(directory: Path, overwrite: bool) -> None:
    """Refuse to replace files in a folder, unless they are earlier subspaces that may be overwritten.

    Raises:
        InputError: A file of these names is there, and is not ours or not to be replaced.
    """
    check_replaceable(directory, (SUBSPACE_FILE, BASES_FILE), _is_ours, "predictive subspace", overwrite)


def write_subspaces(
    directory: Path, described: dict[str, Any], subspaces: Sequence[Subspace], share: float
) -> list[Path]:
    """Write the bases and their description into a folder, which is made if need be.

    `SITE.basis` is float64 [d, dimension], orthonormal columns with the most read direction first;
    `SITE.eigenvalues` float64 [n] is the whole spectrum. The logits' subspace needs neither: its projection
    subtracts the mean.

    Args:
        directory: The folder.
        described: What `subspace.json` says, JSON values.
        subspaces: To write.
        share: Of the sum of the eigenvalues that a basis holds.

    Returns:
        The paths written.

    Raises:
        CspruneError: The files cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, **described}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    tensors: dict[str, torch.Tensor] = {}
    for each in subspaces:
        if isinstance(each, SpannedSubspace):
            # mlp_out and post may share theirs, which safetensors does not write twice.
            basis = each.basis(each.dimension(share))
            tensors[f"{each.site}.basis"] = basis.clone(memory_format=torch.contiguous_format)
            tensors[f"{each.site}.eigenvalues"] = each.eigenvalues.clone()
    (directory / BASES_FILE).unlink(missing_ok=True)  # those of other sites
    files: dict[str, Any] = {}
    if tensors:
        metadata = {"csprune_subspace": str(SCHEMA)}
        files[BASES_FILE] = lambda path: safetensors.torch.save_file(tensors, path, metadata=metadata)
    files[SUBSPACE_FILE] = text.encode()
    write_files(directory, files, "subspaces")
    return [directory / name for name in files]


def _is_ours(directory: Path) -> bool:
    try:
        described = json.loads((directory / SUBSPACE_FILE).read_text(encoding="utf-8"))
        return {"schema", "model", "protocol", "results"} <= set(described)
    except (OSError, ValueError, TypeError):
        return False
