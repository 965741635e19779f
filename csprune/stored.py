"""What a truncation costs as it is stored: its factors rounded, or its checkpoint as it loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from csprune.batches import batches, tokens_at_once
from csprune.calibration import BATCH_SIZE
from csprune.changes import Prediction, check_finite, log_softmax, measure_logits
from csprune.corpus import Windows
from csprune.errors import InputError
from csprune.measurement import QUANTITIES
from csprune.readout import Readout
from csprune.truncation import Truncation


def stored_loss(
    truncation: Truncation,
    windows: Windows,
    dtype: torch.dtype,
    *,
    positions: str = "all",
    skip_first: int = 0,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Loss with a truncation's factors rounded to the dtype they are stored in.

    `evaluate` measures the truncation itself; what a checkpoint in bfloat16 adds to it is the difference of
    the two. The products are made in the compute dtype, as they are there.

    Args:
        truncation: Its model has its original head in place.
        windows: Held-out windows.
        dtype: Of the stored factors.
        positions: As for `evaluate`.
        skip_first: As for `evaluate`.
        batch_size: Documents run at once.
        progress: Called with (documents done, documents).

    Returns:
        The mean loss of each document, nats, float64 [documents].
    """
    unembedding = truncation.readout.unembedding
    factors = truncation.factors(dtype)
    up, down, offset = (f.to(unembedding.compute_dtype) for f in (factors.up, factors.down, factors.offset))
    chunk = tokens_at_once(unembedding.vocabulary)
    read = batches(truncation.readout, windows, positions, skip_first, batch_size, progress)
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        for _, u, targets in read:
            parts = zip(u.flatten(0, 1).split(chunk), targets.flatten().split(chunk), strict=True)
            of_tokens = []
            for part, next_tokens in parts:
                z = unembedding.lift(part).to(unembedding.compute_dtype)
                logits = unembedding.transform(F.linear(F.linear(z, down), up, offset))
                check_finite(logits)
                log_p, _ = log_softmax(logits)
                of_tokens.append(-log_p.gather(1, next_tokens.unsqueeze(1)).double())
            losses.append(torch.cat(of_tokens).view(targets.shape).mean(1).cpu())
    return torch.cat(losses).numpy()


def measure_loaded(
    model: Any,
    readout: Readout,
    windows: Windows,
    *,
    positions: str = "all",
    skip_first: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, np.ndarray]:
    """What a loaded checkpoint does to the predictions of the model that it was made from.

    Both models run whole; nothing is taken from the truncation but what the checkpoint itself gives.

    Args:
        model: The checkpoint, loaded by transformers.
        readout: Of the original.
        windows: Held-out windows.
        positions: As for `evaluate`.
        skip_first: As for `evaluate`.
        progress: Called with (documents done, documents).

    Returns:
        For each of `QUANTITIES` float64 [documents].

    Raises:
        InputError: The checkpoint's vocabulary is another.
        CspruneError: Logits that are not finite, with the count of tokens.
    """
    unembedding = readout.unembedding
    device = model.get_input_embeddings().weight.device
    chunk = tokens_at_once(unembedding.vocabulary)
    batch_size = max(1, chunk // windows.sequence_length)  # the checkpoint gives the logits of every position
    outputs: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        outputs.append(output)

    values = np.zeros((len(QUANTITIES), len(windows)))
    hook = model.get_output_embeddings().register_forward_hook(keep)
    try:
        with torch.no_grad():
            read = batches(readout, windows, positions, skip_first, min(batch_size, BATCH_SIZE), progress)
            for rows, u, targets in read:
                outputs.clear()
                input_ids = windows.input_ids[rows].to(device)
                measured = slice(-targets.shape[1], None)  # what is left out, is at the beginning
                logits = model(input_ids=input_ids, use_cache=False).logits[:, measured]
                if logits.shape[-1] != unembedding.vocabulary:
                    raise InputError(
                        f"the checkpoint gives {logits.shape[-1]} logits for each token, the model "
                        f"{unembedding.vocabulary}: give a checkpoint that was made from this model"
                    )
                before = outputs[-1][:, measured]
                parts = [
                    measure_logits(
                        Prediction.of(unembedding, part, next_tokens),
                        other.to(u.device),
                        head_output.to(u.device),
                    )
                    for part, next_tokens, other, head_output in zip(
                        *(x.flatten(0, 1).split(chunk) for x in (u, targets, logits, before)),
                        strict=True,
                    )
                ]
                of_tokens = torch.cat(parts, 1).view(len(QUANTITIES), *targets.shape)
                values[:, rows] = of_tokens.mean(2).cpu().numpy()
    finally:
        hook.remove()
    return dict(zip(QUANTITIES, values, strict=True))
