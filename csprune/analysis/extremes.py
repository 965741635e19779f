"""The bottom band without the most extreme coordinates of the state."""

from __future__ import annotations

import torch

from csprune.analysis.bands import bottom_pair
from csprune.analysis.comparison import all_values, at_equal_length, comparison_table, forest, full_result
from csprune.analysis.phrases import capital, compared, figure
from csprune.analysis.results import Column, Picture, Result, Row, Table, explained
from csprune.analysis.spaces import Change
from csprune.analysis.study import Progress, Study
from csprune.analysis.subspaces import beside_random
from csprune.linalg import LEFT_TOLERANCE, orthonormal_columns
from csprune.unembedding import Unembedding

EXTREMES = 16
_WHOLE = "whole band"
_SELECTIONS = {"mean_square": "mean squares", "variance": "variances"}


def coordinate_span(unembedding: Unembedding, coordinates: torch.Tensor) -> torch.Tensor:
    """Orthonormal basis, float64 [q, n], of the u-directions that move some coordinates of z.

    `z_j = e_j . R u`, so that they are R^T e_j; columns of R are coordinates of u, which a LayerNorm mixes.
    """
    axes = torch.zeros(len(coordinates), unembedding.hidden, dtype=torch.float64, device=coordinates.device)
    axes[torch.arange(len(coordinates)), coordinates] = 1.0
    return orthonormal_columns(unembedding.state(axes).mT)


def outside(vectors: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Orthonormal basis of `(I - E) V`, float64 [q, p], of orthonormal columns V [q, m] and E's basis `span`.

    Directions of V that lie in E leave nothing, so that p may be less than m.
    """
    left, sizes, _ = torch.linalg.svd(vectors - span @ (span.mT @ vectors), full_matrices=False)
    return left[:, sizes > LEFT_TOLERANCE]


def complement(span: torch.Tensor) -> torch.Tensor:
    """Orthonormal basis, float64 [q, q - n], of what is orthogonal to orthonormal columns [q, n]."""
    return torch.linalg.qr(span, mode="complete").Q[:, span.shape[1] :]


def extreme_coordinates(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band with the state's most extreme coordinates projected out.

    A few coordinates of the normalised state z = R u can be far larger than the others. The 16 with the
    largest mean square over the calibration documents, or else with the largest variance, at most a quarter
    of all, span the u-directions E = span of R^T e_j (Section E.1). They are projected out of both the change
    and the band: the band becomes (I - E) V_B, with an orthonormal basis, its component is replaced by the
    calibration mean, and random changes are drawn in Haar-random subspaces of the same dimension of what is
    orthogonal to E, rescaled document by document to its length. The full result holds where D is below
    random's, and K and the loss change are above it.
    """
    z = study.unembedding.lift(study.calibration.u)
    sizes = {"mean_square": z.square().mean(0), "variance": z.var(0, correction=0)}
    count = max(1, min(EXTREMES, study.space.width // 4))
    own = study.removal(-1)
    changes: dict[str, tuple[Change, list[Change]]] = {}
    chosen: dict[str, torch.Tensor] = {}
    gone = []
    for key, size in sizes.items():
        label = f"without the {count} largest {_SELECTIONS[key]}"
        if float(size.sum()) <= 0:
            gone.append(f"The calibration states' coordinates have no {_SELECTIONS[key]}.")
            continue
        chosen[key] = size.topk(count).indices
        span = coordinate_span(study.unembedding, chosen[key])
        left = outside(own.subspace.vectors, span)
        if not left.shape[1]:
            gone.append(f"The band lies in its coordinates of the {count} largest {_SELECTIONS[key]}.")
            continue
        subspace = study.space.subspace(left)
        changes[label] = beside_random(study, study.space, subspace, study.deviation, complement(span))
    pairs = [
        bottom_pair(study, _WHOLE, progress),
        *at_equal_length(study.evaluation, changes, progress),
    ]
    table = comparison_table(
        "extreme-coordinates",
        "The bottom band without extreme coordinates, at equal length",
        pairs,
        study.resampling,
        head="band",
    )
    listed = _coordinates(chosen, sizes, count)
    totals = listed.rows[-1].cells
    shares = [
        f"the {count} largest {_SELECTIONS[key]} are {figure(totals[f'{key}_share'], '.0%')} of their sum"
        for key in chosen
    ]
    return Result(
        "extreme-coordinates",
        "Extreme coordinates projected out",
        "Section 3.1; E.1, Figure 6",
        explained(extreme_coordinates),
        [
            f"Over {z.shape[1]} coordinates {', '.join(shares)}.",
            *(f"{capital(row.label)} {compared(row)}." for row in table.rows[1:]),
            *gone,
        ],
        full_result(table, lambda label: f"the band {label}")[1:],
        [table, listed],
        [
            Picture(
                "extreme-coordinates",
                "The bottom band with and without extreme coordinates, beside random changes of its length",
                "Ratios of sums over documents to random changes, and the loss excess over theirs, with 95% "
                "intervals.",
                forest(table, ("logit_distance", "prediction_change", "loss_excess")),
                "Figure 6",
            )
        ],
        all_values("extreme-coordinates", pairs),
        {"coordinates": {key: each.tolist() for key, each in chosen.items()}},
    )


def _coordinates(chosen: dict[str, torch.Tensor], sizes: dict[str, torch.Tensor], count: int) -> Table:
    """The chosen coordinates of z, and what they carry."""
    rows = [
        Row(
            str(place + 1),
            {
                cell: value
                for key, coordinates in chosen.items()
                for cell, value in (
                    (key, str(int(coordinates[place]))),
                    (f"{key}_share", float(sizes[key][coordinates[place]] / sizes[key].sum())),
                )
            },
        )
        for place in range(count)
    ]
    totals = {
        f"{key}_share": float(sizes[key][each].sum() / sizes[key].sum()) for key, each in chosen.items()
    }
    columns = [
        column
        for key in chosen
        for column in (
            Column(key, f"by {key.replace('_', ' ')}", "text"),
            Column(f"{key}_share", "share of the sum", "share"),
        )
    ]
    return Table(
        "coordinates",
        "The chosen coordinates",
        columns,
        [*rows, Row("together", totals)],
        "Coordinates of z, counted from 0, the largest first; their shares of the sum over all coordinates, "
        "on the calibration documents.",
        "place",
    )
