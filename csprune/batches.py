"""Batches of held-out documents: their final states, and the tokens that come next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from csprune.corpus import Windows
from csprune.readout import Readout

# Elements of a [tokens, V] matrix held at once (32 MiB in float32),
CHUNK_ELEMENTS = 1 << 23
# but not fewer tokens: each chunk reads what every truncation does to the whole vocabulary.
LEAST_TOKENS = 128


def tokens_at_once(vocabulary: int) -> int:
    """How many tokens' predictions are held at once."""
    return max(LEAST_TOKENS, CHUNK_ELEMENTS // vocabulary)


def batches(
    readout: Readout,
    windows: Windows,
    positions: str,
    skip_first: int,
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows of a batch of documents, their states u [documents, positions, q] and targets to measure."""
    start = windows.sequence_length - 1 if positions == "last" else skip_first
    for first in range(0, len(windows), batch_size):
        if progress:
            progress(first, len(windows))
        batch = slice(first, min(first + batch_size, len(windows)))
        u = readout.states(windows.input_ids[batch])[:, start:]
        yield batch, u, windows.target_ids[batch, start:].to(u.device)
    if progress:
        progress(len(windows), len(windows))
