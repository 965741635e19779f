"""The reports of a tiny model, as the paper's benchmark reads them; and made-up ones."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import study_cases

import csprune
from csprune.analysis.catalogue import ANALYSES, SPECTRUM
from csprune.analysis.files import SCHEMA

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks/paper"), str(ROOT / "benchmarks")]

from claims_truncation import METHODS, RANKS  # noqa: E402  the benchmarks are no package
from why import state_geometry  # noqa: E402

DOCUMENTS, EVALUATION = 24, 30
MACHINE = {"processor": "made up", "cores": 1}


def write_reports(folder: Path, kind: str = "gpt_neox") -> None:
    """What `run.py` writes of a model, without pages."""
    case = study_cases.study_case(kind, documents=DOCUMENTS, evaluation=EVALUATION)
    read = cases.windows(0, DOCUMENTS, study_cases.LENGTH)
    held_out = cases.windows(DOCUMENTS, EVALUATION, study_cases.LENGTH)
    calibration = csprune.calibrate(case.model, read, "last", readout=case.study.readout)
    study = replace(
        case.study,
        calibrate=lambda _progress: calibration,
        conditions=lambda _progress: iter([("text, token 12", case.study)]),
    )
    for name, analyses in (("spectrum", SPECTRUM), ("analysis", ANALYSES)):
        report = {
            "schema": SCHEMA,
            "kind": name,
            "model": kind,
            "protocol": {
                "position": study_cases.LENGTH,
                "documents": DOCUMENTS,
                "evaluation_documents": EVALUATION,
                "bands": study_cases.BANDS,
                "random_subspaces": study_cases.SUBSPACES,
                "seed": 0,
                "evaluation": {"source": "tiny"},
                "versions": {"csprune": "0"},
            },
            "width": case.study.unembedding.width,
            "vocabulary": case.study.unembedding.vocabulary,
            "base_loss": {"mean": 1.0, "ci95": [0.5, 1.5]},
            "results": [analysis(study, None).describe() for analysis in analyses.values()],
        }
        _write(folder / name / f"{name}.json", report)
    made = [csprune.truncate(study.readout, calibration, each, rank) for rank in RANKS for each in METHODS]
    evaluation = csprune.evaluate(case.model, held_out, made, positions="last", random_subspaces=2)
    _write(folder / "truncations/report.json", csprune.summarise(evaluation, draws=200))
    geometry = state_geometry(study.unembedding, study.calibration.u, study.bands)
    _write(folder / "why.json", {"position": study_cases.LENGTH, **geometry, "machine": MACHINE})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
