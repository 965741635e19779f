"""Which document gives another its component: donors at random, and donors matched by token (paper, E.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from csprune.bootstrap import Resampling, Statistic, median_of_counted, ratio
from csprune.errors import InputError

_LEAST_GROUPS = 2


def random_donors(blocks: np.ndarray, seed: int) -> np.ndarray:
    """A donor for each document, another one of its block: int64 [documents].

    The documents of a block form one cycle in random order, so that each is the donor of exactly one.

    Raises:
        InputError: A block of a single document, which has no other.
    """
    generator = np.random.default_rng([seed, 3])
    donors = np.empty(len(blocks), dtype=np.int64)
    for label in np.unique(blocks):
        order = generator.permutation(np.flatnonzero(blocks == label))
        if len(order) < 2:
            raise InputError(
                f"confirmation block {label} has a single document, so that there is no donor in it: "
                "evaluate on more texts"
            )
        donors[order] = np.roll(order, -1)
    return donors


def matched_donors(candidates: np.ndarray, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Documents whose runner-up is another document's most probable token, and one such donor for each.

    Of several the one with the smallest SHA-256 of the recipient's and the donor's identity together.

    Args:
        candidates: The most probable tokens of each document, int64 [documents, at least 2].
        ids: One for each document.

    Returns:
        Recipients and their donors, int64 [pairs].
    """
    recipients, donors = [], []
    for recipient, runner_up in enumerate(candidates[:, 1]):
        able = [int(each) for each in np.flatnonzero(candidates[:, 0] == runner_up) if each != recipient]
        if able:
            keys = [hashlib.sha256(f"{ids[recipient]}{ids[each]}".encode()).digest() for each in able]
            recipients.append(recipient)
            donors.append(able[keys.index(min(keys))])
    return np.array(recipients, dtype=np.int64), np.array(donors, dtype=np.int64)


def linked_groups(recipients: np.ndarray, donors: np.ndarray) -> np.ndarray:
    """The group of each pair: pairs that share a document, or are linked by such, are one. int64 [pairs]."""
    if not len(recipients):
        return np.empty(0, dtype=np.int64)
    documents = int(max(recipients.max(), donors.max())) + 1
    links = coo_array((np.ones(len(donors)), (recipients, donors)), shape=(documents, documents))
    _, of_document = connected_components(links, directed=False)
    return np.unique(of_document[recipients], return_inverse=True)[1].reshape(-1)


def grouped_medians(values: np.ndarray, groups: np.ndarray, draws: int, seed: int) -> list[Statistic]:
    """Medians over pairs, whose groups are what is drawn again.

    Args:
        values: float64 [pairs, columns], finite; at least one pair.
        groups: Of each pair, from 0.
        draws: Of the bootstrap; each takes as many groups as there are, with replacement.
        seed: Of the draws.

    Returns:
        For each column the median, without draws where there is a single group.
    """
    medians = np.median(values, axis=0)
    count = int(groups.max()) + 1
    if count < _LEAST_GROUPS:
        return [Statistic(float(each), None) for each in medians]
    orders = np.argsort(values, axis=0, kind="stable")
    samples = []
    for counts in Resampling(np.zeros(count, dtype=np.int64), draws, seed).counts():
        weights = counts[:, groups]
        columns = [
            median_of_counted(column[order], weights[:, order])
            for column, order in zip(values.T, orders.T, strict=True)
        ]
        samples.append(np.stack(columns))
    drawn = np.concatenate(samples, axis=1)
    return [Statistic(float(value), own) for value, own in zip(medians, drawn, strict=True)]


def grouped_means(values: np.ndarray, groups: np.ndarray, draws: int, seed: int) -> list[Statistic]:
    """Means over pairs; arguments and draws as of `grouped_medians`."""
    count = int(groups.max()) + 1
    if count < _LEAST_GROUPS:
        return [Statistic(float(each), None) for each in values.mean(axis=0)]
    sums = np.zeros((count, values.shape[1] + 1))
    np.add.at(sums, groups, np.column_stack([values, np.ones(len(values))]))
    *totals, sizes = Resampling(np.zeros(count, dtype=np.int64), draws, seed).statistics(sums)
    # A draw has as many groups as there are, of other sizes.
    found = [ratio(each, sizes) for each in totals]
    return [each for each in found if each is not None]
