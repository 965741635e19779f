"""The predictive subspace at each site of the readout: all that the prediction depends on there.

Logits are read up to a shared shift, so everything upstream is read along centred directions. With `u_i` the
head's rows, `ubar` their mean, gamma the final norm's gain and `s` the logit scale:

| site | is | the prediction reads it along |
|---|---|---|
| `logits` | the model's logits [V] | all that is orthogonal to (1, ..., 1) |
| `final` | the final norm's output [d], gain and bias applied | `s (u_i - ubar)` |
| `post` | the final norm's input, the residual [d] | `g_i = s gamma * (u_i - ubar)` |
| `mlp_out` | what the last MLP writes to the residual [d] | `g_i` |
| `mlp_in` | what that MLP reads [d] | no fixed directions: `csprune.predictive.jacobian` |

A LayerNorm takes the mean from the residual, so `g_i` less its own mean is what reads `post`. Under a soft
cap a shift before the cap is not harmless, and `u_i` itself takes the place of `u_i - ubar`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from csprune.errors import InputError
from csprune.linalg import eigh_descending, row_blocks
from csprune.readout import Readout

SITES = ("logits", "final", "post", "mlp_out", "mlp_in")
# Eigenvalues of a Gram matrix below this share of the largest are rounding: its sums err by some 1e-15.
RANK_TOLERANCE = 1e-12


@dataclass(frozen=True)
class ShiftComplement:
    """The predictive subspace of logits: what is orthogonal to a shared shift. It needs no basis.

    Attributes:
        site: "logits".
        width: V.
    """

    site: str
    width: int

    @property
    def rank(self) -> int:
        """V - 1: a shared shift is the only direction that does not matter."""
        return self.width - 1

    @property
    def most(self) -> int:
        """The largest rank possible."""
        return self.width - 1

    def dimension(self, share: float) -> int:
        """V - 1 at any share: no direction of it matters more than another."""
        return self.rank

    def project(self, x: torch.Tensor, dimension: int) -> torch.Tensor:
        """The part of x [..., V] inside: x less its mean; `dimension` must be the rank."""
        if dimension != self.rank:
            raise ValueError(f"the subspace of logits has {self.rank} dimensions, not {dimension}")
        return x - x.mean(-1, keepdim=True)


@dataclass(frozen=True)
class SpannedSubspace:
    """A predictive subspace of a space of width d, with how much each of its directions is read.

    Attributes:
        site: One of `SITES`.
        eigenvalues: Of the Gram matrix of the reading directions, or of E[J^T J]; float64 [n], descending,
            whole.
        vectors: The eigenvectors as orthonormal columns, float64 [d, n]; n is d, or d - 1 where a LayerNorm
            takes the mean from what is read.
    """

    site: str
    eigenvalues: torch.Tensor
    vectors: torch.Tensor

    @property
    def width(self) -> int:
        """d."""
        return self.vectors.shape[0]

    @property
    def most(self) -> int:
        """The largest rank possible, n."""
        return len(self.eigenvalues)

    @property
    def rank(self) -> int:
        """How many eigenvalues are more than rounding."""
        return int((self.eigenvalues > RANK_TOLERANCE * self.eigenvalues[0]).sum())

    def dimension(self, share: float) -> int:
        """The fewest leading directions that hold a share, in (0, 1], of the sum of the eigenvalues."""
        if share == 1:
            return self.rank
        total = self.eigenvalues.clamp_min(0).cumsum(0)
        return int((total < share * total[-1]).sum()) + 1

    def project(self, x: torch.Tensor, dimension: int) -> torch.Tensor:
        """The part of x [..., d], float64, along the leading `dimension` directions."""
        basis = self.basis(dimension)
        return (x @ basis) @ basis.mT

    def basis(self, dimension: int) -> torch.Tensor:
        """The leading directions as orthonormal columns, float64 [d, dimension]."""
        return self.vectors[:, :dimension]

    def reading_root(self) -> torch.Tensor:
        """Directions [rank, d] with the Gram matrix of the reading ones: `sqrt(lambda_k) v_k`.

        For every A, `sum_i (A g_i) (A g_i)^T` is the same sum over these rows, of which there are at most
        d, however large the vocabulary. (The columns of the symmetric root `(sum_i g_i g_i^T)^(1/2)` are
        a rotation of them.)
        """
        rank = self.rank
        return (self.vectors[:, :rank] * self.eigenvalues[:rank].sqrt()).mT.contiguous()


Subspace = ShiftComplement | SpannedSubspace


def check_share(share: float) -> None:
    """Refuse a share out of range.

    Raises:
        InputError: It is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"share {share} is not above 0 and at most 1: give 0.99, for instance")


def logits_subspace(readout: Readout) -> ShiftComplement:
    """The complement of (1, ..., 1): adding one number to all logits changes no probability."""
    return ShiftComplement("logits", readout.unembedding.vocabulary)


def final_subspace(readout: Readout) -> SpannedSubspace:
    """The span of the centred rows of the head, `s (u_i - ubar)`: V - 1 dimensions where d allows it."""
    unembedding = readout.unembedding
    weight, blocks = unembedding.weight, list(row_blocks(unembedding.vocabulary))
    mean = torch.zeros(unembedding.hidden, dtype=torch.float64, device=weight.device)
    if unembedding.transform.cap is None:
        for rows in blocks:
            mean += weight[rows].double().sum(0) / unembedding.vocabulary
    gram = torch.zeros(unembedding.hidden, unembedding.hidden, dtype=torch.float64, device=weight.device)
    for rows in blocks:
        centred = (weight[rows].double() - mean) * unembedding.transform.scale
        gram.addmm_(centred.mT, centred)
    eigen = eigh_descending(gram, "the Gram matrix of the centred unembedding rows")
    return SpannedSubspace("final", eigen.values, eigen.vectors)


def post_subspace(readout: Readout, site: str = "post") -> SpannedSubspace:
    """The span of `g_i`: the singular directions of the folded, centred unembedding, in the residual.

    Args:
        readout: Of the model.
        site: "post", or "mlp_out", where the same directions read what is added to the residual.
    """
    unembedding = readout.unembedding
    vectors = unembedding.lift(unembedding.directions.mT).mT.contiguous()
    return SpannedSubspace(site, unembedding.singular_values.square(), vectors)
