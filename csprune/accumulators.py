"""Streaming sums for the calibration: everything is a float64 sum, so merging is addition.

Collect, finish, apply: an accumulator is updated chunk by chunk; `Calibration` turns its sums into
saliency, mean Fisher matrix and second moment. Raw sums are kept because mu is known only at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from csprune.linalg import row_blocks

# Rows of Z squared at once: small beside the head, large enough for full-speed products.
_SQUARE_BLOCK = 8_192
# Tokens summed in their own dtype before float64 takes over: it costs nothing in precision, much in time.
_SUMMED_ROWS = 32


@dataclass
class _Sums:
    """Float64 tensors that are updated and merged by addition."""

    def merge(self, other: _Sums) -> None:
        """Add the sums of other tokens; the order of merges matters only to rounding."""
        for name, value in self.tensors().items():
            value += other.tensors()[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums by name, by reference."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass
class Moments(_Sums):
    """First and second moment of the states.

    Attributes:
        count: Tokens, int64 scalar.
        state: sum u, float64 [q].
        outer: sum u u^T, float64 [q, q].
    """

    count: torch.Tensor
    state: torch.Tensor
    outer: torch.Tensor

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> Moments:
        """No tokens yet."""
        return cls(_count(device), _zeros(width, device=device), _zeros(width, width, device=device))

    def update(self, u: torch.Tensor) -> None:
        """Add tokens' states u, float64 [tokens, q]."""
        self.count += len(u)
        self.state += u.sum(0)
        self.outer.addmm_(u.mT, u)


@dataclass
class FisherSums(_Sums):
    """Fisher statistics in the basis of singular directions (README, Definitions; paper, E.4).

    With `x = V^T u`, `m = W^T (J p)` and `var_i = v_i^T W^T S_p W v_i` (its entries multiplied by J
    under a soft cap):

    Attributes:
        count: Tokens, int64 scalar.
        state: sum u, float64 [q].
        probability: sum p J^2, float64 [V].
        outer: sum m m^T in the directions' basis, float64 [q, q].
        variance: S0 = sum var_i, float64 [q].
        variance_state: S1 = sum x_i var_i, float64 [q].
        variance_state2: S2 = sum x_i^2 var_i, float64 [q].
    """

    count: torch.Tensor
    state: torch.Tensor
    probability: torch.Tensor
    outer: torch.Tensor
    variance: torch.Tensor
    variance_state: torch.Tensor
    variance_state2: torch.Tensor

    @classmethod
    def zeros(cls, width: int, vocabulary: int, device: torch.device) -> FisherSums:
        """No tokens yet."""
        return cls(
            _count(device),
            _zeros(width, device=device),
            _zeros(vocabulary, device=device),
            _zeros(width, width, device=device),
            *(_zeros(width, device=device) for _ in range(3)),
        )

    def update(
        self,
        u: torch.Tensor,
        directions: torch.Tensor,
        probabilities: torch.Tensor,
        slope: torch.Tensor | None,
        mapped: torch.Tensor,
    ) -> None:
        """Add tokens.

        Args:
            u: States, float64 [tokens, q].
            directions: V, float64 [q, q].
            probabilities: p, float32 or float64 [tokens, V].
            slope: J [tokens, V] in p's dtype under a soft cap, else None.
            mapped: Z = W V [V, q] in p's dtype.
        """
        mean, variance = direction_moments(probabilities, slope, mapped)
        x = u @ directions
        self.count += len(u)
        self.state += u.sum(0)
        weights = probabilities if slope is None else probabilities * slope.square()
        for group in weights.split(_SUMMED_ROWS):
            self.probability += group.sum(0)
        self.outer.addmm_(mean.mT, mean)
        self.variance += variance.sum(0)
        self.variance_state += (x * variance).sum(0)
        self.variance_state2 += (x.square() * variance).sum(0)


def direction_moments(
    probabilities: torch.Tensor, slope: torch.Tensor | None, mapped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each column of J Z under each token's prediction.

    The plain `p . Z^2 - (p . Z)^2` loses everything in float32 where one token t has nearly all the
    mass (8% at 1 - p_t = 2.5e-6). With q = p but q_t = 0, and Q = sum q summed, never 1 - p_t,
    `var = q . Z^2 - 2 Z_t (q . Z) + Z_t^2 Q - (q . Z - Z_t Q)^2` errs by about 1e-6.

    Args:
        probabilities: p [tokens, V], float32 or float64.
        slope: J [tokens, V], or None for ones.
        mapped: Z [V, q] in p's dtype.

    Returns:
        `sum_j p_j J_j Z_ji` and the variance, both float64 [tokens, q].
    """
    tokens, width = len(probabilities), mapped.shape[1]
    top_probability, top = probabilities.max(1, keepdim=True)
    rest = probabilities.scatter(1, top, 0.0)
    rest_mass = rest.sum(1, keepdim=True).double()
    linear = rest if slope is None else rest * slope
    square = linear if slope is None else linear * slope
    first = _zeros(tokens, width, device=mapped.device)
    second = _zeros(tokens, width, device=mapped.device)
    for rows in row_blocks(len(mapped), _SQUARE_BLOCK):
        block = mapped[rows]
        first += linear[:, rows] @ block
        second += square[:, rows] @ block.square()
    z_top = mapped[top.squeeze(1)].double()
    if slope is not None:
        z_top = z_top * slope.gather(1, top)
    variance = second - 2 * z_top * first + z_top.square() * rest_mass - (first - z_top * rest_mass).square()
    return first + z_top * top_probability.double(), variance.clamp_min_(0)


def _zeros(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=device)


def _count(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)
