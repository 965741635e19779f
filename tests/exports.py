"""What the tests of exported checkpoints share: tiny truncations, exported in one process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

import csprune

# `csprune.export` the function hides `csprune.export` the module.
export_module = importlib.import_module("csprune.export")
IDS = torch.randint(4, tiny.VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(7))


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def truncated(model: Any, method: str = "fisher", rank: float = 0.3) -> csprune.Truncation:
    windows = csprune.read_windows(tiny.tokenizer(), tiny.texts(8), documents=8, sequence_length=16)
    return csprune.truncate(csprune.load_readout(model), csprune.calibrate(model, windows), method, rank)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(input_ids=ids).logits.double()


def truncated_logits(truncation: csprune.Truncation, ids: torch.Tensor = IDS) -> torch.Tensor:
    model = truncation.readout.model
    with csprune.apply(model, truncation):
        return logits(model, ids)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """RMS of the difference of the centred logits, relative."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    return float((a - b).norm() / b.norm())


@contextmanager
def unverified() -> Iterator[None]:
    """Export without the second process, which only repeats what these tests look at themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "_verify", lambda *_: {})
        yield


def export_quickly(source: Path, truncation: csprune.Truncation, out: Path, **options: Any) -> Path:
    with unverified():
        csprune.export(source, truncation, out, **options)
    return out
