"""The consequence spectrum, and the singular values along it (paper, Sections 2.1, 2.3 and 3.2)."""

from __future__ import annotations

import numpy as np

from csprune.analysis.bands import band_pairs, ratios_per_distance
from csprune.analysis.comparison import all_values, per_distance, pooled
from csprune.analysis.drawn import curve_of
from csprune.analysis.effects import Progress
from csprune.analysis.estimates import as_estimate, claim
from csprune.analysis.phrases import figure
from csprune.analysis.results import (
    Column,
    Curve,
    Panel,
    Picture,
    Result,
    Row,
    Table,
    explained,
)
from csprune.analysis.spaces import band_slice
from csprune.analysis.study import Study
from csprune.statements import Family

BAND_TITLE = "band, from the top (1) to the bottom"


def singular_values(study: Study, _progress: Progress | None = None) -> Result:
    """The singular values of the folded and centred unembedding over the bands.

    sigma_i are the singular values of W = C_V W_out diag(gamma) R (Section 2.1): how much the unembedding
    amplifies a change along its right singular direction v_i, the logits' constant left out. Bands are of
    equal size, the first one of the largest values. A band's share of the sum of all sigma^2 is the part of
    the vocabulary's squared differences that lies in it (Appendix D).
    """
    sigma = study.space.singular_values.cpu().numpy()
    total = np.square(sigma).sum()
    rows, medians = [], []
    for b in range(study.bands):
        own = sigma[band_slice(b, study.bands, len(sigma))]
        medians.append(float(np.median(own)))
        cells = {
            "directions": len(own),
            "largest": float(own[0]),
            "median": medians[-1],
            "smallest": float(own[-1]),
            "share": float(np.square(own).sum() / total),
        }
        rows.append(Row(str(b + 1), cells))
    columns = (
        Column("directions", "directions", "count"),
        Column("largest", "largest \N{GREEK SMALL LETTER SIGMA}", "number"),
        Column("median", "median \N{GREEK SMALL LETTER SIGMA}", "number"),
        Column("smallest", "smallest \N{GREEK SMALL LETTER SIGMA}", "number"),
        Column("share", "share of \N{GREEK SMALL LETTER SIGMA}\N{SUPERSCRIPT TWO}", "share"),
    )
    curve = Curve("", sigma.tolist())
    shown = all(each > 0 for each in sigma)
    return Result(
        "singular-values",
        "Singular values over the bands",
        "Section 2.1, Appendix D",
        explained(singular_values),
        [
            f"The {len(sigma)} singular values fall from {sigma[0]:.4g} to {sigma[-1]:.4g}; the median is "
            f"{medians[0]:.4g} in the top band and {medians[-1]:.4g} in the bottom band.",
        ],
        tables=[Table("bands", "Singular values by band", columns, rows, head="band")],
        pictures=[
            Picture(
                "singular-values",
                "Singular values of the unembedding",
                "Of the folded, centred unembedding, in logits per unit of the normalised state, by index.",
                [
                    Panel(
                        [curve],
                        list(range(1, len(sigma) + 1)),
                        "index of the direction",
                        "singular value",
                        y_scale="log" if shown else "linear",
                    )
                ],
                "Appendix D",
            )
        ],
        figures={"singular_values": sigma.tolist()},
    )


def consequence_spectrum(study: Study, progress: Progress | None = None) -> Result:
    """The prediction change per unit of logit distance along the spectrum, relative to random changes.

    For band b, C_b = (sum F_b / sum D_b) / (sum F_rand / sum D_rand), the sums over the evaluation documents,
    of the change du = -P_b (u - mu) and of random changes rescaled document by document to its length; the
    random sums are means over the random subspaces. The overall size of the band's singular values cancels
    (Section 2.3). Beside the pooled figure stands the median over documents of each document's own ratio.
    Whether the bottom band's C_b exceeds one is judged, and each other band's as well, as one family.
    """
    pairs = band_pairs(study, progress)
    family = Family(len(pairs), "C_b of every band against 1")
    medians = study.resampling.medians(
        np.stack([ratios_per_distance(pair, "fisher_term") for pair in pairs], axis=1)
    )
    rows = []
    for pair, median in zip(pairs, medians, strict=True):
        sample = pair.sample(study.resampling)
        cells = {
            "consequence": sample.judge(per_distance("fisher_term"), 1.0, family),
            "median": as_estimate(median),
            "change_per_distance": sample.estimate(per_distance("prediction_change")),
            "logit_distance": sample.estimate(pooled("logit_distance")),
            "prediction_change": sample.estimate(pooled("prediction_change")),
        }
        rows.append(Row(pair.label, cells))
    found = [row.cells["consequence"] for row in rows]
    values = [each["value"] for each in found]
    known = [value for value in values if value is not None]
    largest = (
        f"it is largest at band {values.index(max(known)) + 1} of {study.bands}"
        if known
        else "no band has one"
    )
    columns = (
        Column("consequence", "C_b (F/D, to random's)", "ratio"),
        Column("median", "median of documents", "ratio"),
        Column("change_per_distance", "K/D, to random's", "ratio"),
        Column("logit_distance", "D, to random's", "ratio"),
        Column("prediction_change", "K, to random's", "ratio"),
    )
    return Result(
        "consequence",
        "Consequence spectrum",
        "Sections 2.3 and 3.2, Figure 1b",
        explained(consequence_spectrum),
        [
            f"C_b is {figure(values[0], '.2f')} at the top and {figure(values[-1], '.2f')} at the bottom "
            f"band; {largest}.",
            f"{sum(v is not None and 0.5 <= v <= 2 for v in values)} of {study.bands} bands lie within a "
            "factor "
            "of two of random changes.",
        ],
        statements=[
            claim(
                "the bottom band's prediction change per unit of logit distance is above random's",
                (found[-1], "above"),
            )
        ],
        tables=[
            Table(
                "bands",
                "Consequence by band",
                columns,
                rows,
                "All at equal length, relative to random changes. C_b: the Fisher term per unit of logit "
                "distance; "
                "median: of the documents' own ratios. D: logit distance. K: prediction change.",
                "band",
            )
        ],
        pictures=[
            Picture(
                "consequence-spectrum",
                "Prediction change per unit of logit distance, band by band",
                "C_b relative to random changes of the same length, from the band with the largest "
                "singular values "
                "to the one with the smallest; pooled over documents, with 95% intervals, and the median "
                "document.",
                [
                    Panel(
                        [
                            curve_of("pooled", found),
                            curve_of("median document", [row.cells["median"] for row in rows]),
                        ],
                        list(range(1, study.bands + 1)),
                        BAND_TITLE,
                        "C_b, to random's",
                        y_scale="log",
                        line=1.0,
                    )
                ],
                "Figure 1b",
            )
        ],
        values=all_values("band", pairs),
        figures={"consequence": values},
    )
