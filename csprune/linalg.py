"""Positive semi-definite linear algebra in float64, and every numerical tolerance of the project.

Nothing here knows of language models. All results are float64; eigenvectors carry a sign fixed by
their largest entry, so that the same matrix gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from csprune.errors import CspruneError

# Proof of the readout: the largest RMS error of the centred logits, in units of their RMS, that a
# float32 model may show. Float32 products over a few thousand terms err by about 1e-6; a wrong
# norm, gain or scale errs by 1e-2 and more.
READOUT_TOLERANCE = 1e-4

# In a lower body dtype the model rounds its own head product; its error may be this many times the
# error that rounding alone makes.
READOUT_ROUNDING_FACTOR = 4.0

# A logit transform is taken as found if it reproduces the model's logits to this share of their RMS:
# float32 rounding, or that of a lower dtype.
TRANSFORM_TOLERANCE = 1e-5
TRANSFORM_LOW_TOLERANCE = 1e-2

# Later tokens may move a causal model's states by this share of their size: rounding where a batch is
# regrouped (mixtures of experts). What a masked model reads ahead moves them by tens of percent.
CAUSAL_TOLERANCE = 1e-2

# A norm's parameters are taken as identified if they reproduce its float32 output to this share of
# its RMS: well above float32 rounding, far below the effect of any wrong gain or epsilon.
NORM_TOLERANCE = 1e-5

# Whitening divides by the states' standard deviation per eigendirection. Eigenvalues of the second
# moment below this share of the largest are rounding noise (float32 states: about 1e-14) or were
# never visited; they are raised to it. The effective rank counts those above.
WHITENING_FLOOR = 1e-12

# Singular values are square roots of a Gram matrix's eigenvalues: below this share of the largest one
# they are rounding.
SINGULAR_RESOLUTION = 1e-7

# States that differ by no more than this share of their size differ by a forward pass's rounding.
STATE_RESOLUTION = 1e-5

# A unit direction of which a projection leaves less than this length lies in what was projected out.
LEFT_TOLERANCE = 1e-6

# Rows of the vocabulary handled at once where a float64 copy of the head would be too large.
VOCABULARY_BLOCK = 16_384


@dataclass(frozen=True)
class Eigen:
    """Eigenvalues (descending, float64 [n]) and orthonormal eigenvectors (columns, [n, n])."""

    values: torch.Tensor
    vectors: torch.Tensor


def row_blocks(rows: int, block: int = VOCABULARY_BLOCK) -> Iterator[slice]:
    """Slices that cover `rows` rows in order, at most `block` each."""
    for start in range(0, rows, block):
        yield slice(start, min(start + block, rows))


def eigh_descending(matrix: torch.Tensor, what: str) -> Eigen:
    """Eigendecomposition of a symmetric matrix, largest eigenvalue first.

    Args:
        matrix: Symmetric [n, n], any floating dtype; read as float64, symmetrised against rounding.
        what: Name of the matrix for the error message.

    Raises:
        CspruneError: The matrix has entries that are not finite, with their count.
    """
    matrix = matrix.to(torch.float64)
    bad = int((~torch.isfinite(matrix)).sum())
    if bad:
        raise CspruneError(
            f"{what} has {bad} of {matrix.numel()} entries that are not finite: "
            "check the model's weights and the calibration text"
        )
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return Eigen(values.flip(0), _fix_signs(vectors.flip(1)))


def psd_square_root(matrix: torch.Tensor, what: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A square root S of a PSD matrix, M = S S^T, with its inverse and the effective rank.

    S = U diag(sqrt(max(lambda, floor))), with the floor `WHITENING_FLOOR` times the largest
    eigenvalue: an eigendecomposition never fails where a Cholesky factorisation does, however few
    tokens made M (SVD-LLM's most frequent failure).

    Args:
        matrix: Symmetric PSD [n, n].
        what: Name of the matrix for error messages.

    Returns:
        S [n, n], S^-1 [n, n], and the number of eigenvalues above the floor.

    Raises:
        CspruneError: The matrix is zero or not finite.
    """
    eigen = eigh_descending(matrix, what)
    largest = float(eigen.values[0])
    if largest <= 0:
        raise CspruneError(f"{what} is zero: the calibration text gives no variation to measure")
    floor = WHITENING_FLOOR * largest
    root = eigen.values.clamp_min(floor).sqrt()
    effective_rank = int((eigen.values > floor).sum())
    return eigen.vectors * root, (eigen.vectors / root).mT.contiguous(), effective_rank


def orthonormal_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal basis [n, k] of the column space of a full-rank matrix [n, k]."""
    return _fix_signs(torch.linalg.qr(matrix.to(torch.float64)).Q)


def haar_columns(width: int, count: int, seed: int) -> torch.Tensor:
    """The first `count` columns of a Haar-random orthogonal [width, width] matrix.

    Column j depends on the seed and the columns before it only, so that the subspaces for several
    ranks are nested (the paper's random truncations).
    """
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(width, generator=generator, dtype=torch.float64) for _ in range(count)]
    gaussian = torch.stack(columns, dim=1) if columns else torch.zeros(width, 0).double()
    q, r = torch.linalg.qr(gaussian)
    # Householder QR leaves R's signs to convention; the sign of its diagonal makes Q Haar.
    return q * torch.where(torch.diagonal(r) < 0, -1.0, 1.0)


def _fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """Make the entry of largest modulus of every column positive."""
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)
