"""Eigendecompositions, square roots and random subspaces: theorems, each with a control that fails."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csprune.errors import CspruneError
from csprune.linalg import (
    WHITENING_FLOOR,
    eigh_descending,
    haar_columns,
    orthonormal_columns,
    psd_square_root,
    row_blocks,
)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def psd(n: int, rank: int, seed: int = 0) -> torch.Tensor:
    factor = gaussian(n, rank, seed=seed)
    return factor @ factor.mT


def identity(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


@given(rows=st.integers(0, 60), block=st.integers(1, 70))
def test_row_blocks_cover_every_row_once_in_order(rows: int, block: int) -> None:
    found = [list(range(rows))[s] for s in row_blocks(rows, block)]
    assert [i for part in found for i in part] == list(range(rows))
    assert all(0 < len(part) <= block for part in found)


def test_an_eigendecomposition_gives_the_matrix_back_in_descending_order() -> None:
    matrix = psd(9, 9)
    eigen = eigh_descending(matrix.float(), "m")
    assert eigen.values.dtype == eigen.vectors.dtype == torch.float64
    rebuilt = (eigen.vectors * eigen.values) @ eigen.vectors.mT
    torch.testing.assert_close(rebuilt, matrix, rtol=0, atol=1e-5)
    torch.testing.assert_close(eigen.vectors.mT @ eigen.vectors, identity(9), rtol=0, atol=1e-13)
    assert bool((eigen.values.diff() <= 0).all())
    # Control: in another order the vectors do not belong to the values.
    wrong = (eigen.vectors.flip(1) * eigen.values) @ eigen.vectors.flip(1).mT
    assert float((wrong - matrix).abs().max()) > 0.1


def test_the_sign_of_an_eigenvector_is_that_of_its_largest_entry() -> None:
    vectors = eigh_descending(psd(9, 9), "m").vectors
    at = vectors.abs().argmax(0, keepdim=True)
    assert bool((vectors.gather(0, at) > 0).all())
    # Control: LAPACK's own signs are of both kinds.
    plain = torch.linalg.eigh(psd(9, 9)).eigenvectors
    assert bool((plain.gather(0, plain.abs().argmax(0, keepdim=True)) < 0).any())


def test_rounding_that_makes_a_matrix_unsymmetric_is_averaged_away() -> None:
    matrix = psd(6, 6)
    tilted = matrix + 1e-3 * torch.triu(torch.ones(6, 6, dtype=torch.float64), 1)
    expected = torch.linalg.eigvalsh((tilted + tilted.mT) / 2).flip(0)
    torch.testing.assert_close(eigh_descending(tilted, "m").values, expected, rtol=1e-12, atol=1e-12)
    # Control: torch reads one triangle only.
    assert not torch.allclose(torch.linalg.eigvalsh(tilted).flip(0), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_entries_that_are_not_finite_are_counted(value: float) -> None:
    matrix = psd(4, 4)
    matrix[1, 2] = matrix[2, 1] = value
    with pytest.raises(CspruneError, match=r"^the moment has 2 of 16 entries that are not finite: "):
        eigh_descending(matrix, "the moment")
    with pytest.raises(CspruneError, match="2 of 16"):
        psd_square_root(matrix, "the moment")


def test_a_square_root_and_its_inverse() -> None:
    matrix = psd(8, 20)
    root, inverse, rank = psd_square_root(matrix, "m")
    torch.testing.assert_close(root @ root.mT, matrix, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inverse @ root, identity(8), rtol=0, atol=1e-12)
    assert rank == 8
    # Control: S^T S is another matrix.
    assert not torch.allclose(root.mT @ root, matrix, rtol=1e-3)


@given(rank=st.integers(1, 11), seed=st.integers(0, 50))
def test_fewer_tokens_than_directions_have_a_root_where_cholesky_has_none(rank: int, seed: int) -> None:
    matrix = psd(12, rank, seed)
    root, inverse, effective = psd_square_root(matrix, "m")
    size = float(torch.linalg.matrix_norm(matrix, 2))
    assert effective == rank
    torch.testing.assert_close(
        root @ root.mT, matrix, rtol=0, atol=1.01 * WHITENING_FLOOR * size + 1e-13 * size
    )
    torch.testing.assert_close(inverse @ root, identity(12), rtol=0, atol=1e-8)
    # Control: the factorisation that others use fails, or gives a root without an inverse.
    factor, info = torch.linalg.cholesky_ex(matrix)
    assert int(info) > 0 or float(factor.diagonal().min()) < 1e-5 * float(factor.diagonal().max())


def test_no_variation_at_all_is_an_error() -> None:
    with pytest.raises(CspruneError, match=r"^the moment is zero: "):
        psd_square_root(torch.zeros(3, 3), "the moment")
    assert psd_square_root(1e-200 * identity(3), "m")[2] == 3  # Control: small is not zero.


def test_orthonormal_columns_span_the_same_space() -> None:
    matrix = gaussian(9, 4)
    basis = orthonormal_columns(matrix)
    torch.testing.assert_close(basis.mT @ basis, identity(4), rtol=0, atol=1e-13)
    torch.testing.assert_close(basis @ (basis.mT @ matrix), matrix, rtol=1e-12, atol=1e-12)
    other = gaussian(9, 4, seed=1)  # Control: another space is not reproduced.
    assert float((basis @ (basis.mT @ other) - other).norm()) > 0.5


@given(width=st.integers(2, 20), seed=st.integers(0, 1000), data=st.data())
def test_haar_subspaces_are_orthonormal_nested_and_seeded(width: int, seed: int, data: st.DataObject) -> None:
    large = data.draw(st.integers(1, width))
    small = data.draw(st.integers(0, large))
    basis = haar_columns(width, large, seed)
    torch.testing.assert_close(basis.mT @ basis, identity(large), rtol=0, atol=1e-12)
    torch.testing.assert_close(haar_columns(width, small, seed), basis[:, :small], rtol=0, atol=1e-12)
    # Control: another seed gives another subspace's basis.
    assert not torch.allclose(haar_columns(width, large, seed + 1), basis, atol=1e-6)


def test_haar_columns_are_symmetric_in_distribution() -> None:
    n, seeds = 3, 600
    first = torch.stack([haar_columns(n, 2, seed)[0, 0] for seed in range(seeds)])
    # Mean 0 and mean square 1 / n for a uniform point of the sphere: within four standard errors.
    assert abs(float(first.mean())) < 4 * (1 / n / seeds) ** 0.5
    assert abs(float(first.square().mean()) - 1 / n) < 4 * (0.09 / seeds) ** 0.5
    # Control: Householder QR as it comes leaves the sign of each column to its convention.
    plain = torch.stack([torch.linalg.qr(gaussian(n, 2, seed=seed)).Q[0, 0] for seed in range(seeds)])
    assert abs(float(plain.mean())) > 8 * (1 / n / seeds) ** 0.5
