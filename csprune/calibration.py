"""The calibration pass: a model reads text, and its states become the statistics that rank directions.

Memory does not grow with the number of tokens: batches of documents are run up to the final norm, their
states are added to float64 sums, and the vocabulary is only ever seen for a chunk of tokens. (DESIGN
section 3; paper, Appendix C and E.4.)
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from csprune.accumulators import FisherSums, Moments
from csprune.corpus import Windows, check_fits
from csprune.errors import InputError
from csprune.files import atomic_file
from csprune.measures import check_finite
from csprune.readout import Readout, load_readout
from csprune.unembedding import Unembedding

POSITIONS = ("all", "last")
SCHEMA = 1
# Elements of a [tokens, V] matrix held at once (64 MiB in float32), and documents run at once.
CHUNK_ELEMENTS = 1 << 24
BATCH_SIZE = 8
# Batches between two saves of what an interrupted run resumes from.
_SAVE_EVERY = 16

Progress = Callable[[int, int], None]


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
            InputError: Other directions or settings, or a document in both.
        """
        keys = ("fingerprint", "positions", "skip_first", "sequence_length", "bos")
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
        }
        documents = self.documents + other.documents
        return Calibration(moments, fisher, self.directions, self.singular_values, documents, details)

    def save(self, path: str | Path) -> None:
        """Write one .safetensors file, atomically; the same statistics give the same bytes."""
        tensors = {
            **{f"moments.{k}": v for k, v in self.moments.tensors().items()},
            **{f"fisher.{k}": v for k, v in self.fisher.tensors().items()},
            "directions": self.directions,
            "singular_values": self.singular_values,
        }
        header = {"schema": SCHEMA, "documents": self.documents, "details": self.details}
        # One key: safetensors does not keep the order of several.
        metadata = {"csprune_calibration": json.dumps(header, sort_keys=True)}
        with atomic_file(path) as temporary:
            safetensors.torch.save_file(
                {k: v.contiguous().cpu() for k, v in tensors.items()}, temporary, metadata=metadata
            )

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            InputError: No such file, not a calibration, damaged, or of a newer schema.
        """
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no calibration file {path}: make one with `csprune calibrate`")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                header = json.loads(metadata.get("csprune_calibration", "null"))
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}): calibrate again") from error
        if header is None:
            raise InputError(f"{path} is not a csprune calibration: make one with `csprune calibrate`")
        if header.get("schema") != SCHEMA:
            raise InputError(
                f"{path} has schema {header.get('schema')}, this csprune reads {SCHEMA}: calibrate again"
            )

        def sums(prefix: str) -> dict[str, torch.Tensor]:
            start = len(prefix) + 1
            return {k[start:]: v for k, v in tensors.items() if k.startswith(prefix + ".")}

        try:
            calibration = Calibration(
                Moments(**sums("moments")),
                FisherSums(**sums("fisher")),
                tensors["directions"],
                tensors["singular_values"],
                tuple(header["documents"]),
                header["details"],
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} lacks statistics ({error}): calibrate again") from error
        bad = sum(int((~torch.isfinite(t)).sum()) for t in tensors.values())
        if bad:
            raise InputError(f"{path} has {bad} values that are not finite: calibrate again")
        return calibration

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
        partial: File that an interrupted run resumes from; removed at the end.
        progress: Called with (documents done, documents).

    Returns:
        The calibration, on the CPU.

    Raises:
        InputError: Impossible settings, tokens the model does not have, or a partial file of another run.
        CspruneError: States or logits that are not finite, with counts.
    """
    name = name or model_name(model)
    check_run(model, windows, positions, skip_first, batch_size, name)
    readout = load_readout(model, windows.input_ids) if readout is None else readout
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
    resume = _Partial(partial, details, moments, fisher) if partial else None
    start = resume.load() if resume else 0
    chunk = max(1, CHUNK_ELEMENTS // unembedding.vocabulary)
    for batch, first in enumerate(range(start, len(windows), batch_size)):
        if progress:
            progress(first, len(windows))
        if resume and batch and batch % _SAVE_EVERY == 0:
            resume.save(first)
        u = readout.states(windows.input_ids[first : first + batch_size])[:, skip_first:]
        moments.update(u.flatten(0, 1))
        taken = u[:, -1] if positions == "last" else u.flatten(0, 1)
        for part in taken.split(chunk):
            probabilities, slope = predictions(unembedding, part)
            fisher.update(part, directions, probabilities, slope, mapped)
            del probabilities, slope
    if progress:
        progress(len(windows), len(windows))
    details["tokens"] = int(moments.count)
    details["fisher_tokens"] = int(fisher.count)
    if resume:
        resume.remove()
    return Calibration(
        Moments(**{k: v.cpu() for k, v in moments.tensors().items()}),
        FisherSums(**{k: v.cpu() for k, v in fisher.tensors().items()}),
        directions.cpu(),
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
    return torch.softmax(logits, 1), unembedding.transform.slope(logits)


def fingerprint(readout: Readout) -> str:
    """SHA-256 that tells one model's weights from another's, whatever the folder is called.

    Every tensor takes part by its name, its shape and up to 4,096 evenly spaced values (as float32);
    the norm's gain wholly.
    """
    digest = hashlib.sha256(type(readout.model).__name__.encode())
    for key, value in sorted(readout.model.state_dict().items()):
        flat = value.detach().reshape(-1)
        step = max(1, flat.numel() // 4096)
        sample = flat[::step][:4097].float().cpu().contiguous()
        digest.update(f"{key}{tuple(value.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    digest.update(readout.norm.gain.cpu().numpy().tobytes())
    return digest.hexdigest()


def model_name(model: Any) -> str:
    """What a model calls itself: where it was loaded from, or its class."""
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


def max_positions(model: Any) -> int | None:
    """How long an input the model takes, if its config says so."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def versions() -> dict[str, str]:
    """Of csprune, what it computes with, and Python."""
    packages = ("csprune", "torch", "transformers", "tokenizers")
    return {**{p: version(p) for p in packages}, "python": platform.python_version()}


def _clone(sums):
    return type(sums)(**{k: v.clone() for k, v in sums.tensors().items()})


class _Partial:
    """What an interrupted calibration resumes from: the sums and how many documents they hold."""

    def __init__(self, path: str | Path, settings: dict, moments: Moments, fisher: FisherSums) -> None:
        self.path = Path(path)
        self.settings = json.dumps(settings, sort_keys=True)
        self.tensors = {
            **{f"moments.{k}": v for k, v in moments.tensors().items()},
            **{f"fisher.{k}": v for k, v in fisher.tensors().items()},
        }

    def load(self) -> int:
        """Fill the sums; the number of documents done, 0 if there is no file."""
        if not self.path.exists():
            return 0
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                saved = {key: file.get_tensor(key) for key in self.tensors}
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(
                f"{self.path} cannot be read ({error}): delete it to calibrate from the start"
            ) from error
        state = json.loads(metadata.get("csprune_partial", "{}"))
        if state.get("settings") != self.settings:
            raise InputError(
                f"{self.path} was left by a calibration of another model, text or settings: "
                "delete it, or repeat that command to resume it"
            )
        for key, value in self.tensors.items():
            value.copy_(saved[key])
        return state["documents"]

    def save(self, documents: int) -> None:
        state = {"documents": documents, "settings": self.settings}
        metadata = {"csprune_partial": json.dumps(state, sort_keys=True)}
        with atomic_file(self.path) as temporary:
            safetensors.torch.save_file(
                {k: v.contiguous().cpu() for k, v in self.tensors.items()},
                temporary,
                metadata=metadata,
            )

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
