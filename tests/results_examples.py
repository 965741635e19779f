"""Made-up results of every kind that a page must show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from csprune.analysis.results import (
    Cell,
    Column,
    Curve,
    Estimate,
    Panel,
    Picture,
    Result,
    Row,
    Statement,
    Table,
)
from csprune.pages.results_sections import ResultsHeading

HEADING = ResultsHeading(
    title="Consequence spectrum of a/model",
    done="Twenty bands of the singular directions, each compared with random subspaces of the same size, "
    "at the last of 128 positions of 64 documents.",
    facts=[("documents", "64"), ("bands", "20"), ("corpus.source", "text.jsonl")],
    versions=[("csprune", "9.9.9"), ("torch", "1.2.3")],
)
BANDS = 20


def estimate(value: float | None, half: float = 0.0, **judged: Any) -> dict[str, Any]:
    """An estimate with a symmetric interval; with `established` also all that a statement has."""
    ends = None if value is None or not half else [value - half, value + half]
    found: dict[str, Any] = {"value": value, "ci95": ends}
    if judged:
        held = judged["established"]
        found |= {
            "null": judged.get("null", 1.0),
            "side": "above",
            "adjusted_ci95": ends and [ends[0] - half / 2, ends[1] + half / 2],
            "checks": {"interval": held, "halves_of_draws": True, "blocks": held, "subspaces": None},
            "established": held,
        }
    return found


def spectrum() -> Result:
    """Twenty bands and three curves, lines with bands; a gap, and a value that stands alone."""
    x = np.arange(1, BANDS + 1)
    centre = np.exp(0.16 * (x - 9))
    values: list[float | None] = [float(each) for each in centre]
    values[12] = None
    values[14] = None
    quantities = [
        Curve(
            "Fisher term", values, low=[v and 0.8 * v for v in values], high=[v and 1.25 * v for v in values]
        ),
        Curve("prediction change", [float(1.3 * each) for each in centre[::-1]]),
        Curve("random", [1.0] * BANDS, low=[0.9] * BANDS, high=[1.1] * BANDS, reference=True),
    ]
    mass = [float(each) for each in np.exp(-x / 6) / np.exp(-x / 6).sum()]
    rows = [Row(f"{5 * i}\N{EN DASH}{5 * i + 5}%", _cells(float(each), i)) for i, each in enumerate(centre)]
    established = estimate(3.41, 0.3, established=True)
    return Result(
        name="spectrum",
        title="What each band is worth",
        place="Section 3.2, Figure 1b",
        definition="Each band is removed from the state, and the prediction compared with the original one. "
        "Ratios of means over documents, to the mean over eight random subspaces of the same size.",
        findings=[
            "The last band's Fisher term is 3.41 times random's, at 1.2% of the logit distance.",
            "The first band moves the logits most and the prediction least.",
        ],
        statements=[
            Statement("the last band's Fisher term is above random's", True, [established]),
            Statement(
                "K falls and then rises along the spectrum",
                False,
                [established, estimate(1.02, 0.08, established=False)],
            ),
        ],
        tables=[
            Table(
                "bands",
                "Each band against random subspaces",
                [
                    Column("fisher", "Fisher term / D", "ratio"),
                    Column("prediction", "prediction change / D", "ratio"),
                    Column("loss", "loss change", "nats"),
                    Column("mass", "share of D", "share"),
                    Column("angle", "overlap", "number"),
                    Column("excess", "excess loss", "nats"),
                    Column("tokens", "tokens", "count"),
                ],
                rows,
                note="Ratios to random subspaces of the same size; loss in nats.",
                head="band",
            )
        ],
        pictures=[
            Picture(
                "spectrum",
                "The small directions matter more per unit of logit distance",
                "Ratios to random subspaces of the same size against the band. Light: 95% intervals.",
                [
                    Panel(
                        quantities,
                        x.tolist(),
                        "band, largest singular values first",
                        "ratio to random",
                        y_scale="log",
                        line=1.0,
                    )
                ],
                place="Figure 1b",
            ),
            Picture(
                "mass",
                "Where the logit distance lies",
                "The share of D in each band, and cumulated.",
                [
                    Panel(
                        [Curve("", mass)], x.tolist(), "band", "share of D", title="Each band", marks="steps"
                    ),
                    Panel(
                        [Curve("", [float(each) for each in np.cumsum(mass)])],
                        x.tolist(),
                        "band",
                        "cumulated share",
                        title="Up to each band",
                    ),
                ],
            ),
        ],
    )


def _cells(ratio: float, place: int) -> dict[str, Cell]:
    return {
        "fisher": estimate(ratio, 0.08 * ratio, established=ratio > 1.1 or ratio < 0.9),
        "prediction": estimate(1 / ratio, 0.05 / ratio, established=place % 2 == 0),
        "loss": estimate(0.01 * (place - 10), 0.003),
        "mass": estimate(0.05, 0.01),
        "angle": estimate(0.97 - 0.01 * place, 0.02),
        "excess": estimate(None) if place == 3 else estimate(0.001 * place - 0.01, 0.002),
        "tokens": 1204 + place if place != 4 else None,
    }


def forest() -> Result:
    """Eight rows with long labels, and two panels that share them."""
    labels = [
        "all tokens",
        "candidates of the first token alone",
        "frequent tokens",
        "rare tokens",
        "tokens that begin a word",
        "tokens within a word",
        "punctuation and white space, which are few",
        "the true next token",
    ]
    x = list(range(len(labels)))
    values = [0.7 + 0.35 * i for i in x]

    def panel(title: str, scale: float, **more: Any) -> Panel:
        y: list[float | None] = [scale * v for v in values]
        y[5] = None
        low, high = [v and 0.85 * v for v in y], [v and 1.2 * v for v in y]
        return Panel(
            [Curve("singular", y, low=low, high=high), Curve("random", [1.0] * len(x), reference=True)],
            x,
            "",
            title,
            marks="points",
            x_labels=labels,
            **more,
        )

    columns = [Column("value", "ratio", "ratio"), Column("what", "what it is", "text")]
    return Result(
        name="tokens",
        title="Which tokens it is",
        place="Appendix E.2",
        definition="The same, of groups of tokens.",
        findings=["Rare tokens carry most of it."],
        tables=[
            Table(
                "groups",
                "Groups of tokens",
                columns,
                [
                    Row(label, {"value": estimate(v, 0.1), "what": "a group"})
                    for label, v in zip(labels, values, strict=True)
                ],
                head="tokens",
            )
        ],
        pictures=[
            Picture(
                "tokens",
                "Rare tokens carry most of it",
                "Ratios to random, with 95% intervals.",
                [
                    panel("Fisher term, ratio to random", 1.0, y_scale="log", line=1.0),
                    panel("loss, nats", 0.2, line=0.0),
                ],
            )
        ],
    )


def cloud() -> Result:
    """Clouds of 2,000 points and of 40, equal axes, and lines with names for places."""
    draw = np.random.default_rng(0)
    curves = []
    for place, label in enumerate(("kept", "removed", "random")):
        points = draw.normal(size=(2000, 2)) * [2.0, 0.5 + place] + [place, 0]
        curves.append(
            Curve(label, points[:, 1].tolist(), x=points[:, 0].tolist(), reference=label == "random")
        )
    few = draw.normal(size=(40, 2))
    names = ["first layer", "layer 8", "layer 16", "layer 24", "the last layer of all"]
    return Result(
        name="cloud",
        title="The geometry of states",
        place="",
        definition="States projected on two directions.",
        pictures=[
            Picture(
                "cloud",
                "States in the plane of two directions",
                "Every document's state.",
                [
                    Panel(
                        curves,
                        [],
                        "along the first",
                        "along the second",
                        title="All",
                        marks="points",
                        equal=True,
                    ),
                    Panel(
                        [Curve("kept", few[:, 1].tolist(), x=few[:, 0].tolist())],
                        [],
                        "along the first",
                        "along the second",
                        title="A few",
                        marks="points",
                        equal=True,
                    ),
                ],
            ),
            Picture(
                "layers",
                "How it grows with the layers",
                "Overlap with the final state.",
                [
                    Panel(
                        [
                            Curve("fisher", [0.1, 0.2, 0.4, 0.7, 0.9]),
                            Curve("singular", [0.2, 0.25, 0.3, 0.5, 0.8]),
                        ],
                        [0, 8, 16, 24, 29],
                        "layer",
                        "overlap",
                        x_labels=names,
                    )
                ],
            ),
        ],
    )


def many() -> Result:
    """Twenty curves, three panels, values that no logarithmic axis shows, and a panel of nothing."""
    x = [2.0**k for k in range(1, 11)]
    curves = [
        Curve(f"layer {k}", [float((1 + 0.1 * k) * v ** (-0.03 * k)) for v in x]) for k in range(1, 20)
    ] + [Curve("random", [1.0] * len(x), reference=True)]
    lost = Curve("layer 1", [-1.0, 0.0, *(0.5 * v for v in x[2:])])
    return Result(
        name="many",
        title="A title with <script>alert(1)</script> and | and `code`",
        place="Figure <b>9</b>",
        definition="Nothing | at all.",
        findings=["<img src=x onerror=y> | {{ 7 * 7 }}"],
        statements=[Statement("a | b < c", False, [estimate(0.12, 0.2, established=False, null=0.0)])],
        tables=[
            Table(
                "t|",
                "a | table <b>",
                [Column("a", "a|b", "text")],
                [Row("<i>x</i>", {"a": "1|2"}), Row("without", {})],
            )
        ],
        pictures=[
            Picture(
                "many",
                "Twenty <curves>",
                "Against the <size>, logarithmic.",
                [Panel(curves, x, "dimensions removed", "ratio", x_scale="log", y_scale="log", line=1.0)],
            ),
            Picture(
                "three",
                "Three panels",
                "One with values that are left out, one with nothing.",
                [
                    Panel(
                        [lost],
                        x,
                        "dimensions removed",
                        "ratio",
                        title="Left out",
                        x_scale="log",
                        y_scale="log",
                    ),
                    Panel(
                        [Curve("layer 1", [None] * 10)],
                        x,
                        "dimensions removed",
                        "other",
                        title="Nothing",
                        x_scale="log",
                    ),
                    Panel(
                        [
                            Curve(f"layer {k}", [float(k), 2.0 * k, 3.0], low=[0.5] * 3, high=[2.5 * k] * 3)
                            for k in range(1, 5)
                        ],
                        [0.05, 0.1, 0.2],
                        "removed",
                        "a title of the values that is so long that it must be broken",
                        title="Points with a rather long title that is broken",
                        x_scale="log",
                        marks="points",
                    ),
                ],
            ),
        ],
    )


def examples() -> list[Result]:
    return [spectrum(), forest(), cloud(), many()]


def estimates(result: Result) -> Iterator[tuple[str, Estimate]]:
    """Every estimate in a result's tables, with `TABLE.ROW.COLUMN`."""
    for table in result.tables:
        for row in table.rows:
            for key, cell in row.cells.items():
                if isinstance(cell, dict):
                    yield f"{table.name}.{row.label}.{key}", cell
