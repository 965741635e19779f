"""The comparisons of an analysis, recomputed from the oracle's effects of the same changes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import analysis_oracle as oracle_of
import numpy as np
import pytest
import torch
from study_cases import BANDS, SUBSPACES, StudyCase, study_case

import csprune
from csprune.analysis.results import Estimate, Result, Row, Statement, Table, read_result
from csprune.analysis.study import States, Study

# RMSNorm; LayerNorm with biases of norm and head; a logit scale under either norm; a soft cap.
KINDS = ("llama", "phi", "granite", "cohere", "gemma2")
COMPARED = ("logit_distance", "fisher_term", "prediction_change", "loss_change")


@cache
def case_of(kind: str) -> StudyCase:
    return study_case(kind)


def bottom_columns(case: StudyCase) -> np.ndarray:
    """The bottom band's directions in the oracle's coordinates."""
    directions = oracle_of.folded_bands(case.folded)
    return directions[:, slice(*oracle_of.bands(directions.shape[0], BANDS)[-1])]


def bottom_change(case: StudyCase) -> tuple[np.ndarray, np.ndarray]:
    """The bottom band's change of the evaluation states, and the random ones not rescaled."""
    band = bottom_columns(case)
    mean = case.calibration_u.mean(axis=0)
    du = oracle_of.change(case.evaluation_u, oracle_of.projector(band), mean)
    bases = [each[:, : band.shape[1]] for each in case.random_bases]
    return du, oracle_of.random_changes(case.evaluation_u, bases, mean)


def effects_of(
    case: StudyCase, du: np.ndarray, random: np.ndarray, folded: Any = None, u: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Of a change, and of its references as they are; of another readout's states where these are given."""
    folded = case.folded if folded is None else folded
    u = case.evaluation_u if u is None else u
    own = oracle_of.effects(oracle_of.fixed_scale(folded, u, du), case.targets)
    return own, oracle_of.effects_of_all(folded, u, random, case.targets)


def check_comparison(
    result: Result,
    table: Table,
    label: str,
    own: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
    *,
    prefix: str | None = None,
) -> None:
    """A row of a comparison, and the values it is made of, are the oracle's."""
    prefix = f"{result.name}.{label}" if prefix is None else prefix
    for name in COMPARED:
        assert result.values[f"{prefix}.{name}"] == pytest.approx(own[name], rel=1e-6, abs=1e-10)
        found = result.values[f"{prefix}.random.{name}"]
        assert found.shape == (SUBSPACES, len(own[name]))
        assert found == pytest.approx(reference[name], rel=1e-6, abs=1e-10)
    cells = row(table, label).cells
    for name in COMPARED[:-1]:
        assert value(cells[name]) == pytest.approx(oracle_of.pooled_ratio(own[name], reference[name]))
    loss = oracle_of.excess(own["loss_change"], reference["loss_change"])
    assert value(cells["loss_excess"]) == pytest.approx(loss.mean(), rel=1e-6, abs=1e-10)
    for key, name in (
        ("fisher_per_distance", "fisher_term"),
        ("change_per_distance", "prediction_change"),
    ):
        expected = oracle_of.consequence(
            own[name], own["logit_distance"], reference[name], reference["logit_distance"]
        )
        assert value(cells[key]) == pytest.approx(expected)


def check_json(result: Result) -> None:
    """A result is JSON without NaN, and comes back as it was."""
    described = json.loads(json.dumps(result.describe(), allow_nan=False))
    assert read_result(described).describe() == described
    assert all(np.isfinite(each).all() for each in result.values.values())
    assert "Args:" not in result.definition and len(result.definition) > 200
    assert result.findings and not any("nan" in each for each in result.findings)


def table(result: Result, name: str) -> Table:
    (found,) = (each for each in result.tables if each.name == name)
    return found


def row(table: Table, label: str) -> Row:
    (found,) = (each for each in table.rows if each.label == label)
    return found


def value(cell: Any) -> float:
    """A cell's number; an estimate must have an interval around it."""
    if isinstance(cell, dict):
        assert_interval(cell)
        cell = cell["value"]
    assert cell is not None
    return cell


def assert_interval(estimate: Estimate) -> None:
    assert estimate["ci95"] is not None
    low, high = estimate["ci95"]
    assert low <= estimate["value"] + 1e-9 and high >= estimate["value"] - 1e-9


def study_of(model: Any, case: StudyCase, **settings: Any) -> Study:
    """A study of an altered model on the states of a case; what its norm and head are is found anew."""
    readout = csprune.load_readout(model)
    states = [
        replace(each, unembedding=readout.unembedding)
        for each in (case.study.calibration, case.study.evaluation)
    ]
    return Study(readout, *states, **{"bands": BANDS, "subspaces": SUBSPACES, "draws": 200, **settings})


def first_of(states: States, documents: int) -> States:
    """The first few documents of some states."""
    return replace(
        states,
        u=states.u[:documents],
        targets=states.targets[:documents],
        blocks=states.blocks[:documents],
        document_ids=states.document_ids[:documents],
    )


def projection(columns: torch.Tensor) -> np.ndarray:
    """Dense, onto orthonormal columns."""
    return (columns @ columns.mT).numpy()


def claimed(statement: Statement) -> list[tuple[dict, str]]:
    """The estimates of a statement as their table has them, with the sides that are claimed."""
    return [
        ({key: value for key, value in part.items() if key not in ("claimed", "of")}, part["claimed"])
        for part in statement.estimates
    ]
