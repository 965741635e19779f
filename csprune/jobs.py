"""The three jobs of the command line, each from a model's name to its result.

A job checks everything that can be checked before it loads or computes, and writes last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from csprune.calibration import Calibration, calibrate
from csprune.checkpoint import Checkpoint
from csprune.corpus import Windows, count_shared, read_windows
from csprune.errors import InputError
from csprune.evaluation import evaluate, stored_loss
from csprune.export import check_export, export
from csprune.measurement import Evaluation
from csprune.models import LoadedModel, load_model, locate_model
from csprune.placement import find_placement
from csprune.readout import Readout, load_readout
from csprune.report import check_report_target, summarise, write_report
from csprune.settings import DEMO, Settings, check_settings, check_target
from csprune.truncation import Truncation, canonical_method, removed_directions, truncate


class Progress(Protocol):
    """Where a job shows how far it is."""

    def stage(self, what: str, tokens: int = 1) -> Any:
        """A context manager that gives `progress(done, total)`, or None; `tokens` each step."""


@dataclass
class Result:
    """What a job did: the report, the export's details, and what was noticed on the way."""

    report: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def calibrate_job(settings: Settings, out: Path, progress: Progress) -> tuple[Calibration, list[str]]:
    """`csprune calibrate`: read text, accumulate, save; the calibration and what was noticed."""
    if settings.data is None and settings.calibration_data is None:
        raise InputError("calibrate needs text: give --data or --calibration-data")
    if settings.data is not None and settings.calibration_data is not None:
        raise InputError("--calibration-data is used instead of --data: give one of them")
    check_target(out, "file")
    loaded = _load(settings, settings.dtype or "float32", progress)
    windows = _calibration_windows(settings, loaded, progress)
    readout = load_readout(loaded.model, windows.input_ids)
    partial = out.with_name(out.name + ".partial")
    calibration = _calibrate(settings, loaded, readout, windows, progress, partial)
    calibration.save(out)
    return calibration, _notes("calibration", windows.describe(), settings.resolved("documents"))


def compress_job(
    settings: Settings,
    method: str,
    rank: float,
    out: Path,
    export_format: str,
    overwrite: bool,
    progress: Progress,
) -> Result:
    """`csprune compress`: calibrate (or read a calibration), truncate, evaluate, export."""
    method = canonical_method(method)
    check_settings(settings, [rank])
    check_target(out, "folder")
    calibration = _read_calibration(settings)
    folder = locate_model(settings.model, revision=settings.revision)
    check_export(folder, out, overwrite, settings.trust_remote_code)
    job = _prepare(settings, calibration, [rank], progress)
    truncation = job.truncate(method, rank)
    evaluation, report = job.evaluate([truncation])
    stored = job.stored_loss_change(truncation, evaluation)
    with progress.stage("Writing and verifying"):
        details = export(
            job.loaded.folder,
            truncation,
            out,
            export_format,
            base_model=settings.model,
            stored_loss_change=stored,
            input_ids=job.windows.input_ids,
            evaluation=evaluation,
            report=report,
            overwrite=overwrite,
        )
    return Result({**report, "export": details}, details, job.notes)


def evaluate_job(
    settings: Settings,
    methods: list[str],
    ranks: list[float],
    out: Path,
    overwrite: bool,
    progress: Progress,
) -> Result:
    """`csprune evaluate`: every method at every rank, each beside random truncation."""
    methods = list(dict.fromkeys(canonical_method(m) for m in methods))
    ranks = list(dict.fromkeys(ranks))
    check_settings(settings, ranks)
    check_target(out, "folder")
    check_report_target(out, overwrite)
    job = _prepare(settings, _read_calibration(settings), ranks, progress)
    truncations = [job.truncate(method, rank) for rank in ranks for method in methods]
    evaluation, report = job.evaluate(truncations)
    write_report(out, evaluation, report)
    return Result(report, notes=job.notes)


