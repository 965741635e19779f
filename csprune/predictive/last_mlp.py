"""Find the MLP that writes last before the final norm, and prove it by what it does.

Nothing goes by names. A module *writes* if whatever is added to its output arrives at the final norm as it
is, or times one constant (Granite). What it writes is followed back, through norms (Gemma, OLMo 2), dropout
and activations, to the module that *reads* the MLP's input: the first one that has matrices, reads a vector
of the residual's width, and moves what arrives at the same position alone, and not linearly. Attention fails
at the one, its output matrix at the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csprune.errors import InputError
from csprune.predictive.passes import residual, written
from csprune.readout import Readout
from csprune.tracing import first_tensor

# What is added to a write arrives to this share of its size: rounding of the sum in float32, or in a lower
# dtype. A block that reads it on the way changes it by tens of percent.
_ARRIVAL_TOLERANCE = 1e-4
_LOW_ARRIVAL_TOLERANCE = 2e-2
# A push and its opposite have opposite effects, to rounding, where nothing is bent. An activation that has
# learned to stay where it is nearly straight shows itself only when pushed out of there, so by several times
# what it reads.
_PUSH = 16.0
_BENT = 5e-2
_PROBE_SHAPE = (2, 8)  # documents, positions


@dataclass(frozen=True)
class Activations:
    """What was seen at the last MLP, [documents, positions, d] in the model's dtype.

    Attributes:
        read: mlp_in, what the MLP reads.
        written: mlp_out, what is written to the residual stream, after a norm that follows the MLP.
        residual: resid_post, what the final norm reads.
    """

    read: torch.Tensor
    written: torch.Tensor
    residual: torch.Tensor


@dataclass(frozen=True)
class LastMLP:
    """The MLP of a model's last block, found and proved.

    Attributes:
        readout: Of the model.
        reads: Name of the module whose first input is mlp_in.
        writes: Name of the module whose output is mlp_out: `reads` itself, a norm after it, or the last of a
            block's own layers. (BLOOM's has the residual added already, which is no matter here.)
        factor: What a write is multiplied with on its way to the residual stream.
    """

    readout: Readout
    reads: str
    writes: str
    factor: float

    def run(
        self,
        input_ids: torch.Tensor,
        change_read: torch.Tensor | None = None,
        change_written: torch.Tensor | None = None,
    ) -> Activations:
        """Run the model on ids [documents, positions], adding to what the MLP reads or writes.

        Args:
            input_ids: Int64 [documents, positions].
            change_read: To add to mlp_in, [documents, positions, d], any floating dtype, or None.
            change_written: To add to mlp_out.

        Returns:
            The activations as changed.
        """
        seen: dict[str, torch.Tensor] = {}

        def adding(what: str, change: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
            def replace(x: torch.Tensor) -> torch.Tensor:
                changed = x if change is None else x + change.reshape(x.shape).to(x)
                # A block may add to a write in place.
                seen[what] = changed.clone().reshape(*input_ids.shape, -1)
                return changed

            return replace

        end = residual(
            self.readout,
            input_ids,
            reads=(self._module(self.reads), adding("read", change_read)),
            writes=(self._module(self.writes), adding("written", change_written)),
        )
        return Activations(seen["read"], seen["written"], end)

    def differentiable(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """mlp_in, a leaf, and the residual [documents, positions, d] that was computed from it.

        All that comes before mlp_in is held fixed, so the derivative is that of what the MLP writes.
        """
        leaf: list[torch.Tensor] = []

        def begin(x: torch.Tensor) -> torch.Tensor:
            torch.set_grad_enabled(True)  # `residual` restores what it was
            leaf.append(x.detach().clone().requires_grad_())
            return leaf[0].clone()  # a leaf must not be written to in place

        end = residual(self.readout, input_ids, reads=(self._module(self.reads), begin))
        return leaf[0], end

    def _module(self, name: str) -> nn.Module:
        return self.readout.model.get_submodule(name)


def find_last_mlp(readout: Readout) -> LastMLP:
    """The MLP whose write is the last before the final norm.

    Args:
        readout: Of a model in evaluation mode.

    Raises:
        InputError: No MLP can be proved, or there are several side by side; the message names the
            architecture.
    """
    name = type(readout.model).__name__
    search = _Search(readout)
    found = list(search.mlps())
    if len(found) == 1:
        return found[0]
    what = " and ".join(sorted(mlp.writes for mlp in found))
    reason = (
        f"the modules {what} each write what an MLP computed"
        if found
        else "no module is seen to write to the final norm's input what it computes from one position alone"
    )
    raise InputError(
        f"{name}: the MLP of the last block cannot be told ({reason}); csprune gives the sites logits, final "
        "and post of this architecture, but not mlp_out and mlp_in"
    )


@dataclass(frozen=True)
class _Call:
    """One module's run: what it read first and gave first, kept alive so that storages stay told apart."""

    name: str
    module: nn.Module
    x: torch.Tensor | None
    y: torch.Tensor

    @property
    def has_matrices(self) -> bool:
        return any(p.ndim > 1 for p in self.module.parameters())

    def within(self, other: str) -> bool:
        return other == "" or self.name == other or self.name.startswith(f"{other}.")


