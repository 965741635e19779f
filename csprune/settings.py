"""What a job works on: its options, their defaults, and what excludes what."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csprune.calibration import BATCH_SIZE
from csprune.errors import InputError
from csprune.evaluation import RANDOM_SUBSPACES
from csprune.persistence import is_calibration
from csprune.truncation import removed_directions

PROTOCOLS: dict[str, dict[str, Any]] = {
    "quick": {
        "documents": 128,
        "evaluation_documents": 128,
        "positions": "all",
        "equal_blocks": False,
        "sequence_length": 128,
        "skip_first": 0,
        "random_subspaces": RANDOM_SUBSPACES,
    },
    "paper": {
        "documents": 512,
        "evaluation_documents": 1024,
        "positions": "last",
        "equal_blocks": True,
        "sequence_length": 128,
        "skip_first": 0,
        "random_subspaces": RANDOM_SUBSPACES,
    },
}
"""Every setting that a protocol fixes; both resample 20,000 times (`csprune.bootstrap.DRAWS`)."""
DEMO = "demo"


@dataclass(frozen=True)
class Settings:
    """What a job works on and how; None means "as the protocol or the calibration file says".

    Attributes are named as the options of the command line.
    """

    model: str
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    data: str | None = None
    calibration_data: str | None = None
    evaluation_data: str | None = None
    calibration: Path | None = None
    protocol: str = "quick"
    documents: int | None = None
    evaluation_documents: int | None = None
    sequence_length: int | None = None
    positions: str | None = None
    skip_first: int | None = None
    seed: int = 0
    random_subspaces: int = RANDOM_SUBSPACES
    batch_size: int = BATCH_SIZE

    def resolved(self, name: str) -> Any:
        """A setting, or what the protocol says of it."""
        value = getattr(self, name, None)
        return PROTOCOLS[self.protocol][name] if value is None else value


def check_settings(settings: Settings, ranks: list[float]) -> None:
    """Refuse, before anything is loaded, what no model or text could make right.

    Args:
        settings: Of the job.
        ranks: Fractions to remove.

    Raises:
        InputError: A rank out of range, or options that exclude one another.
    """
    for rank in ranks:
        removed_directions(rank, 1 << 30)
    if settings.calibration is not None:
        for name in ("calibration_data", "documents", "positions", "skip_first", "sequence_length"):
            if getattr(settings, name) is not None:
                option = "--" + name.replace("_", "-")
                raise InputError(
                    f"{option} comes from the calibration file {settings.calibration}: leave it out, or "
                    "calibrate anew"
                )
        if settings.data is not None and settings.evaluation_data is not None:
            raise InputError("--data is not used beside --calibration and --evaluation-data: leave it out")
    elif None not in (settings.data, settings.calibration_data, settings.evaluation_data):
        raise InputError("--data is not used beside --calibration-data and --evaluation-data: leave it out")


def check_target(out: Path, kind: str) -> None:
    """Refuse an output that could not be written, before the work that would be lost.

    Args:
        out: What to write.
        kind: "file", for a calibration, or "folder".

    Raises:
        InputError: Of the other kind, in no writable place, or a file that is no calibration.
    """
    if kind == "file":
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise InputError(f"{out} cannot be written: give a file in a folder that exists")
        if out.exists() and not is_calibration(out):
            raise InputError(f"{out} is no calibration, so it is not replaced: choose another -o")
    place = out.absolute().parent if kind == "file" else out.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise InputError(f"{out} cannot be a folder, for {place} is a file: choose another -o")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written, for {place} is read-only to you: choose another -o")
