"""What the analyses of one model share: its states at one position of each document, and the references.

Calibration documents give the mean state and all that is chosen by it, the evaluation documents the effects
(paper, Section 3 and Appendix C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from csprune.analysis.spaces import Change, Space, Subspace, band_slice
from csprune.bootstrap import DRAWS, Resampling
from csprune.calibration import Calibration
from csprune.changes import Prediction
from csprune.corpus import Windows
from csprune.errors import InputError
from csprune.evaluation import RANDOM_SUBSPACES
from csprune.linalg import STATE_RESOLUTION
from csprune.readout import Readout
from csprune.unembedding import Unembedding

BANDS = 20
Made = TypeVar("Made")
Progress = Callable[[int, int], None]
# Elements of one [documents, V] matrix held at once, in float64 a quarter of a gigabyte at most.
_CHUNK_ELEMENTS = 1 << 22
_LEAST_DOCUMENTS = 16
_CANDIDATES = 3


@dataclass(frozen=True, eq=False)
class States:
    """The states of documents at one position, and what they predict.

    Attributes:
        unembedding: Of the model.
        position: Counted from 1.
        u: float64 [documents, q].
        targets: The true next tokens, int64 [documents].
        blocks: int64 [documents].
        document_ids: One for each.
    """

    unembedding: Unembedding
    position: int
    u: torch.Tensor
    targets: torch.Tensor
    blocks: torch.Tensor
    document_ids: tuple[str, ...]

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.u)

    @property
    def correct(self) -> np.ndarray:
        """1 where the most probable token is the true next one, else 0: float64 [documents]."""
        return (self.outlook.candidates[:, 0] == self.targets).double().cpu().numpy()

    def check_varied(self) -> None:
        """Refuse states that are all the same but for rounding, as at a first token that all documents share.

        Raises:
            InputError: They are.
        """
        spread = (self.u - self.u.mean(0)).square().sum(1).amax().sqrt()
        if not float(spread) > STATE_RESOLUTION * float(self.u.square().sum(1).mean().sqrt()):
            raise InputError(
                f"the states at token {self.position} are the same in all {len(self)} documents, so that "
                "nothing can be removed: choose another --position or other text"
            )

    def chunks(self) -> list[slice]:
        """Documents whose predictions are held at once."""
        step = max(_LEAST_DOCUMENTS, _CHUNK_ELEMENTS // self.unembedding.vocabulary)
        return [slice(first, min(first + step, len(self))) for first in range(0, len(self), step)]

    def predict(self, documents: slice) -> Prediction:
        """The unchanged prediction of some documents."""
        return Prediction.of(self.unembedding, self.u[documents], self.targets[documents])

    @cached_property
    def outlook(self) -> Outlook:
        """What all documents predict, in a few numbers each."""
        return Outlook.of(self)


@dataclass(frozen=True, eq=False)
class Outlook:
    """The unchanged predictions of documents, in a few numbers each.

    Attributes:
        candidates: The three most probable tokens, int64 [documents, 3].
        log_probabilities: Theirs, float64 [documents, 3].
        loss: -log p(y), nats, float64 [documents].
        entropy: Nats, float64 [documents].
        probability: The mean probability of each token over the documents, float64 [V].
    """

    candidates: torch.Tensor
    log_probabilities: torch.Tensor
    loss: torch.Tensor
    entropy: torch.Tensor
    probability: torch.Tensor

    @classmethod
    def of(cls, states: States) -> Outlook:
        """Of all documents of some states."""
        parts: list[tuple[torch.Tensor, ...]] = []
        total = torch.zeros(states.unembedding.vocabulary, dtype=torch.float64, device=states.u.device)
        for documents in states.chunks():
            prediction = states.predict(documents)
            leading = prediction.log_probabilities.topk(min(_CANDIDATES, len(total)), dim=1)
            parts.append((leading.indices, leading.values.double(), prediction.loss, prediction.entropy))
            total += prediction.probabilities.sum(0, dtype=torch.float64)
        candidates, log_probabilities, loss, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(candidates, log_probabilities, loss, entropy, total / len(states))

    @property
    def margin(self) -> torch.Tensor:
        """The log-odds of the two leading candidates, nats, float64 [documents]."""
        return self.log_probabilities[:, 0] - self.log_probabilities[:, 1]


def take_states(
    readout: Readout,
    windows: Windows,
    positions: Sequence[int],
    batch_size: int,
    progress: Progress | None = None,
) -> dict[int, States]:
    """The states of documents at some positions, counted from 1, in one pass of the model.

    Raises:
        InputError: A position that the windows do not have.
    """
    length = windows.sequence_length
    if wrong := [each for each in positions if not 1 <= each <= length]:
        raise InputError(f"position {wrong[0]} is not between 1 and the {length} tokens of a document")
    read = windows.input_ids[:, : max(positions)]
    parts: list[torch.Tensor] = []
    chosen = torch.tensor([each - 1 for each in positions])
    for first in range(0, len(windows), batch_size):
        if progress:
            progress(first, len(windows))
        u = readout.states(read[first : first + batch_size])
        parts.append(u[:, chosen.to(u.device)])
    if progress:
        progress(len(windows), len(windows))
    u = torch.cat(parts)
    return {
        position: States(
            readout.unembedding,
            position,
            u[:, place].contiguous(),
            windows.target_ids[:, position - 1].to(u.device),
            windows.blocks,
            windows.document_ids,
        )
        for place, position in enumerate(positions)
    }


@dataclass(frozen=True, eq=False)
class Layout:
    """The bands of an unembedding and the random subspaces beside them: whatever does not depend on states.

    Attributes:
        unembedding: Of the model.
        bands: B.
        subspaces: Random subspaces of each reference.
        seed: Subspace i has seed `seed + i`.
    """

    unembedding: Unembedding
    bands: int
    subspaces: int
    seed: int

    @cached_property
    def space(self) -> Space:
        """The folded and centred basis."""
        return Space("centred", self.unembedding)

    @cached_property
    def band_subspaces(self) -> list[Subspace]:
        """The bands, the top one first."""
        return [self.space.subspace(self.space.band(b, self.bands)) for b in range(self.bands)]

    @cached_property
    def random(self) -> list[Subspace]:
        """Random subspaces of the largest band's size; a smaller band takes the first columns of each."""
        return self.space.random(max(each.size for each in self.band_subspaces), self.subspaces, self.seed)


