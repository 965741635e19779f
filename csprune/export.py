"""Write a truncated model as a checkpoint: plan, validate, write, verify, rename.

Only what changes is written anew: the head's factors and the final norm's gain. Everything else is copied
byte for byte. The result appears under its name only after a fresh process has loaded it and found the
logits of the in-memory truncation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from csprune import hf, verify
from csprune.calibration import versions
from csprune.card import model_card
from csprune.checkpoint import INDEX, Checkpoint, copy_file, rewrite, stored_bytes
from csprune.errors import CspruneError, InputError
from csprune.files import atomic_folder
from csprune.head import apply, factorized_head, folded_norm
from csprune.linalg import READOUT_TOLERANCE, row_blocks
from csprune.measurement import Evaluation
from csprune.models import check_source
from csprune.readout import Readout
from csprune.report import summarise, write_report
from csprune.truncation import Truncation

FORMATS = ("factorized",)
REMOTE_CODE = "csprune_hf.py"
_VERIFIED_TOKENS = (2, 48)
# Other copies of the original's weights: carried over, they would pass for the truncated model's.
_OTHER_WEIGHTS = {
    ".bin",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".safetensors",
    ".ckpt",
    ".ot",
}
# In a lower dtype the reloaded model repeats the same products, perhaps in another order.
_LOW_DTYPE_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Place:
    """Where the checkpoint keeps what changes.

    Attributes:
        head: Prefix of the head's tensors.
        head_file: File that the factors go to.
        norm: Stored name of each of the final norm's parameters.
        dtype: Of the head, which its factors keep.
    """

    head: str
    head_file: str
    norm: dict[str, str]
    dtype: torch.dtype


def check_export(source: str | Path, out: str | Path, overwrite: bool = False) -> None:
    """Refuse, before any work, what could not be exported or would be lost.

    Args:
        source: Folder of the original checkpoint.
        out: The folder to write.
        overwrite: Whether an output of csprune may be replaced.

    Raises:
        InputError: The source cannot be truncated or has its own config class; OUT is the source, in it,
            or not empty.
    """
    checkpoint = Checkpoint.open(source)
    check_source(checkpoint, trust_remote_code=True)
    if "AutoConfig" in (checkpoint.config.get("auto_map") or {}):
        raise InputError(
            f"{source} brings its own config class, which the truncated checkpoint would have to replace: "
            "csprune exports models of transformers' own classes"
        )
    out, folder = Path(out).resolve(), checkpoint.folder.resolve()
    if out == folder or folder in out.parents or out in folder.parents:
        raise InputError(f"{out} and the model's folder {folder} contain one another: choose another -o")
    if out.is_file():
        raise InputError(f"{out} is a file: choose another -o")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise InputError(f"{out} is not empty: choose another -o, or add --overwrite")
        if not _is_ours(out):
            raise InputError(
                f"{out} is not an output of csprune, so --overwrite leaves it alone: choose another -o"
            )


def _is_ours(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config["quantization_config"]["quant_method"] == hf.QUANT_METHOD
    except (OSError, ValueError, KeyError, TypeError):
        return False


@torch.no_grad()
def export(
    source: str | Path,
    truncation: Truncation,
    out: str | Path,
    format: str = "factorized",
    *,
    base_model: str | None = None,
    input_ids: torch.Tensor | None = None,
    evaluation: Evaluation | None = None,
    report: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a truncated checkpoint.

    Args:
        source: Folder of the checkpoint that the truncated model was loaded from.
        truncation: From `truncate`; its model must have its original head in place.
        out: The folder to write: absent, empty, or (with `overwrite`) an earlier output.
        format: How the head is stored; see `FORMATS`.
        base_model: Name of the original for the card; by default the source's.
        input_ids: Token ids [documents, positions] of real text for the verification.
        evaluation: What the truncation cost, written beside the model.
        report: Its summary, if it was made before.
        overwrite: Replace an earlier output of csprune.

    Returns:
        What was done: names, sizes before and after, the verification's errors.

    Raises:
        InputError: The source or OUT cannot be used, or the source is not what the model was loaded from.
        CspruneError: The written checkpoint does not give the truncation's logits; nothing is left of it.
    """
    if format not in FORMATS:
        raise InputError(f"unknown export format {format!r}: choose one of {', '.join(FORMATS)}")
    check_export(source, out, overwrite)
    checkpoint = Checkpoint.open(source)
    readout = truncation.readout
    if truncation.kept == readout.unembedding.hidden:
        raise InputError(
            "a truncation that keeps every direction has the dense head's shape, and stock code would load "
            "it as one: remove at least one direction"
        )
    place = _find_place(checkpoint, readout)
    head = factorized_head(truncation, place.dtype)
    factors = {f"{place.head}.{name}": value for name, value in head.named_parameters()}
    put = {
        **factors,
        **{
            stored: torch.full_like(checkpoint.tensor(stored), folded_norm(readout)[parameter])
            for parameter, stored in place.norm.items()
        },
    }
    out = Path(out)
    base_model = base_model or str(source)
    with atomic_folder(out) as folder:
        _write_weights(checkpoint, place, put, folder)
        details = {
            "name": out.name,
            "base_model": base_model,
            "method": truncation.method,
            "rank": truncation.rank,
            "removed": truncation.removed,
            "kept": truncation.kept,
            "format": format,
            "dtype": str(place.dtype).removeprefix("torch."),
            "tied": readout.tied,
            "effective_rank": truncation.effective_rank,
            "sizes": _sizes(checkpoint, readout, place, factors, folder),
            "calibration": truncation.calibration.details,
            "versions": versions(),
        }
        _write_config(checkpoint, truncation, format, folder)
        _carry_over(checkpoint, folder)
        copy_file(Path(hf.__file__), folder / REMOTE_CODE)
        details["verification"] = _verify(folder, truncation, head, input_ids)
        if evaluation is not None:
            report = {**(report or summarise(evaluation)), "export": details}
            write_report(folder, evaluation, report)
        original = checkpoint.folder / "README.md"
        text = original.read_text(encoding="utf-8", errors="replace") if original.is_file() else None
        (folder / "README.md").write_text(model_card(details, report, text), encoding="utf-8")
        if text is not None:
            copy_file(original, folder / "README.original.md")
    return details


