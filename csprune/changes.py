"""The change of a prediction, for a chunk of tokens: one pass over blocks of the vocabulary.

Definitions are the README's (paper, Section 2.2): with `p` the unchanged prediction, `p'` the
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

# Tokens x vocabulary entries worked on at once: a megabyte in float32, so that what one pass leaves in the
# caches the next one finds there, and large enough for fast products.
_BLOCK_ELEMENTS = 1 << 18
# Two float32 sums of the same products in another order differ by a few roundings of their terms.
_ROUNDING = 8


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
        entropy: -sum p log p, nats, float64 [tokens].
    """

    unembedding: Unembedding
    before_cap: torch.Tensor | None
    log_probabilities: torch.Tensor
    probabilities: torch.Tensor
    targets: torch.Tensor
    top: torch.Tensor
    loss: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def of(cls, unembedding: Unembedding, u: torch.Tensor, targets: torch.Tensor) -> Prediction:
        """Predict from states u, float64 [tokens, q]; targets int64 [tokens].

        Raises:
            CspruneError: Logits that are not finite, with the count of tokens.
        """
        output = unembedding.head_output(u)
        logits = unembedding.transform(output)
        check_finite(logits)
        log_p, p = log_softmax(logits)
        targets = targets.unsqueeze(1)
        return cls(
            unembedding,
            output if unembedding.transform.cap is not None else None,
            log_p,
            p,
            targets,
            log_p.argmax(1, keepdim=True),
            -log_p.gather(1, targets).squeeze(1).double(),
            -torch.linalg.vecdot(p, log_p).double(),
        )


