"""The calibration pass: a model reads text, and its states become the statistics that rank directions.

Memory does not grow with the number of tokens: batches of documents are run up to the final norm, their
states are added to float64 sums, and the vocabulary is only ever seen for a chunk of tokens. (README,
Definitions; paper, Appendix C and E.4.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from csprune.accumulators import FisherSums, Moments
from csprune.changes import check_finite, log_softmax
from csprune.corpus import Windows, check_fits
from csprune.errors import InputError
from csprune.identity import fingerprint, max_positions, model_name, versions
from csprune.persistence import Partial, named, read_statistics, sums_of, write_statistics
from csprune.readout import Readout, load_readout
from csprune.unembedding import Unembedding

POSITIONS = ("all", "last")
SCHEMA = 1
# Elements of a [tokens, V] matrix held at once (64 MiB in float32), and documents run at once.
CHUNK_ELEMENTS = 1 << 24
BATCH_SIZE = 8

Progress = Callable[[int, int], None]
Sums = TypeVar("Sums", Moments, FisherSums)


@dataclass(frozen=True)
class Calibration:
    """The sums of a calibration pass, and what follows from them.

    Attributes:
        moments: Over all positions (from `skip_first` on), for the second moment.
        fisher: Over the Fisher positions: the same, or the last one of each document.
        directions: V, the basis of the Fisher sums, float64 [q, q].
        singular_values: sigma, float64 [q].
        documents: Ids of the documents read.
        details: What was read, how, by which versions; strings and numbers only.
    """

    moments: Moments
    fisher: FisherSums
    directions: torch.Tensor
    singular_values: torch.Tensor
    documents: tuple[str, ...]
    details: dict[str, Any]

    @property
    def width(self) -> int:
        """q."""
        return len(self.directions)

    @cached_property
    def mean_state(self) -> torch.Tensor:
        """mu, float64 [q], over the Fisher positions."""
        return self.fisher.state / self.fisher.count

    @cached_property
    def second_moment(self) -> torch.Tensor:
        """M about mu over all positions, float64 [q, q].

        `M = E[u u^T] - mu ubar^T - ubar mu^T + mu mu^T`; mu and ubar differ under `last`.
        """
        mu = self.mean_state
        mean = self.moments.state / self.moments.count
        cross = torch.outer(mu, mean)
        return self.moments.outer / self.moments.count - cross - cross.mT + torch.outer(mu, mu)

    @cached_property
    def saliency(self) -> torch.Tensor:
        """kappa, nats, float64 [q]: the expected Fisher term of removing each singular direction.

        `kappa_i = (S2 - 2 mu_i S1 + mu_i^2 S0) / 2n`, with mu_i = v_i . mu (paper, E.4).
        """
        f = self.fisher
        mu = self.mean_state @ self.directions
        total = f.variance_state2 - 2 * mu * f.variance_state + mu.square() * f.variance
        return total.clamp_min(0) / (2 * f.count)

    def mean_fisher(self, unembedding: Unembedding) -> torch.Tensor:
        """E[W^T S_p W], float64 [q, q] (with J under a soft cap)."""
        count = int(self.fisher.count)
        device = unembedding.device
        weighted = unembedding.weighted_gram((self.fisher.probability / count).to(device))
        basis = self.directions.to(device)
        return weighted - basis @ (self.fisher.outer.to(device) / count) @ basis.mT

    def merge(self, other: Calibration) -> Calibration:
        """The calibration of both texts together.

        Raises:
            InputError: Other directions, dtype or settings, or a document in both.
        """
        keys = ("fingerprint", "dtype", "positions", "skip_first", "sequence_length", "bos")
        differing = [k for k in keys if self.details[k] != other.details[k]]
        if differing or not torch.equal(self.directions, other.directions):
            what = ", ".join(differing) or "directions"
            raise InputError(f"calibrations with different {what} cannot be merged")
        if shared := len(set(self.documents) & set(other.documents)):
            raise InputError(f"{shared} documents stand in both calibrations: merge different texts")
        moments, fisher = _clone(self.moments), _clone(self.fisher)
        moments.merge(other.moments)
        fisher.merge(other.fisher)
        details = {
            **self.details,
            "corpus": {"merged": [self.details["corpus"], other.details["corpus"]]},
            "tokens": int(moments.count),
            "fisher_tokens": int(fisher.count),
        }
        documents = self.documents + other.documents
        return Calibration(moments, fisher, self.directions, self.singular_values, documents, details)

    def save(self, path: str | Path) -> None:
        """Write one .safetensors file, atomically; the same statistics give the same bytes.

        Raises:
            InputError: The folder does not exist or cannot be written.
        """
        header = {"schema": SCHEMA, "documents": self.documents, "details": self.details}
        basis = {"directions": self.directions, "singular_values": self.singular_values}
        write_statistics(Path(path), header, {**named(self.moments, self.fisher), **basis})

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            InputError: No such file, not a calibration, damaged, of another schema, or not finite.
        """
        header, tensors = read_statistics(Path(path), SCHEMA)
        try:
            return Calibration(
                *sums_of(tensors),
                tensors["directions"],
                tensors["singular_values"],
                tuple(header["documents"]),
                header["details"],
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} lacks statistics ({error}): calibrate again") from error

    def same_as(self, details: dict[str, Any]) -> bool:
        """Whether a calibration of these details read the same text with the same weights and settings."""
        keys = ("fingerprint", "dtype", "positions", "skip_first")
        return all(self.details[k] == details.get(k) for k in keys) and _texts(self.details) == _texts(
            details
        )

    def check_model(self, readout: Readout) -> None:
        """Refuse a calibration of another model.

        Raises:
            InputError: The fingerprints differ.
        """
        own = fingerprint(readout)
        if self.details["fingerprint"] != own:
            raise InputError(
                f"the calibration was made with {self.details['model']!r} in {self.details['dtype']}, whose "
                f"weights differ from this model's ({self.details['fingerprint'][:12]} and {own[:12]}): "
                "calibrate this one, or give the same model, revision and --dtype"
            )


