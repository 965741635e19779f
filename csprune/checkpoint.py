"""Read and rewrite safetensors checkpoints, tensor by tensor.

safetensors' own writer wants every tensor of a file in memory; here a file is rewritten by copying the
bytes of what does not change, so that memory stays at the tensors that do, and the rest is bit-identical.
The format: 8 bytes of header length, a JSON header with each tensor's dtype, shape and byte range, the data.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import safe_open

from csprune.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_COPY_BUFFER = 1 << 24
_HEADER_LIMIT = 100_000_000  # safetensors' own


def weights_digest(folder: Path) -> str:
    """SHA-256 (hex) of a checkpoint's safetensors files, by name and content: which weights these are."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        own = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_COPY_BUFFER):
                own.update(block)
        digest.update(f"{path.name} {own.hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config and safetensors weights, checked but not loaded.

    Attributes:
        folder: Where it lies.
        config: config.json as it stands.
        index: The index file's content, or None for a single file.
        weight_map: File name of each tensor.
        shapes: Shape of each tensor.
        dtypes: Dtype of each tensor, as safetensors names it ("BF16").
        nbytes: Bytes of each tensor.
    """

    folder: Path
    config: dict[str, Any]
    index: dict[str, Any] | None
    weight_map: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    nbytes: dict[str, int]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read and check a checkpoint's config, index and headers.

        Raises:
            InputError: Something is missing, damaged, pickled, or points outside the folder.
        """
        folder = Path(folder)
        config = _read_json(folder / "config.json", "give the folder of a transformers checkpoint")
        if (folder / SINGLE).is_file():  # of a folder that has both, transformers loads this one
            index = None
            weight_map = {name: SINGLE for name in _Header.read(folder / SINGLE).tensors}
        elif (folder / INDEX).is_file():
            index = _read_json(folder / INDEX, "download the checkpoint again")
            weight_map = _checked_map(index, folder)
        else:
            raise InputError(_no_weights(folder))
        entries: dict[str, dict[str, Any]] = {}
        for file in dict.fromkeys(weight_map.values()):
            header = _Header.read(folder / file)
            missing = [k for k, f in weight_map.items() if f == file and k not in header.tensors]
            if missing:
                raise InputError(
                    f"{folder / file} lacks {missing[0]} and {len(missing) - 1} more that {INDEX} names: "
                    "download the checkpoint again"
                )
            entries |= {k: v for k, v in header.tensors.items() if weight_map.get(k) == file}
        return cls(
            folder,
            config,
            index,
            weight_map,
            shapes={k: tuple(v["shape"]) for k, v in entries.items()},
            dtypes={k: v["dtype"] for k, v in entries.items()},
            nbytes={k: v["data_offsets"][1] - v["data_offsets"][0] for k, v in entries.items()},
        )

    @property
    def files(self) -> list[str]:
        """The weight files, in order."""
        return sorted(set(self.weight_map.values()))

    @property
    def bytes_on_disk(self) -> int:
        """Of the weight files together."""
        return sum((self.folder / file).stat().st_size for file in self.files)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in its stored dtype."""
        with safe_open(self.folder / self.weight_map[name], framework="pt") as file:
            return file.get_tensor(name)


def rewrite(
    source: Path, target: Path, put: Mapping[str, torch.Tensor], drop: Set[str] = frozenset()
) -> None:
    """Write a safetensors file with some tensors replaced, added or left out.

    The bytes of all others, and the file's metadata, are copied as they are.

    Args:
        source: The file to read.
        target: The file to write.
        put: Tensors to replace or to add, in the dtype to store.
        drop: Names to leave out.
    """
    header = _Header.read(source)
    entries: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    pieces: list[tuple[str, dict | None]] = []  # name, and where the old bytes are
    offset = 0
    names = [n for n in header.tensors if n not in drop] + [n for n in put if n not in header.tensors]
    for name in names:
        if name in put:
            tensor = put[name]
            size = tensor.numel() * tensor.element_size()
            entry = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)}
            pieces.append((name, None))
        else:
            old = header.tensors[name]
            size = old["data_offsets"][1] - old["data_offsets"][0]
            entry = {"dtype": old["dtype"], "shape": old["shape"]}
            pieces.append((name, old))
        entries[name] = {**entry, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data must start at a multiple of 8
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for name, old in pieces:
            if old is None:
                data = put[name].detach().contiguous().cpu().reshape(-1).view(torch.uint8)
                writer.write(data.numpy().data)
            else:
                begin, end = old["data_offsets"]
                reader.seek(header.data_start + begin)
                _copy_bytes(reader, writer, end - begin)


@dataclass(frozen=True)
class _Header:
    tensors: dict[str, Any]
    metadata: dict[str, str] | None
    data_start: int

    @classmethod
    def read(cls, path: Path) -> _Header:
        advice = "download the checkpoint again"
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > _HEADER_LIMIT:
                    raise ValueError("its header is too long")
                entries = json.loads(file.read(length))
                metadata = entries.pop("__metadata__", None)
            # In the order of the data, so that copying reads the file from front to back.
            tensors = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
            end = 0
            for name, tensor in tensors.items():
                begin, after = tensor["data_offsets"]
                if begin != end or after < begin:
                    raise ValueError(f"the data of {name} are not where they should be")
                if not {"dtype", "shape"} <= set(tensor):
                    raise ValueError(f"{name} has no dtype or no shape")
                end = after
            if path.stat().st_size != 8 + length + end:
                raise ValueError("it is cut short")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} is no complete safetensors file ({error}): {advice}") from error
        return cls(tensors, metadata, 8 + length)


def _copy_bytes(reader: Any, writer: Any, size: int) -> None:
    while size:
        block = reader.read(min(size, _COPY_BUFFER))
        if not block:
            raise OSError(f"{reader.name} became shorter while it was read")
        writer.write(block)
        size -= len(block)


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"there is no {path.name} in {path.parent}: {advice}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): {advice}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object: {advice}")
    return value


def _checked_map(index: dict[str, Any], folder: Path) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{folder / INDEX} has no weight_map: download the checkpoint again")
    for file in dict.fromkeys(weight_map.values()):
        if not isinstance(file, str) or file in ("", ".", ".."):
            raise InputError(f"{folder / INDEX} names {file!r} as a file: download the checkpoint again")
        # A link inside the folder may lead elsewhere (the hub's cache does); a name may not.
        if PurePosixPath(file).name != file or PureWindowsPath(file).name != file:
            raise InputError(
                f"{folder / INDEX} points outside its folder ({file!r}): do not use this checkpoint"
            )
        if not (folder / file).is_file():
            raise InputError(f"{folder} lacks {file}, which its index names: download it again")
    return weight_map


def _no_weights(folder: Path) -> str:
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} has only pickled weights ({pickled[0]}), which csprune never loads: convert them with "
            "transformers' save_pretrained() where you trust them, and give that folder"
        )
    return f"{folder} has no model.safetensors: give the folder of a complete transformers checkpoint"


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content, following links, into a folder that may not exist yet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
