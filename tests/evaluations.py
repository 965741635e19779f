"""Made-up evaluations, for the tests of what is computed, written and drawn from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from csprune.measurement import QUANTITIES, Evaluation, Measurement, StoredMeasurement

DOCUMENTS, SUBSPACES = 24, 3
RANKS = ((0.05, 3), (0.2, 12))


def make_values(generator: np.random.Generator, size: tuple[int, ...]) -> dict[str, np.ndarray]:
    values = {name: generator.gamma(2.0, size=size) for name in QUANTITIES}
    values["logit_distance"] *= 10_000
    values["top1_agreement"] = generator.uniform(0.5, 1.0, size=size)
    return values


def make_evaluation(seed: int = 0, methods: tuple[str, ...] = ("fisher", "random")) -> Evaluation:
    generator = np.random.default_rng(seed)
    measurements = []
    for rank, removed in RANKS:
        for method in methods:
            size = (SUBSPACES, DOCUMENTS) if method == "random" else (DOCUMENTS,)
            measurements.append(
                Measurement(method, rank, removed, 60 - removed, make_values(generator, size))
            )
    return Evaluation(
        model="some/modèl",
        protocol={"positions": "all", "seed": 0},
        document_ids=tuple(f"{number // 2:016x}" for number in range(DOCUMENTS)),
        blocks=np.repeat([1, 2], [10, 14]),
        base_loss=generator.gamma(3.0, size=DOCUMENTS),
        base_entropy=generator.gamma(3.0, size=DOCUMENTS),
        measurements=measurements,
    )


def replace_values(evaluation: Evaluation, place: int, **values: np.ndarray) -> Evaluation:
    """The evaluation with some values of one measurement replaced."""
    measurements = list(evaluation.measurements)
    old = measurements[place]
    measurements[place] = dataclasses.replace(old, values={**old.values, **values})
    return dataclasses.replace(evaluation, measurements=measurements)


def entry_of(report: dict[str, Any], method: str, rank: float) -> dict[str, Any]:
    (entry,) = [e for e in report["truncations"] if (e["method"], e["rank"]) == (method, rank)]
    return entry


def with_checkpoints(evaluation: Evaluation) -> Evaluation:
    """The evaluation with two exported checkpoints: its first truncation, a little off, and a random one."""
    first = evaluation.measurements[0]
    generator = np.random.default_rng(9)
    off = {
        name: values * (1 + 1e-3 * generator.normal(size=DOCUMENTS)) for name, values in first.values.items()
    }
    rank, removed = RANKS[1]
    one = Measurement("random", rank, removed, 60 - removed, make_values(generator, (1, DOCUMENTS)))
    checkpoints = [
        StoredMeasurement(
            "some/fisher-0.05", "float32", "ab" * 32, True, dataclasses.replace(first, values=off)
        ),
        StoredMeasurement("some/random-0.2", "float32", "cd" * 32, False, one),
    ]
    return dataclasses.replace(evaluation, checkpoints=checkpoints)
