"""What changes of the state do to predictions, document by document.

`measure` gives the paper's quantities (Section 2.2) by the passes that the evaluation of truncations uses;
`observe` puts the whole changed logits in front of a function, for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from csprune.analysis.spaces import Change
from csprune.analysis.study import Progress, States
from csprune.changes import Prediction, check_finite, measure_nested
from csprune.measurement import QUANTITIES

Values = dict[str, np.ndarray]
"""By quantity float64 [documents], or [subspaces, documents] of a reference."""

CANDIDATE_SHIFTS = ("first_shift", "second_shift")
"""How the log-probabilities of the two leading candidates change, nats."""


def measure(
    states: States, changes: Mapping[str, Change], progress: Progress | None = None
) -> dict[str, Values]:
    """The quantities of changes of all documents.

    Args:
        states: The documents.
        changes: By name; of all documents each.
        progress: Called with (documents done, documents).

    Returns:
        For each change: `QUANTITIES`, `CANDIDATE_SHIFTS` and `squared_length`, float64 [documents].
    """
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in changes}
    for documents in states.chunks():
        if progress:
            progress(documents.start, len(states))
        prediction = states.predict(documents)
        candidates = states.outlook.candidates[documents]
        for name, change in changes.items():
            x, subspace = change.coordinates[documents], change.subspace
            figures = measure_nested(prediction, x, subspace.image, subspace.metric, [subspace.size])
            shifts = _shifts(prediction, x, change, candidates, figures[subspace.size])
            parts[name].append(torch.cat([figures[subspace.size], shifts]))
    if progress:
        progress(len(states), len(states))
    names = (*QUANTITIES, *CANDIDATE_SHIFTS)
    return {
        name: {
            **dict(zip(names, torch.cat(parts[name], 1).cpu().numpy(), strict=True)),
            "squared_length": change.squared_length.cpu().numpy(),
        }
        for name, change in changes.items()
    }


def _shifts(
    prediction: Prediction,
    x: torch.Tensor,
    change: Change,
    candidates: torch.Tensor,
    figures: torch.Tensor,
) -> torch.Tensor:
    """The change of log p of the two leading candidates, float64 [2, documents].

    `log p'(t) - log p(t) = c_t - log E_p[exp c]`, the normaliser from the loss change at the target.
    """
    tokens = torch.cat([candidates[:, :2], prediction.targets], 1)
    shifts = _logit_changes(prediction, x, change.subspace.image, tokens)
    loss_change = figures[QUANTITIES.index("loss_change")]
    normaliser = loss_change + shifts[:, 2]
    return (shifts[:, :2] - normaliser[:, None]).mT


def _logit_changes(
    prediction: Prediction, x: torch.Tensor, image: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """The change of some tokens' logits, float64 [documents, tokens]."""
    mapped = torch.einsum("dm,dtm->dt", x, image[tokens].double())
    if prediction.before_cap is None:
        return mapped
    transform = prediction.unembedding.transform
    before = prediction.before_cap.gather(1, tokens).double()
    return transform(before + mapped) - transform(before)


Beside = Mapping[str, tuple[Change, Sequence[Change]]]
"""By label: a change, and the random ones that it stands beside, of the length that they are to have."""


def flattened(changes: Beside) -> dict[str, Change]:
    """All changes by names of their own, as `measure` and `observe` take them."""
    flat: dict[str, Change] = {}
    for label, (own, random) in changes.items():
        flat[label] = own
        flat |= {_random_name(label, i): each for i, each in enumerate(random)}
    return flat


def paired(seen: Mapping[str, Values], changes: Beside) -> dict[str, tuple[Values, Values]]:
    """By label, what was seen of a change and of its random ones: [documents], and [subspaces, documents]."""
    found = {}
    for label, (_, random) in changes.items():
        parts = [seen[_random_name(label, i)] for i in range(len(random))]
        found[label] = seen[label], {key: np.stack([each[key] for each in parts]) for key in parts[0]}
    return found


def _random_name(label: str, subspace: int) -> str:
    return f"{label}\0{subspace}"


