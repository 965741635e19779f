"""What goes beside the weights of an exported checkpoint: its config, and the source's other files."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Set
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from csprune import hf
from csprune.checkpoint import Checkpoint, copy_file
from csprune.errors import InputError
from csprune.report import REPORT_FILE
from csprune.truncation import STRATEGIES, Truncation, removed_directions

_COMPARED = 4  # tensors
# Other copies of the original's weights: carried over, they would pass for the truncated model's.
_WEIGHTS = set(
    ".bin .ckpt .gguf .h5 .mlmodel .msgpack .npz .onnx .onnx_data .ot .pt .pth .safetensors .tflite".split()
)


def exported_config(checkpoint: Checkpoint, truncation: Truncation, format: str) -> dict[str, Any]:
    """The source's config with what makes transformers put the truncated head in place.

    Args:
        checkpoint: The source.
        truncation: Of its model.
        format: How the head is stored.
    """
    model = truncation.readout.model
    config = copy.deepcopy(checkpoint.config)
    config["architectures"] = config.get("architectures") or [type(model).__name__]
    # At every level of a composite config: lm-evaluation-harness ties again whatever still says so.
    for level in (config, *_inner_configs(config)):
        level["tie_word_embeddings"] = False
    # Of the whole checkpoint; the model's may be the config of a composite model's text part.
    model_type = str(config.get("model_type"))
    config_class = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else type(model.config)
    config["auto_map"] = {
        # Not the source's own classes, where transformers' are used: they know no truncated head.
        **{
            k: v
            for k, v in (config.get("auto_map") or {}).items()
            if not k.startswith(("AutoConfig", "AutoModel"))
        },
        "AutoConfig": f"{hf.REMOTE_MODULE}.{config_class.__name__}",
    }
    config["quantization_config"] = {
        "quant_method": hf.QUANT_METHOD,
        "kept": truncation.kept,
        "removed": truncation.removed,
        "rank": truncation.rank,
        "method": truncation.method,
        "format": format,
        "version": version("csprune"),
    }
    return config


def _inner_configs(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            if key == "text_config" or "model_type" in value or "tie_word_embeddings" in value:
                yield value
            yield from _inner_configs(value)


def is_output(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that csprune wrote."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config["quantization_config"]["quant_method"] == hf.QUANT_METHOD
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class Output:
    """What a checkpoint that csprune wrote says of itself.

    Attributes:
        path: As it was given.
        method: Canonical name.
        rank: Fraction removed.
        removed: Directions removed.
        kept: Directions kept.
        calibration: Details of the calibration it was made from; None where its report is gone.
        documents: Ids of the documents that it read.
    """

    path: str
    method: str
    rank: float
    removed: int
    kept: int
    calibration: dict[str, Any] | None
    documents: tuple[str, ...]


def read_output(path: str) -> Output:
    """Read what an exported checkpoint says of itself.

    Raises:
        InputError: The folder is no export of csprune's.
    """
    folder = Path(path).expanduser()
    if not is_output(folder):
        raise InputError(f"{path} is no checkpoint that csprune wrote: give the OUT of `csprune compress`")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    try:
        report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        calibration, documents = (report["export"][k] for k in ("calibration", "calibration_documents"))
    except (OSError, ValueError, KeyError, TypeError):
        calibration, documents = None, ()
    try:
        output = Output(
            path,
            *(config[name] for name in ("method", "rank", "removed", "kept")),
            calibration=calibration,
            documents=tuple(documents),
        )
        of_rank = removed_directions(output.rank, output.removed + output.kept)
        sound = output.method in STRATEGIES and output.removed == of_rank
    except (KeyError, TypeError, InputError):
        sound, output = False, None
    if output is None or not sound:
        raise InputError(
            f"the quantization_config in {folder / 'config.json'} is not what csprune writes: compress again"
        )
    return output


def check_made_from(source: Path, path: str) -> None:
    """Refuse an exported checkpoint of another model, by a few tensors that an export leaves as they are.

    Raises:
        InputError: It shares no matrix with the source, or one of the smallest differs.
    """
    original, made = Checkpoint.open(source), Checkpoint.open(Path(path).expanduser())
    shared = [
        name
        for name, shape in original.shapes.items()
        if len(shape) > 1 and made.shapes.get(name) == shape and made.dtypes[name] == original.dtypes[name]
    ]
    few = sorted(shared, key=lambda name: (original.nbytes[name], name))[:_COMPARED]
    if not few or not all(torch.equal(original.tensor(name), made.tensor(name)) for name in few):
        raise InputError(f"{path} was not made from {source}: its weights are others; give that model")


def carry_over(source: Path, folder: Path, written: Set[str]) -> None:
    """Copy every file but hidden ones and other copies of the weights, sub-folders too.

    Args:
        source: The original's folder.
        folder: The folder to fill.
        written: Names at the top that the export writes itself.
    """
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not hidden and not weights and str(relative) not in written:
            copy_file(path, folder / relative)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
