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
from csprune.errors import CspruneError, InputError
from csprune.linalg import haar_columns
from csprune.measurement import QUANTITIES, Evaluation, Measurement
from csprune.readout import Readout
from csprune.truncation import Truncation
from csprune.unembedding import Unembedding

RANDOM_SUBSPACES = 8
# Elements of a [tokens, V] matrix held at once: a few such matrices should stay in the cache.
CHUNK_ELEMENTS = 1 << 22


@dataclass
class _Family:
    """Nested removals about one mean: `du = -left[:, :m] right[:, :m]^T (u - mu)` for each m.

    Attributes:
        sizes: m, ascending.
        right: float64 [q, largest m].
        mean: mu, float64 [q].
        metric: left^T (W^T W) left, float64 [m, m]: D without a pass over the vocabulary.
        image: -W left [V, largest m], compute dtype.
        left: float64 [q, largest m].
    """

    sizes: list[int]
    left: torch.Tensor
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
    families: list[_Family] = []
    entries: list[tuple[str, float, int, list[int]]] = []
    mean = truncations[0].mean_state
    for members in by_method.values():
        entries += [(t.method, t.rank, t.removed, [len(families)]) for t in members]
        largest = max(members, key=lambda t: t.removed).projection
        sizes = sorted({t.removed for t in members})
        families.append(_family(unembedding, sizes, largest.removed_left, largest.removed_right, mean))
    sizes = sorted({removed for _, removed in ranks})
    where = list(range(len(families), len(families) + subspaces))
    for i in range(subspaces):
        basis = haar_columns(unembedding.width, sizes[-1], seed + i).to(unembedding.device)
        families.append(_family(unembedding, sizes, basis, basis, mean))
    entries += [("random", rank, removed, where) for rank, removed in ranks]
    return entries, families


def _family(unembedding: Unembedding, sizes, left, right, mean) -> _Family:
    metric = left.mT @ unembedding.gram @ left
    image = unembedding.along(-left, unembedding.compute_dtype)
    return _Family(sizes, left, right, mean, metric, image)


@dataclass
class _Tokens:
    """Figures of one batch's tokens: float64 [tokens] and [quantities, tokens] by family and m."""

    base_loss: torch.Tensor
    families: list[dict[int, torch.Tensor]]


def _measure(
    unembedding: Unembedding, u: torch.Tensor, targets: torch.Tensor, families: list[_Family]
) -> _Tokens:
    coordinates = [(u - f.mean) @ f.right for f in families]
    base = torch.empty(len(u), dtype=torch.float64, device=u.device)
    measured = [
        {m: torch.empty(len(QUANTITIES), len(u), dtype=torch.float64, device=u.device) for m in f.sizes}
        for f in families
    ]
    chunk = max(1, CHUNK_ELEMENTS // unembedding.vocabulary)
    for rows in (slice(i, min(i + chunk, len(u))) for i in range(0, len(u), chunk)):
        prediction = _Prediction.of(unembedding, u[rows], targets[rows])
        base[rows] = prediction.loss
        for family, x, figures in zip(families, coordinates, measured, strict=True):
            _measure_family(prediction, family, x[rows], figures, rows)
    return _Tokens(base, measured)


@dataclass
class _Prediction:
    """The unchanged prediction of a chunk of tokens.

    Attributes:
        before_cap: The head's output [tokens, V] under a soft cap, else None.
        slope: J [tokens, V] under a soft cap, else None.
    """

    unembedding: Unembedding
    before_cap: torch.Tensor | None
    slope: torch.Tensor | None
    log_probabilities: torch.Tensor
    probabilities: torch.Tensor
    targets: torch.Tensor
    loss: torch.Tensor
    top: torch.Tensor

    @classmethod
    def of(cls, unembedding: Unembedding, u: torch.Tensor, targets: torch.Tensor) -> _Prediction:
        output = unembedding.head_output(u)
        logits = unembedding.transform(output)
        capped = unembedding.transform.cap is not None
        log_p = torch.log_softmax(logits, 1)
        targets = targets.unsqueeze(1)
        loss = -log_p.gather(1, targets).squeeze(1).double()
        finite = torch.isfinite(loss) & torch.isfinite(logits).all(1)
        if not bool(finite.all()):
            raise CspruneError(
                f"the logits of {int((~finite).sum())} of {len(finite)} evaluation tokens of one chunk "
                "are not finite: check the model's weights"
            )
        return cls(
            unembedding,
            output if capped else None,
            unembedding.transform.slope(logits),
            log_p,
            log_p.exp(),
            targets,
            loss,
            logits.argmax(1),
        )

    def figures(self, mapped: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """The five quantities, float64 [5, tokens], of the change `W du` [tokens, V].

        `distance` is `||W du||^2`, float64 [tokens], which is D where the logits are not capped.
        """
        if self.before_cap is None:
            change = fisher = mapped
        else:
            assert self.slope is not None  # both belong to the soft cap
            changed = self.unembedding.transform(self.before_cap + mapped)
            change = changed - self.unembedding.transform(self.before_cap)
            fisher = mapped * self.slope
            distance = (change - change.mean(1, keepdim=True)).square().sum(1).double()
        mean = _expectation(self.probabilities, change)
        fisher_mean = mean if fisher is change else _expectation(self.probabilities, fisher)
        deviation = (fisher - fisher_mean.to(fisher.dtype).unsqueeze(1)).square_()
        fisher_term = _expectation(self.probabilities, deviation) / 2
        changed = torch.add(self.log_probabilities, change, out=deviation)
        top = changed.argmax(1)
        target_change = change.gather(1, self.targets).squeeze(1).double()
        # log sum exp of log p + change: 0 for no change, so that K has no large terms to cancel.
        normaliser = torch.logsumexp(changed, 1).double()
        loss_change = normaliser - target_change
        return torch.stack(
            [loss_change, distance, fisher_term, normaliser - mean, (top == self.top).double()]
        )


def _measure_family(
    prediction: _Prediction,
    family: _Family,
    coordinates: torch.Tensor,
    figures: dict[int, torch.Tensor],
    rows: slice,
) -> None:
    dtype = family.image.dtype
    mapped = torch.zeros_like(prediction.probabilities)
    done = 0
    for m in family.sizes:
        mapped.addmm_(coordinates[:, done:m].to(dtype), family.image[:, done:m].mT)
        part = coordinates[:, :m]
        distance = ((part @ family.metric[:m, :m]) * part).sum(1)
        figures[m][:, rows] = prediction.figures(mapped, distance)
        done = m


def _expectation(probabilities: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """sum_j p_j values_j, float64 [tokens]."""
    return torch.linalg.vecdot(probabilities, values).double()


def _arrays(values: list[dict[int, torch.Tensor]], where: list[int], m: int, method: str):
    stacked = torch.stack([values[i][m] for i in where])  # [families, quantities, documents]
    figures = stacked.transpose(0, 1) if method == "random" else stacked[0]
    return {name: figures[i].numpy() for i, name in enumerate(QUANTITIES)}
