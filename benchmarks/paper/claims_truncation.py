"""The paper's claims of truncations and of HARP's removal: Section 5.1, E.4 and Appendix G."""

from __future__ import annotations

from claims import Claim, above, at, below, between
from reports import Found, NotApplicable, Reports

RANKS = (0.05, 0.1, 0.2)
METHODS = ("singular", "fisher", "whitened", "fisher-whitened")
_HARP, _RANDOM = "smallest 5%", "random, for the smallest 5%"


def versus_random(method: str, rank: float, quantity: str, key: str):
    """A method beside random truncation: the `difference` or the `ratio` of a quantity."""

    def find(reports: Reports) -> Found:
        entry = reports.truncation(method, rank)["vs_random"][quantity]
        return _judged(entry, key, "difference_ci95" if key == "difference" else "ci95")

    return find


def per_unit(method: str, rank: float):
    """A method's loss change per unit of logit distance, to random truncation's."""
    return lambda reports: _judged(
        reports.truncation(method, rank)["per_unit_vs_random"]["loss_change"], "ratio", "ci95"
    )


def less(first: str, second: str, rank: float):
    """The loss change of one method less that of another."""

    def find(reports: Reports) -> Found:
        for each in reports.truncations["between_methods"]:
            if each["rank"] == rank and {each["first"], each["second"]} == {first, second}:
                found = _judged(each, "difference", "difference_ci95")
                return found if each["first"] == first else _opposite(found)
        raise NotApplicable(f"{first} and {second} were not compared")

    return find


def kept_less_random(reports: Reports) -> Found:
    """How much more often the most probable token stays first than under random removals."""
    own, random = (reports.cell("removal", "effects", row, "kept") for row in (_HARP, _RANDOM))
    return Found(own.value - random.value)


def rank_to_random(reports: Reports) -> Found:
    """The median rank of the most probable token, to that under random removals."""
    own, random = (reports.cell("removal", "effects", row, "rank") for row in (_HARP, _RANDOM))
    return Found(own.value / random.value)


def _judged(entry: dict, key: str, ends: str) -> Found:
    if entry[key] is None:
        raise NotApplicable("it is undefined: what it is relative to is not positive")
    interval = entry[ends]
    return Found(entry[key], None if interval is None else (interval[0], interval[1]), entry["established"])


def _opposite(found: Found) -> Found:
    turned = found.times(-1)
    return Found(turned.value, turned.interval, found.established)


_LOSSES = [
    *(
        Claim(
            f"singular-loss-{rank:g}",
            "5.1",
            f"Loss change of singular truncation less random's, {rank:.0%} of the rank",
            "above 0 in every model",
            "nats",
            above(0, judged=True),
            versus_random("singular", rank, "loss_change", "difference"),
        )
        for rank in RANKS
    ),
    *(
        Claim(
            f"singular-distance-{rank:g}",
            "5.1",
            f"Logit distance of singular truncation, to random's, {rank:.0%} of the rank",
            f"below 1 in {of}",
            "ratio",
            below(1),
            versus_random("singular", rank, "logit_distance", "ratio"),
        )
        for rank, of in zip(
            RANKS,
            (
                "nine models; 1.19 in Llama-3.1-8B",
                "nine models; 1.07 in Llama-3.1-8B",
                "all ten models",
            ),
            strict=True,
        )
    ),
    *(
        Claim(
            f"fisher-loss-{rank:g}",
            "5.1",
            f"Loss change of consequence-ranked truncation less random's, {rank:.0%} of the rank",
            f"below 0 in {of}",
            "nats",
            below(0, judged=True),
            versus_random("fisher", rank, "loss_change", "difference"),
        )
        for rank, of in zip(
            RANKS,
            ("all ten models; in three not established", "all ten models", "all ten models"),
            strict=True,
        )
    ),
    *(
        Claim(
            f"whitened-fisher-{rank:g}",
            "5.1",
            f"Loss change of whitened less that of consequence-ranked truncation, {rank:.0%} of the rank",
            f"below 0 in {of} of the ten models",
            "nats",
            below(0),
            less("whitened", "fisher", rank),
        )
        for rank, of in zip(RANKS, ("eight", "eight", "nine"), strict=True)
    ),
    *(
        Claim(
            f"whitened-per-unit-{rank:g}",
            "5.1",
            f"Whitened truncation's loss change per unit of logit distance, to random's, {rank:.0%}",
            f"above 1 in {of}",
            "ratio",
            above(1),
            per_unit("whitened", rank),
        )
        for rank, of in zip(
            RANKS, ("nine models, all but Qwen3-8B", "all ten models", "all ten models"), strict=True
        )
    ),
]

