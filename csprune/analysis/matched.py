"""Donors whose most probable token is the recipient's runner-up (paper, Section 4.2 and E.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from csprune.analysis.contrasts import candidate_shares, subspace_shares
from csprune.analysis.effects import Progress
from csprune.analysis.estimates import ONE, as_estimate, claim
from csprune.analysis.pairing import grouped_means, grouped_medians, linked_groups, matched_donors
from csprune.analysis.phrases import counted, figure
from csprune.analysis.replacement import Replacement, replace_bottom_band, some
from csprune.analysis.results import Cell, Column, Estimate, Row, Statement, Table
from csprune.analysis.study import States, Study
from csprune.bootstrap import Statistic
from csprune.statements import statement

_ALL = "all eligible"
_RANKS = {"2nd": (2, 2), "3rd to 100th": (3, 100), "lower": (101, None)}
_COLUMNS = (
    Column("documents", "documents", "count"),
    Column("groups", "groups", "count"),
    Column("fraction", "gap closed beyond random", "number"),
    Column("predicted", "predicted by the contrast", "number"),
    Column("surplus", "closed less predicted", "number"),
    Column("adopted", "donor's token predicted", "share"),
    Column("random_adopted", "under random replacements", "share"),
)


@dataclass(frozen=True, eq=False)
class MatchedTransfer:
    """What the matched donors show.

    Attributes:
        eligible: How many calibration documents have such a donor.
        groups: How many groups these are.
        finding: In a sentence.
        table: All of them, and by the donor's rank of the recipient's most probable token.
        statements: That the median fraction is above zero; none without eligible documents.
        values: By name, of the recipients.
    """

    eligible: int
    groups: int
    finding: str
    table: Table
    statements: Sequence[Statement] = ()
    values: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The pairs of a recipient and its donor.

    Attributes:
        fraction: Of the gap closed beyond each random replacement, float64 [subspaces, pairs].
        predicted: What the contrast geometry says it is, float64 [subspaces, pairs].
        adopted: Whether the donor's most probable token is predicted, float64 [pairs].
        random_adopted: Under random replacements, the share of them, float64 [pairs].
        rank: The donor's rank of the recipient's most probable token, int64 [pairs].
        groups: Of pairs linked by shared documents, int64 [pairs].
        second_half: Whether a pair's group is in the second half of the groups, bool [pairs].
        documents: The recipients' identities, strings [pairs].
    """

    fraction: np.ndarray
    predicted: np.ndarray
    adopted: np.ndarray
    random_adopted: np.ndarray
    rank: np.ndarray
    groups: np.ndarray
    second_half: np.ndarray
    documents: np.ndarray

    def figures(self, chosen: np.ndarray, study: Study) -> dict[str, Statistic]:
        """Of some pairs, bool [pairs]: medians of fractions, means of shares."""
        fraction, predicted = self.fraction.mean(axis=0), self.predicted.mean(axis=0)
        groups = np.unique(self.groups[chosen], return_inverse=True)[1].reshape(-1)
        of_fractions = np.stack([fraction, predicted, fraction - predicted], axis=1)[chosen]
        of_shares = np.stack([self.adopted, self.random_adopted], axis=1)[chosen]
        medians = grouped_medians(of_fractions, groups, study.draws, study.seed)
        means = grouped_means(of_shares, groups, study.draws, study.seed)
        names = ("fraction", "predicted", "surplus", "adopted", "random_adopted")
        return dict(zip(names, [*medians, *means], strict=True))

    def judged(self, statistic: Statistic) -> Estimate:
        """Whether the median fraction is on one side of 0."""
        subspaces = len(self.fraction)
        fraction = self.fraction.mean(axis=0)
        halves = [self.fraction[: subspaces // 2], self.fraction[subspaces // 2 :]] if subspaces > 1 else []
        parts = [fraction[~self.second_half], fraction[self.second_half]]
        checks = statement(
            statistic,
            0.0,
            ONE,
            blocks=[_median(each) for each in parts if len(each)],
            halves=[_median(each.mean(axis=0)) for each in halves],
        )
        return {**as_estimate(statistic), "null": 0.0, **checks}


def matched_transfer(study: Study, progress: Progress | None = None) -> MatchedTransfer:
    """Replace the bottom band's component of calibration documents by that of matched donors."""
    calibration = study.calibration
    recipients, donors = matched_donors(
        calibration.outlook.candidates.cpu().numpy(), calibration.document_ids
    )
    if not len(recipients):
        return _nothing(len(calibration))
    states = some(calibration, recipients)
    found = replace_bottom_band(study, states, some(calibration, donors), _ALL, progress)
    apart = found.gap != 0  # a tie of both candidates in both documents leaves nothing to be closed
    if not apart.any():
        return _nothing(len(calibration))
    pairs = _pairs(study, states, recipients, donors, found, apart)
    return _summary(study, pairs)


def _pairs(
    study: Study,
    states: States,
    recipients: np.ndarray,
    donors: np.ndarray,
    found: Replacement,
    apart: np.ndarray,
) -> _Pairs:
    """What is compared, of the pairs with a gap."""
    band, candidates = study.band(-1), states.outlook.candidates
    random = subspace_shares(
        study.references(band.size), study.unembedding, candidates[:, 0], candidates[:, 1]
    )
    groups = linked_groups(recipients[apart], donors[apart])
    documents = np.array(states.document_ids)[apart]
    return _Pairs(
        found.beyond_random[:, apart] / found.gap[apart],
        (candidate_shares(study, states)[:, -1] - random)[:, apart],
        found.adopted[apart],
        found.random_adopted.mean(axis=0)[apart],
        found.rank[apart],
        groups,
        _second_half(groups, documents),
        documents,
    )


def _summary(study: Study, pairs: _Pairs) -> MatchedTransfer:
    """The table, the finding and the statement."""
    everything = np.ones(len(pairs.rank), dtype=bool)
    of_all = pairs.figures(everything, study)
    judged = pairs.judged(of_all["fraction"])
    rows = [_row(_ALL, everything, pairs.groups, {**_estimates(of_all), "fraction": judged})]
    for label, (low, high) in _RANKS.items():
        chosen = (pairs.rank >= low) & (pairs.rank <= (high or pairs.rank.max()))
        figures = _estimates(pairs.figures(chosen, study)) if chosen.any() else {}
        rows.append(_row(label, chosen, pairs.groups, figures))
    eligible, groups = len(pairs.rank), int(pairs.groups.max()) + 1
    finding = (
        f"With matched donors ({counted(eligible, 'eligible calibration document')}, "
        f"{counted(groups, 'linked group')}), the median fraction of the gap closed beyond random is "
        f"{figure(judged, '+.3f')}; the contrast share predicts {of_all['predicted'].value:+.3f}."
    )
    if groups < 2:
        finding += " A single group has no intervals."
    claimed = claim(
        "with matched donors, the median fraction of the gap closed beyond random replacements is above zero",
        (judged, "above"),
    )
    values = {
        "documents": pairs.documents,
        "fraction": pairs.fraction,
        "predicted": pairs.predicted,
        "adopted": pairs.adopted,
        "random_adopted": pairs.random_adopted,
        "rank": pairs.rank.astype(np.float64),
        "group": pairs.groups.astype(np.float64),
    }
    named = {f"donors.matched donors.{name}": each for name, each in values.items()}
    return MatchedTransfer(eligible, groups, finding, _table(rows), [claimed], named)


def _nothing(documents: int) -> MatchedTransfer:
    """No document is eligible."""
    finding = (
        f"None of {counted(documents, 'calibration document')} has a runner-up that is the most probable "
        "token of another one, so that there are no matched donors."
    )
    return MatchedTransfer(0, 0, finding, _table([Row(_ALL, {"documents": 0, "groups": 0})]))


def _median(values: np.ndarray) -> Statistic:
    return Statistic(float(np.median(values)), None)


def _second_half(groups: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Half of the groups, in the order of a hash of their documents: bool [pairs]."""
    keys = [
        min(hashlib.sha256(str(each).encode()).hexdigest() for each in ids[groups == group])
        for group in range(groups.max() + 1)
    ]
    place = np.argsort(np.argsort(keys))
    return place[groups] >= len(keys) / 2


def _estimates(figures: Mapping[str, Statistic]) -> dict[str, Cell]:
    return {name: as_estimate(each) for name, each in figures.items()}


def _row(label: str, chosen: np.ndarray, groups: np.ndarray, figures: Mapping[str, Cell]) -> Row:
    counts = {"documents": int(chosen.sum()), "groups": len(np.unique(groups[chosen]))}
    return Row(label, {**counts, **figures})


def _table(rows: Sequence[Row]) -> Table:
    note = (
        "Medians over documents of the fractions, means of the shares; with 95% intervals over groups of "
        "documents linked by shared donors, none of a single group. Predicted: the band's contrast share "
        "less the random subspaces'. By the donor's rank of the recipient's most probable token."
    )
    return Table("matched", "Transfer from matched donors", _COLUMNS, rows, note, "donor's rank")
