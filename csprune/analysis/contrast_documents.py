"""How a document's loss and prediction change go with its contrast share (paper, Section 4.1 and E.3)."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from csprune.analysis.drawn import column_of
from csprune.analysis.groups import group_means, ordered_groups
from csprune.analysis.results import Cell, Column, Curve, Panel, Picture, Row, Table
from csprune.bootstrap import Resampling

_DECILES = 10


def decile_table(share: np.ndarray, excess: np.ndarray, changes: np.ndarray, resampling: Resampling) -> Table:
    """Groups of documents in the order of the bottom band's share."""
    groups = ordered_groups(share, _DECILES)
    means = group_means({"share": share, "excess": excess}, groups, resampling)
    rows = []
    for group, cells in enumerate(means):
        inside = groups == group
        median = float(np.median(changes[inside]))
        of_group: dict[str, Cell] = {**cells, "change_ratio": median if np.isfinite(median) else None}
        rows.append(Row(str(group + 1), {"documents": int(inside.sum()), **of_group}))
    columns = (
        Column("documents", "documents", "count"),
        Column("share", "mean share", "share"),
        Column("excess", "loss excess", "nats"),
        Column("change_ratio", "median K ratio", "ratio"),
    )
    note = (
        "Documents in the order of the bottom band's share of their leading pair's contrast. Loss excess: "
        "the loss change less random's. K ratio: a document's K to the mean over its random changes. A "
        "mean has no interval where some draw of documents has none of its documents."
    )
    return Table("deciles", "Documents by their contrast share", columns, rows, note, "tenth, ascending")


def rank_correlation(share: np.ndarray, changes: np.ndarray) -> float | None:
    """The rank correlation over documents; None where one of the two does not vary."""
    if len(np.unique(share)) < 2 or len(np.unique(changes)) < 2:
        return None
    return float(np.corrcoef(rankdata(share), rankdata(changes))[0, 1])


def documents_picture(deciles: Table, share: np.ndarray, changes: np.ndarray) -> Picture:
    """The loss excess of groups of documents, and every document's K ratio, by share."""
    means = [row.cells["share"] for row in deciles.rows]
    shares = [each["value"] for each in means if isinstance(each, dict)]
    shown = [float(each) if np.isfinite(each) and each > 0 else None for each in changes]
    return Picture(
        "contrast-documents",
        "Documents by the bottom band's share of their leading pair's contrast",
        "Left: the mean loss change over random's of tenths of documents, at their mean share, with 95% "
        "intervals. Right: each document's K relative to the mean over its random changes.",
        [
            Panel(
                [column_of(deciles, "excess")], shares, "mean contrast share", "loss excess, nats", line=0.0
            ),
            Panel(
                [Curve("", shown)],
                share.tolist(),
                "contrast share",
                "K, to random's",
                y_scale="log",
                line=1.0,
                marks="points",
            ),
        ],
        "Figures 3c and 8",
    )
