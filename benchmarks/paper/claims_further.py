"""The paper's further claims of the leading candidates: Section E.3."""

from __future__ import annotations

from claims import Claim, Open, Range, above, at, between, figure
from claims_candidates import NO_DONORS, NO_EXCESS

from csprune.analysis.results import Unit

_PAIRS = ("contrast-share", "pairs")
_NO_SLOPES = "too few documents for a regression"
_NO_RANK = "no document's donor gives the recipient's most probable token such a rank"


def _claim(
    key: str, text: str, said: str, unit: Unit, expects: Range, where: tuple[str, ...], absent: str = ""
) -> Claim:
    analysis, table, row, column = where
    return Claim(key, "E.3", text, said, unit, expects, at(analysis, table, row, column, absent))


def _of_excess(key: str, text: str, low: float, high: float) -> Claim:
    return _claim(
        f"chain-{key}",
        f"Share of the excess K: {text}",
        f"{low * 100:.0f} to {high * 100:.0f}%",
        "share",
        between(low, high),
        ("chain-rule", "parts", text, "of_excess"),
        NO_EXCESS,
    )


def _third(key: str, low: float, high: float) -> Claim:
    return _claim(
        f"entropy-{key}",
        f"Loss excess in the {key} third of documents by entropy",
        f"{low:.2f} to {high:.2f} nats in the seven Pythia models",
        "nats",
        between(low, high),
        ("regression", "thirds", f"{key} third", "excess"),
    )


def _temperature(key: str, text: str, low: float, high: float, row: str) -> Claim:
    digits = 1 if low > 1 else 2
    return _claim(
        f"temperature-{key}",
        text,
        f"{low:.{digits}f} to {high:.{digits}f}",
        "ratio",
        between(low, high, digits=digits),
        ("temperatures", "temperatures", row, "ratio"),
    )


def _matched(
    key: str, text: str, said: str, expects: Range, where: tuple[str, str], absent: str = NO_DONORS
) -> Claim:
    row, column = where
    return _claim(
        f"matched-donor-{key}",
        f"Matched donors: {text}",
        said,
        "share" if said.endswith("%") else "number",
        expects,
        ("donors", "matched", row, column),
        absent,
    )


_SHARES = [
    _claim(
        "frequency-to-uniform",
        "Frequency-matched pair's share of the bottom band, to the uniform pair's",
        "7.2 to 10.8",
        "ratio",
        between(7.2, 10.8, digits=1),
        (*_PAIRS, "frequency-matched pair", "to_uniform"),
    ),
    _claim(
        "leading-to-frequency",
        "Leading pair's share, to the frequency-matched pair's",
        "1.29 to 1.59",
        "ratio",
        between(1.29, 1.59),
        (*_PAIRS, "leading pair", "to_frequency"),
    ),
    _claim(
        "third-to-frequency",
        "Share of the first and third candidates, to the frequency-matched pair's",
        "1.20 to 1.45",
        "ratio",
        between(1.20, 1.45),
        (*_PAIRS, "first and third candidate", "to_frequency"),
    ),
    Claim(
        "spearman",
        "E.3",
        "Rank correlation over documents of the K ratio with the contrast share",
        "0.72 to 0.82",
        "number",
        between(0.72, 0.82),
        figure("contrast-share", "spearman", "one of the two does not vary"),
    ),
]

_REGRESSION = [
    Claim(
        "slope-share",
        "E.3",
        "Slope of the loss excess on the contrast share, nats",
        "above 0 in Llama-3.1-8B and both Qwen models",
        "number",
        above(0, judged=True),
        at("regression", "slopes", "contrast share", "slope", _NO_SLOPES),
    ),
    Claim(
        "slope-margin",
        "E.3",
        "Slope of the loss excess on the margin, nats per nat",
        "above 0 in both Qwen models; in Llama-3.1-8B not established",
        "number",
        above(0, judged=True),
        at("regression", "slopes", "margin, nats", "slope", _NO_SLOPES),
    ),
    _third("lowest", 0.23, 2.02),
    _third("middle", 0.14, 1.08),
    _third("highest", 0.01, 0.33),
]

