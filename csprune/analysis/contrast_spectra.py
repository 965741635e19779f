"""The leading pair's contrast share along the spectrum, beside C_b (paper, Section 4.1, Figure 3a)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csprune.analysis.comparison import Pair, per_distance
from csprune.analysis.contrasts import PairSample
from csprune.analysis.drawn import column_of
from csprune.analysis.estimates import Means, Sample, as_estimate
from csprune.analysis.results import Column, Estimate, Panel, Picture, Row, Table
from csprune.analysis.spectrum import BAND_TITLE
from csprune.bootstrap import Resampling, Statistic, ratio

_LEAST_BANDS = 3  # two points always lie on a line


def contrast_spectra(
    pairs: Sequence[Pair],
    leading: np.ndarray,
    uniform: np.ndarray,
    drawn: tuple[PairSample, PairSample],
    resampling: Resampling,
) -> tuple[Table, Estimate]:
    """Shares and C_b over the bands, and the correlation of their logarithms.

    Args:
        pairs: Of the bands.
        leading: The leading pair's shares, float64 [documents, bands].
        uniform: The uniform pair's, float64 [bands].
        drawn: Drawn uniform pairs, and frequency-matched ones.
        resampling: The draws of documents.
    """
    shares = Sample({pair.label: leading[:, b] for b, pair in enumerate(pairs)}, resampling)
    rows, relative, consequences = [], [], []
    for b, pair in enumerate(pairs):
        unit = Statistic(float(uniform[b]), np.full(resampling.draws, uniform[b]))

        def to_uniform(m: Means, label: str = pair.label, unit: Statistic = unit) -> Statistic | None:
            return ratio(m[label], unit)

        relative.append(to_uniform(shares.means))
        consequences.append(per_distance("fisher_term")(pair.sample(resampling).means))
        cells = {
            "leading": shares.estimate(lambda m, label=pair.label: m[label]),
            "uniform": float(uniform[b]),
            "uniform_mean": float(drawn[0].shares[b]),
            "frequency": float(drawn[1].shares[b]),
            "to_uniform": as_estimate(relative[-1]),
            "consequence": as_estimate(consequences[-1]),
        }
        rows.append(Row(pair.label, cells))
    columns = (
        Column("leading", "leading pair", "share"),
        Column("uniform", "uniform pair", "share"),
        Column("uniform_mean", "uniform, mean of shares", "share"),
        Column("frequency", "frequency-matched", "share"),
        Column("to_uniform", "leading to uniform", "ratio"),
        Column("consequence", "C_b (F/D, to random's)", "ratio"),
    )
    note = (
        "Leading pair: the mean share over documents. Uniform pair: the ratio of sums over all pairs of the "
        "vocabulary; beside it the mean of the shares of drawn ones. With 95% intervals over documents."
    )
    table = Table("bands", "Contrast share by band", columns, rows, note, "band")
    return table, as_estimate(log_correlation(relative, consequences))


def log_correlation(
    first: Sequence[Statistic | None], second: Sequence[Statistic | None]
) -> Statistic | None:
    """Pearson's correlation of the logarithms of two spectra, over the bands where both are positive."""
    known = [(a, b) for a, b in zip(first, second, strict=True) if a and b and a.value > 0 and b.value > 0]
    if len(known) < _LEAST_BANDS:
        return None
    sides = [[pair[0] for pair in known], [pair[1] for pair in known]]
    value = _pearson(*(np.log([[each.value for each in side]]) for side in sides))
    if not np.isfinite(value[0]):
        return None  # one of them is flat
    draws = [[each.samples for each in side if each.samples is not None] for side in sides]
    if any(len(each) < len(known) for each in draws):
        return Statistic(float(value[0]), None)
    stacked = [np.stack(each, axis=1) for each in draws]
    if min(each.min() for each in stacked) <= 0:
        return Statistic(float(value[0]), None)
    samples = _pearson(*(np.log(each) for each in stacked))
    return Statistic(float(value[0]), samples if np.isfinite(samples).all() else None)


def _pearson(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row by row, float64 [rows] of two [rows, bands]; NaN where a row does not vary."""
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))


def spectra_picture(table: Table) -> Picture:
    """The two spectra, and the shares that the first one is made of."""
    x = list(range(1, len(table.rows) + 1))
    uniform = column_of(table, "uniform", "uniform pair", reference=True)
    return Picture(
        "contrast-spectrum",
        "The leading pair's contrast along the spectrum",
        "Left: the leading pair's mean contrast share over the uniform pair's, beside C_b, the prediction "
        "change per unit of logit distance relative to random changes. Right: the two shares. From the band "
        "with the largest singular values to the one with the smallest, with 95% intervals over documents.",
        [
            Panel(
                [
                    column_of(table, "to_uniform", "leading to uniform pair"),
                    column_of(table, "consequence", "C_b"),
                ],
                x,
                BAND_TITLE,
                "ratio",
                y_scale="log",
                line=1.0,
            ),
            Panel([column_of(table, "leading", "leading pair"), uniform], x, BAND_TITLE, "contrast share"),
        ],
        "Figure 3a",
    )
