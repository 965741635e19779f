"""Other subspaces in the bottom band's place: of other bases, and of the states' largest variance."""

from __future__ import annotations

import torch

from csprune.analysis.bands import bottom_pair
from csprune.analysis.comparison import (
    all_values,
    at_equal_length,
    comparison_table,
    forest,
    full_result,
    per_distance,
)
from csprune.analysis.estimates import Formula, Sample, claim
from csprune.analysis.phrases import compared, counted, figure, times
from csprune.analysis.results import Column, Picture, Result, Row, Table, explained
from csprune.analysis.spaces import BASES, Change, Space, Subspace
from csprune.analysis.study import Progress, Study
from csprune.bootstrap import ratio
from csprune.errors import InputError

_BASIS_LABELS = {"centred": "folded and centred", "folded": "folded", "raw": "raw"}
_BAND = "bottom band"
_VARIANCE = "largest variance"


def beside_random(
    study: Study,
    space: Space,
    subspace: Subspace,
    deviation: torch.Tensor,
    within: torch.Tensor | None = None,
) -> tuple[Change, list[Change]]:
    """The removal of a subspace, and those of random ones of its size, not rescaled.

    Args:
        study: For the number of random subspaces and their seed.
        space: Of the subspaces.
        subspace: The one removed.
        deviation: What is removed of, float64 [documents, n].
        within: Orthonormal columns float64 [n, p] of what random subspaces are drawn in; None for everything.
    """
    random = space.random(subspace.size, study.subspaces, study.seed, within)
    return subspace.removal(deviation), [each.removal(deviation) for each in random]


