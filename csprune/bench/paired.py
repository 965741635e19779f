"""Pair two models' answers to the same items, and the statistics of the paired difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest, t

from csprune.bench.harness import Item
from csprune.bench.tasks import Aggregation
from csprune.bootstrap import LEVEL
from csprune.errors import CspruneError

DRAWS = 1000
"""Paired bootstrap draws where the difference has no closed standard error."""

SLOW_DRAWS = {"bleu": 100, "chrf": 100, "chrf++": 100, "ter": 100}
"""As many as lm-eval itself draws where an aggregation reads all texts again."""

_EQUAL = 1e-9  # relative: lm-eval's value and the one recomputed differ by the order of a sum at most


@dataclass(frozen=True)
class Difference:
    """What changed from one model to another, and how sure that is.

    Attributes:
        value: The other model's value less the original's.
        stderr: Its standard error over items, the two models paired.
        interval: 95%, of items like these.
    """

    value: float
    stderr: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Flips:
    """Items that one model gets right and the other wrong.

    Attributes:
        gained: Wrong at first, right then.
        lost: Right at first, wrong then.
        unchanged: The others.
        p_value: McNemar's exact two-sided test that an item is as likely to be gained as to be lost.
    """

    gained: int
    lost: int
    unchanged: int
    p_value: float


def check_pairs(task: str, original: Sequence[Item], other: Sequence[Item], name: str) -> None:
    """Refuse models that did not answer the very same items in the same order.

    Raises:
        CspruneError: Items are missing, twice there, in another order, or of another document, prompt,
            target or set of metrics; with the counts.
    """
    keys = [[(each.doc_id, each.filter) for each in items] for items in (original, other)]
    counts = [Counter(each) for each in keys]
    problems = {
        "missing": sum((counts[0] - counts[1]).values()),
        "too many": sum((counts[1] - counts[0]).values()),
        "repeated": sum(count - 1 for count in counts[0].values()),
    }
    if keys[0] != keys[1] and not any(problems.values()):
        problems["in another order"] = sum(a != b for a, b in zip(*keys, strict=True))
    if keys[0] == keys[1]:
        pairs = list(zip(original, other, strict=True))
        for place, what in enumerate(("document", "prompt", "target")):
            problems[f"of another {what}"] = sum(a.hashes[place] != b.hashes[place] for a, b in pairs)
        problems["with other metrics"] = sum(set(a.values) != set(b.values) for a, b in pairs)
    if any(problems.values()):
        found = ", ".join(f"{count} {what}" for what, count in problems.items() if count)
        raise CspruneError(
            f"{name} did not answer the same items of {task} as the original ({found} of {len(original)}): "
            "nothing can be paired; check that the task's data and prompts do not depend on the model"
        )


def check_value(what: str, reported: float, again: float, items: int) -> None:
    """Refuse items that do not give the value that lm-eval reported.

    Args:
        what: Metric and task.
        reported: By lm-eval.
        again: What the items give.
        items: How many.

    Raises:
        CspruneError: The two differ, or are no numbers.
    """
    if not math.isfinite(reported) or not math.isclose(again, reported, rel_tol=_EQUAL, abs_tol=1e-12):
        raise CspruneError(
            f"lm-eval reports {reported} for {what}, but its {items} items give {again}: csprune cannot pair "
            "this metric; leave its task out"
        )


def compare(
    what: str,
    aggregation: Aggregation,
    original: Sequence[Any],
    others: Sequence[Sequence[Any]],
    seed: int = 0,
) -> list[Difference]:
    """The paired difference of each model from the original.

    A mean's is the mean of the items' differences, with its sample standard deviation over sqrt(n) and
    Student's t. Any other aggregation is resampled: every draw takes the same items of all models.

    Args:
        what: Metric and task, for messages.
        aggregation: Of the metric.
        original: By item.
        others: By model and item, in the same order.
        seed: Of the draws.

    Raises:
        CspruneError: Less than two items, or the metric is not a number in some draw.
    """
    if len(original) < 2:
        raise CspruneError(f"{what} has {len(original)} item: a standard error takes two")
    if aggregation.name == "mean":
        return [paired_mean(original, other) for other in others]
    draws = SLOW_DRAWS.get(aggregation.name or "", DRAWS)
    values = replicates(aggregation, [original, *others], draws, seed)
    if bad := int((~np.isfinite(values)).any(axis=1).sum()):
        raise CspruneError(f"{what} is no number in {bad} of {draws} resamplings: give it more items")
    observed = [aggregation.function(list(each)) for each in (original, *others)]
    tail = 100 * (1 - LEVEL) / 2
    found: list[Difference] = []
    for place in range(1, len(observed)):
        spread = values[:, place] - values[:, 0]
        low, high = np.percentile(spread, [tail, 100 - tail])
        found.append(
            Difference(
                float(observed[place] - observed[0]), float(spread.std(ddof=1)), (float(low), float(high))
            )
        )
    return found


def paired_mean(original: Sequence[float], other: Sequence[float]) -> Difference:
    """The difference of two means over the same items: `mean(d) +- t sd(d) / sqrt(n)`."""
    change = np.asarray(other, dtype=np.float64) - np.asarray(original, dtype=np.float64)
    value, stderr = float(change.mean()), float(change.std(ddof=1) / math.sqrt(len(change)))
    reach = float(t.ppf((1 + LEVEL) / 2, len(change) - 1)) * stderr
    return Difference(value, stderr, (value - reach, value + reach))


def replicates(
    aggregation: Aggregation, models: Sequence[Sequence[Any]], draws: int, seed: int
) -> np.ndarray:
    """The value of each model in each bootstrap draw [draws, models]; a draw takes the same items of all.

    The perplexities are computed from sums, the others by lm-eval's own function.
    """
    items = len(models[0])
    rng = np.random.default_rng(seed)
    values = np.empty((draws, len(models)))
    from_sums = _FROM_SUMS.get(aggregation.name or "")
    # [models, items, parts]: a log-likelihood, or one with its weight.
    sums = None if from_sums is None else np.array(models, dtype=np.float64).reshape(len(models), items, -1)
    for draw in range(draws):
        drawn = rng.integers(items, size=items)
        if from_sums is None or sums is None:
            values[draw] = [aggregation.function([model[place] for place in drawn]) for model in models]
        else:
            counts = np.bincount(drawn, minlength=items)
            values[draw] = from_sums(np.einsum("i,mip->pm", counts, sums), items)
    return values


_FROM_SUMS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "perplexity": lambda sums, items: np.exp(-sums[0] / items),
    "weighted_perplexity": lambda sums, _items: np.exp(-sums[0] / sums[1]),
    "bits_per_byte": lambda sums, _items: -sums[0] / sums[1] / math.log(2),
}
"""By aggregation: the models' values from the sums [parts, models] over a draw's items."""


def flips(original: Sequence[Any], other: Sequence[Any]) -> Flips | None:
    """How many items changed sides; None where an item is more than right (1) or wrong (0)."""
    try:
        a, b = (np.asarray(each, dtype=np.float64) for each in (original, other))
    except (TypeError, ValueError):
        return None
    if a.ndim != 1 or not np.isin(np.concatenate([a, b]), (0, 1)).all():
        return None
    return flips_of(int((b > a).sum()), int((b < a).sum()), len(a))


def flips_of(gained: int, lost: int, items: int) -> Flips:
    """The counts, with McNemar's test: of the items that changed, how many would a fair coin have gained?"""
    p_value = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return Flips(gained, lost, items - gained - lost, p_value)


def combine(differences: Sequence[Difference], weights: Sequence[float], items: Sequence[int]) -> Difference:
    """The difference of a weighted mean over tasks that share no item.

    Args:
        differences: By task.
        weights: By task; they sum to 1.
        items: By task, for the degrees of freedom (Welch and Satterthwaite).
    """
    value = sum(w * each.value for w, each in zip(weights, differences, strict=True))
    parts = [(w * each.stderr) ** 2 for w, each in zip(weights, differences, strict=True)]
    variance = sum(parts)
    if variance == 0:
        return Difference(value, 0.0, (value, value))
    freedom = variance**2 / sum(part**2 / (n - 1) for part, n in zip(parts, items, strict=True))
    reach = float(t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(variance)
    return Difference(value, math.sqrt(variance), (value - reach, value + reach))
