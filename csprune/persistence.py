"""How a calibration lies on disk: one safetensors file with a JSON header, finished or partial."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from csprune.accumulators import FisherSums, Moments
from csprune.errors import InputError
from csprune.files import atomic_file

# The key of the header; one, for safetensors does not keep the order of several.
_FINISHED = "csprune_calibration"
_PARTIAL = "csprune_partial"
# Seconds between two saves of what an interrupted run resumes from.
SAVE_SECONDS = 60.0


def write_statistics(path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a finished calibration, atomically; the same statistics give the same bytes.

    Raises:
        InputError: The folder does not exist or cannot be written.
    """
    _write(path, _FINISHED, header, tensors)


def is_calibration(path: Path) -> bool:
    """Whether a file is a finished calibration: a mistaken output must not cost anybody a checkpoint."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return _FINISHED in (file.metadata() or {})
    except (safetensors.SafetensorError, OSError):
        return False


def read_statistics(path: Path, schema: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Header and tensors of a finished calibration.

    Raises:
        InputError: No such file, not a calibration, damaged, of another schema, or not finite.
    """
    if not path.is_file():
        raise InputError(f"no calibration file {path}: make one with `csprune calibrate`")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # The header first: another safetensors file may be many gigabytes.
            header = json.loads((file.metadata() or {}).get(_FINISHED, "null"))
            if not isinstance(header, dict):
                raise InputError(f"{path} is not a csprune calibration: make one with `csprune calibrate`")
            if header.get("schema") != schema:
                raise InputError(
                    f"{path} has schema {header.get('schema')}, this csprune reads {schema}: calibrate again"
                )
            # Copies, for a mapped file is aligned otherwise than memory, and sums then round otherwise.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): calibrate again") from error
    if bad := sum(int((~torch.isfinite(t)).sum()) for t in tensors.values()):
        raise InputError(f"{path} has {bad} values that are not finite: calibrate again")
    return header, tensors


def named(moments: Moments, fisher: FisherSums) -> dict[str, torch.Tensor]:
    """Both sums' tensors by the names they have on disk, by reference."""
    return {
        **{f"moments.{k}": v for k, v in moments.tensors().items()},
        **{f"fisher.{k}": v for k, v in fisher.tensors().items()},
    }


def sums_of(tensors: dict[str, torch.Tensor]) -> tuple[Moments, FisherSums]:
    """The inverse of `named`; other names are passed over.

    Raises:
        TypeError: A tensor is missing or unknown.
    """

    def of(prefix: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    return Moments(**of("moments.")), FisherSums(**of("fisher."))


class Partial:
    """What an interrupted calibration resumes from: the sums and how many documents they hold.

    Args:
        path: The file.
        settings: All that a run must share with this one to be resumed by it; JSON values.
        moments: The sums, by reference: loading fills them.
        fisher: Likewise.
    """

    def __init__(
        self, path: str | Path, settings: dict[str, Any], moments: Moments, fisher: FisherSums
    ) -> None:
        self.path = Path(path)
        self.settings = json.dumps(settings, sort_keys=True)
        self.tensors = named(moments, fisher)
        self._saved = time.monotonic()

    def load(self) -> int:
        """Fill the sums; the number of documents done, 0 if there is no file.

        Raises:
            InputError: The file cannot be read, or is of another run; it is left in place.
        """
        if not self.path.exists():
            return 0
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                state = json.loads((file.metadata() or {}).get(_PARTIAL, "{}"))
                same = state.get("settings") == self.settings
                saved = {key: file.get_tensor(key) for key in self.tensors} if same else {}
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise InputError(
                f"{self.path} cannot be read ({error}): delete it to calibrate from the start"
            ) from error
        if not same:
            raise InputError(
                f"{self.path} was left by a calibration of another model, text or settings: "
                "delete it, or repeat that command to resume it"
            )
        for key, value in self.tensors.items():
            value.copy_(saved[key])
        return state["documents"]

    def save_if_due(self, documents: int) -> None:
        """Save the sums over the first `documents` documents, if the last save is a while ago."""
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            _write(self.path, _PARTIAL, {"documents": documents, "settings": self.settings}, self.tensors)
            self._saved = time.monotonic()

    def remove(self) -> None:
        """The run is over."""
        self.path.unlink(missing_ok=True)


def _write(path: Path, key: str, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    metadata = {key: json.dumps(header, sort_keys=True)}
    with atomic_file(path) as temporary:
        safetensors.torch.save_file(
            {k: v.contiguous().cpu() for k, v in tensors.items()}, temporary, metadata=metadata
        )