_CHAIN = [
    _of_excess("between", "pair against the rest", 0.44, 0.64),
    _of_excess("within", "within the pair", 0.27, 0.51),
    _of_excess("rest", "among the rest", 0.01, 0.15),
    _claim(
        "within-difference",
        "Share of K within the pair, less that of random changes",
        "0.13 to 0.27 in the Pythia models; 0.10, 0.06 and 0.02 in Llama-3.1-8B, Qwen3-1.7B and 8B",
        "number",
        between(0.13, 0.27, (0.02, 0.10)),
        ("chain-rule", "parts", "within the pair", "difference"),
        "nothing changes the prediction",
    ),
    Claim(
        "within-bottom-top",
        "E.3",
        "That share within the pair beyond random's at the bottom band, less that at the top band",
        "above 0 in all ten models",
        "number",
        above(0, judged=True),
        at("chain-rule", "ends", 0, "difference"),
    ),
    Claim(
        "between-top-bottom",
        "E.3",
        "Share of K between pair and rest at the top band, less that at the bottom band",
        "above 0 in Qwen3-8B only: not shown",
        "number",
        Open(0, "above"),
        at("chain-rule", "ends", 1, "difference"),
    ),
]

_DONORS = [
    Claim(
        "random-donor-adopted",
        "E.3",
        "Random donors: their top token predicted, share of documents less random replacements'",
        "more often",
        "number",
        above(0, judged=True),
        at("donors", "random", 0, "adopted_difference"),
    ),
    _claim(
        "random-donor-fraction",
        "Random donors: fraction of the gap closed beyond random, pooled",
        "\N{MINUS SIGN}0.05 to 0.03, every interval including zero",
        "number",
        between(-0.05, 0.03),
        ("donors", "random", "random donors", "fraction"),
    ),
    _matched(
        "fraction",
        "median fraction of the gap closed beyond random",
        "0.15 to 0.54 in nine models, 0.13 in Qwen3-8B",
        between(0.15, 0.54, (0.13, 0.13)),
        ("all eligible", "fraction"),
    ),
    _matched(
        "surplus",
        "that fraction less the contrast geometry's prediction, median",
        "\N{MINUS SIGN}0.031 to 0.006, no interval above zero",
        between(-0.031, 0.006, digits=3),
        ("all eligible", "surplus"),
    ),
    _matched(
        "near",
        "that fraction where the donor ranks the recipient's top token 3rd to 100th",
        "0.17 to 0.74",
        between(0.17, 0.74),
        ("3rd to 100th", "fraction"),
        _NO_RANK,
    ),
    _matched(
        "far",
        "that fraction where the donor ranks it lower",
        "0.01 to 0.22",
        between(0.01, 0.22),
        ("lower", "fraction"),
        _NO_RANK,
    ),
    _matched(
        "adopted",
        "the donor's top token predicted",
        "48 to 66%",
        between(0.48, 0.66),
        ("all eligible", "adopted"),
    ),
    _matched(
        "adopted-random",
        "that under random replacements",
        "22 to 40%",
        between(0.22, 0.40),
        ("all eligible", "random_adopted"),
    ),
]

_TEMPERATURES = [
    _temperature("low", "K at a softmax temperature of 0.5, to random's", 3.6, 10.4, "0.5"),
    _temperature("high", "K at a softmax temperature of 8, to random's", 0.09, 0.30, "8"),
    _temperature("limit", "D, to random's: the limit of high temperatures", 0.09, 0.29, "limit (D)"),
    _claim(
        "brier",
        "Brier divergence, to random's",
        "2.6 to 14.9",
        "ratio",
        between(2.6, 14.9, digits=1),
        ("brier", "brier", "bottom band", "ratio"),
    ),
]

CLAIMS = [*_SHARES, *_REGRESSION, *_CHAIN, *_DONORS, *_TEMPERATURES]
