"""What the truncations remove: how far their removal sets agree (paper, Section 5.1 and E.4)."""

from __future__ import annotations

from csprune.analysis.results import Column, Result, Row, Table, explained
from csprune.analysis.study import Progress, Study
from csprune.errors import InputError
from csprune.measurement import REFERENCE
from csprune.truncation import STRATEGIES, overlap, truncate

RANKS = (0.05, 0.1, 0.2)
_BOTTOM = 0.2
_REMOVERS = tuple(name for name in STRATEGIES if name != REFERENCE)


def removal_overlaps(study: Study, progress: Progress | None = None) -> Result:
    """How far the subspaces that the truncations remove agree, and lie in the bottom bands.

    Of the subspace that one truncation removes, the share that lies in what another removes at the same rank:
    with orthonormal bases A and B of both, ||B^T A||^2 / m; for subspaces of singular directions the share of
    directions in common. For consequence-ranked truncation that is its overlap with truncation by singular
    value. The share in the four bottom bands (of twenty) is that with truncation by singular value at 20% of
    the rank (E.4). A random subspace's expected share is the other's share of the directions.
    """
    if study.calibrate is None:
        raise InputError(
            "overlaps of truncations need a calibration that makes them: give the study calibrate="
        )
    calibration = study.calibrate(progress)
    readout = study.readout
    width = readout.unembedding.width
    bottom = truncate(readout, calibration, "singular", _BOTTOM)
    rows, names = [], [name for name in _REMOVERS if name != "singular"]
    for rank in RANKS:
        made = {name: truncate(readout, calibration, name, rank) for name in _REMOVERS}
        for name in names:
            cells = {
                "bottom": overlap(made[name], bottom),
                **{other: overlap(made[name], made[other]) for other in _REMOVERS if other != name},
            }
            rows.append(Row(f"{name}, {rank:.0%}", cells))
        expected = dict.fromkeys(_REMOVERS, made["singular"].removed / width)
        rows.append(Row(f"random (expected), {rank:.0%}", {"bottom": bottom.removed / width, **expected}))
    columns = (
        Column("bottom", "in the four bottom bands", "share"),
        *(Column(name, f"in {name}'s", "share") for name in _REMOVERS),
    )
    table = Table(
        "overlaps",
        "Shares of the removed subspaces",
        columns,
        rows,
        "The share of each row's removed subspace that lies in the column's at the same rank.",
        "removed by",
    )
    cells = {row.label: row.cells for row in rows}
    return Result(
        "overlaps",
        "Removal sets of the truncations",
        "Section 5.1, E.4",
        explained(removal_overlaps),
        [
            f"At 20% of the rank {cells['fisher, 20%']['singular']:.0%} of what fisher removes is also "
            "removed by "
            f"singular, and {cells['whitened, 20%']['bottom']:.0%} of what whitened removes lies in the "
            "four bottom "
            "bands.",
        ],
        tables=[table],
    )
