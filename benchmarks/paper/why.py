"""How a model's states lie to its unembedding: what a random subspace takes of them, and what that moves.

With M the second moment of the states about their mean, W the folded and centred unembedding and P the
projection onto a Haar-random subspace of m of q directions,

    E[P A P] = a A + b tr(A) I,    b = m (q - m) / (q (q - 1) (q + 2)),    a = m / q - q b,

for every symmetric A, and so the expected logit distance of a random removal du = -P (u - mu) is

    E D = tr(W^T W E[P M P]) = a tr(W^T W M) + b tr(W^T W) tr(M).

In the basis of M's eigenvectors (the principal directions v_k, of size lambda_k) both E[P M P] and M are
diagonal, and E D divides exactly in two ways: by the principal direction that the state's component came
from, lambda_k (a v_k^T W^T W v_k + b tr(W^T W)), and by the one that the change goes along,
v_k^T W^T W v_k (a lambda_k + b tr(M)). Everything is float64; under a soft cap, logits are those before it.
"""

from __future__ import annotations

from typing import Any

import torch

from csprune.analysis.spaces import band_slice
from csprune.linalg import eigh_descending
from csprune.unembedding import Unembedding

LEADING = (1, 5, 20)
"""So many principal directions are looked at together."""


def haar_weights(width: int, size: int) -> tuple[float, float]:
    """a and b of `E[P A P] = a A + b tr(A) I` for a random subspace of so many of so many directions."""
    b = size * (width - size) / (width * (width - 1) * (width + 2))
    return size / width - width * b, b


def state_geometry(unembedding: Unembedding, states: torch.Tensor, bands: int) -> dict[str, Any]:
    """The figures of `why.json` that are the model's.

    Args:
        unembedding: Of the model.
        states: u of the calibration documents, float64 [documents, q].
        bands: Of the spectrum; a random subspace has as many directions as the bottom one.

    Returns:
        Shares of the trace of M in the leading principal directions (`second_moment`), shares of E D by the
        direction that the states' components came from (`taken_from`) and by the one that is moved along
        (`moved_along`), each by the number of directions; how much the first principal direction is amplified
        in squared logits, to the mean direction; and of the bottom band the share of the trace of M, to that
        of as many random directions (`squared_length`), and D per unit of squared length and D itself, to
        random's.
    """
    deviation = states - states.mean(0)
    moment = deviation.mT @ deviation / len(states)
    gram = unembedding.gram
    width = unembedding.width
    band = band_slice(bands - 1, bands, width)
    size = band.stop - band.start
    a, b = haar_weights(width, size)
    principal = eigh_descending(moment, "the second moment of the states")
    sizes = principal.values.clamp_min(0)
    amplified = torch.einsum("ik,ij,jk->k", principal.vectors, gram, principal.vectors)
    trace, spread = gram.trace(), sizes.sum()
    by_source = sizes * (a * amplified + b * trace)
    by_direction = amplified * (a * sizes + b * spread)
    expected = by_source.sum()
    spectrum = eigh_descending(gram, "the Gram matrix of the unembedding")
    of_band = spectrum.vectors[:, band]
    along = (of_band * (moment @ of_band)).sum(0)
    distance = float((spectrum.values[band].clamp_min(0) * along).sum() / expected)
    length = float(along.sum() / spread) / (size / width)
    gain = unembedding.gain.abs()
    return {
        "documents": len(states),
        "directions": width,
        "removed": size,
        "second_moment": _shares(sizes),
        "taken_from": _shares(by_source),
        "moved_along": _shares(by_direction),
        "amplification": {
            "first principal direction": float(amplified[0] / trace * width),
            "bottom band": float(spectrum.values[band].clamp_min(0).mean() / trace * width),
        },
        "bottom_band": {
            "squared_length": length,
            "distance_per_length": distance / length,
            "logit_distance": distance,
        },
        "gain": {"smallest": float(gain.min()), "median": float(gain.median()), "largest": float(gain.max())},
    }


def _shares(values: torch.Tensor) -> dict[str, float]:
    """The shares of a sum in the first of its terms, by their number."""
    return {str(count): float(values[:count].sum() / values.sum()) for count in LEADING}
