"""Truncation strategies: which directions of the state are removed from the unembedding.

A strategy is one function from (unembedding, calibration, removed, seed) to a `Projection`, and one
entry in `STRATEGIES`. What is removed is replaced by its calibration mean, `du = -P (u - mu)`, which
equals truncating the unembedding with a corrected bias (paper, Section 5.1 and E.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from csprune.calibration import Calibration
from csprune.errors import InputError
from csprune.linalg import eigh_descending, haar_columns, orthonormal_columns, psd_square_root
from csprune.readout import Readout
from csprune.unembedding import Unembedding


@dataclass(frozen=True)
class Projection:
    """P onto what is removed and I - P onto what is kept, both as factors in float64.

    `P = removed_left removed_right^T` (each [q, m]) and `I - P = kept_left kept_right^T` (each [q, k]),
    with `removed_right^T removed_left = I` and the columns of `kept_right` orthonormal. P is orthogonal
    or oblique. What costs least comes first in `removed_left` and `removed_right`: the columns of a smaller
    rank are the first of a larger one's, so that ranks can be evaluated one from another.
    """

    removed_left: torch.Tensor
    removed_right: torch.Tensor
    kept_left: torch.Tensor
    kept_right: torch.Tensor

    def dense(self) -> torch.Tensor:
        """P [q, q], for tests and for looking at it."""
        return self.removed_left @ self.removed_right.mT


@dataclass(frozen=True)
class Factors:
    """The truncated head: `logits = T(up (down z) + offset)`, z the normalised residual.

    Attributes:
        up: A [V, k].
        down: B [k, d], orthonormal rows up to the map z -> u.
        offset: [V].
    """

    up: torch.Tensor
    down: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True)
class Truncation:
    """A removed subspace of one model's readout, held as factors.

    Attributes:
        method: Canonical name.
        rank: Fraction of the q directions that is removed, as asked for.
        projection: P and I - P.
        mean_state: mu, float64 [q].
        readout: What is truncated, by reference.
        calibration: Of the statistics; None where none were needed.
        effective_rank: Of the whitening moment, for whitened strategies.
    """

    method: str
    rank: float
    projection: Projection
    mean_state: torch.Tensor
    readout: Readout
    calibration: Calibration
    effective_rank: int | None = None

    @property
    def removed(self) -> int:
        """m."""
        return self.projection.removed_left.shape[1]

    @property
    def kept(self) -> int:
        """k = q - m."""
        return self.projection.kept_left.shape[1]

    def factors(self, dtype: torch.dtype) -> Factors:
        """The head's factors in `dtype`, computed in float64 by blocks of the vocabulary.

        The logit scale or soft cap is left to the model's own code. k = q gives the original logits.
        """
        unembedding = self.readout.unembedding
        projection = self.projection
        up = unembedding.folded_along(projection.kept_left, dtype)
        down = unembedding.lift(projection.kept_right.mT.contiguous()).to(dtype)
        mean = projection.removed_left @ (projection.removed_right.mT @ self.mean_state)
        shift = unembedding.folded_along(mean[:, None], torch.float64).squeeze(1)
        return Factors(up, down, (unembedding.constant + shift).to(dtype))


Strategy = Callable[[Unembedding, Calibration, int, int], tuple[Projection, int | None]]


def singular(unembedding: Unembedding, _c: Calibration, removed: int, _seed: int):
    """The m directions with the smallest singular values."""
    order = torch.arange(unembedding.width - 1, -1, -1)
    return _orthogonal(unembedding.directions, order, removed), None


def fisher(unembedding: Unembedding, calibration: Calibration, removed: int, _seed: int):
    """The m singular directions with the smallest saliency kappa (consequence-ranked)."""
    order = torch.argsort(calibration.saliency, stable=True)
    return _orthogonal(calibration.directions.to(unembedding.device), order, removed), None


def whitened(unembedding: Unembedding, calibration: Calibration, removed: int, _seed: int):
    """SVD-LLM at the head: least mean logit error on the calibration states."""
    return _oblique(unembedding.gram, calibration, removed)


def fisher_whitened(unembedding: Unembedding, calibration: Calibration, removed: int, _seed: int):
    """As `whitened`, with W^T W replaced by the mean Fisher matrix."""
    return _oblique(calibration.mean_fisher(unembedding), calibration, removed)


def random(unembedding: Unembedding, _c: Calibration, removed: int, seed: int):
    """A Haar-random subspace, nested over ranks: the reference."""
    width = unembedding.width
    basis = haar_columns(width, removed, seed).to(unembedding.device)
    complement = torch.linalg.qr(basis, mode="complete").Q[:, removed:]
    return Projection(basis, basis, complement, complement), None


STRATEGIES: dict[str, Strategy] = {
    "singular": singular,
    "fisher": fisher,
    "whitened": whitened,
    "fisher-whitened": fisher_whitened,
    "random": random,
}
ALIASES = {"consequence": "fisher", "consequence-ranked": "fisher", "singular-value": "singular"}


def canonical_method(name: str) -> str:
    """The canonical name of a method or alias.

    Raises:
        InputError: Unknown; the message lists those that exist.
    """
    method = ALIASES.get(name, name)
    if method not in STRATEGIES:
        known = ", ".join([*STRATEGIES, *(f"{a} (= {m})" for a, m in ALIASES.items())])
        raise InputError(f"unknown method {name!r}: choose one of {known}")
    return method


def removed_directions(rank: float, width: int) -> int:
    """m = round(rank q).

    Raises:
        InputError: Not 0 < rank < 1, or m = 0, or m = q.
    """
    if not 0 < rank < 1:
        raise InputError(f"rank {rank} is not between 0 and 1: it is the fraction of directions to remove")
    removed = round(rank * width)
    if not 1 <= removed <= width - 1:
        raise InputError(
            f"rank {rank} of {width} directions removes {removed}: choose a rank that removes at least one "
            f"and keeps at least one, from {0.5 / width:.2g} to {1 - 0.5 / width:.6g}"
        )
    return removed


def truncate(
    readout: Readout,
    calibration: Calibration,
    method: str,
    rank: float | None = None,
    *,
    removed: int | None = None,
    seed: int = 0,
) -> Truncation:
    """Choose what to remove from a readout.

    Args:
        readout: From `load_readout`.
        calibration: From `calibrate`, of the same model.
        method: A name in `STRATEGIES` or an alias.
        rank: Fraction of the q directions to remove.
        removed: m instead of a rank; 0 keeps everything (the original logits, in factors).
        seed: Of the random subspace.

    Raises:
        InputError: Unknown method, impossible rank, or the calibration is of another readout.
    """
    method = canonical_method(method)
    unembedding = readout.unembedding
    if calibration.width != unembedding.width or len(calibration.fisher.probability) != (
        unembedding.vocabulary
    ):
        raise InputError(
            f"the calibration has {calibration.width} directions and {len(calibration.fisher.probability)} "
            f"tokens, the model {unembedding.width} and {unembedding.vocabulary}: calibrate this model"
        )
    if (rank is None) == (removed is None):
        raise InputError("give either rank or removed to truncate()")
    if removed is None:
        assert rank is not None  # one of the two was given
        removed = removed_directions(rank, unembedding.width)
    elif not 0 <= removed < unembedding.width:
        raise InputError(f"removed = {removed} is not between 0 and {unembedding.width - 1}")
    projection, effective_rank = STRATEGIES[method](unembedding, calibration, removed, seed)
    fraction = removed / unembedding.width if rank is None else rank
    mean = calibration.mean_state.to(unembedding.device)
    return Truncation(method, fraction, projection, mean, readout, calibration, effective_rank)


def _orthogonal(directions: torch.Tensor, order: torch.Tensor, removed: int) -> Projection:
    """Remove the first directions of an order; the others are kept by descending sigma."""
    order = order.to(directions.device)
    gone, kept = directions[:, order[:removed]], directions[:, order[removed:].sort().values]
    return Projection(gone, gone, kept, kept)


def _oblique(metric: torch.Tensor, calibration: Calibration, removed: int):
    """`P = S V_d V_d^T S^-1`: the removal of m dimensions that costs least in `metric` on the states.

    With M = S S^T the states' second moment about mu, the mean cost of removing P is
    `tr(P^T metric P M)`, least for V_d the eigenvectors of `S^T metric S` with the smallest eigenvalues.
    """
    root, inverse, effective_rank = psd_square_root(
        calibration.second_moment.to(metric.device), "the states' second moment"
    )
    eigen = eigh_descending(root.mT @ metric @ root, "the whitened metric")
    ascending = eigen.vectors.flip(1)
    v_removed, v_kept = ascending[:, :removed], ascending[:, removed:]
    # Orthonormal rows for what is executed: entries of one size, as low-precision storage wants them.
    row_space = orthonormal_columns(inverse.mT @ v_kept)
    kept_left = (root @ v_kept) @ (v_kept.mT @ inverse @ row_space)
    projection = Projection(root @ v_removed, inverse.mT @ v_removed, kept_left, row_space)
    return projection, effective_rank
