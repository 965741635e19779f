"""The prediction change split at the leading pair, by the chain rule (paper, Section 4.2 and E.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from csprune.analysis.chain_bands import band_profile, end_claims, ends_beside, profile_picture
from csprune.analysis.chain_parts import (
    PARTS,
    WHOLE,
    band_parts,
    parts_sample,
    share,
    share_difference,
    share_of_excess,
)
from csprune.analysis.drawn import curve_of
from csprune.analysis.effects import Progress
from csprune.analysis.estimates import claim
from csprune.analysis.phrases import figure
from csprune.analysis.results import Column, Panel, Picture, Result, Row, Table, explained
from csprune.analysis.study import Study


def chain_rule(study: Study, progress: Progress | None = None) -> Result:
    """The prediction change split at the leading candidates' pair, by the exact chain rule.

    The two most probable tokens of the unchanged prediction are a document's leading pair. K = KL(p || p')
    is split exactly into three parts (Section 4.2): the divergence of the pair's total probability against
    the rest's; that within the pair, given the pair, times the pair's probability; and that among the
    remaining tokens, given these, times theirs. At the bottom band, beside random changes of the same length:
    each part's mean, its share of the band's K less random's (Figure 9b), and its share of K itself, as a
    ratio of sums over documents. Judged is whether the part within the pair has a larger share of the band's
    K than of random changes' (E.3).

    Over all bands stands the same difference of shares (Figure 3a, lower panel), as ratios of sums and as the
    mean over documents of each document's own difference, which weights documents alike. Judged are also two
    comparisons of the ends of the spectrum: whether the difference for the part within the pair is larger at
    the bottom band than at the top band, and whether the part between the pair and the rest has a larger
    share of the top band's K than of the bottom band's, as it would if the top directions carried the
    exclusion of implausible tokens (E.3). The split describes which probabilities change, not which of them
    cause a loss.
    """
    bands = band_parts(study, progress)
    samples = [parts_sample(own, random, study.resampling) for own, random in bands]
    bottom = samples[-1]
    within = bottom.judge(share_difference("within"), 0.0)
    rows = [
        Row(
            label,
            {
                "own": bottom.estimate(lambda m, part=part: m[f"own.{part}"]),
                "random": bottom.estimate(lambda m, part=part: m[f"reference.{part}"]),
                "of_excess": bottom.estimate(share_of_excess(part)),
                "share": bottom.estimate(share("own", part)),
                "random_share": bottom.estimate(share("reference", part)),
                "difference": within if part == "within" else bottom.estimate(share_difference(part)),
            },
        )
        for part, label in PARTS.items()
    ]
    whole = {
        "own": bottom.estimate(lambda m: m[f"own.{WHOLE}"]),
        "random": bottom.estimate(lambda m: m[f"reference.{WHOLE}"]),
    }
    rows.append(Row("K", whole))
    parts = Table("parts", "The bottom band's K, split at the leading pair", _PARTS, rows, _NOTE, "part")
    profile, (ends, judged) = band_profile(bands, samples), ends_beside(bands, study.resampling)
    cells = {name: row.cells for name, row in zip(PARTS, rows, strict=False)}
    return Result(
        "chain-rule",
        "Chain rule at the leading pair",
        "Section 4.2 and E.3, Figures 3a (lower panel) and 9b",
        explained(chain_rule),
        [
            _excess_finding(rows),
            f"The part within the pair is {figure(cells['within']['share'], '.0%')} of the band's K and "
            f"{figure(cells['within']['random_share'], '.0%')} of its random changes'.",
        ],
        [
            claim(
                "the part within the leading pair has a larger share of the bottom band's K than of its "
                "random changes'",
                (within, "above"),
            ),
            *end_claims(judged),
        ],
        [parts, profile, ends],
        [_parts_picture(parts), profile_picture(profile)],
        {
            f"chain.{b + 1}.{who}{part}": each[part]
            for b, both in enumerate(bands)
            for who, each in zip(("", "random."), both, strict=True)
            for part in (WHOLE, *PARTS)
        },
    )


_PARTS = (
    Column("own", "bottom band", "nats"),
    Column("random", "random, of its length", "nats"),
    Column("of_excess", "share of the excess", "share"),
    Column("share", "share of K", "share"),
    Column("random_share", "share of random's K", "share"),
    Column("difference", "difference of shares", "number"),
)
_NOTE = (
    "Means over documents in nats; shares as ratios of sums over documents, random ones of means over random "
    "subspaces. Share of the excess: of the band's K less random's. With 95% intervals over documents."
)


def _excess_finding(rows: Sequence[Row]) -> str:
    """How the excess divides, where there is one."""
    shares = [figure(row.cells["of_excess"], ".0%") for row in rows if "of_excess" in row.cells]
    if "undefined" in shares:
        return "The bottom band's K is not above its random changes', so that there is no excess to divide."
    return (
        f"Of the bottom band's K beyond its random changes', {shares[0]} lies between the leading pair and "
        f"the rest, {shares[1]} within the pair, {shares[2]} among the rest."
    )


def _parts_picture(table: Table) -> Picture:
    """The shares of the bottom band's K and of random's, and of what is between them where it is above 0."""
    rows = [row for row in table.rows if "share" in row.cells]

    def panel(keys: Mapping[str, str], title: str) -> Panel:
        return Panel(
            [
                curve_of(label, [row.cells[key] for row in rows], reference=key == "random_share")
                for key, label in keys.items()
            ],
            list(range(len(rows))),
            "part of K",
            title,
            line=0.0,
            marks="points",
            x_labels=[row.label for row in rows],
        )

    panels = [panel({"share": "band", "random_share": "random"}, "share of K")]
    caption = (
        "The three parts of K at the leading pair: their shares of the bottom band's K and of that of random "
        "changes of its length"
    )
    if all(isinstance(own := row.cells["of_excess"], dict) and own["value"] is not None for row in rows):
        panels.append(panel({"of_excess": ""}, "share of the excess K"))
        caption += "; and their shares of the band's K less random's"
    return Picture(
        "chain-rule-parts",
        "Where the bottom band's prediction change falls",
        f"{caption}. With 95% intervals over documents.",
        panels,
        "Figure 9b",
    )
