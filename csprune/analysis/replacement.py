"""A component replaced by a donor's, and how far the prediction moves toward the donor's (paper, E.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from csprune.analysis.comparison import Pair, at_equal_length
from csprune.analysis.effects import Progress, Scene, observe_beside
from csprune.analysis.study import States, Study


@dataclass(frozen=True, eq=False)
class Replacement:
    """What replacing the bottom band's component by a donor's does, beside random replacements.

    The log-odds are those of the recipient's two leading candidates, the first against the second.

    Attributes:
        pair: The change beside random ones with the same donor and of the same length.
        gap: The donor's log-odds less the recipient's own, float64 [documents].
        shift: How the change moves the recipient's log-odds, float64 [documents].
        random_shift: How random ones do, float64 [subspaces, documents].
        adopted: 1 where the donor's most probable token is the changed prediction's, float64 [documents].
        random_adopted: Likewise, float64 [subspaces, documents].
        already: 1 where it is the unchanged prediction's, float64 [documents].
        rank: The place, from 1, of the recipient's most probable token among the donor's, int64 [documents].
    """

    pair: Pair
    gap: np.ndarray
    shift: np.ndarray
    random_shift: np.ndarray
    adopted: np.ndarray
    random_adopted: np.ndarray
    already: np.ndarray
    rank: np.ndarray

    @property
    def beyond_random(self) -> np.ndarray:
        """How much further the band's change moves the log-odds, float64 [subspaces, documents]."""
        return self.shift - self.random_shift

    def values(self, name: str) -> dict[str, np.ndarray]:
        """For a result's values: what the comparison does not have."""
        return {
            f"{name}.gap": self.gap,
            f"{name}.shift": self.shift,
            f"{name}.random.shift": self.random_shift,
            f"{name}.adopted": self.adopted,
            f"{name}.random.adopted": self.random_adopted,
            f"{name}.rank": self.rank.astype(np.float64),
        }


def some(states: States, documents: np.ndarray) -> States:
    """Some documents of some states, in an order int64 [documents]; one may be there several times."""
    places = torch.from_numpy(documents).to(states.u.device)
    return replace(
        states,
        u=states.u[places],
        targets=states.targets[places],
        blocks=states.blocks[places.to(states.blocks.device)],
        document_ids=tuple(states.document_ids[each] for each in documents),
    )


def replace_bottom_band(
    study: Study, recipients: States, donors: States, label: str, progress: Progress | None = None
) -> Replacement:
    """Replace the bottom band's component by the donor's, `du_i = -P_b (u_i - u_j)`.

    Args:
        study: For the band and the random subspaces.
        recipients: The documents.
        donors: The donor of each, in the recipients' order.
        label: Of the comparison.
        progress: Called with (documents done, documents).
    """
    apart = recipients.u - donors.u
    own = study.band(-1).removal(apart)
    random = [each.removal(apart).as_long_as(own) for each in study.references(own.subspace.size)]
    (pair,) = at_equal_length(recipients, {label: (own, random)}, progress)
    gap, rank, top = _views(recipients, donors)

    def adopted(scene: Scene, c: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"adopted": ((scene.log_p + c).argmax(1) == top[scene.documents]).double()}

    seen, seen_random = observe_beside(recipients, {label: (own, random)}, adopted, progress)[label]
    return Replacement(
        pair,
        gap.cpu().numpy(),
        pair.own["first_shift"] - pair.own["second_shift"],
        pair.reference["first_shift"] - pair.reference["second_shift"],
        seen["adopted"],
        seen_random["adopted"],
        (top == recipients.outlook.candidates[:, 0]).double().cpu().numpy(),
        rank.cpu().numpy(),
    )


def _views(recipients: States, donors: States) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What donors predict of the recipients' candidates: the gap, the first one's rank, and their own top."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for documents in recipients.chunks():
        candidates = recipients.outlook.candidates[documents]
        own, other = (each.unembedding.logits(each.u[documents]).double() for each in (recipients, donors))
        first, second = candidates[:, :1], candidates[:, 1:2]
        odds = [(logits.gather(1, first) - logits.gather(1, second)).squeeze(1) for logits in (own, other)]
        rank = 1 + (other > other.gather(1, first)).sum(1)
        parts.append((odds[1] - odds[0], rank, other.argmax(1)))
    gap, rank, top = (torch.cat(each) for each in zip(*parts, strict=True))
    return gap, rank, top
