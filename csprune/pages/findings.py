"""What a report says in words: what was done, what costs least, what is established and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from csprune.comparisons import PER_UNIT
from csprune.measurement import REFERENCE
from csprune.pages.wording import (
    DASH,
    QUANTITY_NAMES,
    Report,
    capitalised,
    counted,
    entries_of,
    figure,
    interval,
    listing,
    methods_of,
    nats,
    percent,
    ranks_of,
    share,
    times,
    with_interval,
)

_WRITE = {"logit_distance": figure, "top1_agreement": share}
CHECKS = {
    "interval": "interval",
    "halves_of_draws": "halves of draws",
    "blocks": "blocks",
    "subspaces": "subspaces",
}
"""The checks of a statement, and what a table calls them."""


@dataclass(frozen=True)
class Statement:
    """One comparison: on which side it came out, and whether that is established.

    Attributes:
        text: The direction in words, as the point estimate has it.
        value: The difference or ratio.
        adjusted: Its interval at the family's level.
        checks: For each of `CHECKS` "yes", "no", or a dash where it does not apply.
        established: Whether all checks hold.
        rank: Of the truncations compared.
    """

    text: str
    value: str
    adjusted: str
    checks: list[str]
    established: bool
    rank: float

    @property
    def removed(self) -> str:
        """The rank in percent."""
        return percent(self.rank)


@dataclass(frozen=True)
class Group:
    """The statements of one family and kind.

    Attributes:
        title: What they compare.
        note: How many comparisons are judged together, at which level.
        statements: In the report's order.
    """

    title: str
    note: str
    statements: list[Statement]

    @property
    def count(self) -> str:
        """How many are established."""
        held = sum(each.established for each in self.statements)
        return f"{held} of {len(self.statements)} established"


def done(report: Report) -> str:
    """What was measured, on which text, in one or two sentences."""
    protocol = report["protocol"]
    methods = [method for method in methods_of(report) if method != REFERENCE]
    first = report["truncations"][0]
    text = f"{listing(methods)} beside {REFERENCE} truncation" if methods else f"{REFERENCE} truncation"
    ranks = listing(percent(rank) for rank in ranks_of(report))
    if protocol.get("name"):
        text = f"{text} by the protocol {protocol['name']}{_departures(protocol)}"
    parts = [f"{text}, with {ranks} of the {first['removed'] + first['kept']:,} directions removed"]
    parts.append(f"evaluated on {_corpus(protocol.get('evaluation'), report['documents'])}")
    calibration = (protocol.get("calibration") or {}).get("corpus")
    if calibration:
        parts.append(f"calibrated on {_corpus(calibration, calibration.get('documents'))}")
    if protocol.get("positions"):
        every = protocol["positions"] == "all"
        parts.append("every position counts" if every else f"positions: {protocol['positions']}")
    if weights := (protocol.get("calibration") or {}).get("fingerprint"):
        parts.append(f"weights {weights[:12]}")
    return f"{capitalised('; '.join(parts))}."


def _departures(protocol: dict[str, Any]) -> str:
    """Where a run is not what its protocol says."""
    found = protocol.get("departures") or {}
    said = (f"{name.replace('_', ' ')} {d['here']} instead of {d['protocol']}" for name, d in found.items())
    return f" ({listing(said)})" if found else ""


def _corpus(corpus: dict[str, Any] | None, documents: int | None) -> str:
    text = "an unnamed number of documents" if documents is None else counted(documents, "document")
    if corpus and corpus.get("source"):
        # The name of csprune's own text says nothing to who did not choose it.
        text += " of Python's documentation" if corpus["source"] == "demo" else f" of {corpus['source']}"
    if corpus and corpus.get("sequence_length"):
        text += f" ({corpus['sequence_length']:,} tokens each)"
    return text


def base(report: Report) -> str:
    """The unchanged model's loss, and the entropy of its predictions where it was measured."""
    loss = report["base_loss"]
    text = f"{nats(loss['mean'], sign=False)} nats {interval(loss['ci95'], lambda v: nats(v, sign=False))}"
    if entropy := report.get("base_entropy"):
        text += f"; entropy of its predictions {nats(entropy['mean'], sign=False)} nats"
    return text


def least_costly(report: Report) -> list[str]:
    """For each rank: the method with the lowest loss change, and whether it is told apart from the next."""
    lines = []
    for rank in ranks_of(report):
        at = [e for m in methods_of(report) for e in entries_of(report, m) if e["rank"] == rank]
        ordered = sorted(
            (entry for entry in at if entry["method"] != REFERENCE), key=lambda e: e["loss_change"]["mean"]
        )
        if not ordered:
            continue
        best = ordered[0]
        change, versus = best["loss_change"], best["vs_random"]["loss_change"]
        text = (
            f"{percent(rank)} removed: of the methods {best['method']} costs least, "
            f"{nats(change['mean'])} nats {interval(change['ci95'])}"
        )
        if versus["ratio"] is not None and versus["ratio"] > 0:
            text += f", {with_interval(versus['ratio'], versus['ci95'], times)} times random truncation's"
        random = [entry for entry in at if entry["method"] == REFERENCE]
        if random and random[0]["loss_change"]["mean"] < change["mean"]:
            text += f"; {REFERENCE} truncation costs less, {nats(random[0]['loss_change']['mean'])} nats"
        if len(ordered) > 1:
            second = ordered[1]["method"]
            known = _between(report, rank, best["method"], second)
            if known is not None:
                held = "established" if known["established"] else "not established"
                text += f"; that it costs less than the next, {second}, is {held}"
        lines.append(f"{text}.")
    return lines


