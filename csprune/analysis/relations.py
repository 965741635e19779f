"""What the bottom band's loss excess goes with, document by document (paper, Section 4.3 and E.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from csprune.analysis.bands import bottom_pair, loss_excess
from csprune.analysis.contrasts import leading_shares
from csprune.analysis.effects import Progress
from csprune.analysis.estimates import Formula, Means, Sample, claim
from csprune.analysis.groups import group_means, ordered_groups
from csprune.analysis.phrases import figure
from csprune.analysis.results import Cell, Column, Estimate, Result, Row, Table, explained
from csprune.analysis.study import Study
from csprune.bootstrap import Resampling, Statistic
from csprune.statements import Family

REGRESSORS = {"share": "contrast share", "entropy": "entropy, nats", "margin": "margin, nats"}
_CLAIMED = {"share": "above", "entropy": "below", "margin": "above"}
_LEAST_DOCUMENTS = 5  # for each regressor
_THIRDS = ("lowest third", "middle third", "highest third")


class Regression:
    """Ordinary least squares of an outcome on an intercept and regressors, over documents.

    It is solved from means of products, so that every draw of documents is a solution of its own. Regressors
    are first brought to mean 0 and variance 1 over the documents as they are, which changes no fit.

    Args:
        regressors: By name float64 [documents].
        outcome: float64 [subspaces, documents]: one for each random subspace; their mean is regressed.
        resampling: The draws of documents.

    Attributes:
        determined: False where documents are too few or regressors, or one and the intercept, collinear.
    """

    def __init__(
        self, regressors: Mapping[str, np.ndarray], outcome: np.ndarray, resampling: Resampling
    ) -> None:
        x = np.stack(list(regressors.values()), axis=1)
        documents, count = x.shape
        self.names = list(regressors)
        self.outcome = outcome.mean(axis=0)
        lengths = np.sqrt(np.square(x).mean(axis=0))
        plain = np.column_stack([np.ones(documents), x / np.where(lengths > 0, lengths, 1.0)])
        self.determined = documents >= _LEAST_DOCUMENTS * count and _full_rank(plain)
        if not self.determined:
            return
        self.spreads = x.std(axis=0)
        self.design = np.column_stack([np.ones(documents), (x - x.mean(axis=0)) / self.spreads])
        places = range(count + 1)
        values = {f"{a}*{b}": self.design[:, a] * self.design[:, b] for a in places for b in places}
        values |= {f"{a}*outcome": self.design[:, a] * outcome for a in places}
        self._sample = Sample(values, resampling)

    def judged(self, family: Family) -> dict[str, Estimate]:
        """The slopes by regressor, each in the outcome's unit per unit of the regressor, against 0."""
        return {
            name: self._sample.judge(self._slope(i, 1 / self.spreads[i]), 0.0, family)
            for i, name in enumerate(self.names)
        }

    def standardised(self) -> dict[str, Estimate]:
        """The slopes in standard deviations of the outcome per standard deviation of the regressor."""
        spread = float(self.outcome.std())
        if spread <= 0:
            return {name: {"value": None, "ci95": None} for name in self.names}
        return {name: self._sample.estimate(self._slope(i, 1 / spread)) for i, name in enumerate(self.names)}

    def explained_share(self) -> float | None:
        """R^2, over the documents as they are; None where the outcome does not vary."""
        total = float(np.square(self.outcome - self.outcome.mean()).sum())
        fitted, *_ = np.linalg.lstsq(self.design, self.outcome, rcond=None)
        left = float(np.square(self.outcome - self.design @ fitted).sum())
        return 1 - left / total if total > 0 else None

    def _slope(self, regressor: int, unit: float) -> Formula:
        return lambda m: self._solved(m, regressor + 1, unit)

    def _solved(self, m: Means, place: int, unit: float) -> Statistic | None:
        """One coefficient, of the means of products; undefined where these have no single solution."""
        places = range(len(self.names) + 1)
        matrix = np.array([[m[f"{a}*{b}"].value for b in places] for a in places])
        moments = np.array([m[f"{a}*outcome"].value for a in places])
        if not _full_rank(matrix):
            return None
        value = float(np.linalg.solve(matrix, moments)[place]) * unit
        drawn = {name: each.samples for name, each in m.items() if each.samples is not None}
        if len(drawn) < len(m):
            return Statistic(value, None)
        matrices = np.stack([np.stack([drawn[f"{a}*{b}"] for b in places], -1) for a in places], -2)
        if not _full_rank(matrices):
            return Statistic(value, None)  # not in every draw
        sides = np.stack([drawn[f"{a}*outcome"] for a in places], -1)
        return Statistic(value, np.linalg.solve(matrices, sides[..., None])[:, place, 0] * unit)


