"""The three jobs of the command line, each from a model's name to its result.

A job checks everything that can be checked before it loads or computes, and writes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from csprune.calibration import BATCH_SIZE, Calibration, calibrate
from csprune.corpus import Windows, count_shared, read_windows
from csprune.errors import InputError
from csprune.evaluation import RANDOM_SUBSPACES, evaluate
from csprune.export import check_export, export
from csprune.models import LoadedModel, load_model, locate_model
from csprune.readout import Readout, load_readout
from csprune.report import summarise, write_report
from csprune.truncation import Truncation, canonical_method, removed_directions, truncate

PROTOCOLS: dict[str, dict[str, Any]] = {
    "quick": {"documents": 128, "evaluation_documents": 128, "positions": "all"},
    "paper": {"documents": 512, "evaluation_documents": 1024, "positions": "last"},
}
DRAWS = 20_000
DEMO = "demo"


class Progress(Protocol):
    """Where a job shows how far it is."""

    def stage(self, what: str, tokens: int = 1) -> Any:
        """A context manager that gives `progress(done, total)`, or None; `tokens` each step."""


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
        value = getattr(self, name)
        defaults = {"sequence_length": 128, "skip_first": 0, **PROTOCOLS[self.protocol]}
        return defaults[name] if value is None else value


@dataclass
class Result:
    """What a job did: the report, the export's details, and what was noticed on the way."""

    report: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def calibrate_job(settings: Settings, out: Path, progress: Progress) -> Calibration:
    """`csprune calibrate`: read text, accumulate, save."""
    if not (settings.data or settings.calibration_data):
        raise InputError("calibrate needs text: give --data or --calibration-data")
    _check_sources(settings)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"{out} cannot be written: give a file in a folder that exists")
    loaded = _load(settings, settings.dtype or "float32", progress)
    windows = _calibration_windows(settings, loaded, progress)
    readout = load_readout(loaded.model, windows.input_ids)
    calibration = _calibrate(settings, loaded, readout, windows, progress, _partial(out))
    calibration.save(out)
    return calibration


def compress_job(
    settings: Settings, method: str, rank: float, out: Path, overwrite: bool, progress: Progress
) -> Result:
    """`csprune compress`: calibrate (or read a calibration), truncate, evaluate, export."""
    method = canonical_method(method)
    calibration = _read_calibration(settings)
    check_export(locate_model(settings.model, revision=settings.revision), out, overwrite)
    with _prepared(settings, calibration, [rank], progress) as job:
        truncation = truncate(job.readout, job.calibration, method, rank, seed=settings.seed)
        evaluation, report = job.evaluate([truncation])
        with progress.stage("Writing and verifying"):
            details = export(
                job.loaded.folder,
                truncation,
                out,
                base_model=settings.model,
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
    if out.is_file():
        raise InputError(f"{out} is a file: give a folder")
    if (out / "report.json").exists() and not overwrite:
        raise InputError(f"{out} holds a report already: choose another -o, or add --overwrite")
    calibration = _read_calibration(settings)
    with _prepared(settings, calibration, ranks, progress) as job:
        truncations = [
            truncate(job.readout, job.calibration, method, rank, seed=settings.seed)
            for rank in ranks
            for method in methods
        ]
        evaluation, report = job.evaluate(truncations)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{out} cannot be made ({error.strerror}): choose another -o") from error
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

    def evaluate(self, truncations: list[Truncation]):
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
            report = summarise(evaluation, draws=DRAWS, seed=settings.seed)
        return evaluation, report


@contextmanager
def _prepared(
    settings: Settings, calibration: Calibration | None, ranks: list[float], progress: Progress
) -> Iterator[_Job]:
    _check_sources(settings)
    for rank in ranks:
        removed_directions(rank, 1 << 30)  # the range, before anything is loaded
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
    notes = []
    for what, corpus in (
        ("calibration", calibration.details["corpus"]),
        ("evaluation", held_out.describe()),
    ):
        if corpus.get("too_short"):
            notes.append(
                f"{corpus['too_short']} of {corpus['seen']} {what} documents were shorter than "
                f"{corpus['sequence_length'] + 1} tokens and left out."
            )
    yield _Job(settings, loaded, readout, calibration, held_out, progress, notes)


def _check_sources(settings: Settings) -> None:
    if settings.calibration and (settings.calibration_data or settings.documents):
        raise InputError(
            "--calibration FILE replaces --calibration-data and --documents: give one or the other"
        )
    for name in ("positions", "skip_first", "sequence_length"):
        if settings.calibration and getattr(settings, name) is not None:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} comes from the calibration file: leave it out, or calibrate anew")
    if settings.data and settings.calibration_data and settings.evaluation_data:
        raise InputError("--data is not used beside --calibration-data and --evaluation-data: leave it out")


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
    return Calibration.load(settings.calibration) if settings.calibration else None


def _calibration_windows(settings: Settings, loaded: LoadedModel, progress: Progress) -> Windows:
    whole = settings.calibration_data
    return _read(
        "calibration text",
        loaded,
        progress,
        source=whole or settings.data or DEMO,
        documents=settings.resolved("documents"),
        sequence_length=settings.resolved("sequence_length"),
        block="all" if whole else "calibration",
    )


def _evaluation_windows(
    settings: Settings, calibration: Calibration | None, loaded: LoadedModel, progress: Progress
) -> Windows:
    whole = settings.evaluation_data
    return _read(
        "evaluation text",
        loaded,
        progress,
        source=whole or settings.data or DEMO,
        documents=settings.resolved("evaluation_documents"),
        sequence_length=calibration.details["sequence_length"]
        if calibration
        else settings.resolved("sequence_length"),
        block="all" if whole else "confirmation",
    )


def _read(what: str, loaded: LoadedModel, progress: Progress, *, source: str, **options: Any) -> Windows:
    with progress.stage(f"Reading {what}") as step:
        return read_windows(loaded.tokenizer, source, progress=step, **options)


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


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")
