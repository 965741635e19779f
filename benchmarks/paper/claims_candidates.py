"""The paper's claims of the leading candidates: Sections 4.1 to 4.3."""

from __future__ import annotations

from claims import Claim, above, at, below, between, figure
from reports import Found, NotApplicable, Reports

NO_DONORS = "no calibration document's runner-up is the most probable token of another one"
NO_EXCESS = "the bottom band's K is not above its random changes'"
_PAIRS, _DECILES = ("contrast-share", "pairs"), ("contrast-share", "deciles")
_LEADING = "leading pair"
_NONE_BELOW = "no tenth of the documents has a mean share below the band's share of the directions"


def to_directions(row: str):
    """A pair's share of the bottom band, to the band's share of the directions (5% of twenty bands)."""

    def find(reports: Reports) -> Found:
        share = reports.cell(*_PAIRS, "direction at random", "share").value
        return reports.cell(*_PAIRS, row, "share").times(1 / share)

    return find


def excess_of_small_shares(reports: Reports) -> Found:
    """The mean loss excess of the tenths of documents whose mean share is below that of the directions.

    Its interval is the mean of theirs, which is wider than its own would be.
    """
    share = reports.cell(*_PAIRS, "direction at random", "share").value
    small = [
        (reports.cell(*_DECILES, place, "documents").value, reports.cell(*_DECILES, place, "excess"))
        for place in range(len(reports.rows(*_DECILES)))
        if reports.cell(*_DECILES, place, "share").value < share
    ]
    documents = sum(count for count, _ in small)
    if not documents:
        raise NotApplicable(_NONE_BELOW)
    value = sum(count * each.value for count, each in small) / documents
    ends = [(count, each.interval) for count, each in small if each.interval]
    if len(ends) < len(small):
        return Found(value)
    low, high = (sum(count * interval[end] for count, interval in ends) / documents for end in (0, 1))
    return Found(value, (low, high))


def on_the_candidates(reports: Reports) -> Found:
    """The share of the excess K in the two parts that concern the leading pair."""
    return reports.cell("chain-rule", "parts", "among the rest", "of_excess", NO_EXCESS).less_than_one()


CLAIMS = [
    Claim(
        "leading-share",
        "4.1",
        "Leading pair's share of the bottom band, to the band's share of the directions",
        "several times 5% (read as more than twice)",
        "ratio",
        above(2),
        to_directions(_LEADING),
    ),
    Claim(
        "uniform-share",
        "4.1",
        "Uniform pair's share of the bottom band, to the band's share of the directions",
        "below 5%",
        "ratio",
        below(1),
        to_directions("uniform pair, ratio of sums"),
    ),
    Claim(
        "leading-above-frequency",
        "4.1",
        "Leading pair's share, to the frequency-matched pair's",
        "above 1 in all ten models",
        "ratio",
        above(1, judged=True),
        at(*_PAIRS, _LEADING, "to_frequency"),
    ),
    Claim(
        "log-correlation",
        "4.1",
        "Correlation of the logarithms of the contrast spectrum and the consequence spectrum",
        "0.95 to 0.98",
        "number",
        between(0.95, 0.98),
        figure("contrast-share", "log_correlation", "one of the spectra is flat, or has too few bands"),
    ),
    Claim(
        "excess-of-small-shares",
        "4.1",
        "Mean loss excess of the tenths of documents with a mean share below 5%",
        "near or below zero in every model",
        "nats",
        between(None, 0, digits=None),
        excess_of_small_shares,
    ),
    Claim(
        "excess-of-largest-shares",
        "4.1",
        "Mean loss excess of the tenth of documents with the largest shares",
        "rises above zero in every model",
        "nats",
        above(0),
        at("contrast-share", "deciles", -1, "excess"),
    ),
    Claim(
        "on-the-candidates",
        "4.2",
        "Share of the excess K in the two parts that concern the leading pair",
        "85 to 99%",
        "share",
        between(0.85, 0.99),
        on_the_candidates,
    ),
    Claim(
        "matched-donors-above",
        "4.2",
        "Matched donors: median fraction of the gap closed beyond random replacements",
        "above 0 in nine models; in Qwen3-8B 0.13, not established",
        "number",
        above(0, judged=True),
        at("donors", "matched", 0, "fraction", NO_DONORS),
    ),
    Claim(
        "high-temperature-below",
        "4.3",
        "K at a softmax temperature of 8, to random's",
        "below 1 at high temperatures",
        "ratio",
        below(1),
        at("temperatures", "temperatures", "8", "ratio"),
    ),
    Claim(
        "entropy-slope",
        "4.3",
        "Slope of the loss excess on the entropy of the unchanged prediction, nats per nat",
        "below 0 in every model",
        "number",
        below(0, judged=True),
        at("regression", "slopes", "entropy, nats", "slope", "too few documents for a regression"),
    ),
]