@dataclass(frozen=True, eq=False)
class Study:
    """One model at one position of its documents.

    Attributes:
        readout: Of the model.
        calibration: States that give the mean and whatever is chosen.
        evaluation: States that the effects are measured on.
        bands: B.
        subspaces: Random subspaces of each reference.
        seed: Subspace i has seed `seed + i`; also of everything drawn and of the bootstrap.
        draws: Of the bootstrap.
        calibrate: Makes the calibration that truncations need, of the calibration documents.
        conditions: Makes studies of other positions, texts and models, one after the other, by name.
    """

    readout: Readout
    calibration: States
    evaluation: States
    bands: int = BANDS
    subspaces: int = RANDOM_SUBSPACES
    seed: int = 0
    draws: int = DRAWS
    calibrate: Callable[[Progress | None], Calibration] | None = None
    conditions: Callable[[Progress | None], Iterator[tuple[str, Study]]] | None = None
    _layout: Layout | None = None
    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.subspaces < 1:
            raise InputError("random_subspaces must be at least 1: every figure stands beside random changes")
        if self.bands < 2:
            raise InputError(f"{self.bands} band has no spectrum: give --bands at least 2")
        band_slice(0, self.bands, self.unembedding.width)

    def beside(self, calibration: States, evaluation: States) -> Study:
        """The same model, bands and random subspaces with other states."""
        return replace(self, calibration=calibration, evaluation=evaluation, _layout=self.layout)

    @property
    def unembedding(self) -> Unembedding:
        """Of the model."""
        return self.readout.unembedding

    @cached_property
    def layout(self) -> Layout:
        """Bands and random subspaces."""
        return self._layout or Layout(self.unembedding, self.bands, self.subspaces, self.seed)

    @property
    def space(self) -> Space:
        """The folded and centred basis."""
        return self.layout.space

    @property
    def random(self) -> list[Subspace]:
        """Random subspaces of the largest band's size."""
        return self.layout.random

    @cached_property
    def resampling(self) -> Resampling:
        """Draws of evaluation documents, stratified by block."""
        return Resampling(self.evaluation.blocks.numpy(), self.draws, self.seed)

    @cached_property
    def mean(self) -> torch.Tensor:
        """mu, float64 [q], over the calibration documents."""
        return self.calibration.u.mean(0)

    @cached_property
    def deviation(self) -> torch.Tensor:
        """`u - mu` of the evaluation documents, float64 [documents, q]."""
        return self.evaluation.u - self.mean

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What several analyses need, made by the first of them."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def has(self, name: str) -> bool:
        """Whether something is made already."""
        return name in self._made

    def band(self, number: int) -> Subspace:
        """Band `number`, from 0 the top; negative from the bottom."""
        return self.layout.band_subspaces[number]

    def references(self, size: int) -> list[Subspace]:
        """The random subspaces for a band of so many directions."""
        return [each.first(size) for each in self.random]

    def removal(self, number: int) -> Change:
        """Band `number`'s component replaced by its calibration mean: `du = -P_b (u - mu)`."""
        return self.band(number).removal(self.deviation)

    def random_removals(self, like: Change) -> list[Change]:
        """Random changes of a band change's dimension, not rescaled."""
        return [each.removal(self.deviation) for each in self.references(like.subspace.size)]