def log_softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and p, each [tokens, V], of logits [tokens, V]; log p takes the logits' place.

    torch's own log_softmax adds up a row's exponentials one after the other; in float32, over 50,000 of them,
    that loses 2e-5 nats, always to the same side. `sum` adds them pairwise.
    """
    shifted = logits.sub_(logits.amax(1, keepdim=True))
    exponentials = shifted.exp()
    total = exponentials.sum(1, keepdim=True)
    return shifted.sub_(total.log()), exponentials.div_(total)


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


def measure_logits(
    prediction: Prediction, logits: torch.Tensor, head_output: torch.Tensor | None = None
) -> torch.Tensor:
    """Measure another model's logits against the prediction, in float64.

    Args:
        prediction: Of the tokens.
        logits: [tokens, V], finite.
        head_output: The other head's output [tokens, V] before a soft cap; needed where there is one.

    Returns:
        The `QUANTITIES`, float64 [5, tokens]. F is that of the whole change of the logits, rounding included.

    Raises:
        CspruneError: Logits that are not finite, with the count of tokens.
    """
    check_finite(logits)
    logits = logits.double()
    log_p = prediction.log_probabilities.double()
    log_p = log_p - log_p.logsumexp(1, keepdim=True)
    p = log_p.exp()
    change = logits - log_p
    centred = change - change.mean(1, keepdim=True)
    change = change - change.gather(1, prediction.top)
    first_order = change
    if prediction.before_cap is not None:
        assert head_output is not None  # the caller's part
        transform = prediction.unembedding.transform
        slope = transform.slope(transform(prediction.before_cap.double()))
        assert slope is not None  # there is a cap
        first_order = slope * (head_output.double() - prediction.before_cap)
    mean = (p * first_order).sum(1, keepdim=True)
    normaliser = (log_p + change).logsumexp(1)
    figures = {
        "loss_change": normaliser - change.gather(1, prediction.targets).squeeze(1),
        "logit_distance": centred.square().sum(1),
        "fisher_term": (p * (first_order - mean).square()).sum(1) / 2,
        "prediction_change": (normaliser - (p * change).sum(1)).clamp_min(0),
        "top1_agreement": (logits.gather(1, prediction.top).squeeze(1) >= logits.amax(1)).double(),
    }
    return torch.stack([figures[name] for name in QUANTITIES])


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
    """Sums over the vocabulary for one change, relative to the change of the most probable token.

    All are float64 [tokens]; `c` is the change of the logits less that of the most probable token, and
    `f` its first-order form `J W du` (which is `c` itself without a soft cap), likewise relative.
    """

    def __init__(self, prediction: Prediction, x: torch.Tensor, image: torch.Tensor) -> None:
        self.prediction = prediction
        self.capped = prediction.before_cap is not None
        top_image = image[prediction.top.squeeze(1)]
        top_mapped = (x * top_image).sum(1, keepdim=True)
        self.top_change, self.top_first_order = self._changes(top_mapped, prediction.top)
        target_mapped = (x * image[prediction.targets.squeeze(1)]).sum(1, keepdim=True)
        target_change, _ = self._changes(target_mapped, prediction.targets)
        self.target = (target_change - self.top_change).squeeze(1).double()
        # A sum of products errs by its terms, however small the sum itself.
        terms = (x.abs() * top_image.abs()).sum(1)
        self.rounding = _ROUNDING * torch.finfo(x.dtype).eps * terms.clamp_min(1)

        def zeros() -> torch.Tensor:
            return torch.zeros(len(x), dtype=torch.float64, device=x.device)

        self.mean = zeros()  # E_p[c]
        self.first_order = self.mean if not self.capped else zeros()  # E_p[f]
        self.first_order2 = zeros()  # E_p[f^2]
        self.excess = zeros()  # E_p[exp c - 1], over the tokens whose exp does not overflow
        self.log_huge = zeros().fill_(-torch.inf)  # log E_p[exp c], over the others
        self.plain = zeros()  # sum of the changes, under a soft cap
        self.plain2 = zeros()  # sum of their squares, under a soft cap
        self.largest = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)  # of log p + c

    def _changes(self, mapped: torch.Tensor, at: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The change of the logits and its first-order form, [tokens, columns]."""
        output = self.prediction.before_cap
        if output is None:
            return mapped, mapped
        transform = self.prediction.unembedding.transform
        output = output[:, at] if isinstance(at, slice) else output.gather(1, at)
        before = transform(output)
        slope = transform.slope(before)
        assert slope is not None  # there is a cap
        return transform(output + mapped) - before, mapped * slope

    def add(self, mapped: torch.Tensor, rows: slice, *, last: bool) -> None:
        """Add a block of the vocabulary; `mapped` is overwritten if nothing needs it after this."""
        p = self.prediction.probabilities[:, rows]
        full, first_order = self._changes(mapped, rows)
        if self.capped:
            self.plain += full.sum(1)
            self.plain2 += full.square().sum(1)
            change = full.sub_(self.top_change)
            relative = first_order.sub_(self.top_first_order)
        else:
            change = relative = full.sub_(self.top_change) if last else full - self.top_change
        # What was taken off differs from the product by its rounding; the top token's mass would carry that.
        self._clear_top(change, rows)
        if self.capped:
            self._clear_top(relative, rows)
        weighted = p * relative
        self.first_order += weighted.sum(1)
        if self.capped:
            self.mean += torch.linalg.vecdot(p, change)
        self.first_order2 += torch.linalg.vecdot(weighted, relative)
        # Not E_p[exp c] itself: where the prediction is nearly certain, 1 would drown what is added to it.
        excess = torch.linalg.vecdot(p, change.expm1()).double()
        change += self.prediction.log_probabilities[:, rows]
        self.largest = torch.maximum(self.largest, change.amax(1))
        huge = ~torch.isfinite(excess)
        if bool(huge.any()):
            logarithm = torch.logaddexp(self.log_huge, torch.logsumexp(change, 1).double())
            self.log_huge = torch.where(huge, logarithm, self.log_huge)
            excess = torch.where(huge, -p.sum(1).double(), excess)
        self.excess += excess

    def _clear_top(self, relative: torch.Tensor, rows: slice) -> None:
        """Make the entries of the most probable tokens exactly 0, in place, where the block has them."""
        place = self.prediction.top - rows.start
        inside = (place >= 0) & (place < relative.shape[1])
        place = torch.where(inside, place, 0)
        relative.scatter_(1, place, torch.where(inside, 0.0, relative.gather(1, place)))

    def figures(self, distance: torch.Tensor | None) -> torch.Tensor:
        """The `QUANTITIES`, [5, tokens]; D is given where it is known already."""
        if distance is None:
            distance = self.plain2 - self.plain.square() / self.prediction.probabilities.shape[1]
        # log E_p[exp c]; the clamp is of rounding only, where all the mass is among the huge.
        normaliser = torch.logaddexp(self.excess.clamp_min(-1).log1p(), self.log_huge)
        # The top token stays: nothing exceeds it, by more than the rounding of its own change.
        top = self.prediction.log_probabilities.gather(1, self.prediction.top).squeeze(1)
        figures = {
            "loss_change": normaliser - self.target,
            "logit_distance": distance.clamp_min(0),
            "fisher_term": (self.first_order2 - self.first_order.square()).clamp_min(0) / 2,
            "prediction_change": (normaliser - self.mean).clamp_min(0),
            "top1_agreement": (self.largest <= top + self.rounding).double(),
        }
        return torch.stack([figures[name] for name in QUANTITIES])
