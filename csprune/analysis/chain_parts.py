"""The exact parts of the prediction change at the leading pair, and their shares (paper, Section 4.2)."""

from __future__ import annotations

import torch

from csprune.analysis.effects import Progress, Scene, Values, observe_beside
from csprune.analysis.estimates import Formula, Means, Sample
from csprune.analysis.study import Study
from csprune.bootstrap import Resampling, Statistic, difference, ratio

PARTS = {
    "between": "pair against the rest",
    "within": "within the pair",
    "rest": "among the rest",
}
WHOLE = "whole"


def leading_pair_parts(scene: Scene, c: torch.Tensor) -> dict[str, torch.Tensor]:
    """K and its three parts: nats, float64 [documents] each.

    Each part comes from sums over its own tokens, and none from 1 - P: of the mass outside the pair, before
    or after the change, little may be left. With A = log E[exp c | pair], B = log E[exp c | rest],

        within = P2 (A - E[c | pair]),    rest = Q (B - E[c | rest]),
        between = log(P2 exp A + Q exp B) - P2 A - Q B,    Q = 1 - P2.
    """
    tokens = scene.candidates[:, :2]
    c = c - c.gather(1, tokens[:, :1])
    log_pair = scene.log_p.gather(1, tokens)
    others = scene.p.scatter(1, tokens, 0.0)
    mass, changed_mass = others.sum(1), (scene.log_p + c).scatter_(1, tokens, -torch.inf).logsumexp(1)
    pair = c.gather(1, tokens)
    p = log_pair.exp()
    log_total = log_pair.logsumexp(1)
    changed_total = (log_pair + pair).logsumexp(1)
    mean_pair, mean_rest = (p * pair).sum(1), (others * c).sum(1)
    of_pair = p.sum(1) * (changed_total - log_total)
    # Where nothing at all is outside the pair, in float64, nothing of K is.
    of_rest = torch.where(mass > 0, mass * (changed_mass - mass.log()), 0.0)
    normaliser = torch.logaddexp(changed_total, changed_mass)
    parts = {
        WHOLE: normaliser - mean_pair - mean_rest,
        "between": normaliser - of_pair - of_rest,
        "within": of_pair - mean_pair,
        "rest": of_rest - mean_rest,
    }
    # A divergence is not negative; what is below 0 is the last bit of its sums.
    return {name: each.clamp_min(0) for name, each in parts.items()}


def band_parts(study: Study, progress: Progress | None = None) -> list[tuple[Values, Values]]:
    """The parts of every band's K, the top one first, and of its random changes' of the same length.

    By part and `whole`: float64 [documents], and [subspaces, documents].
    """
    removals = {str(b): study.removal(b) for b in range(study.bands)}
    changes = {
        name: (own, [each.as_long_as(own) for each in study.random_removals(own)])
        for name, own in removals.items()
    }
    return list(observe_beside(study.evaluation, changes, leading_pair_parts, progress).values())


def parts_sample(own: Values, random: Values, resampling: Resampling) -> Sample:
    """Of one band, as `own.PART` and `reference.PART`."""
    values = {f"own.{part}": each for part, each in own.items()}
    return Sample(values | {f"reference.{part}": each for part, each in random.items()}, resampling)


def share(who: str, part: str) -> Formula:
    """A part's share of K, as a ratio of sums; undefined where nothing changes."""
    return lambda m: ratio(m[f"{who}.{part}"], m[f"{who}.{WHOLE}"])


def less(first: Statistic | None, second: Statistic | None) -> Statistic | None:
    """Their difference, where both exist."""
    return None if first is None or second is None else difference(first, second)


def share_difference(part: str, prefix: str = "") -> Formula:
    """A part's share of the band's K less its share of random changes'."""
    return lambda m: less(share(f"{prefix}own", part)(m), share(f"{prefix}reference", part)(m))


def share_of_excess(part: str) -> Formula:
    """A part's share of the band's K less random's; undefined where there is no excess."""

    def formula(m: Means) -> Statistic | None:
        own, whole = (difference(m[f"own.{each}"], m[f"reference.{each}"]) for each in (part, WHOLE))
        return ratio(own, whole)

    return formula
