"""The bottom band on the natural path: the final norm's scale recomputed after the change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from csprune.analysis.comparison import COMPARED, Pair, comparison_table, forest, full_result
from csprune.analysis.effects import Scene, Values, observe_beside, whole_change
from csprune.analysis.estimates import Sample, claim
from csprune.analysis.phrases import compared, figure, times
from csprune.analysis.results import Column, Picture, Result, Row, Table, estimate_of, explained
from csprune.analysis.scalings import matched_coefficient, scaled_references
from csprune.analysis.spaces import Change
from csprune.analysis.study import Progress, Study
from csprune.bootstrap import Resampling, Statistic, difference, ratio

ACROSS = "across the logits"
_BAND = "bottom band"


def scale_factors(change: Change, u: torch.Tensor, hidden: int) -> torch.Tensor:
    """f = s(r) / s(r'), by which the norm recomputed after a change of u multiplies the changed state.

    The norm divides r (a LayerNorm r less its mean; R du has none, so that a change leaves the mean as it is)
    by s(r), with s(r)^2 = |r|^2 / d + eps of what it divides. As r = s(r) R u there, |u|^2 / d =
    1 - eps / s(r)^2, and for r' = r + s(r) R du

        s(r')^2 = s(r)^2 |u + du|^2 / d + eps = s(r)^2 (1 + (2 u.du + |du|^2) / d),

    epsilon included. The normalised state is then u' = f (u + du).

    Args:
        change: Of u, of some documents.
        u: Their states, float64 [documents, q].
        hidden: d, the residual's width, also where q = d - 1.

    Returns:
        float64 [documents].
    """
    inner = (change.coordinates * (u @ change.subspace.vectors)).sum(1)
    return (1 + (2 * inner + change.squared_length) / hidden).rsqrt()


def natural_logit_change(scene: Scene, change: Change) -> torch.Tensor:
    """What a change does to the logits with the norm recomputed, `T(x + f W du + (f - 1) W u) - T(x)`.

    x is the head's output, whose constant the norm does not touch; float64 [documents, V].
    """
    own = Change(change.coordinates[scene.documents], change.subspace)
    factors = scale_factors(own, scene.u, scene.prediction.unembedding.hidden)[:, None]
    image = change.subspace.image
    mapped = (own.coordinates.to(image.dtype) @ image.mT).double()
    return scene.after_head(factors * mapped + (factors - 1) * scene.mapped_state)


def across_logits(scene: Scene, c: torch.Tensor) -> torch.Tensor:
    """A change of the logits without its component along the unchanged logits, both centred: [documents, V].

    Equal logits have no direction; nothing is taken off then.
    """
    c = c - c.mean(1, keepdim=True)
    logits = scene.log_p - scene.log_p.mean(1, keepdim=True)
    squared = logits.square().sum(1, keepdim=True)
    along = torch.where(squared > 0, (c * logits).sum(1, keepdim=True) / squared, 0.0)
    return c - along * logits


def natural_path(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band on the natural path: the final norm's scale is recomputed after the change.

    The change is added to the residual, r' = r + s(r) R du, and the norm recomputed as the model does it
    (Appendix C): the state becomes u' = f (u + du) with f = s(r) / s(r'), f^-2 = 1 + (2 u.du + |du|^2) / d,
    epsilon included exactly. The head's output changes by f W du + (f - 1) W u: f acts on all logits
    alike, as a change of temperature. s(r) is common to all changes of a document, so that changes of equal
    length in u are of equal length in r. du = -P_B (u - mu) for the bottom band; random changes, on the
    natural path too, are rescaled to its length document by document, by one calibration-matched coefficient,
    or not at all.

    Each comparison is repeated with the component of each change of the logits that is parallel to the
    unchanged logits, both centred, taken off ("across the logits"): a uniform rescaling of the logits is no
    part of what is left (E.1). F is Var_p(c) / 2 of the whole change c of the logits, which is not linear in
    du. Judged are the full result (D below random's, K and the loss change above it) on the natural path,
    and F above random's across the logits.
    """
    own = study.removal(-1)
    references = scaled_references(study, own, matched_coefficient(study))
    random = [each for scaled in references.values() for each in scaled]

    def look(scene: Scene, c: torch.Tensor) -> Mapping[str, torch.Tensor]:
        across = whole_change(scene, across_logits(scene, c))
        return whole_change(scene, c) | {f"{ACROSS}.{name}": each for name, each in across.items()}

    def factors_of(change: Change) -> np.ndarray:
        return scale_factors(change, study.evaluation.u, study.unembedding.hidden).cpu().numpy()

    seen = observe_beside(
        study.evaluation, {_BAND: (own, random)}, look, progress, logit_change=natural_logit_change
    )
    band, everything = seen[_BAND]
    band = {**band, "scale_factor": factors_of(own)}
    everything = {**everything, "scale_factor": np.stack([factors_of(each) for each in random])}
    measured = {}
    for i, label in enumerate(references):
        own_part = slice(i * study.subspaces, (i + 1) * study.subspaces)
        measured[label] = {key: each[own_part] for key, each in everything.items()}
    whole, across = (_pairs(band, measured, prefix) for prefix in ("", f"{ACROSS}."))
    tables = [
        comparison_table(name, title, pairs, study.resampling, head="random changes")
        for name, title, pairs in (
            ("natural-path", "The bottom band on the natural path", whole),
            ("across", "The same without the change along the unchanged logits", across),
        )
    ]
    factors = _factors(band, measured, study.resampling)
    return Result(
        "natural-path",
        "The natural path",
        "Section 3.1; Appendix C; E.1, Figure 6",
        explained(natural_path),
        _findings(tables, factors),
        [
            *full_result(tables[0], lambda label: f"on the natural path, against random changes {label}"),
            *(
                claim(
                    f"across the unchanged logits, against random changes {row.label}: F is above random's",
                    (estimate_of(row, "fisher_term"), "above"),
                )
                for row in tables[1].rows
            ),
        ],
        [*tables, factors],
        [
            Picture(
                "natural-path",
                "The bottom band on the natural path, beside random changes on it",
                "Ratios of sums over documents to random changes, and the loss excess over theirs, with 95% "
                "intervals; the norm's scale is recomputed for all.",
                forest(tables[0], ("logit_distance", "prediction_change", "loss_excess")),
                "Figure 6",
            )
        ],
        _values(band, measured),
    )


def _pairs(band: Values, references: Mapping[str, Values], prefix: str) -> list[Pair]:
    """The band beside each scaling of its references, in the quantities with a prefix."""

    def part(values: Values) -> Values:
        return {name: values[f"{prefix}{name}"] for name in COMPARED}

    return [Pair(label, part(band), part(each)) for label, each in references.items()]


def _factors(band: Values, references: Mapping[str, Values], resampling: Resampling) -> Table:
    """The scale factors, and how much of D lies along the unchanged logits."""

    def along(m: Mapping[str, Statistic]) -> Statistic | None:
        return ratio(difference(m["logit_distance"], m[f"{ACROSS}.logit_distance"]), m["logit_distance"])

    rows = []
    for label, values in {
        _BAND: band,
        **{f"random, {name}": each for name, each in references.items()},
    }.items():
        sample = Sample(values, resampling)
        rows.append(
            Row(
                label,
                {
                    "scale_factor": sample.estimate(lambda m: m["scale_factor"]),
                    "along": sample.estimate(along),
                },
            )
        )
    return Table(
        "scale-factors",
        "The recomputed scale",
        (Column("scale_factor", "mean s(r)/s(r')", "number"), Column("along", "D along the logits", "share")),
        rows,
        "s(r)/s(r') multiplies the changed state; its mean over documents. D along the logits: the share of "
        "the summed D that is parallel to the unchanged logits.",
        "change",
    )


def _findings(tables: Sequence[Table], factors: Table) -> list[str]:
    across = tables[1].rows[0].cells
    band, random = (figure(row.cells["scale_factor"], ".3f") for row in factors.rows[:2])
    return [
        f"With the norm's scale recomputed, at equal length {compared(tables[0].rows[0])}.",
        f"Without the change along the unchanged logits, the Fisher term F is {times(across['fisher_term'])} "
        f"and K {times(across['prediction_change'])}.",
        f"The recomputed scale multiplies the changed state by {band} on average for the band, by {random} "
        "for random changes of its length.",
    ]


def _values(band: Values, references: Mapping[str, Values]) -> dict[str, np.ndarray]:
    """For the result's values."""
    found = {f"natural-path.{_BAND}.{name}": each for name, each in band.items()}
    for label, values in references.items():
        found |= {f"natural-path.{label}.random.{name}": each for name, each in values.items()}
    return found