def _find_place(checkpoint: Checkpoint, readout: Readout) -> Place:
    """Find the head and norm in the checkpoint by name or, where names differ, by their values."""
    model_weight = readout.unembedding.weight
    embedding = next(
        f"{name}.weight"
        for name, module in readout.model.named_modules()
        if module is readout.model.get_input_embeddings()
    )
    name = f"{readout.head_name}.weight"
    if name not in checkpoint.weight_map and not readout.tied:
        candidates = [
            key
            for key, shape in checkpoint.shapes.items()
            if shape == tuple(model_weight.shape)
            and key != embedding
            and _same_values(checkpoint, key, model_weight)
        ]
        if len(candidates) != 1:
            raise _foreign(checkpoint, f"{len(candidates)} tensors of the head's values")
        name = candidates[0]
    stored = name if name in checkpoint.weight_map else None
    if stored and not _same_values(checkpoint, stored, model_weight):
        raise _foreign(checkpoint, f"another {stored}")
    norm = {parameter: _find_vector(checkpoint, readout, parameter) for parameter in folded_norm(readout)}
    reference = stored or _embedding_key(checkpoint, embedding, model_weight)
    dtype = checkpoint.tensor(reference).dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InputError(
            f"{reference} is stored as {dtype}: csprune truncates heads in bfloat16, float16 or float32"
        )
    file = checkpoint.weight_map[stored or next(iter(norm.values()), reference)]
    return Place(name.removesuffix(".weight"), file, norm, dtype)


def _embedding_key(checkpoint: Checkpoint, name: str, weight: torch.Tensor) -> str:
    """The stored input embedding of a tied model."""
    same = [k for k, shape in checkpoint.shapes.items() if shape == tuple(weight.shape)]
    for key in sorted(same, key=lambda k: k != name):
        if _same_values(checkpoint, key, weight):
            return key
    raise _foreign(checkpoint, "no tensor of the tied head's values")


def _find_vector(checkpoint: Checkpoint, readout: Readout, parameter: str) -> str:
    value = getattr(readout.norm_module, parameter)
    name = f"{readout.norm.name}.{parameter}"
    # A checkpoint of the bare model lacks the prefix of the causal one.
    names = [name, name.removeprefix(f"{readout.model.base_model_prefix}.")]
    same = [
        key
        for key, shape in checkpoint.shapes.items()
        if shape == tuple(value.shape) and _same_values(checkpoint, key, value)
    ]
    for key in names:
        if key in same:
            return key
    if len(same) == 1:
        return same[0]
    raise _foreign(checkpoint, f"{len(same)} tensors of the values of {name}")


def _same_values(checkpoint: Checkpoint, name: str, value: torch.Tensor) -> bool:
    stored = checkpoint.tensor(name)
    if stored.shape != value.shape:
        return False
    return all(
        torch.equal(stored[rows].to(value.dtype), value[rows].to("cpu")) for rows in row_blocks(len(value))
    )


def _foreign(checkpoint: Checkpoint, found: str) -> InputError:
    return InputError(
        f"{checkpoint.folder} has {found}: it is not what the truncated model was loaded from, or the "
        "model was changed since; give its own folder"
    )


def _write_weights(checkpoint: Checkpoint, place: Place, put: dict[str, torch.Tensor], folder: Path) -> None:
    bias = f"{place.head}.bias"  # it lives on in the offset
    drop = {bias} & set(checkpoint.weight_map)
    weight_map = {k: f for k, f in checkpoint.weight_map.items() if k not in drop}
    weight_map |= {name: place.head_file for name in put if name not in weight_map}
    for file in checkpoint.files:
        here = {name: tensor for name, tensor in put.items() if weight_map[name] == file}
        dropped = {name for name in drop if checkpoint.weight_map[name] == file}
        if here or dropped:
            rewrite(checkpoint.folder / file, folder / file, here, dropped)
        else:
            copy_file(checkpoint.folder / file, folder / file)
    if checkpoint.index is not None:
        metadata = dict(checkpoint.index.get("metadata") or {})
        if "total_size" in metadata:
            before = sum(checkpoint.tensor(n).nbytes for n in {*put, *drop} if n in checkpoint.weight_map)
            metadata["total_size"] += stored_bytes(put) - before
        if "total_parameters" in metadata:
            gone = sum(checkpoint.tensor(n).numel() for n in {*put, *drop} if n in checkpoint.weight_map)
            metadata["total_parameters"] += sum(t.numel() for t in put.values()) - gone
        index = {
            **checkpoint.index,
            "metadata": metadata,
            "weight_map": dict(sorted(weight_map.items())),
        }
        _write_json(folder / INDEX, index)


