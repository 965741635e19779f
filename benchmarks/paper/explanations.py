"""Why a model differs from the paper where it does: a sentence for a claim, or for a group of claims.

Names are those of the models' folders, as on the page; keys are the claims'. A sentence says what was
measured, not what might be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

NOT_EXPLAINED = "not explained"


@dataclass(frozen=True)
class Group:
    """One reason for several claims of a model.

    Attributes:
        model: Its name.
        keys: Of the claims; a key ending in `*` is of all that begin so.
        sentence: The reason.
    """

    model: str
    keys: Collection[str]
    sentence: str

    def covers(self, model: str, key: str) -> bool:
        return model == self.model and any(
            key.startswith(each[:-1]) if each.endswith("*") else key == each for each in self.keys
        )


SINGLE: Mapping[tuple[str, str], str] = {}
"""By model and claim."""

GROUPS: tuple[Group, ...] = ()
"""Where `SINGLE` has nothing; the first one that covers a claim."""


def explanation(
    model: str, key: str, single: Mapping[tuple[str, str], str] = SINGLE, groups: tuple[Group, ...] = GROUPS
) -> str:
    """Why a model differs in a claim."""
    if (model, key) in single:
        return single[model, key]
    found = (each.sentence for each in groups if each.covers(model, key))
    return next(found, NOT_EXPLAINED)
