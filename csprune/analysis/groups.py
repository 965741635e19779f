"""Documents in groups of equal size, in the order of a figure: deciles and thirds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from csprune.analysis.estimates import Sample
from csprune.analysis.results import Estimate
from csprune.bootstrap import Resampling, ratio


def ordered_groups(key: np.ndarray, count: int) -> np.ndarray:
    """The group of each document, from 0, the smallest keys first: int64 [documents].

    Groups have `round(g n / count) .. round((g + 1) n / count)` documents; equal keys keep their order. With
    fewer documents than groups there are as many groups as documents.
    """
    count = min(count, len(key))
    edges = [round(g * len(key) / count) for g in range(count + 1)]
    found = np.empty(len(key), dtype=np.int64)
    order = np.argsort(key, kind="stable")
    for group in range(count):
        found[order[edges[group] : edges[group + 1]]] = group
    return found


def group_means(
    values: Mapping[str, np.ndarray], groups: np.ndarray, resampling: Resampling
) -> list[dict[str, Estimate]]:
    """The means of values over the documents of each group.

    The documents of a group are kept, while the draws differ in how often each is there; where some draw has
    none of a group's documents, its mean has no interval.

    Args:
        values: float64 [documents] by name.
        groups: Of each document.
        resampling: The draws of all documents.
    """
    found = []
    for group in range(groups.max() + 1):
        inside = (groups == group).astype(np.float64)
        sample = Sample({"": inside, **{name: each * inside for name, each in values.items()}}, resampling)
        found.append({name: sample.estimate(lambda m, name=name: ratio(m[name], m[""])) for name in values})
    return found
