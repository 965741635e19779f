"""One tiny model with its readout and calibration, by the package and by the oracle alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import tiny
import torch

import csprune
from csprune import Calibration, Readout, Truncation, Windows

LENGTH = 16
# Enough positions for a second moment of full rank about any mean.
CALIBRATION_DOCUMENTS, EVALUATION_DOCUMENTS = 10, 6


@dataclass(frozen=True)
class Case:
    """A tiny model, and both implementations' view of it.

    Attributes:
        basis: R [d, q] of the package's coordinates, so that `z = R u`; the oracle has another one.
    """

    model: Any
    readout: Readout
    calibration: Calibration
    held_out: Windows
    folded: oracle.Folded
    statistics: oracle.Statistics
    basis: np.ndarray
    positions: str
    skip_first: int

    @property
    def width(self) -> int:
        return self.readout.unembedding.width

    def truncate(self, method: str, removed: int, seed: int = 0) -> Truncation:
        return csprune.truncate(self.readout, self.calibration, method, removed=removed, seed=seed)

    def oracle_projection(self, method: str, removed: int, basis: np.ndarray | None = None) -> np.ndarray:
        """The oracle's dense P in the oracle's coordinates; `basis` [q, >= m] is in the package's."""
        if basis is not None:
            basis = self.folded.basis.T @ self.basis @ basis
        return oracle.projection(method, removed, folded=self.folded, statistics=self.statistics, basis=basis)

    def oracle_values(self, projections: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
        return oracle.evaluate(
            self.folded,
            states(self.model, self.held_out.input_ids),
            list(self.held_out.target_ids.numpy()),
            projections,
            self.statistics.mean_state,
            positions=self.positions,
            skip_first=self.skip_first,
        )


def windows(first: int, count: int, length: int = LENGTH) -> Windows:
    texts = tiny.texts(first + count, characters=200)[first:]
    return csprune.read_windows(tiny.tokenizer(), texts, documents=count, sequence_length=length)


def states(model: Any, input_ids: torch.Tensor) -> list[np.ndarray]:
    p = tiny.parts(model)
    captured = [oracle.capture(model, ids, p.norm, p.head) for ids in input_ids]
    return [oracle.states(c.residual, p.kind, p.eps) for c in captured]


def build(
    model: Any,
    *,
    positions: str = "all",
    skip_first: int = 0,
    documents: int = CALIBRATION_DOCUMENTS,
) -> Case:
    read = windows(0, documents)
    readout = csprune.load_readout(model, read.input_ids)
    calibration = csprune.calibrate(model, read, positions, skip_first, readout=readout)
    p = tiny.parts(model)
    folded = oracle.fold(p.weight, p.bias, p.gamma, p.beta, p.kind, factor=p.factor, cap=p.cap)
    found = oracle.statistics(
        folded, states(model, read.input_ids), positions=positions, skip_first=skip_first
    )
    width = readout.unembedding.width
    basis = readout.unembedding.lift(torch.eye(width, dtype=torch.float64)).mT.numpy()
    held_out = windows(documents, EVALUATION_DOCUMENTS)
    return Case(model, readout, calibration, held_out, folded, found, basis, positions, skip_first)
