"""One tiny model as a study, and what the oracle sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cases
import numpy as np
import oracle
import tiny
import torch

import csprune
from csprune.analysis.study import Study, take_states

LENGTH = 12
BANDS = 4
SUBSPACES = 4


@dataclass(frozen=True)
class StudyCase:
    """A study by the package, and the oracle's own view of the same model and texts.

    Attributes:
        basis: R of the package's coordinates in the oracle's: `u_oracle = u_package @ basis`.
        calibration_u, evaluation_u: The oracle's states at the last position, float64 [documents, q].
        evaluation_r: The residuals there, float64 [documents, d].
        targets: int [documents].
        eps: Of the final norm.
    """

    model: Any
    study: Study
    folded: oracle.Folded
    basis: np.ndarray
    calibration_u: np.ndarray
    evaluation_u: np.ndarray
    evaluation_r: np.ndarray
    targets: np.ndarray
    eps: float
    parts: Any

    def vectors(self, columns: torch.Tensor) -> np.ndarray:
        """Columns of the package's u-space [q, m] in the oracle's coordinates."""
        return self.basis.T @ columns.numpy()

    @property
    def random_bases(self) -> list[np.ndarray]:
        """The study's random subspaces in the oracle's coordinates, [q, largest band] each."""
        return [self.vectors(each.vectors) for each in self.study.random]


def study_case(kind: str, *, documents: int = 24, evaluation: int = 30, **settings: Any) -> StudyCase:
    """Of a float64 tiny model of a kind."""
    model = tiny.make(kind).double()
    read = cases.windows(0, documents, LENGTH)
    held_out = cases.windows(documents, evaluation, LENGTH)
    readout = csprune.load_readout(model, read.input_ids)
    last = read.sequence_length
    calibration, measured = (
        take_states(readout, each, [last], batch_size=8)[last] for each in (read, held_out)
    )
    chosen = {"bands": BANDS, "subspaces": SUBSPACES, "draws": 200, **settings}
    study = Study(readout, calibration, measured, **chosen)
    p = tiny.parts(model)
    folded = oracle.fold(p.weight, p.bias, p.gamma, p.beta, p.kind, factor=p.factor, cap=p.cap)
    width = readout.unembedding.width
    lifted = readout.unembedding.lift(torch.eye(width, dtype=torch.float64)).numpy()
    residuals = [
        np.stack([oracle.capture(model, ids, p.norm, p.head).residual[-1] for ids in each.input_ids])
        for each in (read, held_out)
    ]
    calibration_u, evaluation_u = (oracle.states(r, p.kind, p.eps) for r in residuals)
    return StudyCase(
        model,
        study,
        folded,
        lifted @ folded.basis,
        calibration_u,
        evaluation_u,
        residuals[1],
        held_out.target_ids[:, -1].numpy(),
        p.eps,
        p,
    )