def _between(report: Report, rank: float, first: str, second: str) -> dict[str, Any] | None:
    for each in report.get("between_methods", []):
        if each["rank"] == rank and {each["first"], each["second"]} == {first, second}:
            return each
    return None


def conclusions(report: Report) -> tuple[list[str], list[str]]:
    """What is established of the losses, per unit of D, and between the methods, and what is not."""
    held: list[str] = []
    undecided: list[str] = []
    for title, family, quantity, reference in (
        ("the loss rises", "vs_random", "loss_change", "under random truncation"),
        (
            "a unit of logit distance changes the prediction (K)",
            "per_unit_vs_random",
            "prediction_change",
            "in random directions",
        ),
        (
            "a unit of logit distance raises the loss",
            "per_unit_vs_random",
            "loss_change",
            "in random directions",
        ),
    ):
        entries = [
            (entry, entry[family][quantity])
            for method in methods_of(report)
            for entry in entries_of(report, method)
            if method != REFERENCE and "established" in entry[family][quantity]
        ]
        for side, word in (("below", "less"), ("above", "more")):
            sure = [entry for entry, each in entries if each["established"] and each["side"] == side]
            if sure:
                held.append(f"{capitalised(title)} {word} than {reference}: {_which(sure)}.")
        unsure = [entry for entry, each in entries if not each["established"]]
        if unsure:
            undecided.append(f"Whether {title} more or less than {reference}: {_which(unsure)}.")
    pairs = report.get("between_methods", [])
    sure = sum(each["established"] for each in pairs)
    if sure:
        held.append(
            f"Which of two methods costs less: {sure} of {counted(len(pairs), 'comparison')}, in the tables."
        )
    unsure = [f"{p['first']} or {p['second']} at {percent(p['rank'])}" for p in pairs if not p["established"]]
    if unsure:
        undecided.append(f"Which of two methods costs less: {'; '.join(unsure)}.")
    return held, undecided


def _which(entries: Sequence[dict[str, Any]]) -> str:
    """Truncations by name, methods with the same ranks together: `a and b at 5% and 20%; c at 5%`."""
    ranks: dict[str, list[float]] = {}
    for entry in entries:
        ranks.setdefault(entry["method"], []).append(entry["rank"])
    methods: dict[tuple[float, ...], list[str]] = {}
    for method, own in ranks.items():
        methods.setdefault(tuple(own), []).append(method)
    return "; ".join(
        f"{listing(names)} at {listing(percent(rank) for rank in own)}" for own, names in methods.items()
    )


def groups(report: Report) -> list[Group]:
    """All statements of the report, the loss against random truncation first."""
    families = report.get("families", {})
    found = [
        Group(
            f"{capitalised(QUANTITY_NAMES[name])} against random truncation",
            _family(families, "vs_random"),
            list(_against_random(report, "vs_random", name, "difference")),
        )
        for name in QUANTITY_NAMES
    ]
    found += [
        Group(
            f"{capitalised(QUANTITY_NAMES[name])} per unit of logit distance",
            _family(families, "per_unit_vs_random"),
            list(_against_random(report, "per_unit_vs_random", name, "ratio")),
        )
        for name in PER_UNIT
    ]
    found.append(
        Group("Loss change between methods", _family(families, "between_methods"), list(_all_between(report)))
    )
    return [group for group in found if group.statements]


def _against_random(report: Report, family: str, name: str, value: str) -> Iterator[Statement]:
    write = times if value == "ratio" else _WRITE.get(name, nats)
    for rank in ranks_of(report):
        for method in methods_of(report):
            for entry in entries_of(report, method):
                found = entry[family][name]
                if method == REFERENCE or entry["rank"] != rank or "established" not in found:
                    continue
                side = {"below": "below random's", "above": "above random's", None: "undecided"}[
                    found["side"]
                ]
                yield _statement(f"{method} {side}", found, found[value], write, rank)


def _all_between(report: Report) -> Iterator[Statement]:
    for each in sorted(report.get("between_methods", []), key=lambda each: each["rank"]):
        side = {"below": "less", "above": "more", None: "the same"}[each["side"]]
        than = "as" if each["side"] is None else "than"
        text = f"{each['first']} costs {side} {than} {each['second']}"
        yield _statement(text, each, each["difference"], nats, each["rank"])


def _statement(text: str, found: dict[str, Any], value: float | None, write: Any, rank: float) -> Statement:
    words = {True: "yes", False: "no", None: DASH}
    return Statement(
        text=text,
        value=DASH if value is None else write(value),
        adjusted=interval(found["adjusted_ci95"], write),
        checks=[words[found["checks"].get(check)] for check in CHECKS],
        established=found["established"],
        rank=rank,
    )


def _family(families: dict[str, Any], name: str) -> str:
    """What is judged together; empty where the report does not say."""
    family = families.get(name)
    if family is None:
        return ""
    level = f"{100 * family['level']:.4g}%"
    together = counted(family["comparisons"], "comparison")
    return f"{together} judged together ({family['of']}), each interval at {level}"
