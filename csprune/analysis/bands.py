"""Every band's change beside random changes of its length: what most analyses look at."""

from __future__ import annotations

import numpy as np

from csprune.analysis.comparison import Pair, at_equal_length
from csprune.analysis.effects import Progress
from csprune.analysis.study import Study


def band_pairs(study: Study, progress: Progress | None = None) -> list[Pair]:
    """All bands at equal length, the top one first, labelled 1 to B; measured once for a study."""

    def make() -> list[Pair]:
        removals = {str(b + 1): study.removal(b) for b in range(study.bands)}
        changes = {label: (own, study.random_removals(own)) for label, own in removals.items()}
        return at_equal_length(study.evaluation, changes, progress)

    return study.once("band_pairs", make)


def bottom_pair(study: Study, progress: Progress | None = None) -> Pair:
    """The bottom band at equal length."""
    return band_pairs(study, progress)[-1]


def mean_reference(pair: Pair, quantity: str) -> np.ndarray:
    """A reference's mean over its subspaces, float64 [documents]."""
    return pair.reference[quantity].mean(axis=0)


def loss_excess(pair: Pair) -> np.ndarray:
    """The loss change less the references' mean, nats, float64 [documents]."""
    return pair.own["loss_change"] - mean_reference(pair, "loss_change")


def ratios(pair: Pair, quantity: str) -> np.ndarray:
    """A change's own ratio to its references' mean in each document, float64 [documents].

    Infinite where the references do nothing and the change does something, 1 where neither does.
    """
    own, reference = pair.own[quantity], mean_reference(pair, quantity)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = own / reference
    return np.where(reference > 0, found, np.where(own > 0, np.inf, 1.0))


def ratios_per_distance(pair: Pair, quantity: str) -> np.ndarray:
    """The same per unit of logit distance: `(F_b / D_b) / (F_rand / D_rand)` in each document."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = ratios(pair, quantity) / ratios(pair, "logit_distance")
    return np.where(np.isnan(found), 1.0, found)
