"""A float64 oracle: the definitions of the README, written as naively as possible.

It shares no code with the package (it never imports it) and takes plain arrays, so that a mistake
in the package cannot hide behind the same mistake here. Projections and centring are dense; the
mean state is computed before anything about it; documents come one at a time; ``S_p = diag(p) -
p p^T`` is built explicitly for a small vocabulary and replaced by the algebraically equal variance
for a large one. Shapes: V vocabulary, d residual width, q directions (d, or d - 1 under LayerNorm),
T positions.

As a script, for a Llama-type model in a local folder::

    python tests/oracle.py MODEL CALIBRATION.jsonl EVALUATION.jsonl --rank 0.05 --rank 0.2

prints as JSON the base loss and, for each rank and each of the four deterministic methods, the
means over the evaluation documents of loss change, D, F, K and top-1 agreement.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

Array = np.ndarray
METHODS = ("singular", "fisher", "whitened", "fisher-whitened")
KINDS = ("rmsnorm", "layernorm")
EXPLICIT_VOCABULARY = 512  # up to this size S_p (V x V) is built explicitly


@dataclass(frozen=True)
class Folded:
    """The readout in its two uses (README, Definitions), all float64.

    Attributes:
        uncentred: `W_out diag(gamma) R`, [V, q]: the map that is executed; without the factor s.
        constant: `l0 = W_out beta + b`, [V]: without the factor s.
        weight: the W that ranks and measures, [V, q]: `s C_V uncentred`; under a cap `s uncentred`.
        basis: R, [d, q].
        factor: s.
        cap: c of `c tanh(x / c)`, or None.
    """

    uncentred: Array
    constant: Array
    weight: Array
    basis: Array
    factor: float
    cap: float | None


@dataclass(frozen=True)
class Statistics:
    """Calibration statistics (README, Definitions), all float64, from the definitions.

    Attributes:
        mean_state: mu, [q], over the Fisher positions.
        second_moment: `E[(u - mu)(u - mu)^T]`, [q, q], over the moment positions.
        mean_fisher: `E[W^T J S_p J W]`, [q, q], over the Fisher positions (J = 1 without a cap).
        saliency: kappa_i, [q], over the Fisher positions, in the order of `directions`.
        singular_values: sigma_i, [q], descending.
        directions: v_i as columns, [q, q].
        fisher_count: number of Fisher positions.
        moment_count: number of moment positions.
    """

    mean_state: Array
    second_moment: Array
    mean_fisher: Array
    saliency: Array
    singular_values: Array
    directions: Array
    fisher_count: int
    moment_count: int


class Captured(NamedTuple):
    """What the hooks saw of one document, float64."""

    residual: Array  # [T, d], r: the norm's input
    head_input: Array  # [T, d]
    head_output: Array  # [T, V], before T


# --- Section 1: the readout, folded and centred ---------------------------------------------------


def helmert(d: int) -> Array:
    """Orthonormal basis of the complement of the ones vector, [d, d - 1] (Helmert's contrasts).

    Column j (from 0) compares coordinate j + 1 with the mean of the coordinates 0..j.
    """
    basis = np.zeros((d, d - 1))
    for j in range(d - 1):
        basis[: j + 1, j] = 1.0
        basis[j + 1, j] = -(j + 1.0)
        basis[:, j] /= np.sqrt((j + 1.0) * (j + 2.0))
    return basis


def fold(
    W_out: Any,
    b: Any,
    gamma: Any,
    beta: Any,
    kind: str,
    *,
    factor: float = 1.0,
    cap: float | None = None,
) -> Folded:
    """Fold the norm's affine part into the head and centre over the vocabulary.

    Args:
        W_out: [V, d].
        b: [V] or None.
        gamma: [d] or None for ones; the *effective* gain (Gemma: the stored value plus 1).
        beta: [d] or None.
        kind: "rmsnorm" or "layernorm".
        factor: s, applied after the head and before the cap.
        cap: c of the soft cap `c tanh(x / c)`, or None.
    """
    head = np.asarray(W_out, dtype=np.float64)
    vocabulary, d = head.shape
    constant = np.zeros(vocabulary)
    if beta is not None:
        constant += head @ np.asarray(beta, dtype=np.float64)
    if b is not None:
        constant += np.asarray(b, dtype=np.float64)
    if gamma is not None:
        head = head * np.asarray(gamma, dtype=np.float64)[None, :]  # W_out diag(gamma)
    if kind == "layernorm":
        basis = helmert(d)
        uncentred = head @ basis
    elif kind == "rmsnorm":
        basis = np.eye(d)
        uncentred = head
    else:
        raise ValueError(f"kind {kind!r} is none of {KINDS}")
    weight = factor * uncentred
    if cap is None:  # a shift of the logits is harmless only where no cap follows
        weight = weight - weight.mean(axis=0, keepdims=True)
    return Folded(uncentred, constant, weight, basis, float(factor), cap)


def states(r: Any, kind: str, eps: float) -> Array:
    """u [..., q] of the residuals r [..., d]: normalised without gain and bias; `u = R^T z`."""
    r = np.asarray(r, dtype=np.float64)
    if kind == "layernorm":
        centred = r - r.mean(axis=-1, keepdims=True)
        z = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        return z @ helmert(r.shape[-1])
    if kind == "rmsnorm":
        return r / np.sqrt((r**2).mean(axis=-1, keepdims=True) + eps)
    raise ValueError(f"kind {kind!r} is none of {KINDS}")


def before_cap(folded: Folded, u: Array) -> Array:
    """x [..., V]: `s (W_unc u + l0)`, from the uncentred map."""
    return folded.factor * (u @ folded.uncentred.T + folded.constant)


def after_cap(folded: Folded, x: Array) -> Array:
    """l [..., V]: the logits the model gives out, `c tanh(x / c)` or x itself."""
    return x if folded.cap is None else folded.cap * np.tanh(x / folded.cap)


def cap_slope(folded: Folded, x: Array) -> Array:
    """The diagonal of `J = dl/dx`, [..., V]: `1 - (l / c)^2`, or ones without a cap."""
    if folded.cap is None:
        return np.ones_like(x)
    return 1.0 - (after_cap(folded, x) / folded.cap) ** 2


def log_softmax(logits: Array) -> Array:
    """log p over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def fisher_of(p: Array) -> Array:
    """`S_p = diag(p) - p p^T`, [V, V]."""
    return np.diag(p) - np.outer(p, p)


# --- Section 2: what a change is worth ------------------------------------------------------------


def fisher_term(p: Array, dl: Array) -> float:
    """`F = 1/2 dl^T S_p dl` in nats, p and dl [V]."""
    if p.shape[0] <= EXPLICIT_VOCABULARY:
        return float(0.5 * dl @ fisher_of(p) @ dl)
    return float(0.5 * (p @ dl**2 - (p @ dl) ** 2))


def measure(
    folded: Folded,
    u: Array,
    targets: Array,
    projection: Array,
    mean_state: Array,
    *,
    x: Array | None = None,
) -> dict[str, Array]:
    """What `du = -P (u - mu)` does at each position (README, Definitions).

    Args:
        folded: the readout.
        u: states, [T, q].
        targets: the true next tokens, int [T].
        projection: dense P, [q, q], orthogonal or oblique.
        mean_state: mu, [q].
        x: `before_cap(folded, u)` where it is known already (it costs as much as the rest).

    Returns:
        float64 [T] each: loss, entropy of the unchanged prediction, loss_change, fisher_term,
        prediction_change (nats), logit_distance (logit^2), top1_agreement (0 or 1).
    """
    u, targets = np.asarray(u, dtype=np.float64), np.asarray(targets)
    x = before_cap(folded, u) if x is None else x
    dx = (-(u - mean_state) @ projection.T) @ folded.weight.T
    names = ("loss", "entropy", "loss_change", "logit_distance", "fisher_term", "prediction_change")
    values = {name: np.zeros(len(u)) for name in (*names, "top1_agreement")}
    for t, y in enumerate(targets):
        before, after = after_cap(folded, x[t]), after_cap(folded, x[t] + dx[t])
        logp, logp_changed = log_softmax(before), log_softmax(after)
        p = np.exp(logp)
        dl = after - before
        values["loss"][t] = -logp[y]
        values["entropy"][t] = -np.sum(p * logp)
        values["loss_change"][t] = -logp_changed[y] + logp[y]
        values["logit_distance"][t] = np.sum((dl - dl.mean()) ** 2)
        values["fisher_term"][t] = fisher_term(p, cap_slope(folded, x[t]) * dx[t])
        values["prediction_change"][t] = np.sum(p * (logp - logp_changed))
        values["top1_agreement"][t] = float(before.argmax() == after.argmax())
    return values


# --- Section 3: statistics and truncation ---------------------------------------------------------


def directions(weight: Array) -> tuple[Array, Array]:
    """Singular values [q], descending, and right singular vectors as columns [q, q], of [V, q]."""
    eigenvalues, vectors = np.linalg.eigh(weight.T @ weight)
    return np.sqrt(np.clip(eigenvalues[::-1], 0.0, None)), vectors[:, ::-1]


def chosen(count: int, positions: str, skip_first: int) -> slice:
    """Positions, of a document's `count`, of mu, the Fisher statistics and measurements."""
    if not 0 <= skip_first < count:
        raise ValueError(f"skip_first {skip_first} leaves no position of {count}")
    if positions == "last":
        return slice(count - 1, count)
    if positions == "all":
        return slice(skip_first, count)
    raise ValueError(f"positions {positions!r} is neither 'last' nor 'all'")


def statistics(
    folded: Folded,
    documents: Sequence[Array],
    *,
    positions: str = "all",
    skip_first: int = 0,
    explicit: bool | None = None,
) -> Statistics:
    """mu, M, kappa and the mean Fisher of the documents' states, straight from the definitions.

    Under `positions="last"` the second moment is over *all* positions (from `skip_first` on) about
    the mu of the last ones.

    Args:
        folded: the readout.
        documents: states of each document, [T, q] each.
        positions: "last" or "all".
        skip_first: positions left out at each document's beginning.
        explicit: build `W^T J S_p J W` for every position (default: where V is small).
    """
    weight = folded.weight
    vocabulary, q = weight.shape
    explicit = vocabulary <= EXPLICIT_VOCABULARY if explicit is None else explicit
    singular_values, v = directions(weight)

    total, fisher_count = np.zeros(q), 0
    for u in documents:
        for state in u[chosen(len(u), positions, skip_first)]:
            total += state
            fisher_count += 1
    mean_state = total / fisher_count

    second_moment, moment_count = np.zeros((q, q)), 0
    for u in documents:
        deviation = u[chosen(len(u), "all", skip_first)] - mean_state
        second_moment += deviation.T @ deviation
        moment_count += len(deviation)
    second_moment /= moment_count

    saliency, fisher = np.zeros(q), np.zeros((q, q))
    z = weight @ v
    z_squared = None if explicit else z**2
    mean_pj2 = np.zeros(vocabulary)
    for u in documents:
        here = u[chosen(len(u), positions, skip_first)]
        x = before_cap(folded, here)
        p, slope = np.exp(log_softmax(after_cap(folded, x))), cap_slope(folded, x)
        coordinates = (here - mean_state) @ v
        if z_squared is None:
            for t in range(len(here)):
                map_ = slope[t][:, None] * weight
                information = map_.T @ fisher_of(p[t]) @ map_
                fisher += information
                for i in range(q):
                    saliency[i] += 0.5 * coordinates[t, i] ** 2 * (v[:, i] @ information @ v[:, i])
        else:
            # The same sums, linear in p: sum p (J Z)^2 - (sum p J Z)^2 for each direction, and
            # W^T diag(p J^2) W - m m^T with m = W^T (J p).
            variances = (p * slope**2) @ z_squared - ((p * slope) @ z) ** 2
            saliency += (0.5 * coordinates**2 * variances).sum(axis=0)
            mean_pj2 += (p * slope**2).sum(axis=0)
            m = (p * slope) @ weight
            fisher -= m.T @ m
    if not explicit:
        fisher += weight.T @ (mean_pj2[:, None] * weight)
    return Statistics(
        mean_state,
        second_moment,
        fisher / fisher_count,
        saliency / fisher_count,
        singular_values,
        v,
        fisher_count,
        moment_count,
    )


def removed_count(rank: float, q: int) -> int:
    """`m = round(rank q)`, at least 1 and leaving at least 1."""
    m = round(rank * q)
    if not 1 <= m <= q - 1:
        raise ValueError(f"rank {rank} removes {m} of {q} directions")
    return m


def projection(
    method: str,
    removed: int,
    *,
    folded: Folded | None = None,
    statistics: Statistics | None = None,
    basis: Array | None = None,
) -> Array:
    """Dense P [q, q] onto the removed subspace; `removed` = 0 gives the zero matrix.

    Args:
        method: one of METHODS, or "random".
        removed: m, the dimension of the subspace.
        folded: the readout (needed by whitened; enough for singular).
        statistics: the calibration (needed by fisher, whitened, fisher-whitened).
        basis: orthonormal columns [q, >= m] whose first m span the subspace of "random".
    """
    if method == "random":
        if basis is None:
            raise ValueError("random needs a basis")
        return basis[:, :removed] @ basis[:, :removed].T
    if method == "singular":
        if folded is not None:
            v = directions(folded.weight)[1]
        elif statistics is not None:
            v = statistics.directions
        else:
            raise ValueError("singular needs folded or statistics")
        chosen_v = v[:, v.shape[1] - removed :]
        return chosen_v @ chosen_v.T
    if statistics is None:
        raise ValueError(f"{method} needs statistics")
    if method == "fisher":
        smallest = np.argsort(statistics.saliency, kind="stable")[:removed]
        chosen_v = statistics.directions[:, smallest]
        return chosen_v @ chosen_v.T
    if method == "whitened":
        if folded is None:
            raise ValueError("whitened needs folded")
        return oblique(folded.weight.T @ folded.weight, statistics.second_moment, removed)
    if method == "fisher-whitened":
        return oblique(statistics.mean_fisher, statistics.second_moment, removed)
    raise ValueError(f"method {method!r} is none of {(*METHODS, 'random')}")


def oblique(metric: Array, second_moment: Array, removed: int) -> Array:
    """`P = S V_d V_d^T S^-1`, `M = S S^T`, V_d the eigenvectors of `S^T G S` with the least values.

    S is the symmetric square root: P does not depend on which root is taken. An M that is singular
    is refused: what to do then is the package's decision, not part of the definition.
    """
    eigenvalues, vectors = np.linalg.eigh(second_moment)
    if eigenvalues[0] <= 1e-12 * eigenvalues[-1]:
        raise ValueError("the second moment is singular: give more positions than directions")
    root = (vectors * np.sqrt(eigenvalues)) @ vectors.T
    inverse = (vectors / np.sqrt(eigenvalues)) @ vectors.T
    whitened = root.T @ metric @ root
    v = np.linalg.eigh(0.5 * (whitened + whitened.T))[1][:, :removed]
    return root @ v @ v.T @ inverse


def evaluate(
    folded: Folded,
    documents: Sequence[Array],
    targets: Sequence[Array],
    projections: Sequence[Array],
    mean_state: Array,
    *,
    positions: str = "all",
    skip_first: int = 0,
) -> list[dict[str, Array]]:
    """`measure` for each projection, averaged over each document's positions: [documents]."""
    rows: list[list[dict[str, Array]]] = [[] for _ in projections]
    for u, target in zip(documents, targets, strict=True):
        here = chosen(len(u), positions, skip_first)
        x = before_cap(folded, u[here])
        for row, p in zip(rows, projections, strict=True):
            row.append(measure(folded, u[here], target[here], p, mean_state, x=x))
    return [{name: np.array([d[name].mean() for d in row]) for name in row[0]} for row in rows]


# --- A model's states, and the script -------------------------------------------------------------


def capture(
    model: torch.nn.Module,
    input_ids: Any,
    norm_module: torch.nn.Module,
    head_module: torch.nn.Module,
) -> Captured:
    """Run one document (ids [T]) through the model; hooks give r and what the head reads, gives."""
    seen: dict[str, Array] = {}

    def keep(name: str, value: Any) -> None:
        if name in seen:
            raise RuntimeError(f"{name} was seen twice in one forward pass")
        seen[name] = value.detach()[0].double().cpu().numpy()

    hooks = [
        norm_module.register_forward_pre_hook(lambda _, args: keep("residual", args[0])),
        head_module.register_forward_pre_hook(lambda _, args: keep("head_input", args[0])),
        head_module.register_forward_hook(lambda _, args, out: keep("head_output", out)),
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.as_tensor(input_ids).reshape(1, -1))
    finally:
        for hook in hooks:
            hook.remove()
    return Captured(seen["residual"], seen["head_input"], seen["head_output"])


def read_ids(tokenizer: Any, path: str, count: int, length: int) -> list[list[int]]:
    """`ids[:length + 1]` of the first `count` documents of a .jsonl that are long enough."""
    found: list[list[int]] = []
    for line in Path(path).read_text(encoding="utf-8").split("\n"):
        if line.strip() and len(found) < count:
            ids = tokenizer(json.loads(line)["text"])["input_ids"]
            if len(ids) >= length + 1:
                found.append(ids[: length + 1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The script (see the module's docstring)."""
    parser = argparse.ArgumentParser(description="float64 oracle for a Llama-type model")
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("--positions", choices=("last", "all"), default="last")
    parser.add_argument("--skip-first", type=int, default=0)
    parser.add_argument("--rank", type=float, action="append")
    parser.add_argument("--documents", type=int, default=256, help="at most, of each file")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args(arguments)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    norm, head = model.model.norm, model.lm_head
    bias = None if head.bias is None else head.bias.detach().double().numpy()
    gamma = norm.weight.detach().double().numpy()
    folded = fold(head.weight.detach().double().numpy(), bias, gamma, None, "rmsnorm")

    limits = (options.documents, options.sequence_length)
    states_of: dict[str, list[Array]] = {}
    targets: list[Array] = []
    worst = 0.0
    for name in ("calibration", "evaluation"):
        documents = read_ids(tokenizer, getattr(options, name), *limits)
        if name == "evaluation":
            targets = [np.array(ids[1:]) for ids in documents]
        states_of[name] = []
        for n, ids in enumerate(documents, 1):
            captured = capture(model, ids[:-1], norm, head)
            u = states(captured.residual, "rmsnorm", norm.variance_epsilon)
            states_of[name].append(u)
            if n <= 2:  # proof that this is the model's own readout
                error = before_cap(folded, u) - captured.head_output
                worst = max(worst, float(error.std() / captured.head_output.std()))
            print(f"{name}: {n} of {len(documents)} documents", end="\r", file=sys.stderr)
        print(file=sys.stderr)
    del model, head

    where = {"positions": options.positions, "skip_first": options.skip_first}
    found = statistics(folded, states_of["calibration"], **where)
    q = folded.weight.shape[1]
    labels = [(rank, method) for rank in options.rank or [0.05, 0.2] for method in METHODS]
    projections = [
        projection(method, removed_count(rank, q), folded=folded, statistics=found) for rank, method in labels
    ]
    values = evaluate(folded, states_of["evaluation"], targets, projections, found.mean_state, **where)
    table = [
        {
            "rank": rank,
            "method": method,
            "removed": removed_count(rank, q),
            "loss_change": float(row["loss_change"].mean()),
            "D": float(row["logit_distance"].mean()),
            "F": float(row["fisher_term"].mean()),
            "K": float(row["prediction_change"].mean()),
            "top1_agreement": float(row["top1_agreement"].mean()),
        }
        for (rank, method), row in zip(labels, values, strict=True)
    ]
    result = {
        "base_loss": float(values[0]["loss"].mean()),
        "documents": [len(states_of["calibration"]), len(states_of["evaluation"])],
        **where,
        "readout_relative_rms_error": worst,
        "table": table,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
