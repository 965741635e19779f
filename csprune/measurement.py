"""What an evaluation measured, document by document: pure data, before any statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from csprune.errors import CspruneError, InputError

QUANTITIES = (
    "loss_change",
    "logit_distance",
    "fisher_term",
    "prediction_change",
    "top1_agreement",
)
"""The figures of a truncation: nats, logit^2, nats, nats, and a fraction of the positions."""

REFERENCE = "random"
"""The method that every other one of the same rank is compared with."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """One truncation (a method at a rank) measured on the evaluation documents.

    Attributes:
        method: The canonical name of the truncation strategy.
        rank: The fraction of directions removed, as it was given.
        removed: The directions removed, `round(rank * width)`.
        kept: The directions kept.
        values: For each of `QUANTITIES` a float64 array: [documents], but for `random`
            [subspaces, documents].
    """

    method: str
    rank: float
    removed: int
    kept: int
    values: dict[str, np.ndarray]

    @property
    def name(self) -> str:
        """How messages name this truncation."""
        return f"{self.method} at rank {self.rank:g}"

    @property
    def subspaces(self) -> int | None:
        """The number of random subspaces, or None for a deterministic method."""
        return len(self.values[QUANTITIES[0]]) if self.method == REFERENCE else None

    def per_document(self, quantity: str) -> np.ndarray:
        """The float64 [documents] values of a quantity, for `random` means over its subspaces."""
        values = self.values[quantity]
        return values.mean(axis=0) if self.method == REFERENCE else values


@dataclass(frozen=True, eq=False)
class StoredMeasurement:
    """An exported checkpoint, as it loads, measured on the evaluation documents.

    Attributes:
        path: The checkpoint's folder, as it was given.
        dtype: What it was loaded in.
        weights: SHA-256 of its weight files.
        same_calibration: Its truncation was made from the calibration that the measurements used, of the
            same weights and text: only then does it differ from its in-memory counterpart by nothing but
            what storing and loading do.
        measurement: Its method, rank and values; of method `random`, with one subspace.
    """

    path: str
    dtype: str
    weights: str
    same_calibration: bool
    measurement: Measurement


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Everything that was measured on one model: enough to redo every statistic.

    Attributes:
        model: The model's name, as it was given.
        protocol: The settings of the measurement; JSON values only.
        document_ids: One id for each document; not necessarily distinct.
        blocks: int64 [documents]: the block of each document, the strata of the bootstrap.
        base_loss: float64 [documents]: the loss of the unchanged model, nats.
        base_entropy: float64 [documents]: the entropy of its predictions, nats.
        measurements: One entry for each method and rank, in the order of the report.
        checkpoints: Exported checkpoints, as they load.

    Raises:
        InputError: If shapes, dtypes or names do not fit, or something is there twice.
    """

    model: str
    protocol: dict[str, Any]
    document_ids: tuple[str, ...]
    blocks: np.ndarray
    base_loss: np.ndarray
    base_entropy: np.ndarray
    measurements: list[Measurement]
    checkpoints: list[StoredMeasurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        documents = len(self.document_ids)
        if self.blocks.shape != (documents,):
            raise InputError(
                f"blocks has shape {self.blocks.shape}, but there are {documents} documents: "
                "give one block for each document"
            )
        _check_values("base_loss", self.base_loss, (documents,))
        _check_values("base_entropy", self.base_entropy, (documents,))
        for measurement in (*self.measurements, *(stored.measurement for stored in self.checkpoints)):
            _check_measurement(measurement, documents)
        counts = Counter((each.method, each.rank) for each in self.measurements)
        for (method, rank), count in counts.items():
            if count > 1:
                raise InputError(
                    f"{method} at rank {rank:g} is there {count} times: give each method and rank once"
                )
        for path, count in Counter(stored.path for stored in self.checkpoints).items():
            if count > 1:
                raise InputError(f"the checkpoint {path} is there {count} times: give each once")

    def check_finite(self) -> None:
        """Refuse values that are not numbers: no document is ever dropped for them.

        Raises:
            CspruneError: If any value is NaN or infinite; the message has the counts.
        """
        found: list[str] = []
        affected = np.zeros(len(self.document_ids), dtype=bool)
        columns = [("base_loss", self.base_loss), ("base_entropy", self.base_entropy)]
        for each in self.measurements:
            columns += [(f"{name} of {each.name}", each.values[name]) for name in QUANTITIES]
        for stored in self.checkpoints:
            values = stored.measurement.values
            columns += [(f"{name} of {stored.path}", values[name]) for name in QUANTITIES]
        for name, values in columns:
            wrong = ~np.isfinite(values)
            if wrong.any():
                nans = int(np.isnan(values).sum())
                found.append(f"{name}: {nans} NaN and {int(wrong.sum()) - nans} infinite")
                affected |= wrong.reshape(-1, len(affected)).any(axis=0)
        if found:
            more = f" and {len(found) - 3} further figures" if len(found) > 3 else ""
            raise CspruneError(
                f"values that are not finite in {int(affected.sum())} of {len(affected)} "
                f"documents ({'; '.join(found[:3])}{more}): the model's logits overflow there; "
                "run its body in a wider dtype (--dtype float32) or leave those texts out"
            )


def _check_measurement(measurement: Measurement, documents: int) -> None:
    """Refuse a measurement whose values are not those of `documents` documents."""
    if set(measurement.values) != set(QUANTITIES):
        raise InputError(
            f"{measurement.name} has the quantities {', '.join(sorted(measurement.values))}: "
            f"it needs exactly {', '.join(QUANTITIES)}"
        )
    shape: tuple[int, ...] = (documents,)
    if measurement.method == REFERENCE:
        first = measurement.values[QUANTITIES[0]]
        # A [documents] array is the likely mistake: it must not pass for as many subspaces.
        shape = (first.shape[0] if first.ndim == 2 and len(first) else 1, documents)
    for name in QUANTITIES:
        _check_values(f"{name} of {measurement.name}", measurement.values[name], shape)


def _check_values(name: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuse an array of another shape or dtype than float64 of `shape`."""
    if values.shape != shape or values.dtype != np.float64:
        raise InputError(
            f"{name} is {values.dtype} of shape {values.shape}: give a float64 array of shape {shape}"
        )
