"""Write a truncated model as a checkpoint: plan, validate, write, verify, rename.

Only what changes is written anew: the head's factors and the final norm's gain. Everything else is copied
byte for byte. The result appears under its name only after a fresh process has loaded it and found the
logits of the in-memory truncation.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from csprune import hf, verify
from csprune.card import model_card
from csprune.checkpoint import INDEX, Checkpoint, copy_file, rewrite
from csprune.companions import carry_over, exported_config, is_output, write_json
from csprune.comparisons import summarise
from csprune.errors import CspruneError, InputError
from csprune.files import atomic_folder
from csprune.head import apply, factorized_head, folded_norm
from csprune.identity import versions
from csprune.linalg import READOUT_TOLERANCE
from csprune.measurement import Evaluation
from csprune.models import check_source, runs_own_code
from csprune.placement import Placement, find_placement
from csprune.readout import Readout
from csprune.report import DOCUMENTS_FILE, REPORT_FILE, write_report
from csprune.truncation import Truncation

FORMATS = ("factorized",)
_CARD = "README.md"
_ORIGINAL_CARD = "README.original.md"
_REMOTE_CODE = f"{hf.REMOTE_MODULE}.py"
_WRITTEN = frozenset({"config.json", _CARD, _REMOTE_CODE, REPORT_FILE, DOCUMENTS_FILE})
_VERIFIED_TOKENS = (2, 48)
# In a lower dtype the reloaded model repeats the same products, perhaps in another order.
_LOW_DTYPE_TOLERANCE = 2e-2


def check_export(
    source: str | Path, out: str | Path, overwrite: bool = False, trust_remote_code: bool = False
) -> None:
    """Refuse, before any work, what could not be exported or would be lost.

    Args:
        source: Folder of the original checkpoint.
        out: The folder to write.
        overwrite: Whether an output of csprune may be replaced.
        trust_remote_code: Whether the model is (to be) loaded by code that comes with it.

    Raises:
        InputError: The source cannot be truncated or its class is its own; OUT is the source, in it, or not
            empty.
    """
    checkpoint = Checkpoint.open(source)
    check_source(checkpoint, trust_remote_code=True)
    if runs_own_code(checkpoint.config, trust_remote_code):
        raise InputError(
            f"{source} brings its own model class, which the truncated checkpoint would have to replace: "
            "csprune exports models of transformers' own classes; where those know the model, leave out "
            "--trust-remote-code"
        )
    out, folder = Path(out).resolve(), checkpoint.folder.resolve()
    if out == folder or folder in out.parents or out in folder.parents:
        raise InputError(f"{out} and the model's folder {folder} contain one another: choose another -o")
    _check_vacant(out, overwrite)


def _check_vacant(out: Path, overwrite: bool) -> None:
    """Refuse a place where something would be lost, or that cannot be renamed to."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"{out} is not a folder: choose another -o")
    if out.is_mount():
        raise InputError(f"{out} is a mount point, which cannot be replaced: choose a folder in it as -o")
    if any(out.iterdir()):
        if not overwrite:
            raise InputError(f"{out} is not empty: choose another -o, or add --overwrite")
        if not is_output(out):
            raise InputError(
                f"{out} is not an output of csprune, so --overwrite leaves it alone: choose another -o"
            )


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
    stored_loss_change: float | None = None,
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
        stored_loss_change: Nats, with the factors rounded to the stored dtype (`stored_loss`), if measured.
        overwrite: Replace an earlier output of csprune.

    Returns:
        What was done: names, sizes before and after, the verification's errors.

    Raises:
        InputError: The source or OUT cannot be used, or the source is not what the model was loaded from.
        CspruneError: The written checkpoint does not give the truncation's logits; nothing is left of it.
    """
    if format not in FORMATS:
        raise InputError(f"unknown export format {format!r}: choose one of {', '.join(FORMATS)}")
    readout = truncation.readout
    readout.check_unchanged()
    remote = type(readout.model).__module__.startswith("transformers_modules.")
    check_export(source, out, overwrite, remote)
    checkpoint = Checkpoint.open(source)
    if truncation.kept == readout.unembedding.hidden:
        raise InputError(
            "a truncation that keeps every direction has the dense head's shape, and stock code would load "
            "it as one: remove at least one direction"
        )
    place = find_placement(checkpoint, readout)
    head = factorized_head(truncation, place.dtype)
    factors = {f"{place.head}.{name}": value for name, value in head.named_parameters()}
    put = {
        **factors,
        **{
            stored: torch.full_like(checkpoint.tensor(stored), folded_norm(readout)[parameter])
            for parameter, stored in place.norm.items()
        },
    }
    out = Path(out).resolve()
    with atomic_folder(out) as folder:
        _check_vacant(out, overwrite)  # a replacement that was killed half-way has just been undone
        _write_weights(checkpoint, place, put, folder)
        write_json(folder / "config.json", exported_config(checkpoint, truncation, format))
        carry_over(checkpoint.folder, folder, _WRITTEN)
        copy_file(Path(hf.__file__), folder / _REMOTE_CODE)
        details = {
            "name": out.name,
            "base_model": base_model or str(source),
            "method": truncation.method,
            "rank": truncation.rank,
            "removed": truncation.removed,
            "kept": truncation.kept,
            "format": format,
            "dtype": str(place.dtype).removeprefix("torch."),
            "tied": readout.tied,
            "effective_rank": truncation.effective_rank,
            "stored_loss_change": stored_loss_change,
            "sizes": _sizes(checkpoint, readout, place, factors, folder),
            "calibration": truncation.calibration.details,
            "calibration_documents": list(truncation.calibration.documents),
            "versions": versions(),
            "verification": _verify(folder, truncation, head, input_ids),
        }
        if evaluation is not None:
            report = {**(report or summarise(evaluation)), "export": details}
            write_report(folder, evaluation, report)
        _write_card(checkpoint.folder / _CARD, folder, details, report)
        _check_vacant(out, overwrite)  # somebody may have put something there meanwhile
    return details


def _write_weights(
    checkpoint: Checkpoint, place: Placement, put: dict[str, torch.Tensor], folder: Path
) -> None:
    """Write the files that change, copy the others, then the index."""
    bias = f"{place.head}.bias"  # it lives on in the offset
    drop = {bias} & set(checkpoint.weight_map)
    weight_map = {k: f for k, f in checkpoint.weight_map.items() if k not in drop}
    weight_map |= {name: place.file for name in put if name not in weight_map}
    for file in checkpoint.files:
        here = {name: tensor for name, tensor in put.items() if weight_map[name] == file}
        dropped = {name for name in drop if checkpoint.weight_map[name] == file}
        if here or dropped:
            rewrite(checkpoint.folder / file, folder / file, here, dropped)
        else:
            copy_file(checkpoint.folder / file, folder / file)
    if checkpoint.index is None:
        return
    metadata = dict(checkpoint.index.get("metadata") or {})
    gone = [name for name in {*put, *drop} if name in checkpoint.weight_map]
    if "total_size" in metadata:
        metadata["total_size"] += sum(t.nbytes for t in put.values())
        metadata["total_size"] -= sum(checkpoint.nbytes[name] for name in gone)
    if "total_parameters" in metadata:
        metadata["total_parameters"] += sum(t.numel() for t in put.values())
        metadata["total_parameters"] -= sum(math.prod(checkpoint.shapes[name]) for name in gone)
    index = {**checkpoint.index, "metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)


def _write_card(original: Path, folder: Path, details: dict[str, Any], report: dict[str, Any] | None) -> None:
    """Write the model card, and keep the original's under another name."""
    text = original.read_text(encoding="utf-8-sig", errors="replace") if original.is_file() else None
    (folder / _CARD).write_text(model_card(details, report, text), encoding="utf-8")
    if text is not None:
        copy_file(original, folder / _ORIGINAL_CARD)


def _sizes(
    checkpoint: Checkpoint, readout: Readout, place: Placement, factors: dict, folder: Path
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
