"""From the settings of a job to a loaded model with its calibration and held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from csprune.calibration import Calibration, calibrate
from csprune.checkpoint import Checkpoint
from csprune.comparisons import summarise
from csprune.corpus import Windows, count_shared, read_windows
from csprune.errors import InputError
from csprune.evaluation import evaluate
from csprune.measurement import Evaluation
from csprune.models import LoadedModel, load_model
from csprune.placement import find_placement
from csprune.readout import Readout, load_readout
from csprune.settings import DEMO, PROTOCOLS, Settings
from csprune.stored import stored_loss
from csprune.truncation import Truncation, removed_directions, truncate


class Progress(Protocol):
    """Where a job shows how far it is."""

    def stage(self, what: str, tokens: int = 1) -> Any:
        """A context manager that gives `progress(done, total)`, or None; `tokens` each step."""


@dataclass
class Prepared:
    """A loaded model with its readout, calibration and held-out text."""

    settings: Settings
    loaded: LoadedModel
    readout: Readout
    calibration: Calibration
    windows: Windows
    progress: Progress
    notes: list[str]

    def truncate(self, method: str, rank: float) -> Truncation:
        """A truncation; a note is left where the calibration text did not visit every direction."""
        truncation = truncate(self.readout, self.calibration, method, rank, seed=self.settings.seed)
        visited, width = truncation.effective_rank, truncation.removed + truncation.kept
        if visited is not None and visited < width:
            note = (
                f"The calibration states span {visited} of {width} directions; the others are taken as never "
                "used: calibrate on more text."
            )
            if note not in self.notes:
                self.notes.append(note)
        return truncation

    def stored_loss_change(self, truncation: Truncation, evaluation: Evaluation) -> float | None:
        """The loss change of the factors as the checkpoint will store them; None where that is in float32."""
        dtype = find_placement(Checkpoint.open(self.loaded.folder), self.readout).dtype
        if dtype in (torch.float32, torch.float64):
            return None
        details = self.calibration.details
        with self.progress.stage("Evaluating as stored", self.windows.sequence_length) as step:
            loss = stored_loss(
                truncation,
                self.windows,
                dtype,
                positions=details["positions"],
                skip_first=details["skip_first"],
                batch_size=self.settings.batch_size,
                progress=step,
            )
        return float((loss - evaluation.base_loss).mean())

    def evaluate(self, truncations: list[Truncation]) -> Evaluation:
        """Measure truncations on the held-out text."""
        settings = self.settings
        details = self.calibration.details
        with self.progress.stage("Evaluating", self.windows.sequence_length) as step:
            return evaluate(
                self.loaded.model,
                self.windows,
                truncations,
                positions=details["positions"],
                skip_first=details["skip_first"],
                random_subspaces=settings.random_subspaces,
                seed=settings.seed,
                batch_size=settings.batch_size,
                name=settings.model,
                protocol=self._protocol(),
                progress=step,
            )

    def summarise(self, evaluation: Evaluation) -> dict[str, Any]:
        """The report of an evaluation."""
        with self.progress.stage("Resampling documents"):
            return summarise(evaluation, seed=self.settings.seed)

    def _protocol(self) -> dict[str, Any]:
        """The protocol by name, all that it sets, and where this run departs from it."""
        settings, details = self.settings, self.calibration.details
        used = {name: settings.resolved(name) for name in PROTOCOLS[settings.protocol]}
        used |= {name: details[name] for name in ("positions", "skip_first", "sequence_length")}
        used |= {
            "documents": len(self.calibration.documents),
            "evaluation_documents": len(self.windows),
            "random_subspaces": settings.random_subspaces,
        }
        return {
            "name": settings.protocol,
            "departures": {
                name: {"protocol": value, "here": used[name]}
                for name, value in PROTOCOLS[settings.protocol].items()
                if used[name] != value
            },
            "revision": settings.revision,
            "sequence_length": used["sequence_length"],
            "equal_blocks": used["equal_blocks"],
        }


def prepare(
    settings: Settings, calibration: Calibration | None, ranks: list[float], progress: Progress
) -> Prepared:
    """Load the model, read the texts, prove the readout, and calibrate unless a calibration is given.

    Raises:
        InputError: What the model, the texts and the settings cannot be together.
    """
    dtype = settings.dtype or (calibration.details["dtype"] if calibration else "float32")
    loaded = load(settings, dtype, progress)
    length = calibration.details["sequence_length"] if calibration else settings.resolved("sequence_length")
    held_out = evaluation_windows(settings, length, loaded, progress)
    read = None if calibration else calibration_windows(settings, loaded, progress)
    documents = calibration.documents if calibration else read.document_ids if read else ()
    check_disjoint(held_out, documents)
    readout = load_readout(loaded.model, held_out.input_ids)
    for rank in ranks:
        removed_directions(rank, readout.unembedding.width)
    if calibration is None:
        assert read is not None  # it was read above
        calibration = run_calibration(settings, loaded, readout, read, progress)
    else:
        calibration.check_model(readout)
    if held_out.bos != calibration.details["bos"]:
        raise InputError(
            f"the tokenizer {'adds' if held_out.bos else 'does not add'} a beginning-of-sequence token, "
            "unlike the calibration's: calibrate with this tokenizer"
        )
    notes = notes_on(
        "calibration", calibration.details["corpus"], settings.resolved("documents") if read else 0
    )
    notes += notes_on("evaluation", held_out.describe(), settings.resolved("evaluation_documents"))
    return Prepared(settings, loaded, readout, calibration, held_out, progress, notes)


def check_disjoint(held_out: Windows, calibration_documents: Sequence[str]) -> None:
    """Refuse to judge on what was calibrated on.

    Raises:
        InputError: Documents are in both, with their count.
    """
    if shared := count_shared(held_out, calibration_documents):
        raise InputError(
            f"{shared} of {len(held_out)} evaluation documents are also calibration documents: give texts "
            "that share none, or one --data, which is divided"
        )


def load(settings: Settings, dtype: str, progress: Progress) -> LoadedModel:
    """The model of the settings."""
    with progress.stage(f"Loading {settings.model}"):
        return load_model(
            settings.model,
            revision=settings.revision,
            dtype=dtype,
            device=settings.device,
            trust_remote_code=settings.trust_remote_code,
        )


def read_calibration(settings: Settings) -> Calibration | None:
    """The calibration file of the settings, if they name one."""
    return None if settings.calibration is None else Calibration.load(settings.calibration)


def calibration_windows(settings: Settings, loaded: LoadedModel, progress: Progress) -> Windows:
    """The calibration text of the settings."""
    length = settings.resolved("sequence_length")
    return _read(settings, "calibration", settings.calibration_data, "documents", length, loaded, progress)


def evaluation_windows(
    settings: Settings, sequence_length: int, loaded: LoadedModel, progress: Progress
) -> Windows:
    """The held-out text of the settings."""
    name = "evaluation_documents"
    return _read(settings, "confirmation", settings.evaluation_data, name, sequence_length, loaded, progress)


def _read(
    settings: Settings,
    block: str,
    whole: str | None,
    documents: str,
    sequence_length: int,
    loaded: LoadedModel,
    progress: Progress,
) -> Windows:
    """The text of a purpose: `whole`, or else its block of --data."""
    divided = DEMO if settings.data is None else settings.data
    purpose = "evaluation" if block == "confirmation" else block
    with progress.stage(f"Reading {purpose} text") as step:
        return read_windows(
            loaded.tokenizer,
            divided if whole is None else whole,
            documents=settings.resolved(documents),
            sequence_length=sequence_length,
            block=block if whole is None else "all",
            equal_blocks=block == "confirmation" and settings.resolved("equal_blocks"),
            progress=step,
        )


def run_calibration(
    settings: Settings,
    loaded: LoadedModel,
    readout: Readout,
    windows: Windows,
    progress: Progress,
    partial: Path | None = None,
) -> Calibration:
    """Calibrate as the settings say; an interrupted run resumes from `partial`."""
    with progress.stage("Calibrating", windows.sequence_length) as step:
        return calibrate(
            loaded.model,
            windows,
            settings.resolved("positions"),
            settings.resolved("skip_first"),
            readout=readout,
            batch_size=settings.batch_size,
            name=settings.model,
            partial=partial,
            progress=step,
        )


def notes_on(purpose: str, corpus: dict[str, Any], wanted: int) -> list[str]:
    """What text was used for a purpose, and how it differs from what was asked for."""
    if "merged" in corpus:
        return [note for part in corpus["merged"] for note in notes_on(purpose, part, 0)]
    found = corpus["documents"]
    notes = [f"{purpose.capitalize()} text: {found} documents of {corpus['source']}."]
    if found < wanted:
        notes[0] = f"{notes[0][:-1]}, all there are of the {wanted} asked for."
    if corpus.get("too_short"):
        notes.append(
            f"{corpus['too_short']} of {corpus['seen']} {purpose} documents were shorter than "
            f"{corpus['sequence_length'] + 1} tokens and left out."
        )
    if corpus.get("unmatched"):
        notes.append(f"{corpus['unmatched']} {purpose} documents were left out to make the two blocks equal.")
    if corpus.get("binary_files"):
        notes.append(f"{corpus['binary_files']} binary files of {corpus['source']} were left out.")
    return notes