@dataclass(frozen=True, eq=False)
class Scene:
    """The unchanged predictions of some documents, in float64.

    Attributes:
        documents: Which ones.
        prediction: As it is measured elsewhere.
        u: Their states, float64 [documents, q].
        candidates: Their three most probable tokens, int64 [documents, 3].
    """

    documents: slice
    prediction: Prediction
    u: torch.Tensor
    candidates: torch.Tensor

    @cached_property
    def log_p(self) -> torch.Tensor:
        """float64 [documents, V], normalised in float64."""
        log_p = self.prediction.log_probabilities.double()
        return log_p - log_p.logsumexp(1, keepdim=True)

    @cached_property
    def p(self) -> torch.Tensor:
        """float64 [documents, V]."""
        return self.log_p.exp()

    @cached_property
    def mapped_state(self) -> torch.Tensor:
        """The head's output without its constant, `s W_out (gamma * z)`, float64 [documents, V]."""
        unembedding = self.prediction.unembedding
        scale = unembedding.transform.scale
        return scale * (unembedding.head_output(self.u).double() - unembedding.constant)

    def logit_change(self, change: Change) -> torch.Tensor:
        """What a change does to the logits, float64 [documents, V], up to a constant for each document."""
        image = change.subspace.image
        return self.after_head((change.coordinates[self.documents].to(image.dtype) @ image.mT).double())

    def after_head(self, mapped: torch.Tensor) -> torch.Tensor:
        """The change of the logits for one of the head's output (times the logit scale)."""
        output = self.prediction.before_cap
        if output is None:
            return mapped
        transform, output = self.prediction.unembedding.transform, output.double()
        return transform(output + mapped) - transform(output)

    def divergence(self, c: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """KL(p || p') after logits change by c, both at a temperature: nats, float64 [documents]."""
        before = (self.log_p / temperature).log_softmax(1)
        change = c / temperature
        change = change - change.gather(1, self.candidates[:, :1])
        normaliser = (before + change).logsumexp(1)
        return (normaliser - (before.exp() * change).sum(1)).clamp_min(0)


Look = Callable[[Scene, torch.Tensor], Mapping[str, torch.Tensor]]
"""From a scene and the changed logits less the unchanged ones, float64 [documents, V] (up to a constant for
each document), to figures [documents]."""


def observe(
    states: States,
    changes: Mapping[str, Change],
    look: Look,
    progress: Progress | None = None,
    *,
    logit_change: Callable[[Scene, Change], torch.Tensor] = Scene.logit_change,
) -> dict[str, Values]:
    """Look at the changed logits of all documents.

    Args:
        states: The documents.
        changes: By name.
        look: What is made of them.
        progress: Called with (documents done, documents).
        logit_change: From a change to what it does to the logits, where that is not simply its image.

    Returns:
        For each change what `look` gives, float64 [documents].

    Raises:
        CspruneError: Logits that are not finite, with the count of documents.
    """
    parts: dict[str, list[Mapping[str, torch.Tensor]]] = {name: [] for name in changes}
    for documents in states.chunks():
        if progress:
            progress(documents.start, len(states))
        candidates = states.outlook.candidates[documents]
        scene = Scene(documents, states.predict(documents), states.u[documents], candidates)
        for name, change in changes.items():
            c = logit_change(scene, change)
            check_finite(c)
            parts[name].append(look(scene, c))
    if progress:
        progress(len(states), len(states))
    return {
        name: {
            key: torch.cat([each[key].double() for each in of_chunks]).cpu().numpy() for key in of_chunks[0]
        }
        for name, of_chunks in parts.items()
    }


def observe_beside(
    states: States,
    changes: Beside,
    look: Look,
    progress: Progress | None = None,
    *,
    logit_change: Callable[[Scene, Change], torch.Tensor] = Scene.logit_change,
) -> dict[str, tuple[Values, Values]]:
    """What `observe` sees of changes and of the random ones beside them, as `paired` gives it."""
    return paired(observe(states, flattened(changes), look, progress, logit_change=logit_change), changes)


def whole_change(scene: Scene, c: torch.Tensor) -> dict[str, torch.Tensor]:
    """D, F, K and the loss change of any change of the logits: F is that of the whole change."""
    centred = c - c.mean(1, keepdim=True)
    relative = c - c.gather(1, scene.candidates[:, :1])
    mean = (scene.p * relative).sum(1)
    normaliser = (scene.log_p + relative).logsumexp(1)
    return {
        "logit_distance": centred.square().sum(1),
        "fisher_term": (scene.p * (relative - mean[:, None]).square()).sum(1) / 2,
        "prediction_change": (normaliser - mean).clamp_min(0),
        "loss_change": normaliser - relative.gather(1, scene.prediction.targets).squeeze(1),
    }


def brier(scene: Scene, c: torch.Tensor) -> dict[str, torch.Tensor]:
    """The Brier divergence `sum_j (p'_j - p_j)^2` (Gneiting & Raftery, 2007; paper, E.3)."""
    changed = (scene.log_p + c).softmax(1)
    return {"brier": (changed - scene.p).square().sum(1)}


def leading_token(scene: Scene, c: torch.Tensor) -> dict[str, torch.Tensor]:
    """What becomes of the most probable token, 0 or 1 but for its rank.

    `kept`: it stays the most probable one; `runner_up`: the unchanged runner-up takes its place; `correct`:
    the most probable token is the true next one; `rank`: its place, from 1, among the changed logits.
    """
    changed = scene.log_p + c
    first, second = scene.candidates[:, :1], scene.candidates[:, 1:2]
    own = changed.gather(1, first)
    rank = 1 + (changed > own).sum(1)
    new = changed.argmax(1, keepdim=True)
    return {
        "kept": (rank == 1).double(),
        "runner_up": ((rank > 1) & (new == second).squeeze(1)).double(),
        "correct": (new == scene.prediction.targets).squeeze(1).double(),
        "rank": rank.double(),
    }
