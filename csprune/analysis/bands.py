"""Every band's change beside random changes of its length: what most analyses look at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from csprune.analysis.comparison import Pair, at_equal_length
from csprune.analysis.effects import Look, Progress, Values, observe_beside
from csprune.analysis.study import Study


def band_pairs(study: Study, progress: Progress | None = None) -> list[Pair]:
    """All bands at equal length, the top one first, labelled 1 to B; measured once for a study."""

    def make() -> list[Pair]:
        removals = {str(b + 1): study.removal(b) for b in range(study.bands)}
        changes = {label: (own, study.random_removals(own)) for label, own in removals.items()}
        return at_equal_length(study.evaluation, changes, progress)

    return study.once("band_pairs", make)


def bottom_pair(study: Study, label: str, progress: Progress | None = None) -> Pair:
    """The bottom band at equal length, measured once for a study, by itself where not all bands are."""

    def make() -> Pair:
        own = study.removal(-1)
        (pair,) = at_equal_length(study.evaluation, {"": (own, study.random_removals(own))}, progress)
        return pair

    pair = band_pairs(study)[-1] if study.has("band_pairs") else study.once("bottom_pair", make)
    return replace(pair, label=label)


def bottom_observed(study: Study, look: Look, progress: Progress | None) -> tuple[Values, Values]:
    """What a look makes of the bottom band's change, and of its random changes of the same length.

    By figure float64 [documents], and [subspaces, documents].
    """
    own = study.removal(-1)
    random = [each.as_long_as(own) for each in study.random_removals(own)]
    return observe_beside(study.evaluation, {"": (own, random)}, look, progress)[""]


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
