"""The bottom band's share of the leading candidates' contrast, and the loss (paper, Section 4.1, E.3)."""

from __future__ import annotations

import numpy as np

from csprune.analysis.bands import band_pairs, loss_excess, ratios
from csprune.analysis.contrast_documents import decile_table, documents_picture, rank_correlation
from csprune.analysis.contrast_spectra import contrast_spectra, spectra_picture
from csprune.analysis.contrasts import (
    PairSample,
    candidate_shares,
    frequency_sample,
    leading_shares,
    uniform_sample,
    uniform_shares,
)
from csprune.analysis.drawn import column_of
from csprune.analysis.effects import Progress
from csprune.analysis.estimates import Formula, Sample, claim
from csprune.analysis.phrases import figure
from csprune.analysis.results import (
    Cell,
    Column,
    Estimate,
    Panel,
    Picture,
    Result,
    Row,
    Table,
    explained,
)
from csprune.analysis.study import Study
from csprune.bootstrap import ratio

_LEADING, _FREQUENCY, _UNIFORM = "leading pair", "frequency-matched pair", "uniform pair"


def contrast_share(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band's share of the difference between the leading candidates, beside other pairs of tokens.

    With w_1 and w_2 the unembedding vectors of a document's two most probable tokens, a change du moves their
    log-odds by (w_1 - w_2)^T du (under a soft cap: before the cap). A band's contrast share is
    |P_b (w_1 - w_2)|^2 / |w_1 - w_2|^2, the part of this contrast's squared length that lies in the band
    (Section 4.1); over all bands the shares sum to one. Beside the leading pair stand the first and the third
    candidate; two tokens drawn uniformly from the vocabulary, whose share as the ratio of sums over all pairs
    is the band's share of the squared singular values, in closed form, and as the mean of each pair's own
    share is taken from drawn pairs; and two distinct tokens drawn one after the other in proportion to their
    mean probability on the calibration documents, the frequency-matched pair (E.3). The interval of a drawn
    figure is that of the drawing alone; others are over documents. Judged is whether the leading pair's share
    of the bottom band exceeds the frequency-matched pair's.

    Over the bands, the leading pair's share over the uniform pair's (ratio of sums) is correlated with C_b,
    both as logarithms (Figure 3a). Over documents, the bottom band's share is correlated by ranks (Spearman)
    with the band's K relative to the mean of its random changes (Figure 8), and the loss excess over random
    changes is averaged over ten groups of documents in the order of their share (Figure 3c).
    """
    pairs = band_pairs(study, progress)
    leading, uniform = leading_shares(study), uniform_shares(study)
    drawn, frequency = uniform_sample(study), frequency_sample(study)
    third = candidate_shares(study, study.evaluation, 2) if study.unembedding.vocabulary > 2 else None
    of_pairs, judged = _pairs(study, leading, third, uniform, frequency, drawn)
    bands, correlation = contrast_spectra(pairs, leading, uniform, (drawn, frequency), study.resampling)
    share, excess = leading[:, -1], loss_excess(pairs[-1])
    changes = ratios(pairs[-1], "prediction_change")
    deciles = decile_table(share, excess, changes, study.resampling)
    ranks = rank_correlation(share, changes)
    cells = of_pairs.rows[0].cells
    findings = [
        f"The bottom band carries {figure(cells['share'], '.1%')} of the leading pair's contrast, "
        f"{frequency.shares[-1]:.1%} of the frequency-matched pair's, {uniform[-1]:.1%} of the uniform "
        f"pair's, and has {study.band(-1).size / study.space.width:.1%} of the directions.",
        f"Along the spectrum, the leading pair's share over the uniform pair's and C_b correlate at "
        f"{figure(correlation, '.2f')} (of the logarithms).",
        f"Across documents, the share and the K ratio have a rank correlation of {figure(ranks, '.2f')}; the "
        f"loss excess is {figure(deciles.rows[0].cells['excess'], '+.3f')} nats in the tenth with the "
        f"smallest shares, {figure(deciles.rows[-1].cells['excess'], '+.3f')} in that with the largest.",
    ]
    values = {f"contrast.{b + 1}.leading_share": leading[:, b] for b in range(study.bands)}
    if third is not None:
        values[f"contrast.{study.bands}.first_third_share"] = third[:, -1]
    return Result(
        "contrast-share",
        "Contrast share of the leading candidates",
        "Section 4.1 and E.3, Figures 3a to c and 8",
        explained(contrast_share),
        findings,
        [
            claim(
                "the bottom band's share of the leading pair's contrast exceeds that of the "
                "frequency-matched pair's",
                (judged, "above"),
            )
        ],
        [of_pairs, bands, deciles],
        [spectra_picture(bands), _pairs_picture(of_pairs), documents_picture(deciles, share, changes)],
        {**values, f"contrast.{study.bands}.change_ratio": changes, f"contrast.{study.bands}.excess": excess},
        {
            "log_correlation": correlation,
            "spearman": ranks,
            "drawn_pairs": {"uniform": drawn.pairs, "frequency": frequency.pairs},
            "drawn_pairs_of_equal_vectors": {"uniform": drawn.same, "frequency": frequency.same},
        },
    )


def _pairs(
    study: Study,
    leading: np.ndarray,
    third: np.ndarray | None,
    uniform: np.ndarray,
    frequency: PairSample,
    drawn: PairSample,
) -> tuple[Table, Estimate]:
    """The bottom band's share of every kind of pair; the leading to the frequency-matched one, judged."""
    documents, matched, plain = len(leading), float(frequency.shares[-1]), float(uniform[-1])
    shares = {"leading": leading[:, -1], "frequency": np.full(documents, matched)}
    shares["uniform"] = np.full(documents, plain)
    if third is not None:
        shares["third"] = third[:, -1]
    sample = Sample(shares, study.resampling)

    def to(name: str, other: str) -> Formula:
        return lambda m: ratio(m[name], m[other])

    judged = sample.judge(to("leading", "frequency"), 1.0, random=False)
    rows = [
        Row(
            _LEADING,
            {
                "share": sample.estimate(lambda m: m["leading"]),
                "to_frequency": judged,
                "to_uniform": sample.estimate(to("leading", "uniform")),
            },
        )
    ]
    if third is not None:
        cells: dict[str, Cell] = {
            "share": sample.estimate(lambda m: m["third"]),
            "to_frequency": sample.estimate(to("third", "frequency")),
            "to_uniform": sample.estimate(to("third", "uniform")),
        }
        rows.append(Row("first and third candidate", cells))
    error = float(frequency.errors[-1])
    rows += [
        Row(_FREQUENCY, {"share": _drawn(matched, error), "to_uniform": _drawn(matched, error, plain)}),
        Row(f"{_UNIFORM}, ratio of sums", {"share": plain}),
        Row(f"{_UNIFORM}, mean of shares", {"share": _drawn(drawn.shares[-1], drawn.errors[-1])}),
        Row("direction at random", {"share": study.band(-1).size / study.space.width}),
    ]
    columns = (
        Column("share", "share of the bottom band", "share"),
        Column("to_frequency", "to the frequency-matched pair's", "ratio"),
        Column("to_uniform", "to the uniform pair's", "ratio"),
    )
    note = (
        "Candidates: means over documents with 95% intervals over documents; ratios to the drawn figure as "
        f"it is. The frequency-matched pair and the mean of shares: over {frequency.pairs:,} and "
        f"{drawn.pairs:,} drawn pairs, with 95% intervals of the drawing."
    )
    if frequency.same or drawn.same:
        note += f" {frequency.same:,} and {drawn.same:,} more had two tokens of the same vector: no contrast."
    return Table("pairs", "Contrast share of the bottom band", columns, rows, note, "pair of tokens"), judged


def _drawn(value: float, error: float, unit: float = 1.0) -> Estimate:
    """A drawn figure in some unit, with the interval of the drawing."""
    if unit <= 0:
        return {"value": None, "ci95": None}
    return {"value": value / unit, "ci95": [(value - 1.96 * error) / unit, (value + 1.96 * error) / unit]}


def _pairs_picture(table: Table) -> Picture:
    """The bottom band's share of each kind of pair."""
    return Picture(
        "contrast-pairs",
        "The bottom band's share of the difference between two tokens",
        "Mean contrast share of the bottom band, with 95% intervals: over documents for candidates, of the "
        "drawing where pairs are drawn.",
        [
            Panel(
                [column_of(table, "share")],
                list(range(len(table.rows))),
                table.head,
                "contrast share",
                marks="points",
                x_labels=[row.label for row in table.rows],
            )
        ],
        "Figure 3b",
    )
