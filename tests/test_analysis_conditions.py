"""Other conditions and the removal sets, against the package's own parts and the oracle."""

from __future__ import annotations

from dataclasses import replace

import analysis_oracle as ao
import cases
import numpy as np
import pytest
from study_cases import BANDS, LENGTH, StudyCase, study_case

import csprune
from csprune.analysis.conditions import other_conditions
from csprune.analysis.overlaps import removal_overlaps
from csprune.analysis.spectrum import consequence_spectrum
from csprune.analysis.study import take_states
from csprune.errors import InputError


@pytest.fixture(scope="module", params=("llama", "gpt_neox"))
def case(request: pytest.FixtureRequest) -> StudyCase:
    return study_case(request.param)


def test_each_condition_is_a_study_of_its_own(case: StudyCase) -> None:
    study = case.study
    windows = [cases.windows(0, 24, LENGTH), cases.windows(24, 30, LENGTH)]
    taken = [take_states(study.readout, each, [11, LENGTH], batch_size=8) for each in windows]
    eleventh = study.beside(*(each[11] for each in taken))
    assert eleventh.layout is study.layout
    with_conditions = replace(
        study, conditions=lambda _progress: iter([("last", study), ("eleventh", eleventh)])
    )
    result = other_conditions(with_conditions)
    (table,) = result.tables
    assert [row.label for row in table.rows] == ["last", "eleventh"]
    for row, own in zip(table.rows, (study, eleventh), strict=True):
        spectrum = consequence_spectrum(own).figures["consequence"]
        assert row.cells["fisher_per_distance"]["value"] == pytest.approx(spectrum[-1])  # type: ignore[index]
        assert row.cells["peak"] == int(np.argmax(spectrum)) + 1
    assert len(result.statements) == 2
    assert result.values["condition.eleventh.documents"].tolist() == list(eleventh.evaluation.document_ids)
    first, second = (row.cells["fisher_per_distance"]["value"] for row in table.rows)  # type: ignore[index]
    assert first != second  # control: the positions are not the same


def test_states_of_a_position_do_not_depend_on_what_follows(case: StudyCase) -> None:
    read = cases.windows(0, 6, LENGTH)
    both = take_states(case.study.readout, read, [4, LENGTH], batch_size=4)
    alone = take_states(case.study.readout, read, [4], batch_size=4)
    np.testing.assert_allclose(both[4].u, alone[4].u, atol=1e-10)
    assert both[4].targets.tolist() == read.target_ids[:, 3].tolist()
    with pytest.raises(InputError, match="position 13 is not between 1 and the 12 tokens"):
        take_states(case.study.readout, read, [LENGTH + 1], batch_size=4)


def test_overlaps_are_the_oracles(case: StudyCase) -> None:
    read = cases.windows(0, 24, LENGTH)
    study = case.study
    calibration = csprune.calibrate(case.model, read, "last", readout=study.readout)
    result = removal_overlaps(replace(study, calibrate=lambda _progress: calibration))
    cells = {row.label: row.cells for row in result.tables[0].rows}
    made = {
        (name, rank): csprune.truncate(study.readout, calibration, name, rank).projection.dense().numpy()
        for name in ("singular", "fisher", "whitened", "fisher-whitened")
        for rank in (0.1, 0.2)
    }
    for name in ("fisher", "whitened"):
        expected = ao.overlap(made[name, 0.1], made["singular", 0.1])
        assert cells[f"{name}, 10%"]["singular"] == pytest.approx(expected, abs=1e-8)
        bottom = ao.overlap(made[name, 0.1], made["singular", 0.2])
        assert cells[f"{name}, 10%"]["bottom"] == pytest.approx(bottom, abs=1e-8)
        assert bottom >= expected - 1e-9  # a larger set holds more of it
    width = study.unembedding.width
    assert cells["random (expected), 20%"]["bottom"] == pytest.approx(round(0.2 * width) / width)


def test_what_a_study_lacks_is_named(case: StudyCase) -> None:
    with pytest.raises(InputError, match="calibrate="):
        removal_overlaps(case.study)
    with pytest.raises(InputError, match="conditions="):
        other_conditions(case.study)
    with pytest.raises(InputError, match="too few for 1000 bands"):
        replace(case.study, bands=1000)
    with pytest.raises(InputError, match="random_subspaces must be at least 1"):
        replace(case.study, subspaces=0)
    assert case.study.bands == BANDS
