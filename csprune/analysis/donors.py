"""Another document's component in the bottom band, in place of the calibration mean (paper, C and E.3)."""

from __future__ import annotations

import numpy as np

from csprune.analysis.comparison import comparison_table, full_result
from csprune.analysis.effects import Progress
from csprune.analysis.estimates import Sample, claim
from csprune.analysis.matched import matched_transfer
from csprune.analysis.pairing import random_donors
from csprune.analysis.phrases import compared, figure
from csprune.analysis.replacement import Replacement, replace_bottom_band, some
from csprune.analysis.results import Cell, Column, Estimate, Result, Row, Table, explained
from csprune.analysis.study import Study
from csprune.bootstrap import difference, ratio


def donors(study: Study, progress: Progress | None = None) -> Result:
    """A donor's component in the bottom band, and how far it moves the prediction toward the donor's.

    The component in the bottom band is replaced by that of another document, the donor j of document i,
    du_i = -P_B (u_i - u_j) (Appendix C). Random replacements take the same donor's component in Haar-random
    subspaces of the band's dimension, rescaled document by document to the same length. The log-odds of the
    recipient's two leading candidates are followed: the gap is the donor's less the recipient's own, and the
    fraction closed beyond random is the band's change of the recipient's log-odds less the mean of random
    replacements', over the gap.

    Random donors: within each confirmation block the documents form one cycle in random order, and each
    takes the next one's component. The fraction is pooled: the sum over documents of the change beyond
    random, signed by the gap, over the sum of the gaps' sizes (E.3). The donor's most probable token may
    already be the recipient's; how often is stated.

    Matched donors (Section 4.2): each eligible calibration document, whose runner-up is the most probable
    token of another calibration document and whose gap is not zero, takes the component of one such donor,
    chosen by the smallest SHA-256 of both identities. The estimand is the median over documents of each
    document's fraction, with intervals from draws over groups of documents linked by shared donors. The
    contrast geometry predicts a fraction equal to the band's contrast share less the mean of the random
    subspaces' shares. Calibration documents have no blocks: in their place, both halves of the groups, told
    apart by a hash, must agree on a statement. The fraction is also given by the donor's rank of the
    recipient's most probable token.
    """
    evaluation = study.evaluation
    of_random = random_donors(evaluation.blocks.cpu().numpy(), study.seed)
    drawn = replace_bottom_band(study, evaluation, some(evaluation, of_random), "random donors", progress)
    table = comparison_table(
        "comparison",
        "A random donor's component in the bottom band, at equal length",
        [drawn.pair],
        study.resampling,
        head="donors",
    )
    transfer, judged = _random_table(study, drawn)
    cells = transfer.rows[0].cells
    matched = matched_transfer(study, progress)
    claims = [
        *full_result(table, lambda label: f"with {label}"),
        claim(
            "with random donors, the donor's most probable token becomes the prediction more often than "
            "under random replacements",
            (judged["adopted"], "above"),
        ),
        claim(
            "with random donors, the gap of the log-odds is closed beyond random replacements",
            (judged["fraction"], "above"),
        ),
        *matched.statements,
    ]
    return Result(
        "donors",
        "Donor replacement",
        "Section 4.2, Appendix C and E.3",
        explained(donors),
        [
            f"With random donors, {compared(table.rows[0])}.",
            "The donor's most probable token becomes the prediction in "
            f"{figure(cells['adopted'], '.0%')} of documents, under random replacements in "
            f"{figure(cells['random_adopted'], '.0%')}; of the gap, {figure(cells['fraction'], '+.3f')} is "
            "closed beyond random (pooled).",
            matched.finding,
        ],
        claims,
        [table, transfer, matched.table],
        values={
            **drawn.pair.values("donors"),
            **drawn.values("donors.random donors"),
            "donors.random donors.donor": of_random.astype(np.float64),
            **matched.values,
        },
        figures={"eligible": matched.eligible, "groups": matched.groups},
    )


def _random_table(study: Study, drawn: Replacement) -> tuple[Table, dict[str, Estimate]]:
    """The transfer from random donors, and its two judged figures."""
    sample = Sample(
        {
            "adopted": drawn.adopted,
            "random": drawn.random_adopted,
            "already": drawn.already,
            "closed": np.sign(drawn.gap) * drawn.beyond_random,
            "gap": np.abs(drawn.gap),
        },
        study.resampling,
    )
    judged = {
        "adopted": sample.judge(lambda m: difference(m["adopted"], m["random"]), 0.0),
        "fraction": sample.judge(lambda m: ratio(m["closed"], m["gap"]), 0.0),
    }
    cells: dict[str, Cell] = {
        "adopted": sample.estimate(lambda m: m["adopted"]),
        "random_adopted": sample.estimate(lambda m: m["random"]),
        "adopted_difference": judged["adopted"],
        "already": sample.estimate(lambda m: m["already"]),
        "fraction": judged["fraction"],
    }
    columns = (
        Column("adopted", "donor's token predicted", "share"),
        Column("random_adopted", "under random replacements", "share"),
        Column("adopted_difference", "difference", "share"),
        Column("already", "before any", "share"),
        Column("fraction", "gap closed beyond random", "number"),
    )
    note = (
        "Shares of documents; of the gap a ratio of sums over documents. With 95% intervals over documents."
    )
    return Table(
        "random", "Transfer from random donors", columns, [Row("random donors", cells)], note, "donors"
    ), judged