_AT_A_FIFTH = [
    Claim(
        "singular-random",
        "E.4",
        "At 20%: loss change of singular truncation less random's",
        "0.11 to 1.24 nats",
        "nats",
        between(0.11, 1.24),
        versus_random("singular", 0.2, "loss_change", "difference"),
    ),
    Claim(
        "fisher-random",
        "E.4",
        "At 20%: loss change of consequence-ranked truncation less random's",
        "0.07 to 0.28 nats less",
        "nats",
        between(-0.28, -0.07),
        versus_random("fisher", 0.2, "loss_change", "difference"),
    ),
    Claim(
        "fisher-singular",
        "E.4",
        "At 20%: loss change of consequence-ranked less that of singular truncation",
        "0.28 to 1.42 nats less",
        "nats",
        between(-1.42, -0.28),
        less("fisher", "singular", 0.2),
    ),
    Claim(
        "fisher-whitened",
        "E.4",
        "At 20%: loss change of consequence-ranked less that of whitened truncation",
        "\N{MINUS SIGN}0.02 to 0.17 nats",
        "nats",
        between(-0.02, 0.17),
        less("fisher", "whitened", 0.2),
    ),
    Claim(
        "overlap",
        "E.4",
        "At 20%: overlap of the sets that consequence-ranked and singular truncation remove",
        "at most 27%",
        "share",
        between(None, 0.27),
        at("overlaps", "overlaps", "fisher, 20%", "singular"),
    ),
    Claim(
        "whitened-bottom",
        "E.4",
        "At 20%: share of what whitened truncation removes in the four bottom bands",
        "47 to 63%",
        "share",
        between(0.47, 0.63),
        at("overlaps", "overlaps", "whitened, 20%", "bottom"),
    ),
]

_REMOVAL = [
    Claim(
        "harp-change",
        "G",
        "HARP's removal: K, to that of random removals of its length",
        "4.3 in Llama-3.1-8B; 2.0 and 1.3 in Qwen3-1.7B and 8B",
        "ratio",
        between(1.3, 2.0, (4.3, 4.3), digits=1),
        at("removal", "removals", _HARP, "prediction_change"),
    ),
    Claim(
        "harp-loss-excess",
        "G",
        "HARP's removal: loss excess",
        "positive in Llama-3.1-8B and the two Qwen models",
        "nats",
        above(0, judged=True),
        at("removal", "removals", _HARP, "loss_excess"),
    ),
    Claim(
        "harp-kept",
        "G",
        "HARP's removal: the most probable token stays first",
        "47% in Llama-3.1-8B, 15 to 16% in the two Qwen models",
        "share",
        between(0.15, 0.16, (0.47, 0.47)),
        at("removal", "effects", _HARP, "kept"),
    ),
    Claim(
        "harp-kept-random",
        "G",
        "Random removals of its length: the most probable token stays first",
        "68% in Llama-3.1-8B, 5 to 13% in the two Qwen models",
        "share",
        between(0.05, 0.13, (0.68, 0.68)),
        at("removal", "effects", _RANDOM, "kept"),
    ),
    Claim(
        "harp-kept-less",
        "G",
        "Share of documents in which it stays first under HARP's removal, less that under random ones",
        "below 0 in Llama-3.1-8B, above in the two Qwen models",
        "number",
        below(0),
        kept_less_random,
    ),
    Claim(
        "harp-rank",
        "G",
        "HARP's removal: median rank of that token, to that under random removals",
        "3,434 to 57 and 37,732 to 1,110 in the two Qwen models",
        "ratio",
        above(1),
        rank_to_random,
    ),
    Claim(
        "harp-carried",
        "G",
        "HARP's subspace: share of the state's squared norm",
        "24% in Llama-3.1-8B, 47 and 69% in Qwen3-1.7B and 8B",
        "share",
        between(0.24, 0.69),
        at("removal", "effects", _HARP, "share"),
    ),
]

CLAIMS = [*_LOSSES, *_AT_A_FIFTH, *_REMOVAL]
