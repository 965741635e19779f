"""The bottom band's effect by other measures: at softmax temperatures, and by the Brier divergence (E.3)."""

from __future__ import annotations

import torch

from csprune.analysis.bands import bottom_observed
from csprune.analysis.drawn import curve_of
from csprune.analysis.effects import Progress, Scene, brier
from csprune.analysis.estimates import Formula, Means, Sample
from csprune.analysis.phrases import figure, times
from csprune.analysis.results import Cell, Column, Panel, Picture, Result, Row, Table, explained
from csprune.analysis.study import Study
from csprune.bootstrap import Statistic, ratio

TEMPERATURES = (0.5, 1.0, 2.0, 4.0, 8.0)
_DISTANCE = "logit_distance"


def at_temperatures(scene: Scene, c: torch.Tensor) -> dict[str, torch.Tensor]:
    """K at each of `TEMPERATURES`, nats, by the temperature's name, and D: float64 [documents]."""
    centred = c - c.mean(1, keepdim=True)
    return {_name(each): scene.divergence(c, each) for each in TEMPERATURES} | {
        _DISTANCE: centred.square().sum(1)
    }


def temperatures(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band's prediction change at softmax temperatures from 0.5 to 8, and in their limit.

    Each document's logits are divided by a temperature T before and after the change, K_T =
    KL(softmax(l / T) || softmax((l + dl) / T)), which makes the prediction more uniform as T grows (Section
    4.3). The bottom band's K_T stands beside that of random changes of the same length, as a ratio of sums
    over documents. In the limit of large T, T^2 K_T tends to D / 2V, V the size of the vocabulary (Appendix
    B), so that the ratio tends to that of the logit distances D; how far T^2 K_T is from this limit is
    reported for the band and for random changes. With a soft cap, logits are those after the cap.
    """
    own, random = bottom_observed(study, at_temperatures, progress)
    values = {f"own.{name}": each for name, each in own.items()}
    values |= {f"reference.{name}": each for name, each in random.items()}
    sample = Sample(values, study.resampling)
    vocabulary = study.unembedding.vocabulary
    rows = []
    for temperature in TEMPERATURES:
        name = _name(temperature)
        cells: dict[str, Cell] = {
            "ratio": sample.estimate(lambda m, name=name: ratio(m[f"own.{name}"], m[f"reference.{name}"])),
            "own": sample.estimate(_to_limit("own", temperature, vocabulary)),
            "random": sample.estimate(_to_limit("reference", temperature, vocabulary)),
        }
        rows.append(Row(name, cells))
    limit = sample.estimate(lambda m: ratio(m[f"own.{_DISTANCE}"], m[f"reference.{_DISTANCE}"]))
    rows.append(Row("limit (D)", {"ratio": limit, "own": 1.0, "random": 1.0}))
    table = Table(
        "temperatures",
        "The bottom band's K at softmax temperatures",
        (
            Column("ratio", "K, to random's", "ratio"),
            Column("own", "T\N{SUPERSCRIPT TWO}K to D/2V, band", "ratio"),
            Column("random", "T\N{SUPERSCRIPT TWO}K to D/2V, random", "ratio"),
        ),
        rows,
        "Ratios of sums over documents, at equal length, with 95% intervals over documents; random changes "
        "as the mean over random subspaces.",
        "T",
    )
    first, last = rows[0].cells["ratio"], rows[len(TEMPERATURES) - 1].cells["ratio"]
    return Result(
        "temperatures",
        "Softmax temperatures",
        "Section 4.3 and E.3, Appendix B, Figure 3d",
        explained(temperatures),
        [
            f"The bottom band's K is {times(first)} at T = {TEMPERATURES[0]:g} and {times(last)} at "
            f"T = {TEMPERATURES[-1]:g}; its logit distance, the limit of high temperatures, is "
            f"{times(limit)}."
        ],
        tables=[table],
        pictures=[_picture(table)],
        values={f"temperatures.bottom.{name}": each for name, each in own.items()}
        | {f"temperatures.bottom.random.{name}": each for name, each in random.items()},
    )


def brier_divergence(study: Study, progress: Progress | None = None) -> Result:
    """The bottom band's effect by another proper scoring rule, the Brier divergence.

    sum_j (p'_j - p_j)^2 between the unchanged prediction p and the changed one p' (Gneiting & Raftery, 2007)
    takes the place of K. The bottom band's stands beside that of random changes of the same length, as a
    ratio of sums over documents (E.3).
    """
    own, random = bottom_observed(study, brier, progress)
    sample = Sample({"own": own["brier"], "reference": random["brier"]}, study.resampling)
    cells: dict[str, Cell] = {
        "own": sample.estimate(lambda m: m["own"]),
        "random": sample.estimate(lambda m: m["reference"]),
        "ratio": sample.estimate(lambda m: ratio(m["own"], m["reference"])),
    }
    table = Table(
        "brier",
        "Brier divergence of the bottom band's change",
        (
            Column("own", "bottom band", "number"),
            Column("random", "random, of its length", "number"),
            Column("ratio", "to random's", "ratio"),
        ),
        [Row("bottom band", cells)],
        "Means over documents, between 0 and 2; the ratio is of sums. With 95% intervals over documents.",
    )
    return Result(
        "brier",
        "Brier divergence",
        "E.3",
        explained(brier_divergence),
        [
            f"The Brier divergence of the bottom band's change is {times(cells['ratio'])} "
            f"({figure(cells['own'], '.4g')} against {figure(cells['random'], '.4g')})."
        ],
        tables=[table],
        values={"brier.bottom.brier": own["brier"], "brier.bottom.random.brier": random["brier"]},
    )


def _name(temperature: float) -> str:
    return f"{temperature:g}"


def _to_limit(who: str, temperature: float, vocabulary: int) -> Formula:
    """`T^2 sum K_T / (sum D / 2V)`."""
    factor = 2 * vocabulary * temperature**2

    def formula(m: Means) -> Statistic | None:
        found = ratio(m[f"{who}.{_name(temperature)}"], m[f"{who}.{_DISTANCE}"])
        if found is None:
            return None
        return Statistic(found.value * factor, None if found.samples is None else found.samples * factor)

    return formula


def _picture(table: Table) -> Picture:
    """The ratio over temperatures, and the one it tends to."""
    *found, limit = [row.cells["ratio"] for row in table.rows]
    curves = [
        curve_of("prediction change K", found),
        curve_of("logit distance D, the limit", [limit] * len(found), reference=True),
    ]
    return Picture(
        "temperatures",
        "The bottom band's prediction change at softmax temperatures",
        "The bottom band's K to that of random changes of the same length, ratios of sums over documents "
        "with 95% intervals, at softmax temperatures; and the ratio of the logit distances, its limit.",
        [
            Panel(
                curves,
                list(TEMPERATURES),
                "softmax temperature T",
                "to random's",
                x_scale="log",
                y_scale="log",
                line=1.0,
            )
        ],
        "Figure 3d",
    )
