"""The bottom band without its directions of a singular value near zero."""

from __future__ import annotations

import torch

from csprune.analysis.bands import bottom_pair
from csprune.analysis.comparison import all_values, at_equal_length, comparison_table, full_result
from csprune.analysis.estimates import Sample
from csprune.analysis.phrases import capital, compared, counted, figure
from csprune.analysis.results import Cell, Column, Result, Row, Table, explained
from csprune.analysis.spaces import Change
from csprune.analysis.study import Progress, Study
from csprune.analysis.subspaces import beside_random
from csprune.bootstrap import ratio
from csprune.linalg import SINGULAR_RESOLUTION

NEAR_ZERO = 0.05
_WHOLE = "whole band"


def near_zero_count(sigma: torch.Tensor, largest: float) -> int | None:
    """How many singular values of a band, [m], lie below `NEAR_ZERO` of its median.

    None where the median is itself zero but for rounding, beside the largest of all: most of the band is then
    a null space, and nothing of it stands apart.
    """
    median = float(sigma.quantile(0.5))
    return int((sigma < NEAR_ZERO * median).sum()) if median > SINGULAR_RESOLUTION * largest else None


def near_zero(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band without its directions of a singular value near zero.

    Where the norm's gain is nearly zero in a few coordinates, changes along them hardly reach the logits, yet
    count in a change's length. Directions with a singular value below 0.05 of the bottom band's median are
    near zero (Section E.1). Reported are how many the band has and their share of the change's squared length
    |du|^2: the mean over documents of each one's share, and the ratio of the sums. The comparison is then
    repeated with the band's other directions, beside random changes of the same squared length drawn outside
    the near-zero directions (Haar in their complement). The full result holds where D is below random's, and
    K and the loss change are above it.
    """
    own = study.removal(-1)
    sigma = study.space.singular_values
    of_band = sigma[-own.subspace.size :]
    count = near_zero_count(of_band, float(sigma[0]))
    changes: dict[str, tuple[Change, list[Change]]] = {}
    if count:
        # Descending: the near-zero ones are the last of the band, and of all directions.
        rest = study.space.subspace(own.subspace.vectors[:, :-count])
        outside = study.space.directions[:, :-count]
        label = f"without {counted(count, 'near-zero direction')}"
        changes[label] = beside_random(study, study.space, rest, study.deviation, outside)
    pairs = [
        bottom_pair(study, _WHOLE, progress),
        *at_equal_length(study.evaluation, changes, progress),
    ]
    table = comparison_table(
        "near-zero",
        "The bottom band without near-zero directions, at equal length",
        pairs,
        study.resampling,
        head="band",
    )
    carried = _carried(study, own, count, float(of_band.quantile(0.5)))
    return Result(
        "near-zero",
        "Near-zero directions",
        "E.1, Figure 6",
        explained(near_zero),
        _findings(table, carried, count, own.subspace.size),
        full_result(table, lambda label: f"the band {label}")[1:],
        [table, carried],
        values=all_values("near-zero", pairs),
        figures={"near_zero": count},
    )


def _findings(table: Table, carried: Table, count: int | None, size: int) -> list[str]:
    if count is None:
        return [
            "The bottom band's median singular value is itself zero but for rounding: it has no other part."
        ]
    if not count:
        return [f"None of the bottom band's {counted(size, 'direction')} has a singular value near zero."]
    share, have = figure(carried.rows[0].cells["mean_share"], ".0%"), "has" if count == 1 else "have"
    return [
        f"{count} of the bottom band's {counted(size, 'direction')} {have} a singular value near zero; on "
        f"average {share} of the squared length of its change lies there.",
        f"{capital(table.rows[1].label)} {compared(table.rows[1])}.",
    ]


def _carried(study: Study, own: Change, count: int | None, median: float) -> Table:
    """How many near-zero directions there are, and what they carry of the change."""
    cells: dict[str, Cell] = {"count": count, "directions": own.subspace.size, "median": median}
    if count:
        whole = own.squared_length
        part = own.coordinates[:, -count:].square().sum(1)
        share = torch.where(whole > 0, part / whole, 0.0)
        sample = Sample(
            {
                "part": part.cpu().numpy(),
                "whole": whole.cpu().numpy(),
                "share": share.cpu().numpy(),
            },
            study.resampling,
        )
        cells["mean_share"] = sample.estimate(lambda m: m["share"])
        cells["sum_share"] = sample.estimate(lambda m: ratio(m["part"], m["whole"]))
    return Table(
        "directions",
        "Near-zero directions of the bottom band",
        (
            Column("count", "near zero", "count"),
            Column("directions", "of directions", "count"),
            Column("median", "median \N{GREEK SMALL LETTER SIGMA}", "number"),
            Column("mean_share", "share of |du|\N{SUPERSCRIPT TWO}, mean", "share"),
            Column("sum_share", "share of |du|\N{SUPERSCRIPT TWO}, of sums", "share"),
        ),
        [Row("bottom band", cells)],
        "Near zero: a singular value below 0.05 of the band's median. Shares over documents; none where "
        "there are no such directions.",
    )
