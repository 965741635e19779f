"""The truncated head, and how transformers loads a checkpoint that has one.

This file is used twice: as `csprune.hf`, registered by `import csprune`; and copied as `csprune_hf.py`
into every exported checkpoint, so that `trust_remote_code=True` loads it where csprune is not installed.
It therefore imports nothing of csprune.

The mechanism is transformers' own for quantised checkpoints: `quantization_config.quant_method` names a
quantizer, and that one puts the factorized head in place before the weights are loaded. Without either
route the stock class fails loudly, for `<head>.weight` then has the wrong shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

QUANT_METHOD = "csprune"


class FactorizedHead(nn.Module):
    """`logits = weight (down h) + offset`: a head of rank k, kept as its factors.

    Args:
        hidden: d, the width of h.
        vocabulary: V.
        kept: k.
        dtype: Of the three parameters; None for torch's default.
        device: Of the three parameters.

    Attributes:
        weight: A [V, k]. It bears the dense head's name so that a stock class refuses its shape.
        down: B [k, d], the final norm's gain folded in.
        offset: [V], the corrected bias. (Not called `bias`: engines skip or drop head biases.)
    """

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        kept: int,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.in_features = hidden
        self.out_features = vocabulary
        self.kept = kept
        options = {"dtype": dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(vocabulary, kept, **options))
        self.down = nn.Parameter(torch.empty(kept, hidden, **options))
        self.offset = nn.Parameter(torch.empty(vocabulary, **options))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] (before a logit scale or soft cap) of normalised states [..., d]."""
        return F.linear(F.linear(hidden_states, self.down), self.weight, self.offset)

    def extra_repr(self) -> str:
        """The sizes, as `print(model)` shows them."""
        return f"hidden={self.in_features}, vocabulary={self.out_features}, kept={self.kept}"


def _stock_config(name: str) -> type:
    """A config class of the stock class's name that belongs to this file.

    `auto_map` needs a class that lives here; transformers' lazy mapping goes by its name, and
    `save_pretrained` copies the file it lives in.
    """
    stock = getattr(transformers, name)
    own = type(name, (stock,), {"__module__": __name__, "__doc__": stock.__doc__})
    globals()[name] = own
    return own


def __getattr__(name: str) -> Any:
    if name.endswith("Config") and isinstance(getattr(transformers, name, None), type):
        return _stock_config(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Registered once: by the installed package or by the first checkpoint's copy, whichever comes first.
if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:

    @register_quantization_config(QUANT_METHOD)
    class CspruneConfig(QuantizationConfigMixin):
        """`quantization_config` of a truncated checkpoint.

        Args:
            kept: k.
            removed: m = q - k.
            rank: The fraction of the q directions that was removed, as asked for.
            method: The truncation's name.
            format: How the head is stored; "factorized".
            version: Of csprune.
        """

        def __init__(
            self,
            kept: int,
            removed: int | None = None,
            rank: float | None = None,
            method: str | None = None,
            format: str = "factorized",
            version: str | None = None,
            **_other: Any,
        ) -> None:
            if format != "factorized":
                raise ValueError(f"head format {format!r} needs a newer csprune: pip install -U csprune")
            self.quant_method: Any = QUANT_METHOD
            self.kept = kept
            self.removed = removed
            self.rank = rank
            self.method = method
            self.format = format
            self.version = version

    @register_quantizer(QUANT_METHOD)
    class CspruneQuantizer(HfQuantizer):
        """Puts a `FactorizedHead` in the head's place before the weights are loaded."""

        requires_calibration = True

        def _process_model_before_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
            dense = model.get_output_embeddings()
            vocabulary, hidden = dense.weight.shape
            config: Any = self.quantization_config
            head = FactorizedHead(hidden, vocabulary, config.kept, dense.weight.dtype, "meta")
            model.set_output_embeddings(head)
            return model

        def is_serializable(self, **_kwargs: Any) -> bool:
            """`save_pretrained` writes the factors as they are."""
            return True

        @property
        def is_trainable(self) -> bool:
            """The factors are ordinary floating parameters."""
            return True

        @property
        def is_compileable(self) -> bool:
            """`torch.compile` sees two matrix products."""
            return True
