"""The parts of the prediction change along the spectrum, and at its two ends (paper, Section 4.2 and E.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csprune.analysis.chain_parts import WHOLE, less, share, share_difference
from csprune.analysis.drawn import column_of
from csprune.analysis.effects import Values
from csprune.analysis.estimates import Sample, as_estimate, claim
from csprune.analysis.results import Column, Estimate, Panel, Picture, Row, Statement, Table
from csprune.analysis.spectrum import BAND_TITLE
from csprune.bootstrap import Resampling
from csprune.statements import Family

_WITHIN = "within the pair, beyond random's: bottom less top band"
_BETWEEN = "pair against the rest: top less bottom band"


def band_profile(bands: list[tuple[Values, Values]], samples: list[Sample]) -> Table:
    """The shares of every band's K."""
    rows = []
    for b, ((own, random), sample) in enumerate(zip(bands, samples, strict=True)):
        cells = {
            "within": sample.estimate(share_difference("within")),
            "within_mean": _mean_difference(own, random, sample.resampling),
            "within_share": sample.estimate(share("own", "within")),
            "between": sample.estimate(share("own", "between")),
            "between_random": sample.estimate(share("reference", "between")),
        }
        rows.append(Row(str(b + 1), cells))
    columns = (
        Column("within", "within the pair, beyond random's", "number"),
        Column("within_mean", "the same, mean of documents", "number"),
        Column("within_share", "share within the pair", "share"),
        Column("between", "share between pair and rest", "share"),
        Column("between_random", "random's share between", "share"),
    )
    note = (
        "Shares of K as ratios of sums over documents. Beyond random's: the share of the band's K less the "
        "same share of its random changes'; mean of documents: of each document's own difference, where "
        "every document has a K. With 95% intervals over documents."
    )
    return Table("bands", "The parts of K by band", columns, rows, note, "band")


def _mean_difference(own: Values, random: Values, resampling: Resampling) -> Estimate:
    """The mean over documents of the part within the pair as a share of K, less random's."""
    reference = {name: each.mean(axis=0) for name, each in random.items()}
    if min(own[WHOLE].min(), reference[WHOLE].min()) <= 0:
        return as_estimate(None)  # a document without K has no shares
    found = own["within"] / own[WHOLE] - reference["within"] / reference[WHOLE]
    return Sample({"": found}, resampling).estimate(lambda m: m[""])


def ends_beside(
    bands: Sequence[tuple[Values, Values]], resampling: Resampling
) -> tuple[Table, tuple[Estimate, Estimate]]:
    """The top and the bottom band beside each other: two judged comparisons."""
    values: dict[str, np.ndarray] = {}
    for end, (own, random) in (("top.", bands[0]), ("bottom.", bands[-1])):
        values |= {f"{end}own.{part}": each for part, each in own.items()}
        values |= {f"{end}reference.{part}": each for part, each in random.items()}
    sample = Sample(values, resampling)
    family = Family(2, "two comparisons of the top and the bottom band")
    within = sample.judge(
        lambda m: less(share_difference("within", "bottom.")(m), share_difference("within", "top.")(m)),
        0.0,
        family,
    )
    between = sample.judge(
        lambda m: less(share("top.own", "between")(m), share("bottom.own", "between")(m)),
        0.0,
        family,
        random=False,
    )
    table = Table(
        "ends",
        "The ends of the spectrum beside each other",
        (Column("difference", "difference of shares", "number"),),
        [Row(_WITHIN, {"difference": within}), Row(_BETWEEN, {"difference": between})],
        "Shares of K as ratios of sums over documents, with 95% intervals over documents.",
        "part",
    )
    return table, (within, between)


def end_claims(judged: tuple[Estimate, Estimate]) -> list[Statement]:
    """What the two comparisons are expected to show."""
    within, between = judged
    return [
        claim(
            "the part within the leading pair exceeds random changes' by more at the bottom band than at the "
            "top band, as a share of K",
            (within, "above"),
        ),
        claim(
            "the part between the leading pair and the rest has a larger share of the top band's K than of "
            "the bottom band's",
            (between, "above"),
        ),
    ]


def profile_picture(table: Table) -> Picture:
    """The shares of K along the spectrum."""
    random = column_of(table, "between_random", "random", reference=True)
    x = list(range(1, len(table.rows) + 1))
    return Picture(
        "chain-rule-bands",
        "The parts of the prediction change along the spectrum",
        "Left: the share of each band's K that lies within the leading pair, less the same share of its "
        "random changes of equal length. Right: the share between the pair and the rest. Ratios of sums over "
        "documents, with 95% intervals.",
        [
            Panel(
                [column_of(table, "within")], x, BAND_TITLE, "share within the pair, less random's", line=0.0
            ),
            Panel(
                [column_of(table, "between", "band"), random],
                x,
                BAND_TITLE,
                "share between pair and rest",
            ),
        ],
        "Figure 3a, lower panel",
    )
