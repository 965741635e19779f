"""What becomes of the most probable token under the bottom band's change (paper, E.2, Figure 7a)."""

from __future__ import annotations

from csprune.analysis.bands import bottom_observed
from csprune.analysis.effects import Progress, leading_token
from csprune.analysis.estimates import Sample, claim
from csprune.analysis.results import Column, Result, Row, Table, explained
from csprune.analysis.study import Study
from csprune.bootstrap import difference, ratio
from csprune.statements import Family


def most_probable_token(study: Study, progress: Progress | None = None) -> Result:
    """What the bottom band's change does to the most probable token, beside random changes of its length.

    The share of documents in which another token becomes the most probable one; of these, the share in which
    it is the unchanged prediction's runner-up; and top-1 accuracy, how often the most probable token is the
    true next one, before and after (E.2, Figure 7a).
    """
    band, random = bottom_observed(study, leading_token, progress)
    values = {
        f"{who}.{key}": each
        for who, figures in (("band", band), ("random", random))
        for key, each in figures.items()
        if key != "rank"
    } | {"unchanged.correct": study.evaluation.correct}
    values |= {f"{who}.changed": 1 - values[f"{who}.kept"] for who in ("band", "random")}
    sample = Sample(values, study.resampling)
    family = Family(2, "changes of the most probable token, and of accuracy, beside random changes'")
    rows = []
    for who, label in (("band", "bottom band"), ("random", "random, of its length")):
        rows.append(
            Row(
                label,
                {
                    "changed": sample.estimate(lambda m, who=who: m[f"{who}.changed"]),
                    "runner_up": sample.estimate(
                        lambda m, who=who: ratio(m[f"{who}.runner_up"], m[f"{who}.changed"])
                    ),
                    "accuracy": sample.estimate(lambda m, who=who: m[f"{who}.correct"]),
                    "fall": sample.estimate(
                        lambda m, who=who: difference(m["unchanged.correct"], m[f"{who}.correct"])
                    ),
                },
            )
        )
    more = sample.judge(lambda m: difference(m["band.changed"], m["random.changed"]), 0.0, family)
    rows.append(
        Row(
            "difference",
            {
                "changed": more,
                "accuracy": sample.judge(
                    lambda m: difference(m["band.correct"], m["random.correct"]), 0.0, family
                ),
            },
        )
    )
    table = Table(
        "top-token",
        "The most probable token",
        (
            Column("changed", "replaced", "share"),
            Column("runner_up", "of these, by the runner-up", "share"),
            Column("accuracy", "accuracy", "share"),
            Column("fall", "fall of accuracy", "share"),
        ),
        rows,
        "Shares of documents. Accuracy: the most probable token is the true next one.",
    )
    return Result(
        "top-token",
        "The most probable token",
        "E.2, Figure 7a",
        explained(most_probable_token),
        [
            "The bottom band's change replaces the most probable token in "
            f"{values['band.changed'].mean():.0%} of documents, random changes of its length in "
            f"{values['random.changed'].mean():.0%}."
        ],
        [
            claim(
                "the bottom band's change replaces the most probable token more often than random changes",
                (more, "above"),
            )
        ],
        [table],
        values=values,
    )