def bases(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band in the folded and centred, the folded, and the raw basis.

    A band of the smallest singular values is defined anew in each basis (Section E.1): folded and centred,
    of C_V W_out diag(gamma) R, the paper's own; folded, of W_out diag(gamma) R, whose columns keep their mean
    over the vocabulary (the basis of Cancedda, 2024); raw, of W_out itself. In the first two a change is one
    of the normalised state u, in the raw basis one of what the head reads, h = gamma * z + beta. In each
    basis the component in the band is replaced by its mean over the calibration documents, and random
    changes, in Haar-random subspaces of the same space, are rescaled document by document to the length that
    the band's change has in that space. Whatever the basis, D is that of the centred logits. The full result
    holds where D is below random's, and K and the loss change are above it.
    """
    changes: dict[str, tuple[Change, list[Change]]] = {}
    for name in BASES:
        if name == study.space.name:
            continue  # the bottom band itself
        space = Space(name, study.unembedding)
        mean = space.coordinates(study.calibration.u).mean(0)
        deviation = space.coordinates(study.evaluation.u) - mean
        band = space.subspace(space.band(study.bands - 1, study.bands))
        changes[_BASIS_LABELS[name]] = beside_random(study, space, band, deviation)
    pairs = [
        bottom_pair(study, _BASIS_LABELS[study.space.name], progress),
        *at_equal_length(study.evaluation, changes, progress),
    ]
    table = comparison_table(
        "bases", "The bottom band in three bases, at equal length", pairs, study.resampling, head="basis"
    )
    return Result(
        "bases",
        "Alternative bases",
        "E.1, Figure 6",
        explained(bases),
        [f"In the {row.label} basis {compared(row)}." for row in table.rows],
        full_result(table, lambda label: f"in the {label} basis"),
        [table],
        [
            Picture(
                "bases",
                "The bottom band of three bases beside random changes of the same length",
                "Ratios of sums over documents to random changes, and the loss excess over theirs, with 95% "
                "intervals; a length is that of the basis's own space.",
                forest(table, ("logit_distance", "prediction_change", "loss_excess")),
                "Figure 6",
            )
        ],
        all_values("bases", pairs),
    )


def principal_directions(deviation: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of the second moment of deviations [documents, q], float64 [q, p], descending variance.

    Only directions that the deviations reach: fewer than the documents where they are from their own mean.
    """
    _, sizes, rows = torch.linalg.svd(deviation, full_matrices=False)
    reached = sizes > sizes[0] * max(deviation.shape) * torch.finfo(sizes.dtype).eps
    return rows[reached].mT


def top_variance(study: Study, progress: Progress | None = None) -> Result:
    """A subspace of the states' largest variance, of the bottom band's size, beside the bottom band.

    The leading eigenvectors of the calibration states' covariance about their mean span a subspace of as many
    directions as the bottom band has (Section E.1); where the calibration documents span fewer, of as many as
    they span. Its component, and that of the bottom band, is replaced by the calibration mean, each beside
    random changes of its dimension rescaled document by document to its length. A subspace of large variance
    may move the logits, and with them the prediction, more than random changes in total; what is compared is
    F per unit of logit distance. Judged is that the bottom band's F/D ratio to random's is above that of the
    largest variance. Variance shares are parts of the summed |u - mu|^2.
    """
    reached = study.calibration.u - study.mean
    if not bool(reached.any()):
        raise InputError(
            f"the states of {len(study.calibration)} calibration documents do not differ, so that no "
            "direction has a variance: calibrate on more documents"
        )
    wanted = study.band(-1).size
    leading = study.space.subspace(principal_directions(reached)[:, :wanted])
    owns = {_BAND: study.removal(-1), _VARIANCE: leading.removal(study.deviation)}
    changes = {_VARIANCE: (owns[_VARIANCE], study.random_removals(owns[_VARIANCE]))}
    pairs = [
        bottom_pair(study, _BAND, progress),
        *at_equal_length(study.evaluation, changes, progress),
    ]
    fewer = ""
    if leading.size < wanted:
        fewer = (
            f"The {len(study.calibration)} calibration documents vary in "
            f"{counted(leading.size, 'direction')} only, fewer than the band's {wanted}."
        )
    table = comparison_table(
        "top-variance",
        "The bottom band and the states' largest variance, at equal length",
        pairs,
        study.resampling,
        head="subspace",
        note=fewer,
    )
    both = Sample(
        {
            f"{pair.label}.{key}": each
            for pair in pairs
            for key, each in pair.sample(study.resampling).values.items()
        },
        study.resampling,
    )
    of_band, of_variance = (_consequence(label) for label in owns)
    beside = both.judge(lambda m: ratio(of_band(m), of_variance(m)), 1.0)
    shares = _variance_shares(study, owns)
    band, variance = (row.cells["fisher_per_distance"] for row in table.rows)
    return Result(
        "top-variance",
        "A subspace of the largest variance",
        "Section 3.1, E.1",
        explained(top_variance),
        [
            f"Per unit of logit distance F is {times(variance)} in the subspace of the largest variance, "
            f"which carries {figure(shares.rows[1].cells['calibration'], '.0%')} of the calibration states' "
            f"variance, and {times(band)} in the bottom band.",
            f"For the largest variance {compared(table.rows[1])}.",
            *([fewer] if fewer else []),
        ],
        [
            claim(
                "F per unit of logit distance, relative to random changes, is higher in the bottom band than "
                "in the subspace of the largest variance",
                (beside, "above"),
            )
        ],
        [table, shares],
        [
            Picture(
                "top-variance",
                "The bottom band and the states' largest variance beside random changes of the same length",
                "Ratios of sums over documents to random changes, with 95% intervals: logit distance, "
                "prediction change, and the Fisher term per unit of logit distance.",
                forest(table, ("logit_distance", "prediction_change", "fisher_per_distance")),
            )
        ],
        all_values("top-variance", pairs),
        {"directions": leading.size},
    )


def _consequence(label: str) -> Formula:
    """F per unit of logit distance, to random's, of one of several pairs."""
    formula, prefix = per_distance("fisher_term"), f"{label}."
    return lambda m: formula({key.removeprefix(prefix): m[key] for key in m if key.startswith(prefix)})


def _variance_shares(study: Study, owns: dict[str, Change]) -> Table:
    """How much of the states' variance about mu the subspaces carry."""
    calibration = study.calibration.u - study.mean
    whole = study.deviation.square().sum(1).cpu().numpy()
    rows = []
    for label, own in owns.items():
        sample = Sample({"own": own.squared_length.cpu().numpy(), "whole": whole}, study.resampling)
        of_calibration = own.subspace.removal(calibration).squared_length.sum() / calibration.square().sum()
        cells = {
            "directions": own.subspace.size,
            "calibration": float(of_calibration),
            "evaluation": sample.estimate(lambda m: ratio(m["own"], m["whole"])),
        }
        rows.append(Row(label, cells))
    return Table(
        "variance",
        "Shares of the states' variance",
        (
            Column("directions", "directions", "count"),
            Column("calibration", "of the calibration states", "share"),
            Column("evaluation", "of the evaluation states", "share"),
        ),
        rows,
        "Parts of the sum over documents of |u - \N{GREEK SMALL LETTER MU}|\N{SUPERSCRIPT TWO}.",
        "subspace",
    )
