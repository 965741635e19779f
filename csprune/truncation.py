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
from csprune.hf import FactorizedHead
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

    Attributes:
        removed_left: float64 [q, m].
        removed_right: float64 [q, m].
        kept_left: float64 [q, k].
        kept_right: float64 [q, k].
        effective_rank: Of the states' second moment, where P is oblique in it; None where it is not used.
    """

    removed_left: torch.Tensor
    removed_right: torch.Tensor
    kept_left: torch.Tensor
    kept_right: torch.Tensor
    effective_rank: int | None = None

    def dense(self) -> torch.Tensor:
        """P, float64 [q, q], for tests and for looking at it."""
        return self.removed_left @ self.removed_right.mT


@dataclass(frozen=True)
class Factors:
    """The truncated head: `logits = T(up (down z) + offset)`, z the normalised residual.

    Attributes:
        up: A [V, k], of the uncentred folded map.
        down: B [k, d], orthonormal rows; it reads the final norm's output without gain and bias.
        offset: [V], the constant of the readout and what the mean of the removed part adds.
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
        mean_state: mu, float64 [q], where the head lies.
        readout: What is truncated. It refers to the model, and keeps it in memory.
        calibration: Where mu and the statistics come from.
    """

    method: str
    rank: float
    projection: Projection
    mean_state: torch.Tensor
    readout: Readout
    calibration: Calibration

    @property
    def effective_rank(self) -> int | None:
        """Directions that the calibration states visited, for whitened methods; else None."""
        return self.projection.effective_rank

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

        `W_f (I - P) u + l0 + W_f P mu`, W_f the uncentred folded map (README, Definitions). The logit scale
        or soft cap is left to the model's own code. k = q gives the original logits.
        """
        unembedding = self.readout.unembedding
        projection = self.projection
        up = unembedding.folded_along(projection.kept_left, dtype)
        down = unembedding.lift(projection.kept_right.mT.contiguous()).to(dtype)
        mean = projection.removed_left @ (projection.removed_right.mT @ self.mean_state)
        shift = unembedding.folded_along(mean[:, None], torch.float64).squeeze(1)
        return Factors(up, down, (unembedding.constant + shift).to(dtype))


Strategy = Callable[[Unembedding, Calibration, int, int], Projection]
"""(unembedding, calibration, m, seed) -> what is removed, `Projection.removed_left` of m columns."""


def singular(unembedding: Unembedding, _calibration: Calibration, removed: int, _seed: int) -> Projection:
    """The m directions with the smallest singular values."""
    order = torch.arange(unembedding.width).flip(0)  # the directions stand by descending sigma
    return _orthogonal(unembedding.directions, order, removed)


def fisher(unembedding: Unembedding, calibration: Calibration, removed: int, _seed: int) -> Projection:
    """The m singular directions with the smallest saliency kappa (consequence-ranked)."""
    order = torch.argsort(calibration.saliency, stable=True)
    return _orthogonal(calibration.directions.to(unembedding.device), order, removed)


def whitened(unembedding: Unembedding, calibration: Calibration, removed: int, _seed: int) -> Projection:
    """SVD-LLM at the head: least mean logit error on the calibration states."""
    return _oblique(unembedding.gram, calibration, removed)


def fisher_whitened(
    unembedding: Unembedding, calibration: Calibration, removed: int, _seed: int
) -> Projection:
    """As `whitened`, with W^T W replaced by the mean Fisher matrix."""
    return _oblique(calibration.mean_fisher(unembedding), calibration, removed)


def random(unembedding: Unembedding, _calibration: Calibration, removed: int, seed: int) -> Projection:
    """A Haar-random subspace, nested over ranks: the reference."""
    width = unembedding.width
    basis = haar_columns(width, removed, seed).to(unembedding.device)
    complement = torch.linalg.qr(basis, mode="complete").Q[:, removed:]
    return Projection(basis, basis, complement, complement)


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
            f"and keeps at least one, from {1 / width:.2g} to {1 - 1 / width:.6g}"
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
        InputError: Unknown method, impossible rank, a calibration of another model, or a truncation is
            applied to the model at the time.
    """
    method = canonical_method(method)
    readout.check_unchanged()
    unembedding = readout.unembedding
    if (rank is None) == (removed is None):
        raise InputError("give either rank or removed to truncate()")
    if removed is None:
        assert rank is not None  # one of the two was given
        removed = removed_directions(rank, unembedding.width)
    elif not 0 <= removed < unembedding.width:
        raise InputError(f"removed = {removed} is not between 0 and {unembedding.width - 1}")
    _check_calibration(readout, calibration)
    projection = STRATEGIES[method](unembedding, calibration, removed, seed)
    fraction = removed / unembedding.width if rank is None else rank
    mean = calibration.mean_state.to(unembedding.device)
    return Truncation(method, fraction, projection, mean, readout, calibration)


def _check_calibration(readout: Readout, calibration: Calibration) -> None:
    """Refuse a calibration of another model: of another size, or of other weights."""
    unembedding = readout.unembedding
    vocabulary = len(calibration.fisher.probability)
    if (calibration.width, vocabulary) != (unembedding.width, unembedding.vocabulary):
        raise InputError(
            f"the calibration has {calibration.width} directions and {vocabulary} tokens, the model "
            f"{unembedding.width} and {unembedding.vocabulary}: calibrate this model"
        )
    if isinstance(readout.model.get_submodule(readout.head_name), FactorizedHead):
        raise InputError("a truncation is applied to this model: restore() it before making another")
    calibration.check_model(readout)


def _orthogonal(directions: torch.Tensor, order: torch.Tensor, removed: int) -> Projection:
    """Remove the first directions of an order; the others are kept by descending sigma."""
    order = order.to(directions.device)
    gone, kept = directions[:, order[:removed]], directions[:, order[removed:].sort().values]
    return Projection(gone, gone, kept, kept)


def _oblique(metric: torch.Tensor, calibration: Calibration, removed: int) -> Projection:
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
    left, right = root @ v_removed, inverse.mT @ v_removed
    # Orthonormal rows for what is executed: entries of one size, as low-precision storage wants them.
    # They span the rows of I - P, so (I - P) row_space row_space^T = I - P.
    row_space = orthonormal_columns(inverse.mT @ v_kept)
    kept_left = row_space - left @ (right.mT @ row_space)
    return Projection(left, right, kept_left, row_space, effective_rank)


def overlap(first: Truncation, second: Truncation) -> float:
    """The share of the subspace that one truncation removes which lies in what another removes.

    With orthonormal bases A [q, m] and B [q, n] of the two ranges of P, `||B^T A||^2 / m`: for subspaces
    spanned by singular directions the share of directions in common (paper, Section E.4). Of what `whitened`
    removes, the share in the four bottom bands of 20 is that with `singular` at rank 0.2.

    Args:
        first: Whose removed subspace is shared out.
        second: Of the same readout.

    Returns:
        From 0 (orthogonal) to 1 (contained).

    Raises:
        InputError: The truncations are of different models.
    """
    if first.readout is not second.readout:
        raise InputError("the overlap of truncations of two readouts means nothing: take both of one")
    a, b = (orthonormal_columns(each.projection.removed_left) for each in (first, second))
    return float((b.mT @ a).square().sum()) / a.shape[1]
