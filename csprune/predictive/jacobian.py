"""The predictive subspace of mlp_in: how much each direction moves what the last MLP writes.

At one position, `J_t = d(g_i . resid_post) / d(mlp_in)` [directions, d] with everything but the MLP held
fixed (and no factor of the final norm's RMS). An activation's slopes differ from position to position, and so
do the rows of J_t; over many positions they span everything. What tells directions apart is how much they are
used: the eigenvalues of `E[J_t^T J_t]`, whose sum is accumulated position by position in constant memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from csprune.errors import CspruneError
from csprune.linalg import eigh_descending
from csprune.predictive.last_mlp import LastMLP
from csprune.predictive.subspaces import SpannedSubspace

# Elements of [directions, tokens, d] differentiated at once; an MLP needs a few times that within.
_CHUNK_ELEMENTS = 1 << 22


@dataclass
class JacobianSums:
    """Sums of `J_t^T J_t` over positions; two of them merge by addition.

    Attributes:
        positions: How many.
        gram: sum J_t^T J_t, float64 [d, d].
        largest: The largest trace of one position's J_t^T J_t: how much one position can weigh.
    """

    positions: int
    gram: torch.Tensor
    largest: float

    @classmethod
    def zeros(cls, width: int, device: torch.device | None = None) -> JacobianSums:
        """No position yet."""
        return cls(0, torch.zeros(width, width, dtype=torch.float64, device=device), 0.0)

    def update(self, mlp: LastMLP, directions: torch.Tensor, input_ids: torch.Tensor, start: int = 0) -> None:
        """Add the positions of a batch.

        Args:
            mlp: The MLP.
            directions: Of which the Gram matrix is that of the reading directions g_i, float64 [n, d].
            input_ids: Int64 [documents, positions].
            start: The first position that counts.

        Raises:
            CspruneError: A derivative is not finite.
        """
        leaf, end = mlp.differentiable(input_ids)
        kept = end[:, start:].shape[:2].numel()
        traces = torch.zeros(kept, dtype=torch.float64, device=self.gram.device)
        at_once = max(1, _CHUNK_ELEMENTS // end.numel())
        for some in directions.split(at_once):
            # A position's write depends on its own mlp_in alone: one product serves all positions.
            outputs = some.to(end)[:, None, None].expand(-1, *end.shape[:2], -1)
            (rows,) = torch.autograd.grad(
                end, leaf, grad_outputs=outputs, retain_graph=True, is_grads_batched=True
            )
            rows = rows.reshape(len(some), *end.shape)[:, :, start:].reshape(len(some), kept, -1)
            rows = rows.to(self.gram)
            traces += rows.square().sum((0, 2))
            flat = rows.flatten(0, 1)
            self.gram.addmm_(flat.mT, flat)
        if bad := int((~torch.isfinite(traces)).sum()):
            raise CspruneError(
                f"the derivatives at {mlp.reads} of {bad} of {kept} positions of one batch are not finite: "
                "the weights or the dtype overflow; try --dtype float32"
            )
        self.positions += kept
        self.largest = max(self.largest, float(traces.max()))

    def merge(self, other: JacobianSums) -> None:
        """Add the sums of other positions."""
        self.positions += other.positions
        self.gram += other.gram
        self.largest = max(self.largest, other.largest)

    def subspace(self) -> SpannedSubspace:
        """The eigendirections of the mean, `E[J_t^T J_t]`."""
        eigen = eigh_descending(self.gram / self.positions, "E[J^T J] at mlp_in")
        return SpannedSubspace("mlp_in", eigen.values, eigen.vectors)


def accumulate(
    mlp: LastMLP,
    directions: torch.Tensor,
    input_ids: torch.Tensor,
    *,
    start: int = 0,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> JacobianSums:
    """Sum `J_t^T J_t` over all positions of documents.

    Args:
        mlp: The MLP.
        directions: As of `JacobianSums.update`: `SpannedSubspace.reading_root` of the subspace at `post`.
        input_ids: Int64 [documents, positions].
        start: The first position that counts.
        batch_size: Documents run at once.
        progress: Called with (documents done, documents).
    """
    sums = JacobianSums.zeros(directions.shape[1], directions.device)
    for first in range(0, len(input_ids), batch_size):
        if progress:
            progress(first, len(input_ids))
        sums.update(mlp, directions, input_ids[first : first + batch_size], start)
    if progress:
        progress(len(input_ids), len(input_ids))
    return sums