class _Search:
    """Forward passes over a few random tokens, with something changed in each."""

    def __init__(self, readout: Readout) -> None:
        self.readout = readout
        self.width = readout.unembedding.hidden
        self.generator = torch.Generator().manual_seed(0)
        rows = readout.model.get_input_embeddings().weight.shape[0]
        self.ids = torch.randint(rows, _PROBE_SHAPE, generator=self.generator)
        self.calls: list[_Call] = []
        names = {module: key for key, module in readout.model.named_modules()}

        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            y = written(output)
            if y is not None and y.is_floating_point():
                x = first_tensor(args, kwargs)
                self.calls.append(_Call(names[module], module, x, y))

        self.unchanged = residual(readout, self.ids, watch=watch).double()
        low = self.calls[-1].y.dtype in (torch.bfloat16, torch.float16)
        self.tolerance = _LOW_ARRIVAL_TOLERANCE if low else _ARRIVAL_TOLERANCE

    def mlps(self) -> Iterator[LastMLP]:
        """Every MLP that writes in the last block."""
        block = self._block()
        if block is None:
            return
        taken: list[str] = []
        for call in reversed(self.calls):
            if call is block or not call.within(block.name) or any(call.within(name) for name in taken):
                continue
            factor = self._arrives(call)
            if factor is None:
                continue
            reader = self._reader(call, block)
            # A norm and the dropout after it both write what one MLP computed.
            if reader is not None and not any(reader.within(name) for name in taken):
                taken += [call.name, reader.name]
                yield LastMLP(self.readout, reader.name, call.name, factor)

    def _block(self) -> _Call | None:
        """The last module whose output is the residual stream itself and that mixes positions."""
        for call in reversed(self.calls):
            if self._arrives(call) is not None and self._effect(call) == "mixed":
                return call
        return None

    def _arrives(self, call: _Call) -> float | None:
        """The constant with which what is added to a module's output arrives, or None."""
        if call.y.shape[-1] != self.width or call.y.numel() != self.unchanged.numel() or not self._once(call):
            return None
        change = self._noise(self.unchanged)
        end = residual(
            self.readout,
            self.ids,
            writes=(call.module, lambda y: y + change.reshape(y.shape).to(y)),
        )
        # What was added after rounding to the model's dtype.
        change = change.to(call.y).double()
        effect = end.double() - self.unchanged
        factor = float((change * effect).sum() / change.square().sum())
        error = float((effect - factor * change).norm() / change.norm())
        if not error <= self.tolerance * abs(factor):
            return None
        return 1.0 if abs(factor - 1) <= self.tolerance else factor

    def _reader(self, call: _Call | None, block: _Call) -> _Call | None:
        """Follow a write back to the module that reads the MLP's input; None if it is no MLP's."""
        while call is not None and call is not block and call.within(block.name):
            if call.has_matrices and self._once(call):
                kind = self._effect(call)
                if kind == "bent":
                    return call
                if kind == "mixed":
                    return None
            call = self._producer(call)
        return None

    def _producer(self, call: _Call) -> _Call | None:
        """The outermost module whose output a module reads, by the tensor's storage."""
        if call.x is None:
            return None
        storage = call.x.untyped_storage().data_ptr()
        before = self.calls[: self._first(call)]
        makers = (each for each in reversed(before) if each.y.untyped_storage().data_ptr() == storage)
        return next((each for each in makers if not each.within(call.name)), None)

    def _first(self, call: _Call) -> int:
        """Where the module's own parts begin in the order of ends."""
        place = self.calls.index(call)
        while place > 0 and self.calls[place - 1].within(call.name):
            place -= 1
        return place

    def _effect(self, call: _Call) -> str | None:
        """What a change of a module's input does at the final norm.

        Returns:
            "mixed" if it moves other positions, "bent" if it moves its own and not linearly, "straight" if
            linearly, None if its input is not of the residual's width or does not matter.
        """
        if call.x is None or not call.x.is_floating_point() or call.x.numel() != self.unchanged.numel():
            return None
        change = _PUSH * self._noise(call.x.double().reshape(self.unchanged.shape))
        change[:, ::2] = 0
        there, back = (self._after(call, sign * change) - self.unchanged for sign in (1, -1))
        size = float(there[:, 1::2].norm())
        if size == 0:
            return None
        if float(there[:, ::2].norm()) > self.tolerance * size:
            return "mixed"
        return "bent" if float((there + back)[:, 1::2].norm()) > _BENT * size else "straight"

    def _after(self, call: _Call, change: torch.Tensor) -> torch.Tensor:
        end = residual(
            self.readout, self.ids, reads=(call.module, lambda x: x + change.reshape(x.shape).to(x))
        )
        return end.double()

    def _once(self, call: _Call) -> bool:
        """A module that runs several times cannot be changed at one of them."""
        return sum(each.module is call.module for each in self.calls) == 1

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        """Gaussian float64 of the size that each position has."""
        noise = torch.randn(like.shape, generator=self.generator, dtype=torch.float64).to(like.device)
        return noise * like.square().mean(-1, keepdim=True).sqrt()
