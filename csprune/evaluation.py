"""What truncations do to a model's predictions, document by document.

States are computed once and serve every truncation. A truncation changes the logits by the low-rank
`W du`, added to the unchanged ones; truncations that are nested (a method at several ranks) cost only their
additional directions. (DESIGN section 2; paper, Section 2.2 and 5.1.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from csprune.calibration import BATCH_SIZE, check_run, model_name, versions
from csprune.corpus import Windows, count_shared
from csprune.errors import InputError
from csprune.linalg import haar_columns
from csprune.measurement import QUANTITIES, Evaluation, Measurement
from csprune.measures import Prediction, measure_nested
from csprune.readout import Readout
from csprune.truncation import Truncation
from csprune.unembedding import Unembedding

RANDOM_SUBSPACES = 8
# Elements of a [tokens, V] matrix held at once (32 MiB in float32).
CHUNK_ELEMENTS = 1 << 23


@dataclass
class _Family:
    """Nested removals about one mean: `du = -left[:, :m] right[:, :m]^T (u - mu)` for each m.

    Attributes:
        sizes: m, ascending.
        right: float64 [q, largest m].
        mean: mu, float64 [q].
        metric: left^T (W^T W) left, float64 [m, m]: D without a pass over the vocabulary.
        image: -W left [V, largest m], compute dtype.
    """

    sizes: list[int]
    right: torch.Tensor
    mean: torch.Tensor
    metric: torch.Tensor
    image: torch.Tensor


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
    with torch.no_grad():
        entries, families = _families(readout, truncations, random_subspaces, seed)
        base = torch.zeros(len(windows), dtype=torch.float64)
        values = [
            {m: torch.zeros(len(QUANTITIES), len(windows), dtype=torch.float64) for m in family.sizes}
            for family in families
        ]
        for first in range(0, len(windows), batch_size):
            if progress:
                progress(first, len(windows))
            batch = slice(first, min(first + batch_size, len(windows)))
            start = windows.sequence_length - 1 if positions == "last" else skip_first
            u = readout.states(windows.input_ids[batch])[:, start:]
            targets = windows.target_ids[batch, start:].to(u.device)
            tokens = _measure(readout.unembedding, u.flatten(0, 1), targets.flatten(), families)
            shape = targets.shape
            base[batch] = tokens.base_loss.view(shape).mean(1).cpu()
            for family_values, measured in zip(values, tokens.families, strict=True):
                for m, figures in measured.items():
                    family_values[m][:, batch] = figures.view(len(QUANTITIES), *shape).mean(2).cpu()
        if progress:
            progress(len(windows), len(windows))
    measurements = [
        Measurement(method, rank, m, readout.unembedding.width - m, _arrays(values, where, m, method))
        for method, rank, m, where in entries
    ]
    record = {
        "positions": positions,
        "skip_first": skip_first,
        "random_subspaces": random_subspaces,
        "seed": seed,
        "batch_size": batch_size,
        "evaluation": windows.describe(),
        "calibration": truncations[0].calibration.details,
        "versions": versions(),
        **(protocol or {}),
    }
    return Evaluation(name, record, windows.document_ids, windows.blocks.numpy(), base.numpy(), measurements)


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
    if shared := count_shared(windows, truncations[0].calibration.documents):
        raise InputError(
            f"{shared} of {len(windows)} evaluation documents also calibrated the truncation: "
            "give other evaluation text"
        )
    return readout


def _families(readout: Readout, truncations: Sequence[Truncation], subspaces: int, seed: int):
    """Group what is nested. Entries are (method, rank, m, indices of families)."""
    unembedding = readout.unembedding
    ranks = list(dict.fromkeys((t.rank, t.removed) for t in truncations))
    by_method: dict[str, list[Truncation]] = {}
    for truncation in truncations:
        if truncation.method != "random":
            by_method.setdefault(truncation.method, []).append(truncation)
    removals: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []  # sizes, left, right
    entries: list[tuple[str, float, int, list[int]]] = []
    for members in by_method.values():
        entries += [(t.method, t.rank, t.removed, [len(removals)]) for t in members]
        largest = max(members, key=lambda t: t.removed).projection
        sizes = sorted({t.removed for t in members})
        removals.append((sizes, largest.removed_left, largest.removed_right))
    sizes = sorted({removed for _, removed in ranks})
    where = list(range(len(removals), len(removals) + subspaces))
    for i in range(subspaces):
        basis = haar_columns(unembedding.width, sizes[-1], seed + i).to(unembedding.device)
        removals.append((sizes, basis, basis))
    entries += [("random", rank, removed, where) for rank, removed in ranks]
    # One pass over the head for all of them.
    joined = torch.cat([left for _, left, _ in removals], 1)
    images = unembedding.along(-joined, unembedding.compute_dtype)
    columns = [left.shape[1] for _, left, _ in removals]
    families = [
        _Family(each, right, truncations[0].mean_state, left.mT @ unembedding.gram @ left, image)
        for (each, left, right), image in zip(removals, images.split(columns, 1), strict=True)
    ]
    return entries, families


@dataclass
class _Tokens:
    """Figures of one batch's tokens: float64 [tokens] and [quantities, tokens] by family and m."""

    base_loss: torch.Tensor
    families: list[dict[int, torch.Tensor]]


def _measure(
    unembedding: Unembedding, u: torch.Tensor, targets: torch.Tensor, families: list[_Family]
) -> _Tokens:
    base: list[torch.Tensor] = []
    parts: list[list[dict[int, torch.Tensor]]] = [[] for _ in families]
    chunk = max(1, CHUNK_ELEMENTS // unembedding.vocabulary)
    for part, next_tokens in zip(u.split(chunk), targets.split(chunk), strict=True):
        prediction = Prediction.of(unembedding, part, next_tokens)
        base.append(prediction.loss)
        for family, measured in zip(families, parts, strict=True):
            x = (part - family.mean) @ family.right
            measured.append(measure_nested(prediction, x, family.image, family.metric, family.sizes))
    return _Tokens(
        torch.cat(base),
        [{m: torch.cat([figures[m] for figures in measured], 1) for m in measured[0]} for measured in parts],
    )


def _arrays(values: list[dict[int, torch.Tensor]], where: list[int], m: int, method: str):
    stacked = torch.stack([values[i][m] for i in where])  # [families, quantities, documents]
    figures = stacked.transpose(0, 1) if method == "random" else stacked[0]
    return {name: figures[i].numpy() for i, name in enumerate(QUANTITIES)}
