"""The bases that changes are made in: coordinates, singular directions, and what a change does to the logits.

The paper's own is the folded and centred one (Section 2.1, Appendix A); the folded but uncentred and the raw
unembedding are its alternatives (Section E.1), the raw one also HARP's (Appendix G).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from csprune.errors import InputError
from csprune.linalg import SINGULAR_RESOLUTION, Eigen, eigh_descending, haar_columns, row_blocks
from csprune.unembedding import Unembedding

BASES = ("centred", "folded", "raw")


class Space:
    """Coordinates x [n] of a final state, and the map from their changes to the logits.

    Args:
        name: One of `BASES`.
        unembedding: Of the model.

    Attributes:
        width: n: q for `centred` and `folded` (x = u), d for `raw` (x = h, what the head reads).
    """

    def __init__(self, name: str, unembedding: Unembedding) -> None:
        if name not in BASES:
            raise InputError(f"unknown basis {name!r}: choose one of {', '.join(BASES)}")
        self.name = name
        self.unembedding = unembedding
        self.width = unembedding.hidden if name == "raw" else unembedding.width

    def coordinates(self, u: torch.Tensor) -> torch.Tensor:
        """x [..., n] of states u [..., q], float64."""
        if self.name != "raw":
            return u
        return self.unembedding.lift(u) * self.unembedding.gain + self.unembedding.norm_bias

    def rows(self, rows: slice) -> torch.Tensor:
        """What a change of x does to the logits, less what is common to all: float64 [rows, n].

        Under a soft cap to the head's output, with nothing taken off.
        """
        unembedding = self.unembedding
        if self.name != "raw":
            return unembedding.centred(rows)
        block = unembedding.weight[rows].double()
        if unembedding.transform.cap is not None:
            return block
        return (block - self._raw_mean) * unembedding.transform.scale

    @cached_property
    def _raw_mean(self) -> torch.Tensor:
        weight = self.unembedding.weight
        blocks = [weight[rows].double().sum(0) for rows in row_blocks(len(weight))]
        return torch.stack(blocks).sum(0) / len(weight)

    @cached_property
    def metric(self) -> torch.Tensor:
        """float64 [n, n]: D of a change is `dx^T metric dx` where logits are not capped."""
        return self.unembedding.gram if self.name != "raw" else self._gram(self.rows)

    @cached_property
    def _spectrum(self) -> Eigen:
        unembedding = self.unembedding
        if self.name == "centred":
            gram = unembedding.gram
        elif self.name == "folded":
            gram = self._gram(unembedding.folded)
        else:
            gram = self._gram(lambda rows: unembedding.weight[rows].double())
        return eigh_descending(gram, f"the Gram matrix of the {self.name} unembedding")

    def _gram(self, rows_of: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        gram = torch.zeros(self.width, self.width, dtype=torch.float64, device=self.unembedding.device)
        for rows in row_blocks(self.unembedding.vocabulary):
            block = rows_of(rows)
            gram.addmm_(block.mT, block)
        return gram

    @property
    def singular_values(self) -> torch.Tensor:
        """Of the map that ranks, float64 [n], descending."""
        return self._spectrum.values.clamp_min(0).sqrt()

    @property
    def directions(self) -> torch.Tensor:
        """Its right singular vectors as columns, float64 [n, n]."""
        return self._spectrum.vectors

    def band(self, number: int, bands: int) -> torch.Tensor:
        """The directions of band `number` (from 0, the top) of `bands`, float64 [n, m]."""
        return self.directions[:, band_slice(number, bands, self.width)]

    def subspace(self, vectors: torch.Tensor) -> Subspace:
        """A subspace, of orthonormal columns float64 [n, m]."""
        dtype = self.unembedding.compute_dtype
        metric = vectors.mT @ self.metric @ vectors
        shape = (self.unembedding.vocabulary, vectors.shape[1])
        image = torch.zeros(shape, dtype=dtype, device=vectors.device)
        if float(metric.diagonal().max()) <= (SINGULAR_RESOLUTION * float(self._largest)) ** 2:
            # Of what the map does not see, only rounding would be measured.
            return Subspace(vectors, image, torch.zeros_like(metric))
        for rows in row_blocks(self.unembedding.vocabulary):
            image[rows] = (self.rows(rows) @ vectors).to(dtype)
        return Subspace(vectors, image, metric)

    @cached_property
    def _largest(self) -> torch.Tensor:
        """The largest singular value of what maps changes to the logits."""
        return torch.linalg.eigvalsh(self.metric)[-1].clamp_min(0).sqrt()

    def random(self, size: int, count: int, seed: int, within: torch.Tensor | None = None) -> list[Subspace]:
        """Haar-random subspaces with seeds `seed + i`.

        Args:
            size: Their dimension.
            count: How many.
            seed: Of the first.
            within: Orthonormal columns float64 [n, p] of what they are drawn in; None for everything.
        """
        width = self.width if within is None else within.shape[1]
        drawn = (haar_columns(width, size, seed + i).to(self.unembedding.device) for i in range(count))
        return [self.subspace(each if within is None else within @ each) for each in drawn]


@dataclass(frozen=True, eq=False)
class Subspace:
    """A subspace of a space, and what a change within it does to the logits.

    Attributes:
        vectors: Orthonormal columns, float64 [n, m].
        image: The logits' change for each of them [V, m], compute dtype.
        metric: image^T image, float64 [m, m].
    """

    vectors: torch.Tensor
    image: torch.Tensor
    metric: torch.Tensor

    @property
    def size(self) -> int:
        """m."""
        return self.vectors.shape[1]

    def first(self, size: int) -> Subspace:
        """That of the first `size` columns."""
        return Subspace(self.vectors[:, :size], self.image[:, :size], self.metric[:size, :size])

    def removal(self, deviation: torch.Tensor) -> Change:
        """`dx = -P deviation`, of deviations float64 [documents, n] (from the mean, a donor, or 0)."""
        return Change(-(deviation @ self.vectors), self)


@dataclass(frozen=True, eq=False)
class Change:
    """A change of every document's state within one subspace.

    Attributes:
        coordinates: Along the subspace's vectors, float64 [documents, m].
        subspace: Where it lies.
    """

    coordinates: torch.Tensor
    subspace: Subspace

    @property
    def squared_length(self) -> torch.Tensor:
        """`||dx||^2`, float64 [documents]."""
        return self.coordinates.square().sum(1)

    def scaled(self, factors: torch.Tensor | float) -> Change:
        """Each document's change times its factor, float64 [documents] or one number."""
        if isinstance(factors, torch.Tensor):
            factors = factors[:, None]
        return Change(self.coordinates * factors, self.subspace)

    def as_long_as(self, other: Change) -> Change:
        """Rescaled document by document to another change's length (paper, Section 2.3).

        A document whose change is zero stays so; it cannot have another length.
        """
        own = self.squared_length
        factors = (other.squared_length / own.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        return self.scaled(torch.where(own > 0, factors, 0.0))

    def vectors(self) -> torch.Tensor:
        """dx itself, float64 [documents, n]."""
        return self.coordinates @ self.subspace.vectors.mT


def band_slice(number: int, bands: int, width: int) -> slice:
    """Directions of band `number` (from 0, the top): `round((b - 1) q / B) .. round(b q / B)`, b from 1.

    Raises:
        InputError: A band would be empty.
    """
    if width < bands:
        raise InputError(f"{width} directions are too few for {bands} bands: give --bands at most {width}")
    return slice(round(number * width / bands), round((number + 1) * width / bands))
