"""The change of a prediction, for a chunk of tokens: one pass over blocks of the vocabulary.

Definitions are those of DESIGN section 2 (paper, Section 2.2): with `p` the unchanged prediction, `p'` the
changed one and `c = l' - l` the change of the logits,

    F = Var_p(c) / 2,    K = KL(p || p') = log E_p[exp c] - E_p[c],    loss change = log E_p[exp c] - c_y.

All of them are unchanged by a constant added to `c`. Taking the change of the most probable token off makes
every sum small where the prediction is nearly certain, so that nothing large cancels in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from csprune.errors import CspruneError
from csprune.linalg import row_blocks
from csprune.measurement import QUANTITIES
from csprune.unembedding import Unembedding

# Tokens x vocabulary entries worked on at once: small enough for a cache, large enough for fast products.
_BLOCK_ELEMENTS = 1 << 21
# exp of more could overflow float32's sums.
_SAFE_EXPONENT = 60.0


@dataclass(frozen=True)
class Prediction:
    """The unchanged prediction of a chunk of tokens.

    Attributes:
        unembedding: Of the model.
        before_cap: The head's output [tokens, V] under a soft cap, else None.
        log_probabilities: [tokens, V], compute dtype.
        probabilities: [tokens, V], compute dtype.
        targets: The true next tokens, int64 [tokens, 1].
        top: The most probable tokens, int64 [tokens, 1].
        loss: -log p(y), nats, float64 [tokens].
    """

    unembedding: Unembedding
    before_cap: torch.Tensor | None
    log_probabilities: torch.Tensor
    probabilities: torch.Tensor
    targets: torch.Tensor
    top: torch.Tensor
    loss: torch.Tensor

    @classmethod
    def of(cls, unembedding: Unembedding, u: torch.Tensor, targets: torch.Tensor) -> Prediction:
        """Predict from states u, float64 [tokens, q]; targets int64 [tokens].

        Raises:
            CspruneError: Logits that are not finite, with the count of tokens.
        """
        output = unembedding.head_output(u)
        logits = unembedding.transform(output)
        check_finite(logits)
        log_p = torch.log_softmax(logits, 1)
        targets = targets.unsqueeze(1)
        return cls(
            unembedding,
            output if unembedding.transform.cap is not None else None,
            log_p,
            log_p.exp(),
            targets,
            logits.argmax(1, keepdim=True),
            -log_p.gather(1, targets).squeeze(1).double(),
        )


def check_finite(logits: torch.Tensor) -> None:
    """Refuse logits [tokens, V] that are not finite.

    Raises:
        CspruneError: With the count of tokens.
    """
    low, high = logits.aminmax(dim=1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    if not bool(finite.all()):
        raise CspruneError(
            f"the logits of {int((~finite).sum())} of {len(finite)} tokens of one chunk are not finite: "
            "check the model's weights, or run it in --dtype float32"
        )


def measure_nested(
    prediction: Prediction,
    coordinates: torch.Tensor,
    image: torch.Tensor,
    metric: torch.Tensor,
    sizes: list[int],
) -> dict[int, torch.Tensor]:
    """Measure nested changes: the first m columns of one low-rank change, for each m of `sizes`.

    Args:
        prediction: Of the tokens.
        coordinates: x, float64 [tokens, M]; the change of the mapped logits is `W du = image x`.
        image: [V, M], compute dtype.
        metric: image^T image, float64 [M, M]: D without the vocabulary, where logits are not capped.
        sizes: Ascending, the last one M.

    Returns:
        For each m the `QUANTITIES`, float64 [5, tokens].
    """
    capped = prediction.before_cap is not None
    x = coordinates.to(image.dtype)
    sums = {m: _Sums(prediction, x[:, :m], image[:, :m]) for m in sizes}
    tokens, vocabulary = prediction.probabilities.shape
    for rows in row_blocks(vocabulary, max(1, _BLOCK_ELEMENTS // tokens)):
        mapped, done = None, 0
        for m in sizes:
            part, columns = x[:, done:m], image[rows, done:m].mT
            mapped = part @ columns if mapped is None else mapped.addmm_(part, columns)
            sums[m].add(mapped, rows, last=m == sizes[-1])
            done = m
    figures = {}
    for m in sizes:
        inner = coordinates[:, :m]
        distance = None if capped else ((inner @ metric[:m, :m]) * inner).sum(1)
        figures[m] = sums[m].figures(distance)
    return figures


class _Sums:
    """Sums over the vocabulary for one change, relative to the change of the most probable token."""

    def __init__(self, prediction: Prediction, x: torch.Tensor, image: torch.Tensor) -> None:
        self.prediction = prediction
        tokens = len(x)
        self.top_mapped = self._gather(x, image, prediction.top)
        self.top_change, self.top_fisher = self._changes(self.top_mapped, prediction.top)
        target_change, _ = self._changes(self._gather(x, image, prediction.targets), prediction.targets)
        self.target = (target_change - self.top_change).squeeze(1).double()
        options = {"dtype": torch.float64, "device": x.device}
        # E_p of: the change, the Fisher change, its square, exp of the change; and the plain sums of the
        # change and of its square.
        self.mean, self.fisher, self.fisher2, self.exp, self.sum, self.sum2 = torch.zeros(
            6, tokens, **options
        )
        self.largest = torch.full((tokens,), -torch.inf, dtype=x.dtype, device=x.device)

    @staticmethod
    def _gather(x: torch.Tensor, image: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (x * image[tokens.squeeze(1)]).sum(1, keepdim=True)

    def _changes(self, mapped: torch.Tensor, at: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The change of the logits and its first-order (Fisher) form, [tokens, columns]."""
        output = self.prediction.before_cap
        if output is None:
            return mapped, mapped
        transform = self.prediction.unembedding.transform
        output = output[:, at] if isinstance(at, slice) else output.gather(1, at)
        before = transform(output)
        slope = transform.slope(before)
        assert slope is not None  # there is a cap
        return transform(output + mapped) - before, mapped * slope

    def add(self, mapped: torch.Tensor, rows: slice, last: bool) -> None:
        """Add a block of the vocabulary; `mapped` is overwritten if nothing needs it after this."""
        p = self.prediction.probabilities[:, rows]
        full, fisher = self._changes(mapped, rows)
        reuse = last and fisher is full
        change = full.sub_(self.top_change) if reuse else full - self.top_change
        if fisher is full:
            weighted = p * change
            self.fisher2 += torch.linalg.vecdot(weighted, change)
            self.mean += weighted.sum(1)
            self.fisher = self.mean
        else:
            relative = fisher - self.top_fisher
            weighted = p * relative
            self.fisher2 += torch.linalg.vecdot(weighted, relative)
            self.fisher += weighted.sum(1)
            self.mean += torch.linalg.vecdot(p, change)
            self.sum += change.sum(1)
            self.sum2 += change.square().sum(1)
        # E_p[exp c] is at least the top token's probability, as c is 0 there: it cannot vanish.
        change += self.prediction.log_probabilities[:, rows]
        largest = change.amax(1)
        self.largest = torch.maximum(largest, self.largest)
        if bool((largest > _SAFE_EXPONENT).any()):
            shifted = change.sub_(largest.unsqueeze(1)).exp_().sum(1)
            self.exp += shifted * largest.double().exp()
        else:
            self.exp += change.exp_().sum(1)

    def figures(self, distance: torch.Tensor | None) -> torch.Tensor:
        normaliser = self.exp.log()
        # The top token stays: nothing exceeds it, by more than the rounding of its own change.
        top = self.prediction.log_probabilities.gather(1, self.prediction.top).squeeze(1)
        rounding = 32 * torch.finfo(top.dtype).eps * self.top_change.squeeze(1).abs().clamp_min(1)
        if distance is None:
            vocabulary = self.prediction.probabilities.shape[1]
            distance = self.sum2 - self.sum.square() / vocabulary
        figures = {
            "loss_change": normaliser - self.target,
            "logit_distance": distance,
            "fisher_term": (self.fisher2 - self.fisher.square()).clamp_min(0) / 2,
            "prediction_change": normaliser - self.mean,
            "top1_agreement": (self.largest <= top + rounding).double(),
        }
        return torch.stack([figures[name] for name in QUANTITIES])
