"""Which model, by its weights, and which software: what every artefact records."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from typing import Any

from csprune.linalg import row_blocks
from csprune.readout import Readout

# Values of a tensor that take part in the fingerprint; a smaller tensor takes part wholly.
_SAMPLED_VALUES = 4096


def fingerprint(readout: Readout) -> str:
    """SHA-256 that tells one model's weights from another's, whatever the folder is called.

    The head and the final norm take part wholly; every other tensor by its name, its shape and up to 4,096
    values evenly spaced over the whole of it (as float32), for which training changes all. The class takes
    part too.
    """
    digest = hashlib.sha256(type(readout.model).__name__.encode())
    for key, value in sorted(readout.model.state_dict().items()):
        flat = value.detach().reshape(-1)
        step = max(1, -(-flat.numel() // _SAMPLED_VALUES))
        sample = flat[::step].float().cpu().contiguous()
        digest.update(f"{key}{tuple(value.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    for tensor, _ in readout.weights:
        for rows in row_blocks(len(tensor)):
            digest.update(tensor[rows].float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def model_name(model: Any) -> str:
    """What a model calls itself: where it was loaded from, or its class."""
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


def max_positions(model: Any) -> int | None:
    """How long an input the model takes, if its config says so."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def versions() -> dict[str, str]:
    """Of csprune, what it computes with, and Python."""
    packages = ("csprune", "torch", "transformers", "tokenizers")
    return {**{p: version(p) for p in packages}, "python": platform.python_version()}
