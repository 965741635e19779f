"""The bottom band beside random changes of its length, of its average length, and as they are."""

from __future__ import annotations

from csprune.analysis.bands import bottom_pair
from csprune.analysis.comparison import Pair, all_values, comparison_table, forest, full_result, side_by_side
from csprune.analysis.estimates import Formula, Sample
from csprune.analysis.phrases import compared, figure
from csprune.analysis.results import Column, Picture, Result, Row, Table, explained
from csprune.analysis.spaces import Change
from csprune.analysis.study import Progress, Study
from csprune.bootstrap import Resampling, ratio
from csprune.errors import InputError

EQUAL = "of equal length"
MATCHED = "rescaled by one coefficient"
UNRESCALED = "not rescaled"
_PER_LENGTH = ("logit_distance", "fisher_term", "prediction_change")
_SQUARED = "|du|\N{SUPERSCRIPT TWO}"


def matched_coefficient(study: Study) -> float:
    """The one coefficient a that gives random changes the bottom band's length on the calibration documents.

    `a^2 mean |du_s|^2 = mean |du_b|^2`, the first mean over random subspaces and calibration documents, the
    second over calibration documents.

    Raises:
        InputError: The calibration documents' states do not vary, so that no change has a length.
    """
    deviation = study.calibration.u - study.mean
    band = study.band(-1)
    own = float(band.removal(deviation).squared_length.mean())
    drawn = [float(each.removal(deviation).squared_length.mean()) for each in study.references(band.size)]
    random = sum(drawn) / len(drawn)
    if random <= 0:
        raise InputError(
            f"the states of {len(study.calibration)} calibration documents do not differ, so that no "
            "coefficient matches the length of random changes: calibrate on more documents"
        )
    return (own / random) ** 0.5


def scaled_references(study: Study, own: Change, coefficient: float) -> dict[str, list[Change]]:
    """The random changes that a change of the bottom band is compared with, by the way they are scaled.

    Args:
        study: For the random subspaces.
        own: The bottom band's change.
        coefficient: That of `matched_coefficient`.
    """
    random = study.random_removals(own)
    return {
        EQUAL: [each.as_long_as(own) for each in random],
        MATCHED: [each.scaled(coefficient) for each in random],
        UNRESCALED: random,
    }


def reference_scalings(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band beside random changes rescaled document by document, on average, or not at all.

    The state's component in the band with the smallest singular values is replaced by its calibration mean,
    du = -P_B (u - mu), and stands beside the same change with random subspaces of the band's dimension in the
    place of the band (Section E.1): of equal length, each document's change rescaled to the length of the
    band's; rescaled by one coefficient a common to all subspaces and documents, with a^2 times the mean
    |du|^2 of the random changes (over subspaces and calibration documents) equal to the mean |du|^2 of the
    band's change over calibration documents; and not rescaled.

    The full result holds where D is below random's, and K and the loss change are above it. Where random
    changes are not rescaled, D depends on how long they are: the ratio of the squared lengths, of sums over
    evaluation documents, is reported, and the ratios of D, F and K per unit of squared length.
    """
    own, coefficient = study.removal(-1), matched_coefficient(study)
    references = scaled_references(study, own, coefficient)
    others = {label: (own, random) for label, random in references.items() if label != EQUAL}
    pairs = [
        bottom_pair(study, EQUAL, progress),
        *side_by_side(study.evaluation, others, progress),
    ]
    table = comparison_table(
        "scalings",
        "The bottom band beside random changes scaled in three ways",
        pairs,
        study.resampling,
        head="random changes",
    )
    lengths = _lengths(pairs, study.resampling)
    longer, apart = (lengths.rows[-1].cells[key] for key in ("squared_length", "logit_distance"))
    return Result(
        "scalings",
        "Reference scalings",
        "E.1, Figure 6",
        explained(reference_scalings),
        [
            *(f"Beside random changes {row.label} {compared(row)}." for row in table.rows),
            f"The band's change has {figure(longer, '.2f')} times the squared length of random changes that "
            f"are not rescaled, and {figure(apart, '.2f')} times their D per unit of squared length; the one "
            f"coefficient is {coefficient:.3f}.",
        ],
        full_result(table, lambda label: f"against random changes {label}"),
        [table, lengths],
        [
            Picture(
                "scalings",
                "The bottom band beside random changes scaled in three ways",
                "Ratios of sums over documents to random changes, and the loss excess over theirs, with 95% "
                "intervals: of equal length document by document, rescaled by one coefficient, not rescaled.",
                forest(table, ("logit_distance", "prediction_change", "loss_excess")),
                "Figure 6",
            )
        ],
        all_values("scalings", pairs),
        {"coefficient": coefficient},
    )


def _lengths(pairs: list[Pair], resampling: Resampling) -> Table:
    """How long the band's changes are beside the references, and what they do per unit of squared length."""
    rows = []
    for pair in pairs:
        names = ("squared_length", *_PER_LENGTH)
        sample = Sample(
            {f"own.{name}": pair.own[name] for name in names}
            | {f"reference.{name}": pair.reference[name] for name in names},
            resampling,
        )
        longer = sample.estimate(lambda m: ratio(m["own.squared_length"], m["reference.squared_length"]))
        per_length = {name: sample.estimate(_per_length(name)) for name in _PER_LENGTH}
        rows.append(Row(pair.label, {"squared_length": longer, **per_length}))
    return Table(
        "lengths",
        "Lengths of the changes, and what they do per unit of squared length",
        (
            Column("squared_length", f"{_SQUARED}, to random's", "ratio"),
            Column("logit_distance", f"D/{_SQUARED}, to random's", "ratio"),
            Column("fisher_term", f"F/{_SQUARED}, to random's", "ratio"),
            Column("prediction_change", f"K/{_SQUARED}, to random's", "ratio"),
        ),
        rows,
        "Ratios of sums over documents, to the mean over random subspaces.",
        "random changes",
    )


def _per_length(quantity: str) -> Formula:
    """A change's sum per unit of squared length, to its references'."""
    return lambda m: ratio(
        ratio(m[f"own.{quantity}"], m["own.squared_length"]),
        ratio(m[f"reference.{quantity}"], m["reference.squared_length"]),
    )