@dataclass
class _Job:
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

    def evaluate(self, truncations: list[Truncation]) -> tuple[Evaluation, dict[str, Any]]:
        """The evaluation and its report."""
        settings = self.settings
        details = self.calibration.details
        with self.progress.stage("Evaluating", self.windows.sequence_length) as step:
            evaluation = evaluate(
                self.loaded.model,
                self.windows,
                truncations,
                positions=details["positions"],
                skip_first=details["skip_first"],
                random_subspaces=settings.random_subspaces,
                seed=settings.seed,
                batch_size=settings.batch_size,
                name=settings.model,
                protocol={"name": settings.protocol, "revision": settings.revision},
                progress=step,
            )
        with self.progress.stage("Resampling documents"):
            report = summarise(evaluation, seed=settings.seed)
        return evaluation, report


def _prepare(
    settings: Settings, calibration: Calibration | None, ranks: list[float], progress: Progress
) -> _Job:
    dtype = settings.dtype or (calibration.details["dtype"] if calibration else "float32")
    loaded = _load(settings, dtype, progress)
    held_out = _evaluation_windows(settings, calibration, loaded, progress)
    read = None if calibration else _calibration_windows(settings, loaded, progress)
    documents = calibration.documents if calibration else read.document_ids if read else ()
    if shared := count_shared(held_out, documents):
        raise InputError(
            f"{shared} of {len(held_out)} evaluation documents are also calibration documents: give texts "
            "that share none, or one --data, which is divided"
        )
    readout = load_readout(loaded.model, held_out.input_ids)
    for rank in ranks:
        removed_directions(rank, readout.unembedding.width)
    if calibration is None:
        assert read is not None  # it was read above
        calibration = _calibrate(settings, loaded, readout, read, progress)
    else:
        calibration.check_model(readout)
    if held_out.bos != calibration.details["bos"]:
        raise InputError(
            f"the tokenizer {'adds' if held_out.bos else 'does not add'} a beginning-of-sequence token, "
            "unlike the calibration's: calibrate with this tokenizer"
        )
    notes = _notes(
        "calibration", calibration.details["corpus"], settings.resolved("documents") if read else 0
    )
    notes += _notes("evaluation", held_out.describe(), settings.resolved("evaluation_documents"))
    return _Job(settings, loaded, readout, calibration, held_out, progress, notes)


def _load(settings: Settings, dtype: str, progress: Progress) -> LoadedModel:
    with progress.stage(f"Loading {settings.model}"):
        return load_model(
            settings.model,
            revision=settings.revision,
            dtype=dtype,
            device=settings.device,
            trust_remote_code=settings.trust_remote_code,
        )


def _read_calibration(settings: Settings) -> Calibration | None:
    return None if settings.calibration is None else Calibration.load(settings.calibration)


def _calibration_windows(settings: Settings, loaded: LoadedModel, progress: Progress) -> Windows:
    length = settings.resolved("sequence_length")
    return _read(settings, "calibration", settings.calibration_data, "documents", length, loaded, progress)


def _evaluation_windows(
    settings: Settings, calibration: Calibration | None, loaded: LoadedModel, progress: Progress
) -> Windows:
    length = calibration.details["sequence_length"] if calibration else settings.resolved("sequence_length")
    return _read(
        settings, "confirmation", settings.evaluation_data, "evaluation_documents", length, loaded, progress
    )


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
            progress=step,
        )


def _calibrate(
    settings: Settings,
    loaded: LoadedModel,
    readout: Readout,
    windows: Windows,
    progress: Progress,
    partial: Path | None = None,
) -> Calibration:
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


def _notes(purpose: str, corpus: dict[str, Any], wanted: int) -> list[str]:
    """What text was used for a purpose, and how it differs from what was asked for."""
    if "merged" in corpus:
        return [note for part in corpus["merged"] for note in _notes(purpose, part, 0)]
    found = corpus["documents"]
    notes = [f"{purpose.capitalize()} text: {found} documents of {corpus['source']}."]
    if found < wanted:
        notes[0] = f"{notes[0][:-1]}, all there are of the {wanted} asked for."
    if corpus.get("too_short"):
        notes.append(
            f"{corpus['too_short']} of {corpus['seen']} {purpose} documents were shorter than "
            f"{corpus['sequence_length'] + 1} tokens and left out."
        )
    if corpus.get("binary_files"):
        notes.append(f"{corpus['binary_files']} binary files of {corpus['source']} were left out.")
    return notes
