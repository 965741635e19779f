"""What truncations do to a model's predictions, document by document.

States are computed once and serve every truncation. A truncation changes the logits by the low-rank
`W du`, added to the unchanged ones; truncations that are nested (a method at several ranks) cost only their
additional directions. (README, Definitions; paper, Section 2.2 and 5.1.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from csprune.batches import batches, tokens_at_once
from csprune.calibration import BATCH_SIZE, check_run
from csprune.changes import Prediction, measure_nested
from csprune.corpus import Windows, count_shared
from csprune.errors import InputError
from csprune.identity import model_name, versions
from csprune.linalg import haar_columns
from csprune.measurement import QUANTITIES, REFERENCE, Evaluation, Measurement
from csprune.readout import Readout
from csprune.truncation import Truncation
from csprune.unembedding import Unembedding

RANDOM_SUBSPACES = 8


@dataclass(frozen=True)
class _Family:
    """Nested removals about one mean: `du = -left[:, :m] right[:, :m]^T (u - mu)` for each m.

    Attributes:
        sizes: m, ascending.
        left: float64 [q, largest m].
        right: float64 [q, largest m].
    """

    sizes: list[int]
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class _Mapped:
    """What a family's coordinates `x = right^T (u - mu)` do to the logits: `W du = image x`.

    Attributes:
        image: -W left [V, largest m], compute dtype.
        metric: left^T (W^T W) left, float64 [largest m, largest m]: D without a pass over the vocabulary.
    """

    image: torch.Tensor
    metric: torch.Tensor


@dataclass(frozen=True)
class _Entry:
    """One measurement to make, and the families (several for random) whose figures at m it is made of."""

    method: str
    rank: float
    removed: int
    families: list[int]


# Figures of one family's removals by m: float64 [quantities, tokens or documents].
_Figures = dict[int, torch.Tensor]


def evaluate(
    model: Any,
    windows: Windows,
    truncations: Sequence[Truncation],
    *,
    positions: str = "all",
    skip_first: int = 0,
    random_subspaces: int = RANDOM_SUBSPACES,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    name: str | None = None,
    protocol: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure truncations of one model on held-out documents, each beside random truncation.

    Args:
        model: The model that was truncated (its original head in place).
        windows: Held-out windows.
        truncations: Of this model; at most one for each (method, rank). Those of method "random" are not
            needed: every rank gets `random_subspaces` seeded, nested subspaces.
        positions: "all": a document's value is the mean over its positions; "last": its last position.
        skip_first: Positions left out at each document's beginning.
        random_subspaces: Number of reference subspaces.
        seed: Subspace i has seed `seed + i`.
        batch_size: Documents run at once.
        name: The model's name for the record.
        protocol: Further settings for the record.
        progress: Called with (documents done, documents).

    Returns:
        The evaluation: float64 values per document; statistics are `csprune.report`'s.

    Raises:
        InputError: Impossible settings, truncations of other models or about different means, or documents
            that calibrated a truncation.
        CspruneError: Logits that are not finite, with counts; nothing is ever left out.
    """
    name = name or model_name(model)
    check_run(model, windows, positions, skip_first, batch_size, name)
    readout = _check(model, windows, truncations, random_subspaces)
    unembedding, mean = readout.unembedding, truncations[0].mean_state
    entries, families = _plan(readout, truncations, random_subspaces, seed)
    base = torch.zeros(2, len(windows), dtype=torch.float64)
    values: list[_Figures] = [
        {m: torch.zeros(len(QUANTITIES), len(windows), dtype=torch.float64) for m in family.sizes}
        for family in families
    ]
    with torch.no_grad():
        mapped = _map(unembedding, families)
        for batch, u, targets in batches(readout, windows, positions, skip_first, batch_size, progress):
            shape = targets.shape
            of_base, figures = _measure(
                unembedding, u.flatten(0, 1), targets.flatten(), mean, families, mapped
            )
            base[:, batch] = of_base.view(2, *shape).mean(2).cpu()
            for of_documents, of_tokens in zip(values, figures, strict=True):
                for m, each in of_tokens.items():
                    of_documents[m][:, batch] = each.view(len(QUANTITIES), *shape).mean(2).cpu()
    measurements = [
        Measurement(
            entry.method,
            entry.rank,
            entry.removed,
            unembedding.width - entry.removed,
            _arrays([values[i][entry.removed] for i in entry.families], entry.method),
        )
        for entry in entries
    ]
    record = {
        "positions": positions,
        "skip_first": skip_first,
        "random_subspaces": random_subspaces,
        "seed": seed,
        "batch_size": batch_size,
        "evaluation": windows.describe(),
        "calibration": truncations[0].calibration.details,
        "effective_rank": next((t.effective_rank for t in truncations if t.effective_rank is not None), None),
        "versions": versions(),
        **(protocol or {}),
    }
    loss, entropy = base.numpy()
    return Evaluation(name, record, windows.document_ids, windows.blocks.numpy(), loss, entropy, measurements)


