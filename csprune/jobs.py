"""The jobs of the command line, each from a model's name to its result.

A job checks everything that can be checked before it loads or computes, and writes last.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csprune.calibration import Calibration
from csprune.checkpoint import weights_digest
from csprune.companions import Output, check_made_from, read_output
from csprune.corpus import count_shared
from csprune.errors import InputError
from csprune.export import check_export, export
from csprune.measurement import REFERENCE, Measurement, StoredMeasurement
from csprune.models import load_model, locate_model
from csprune.pages.page import check_page_target, write_views
from csprune.preparation import (
    Prepared,
    Progress,
    calibration_windows,
    load,
    notes_on,
    prepare,
    read_calibration,
    run_calibration,
)
from csprune.readout import load_readout
from csprune.report import REPORT_FILE, check_report_target, redo_report, write_report
from csprune.settings import Settings, check_settings, check_target
from csprune.stored import measure_loaded
from csprune.truncation import STRATEGIES, canonical_method

DEFAULT_RANKS = (0.05, 0.1, 0.2)


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
    loaded = load(settings, settings.dtype or "float32", progress)
    windows = calibration_windows(settings, loaded, progress)
    readout = load_readout(loaded.model, windows.input_ids)
    partial = out.with_name(out.name + ".partial")
    calibration = run_calibration(settings, loaded, readout, windows, progress, partial)
    calibration.save(out)
    return calibration, notes_on("calibration", windows.describe(), settings.resolved("documents"))


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
    calibration = read_calibration(settings)
    folder = locate_model(settings.model, revision=settings.revision)
    check_export(folder, out, overwrite, settings.trust_remote_code)
    job = prepare(settings, calibration, [rank], progress)
    truncation = job.truncate(method, rank)
    evaluation = job.evaluate([truncation])
    report = job.summarise(evaluation)
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
    outputs: list[str],
    out: Path,
    overwrite: bool,
    progress: Progress,
) -> Result:
    """`csprune evaluate`: methods at ranks, each beside random truncation, and exported checkpoints.

    Args:
        settings: Of the job.
        methods: Where empty, all of them; beside `outputs` without `ranks`, those of the outputs alone.
        ranks: Where empty, `DEFAULT_RANKS`; beside `outputs` without `methods`, those of the outputs alone.
        outputs: Folders that `compress` wrote, measured as they load beside the same truncation in memory.
        out: The folder of the report.
        overwrite: Replace an earlier report.
        progress: Where to show how far it is.
    """
    stored = [read_output(path) for path in _different(outputs)]
    truncations = _wanted(methods, ranks, stored)
    all_ranks = list(dict.fromkeys(rank for _, rank in truncations))
    check_settings(settings, all_ranks)
    check_target(out, "folder")
    check_report_target(out, overwrite)
    check_page_target(out, overwrite)
    for output in stored:
        check_made_from(locate_model(settings.model, revision=settings.revision), output.path)
    job = prepare(settings, read_calibration(settings), all_ranks, progress)
    job.notes += [
        f"{output.path} has no report: whether these documents calibrated it is not known."
        for output in stored
        if output.calibration is None
    ]
    for output in stored:
        _check_output(job, output)
    evaluation = job.evaluate([job.truncate(method, rank) for method, rank in truncations])
    checkpoints = [_measure_output(job, output) for output in stored]
    evaluation = dataclasses.replace(evaluation, checkpoints=checkpoints)
    report = job.summarise(evaluation)
    write_report(out, evaluation, report)
    with progress.stage("Drawing"):
        write_views(out, [(report, evaluation)], [out.resolve().name])
    return Result(report, notes=job.notes)


def report_job(directories: list[str], out: Path | None, overwrite: bool, progress: Progress) -> list[Path]:
    """`csprune report`: redo the page, the summary and the pictures from the files of reports.

    Args:
        directories: Folders that `evaluate` or `compress` wrote.
        out: The folder to write; for a single report its own by default.
        overwrite: Replace an earlier page in `out`.
        progress: Where to show how far it is.

    Returns:
        The paths written.
    """
    folders = [Path(directory).expanduser() for directory in _different(directories)]
    for folder in folders:
        if not (folder / REPORT_FILE).is_file():
            raise InputError(
                f"there is no report in {folder} to compare: give a folder that evaluate or compress wrote"
            )
    if out is None and len(folders) > 1:
        raise InputError("several reports are compared on one page: give -o a folder for it")
    if out is not None:
        check_target(out, "folder")
        check_report_target(out, overwrite)
    check_page_target(out or folders[0], overwrite or out is None)
    with progress.stage("Resampling documents") as step:
        read = []
        for done, folder in enumerate(folders):
            step(done, len(folders))
            read.append(redo_report(folder))
    with progress.stage("Drawing"):
        try:
            return write_views(out or folders[0], read, [folder.resolve().name for folder in folders])
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"a report.json of {', '.join(map(str, folders))} has entries that csprune does not write "
                f"({error!r}): evaluate again"
            ) from error


def _different(folders: list[str]) -> list[str]:
    """Each folder once, whatever it is called."""
    return list({Path(each).expanduser().resolve(): each for each in reversed(folders)}.values())[::-1]


def _wanted(methods: list[str], ranks: list[float], stored: list[Output]) -> list[tuple[str, float]]:
    """The truncations to measure, each (method, rank) once, by rank."""
    wanted: dict[tuple[str, float], None] = {}
    if methods or ranks or not stored:
        chosen = [canonical_method(method) for method in methods or STRATEGIES]
        wanted |= {(method, rank): None for rank in ranks or DEFAULT_RANKS for method in chosen}
    wanted |= {(output.method, output.rank): None for output in stored}
    order = list(STRATEGIES)
    return sorted(wanted, key=lambda each: (each[1], order.index(each[0])))


def _check_output(job: Prepared, output: Output) -> None:
    """Refuse an export of another model."""
    made, own = output.calibration, job.calibration.details
    other_weights = (
        made is not None and made["dtype"] == own["dtype"] and made["fingerprint"] != own["fingerprint"]
    )
    width = job.readout.unembedding.width
    if other_weights or output.removed + output.kept != width:
        raise InputError(
            f"{output.path} was not made from {job.settings.model}: its truncation is of a head with "
            f"{output.removed + output.kept} directions"
            + (" and other weights" if other_weights else f", this one has {width}")
            + "; give the model it was made from"
        )
    if shared := count_shared(job.windows, output.documents):
        raise InputError(
            f"{shared} of {len(job.windows)} evaluation documents also calibrated {output.path}: give other "
            "evaluation text"
        )


def _measure_output(job: Prepared, output: Output) -> StoredMeasurement:
    """Load an exported checkpoint and measure it on the held-out text."""
    settings, details = job.settings, job.calibration.details
    with job.progress.stage(f"Loading {output.path}"):
        loaded = load_model(output.path, dtype=details["dtype"], device=settings.device, truncated=True)
    with job.progress.stage("Evaluating as loaded", job.windows.sequence_length) as step:
        values = measure_loaded(
            loaded.model,
            job.readout,
            job.windows,
            positions=details["positions"],
            skip_first=details["skip_first"],
            progress=step,
        )
    if output.method == REFERENCE:  # it is one random subspace
        values = {name: value[None] for name, value in values.items()}
    measurement = Measurement(output.method, output.rank, output.removed, output.kept, values)
    same = output.calibration is not None and job.calibration.same_as(output.calibration)
    weights = weights_digest(loaded.folder)
    return StoredMeasurement(output.path, details["dtype"], weights, same, measurement)
