"""What a change at a site does to the prediction: orthogonal to the predictive subspace, inside it, anywhere.

Exact where the derivation is: a change orthogonal to the subspace at `logits`, at `final`, and at `post` with
the norm's RMS held, moves no probability. Elsewhere it is measured: a change at `post` or `mlp_out` moves the
RMS, and at `mlp_in` the subspace is that of the directions most used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from csprune.batches import tokens_at_once
from csprune.changes import check_finite
from csprune.linalg import row_blocks
from csprune.predictive.last_mlp import Activations, LastMLP
from csprune.predictive.passes import residual
from csprune.predictive.subspaces import Subspace
from csprune.readout import Readout

WAYS = ("orthogonal", "inside", "random")
# Above this change of a logit its exponential needs the logarithm taken apart.
_LARGE_CHANGE = 30.0


@dataclass(frozen=True)
class Effect:
    """What changes of one size at a site did.

    Attributes:
        site: Where.
        held: What of the norm was held fixed: "RMS held", "RMS recomputed", or "" where none follows.
        dimension: Of the subspace that "orthogonal" and "inside" refer to.
        free: Dimensions of its complement.
        whole: The complement is orthogonal to everything that the prediction reads, rather than to the
            directions that hold a share of it.
        size: Length of the change, as a share of the activation's.
        divergence: KL(p || p'), nats, float64 [documents, positions] by `WAYS`.
    """

    site: str
    held: str
    dimension: int
    free: int
    whole: bool
    size: float
    divergence: Mapping[str, torch.Tensor]


class _Readings:
    """Predictions of residuals r [documents, positions, d], in float64 throughout."""

    def __init__(self, readout: Readout, r: torch.Tensor) -> None:
        self.readout = readout
        self.r = r.double()
        self.z = readout.norm.normalise(self.r)
        self.head_output = self._map(self.final(self.z))
        if readout.unembedding.bias is not None:
            self.head_output += readout.unembedding.bias.double()

    def final(self, z: torch.Tensor) -> torch.Tensor:
        """The norm's output of normalised residuals z [..., d]."""
        unembedding = self.readout.unembedding
        return z * unembedding.gain + unembedding.norm_bias

    def held(self, change: torch.Tensor) -> torch.Tensor:
        """z after a change of the residual, as if the norm's scale stayed as it was."""
        if self.readout.norm.removes_mean:
            change = change - change.mean(-1, keepdim=True)
            r = self.r - self.r.mean(-1, keepdim=True)
        else:
            r = self.r
        return self.z + change * (self.z.norm(dim=-1) / r.norm(dim=-1)).unsqueeze(-1)

    def recomputed(self, r: torch.Tensor) -> torch.Tensor:
        """z of other residuals."""
        return self.readout.norm.normalise(r.double())

    def divergence(self, h: torch.Tensor) -> torch.Tensor:
        """KL(p || p'), float64 [documents, positions], of other outputs h [..., d] of the norm."""
        transform = self.readout.unembedding.transform

        def kl(x: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
            change = self._map(change)
            if transform.cap is None:
                return divergence(transform(x), transform(change))
            return divergence(transform(x), transform(x + change) - transform(x))

        return self._by_tokens(kl, self.head_output, h - self.final(self.z))

    def shifted(self, change_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """KL(p || p') after a change of the logits, given as a function of logits [tokens, V]."""

        def kl(x: torch.Tensor) -> torch.Tensor:
            logits = self.readout.unembedding.transform(x)
            return divergence(logits, change_of(logits))

        return self._by_tokens(kl, self.head_output)

    def _by_tokens(self, measure: Callable[..., torch.Tensor], *states: torch.Tensor) -> torch.Tensor:
        chunk = tokens_at_once(self.readout.unembedding.vocabulary)
        parts = zip(*(each.flatten(0, 1).split(chunk) for each in states), strict=True)
        return torch.cat([measure(*each) for each in parts]).reshape(states[0].shape[:2])

    def _map(self, h: torch.Tensor) -> torch.Tensor:
        unembedding = self.readout.unembedding
        blocks = row_blocks(unembedding.vocabulary)
        return torch.cat([h @ unembedding.weight[rows].double().mT for rows in blocks], dim=-1)


def divergence(logits: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """KL(p || p'), nats [...], of logits [..., V] and their change, float64.

    With the change centred under p, `KL = log E_p[exp c] = log(1 + E_p[exp c - 1 - c])`: a change that does
    nothing gives its rounding squared rather than the logits'.

    Raises:
        CspruneError: Logits that are not finite.
    """
    check_finite(logits.flatten(0, -2))
    check_finite((logits + change).flatten(0, -2))
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    centred = change - (p * change).sum(-1, keepdim=True)
    bounded = centred.clamp_max(_LARGE_CHANGE)
    small = torch.log1p((p * (torch.expm1(bounded) - bounded)).sum(-1))
    large = (log_p + centred).logsumexp(-1)
    return torch.where(centred.amax(-1) > _LARGE_CHANGE, large, small).clamp_min(0)


def check(
    readout: Readout,
    subspaces: Sequence[Subspace],
    input_ids: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    mlp: LastMLP | None = None,
    share: float = 0.99,
    size: float = 0.1,
    seed: int = 0,
) -> list[Effect]:
    """Change activations at each site in random directions, and see what becomes of the predictions.

    Where the prediction reads all of a site (a vocabulary larger than the width, at `final`), nothing is
    orthogonal to the subspace, and the complement of the directions that hold `share` takes its place.

    Args:
        readout: Of the model.
        subspaces: One for each site to check.
        input_ids: Int64 [documents, positions].
        positions: The positions to change and compare, int64; all by default. Their logits are held at once,
            in float64.
        mlp: The last MLP; needed for the sites `mlp_out` and `mlp_in`.
        share: Of the sum of the eigenvalues.
        size: Length of every change, as a share of the activation's at its position.
        seed: Of the directions, which are drawn anew at every position.

    Raises:
        CspruneError: Logits that are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(input_ids.shape[1]) if positions is None else positions
    base = mlp.run(input_ids) if mlp else None
    now = _Readings(readout, (base.residual if base else residual(readout, input_ids))[:, every])
    effects = []
    for subspace in subspaces:
        whole = subspace.site != "mlp_in" and (subspace.rank < subspace.most or subspace.site == "logits")
        dimension = subspace.rank if whole else subspace.dimension(share)
        free = subspace.width - dimension
        ways = [way for way in WAYS if free or way != "orthogonal"]

        def drawn(
            way: str, x: torch.Tensor, subspace: Subspace = subspace, dimension: int = dimension
        ) -> torch.Tensor:
            return _change(subspace, dimension, way, x, size, generator)

        for held, outcome in _outcomes(subspace.site, now, mlp, base, input_ids, every):
            measured = {way: outcome(partial(drawn, way)) for way in ways}
            effects.append(Effect(subspace.site, held, dimension, free, whole, size, measured))
    return effects


_Draw = Callable[[torch.Tensor], torch.Tensor]
"""A change of activations [..., width], float64."""


def _outcomes(
    site: str,
    now: _Readings,
    mlp: LastMLP | None,
    base: Activations | None,
    input_ids: torch.Tensor,
    every: torch.Tensor,
) -> Iterator[tuple[str, Callable[[_Draw], torch.Tensor]]]:
    """What the norm does, and the divergence after a change of the activations at a site."""
    if site == "logits":
        yield "", now.shifted
    elif site == "final":
        h = now.final(now.z)
        yield "", lambda draw: now.divergence(h + draw(h))
    elif site == "post":
        yield "RMS held", lambda draw: now.divergence(now.final(now.held(draw(now.r))))
        yield (
            "RMS recomputed",
            lambda draw: now.divergence(now.final(now.recomputed(now.r + draw(now.r)))),
        )
    else:
        if mlp is None or base is None:
            raise ValueError(f"the site {site} needs the last MLP")

        def after(changed: Activations) -> torch.Tensor:
            return now.divergence(now.final(now.recomputed(changed.residual[:, every])))

        def among(change: torch.Tensor) -> torch.Tensor:
            """At the positions that count; what the MLP does at others is their own."""
            whole = change.new_zeros(*input_ids.shape, change.shape[-1])
            whole[:, every] = change
            return whole

        read, written = base.read[:, every].double(), base.written[:, every].double()
        if site == "mlp_out":
            yield (
                "RMS held",
                lambda draw: now.divergence(now.final(now.held(mlp.factor * draw(written)))),
            )
            yield (
                "RMS recomputed",
                lambda draw: after(mlp.run(input_ids, change_written=among(draw(written)))),
            )
        else:
            yield "RMS recomputed", lambda draw: after(mlp.run(input_ids, change_read=among(draw(read))))


def _change(
    subspace: Subspace,
    dimension: int,
    way: str,
    activation: torch.Tensor,
    size: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """A random change of one way, its length a share of the activation's."""
    noise = torch.randn(activation.shape, generator=generator, dtype=torch.float64).to(activation.device)
    if way != "random":
        inside = subspace.project(noise, dimension)
        noise = inside if way == "inside" else noise - inside
    length = size * activation.norm(dim=-1, keepdim=True)
    return noise * (length / noise.norm(dim=-1, keepdim=True))
