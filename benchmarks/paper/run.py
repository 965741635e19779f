"""Redo the paper on any models, and hold what comes out against what it says.

    python benchmarks/paper/run.py MODEL... -o DIR [--data demo] [--code demo-code]
    python benchmarks/paper/run.py --redo -o DIR

For each model: `csprune spectrum` and `csprune analyze` with all analyses, `csprune evaluate` with the
paper's truncations, and how its states lie to its unembedding (`why.py`), written into folders of DIR/NAME
with the paper's protocol (the last position of 512 + 1,024 documents). From these files alone come
DIR/paper.html and paper.md, each figure beside the paper's with a verdict, and DIR/verdicts.json. A file that
DIR has already is not made again; `--redo` makes none, and takes the models of DIR/verdicts.json unless some
are named.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from claims_truncation import METHODS, RANKS
from machine import describe
from page import VERDICTS, verdicts_of, write_page
from reports import FILES, Reports
from why import state_geometry

from csprune.analysis.job import analyze_job, spectrum_job
from csprune.analysis.study import take_states
from csprune.analysis.taking import DEMO_CODE, StudySettings
from csprune.errors import CspruneError, InputError
from csprune.jobs import evaluate_job
from csprune.models import locate_model
from csprune.preparation import calibration_windows, load
from csprune.readout import load_readout
from csprune.settings import PROTOCOLS, Settings
from csprune.terminal import Terminal


def main() -> None:
    options = _options()
    try:
        print(_run(options))
    except CspruneError as error:
        sys.exit(f"Error: {error}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a local folder, a hub id, or demo")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--redo", action="store_true", help="run no model: MODEL is the name of a folder of DIR"
    )
    parser.add_argument("--data", default="demo", metavar="TEXT")
    parser.add_argument("--code", default=DEMO_CODE, metavar="TEXT")
    parser.add_argument("--protocol", choices=tuple(PROTOCOLS), default="paper")
    parser.add_argument("--documents", type=int, help="calibration documents, instead of the protocol's")
    parser.add_argument("--evaluation-documents", type=int)
    options = parser.parse_args()
    if not options.models and not options.redo:
        parser.error("name at least one model, or --redo")
    return options


def _run(options: argparse.Namespace) -> str:
    """Run what is missing, write the page, and say what came out."""
    names = list(options.models)
    if not options.redo:
        names = [locate_model(model).name for model in options.models]  # where it lies is nobody's concern
        if twice := {name for name in names if names.count(name) > 1}:
            raise InputError(f"two models are named {min(twice)!r}: rename a folder")
        for model, name in zip(options.models, names, strict=True):
            run(model, options.output / name, options)
    elif not names:
        names = _earlier(options.output / VERDICTS)
    reports = [Reports.read(options.output / name) for name in names]
    verdicts = verdicts_of(reports)
    write_page(options.output, reports, verdicts)
    counts = [{mark: sum(v.mark == mark for v in found.values()) for mark in _MARKS} for found in verdicts]
    return "\n".join(
        f"{each.name}: {', '.join(f'{count} {mark}' for mark, count in found.items())}"
        for each, found in zip(reports, counts, strict=True)
    )


_MARKS = ("reproduced", "differs", "not applicable")


def _earlier(path: Path) -> list[str]:
    """The models of an earlier page."""
    try:
        return [each["name"] for each in json.loads(path.read_text(encoding="utf-8"))["models"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): name the models") from error


def run(model: str, folder: Path, options: argparse.Namespace) -> None:
    """Make the files of a model that are not there."""
    spectrum, analysis, truncations, why = (folder / name for name in FILES)
    settings = Settings(
        model,
        data=options.data,
        protocol=options.protocol,
        positions="last",
        documents=options.documents,
        evaluation_documents=options.evaluation_documents,
    )
    study, terminal = StudySettings(code=options.code), Terminal()
    if not spectrum.is_file():
        spectrum_job(settings, study, spectrum.parent, False, terminal)
    if not analysis.is_file():
        analyze_job(settings, study, analysis.parent, False, terminal)
    if not truncations.is_file():
        evaluate_job(settings, list(METHODS), list(RANKS), [], truncations.parent, False, terminal)
    if not why.is_file():
        found = {**geometry(settings, study.bands, terminal), "machine": describe()}
        why.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def geometry(settings: Settings, bands: int, terminal: Terminal) -> dict[str, Any]:
    """How the model's states lie to its unembedding, on its calibration documents."""
    loaded = load(settings, "float32", terminal)
    windows = calibration_windows(settings, loaded, terminal)
    readout = load_readout(loaded.model, windows.input_ids)
    position = windows.sequence_length
    with terminal.stage("Calibration states", position) as step:
        states = take_states(readout, windows, [position], settings.batch_size, step)[position]
    return {"position": position, **state_geometry(readout.unembedding, states.u, bands)}


if __name__ == "__main__":
    main()
