"""The truncated head, and how transformers loads a checkpoint that has one.

This file is used twice: as `csprune.hf`, registered by `import csprune`; and copied as `csprune_hf.py`
into every exported checkpoint, so that `trust_remote_code=True` loads it where csprune is not installed.
It therefore imports nothing of csprune.

The mechanism is transformers' own for quantised checkpoints: `quantization_config.quant_method` names a
quantizer, and that one puts the factorized head in place before the weights are loaded. Without either
route the stock class fails loudly, for `<head>.weight` then has the wrong shape.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

QUANT_METHOD = "csprune"
REMOTE_MODULE = "csprune_hf"  # this file's name in a checkpoint
# Raised with every change of what this file can load: of several copies in one process the newest counts.
REVISION = 1


class _KnownByName(type):
    """Makes `isinstance` true of the heads of a checkpoint's copy of this file too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return any(base.__name__ == cls.__name__ for base in type(instance).__mro__)


class FactorizedHead(nn.Module, metaclass=_KnownByName):
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


def _own_config(name: str) -> type:
    """A config class of the stock class's name that belongs to this file.

    `auto_map` needs a class that lives here, and transformers' lazy mapping goes by its name.
    """
    stock = getattr(transformers, name)

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        # From the hub the name was "repository--csprune_hf.Class": the copy that is saved is the one to name.
        self.auto_map = {**(getattr(self, "auto_map", None) or {}), "AutoConfig": f"{REMOTE_MODULE}.{name}"}
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(__file__, Path(save_directory) / f"{REMOTE_MODULE}.py")
        stock.save_pretrained(self, save_directory, *args, **kwargs)

    body = {"__module__": __name__, "__doc__": stock.__doc__, "save_pretrained": save_pretrained}
    own = type(name, (stock,), body)
    globals()[name] = own
    return own


def __getattr__(name: str) -> Any:
    if name.endswith("Config") and isinstance(getattr(transformers, name, None), type):
        return _own_config(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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


class CspruneQuantizer(HfQuantizer):
    """Puts a `FactorizedHead` in the head's place before the weights are loaded."""

    requires_calibration = True
    revision = REVISION

    def _process_model_before_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
        dense = model.get_output_embeddings()
        if dense is None:
            raise ValueError(
                f"{type(model).__name__} has no head, and this checkpoint's final norm is folded into its "
                "truncated one: load it with AutoModelForCausalLM"
            )
        vocabulary, hidden = dense.weight.shape
        config: Any = self.quantization_config
        model.set_output_embeddings(
            FactorizedHead(hidden, vocabulary, config.kept, dense.weight.dtype, "meta")
        )
        return model

    def _process_model_after_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
        model.resize_token_embeddings = _refuse_resizing
        stock = type(model.config)
        # So that what `save_pretrained` writes has this file again, whichever way the model was loaded.
        if stock.__module__.startswith("transformers.") and hasattr(transformers, stock.__name__):
            model.config.__class__ = getattr(sys.modules[__name__], stock.__name__)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> NoReturn:
        raise NotImplementedError(
            "what csprune removed from this head cannot be brought back: load the original model, which the "
            "model card names"
        )

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


def _refuse_resizing(*_args: Any, **_kwargs: Any) -> NoReturn:
    # transformers would have resized the input embedding before it found that the head is no nn.Linear.
    raise NotImplementedError(
        "the vocabulary of a truncated head cannot be resized: resize the original model's, save it and "
        "truncate it again"
    )


# Assigned, not registered by transformers' decorators: they refuse a second time, and a newer copy must win.
if getattr(AUTO_QUANTIZER_MAPPING.get(QUANT_METHOD), "revision", 0) < REVISION:
    AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = CspruneConfig
    AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = CspruneQuantizer
