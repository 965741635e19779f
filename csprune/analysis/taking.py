"""From a model and the names of texts to the states that a study is of, and to the conditions beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from csprune.analysis.study import BANDS, States, Study, take_states
from csprune.calibration import Calibration, calibrate
from csprune.corpus import Windows, check_fits
from csprune.errors import InputError
from csprune.identity import max_positions
from csprune.models import LoadedModel
from csprune.preparation import Progress, calibration_windows, check_disjoint, evaluation_windows, load
from csprune.readout import Readout, load_readout
from csprune.settings import Settings

CONDITION_POSITIONS = (8, 32, 128)
"""Where the paper's conditions take the state, counted from 1 (Section 3.3)."""
DEMO_CODE = "demo-code"


@dataclass(frozen=True)
class StudySettings:
    """What an analysis needs beside the settings that all jobs share.

    Attributes:
        position: Of the state in each document, counted from 1; None for the last.
        bands: Of the spectrum.
        what: Names of analyses; empty for all of `csprune analyze`'s.
        code: Text of code, for the conditions.
        instruct: A second model of the pair, for the conditions; None for none.
    """

    position: int | None = None
    bands: int = BANDS
    what: Sequence[str] = ()
    code: str = DEMO_CODE
    instruct: str | None = None


@dataclass(frozen=True)
class Texts:
    """The windows of one text: to calibrate and to evaluate on."""

    calibration: Windows
    evaluation: Windows


def condition_positions(length: int, position: int) -> list[int]:
    """Those of the conditions that documents of a length have, or else the study's own."""
    return [each for each in CONDITION_POSITIONS if each <= length] or [position]


def read_texts(settings: Settings, loaded: LoadedModel, progress: Progress) -> Texts:
    """The text to calibrate and to evaluate on; both fit the model, and share no document."""
    read = calibration_windows(settings, loaded, progress)
    held_out = evaluation_windows(settings, settings.resolved("sequence_length"), loaded, progress)
    for windows in (read, held_out):
        if len(windows) < 2:
            raise InputError(f"{len(windows)} document of {windows.source} is too few: give at least 2")
        vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
        check_fits(windows, vocabulary, max_positions(loaded.model), settings.model)
    check_disjoint(held_out, read.document_ids)
    return Texts(read, held_out)


def take(
    settings: Settings,
    readout: Readout,
    texts: Texts,
    positions: list[int],
    progress: Progress,
    of: str,
) -> dict[int, tuple[States, States]]:
    """By position the states of the calibration and of the evaluation documents."""
    both = []
    for purpose, windows in (("calibration", texts.calibration), ("evaluation", texts.evaluation)):
        with progress.stage(f"Taking {purpose} states{of}", max(positions)) as step:
            both.append(take_states(readout, windows, positions, settings.batch_size, step))
    return {position: (both[0][position], both[1][position]) for position in positions}


def calibrate_on(
    settings: Settings, loaded: LoadedModel, readout: Readout, windows: Windows, step: Any
) -> Calibration:
    """As the paper's truncations are calibrated: mu and saliencies at the last position, M at all."""
    return calibrate(
        loaded.model,
        windows,
        "last",
        readout=readout,
        batch_size=settings.batch_size,
        name=settings.model,
        progress=step,
    )


def conditions(
    settings: Settings,
    asked: StudySettings,
    loaded: LoadedModel,
    study: Study,
    texts: Texts,
    taken: dict[int, tuple[States, States]],
    progress: Progress,
) -> Iterator[tuple[str, Study]]:
    """Studies of prose and code at each position, and of the instruct model on the same texts."""
    length = texts.evaluation.sequence_length
    positions = condition_positions(length, study.evaluation.position)
    for position in positions:
        # What is measured of the study already is not measured again.
        same = position == study.evaluation.position
        yield f"text, token {position}", study if same else study.beside(*taken[position])
    code = replace(settings, data=asked.code, calibration_data=None, evaluation_data=None)
    of_code = read_texts(code, loaded, progress)
    states = take(settings, study.readout, of_code, positions, progress, " of code")
    for position in positions:
        yield f"code, token {position}", study.beside(*states[position])
    if asked.instruct is None:
        return
    other = replace(settings, model=asked.instruct, revision=None)
    second = load(other, settings.dtype or "float32", progress)
    name = "instruct"
    for label, source in (("text", other), ("code", replace(code, model=asked.instruct, revision=None))):
        own = read_texts(source, second, progress)
        readout = load_readout(second.model, own.evaluation.input_ids)
        states = take(other, readout, own, positions, progress, f" of {name}")
        first = Study(
            readout,
            *states[positions[0]],
            bands=asked.bands,
            subspaces=settings.random_subspaces,
            seed=settings.seed,
        )
        for position in positions:
            yield f"{name}: {label}, token {position}", first.beside(*states[position])
