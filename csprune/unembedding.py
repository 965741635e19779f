"""The folded, centred unembedding: what a change of the final state does to the logits.

The final norm leaves `z` (d numbers a token), the head gives `logits = T(W_out (gamma * z + beta) + b)`.
Folding the gain into the head and expressing `z` in `q` coordinates `u` gives one linear map. Two
versions of it are used (README, Definitions): the *folded* map is executed and exported, the
*centred* map ranks and measures, because a constant added to every logit changes no probability.
(Paper: Section 2.1 and Appendix A.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from csprune.linalg import eigh_descending, row_blocks


@dataclass(frozen=True)
class LogitTransform:
    """What the model's own code does to the head's output: `scale * x`, or `cap * tanh(x / cap)`.

    At most one of the two is set; by default logits pass unchanged.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits from the head's output, any shape, same dtype."""
        if self.cap is not None:
            return torch.tanh(x / self.cap) * self.cap
        return x if self.scale == 1.0 else x * self.scale

    def slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """dT/dx at capped logits, `1 - (l / c)^2`; None where T is linear (its factor is in W)."""
        return None if self.cap is None else 1 - (logits / self.cap).square()


class Unembedding:
    """The linear map from the normalised state `u` [q] to the logits [V], held by reference.

    The head's weight is never copied, except once to float32 where a model holds it in a lower
    dtype; the float64 forms below are made by blocks of the vocabulary.

    Args:
        weight: W_out, the head's weight [V, d], any floating dtype.
        bias: b, the head's bias [V], or None.
        gain: gamma, float64 [d], as it multiplies (never gain - 1).
        norm_bias: beta, float64 [d].
        removes_mean: LayerNorm (`q = d - 1`) rather than RMSNorm (`q = d`).
        transform: T.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gain: torch.Tensor,
        norm_bias: torch.Tensor,
        removes_mean: bool,
        transform: LogitTransform,
    ) -> None:
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.gain = gain
        self.norm_bias = norm_bias
        self.removes_mean = removes_mean
        self.transform = transform

    @property
    def vocabulary(self) -> int:
        """V, the head's rows, padded ones included: they take part in the model's softmax."""
        return self.weight.shape[0]

    @property
    def hidden(self) -> int:
        """d, the width of the residual stream."""
        return self.weight.shape[1]

    @property
    def width(self) -> int:
        """q, the number of singular directions."""
        return self.hidden - int(self.removes_mean)

    @property
    def device(self) -> torch.device:
        """Where the head lies."""
        return self.weight.device

    def state(self, z: torch.Tensor) -> torch.Tensor:
        """`u = R^T z` [..., q] of normalised residuals z [..., d], same dtype.

        R is the last d - 1 columns of the Householder reflection that sends the first unit vector
        to the direction of 1; for an RMSNorm it is the identity.
        """
        return self._reflect(z)[..., 1:] if self.removes_mean else z

    def lift(self, u: torch.Tensor) -> torch.Tensor:
        """`z = R u` [..., d] of states u [..., q], same dtype."""
        return self._reflect(F.pad(u, (1, 0))) if self.removes_mean else u

    def _reflect(self, x: torch.Tensor) -> torch.Tensor:
        normal = torch.full((self.hidden,), self.hidden**-0.5, dtype=x.dtype, device=x.device)
        normal[0] += 1.0
        normal /= normal.norm()
        return x - 2 * (x @ normal).unsqueeze(-1) * normal

    @cached_property
    def constant(self) -> torch.Tensor:
        """`l0 = W_out beta + b`, float64 [V], without the logit scale."""
        parts = [self.weight[rows].double() @ self.norm_bias for rows in self._blocks()]
        constant = torch.cat(parts)
        return constant if self.bias is None else constant + self.bias.double()

    def folded(self, rows: slice) -> torch.Tensor:
        """Rows of the uncentred folded map `W_out diag(gamma) R`, float64 [rows, q].

        This is what is executed and exported; the logit scale is left to the model's own code.
        """
        return self.state(self.weight[rows].double() * self.gain)

    def centred(self, rows: slice) -> torch.Tensor:
        """Rows of W, the map that ranks and measures, float64 [rows, q].

        `s C_V W_out diag(gamma) R`: each column's mean over the vocabulary subtracted. Under a soft
        cap a shift of all logits is not harmless, and W is the folded map itself.
        """
        if self.transform.cap is not None:
            return self.folded(rows)
        return (self.folded(rows) - self._column_mean) * self.transform.scale

    @cached_property
    def _column_mean(self) -> torch.Tensor:
        total = sum(self.weight[rows].double().sum(0) for rows in self._blocks())
        return self.state(total / self.vocabulary * self.gain)

    def weighted_gram(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """`W^T diag(weights) W`, float64 [q, q]; weights [V] float64, or None for ones."""
        gram = torch.zeros(self.width, self.width, dtype=torch.float64, device=self.device)
        for rows in self._blocks():
            block = self.centred(rows)
            scaled = block if weights is None else block * weights[rows, None]
            gram.addmm_(scaled.mT, block)
        return gram

    @cached_property
    def gram(self) -> torch.Tensor:
        """`W^T W`, float64 [q, q]: D = du^T (W^T W) du needs no pass over the vocabulary."""
        return self.weighted_gram()

    @cached_property
    def _spectrum(self):
        return eigh_descending(self.gram, "the unembedding's Gram matrix W^T W")

    @property
    def singular_values(self) -> torch.Tensor:
        """sigma, float64 [q], descending.

        Square roots of the Gram matrix's eigenvalues: exact to about 1e-8 of the largest.
        """
        return self._spectrum.values.clamp_min(0).sqrt()

    @property
    def directions(self) -> torch.Tensor:
        """The right singular vectors v_i as columns, float64 [q, q], descending sigma."""
        return self._spectrum.vectors

    def along(self, vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`W vectors` [V, m] in `dtype`, computed in float64 by blocks; vectors float64 [q, m]."""
        return self._image(self.centred, vectors, dtype)

    def folded_along(self, vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Uncentred `W_out diag(gamma) R vectors` [V, m] in `dtype`; vectors float64 [q, m]."""
        return self._image(self.folded, vectors, dtype)

    def _image(self, rows_of, vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        image = torch.empty(self.vocabulary, vectors.shape[1], dtype=dtype, device=self.device)
        for rows in self._blocks():
            image[rows] = (rows_of(rows) @ vectors).to(dtype)
        return image

    def head_output(self, u: torch.Tensor) -> torch.Tensor:
        """What the dense head gives, before T: [..., V] of states u [..., q] float64.

        The product runs in `compute_dtype`; it is never rounded to the model's lower dtype.
        """
        h = (self.lift(u) * self.gain + self.norm_bias).to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return F.linear(h, self._compute_weight, bias)

    def logits(self, u: torch.Tensor) -> torch.Tensor:
        """The model's logits [..., V] of states u [..., q] float64, in `compute_dtype`."""
        return self.transform(self.head_output(u))

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for a float64 head, otherwise float32."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    @cached_property
    def _compute_weight(self) -> torch.Tensor:
        return self.weight.to(self.compute_dtype)

    def _blocks(self):
        return row_blocks(self.vocabulary)
