"""The jobs of `csprune spectrum` and `csprune analyze`, from a model's name to what was found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from csprune.analysis.catalogue import SPECTRUM, Analysis, chosen
from csprune.analysis.files import SCHEMA, check_analysis_target, kinds_in, read_analysis, write_analysis
from csprune.analysis.results import Result
from csprune.analysis.study import Study
from csprune.analysis.taking import (
    StudySettings,
    Texts,
    calibrate_on,
    condition_positions,
    conditions,
    read_texts,
    take,
)
from csprune.bootstrap import DRAWS, LEVEL, Resampling
from csprune.errors import CspruneError, InputError
from csprune.identity import fingerprint, versions
from csprune.pages.frame import write_whole
from csprune.pages.results_page import check_results_target, rendered
from csprune.pages.results_sections import ResultsHeading
from csprune.preparation import Progress, load, notes_on
from csprune.readout import load_readout
from csprune.settings import PROTOCOLS, Settings, check_settings, check_target
from csprune.statements import RULE

TERMS = (
    (
        "paper",
        "The Smallest Singular Directions of the Unembedding Matter Disproportionately for Next-Token "
        "Prediction, arXiv:2605.17084; sections and figures are its.",
    ),
    (
        "u, du",
        "The final norm's output without gain and bias, in the coordinates of the unembedding; its change.",
    ),
    (
        "band",
        "Singular directions of the folded, centred unembedding W; band 1 has the largest singular values.",
    ),
    (
        "logit distance D",
        "||W du||^2, logit^2: how far a change moves the logits, every token counted equally.",
    ),
    (
        "Fisher term F",
        "Var_p(W du) / 2, nats: the prediction change to second order; p the unchanged prediction.",
    ),
    ("prediction change K", "KL(p || p'), nats; p' the changed prediction."),
    (
        "loss change",
        "-log p'(y) + log p(y), nats, y the true next token; loss excess: less that of random changes.",
    ),
    (
        "random's",
        "The same in random subspaces of the same dimension, the mean over them; at equal length, each "
        "document's change is rescaled to the length of the one it stands beside.",
    ),
    ("C_b", "F per unit of D of band b, relative to random changes."),
)
TITLES = {"spectrum": "Consequence spectrum", "analysis": "Analysis of the unembedding"}


@dataclass(frozen=True)
class Found:
    """What a job found, and what was noticed on the way."""

    report: dict[str, Any]
    results: list[Result]
    heading: ResultsHeading
    notes: list[str]


def spectrum_job(
    settings: Settings, study: StudySettings, out: Path, overwrite: bool, progress: Progress
) -> Found:
    """`csprune spectrum`: the consequence spectrum and what belongs to it."""
    return _analyses_job("spectrum", settings, study, SPECTRUM, out, overwrite, progress)


def analyze_job(
    settings: Settings, study: StudySettings, out: Path, overwrite: bool, progress: Progress
) -> Found:
    """`csprune analyze`: the analyses that are asked for."""
    analyses = chosen(study.what)
    return _analyses_job("analysis", settings, study, analyses, out, overwrite, progress)


def redo_pages(directory: Path, progress: Progress) -> list[Path]:
    """`csprune report` of a folder with analyses: their pages and pictures from the figures alone.

    Returns:
        The pages written, none where the folder has no analysis.

    Raises:
        InputError: The figures are not whole.
    """
    pages = []
    for kind in kinds_in(directory):
        report, results = read_analysis(directory, kind)
        check_results_target(directory, True, kind)
        try:
            with progress.stage("Drawing"):
                files = rendered(directory, _heading(kind, report), results, page=kind)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"{kind}.json of {directory} has entries that csprune does not write ({error!r}): redo it"
            ) from error
        *_, page = write_whole(directory, files)
        pages.append(page)
    return pages


def _analyses_job(
    kind: str,
    settings: Settings,
    asked: StudySettings,
    analyses: dict[str, Analysis],
    out: Path,
    overwrite: bool,
    progress: Progress,
) -> Found:
    length = settings.resolved("sequence_length")
    position = length if asked.position is None else asked.position
    if not 1 <= position <= length:
        raise InputError(f"--position {position} is not between 1 and the {length} tokens of a document")
    if asked.instruct is not None and "conditions" not in analyses:
        raise InputError("--instruct is for the conditions: add conditions to --what, or leave it out")
    check_settings(settings, [])
    check_target(out, "folder")
    check_analysis_target(out, kind, overwrite)
    check_results_target(out, overwrite, kind)
    loaded = load(settings, settings.dtype or "float32", progress)
    texts = read_texts(settings, loaded, progress)
    readout = load_readout(loaded.model, texts.evaluation.input_ids)
    places = {position}
    if "conditions" in analyses:
        places |= set(condition_positions(length, position))
    taken = take(settings, readout, texts, sorted(places), progress, "")
    for states in taken[position]:
        states.check_varied()
    study = Study(
        readout,
        *taken[position],
        bands=asked.bands,
        subspaces=settings.random_subspaces,
        seed=settings.seed,
        calibrate=lambda step: calibrate_on(settings, loaded, readout, texts.calibration, step),
    )
    study = replace(
        study,
        conditions=lambda _step: conditions(settings, asked, loaded, study, texts, taken, progress),
    )
    results, undone = _do(analyses, study, alone=bool(asked.what) or kind == "spectrum", progress=progress)
    report = _report(kind, settings, asked, study, texts, position)
    spectrum = next((each for each in results if each.name == "consequence"), None)
    if spectrum is not None:
        report["consequence"] = spectrum.figures["consequence"]
    report["not_done"] = undone
    notes = [f"{name} was left out: {reason}" for name, reason in undone.items()]
    notes += notes_on("calibration", texts.calibration.describe(), settings.resolved("documents"))
    notes += notes_on("evaluation", texts.evaluation.describe(), settings.resolved("evaluation_documents"))
    heading = _heading(kind, report)
    with progress.stage("Drawing"):
        page = rendered(out, heading, results, page=kind)
    states = study.evaluation
    write_analysis(out, report, results, states.document_ids, states.blocks.tolist())
    write_whole(out, page)
    return Found(report, results, heading, notes)


def _do(
    analyses: dict[str, Analysis], study: Study, *, alone: bool, progress: Progress
) -> tuple[list[Result], dict[str, str]]:
    """What the analyses found, and which could not be done of this model, with the reason.

    Args:
        analyses: By name.
        study: What they are of.
        alone: They were asked for by name: one that cannot be done ends the job.
        progress: Where to show how far they are.
    """
    results, undone = [], {}
    for name, analysis in analyses.items():
        with progress.stage(f"Analysing {name}") as step:
            try:
                results.append(analysis(study, step))
            except CspruneError as error:
                if alone:
                    raise
                undone[name] = str(error)
    return results, undone


def _report(
    kind: str, settings: Settings, asked: StudySettings, study: Study, texts: Texts, position: int
) -> dict[str, Any]:
    """What is said of the run, beside its results."""
    loss = study.evaluation.outlook.loss.cpu().numpy()
    (mean,) = study.resampling.statistics(loss[:, None])
    used = {
        "documents": len(study.calibration),
        "evaluation_documents": len(study.evaluation),
        "sequence_length": texts.evaluation.sequence_length,
        "equal_blocks": settings.resolved("equal_blocks"),
        "random_subspaces": settings.random_subspaces,
    }
    fixed = PROTOCOLS[settings.protocol]
    return {
        "schema": SCHEMA,
        "kind": kind,
        "model": settings.model,
        "fingerprint": fingerprint(study.readout),
        "protocol": {
            "name": settings.protocol,
            "departures": {
                name: {"protocol": fixed[name], "here": value}
                for name, value in used.items()
                if fixed[name] != value
            },
            "position": position,
            "bands": study.bands,
            **used,
            "seed": settings.seed,
            "revision": settings.revision,
            "instruct": asked.instruct,
            "calibration": texts.calibration.describe(),
            "evaluation": texts.evaluation.describe(),
            "bootstrap": _bootstrap(study.resampling),
            "versions": versions(),
        },
        "width": study.unembedding.width,
        "vocabulary": study.unembedding.vocabulary,
        "documents": len(study.evaluation),
        "base_loss": {"mean": mean.value, "ci95": list(mean.interval() or ())},
    }


def _bootstrap(resampling: Resampling) -> dict[str, Any]:
    labels, counts = np.unique(resampling.blocks, return_counts=True)
    return {
        "draws": DRAWS,
        "seed": resampling.seed,
        "level": LEVEL,
        "documents_by_block": {str(k): int(n) for k, n in zip(labels, counts, strict=True)},
        "rule": RULE,
    }


def _heading(kind: str, report: dict[str, Any]) -> ResultsHeading:
    protocol, loss = report["protocol"], report["base_loss"]
    text = protocol["evaluation"]["source"]
    done = (
        f"The state at token {protocol['position']} of {report['documents']} documents of {text}, "
        f"about the mean of {protocol['documents']} others; {report['width']} directions in "
        f"{protocol['bands']} bands, beside {protocol['random_subspaces']} random subspaces. Base loss "
        f"{loss['mean']:.4f} nats."
    )
    hidden = ("versions", "calibration", "evaluation", "bootstrap", "departures")
    facts = [(name.replace("_", " "), str(value)) for name, value in protocol.items() if name not in hidden]
    return ResultsHeading(
        title=f"{TITLES[kind]} of {report['model']}",
        done=done,
        facts=facts,
        versions=list(protocol["versions"].items()),
        rule=RULE,
        terms=TERMS,
    )
