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


SINGLE: Mapping[tuple[str, str], str] = {
    ("neox", "log-correlation"): (
        "The two spectra follow one another (0.90), but over a factor of three only, from 0.71 to 2.1."
    ),
}
"""By model and claim."""

_NEOX, _GEMMA, _SMOLLM2 = "neox", "gemma-3-270m", "SmolLM2-135M-Instruct"
_TRUNCATIONS = (
    "singular-*",
    "fisher-*",
    "whitened-*",
    "overlap",
)

GROUPS: tuple[Group, ...] = (
    Group(
        _NEOX,
        _TRUNCATIONS,
        "The directions of the smallest singular values are also those that the states use least (the "
        "bottom band "
        "has 0.8% of their variance): removing them costs next to nothing, and the ranking by consequence "
        "chooses nearly the same ones (92%).",
    ),
    Group(_NEOX, ("harp-*",), "HARP's subspace carries 0.4% of this model's squared state."),
    Group(
        _NEOX,
        ("*",),
        "The bottom band is not where this small model's leading candidates differ: it has 0.5% of their "
        "contrast "
        "(a random direction has 5%) and 0.8% of the states' variance. Its change is short, 0.13 times the "
        "squared "
        "length of random ones, and does less than theirs in every respect.",
    ),
    Group(
        _GEMMA,
        _TRUNCATIONS,
        "Random truncation is the odd one here: it costs 10 to 11 nats at 20%, for it turns what the "
        "states have "
        "along weakly amplified directions into changes along the most amplified ones (99.8% of its logit "
        "distance lies outside the 20 principal directions of the states). Beside it every deliberate "
        "truncation "
        "is cheap.",
    ),
    Group(
        _GEMMA,
        ("variance-*",),
        "The states vary most where the unembedding amplifies little: the 32 principal directions have 70% "
        "of the "
        "variance, and a change along them moves the logits 0.04 times as far as a random one.",
    ),
    Group(
        _GEMMA,
        ("leading-*", "frequency-*", "spearman", "log-correlation", "slope-*", "excess-of-*"),
        "With a gain from 0.19 to 301 every contrast lies mostly along the most amplified directions: the "
        "bottom "
        "band has 0.2% of the leading pair's, though six times the share of a uniform pair's.",
    ),
    Group(
        _GEMMA,
        ("*",),
        "The gain of the final norm runs from 0.19 to 301 (median 9), the singular values from 12 to "
        "5,827. A random "
        "change always has a part along the most amplified directions: at the bottom band's length it "
        "moves the "
        "logits 168 times as far (in D) and replaces 94% of the most probable tokens. Beside that the "
        "bottom band "
        "does little in total; per unit of logit distance it has the largest consequence of all bands, 4.6.",
    ),
    Group(
        _SMOLLM2,
        _TRUNCATIONS,
        "In the paper's direction and further: 40% of the states' variance lies in the bottom band, so "
        "that removing "
        "it moves the logits far and costs much. Consequence-ranked truncation removes none of the "
        "directions "
        "that truncation by singular value does, whitened truncation 29% of its own.",
    ),
    Group(
        _SMOLLM2,
        ("extremes-*",),
        "Without its extreme coordinates the band's K is 3.0 and 3.5 times random's and its loss change "
        "0.6 nats "
        "above, as in the paper; D is then about random's (1.06 and 1.13), as in Qwen3-8B.",
    ),
    Group(
        _SMOLLM2,
        ("harp-*", "raw-*"),
        "The raw unembedding's bottom directions carry 56% of the squared state: their removal and its "
        "references "
        "are large changes, and the references, which reach amplified directions too, larger ones (D 0.14 of "
        "theirs).",
    ),
    Group(
        _SMOLLM2,
        ("variance-*",),
        "The states vary most along weakly amplified directions: a change along the principal ones moves "
        "the logits "
        "0.62 times as far as a random one of its length.",
    ),
    Group(
        _SMOLLM2,
        ("*",),
        "D at equal length is as in the paper (0.21 times random's), but F per unit of it is 3.5 times "
        "random's, "
        "not 12 to 38: the product stays below one. The bottom band still has the largest C_b under all six "
        "conditions, and not rescaled its K is 6.9 times random's; its change is long (8.1 times the squared "
        "length of random ones, 40% of the states' variance, much of it in two coordinates).",
    ),
)
"""Where `SINGLE` has nothing; the first one that covers a claim."""


def explanation(
    model: str, key: str, single: Mapping[tuple[str, str], str] = SINGLE, groups: tuple[Group, ...] = GROUPS
) -> str:
    """Why a model differs in a claim."""
    if (model, key) in single:
        return single[model, key]
    found = (each.sentence for each in groups if each.covers(model, key))
    return next(found, NOT_EXPLAINED)
