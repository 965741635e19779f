"""The paired percentile bootstrap over documents, stratified by block.

Documents are resampled, never tokens. Every statistic of a report is made of the same draws, so
that differences and ratios are paired: what two truncations share on a document cancels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from csprune.errors import CspruneError, InputError

DRAWS = 20_000
LEVEL = 0.95


@dataclass(frozen=True, eq=False)
class Statistic:
    """A statistic of the documents.

    Attributes:
        value: The point estimate: the statistic of the documents as they are.
        samples: float64 [draws]: the statistic of every resampled set of documents; None where it
            is undefined in some of them, so that it has no interval.
    """

    value: float
    samples: np.ndarray | None

    def interval(self, level: float = LEVEL) -> tuple[float, float] | None:
        """The percentile interval, or None where the statistic has none."""
        return None if self.samples is None else interval(self.samples, level)


@dataclass(frozen=True, eq=False)
class Resampling:
    """Draws of documents with replacement within each block, all of them fixed by the seed.

    A draw takes from each block as many documents as the block has, so that block effects do not
    widen an interval. A block of one document is allowed; it is the same in every draw and thus
    adds nothing to the width.

    The draws are made anew by every call, always the same ones, and held a chunk at a time: memory
    does not grow with draws times documents.

    Attributes:
        blocks: int [documents]: the stratum of each document; any labels.
        draws: The number of draws.
        seed: Seeds one generator for each block, in the order of the sorted labels.
        chunk_counts: The most document counts held at once (8 bytes each, in three arrays). It
            changes no draw.

    Raises:
        InputError: If no block has 2 documents, there are no draws, or the seed is negative.
    """

    blocks: np.ndarray
    draws: int = DRAWS
    seed: int = 0
    chunk_counts: int = 1 << 20

    def __post_init__(self) -> None:
        if self.blocks.ndim != 1 or len(self.blocks) < 2:
            raise InputError(
                f"an interval over documents needs at least 2 of them, not {self.blocks.size}: "
                "evaluate on more or longer texts"
            )
        if np.unique(self.blocks, return_counts=True)[1].max() < 2:
            raise InputError(
                f"each of the {self.blocks.size} blocks has a single document, so that no draw differs from "
                "another: evaluate on more texts"
            )
        if self.draws < 1:
            raise InputError(f"the bootstrap needs at least 1 draw, not {self.draws}")
        if self.seed < 0:
            raise InputError(f"the seed of the bootstrap must be 0 or more, not {self.seed}")

    def means(self, values: np.ndarray) -> np.ndarray:
        """The mean over documents in every draw.

        Args:
            values: float64 [documents, columns].

        Returns:
            float64 [draws, columns]. Equal columns of `values` give bit-identical columns.

        Raises:
            CspruneError: If a value is not finite; the message has the counts.
        """
        distinct, of_column = self._distinct_columns(values)
        offset, strata = self._deviations(distinct)
        totals = np.zeros((self.draws, distinct.shape[1]))
        seeds = np.random.SeedSequence(self.seed).spawn(len(strata))
        for seed, deviations in zip(seeds, strata, strict=True):
            generator = np.random.default_rng(seed)
            rows = max(1, self.chunk_counts // len(deviations))
            for start in range(0, self.draws, rows):
                stop = min(start + rows, self.draws)
                counts = _draw_counts(generator, stop - start, len(deviations))
                totals[start:stop] += counts @ deviations
        return (offset + totals / len(values))[:, of_column]

    def observed(self, values: np.ndarray) -> np.ndarray:
        """The mean over the documents as they are: float64 [documents, columns] -> [columns].

        Raises:
            CspruneError: If a value is not finite; the message has the counts.
        """
        distinct, of_column = self._distinct_columns(values)
        offset, strata = self._deviations(distinct)
        total = sum((deviations.sum(axis=0) for deviations in strata), np.zeros(len(offset)))
        return (offset + total / len(values))[of_column]

    def statistics(self, values: np.ndarray) -> list[Statistic]:
        """The mean of each column of float64 [documents, columns], with its draws.

        Raises:
            CspruneError: If a value is not finite; the message has the counts.
        """
        observed, means = self.observed(values), self.means(values)
        return [
            Statistic(float(value), samples)
            for value, samples in zip(observed, np.ascontiguousarray(means.T), strict=True)
        ]

    def counts(self) -> Iterator[np.ndarray]:
        """How often each document is in each draw, a chunk of draws at a time: float64 [chunk, documents].

        The draws are those of `means`.
        """
        places = [np.flatnonzero(self.blocks == label) for label in np.unique(self.blocks)]
        seeds = np.random.SeedSequence(self.seed).spawn(len(places))
        generators = [np.random.default_rng(seed) for seed in seeds]
        rows = max(1, self.chunk_counts // len(self.blocks))
        for start in range(0, self.draws, rows):
            chunk = np.empty((min(rows, self.draws - start), len(self.blocks)))
            for generator, place in zip(generators, places, strict=True):
                chunk[:, place] = _draw_counts(generator, len(chunk), len(place))
            yield chunk

    def medians(self, values: np.ndarray) -> list[Statistic]:
        """The median over documents of each column of float64 [documents, columns], with its draws.

        Infinite values have their place at either end; a median that is infinite has no interval.

        Raises:
            CspruneError: If a value is NaN, with the count.
        """
        if wrong := int(np.isnan(values).sum()):
            raise CspruneError(f"{wrong} of {values.size} values have no place in an order: no median")
        orders = np.argsort(values, axis=0, kind="stable")
        samples = [np.empty(self.draws) for _ in orders.T]
        start = 0
        for counts in self.counts():
            stop = start + len(counts)
            for column, order, own in zip(values.T, orders.T, samples, strict=True):
                own[start:stop] = median_of_counted(column[order], counts[:, order])
            start = stop
        return [
            Statistic(float(value), own if np.isfinite(own).all() else None)
            for value, own in zip(np.median(values, axis=0), samples, strict=True)
        ]

    def _distinct_columns(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The checked values without repeated columns, and where each column went.

        A matrix product may add up two equal columns in different orders. Equal inputs must differ
        by exactly 0, so equal columns are computed once.
        """
        if values.ndim != 2 or len(values) != len(self.blocks):
            raise ValueError(
                f"values has shape {values.shape}, but there are {len(self.blocks)} documents: "
                "give [documents, columns]"
            )
        wrong = ~np.isfinite(values)
        if wrong.any():
            raise CspruneError(
                f"{int(wrong.sum())} of {wrong.size} values are not finite, in "
                f"{int(wrong.any(axis=1).sum())} of {len(wrong)} documents and "
                f"{int(wrong.any(axis=0).sum())} of {wrong.shape[1]} columns: "
                "no document may be dropped, so there is no mean"
            )
        distinct, of_column = np.unique(np.asarray(values, dtype=np.float64), axis=1, return_inverse=True)
        return distinct, of_column.reshape(-1)

    def _deviations(self, values: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Split off the first document of every block.

        What is constant within the blocks is then the same in every draw to the last bit, and the
        sums below cancel less.

        Returns:
            The mean of the blocks' first documents, weighted by block size, [columns]; and for each
            block the deviations from its first document, [documents of the block, columns].
        """
        offset = np.zeros(values.shape[1])
        strata = []
        for label in np.unique(self.blocks):
            of_block = values[self.blocks == label]
            offset += of_block[0] * (len(of_block) / len(values))
            strata.append(of_block - of_block[0])
        return offset, strata


def _draw_counts(generator: np.random.Generator, draws: int, documents: int) -> np.ndarray:
    """How often each document is drawn: multinomial, float64 [draws, documents].

    Counting uniform indices is about twice as fast as `Generator.multinomial`, and consumes the
    generator's stream draw by draw, so that chunks do not matter.
    """
    indices = generator.integers(0, documents, size=(draws, documents))
    indices += documents * np.arange(draws)[:, None]
    counts = np.bincount(indices.ravel(), minlength=draws * documents)
    return counts.reshape(draws, documents).astype(np.float64)


def median_of_counted(ascending: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The median of values [n] that are there as often as counts [draws, n] say; float64 [draws]."""
    reached = counts.cumsum(axis=1)
    half = reached[:, -1:] / 2
    low = ascending[(reached >= half).argmax(axis=1)]
    high = ascending[(reached > half).argmax(axis=1)]
    return np.where(low == high, low, (low + high) / 2)


def interval(samples: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """The percentile interval of bootstrap samples.

    Args:
        samples: float64 [draws].
        level: The probability inside, in (0, 1); the rest is split evenly.

    Returns:
        Its lower and upper end.

    Raises:
        ValueError: If the level is not in (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval must be in (0, 1), not {level}")
    tail = (1 - level) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


def difference(first: Statistic, second: Statistic) -> Statistic:
    """`first - second`, draw by draw."""
    value = first.value - second.value
    if first.samples is None or second.samples is None:
        return Statistic(value, None)
    return Statistic(value, first.samples - second.samples)


def ratio(numerator: Statistic | None, denominator: Statistic | None) -> Statistic | None:
    """`numerator / denominator`, draw by draw: of two means over documents, the ratio of sums.

    A ratio to something that is not positive says nothing (a loss change of random truncation may
    be negative), so there is none then: never an infinite or NaN one.

    Returns:
        None where the denominator's point estimate is not positive or either argument is None; a
        statistic without samples, thus without interval, where the denominator is not positive in
        some draw.
    """
    if numerator is None or denominator is None or denominator.value <= 0:
        return None
    with np.errstate(over="ignore"):
        value = float(np.float64(numerator.value) / denominator.value)
        if not np.isfinite(value):
            return None
        if numerator.samples is None or denominator.samples is None:
            return Statistic(value, None)
        if denominator.samples.min() <= 0:
            return Statistic(value, None)
        samples = numerator.samples / denominator.samples
    return Statistic(value, samples if np.isfinite(samples).all() else None)