@torch.no_grad()
def calibrate(
    model: Any,
    windows: Windows,
    positions: str = "all",
    skip_first: int = 0,
    *,
    readout: Readout | None = None,
    batch_size: int = BATCH_SIZE,
    name: str | None = None,
    partial: str | Path | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Stream text through a model and accumulate its statistics.

    Args:
        model: A transformers causal language model.
        windows: Token windows, from `read_windows`.
        positions: "all" takes everything at every position; "last" is the paper's protocol: mu and the
            Fisher statistics at the last position of each document, M over all its positions.
        skip_first: Positions left out at each document's beginning.
        readout: The model's readout, if it was loaded before.
        batch_size: Documents run at once. It changes rounding, and so is part of what must match to
            resume.
        name: The model's name for the record.
        partial: File that an interrupted run resumes from, saved about once a minute; removed at the end.
        progress: Called with (documents done, documents).

    Returns:
        The calibration, on the CPU.

    Raises:
        InputError: Impossible settings, tokens the model does not have, a readout of another model, or a
            partial file of another run.
        CspruneError: States or logits that are not finite, with counts.
    """
    name = name or model_name(model)
    check_run(model, windows, positions, skip_first, batch_size, name)
    readout = load_readout(model, windows.input_ids) if readout is None else readout
    readout.check_unchanged()
    if readout.model is not model:
        raise InputError("the readout is of another model object: load_readout() this one")
    unembedding = readout.unembedding
    directions = unembedding.directions
    mapped = unembedding.along(directions, unembedding.compute_dtype)
    moments = Moments.zeros(unembedding.width, unembedding.device)
    fisher = FisherSums.zeros(unembedding.width, unembedding.vocabulary, unembedding.device)
    details = {
        "model": name,
        "fingerprint": fingerprint(readout),
        "dtype": str(model.dtype).removeprefix("torch."),
        "positions": positions,
        "skip_first": skip_first,
        "batch_size": batch_size,
        "sequence_length": windows.sequence_length,
        "bos": windows.bos,
        "corpus": windows.describe(),
        "versions": versions(),
    }
    resume = Partial(partial, details, moments, fisher) if partial else None
    start = resume.load() if resume else 0
    chunk = max(1, CHUNK_ELEMENTS // unembedding.vocabulary)
    for first in range(start, len(windows), batch_size):
        if progress:
            progress(first, len(windows))
        u = readout.states(windows.input_ids[first : first + batch_size])[:, skip_first:]
        moments.update(u.flatten(0, 1))
        taken = u[:, -1] if positions == "last" else u.flatten(0, 1)
        for part in taken.split(chunk):
            probabilities, slope = predictions(unembedding, part)
            fisher.update(part, directions, probabilities, slope, mapped)
            del probabilities, slope
        if resume:
            resume.save_if_due(first + len(u))
    if progress:
        progress(len(windows), len(windows))
    details["tokens"] = int(moments.count)
    details["fisher_tokens"] = int(fisher.count)
    if resume:
        resume.remove()
    return Calibration(
        Moments(**{k: v.cpu() for k, v in moments.tensors().items()}),
        FisherSums(**{k: v.cpu() for k, v in fisher.tensors().items()}),
        # Laid out as a file gives it back: what follows from it is then the same to the last bit.
        directions.cpu().contiguous(),
        unembedding.singular_values.cpu(),
        windows.document_ids,
        details,
    )


def check_run(
    model: Any, windows: Windows, positions: str, skip_first: int, batch_size: int, name: str
) -> None:
    """Refuse settings that no pass of a model over windows can have.

    Raises:
        InputError: One line on what is wrong.
    """
    if positions not in POSITIONS:
        raise InputError(f"unknown positions {positions!r}: choose one of {', '.join(POSITIONS)}")
    length = windows.sequence_length
    if not 0 <= skip_first < length:
        raise InputError(
            f"skip_first {skip_first} leaves none of {length} positions: choose less than {length}"
        )
    if batch_size < 1:
        raise InputError(f"batch size {batch_size} is not positive: give at least 1")
    if len(windows) < 2:
        raise InputError(f"{len(windows)} document of {windows.source} is too few: give at least 2")
    check_fits(windows, model.get_input_embeddings().weight.shape[0], max_positions(model), name)


def predictions(unembedding: Unembedding, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """p [tokens, V] and, under a soft cap, J [tokens, V], in the compute dtype.

    Raises:
        CspruneError: A token's logits are not finite.
    """
    logits = unembedding.logits(u)
    check_finite(logits)
    slope = unembedding.transform.slope(logits)
    return log_softmax(logits)[1], slope


def _texts(details: dict[str, Any]) -> list[str]:
    """Identities of the texts, in no order: sums do not know one."""
    corpus = details["corpus"]
    return sorted(part["identity"] for part in corpus.get("merged", [corpus]))


def _clone(sums: Sums) -> Sums:
    return type(sums)(**{k: v.clone() for k, v in sums.tensors().items()})