def _sizes(
    checkpoint: Checkpoint, readout: Readout, place: Place, factors: dict, folder: Path
) -> dict[str, dict[str, int]]:
    unembedding = readout.unembedding
    item = torch.empty((), dtype=place.dtype).element_size()
    before = unembedding.weight.numel() + (unembedding.vocabulary if unembedding.bias is not None else 0)
    after = sum(t.numel() for t in factors.values())
    return {
        "before": {
            "head_parameters": before,
            "head_bytes": before * item,
            "bytes_on_disk": checkpoint.bytes_on_disk,
        },
        "after": {
            "head_parameters": after,
            "head_bytes": after * item,
            "bytes_on_disk": sum(p.stat().st_size for p in folder.glob("*.safetensors")),
        },
    }


def _write_config(checkpoint: Checkpoint, truncation: Truncation, format: str, folder: Path) -> None:
    model = truncation.readout.model
    config = json.loads(json.dumps(checkpoint.config))
    class_name = type(model.config).__name__
    config["architectures"] = config.get("architectures") or [type(model).__name__]
    # At both levels of a composite config: lm-evaluation-harness ties again whatever still says so.
    for level in (
        config,
        *(v for v in config.values() if isinstance(v, dict) and "model_type" in v),
    ):
        level["tie_word_embeddings"] = False
    config["auto_map"] = {
        **(config.get("auto_map") or {}),
        "AutoConfig": f"{Path(REMOTE_CODE).stem}.{class_name}",
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
    _write_json(folder / "config.json", config)


def _carry_over(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy every other file but hidden ones and other copies of the weights."""
    written = {"README.md", "config.json", REMOTE_CODE, "report.json", "documents.parquet", INDEX}
    for path in sorted(checkpoint.folder.rglob("*")):
        relative = path.relative_to(checkpoint.folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        weights = path.suffix in _OTHER_WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not hidden and not weights and str(relative) not in written:
            copy_file(path, folder / relative)


def _verify(
    folder: Path, truncation: Truncation, head: hf.FactorizedHead, input_ids: torch.Tensor | None
) -> dict[str, Any]:
    """Load the checkpoint in a fresh process; refuse it unless it gives the truncation's logits."""
    model = truncation.readout.model
    if input_ids is None:
        generator = torch.Generator().manual_seed(0)
        rows = model.get_input_embeddings().weight.shape[0]
        input_ids = torch.randint(rows, _VERIFIED_TOKENS, generator=generator)
    input_ids = input_ids[: _VERIFIED_TOKENS[0], : _VERIFIED_TOKENS[1]].contiguous()
    # What is compared is what was written: the factors as they were rounded to the stored dtype.
    rounded = head.to(truncation.readout.unembedding.device, model.dtype)
    device = model.get_input_embeddings().weight.device
    with apply(model, truncation, head=rounded):
        logits = model(input_ids=input_ids.to(device), use_cache=False).logits.float().cpu()
    allowed = READOUT_TOLERANCE if model.dtype == torch.float32 else _LOW_DTYPE_TOLERANCE
    with tempfile.TemporaryDirectory(prefix="csprune-verify-") as scratch:
        expected = Path(scratch) / "expected.safetensors"
        safetensors.torch.save_file({"input_ids": input_ids, "logits": logits}, expected)
        command = [sys.executable, verify.__file__, str(folder), str(expected)]
        command.append(str(model.dtype).removeprefix("torch."))
        # A cache of its own: transformers would keep this temporary folder's code for ever.
        environment = {**os.environ, "HF_MODULES_CACHE": scratch, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise CspruneError(
            f"the exported checkpoint does not load: {' '.join(done.stderr.split())[-400:]}; nothing was kept"
        )
    result = json.loads(done.stdout.splitlines()[-1])
    errors = [result[when]["rms_error"] for when in ("loaded", "after_tie_weights")]
    keys = [k for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if result[k]]
    if keys or not max(errors) <= allowed:
        raise CspruneError(
            f"the exported checkpoint, reloaded, differs from the truncation by {max(errors):.1e} of the "
            f"logits' size (allowed {allowed:.1e}){'; ' + ', '.join(keys) if keys else ''}; nothing "
            "was kept: please report this architecture"
        )
    return {
        "tokens": input_ids.numel(),
        "allowed": allowed,
        **{when: result[when] for when in ("loaded", "after_tie_weights")},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