def _full_rank(matrices: np.ndarray) -> bool:
    """Whether every one of some matrices [..., rows, columns] has linearly independent columns."""
    return bool((np.linalg.matrix_rank(matrices) == matrices.shape[-1]).all())


def regression(study: Study, progress: Progress | None = None) -> Result:
    """The regression of the loss excess on contrast share, entropy and margin, document by document.

    Ordinary least squares over documents, with an intercept, of the bottom band's loss change less the mean
    of its random changes' of the same length (the loss excess, nats) on three figures of the unchanged
    prediction (E.3): the bottom band's share of the leading pair's contrast, the entropy, and the margin, the
    log-odds of the two leading candidates, which is the difference of their logits. Each slope is per unit of
    its regressor and is judged against zero, the three of them as one family; it is solved anew in every draw
    of documents. Standardised slopes are in standard deviations, over all documents as they are, of the loss
    excess per standard deviation of the regressor. Beside it stands the mean loss excess in thirds of the
    documents by entropy (Section 4.3).
    """
    pair = bottom_pair(study, "bottom band", progress)
    outlook = study.evaluation.outlook
    regressors = {
        "share": leading_shares(study)[:, -1],
        "entropy": outlook.entropy.cpu().numpy(),
        "margin": outlook.margin.cpu().numpy(),
    }
    excess = loss_excess(pair)
    fit = Regression(regressors, pair.own["loss_change"] - pair.reference["loss_change"], study.resampling)
    thirds = _thirds(regressors["entropy"], excess, study.resampling)
    statements = []
    if fit.determined:
        slopes = fit.judged(Family(len(REGRESSORS), "slopes of one regression of the loss excess"))
        standardised, r2 = fit.standardised(), fit.explained_share()
        rows = [
            Row(title, {"slope": slopes[name], "standardised": standardised[name]})
            for name, title in REGRESSORS.items()
        ]
        statements = [
            claim(
                f"the slope of the loss excess on the {title.partition(',')[0]} is {_CLAIMED[name]} zero",
                (slopes[name], _CLAIMED[name]),
            )
            for name, title in REGRESSORS.items()
        ]
        finding = (
            "The loss excess goes with the contrast share at "
            f"{figure(slopes['share'], '+.3f')} nats for all of the contrast, with the entropy at "
            f"{figure(slopes['entropy'], '+.3f')} and the margin at {figure(slopes['margin'], '+.3f')} nats "
            f"per nat; together they explain {figure(r2, '.0%')} of its variance."
        )
    else:
        undefined: Cell = {"value": None, "ci95": None}
        rows = [Row(title, {"slope": undefined, "standardised": undefined}) for title in REGRESSORS.values()]
        r2 = None
        finding = (
            f"There are no slopes: {len(excess)} documents are fewer than {_LEAST_DOCUMENTS} for each "
            "regressor, or the contrast share, the entropy and the margin depend on each other linearly."
        )
    table = Table(
        "slopes",
        "Regression of the loss excess",
        (Column("slope", "slope, nats per unit", "number"), Column("standardised", "standardised", "number")),
        rows,
        "Ordinary least squares over documents, with 95% intervals over documents"
        + ("." if r2 is None else f"; R\N{SUPERSCRIPT TWO} = {r2:.3f}."),
        "regressor",
    )
    ends = [figure(row.cells["excess"], "+.3f") for row in thirds.rows]
    return Result(
        "regression",
        "Regression of the loss excess",
        "E.3, Section 4.3",
        explained(regression),
        [finding, f"In thirds of the documents by entropy, ascending, it is {', '.join(ends)} nats."],
        statements,
        [table, thirds],
        values={f"regression.bottom.{name}": each for name, each in regressors.items()}
        | {"regression.bottom.excess": excess},
        figures={"r_squared": r2, "documents": len(excess)},
    )


def _thirds(entropy: np.ndarray, excess: np.ndarray, resampling: Resampling) -> Table:
    """The loss excess by the entropy of the unchanged prediction."""
    groups = ordered_groups(entropy, len(_THIRDS))
    means = group_means({"entropy": entropy, "excess": excess}, groups, resampling)
    rows = [
        Row(_THIRDS[group], {"documents": int((groups == group).sum()), **cells})
        for group, cells in enumerate(means)
    ]
    return Table(
        "thirds",
        "The loss excess in thirds of documents by entropy",
        (
            Column("documents", "documents", "count"),
            Column("entropy", "mean entropy", "nats"),
            Column("excess", "loss excess", "nats"),
        ),
        rows,
        "Means over the documents of a third, with 95% intervals over documents.",
        "entropy",
    )