def _check(model: Any, windows: Windows, truncations: Sequence[Truncation], random_subspaces: int) -> Readout:
    if not truncations:
        raise InputError("nothing to evaluate: give at least one truncation")
    if random_subspaces < 1:
        raise InputError("random_subspaces must be at least 1: every figure stands beside random truncation")
    readout = truncations[0].readout
    for truncation in truncations:
        if truncation.readout.model is not model:
            raise InputError("a truncation was made of another model object: load_readout() this one")
        if not torch.equal(truncation.mean_state, truncations[0].mean_state):
            raise InputError("the truncations have different calibrations: evaluate those of one at a time")
    counts = Counter((t.method, t.rank) for t in truncations if t.method != REFERENCE)
    for (method, rank), count in counts.items():
        if count > 1:
            raise InputError(f"{method} at rank {rank:g} is there {count} times: give each once")
    readout.check_unchanged()
    if shared := count_shared(windows, truncations[0].calibration.documents):
        raise InputError(
            f"{shared} of {len(windows)} evaluation documents also calibrated the truncation: "
            "give other evaluation text"
        )
    return readout


def _plan(
    readout: Readout, truncations: Sequence[Truncation], subspaces: int, seed: int
) -> tuple[list[_Entry], list[_Family]]:
    """Group what is nested: the ranks of a method, and those of each random subspace."""
    unembedding = readout.unembedding
    by_method: dict[str, list[Truncation]] = {}
    for truncation in truncations:
        if truncation.method != REFERENCE:
            by_method.setdefault(truncation.method, []).append(truncation)
    entries: list[_Entry] = []
    families: list[_Family] = []
    for members in by_method.values():
        entries += [_Entry(t.method, t.rank, t.removed, [len(families)]) for t in members]
        largest = max(members, key=lambda t: t.removed).projection
        sizes = sorted({t.removed for t in members})
        families.append(_Family(sizes, largest.removed_left, largest.removed_right))
    ranks = list(dict.fromkeys((t.rank, t.removed) for t in truncations))
    sizes = sorted({removed for _, removed in ranks})
    where = list(range(len(families), len(families) + subspaces))
    entries += [_Entry(REFERENCE, rank, removed, where) for rank, removed in ranks]
    for i in range(subspaces):
        basis = haar_columns(unembedding.width, sizes[-1], seed + i).to(unembedding.device)
        families.append(_Family(sizes, basis, basis))
    return entries, families


def _map(unembedding: Unembedding, families: list[_Family]) -> list[_Mapped]:
    """The images of all families, in one pass over the head."""
    joined = torch.cat([family.left for family in families], 1)
    images = unembedding.along(-joined, unembedding.compute_dtype)
    columns = [family.left.shape[1] for family in families]
    return [
        _Mapped(image, family.left.mT @ unembedding.gram @ family.left)
        for family, image in zip(families, images.split(columns, 1), strict=True)
    ]


def _measure(
    unembedding: Unembedding,
    u: torch.Tensor,
    targets: torch.Tensor,
    mean: torch.Tensor,
    families: list[_Family],
    mapped: list[_Mapped],
) -> tuple[torch.Tensor, list[_Figures]]:
    """The unchanged loss and entropy, float64 [2, tokens], and every family's figures; u is [tokens, q]."""
    base: list[torch.Tensor] = []
    parts: list[list[_Figures]] = [[] for _ in families]
    chunk = tokens_at_once(unembedding.vocabulary)
    for part, next_tokens in zip(u.split(chunk), targets.split(chunk), strict=True):
        prediction = Prediction.of(unembedding, part, next_tokens)
        base.append(torch.stack([prediction.loss, prediction.entropy]))
        for family, each, measured in zip(families, mapped, parts, strict=True):
            x = (part - mean) @ family.right
            measured.append(measure_nested(prediction, x, each.image, each.metric, family.sizes))
    figures = [
        {m: torch.cat([each[m] for each in measured], 1) for m in family.sizes}
        for family, measured in zip(families, parts, strict=True)
    ]
    return torch.cat(base, 1), figures


def _arrays(figures: list[torch.Tensor], method: str) -> dict[str, np.ndarray]:
    """By quantity float64 [documents], for random [subspaces, documents]."""
    stacked = torch.stack(figures)  # [families, quantities, documents]
    arrays = stacked.transpose(0, 1) if method == REFERENCE else stacked[0]
    return {name: array.numpy() for name, array in zip(QUANTITIES, arrays, strict=True)}
