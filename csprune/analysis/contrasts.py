"""How the difference between two tokens lies over the bands: contrast shares (paper, Section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from csprune.analysis.spaces import Subspace, band_slice
from csprune.analysis.study import States, Study
from csprune.errors import CspruneError
from csprune.linalg import row_blocks
from csprune.unembedding import Unembedding

SAMPLED_PAIRS = 20_000
# Pairs whose contrasts [pairs, q] are held at once: 64 MiB in float64 at q = 4,096.
_PAIRS = 2_048
# Seeds of the two samples, beside the study's own.
_UNIFORM, _FREQUENCY = 1, 2


def contrasts(unembedding: Unembedding, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`w_1 - w_2` of pairs of tokens int64 [pairs], float64 [pairs, q].

    Centring takes the same off both vectors, so that it does not enter; a soft cap comes after them.
    """
    weight = unembedding.weight
    difference = weight[first].double() - weight[second].double()
    return unembedding.state(difference * unembedding.gain) * unembedding.transform.scale


def band_shares(study: Study, first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
    """The contrast share of every band, `||P_b (w_1 - w_2)||^2 / ||w_1 - w_2||^2`: float64 [pairs, bands].

    NaN where both tokens have the same vector, which has no share.
    """
    directions, width = study.space.directions, study.space.width
    slices = [band_slice(b, study.bands, width) for b in range(study.bands)]
    parts = []
    for pairs in row_blocks(len(first), _PAIRS):
        squares = (contrasts(study.unembedding, first[pairs], second[pairs]) @ directions).square()
        of_bands = torch.stack([squares[:, own].sum(1) for own in slices], dim=1)
        parts.append(of_bands / of_bands.sum(1, keepdim=True))
    return torch.cat(parts).cpu().numpy()


def subspace_shares(
    subspaces: Sequence[Subspace], unembedding: Unembedding, first: torch.Tensor, second: torch.Tensor
) -> np.ndarray:
    """The share of each subspace in each contrast, float64 [subspaces, pairs]; NaN where it has none."""
    contrast = contrasts(unembedding, first, second)
    total = contrast.square().sum(1)
    inside = [(contrast @ each.vectors).square().sum(1) / total for each in subspaces]
    return torch.stack(inside).cpu().numpy()


def candidate_shares(study: Study, states: States, other: int = 1) -> np.ndarray:
    """The bands' shares of the contrast between each document's first candidate and another.

    Args:
        study: Whose bands.
        states: The documents.
        other: 1 the runner-up, 2 the third candidate.

    Returns:
        float64 [documents, bands]; a row sums to 1.

    Raises:
        CspruneError: Two candidates with the same vector, with the count of documents.
    """
    candidates = states.outlook.candidates
    shares = band_shares(study, candidates[:, 0], candidates[:, other])
    if same := int(np.isnan(shares[:, 0]).sum()):
        raise CspruneError(
            f"in {same} of {len(shares)} documents the unembedding has the same vector for the first and the "
            f"{('second', 'third')[other - 1]} candidate, so that no band has a share of their difference: "
            "check whether the vocabulary repeats tokens"
        )
    return shares


def leading_shares(study: Study) -> np.ndarray:
    """Those of the evaluation documents' leading pairs, float64 [documents, bands]; made once."""
    return study.once("leading_shares", lambda: candidate_shares(study, study.evaluation))


def uniform_shares(study: Study) -> np.ndarray:
    """The bands' shares for two tokens drawn uniformly, as the ratio of the sums over all pairs.

    That is the band's share of the squared singular values of the map centred over the vocabulary: float64
    [bands], in closed form. Under a soft cap the bands are those of the map that is not centred.
    """
    space, vocabulary = study.space, study.unembedding.vocabulary
    blocks = [space.rows(rows).sum(0) for rows in row_blocks(vocabulary)]
    mean = torch.stack(blocks).sum(0) / vocabulary @ space.directions
    squares = (space.singular_values.square() - vocabulary * mean.square()).clamp_min(0)
    of_bands = [squares[band_slice(b, study.bands, space.width)].sum() for b in range(study.bands)]
    found = torch.stack(of_bands)
    return (found / found.sum()).cpu().numpy()


@dataclass(frozen=True, eq=False)
class PairSample:
    """Shares of drawn pairs of tokens.

    Attributes:
        shares: Mean shares, float64 [bands].
        errors: Their standard errors, of the drawing alone, float64 [bands].
        pairs: How many pairs were drawn and have a contrast.
        same: How many more were drawn whose tokens have the same vector; they are left out.
    """

    shares: np.ndarray
    errors: np.ndarray
    pairs: int
    same: int


def uniform_sample(study: Study, pairs: int = SAMPLED_PAIRS) -> PairSample:
    """Two distinct tokens drawn uniformly: the mean of each pair's own shares."""
    generator = np.random.default_rng([study.seed, _UNIFORM])
    vocabulary = study.unembedding.vocabulary
    first = generator.integers(0, vocabulary, pairs)
    # Of the others: those from the first on move up by one.
    second = generator.integers(0, vocabulary - 1, pairs)
    return _sample(study, first, second + (second >= first))


def frequency_sample(study: Study, pairs: int = SAMPLED_PAIRS) -> PairSample:
    """Two distinct tokens drawn one after the other in proportion to their mean calibration probability.

    Raises:
        CspruneError: All calibration documents are certain of one token.
    """
    generator = np.random.default_rng([study.seed, _FREQUENCY])
    first, second = draw_distinct(study.calibration.outlook.probability.cpu().numpy(), pairs, generator)
    return _sample(study, first, second)


def draw_distinct(
    probability: np.ndarray, pairs: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of distinct tokens, the first in proportion to a probability, the second so among the others.

    Args:
        probability: float64 [V], not negative.
        pairs: How many.
        generator: Of the draws.

    Raises:
        CspruneError: One token has all the probability.
    """
    mass = probability / probability.sum()
    if (mass > 0).sum() < 2:
        raise CspruneError(
            "all calibration documents are certain of one and the same token, so that no second one can be "
            "drawn in proportion to its probability: calibrate on more or other text"
        )
    first = _draw(mass, generator.random(pairs))
    second = np.empty_like(first)
    places = generator.random(pairs)
    for token in np.unique(first):
        # Summed anew without the first token: beside a nearly certain one, the others' differences would be
        # lost in a sum that has it.
        others = mass.copy()
        others[token] = 0.0
        here = first == token
        second[here] = _draw(others, places[here])
    return first, second


def _draw(mass: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Tokens in proportion to their mass, float64 [V], for uniform numbers in [0, 1)."""
    edges = np.cumsum(mass)
    last = int(np.flatnonzero(mass)[-1])  # a product may round up to the whole sum
    return np.minimum(np.searchsorted(edges, places * edges[-1], side="right"), last)


def _sample(study: Study, first: np.ndarray, second: np.ndarray) -> PairSample:
    device = study.unembedding.device
    shares = band_shares(study, *(torch.from_numpy(each).to(device) for each in (first, second)))
    known = ~np.isnan(shares[:, 0])
    found = shares[known]
    if len(found) < 2:
        raise CspruneError(
            f"the unembedding has the same vector for both tokens of {len(shares) - len(found)} of "
            f"{len(shares)} drawn pairs: it tells too few tokens apart to have contrasts"
        )
    errors = found.std(axis=0, ddof=1) / len(found) ** 0.5
    return PairSample(found.mean(axis=0), errors, len(found), len(shares) - len(found))
