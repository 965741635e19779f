"""The consequence spectrum of the real demo model against the float64 oracle."""

from __future__ import annotations

from pathlib import Path

import analysis_oracle as ao
import numpy as np
import oracle
import pytest
import torch

import csprune
from csprune.analysis.contrast import contrast_share
from csprune.analysis.spectrum import consequence_spectrum
from csprune.analysis.study import States, Study, take_states

pytestmark = pytest.mark.slow

DOCUMENTS, SUBSPACES, LENGTH = 24, 2, 64
BANDS = (0, 9, 19)


@pytest.fixture(scope="module")
def study(demo_folder: Path) -> Study:
    loaded = csprune.load_model(str(demo_folder))

    def states(block: str) -> States:
        windows = csprune.read_windows(
            loaded.tokenizer, "demo", documents=DOCUMENTS, sequence_length=LENGTH, block=block
        )
        return take_states(readout, windows, [LENGTH], batch_size=8)[LENGTH]

    readout = csprune.load_readout(loaded.model)
    return Study(readout, states("calibration"), states("confirmation"), subspaces=SUBSPACES, draws=200)


def test_the_spectrum_is_the_oracles(study: Study) -> None:
    head = study.readout.model.lm_head.weight.detach()
    folded = oracle.fold(head, None, study.unembedding.gain, None, "rmsnorm")
    u, mean = study.evaluation.u.numpy(), study.calibration.u.numpy().mean(axis=0)
    targets = study.evaluation.targets.numpy()
    vectors = oracle.directions(folded.weight)[1]
    found = consequence_spectrum(study).figures["consequence"]
    for band in BANDS:
        start, stop = ao.bands(len(vectors), 20)[band]
        own = ao.change(u, ao.projector(vectors[:, start:stop]), mean)
        bases = [each.vectors[:, : stop - start].numpy() for each in study.random]
        references = ao.to_equal_length(ao.random_changes(u, bases, mean), own)
        effects = ao.effects(ao.fixed_scale(folded, u, own), targets)
        others = ao.effects_of_all(folded, u, references, targets)
        expected = ao.consequence(
            effects["fisher_term"], effects["logit_distance"], others["fisher_term"], others["logit_distance"]
        )
        assert found[band] == pytest.approx(expected, rel=1e-3), band
    assert found[-1] > 2 > found[0]  # the rise over the last bands: the paper's finding holds here


def test_the_uniform_pairs_share_is_the_share_of_the_squared_singular_values(study: Study) -> None:
    result = contrast_share(study)
    bands = next(table for table in result.tables if len(table.rows) == study.bands)
    sigma2 = np.square(study.space.singular_values.numpy())
    for row, (start, stop) in zip(bands.rows, ao.bands(len(sigma2), 20), strict=True):
        uniform = row.cells["uniform"]
        value = uniform["value"] if isinstance(uniform, dict) else uniform
        assert value == pytest.approx(sigma2[start:stop].sum() / sigma2.sum(), rel=1e-6)
    assert torch.isfinite(study.space.singular_values).all()
