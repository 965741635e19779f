"""A float64 oracle of the analyses: the paper's definitions, written as naively as possible.

Like `oracle`, on which it builds, it never imports the package and takes and gives plain arrays:
dense projections, explicit `S_p`, all pairs of a small vocabulary, one document at a time. Shapes:
n documents (one position each), q directions, V vocabulary, d residual width, S random subspaces.
Changes are `du` [n, q] of the states u [n, q], or [S, n, q] of all the subspaces.

Nothing here draws a random number: bases, permutations and pairs are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import oracle
from oracle import Array, Folded

# --- Bands and changes (Section 2) ----------------------------------------------------------------


def bands(q: int, count: int) -> list[tuple[int, int]]:
    """Directions `round((b-1) q/B) .. round(b q/B)` of each band, the top one first, as [start, stop)."""
    edges = [round(b * q / count) for b in range(count + 1)]
    return [(edges[b], edges[b + 1]) for b in range(count)]


def projector(columns: Array) -> Array:
    """Dense projection [q, q] onto the span of orthonormal columns [q, m]."""
    return columns @ columns.T


def change(u: Array, projection: Array, centre: Any) -> Array:
    """`du = -P (u - centre)`, [n, q]; the centre is mu, a state of each document [n, q], or 0."""
    return np.array([-projection @ deviation for deviation in u - centre])


def squared_lengths(du: Array) -> Array:
    """`|du|^2` of each document: [n] of [n, q], [S, n] of [S, n, q]."""
    return (du**2).sum(axis=-1)


def random_changes(u: Array, bases: Sequence[Array], centre: Any) -> Array:
    """The changes along each random subspace, not rescaled, [S, n, q]; bases [q, m] each."""
    return np.array([change(u, projector(basis), centre) for basis in bases])


def to_equal_length(changes: Array, du: Array) -> Array:
    """Changes [S, n, q] rescaled document by document to the length of du [n, q]."""
    rescaled = np.zeros_like(changes)
    for s in range(changes.shape[0]):
        for i in range(changes.shape[1]):
            length = np.linalg.norm(changes[s, i])
            rescaled[s, i] = changes[s, i] * (np.linalg.norm(du[i]) / length)
    return rescaled


def calibration_coefficient(
    calibration_states: Array, projection: Array, bases: Sequence[Array], centre: Any
) -> float:
    """The one coefficient a of all subspaces and documents (Appendix C).

    `a^2 mean_{s, i} |du_s|^2 = mean_i |du_b|^2`, i over the calibration documents.
    """
    of_band = squared_lengths(change(calibration_states, projection, centre)).mean()
    of_random = squared_lengths(random_changes(calibration_states, bases, centre)).mean()
    return float(np.sqrt(of_band / of_random))


# --- The logits of a change -----------------------------------------------------------------------


class Logits(NamedTuple):
    """A change of the final logits; without a cap `first_order = after - before`."""

    before: Array  # [n, V]
    after: Array  # [n, V]
    first_order: Array  # [n, V], what the Fisher term is taken of: J W du


def fixed_scale(folded: Folded, u: Array, du: Array) -> Logits:
    """The change with the norm's scale held fixed: `W (u + du) + l0`."""
    x = oracle.before_cap(folded, u)
    dx = folded.factor * (du @ folded.uncentred.T)
    before = oracle.after_cap(folded, x)
    return Logits(before, oracle.after_cap(folded, x + dx), oracle.cap_slope(folded, x) * dx)


def scale(r: Array, kind: str, eps: float) -> float:
    """s(r) of one residual [d] (Appendix A)."""
    centred = r - r.mean() if kind == "layernorm" else r
    return float(np.sqrt((centred**2).mean() + eps))


def natural_path(folded: Folded, r: Array, kind: str, eps: float, du: Array) -> Logits:
    """`r' = r + s(r) R du`, the norm recomputed (Appendix C); r [n, d].

    The change of the logits is not linear in du, so the Fisher term is that of the whole change.
    """
    changed = np.array([r[i] + scale(r[i], kind, eps) * (folded.basis @ du[i]) for i in range(len(r))])
    before, after = (
        oracle.after_cap(folded, oracle.before_cap(folded, oracle.states(x, kind, eps))) for x in (r, changed)
    )
    return Logits(before, after, after - before)


def without_parallel(logits: Logits) -> Logits:
    """The same without the change's component along the unchanged logits, both centred (E.1)."""
    left = np.zeros_like(logits.before)
    for i, before in enumerate(logits.before):
        dl = logits.after[i] - before
        dl, along = dl - dl.mean(), before - before.mean()
        left[i] = dl - (dl @ along) / (along @ along) * along
    return Logits(logits.before, logits.before + left, left)


# --- What a change does ---------------------------------------------------------------------------


def effects(logits: Logits, targets: Array) -> dict[str, Array]:
    """What each document's change does, [n] each.

    Returns:
        logit_distance D, fisher_term F, prediction_change K (nats), loss_change (nats), brier
        (`sum_j (p'_j - p_j)^2`), top1_agreement (0 or 1), new_top (a token), to_runner_up (1 where
        the new top token is the unchanged runner-up), old_top_rank (1 + how many tokens have a
        larger changed logit), right_before and right_after (1 where the top token is the target).
    """
    names = """logit_distance fisher_term prediction_change loss_change brier top1_agreement new_top
        to_runner_up old_top_rank right_before right_after""".split()
    values = {name: np.zeros(len(targets)) for name in names}
    for i, y in enumerate(targets):
        before, after = logits.before[i], logits.after[i]
        log_p, log_changed = oracle.log_softmax(before), oracle.log_softmax(after)
        p, changed, dl = np.exp(log_p), np.exp(log_changed), after - before
        top, runner_up = leading(before)[:2]
        new_top = int(after.argmax())
        values["logit_distance"][i] = np.sum((dl - dl.mean()) ** 2)
        values["fisher_term"][i] = oracle.fisher_term(p, logits.first_order[i])
        values["prediction_change"][i] = np.sum(p * (log_p - log_changed))
        values["loss_change"][i] = log_p[y] - log_changed[y]
        values["brier"][i] = np.sum((changed - p) ** 2)
        values["top1_agreement"][i] = new_top == top
        values["new_top"][i] = new_top
        values["to_runner_up"][i] = new_top == runner_up
        values["old_top_rank"][i] = 1 + np.sum(after > after[top])
        values["right_before"][i] = top == y
        values["right_after"][i] = new_top == y
    return values


def effects_of_all(folded: Folded, u: Array, changes: Array, targets: Array) -> dict[str, Array]:
    """`effects` of each subspace's changes [S, n, q] at a fixed scale: [S, n] each."""
    rows = [effects(fixed_scale(folded, u, du), targets) for du in changes]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def leading(logits: Array) -> Array:
    """Tokens of one prediction [V], the most probable first; of equal ones the first."""
    return np.argsort(-logits, kind="stable")


def entropy(logits: Array) -> Array:
    """Entropy of each unchanged prediction, nats, [n] of [n, V]."""
    return np.array([-np.sum(np.exp(x) * x) for x in oracle.log_softmax(logits)])


def margin(logits: Array) -> Array:
    """`l_1 - l_2` of each unchanged prediction, [n] of [n, V]."""
    return np.array([np.sort(x)[-1] - np.sort(x)[-2] for x in logits])


def divergence_at(logits: Logits, temperature: float) -> Array:
    """`K_T = KL(softmax(l/T) || softmax((l+dl)/T))`, [n]; `T^2 K_T -> D/(2V)` (Appendix B)."""
    values = np.zeros(len(logits.before))
    for i in range(len(values)):
        log_p = oracle.log_softmax(logits.before[i] / temperature)
        log_changed = oracle.log_softmax(logits.after[i] / temperature)
        values[i] = np.sum(np.exp(log_p) * (log_p - log_changed))
    return values


def chain_rule(logits: Logits) -> dict[str, Array]:
    """K split at the unchanged prediction's leading pair (Section 4.2), [n] each; they sum to K.

    Each part is its own divergence, none a remainder: `between` the pair's total and the rest's,
    `within` the pair, weighted by the pair's probability, and `rest` among the others, by theirs.
    """
    values = {name: np.zeros(len(logits.before)) for name in ("between", "within", "rest")}
    for i, (before, after) in enumerate(zip(logits.before, logits.after, strict=True)):
        order = leading(before)
        for name, tokens in (("within", order[:2]), ("rest", order[2:])):
            # Log-probabilities of the part: of its total, and of each token given the part.
            total = log_sum(before[tokens]) - log_sum(before)
            total_changed = log_sum(after[tokens]) - log_sum(after)
            given, given_changed = oracle.log_softmax(before[tokens]), oracle.log_softmax(after[tokens])
            values[name][i] = np.exp(total) * np.sum(np.exp(given) * (given - given_changed))
            values["between"][i] += np.exp(total) * (total - total_changed)
    return values


def log_sum(logits: Array) -> float:
    """`log sum_j exp(l_j)`."""
    return float(logits.max() + np.log(np.sum(np.exp(logits - logits.max()))))


# --- Against the references: values [n] of the band's change, [S, n] of the references ------------


def pooled_ratio(band: Array, references: Array) -> float:
    """`sum / sum`, the references' sum a mean over subspaces."""
    return float(band.sum() / references.sum(axis=1).mean())


def excess(band: Array, references: Array) -> Array:
    """The band's value less the mean of the references', document by document, [n]."""
    return band - references.mean(axis=0)


def document_ratios(band: Array, references: Array) -> Array:
    """The band's value over the mean of the references', document by document, [n]."""
    return band / references.mean(axis=0)


def consequence(band: Array, distance: Array, references: Array, reference_distances: Array) -> float:
    """C_b (Section 2.3): `(sum F / sum D) / (sum F_ref / sum D_ref)`; K or the loss in place of F."""
    return pooled_ratio(band, references) / pooled_ratio(distance, reference_distances)


def document_consequences(
    band: Array, distance: Array, references: Array, reference_distances: Array
) -> Array:
    """`(F_b/D_b) / (mean_s F_s / mean_s D_s)` of each document, [n]; C_b's other figure is the median."""
    return document_ratios(band, references) / document_ratios(distance, reference_distances)


def share_above_one(ratios: Array) -> float:
    """Share of the documents whose ratio is above one (3.1: F per unit, K per unit, K in total)."""
    return sum(ratio > 1.0 for ratio in ratios) / len(ratios)


def concentration(excesses: Array) -> float:
    """Share of the summed excess in the tenth of documents (rounded, at least one) with the most."""
    most = sorted(excesses, reverse=True)[: max(1, round(len(excesses) / 10))]
    return float(sum(most) / sum(excesses))


def in_groups(key: Array, values: Array, count: int) -> Array:
    """Means of values over `count` groups of documents in the order of key, the smallest first.

    Ten by contrast share (Figure 3c), three by entropy (E.3); the edges are `round(g n/count)`.
    """
    order = np.argsort(key, kind="stable")
    return np.array([values[order[start:stop]].mean() for start, stop in bands(len(key), count)])


# --- Bases and subspaces (E.1) --------------------------------------------------------------------


def right_singular(matrix: Array) -> tuple[Array, Array]:
    """Singular values [q], descending, and right singular vectors [q, q] as columns, by the SVD."""
    _, sigma, rows = np.linalg.svd(matrix, full_matrices=True)
    return np.concatenate([sigma, np.zeros(len(rows) - len(sigma))]), rows.T


def folded_bands(folded: Folded, centred: bool = True) -> Array:
    """Directions [q, q] of the folded readout: of the W that ranks, or of the uncentred map."""
    return right_singular(folded.weight if centred else folded.uncentred)[1]


def raw_readout(W_out: Any, b: Any, factor: float = 1.0, cap: float | None = None) -> Folded:
    """The raw unembedding as a readout of the states h, [V, d]; its D is of centred logits as ever.

    Its bands are the right singular vectors of W_out, neither folded nor centred:
    `folded_bands(raw, centred=False)`.
    """
    return oracle.fold(W_out, b, None, None, "rmsnorm", factor=factor, cap=cap)


def raw_states(folded: Folded, u: Array, gamma: Any, beta: Any) -> Array:
    """`h = gamma * z + beta`, [n, d], what the head reads; `z = R u`."""
    z = u @ folded.basis.T
    gain = 1.0 if gamma is None else np.asarray(gamma, dtype=np.float64)
    return gain * z + (0.0 if beta is None else np.asarray(beta, dtype=np.float64))


def extreme_coordinates(folded: Folded, u: Array, count: int, by: str) -> list[int]:
    """The coordinates of z = R u largest by "mean_square" or "variance" over the documents, in order."""
    z = u @ folded.basis.T
    centre = {"mean_square": 0.0, "variance": z.mean(axis=0)}[by]
    size = ((z - centre) ** 2).mean(axis=0)
    return sorted(int(j) for j in np.argsort(-size, kind="stable")[:count])


def coordinate_span(folded: Folded, coordinates: Sequence[int]) -> Array:
    """Orthonormal basis [q, .] of `E = span R^T e_j`: the u-directions that move coordinates j of z."""
    return orthonormal(np.array([folded.basis.T @ np.eye(len(folded.basis))[j] for j in coordinates]).T)


def orthonormal(columns: Array, tolerance: float = 1e-9) -> Array:
    """Orthonormal basis of the columns' span; what is below tolerance of the largest is no direction."""
    vectors, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return vectors[:, sizes > tolerance * sizes.max()]


def outside(columns: Array, span: Array) -> Array:
    """Orthonormal basis of `(I - E) V_b`, for orthonormal bases `columns` of V_b and `span` of E."""
    return orthonormal(columns - span @ (span.T @ columns))


def complement(span: Array) -> Array:
    """Orthonormal basis [q, q - e] of the complement of an orthonormal `span` [q, e]."""
    return np.linalg.svd(span, full_matrices=True)[0][:, span.shape[1] :]


def within_complement(span: Array, gaussian: Array) -> Array:
    """A subspace, Haar in the complement of `span`, from a Gaussian [q - e, m] of the caller."""
    return complement(span) @ np.linalg.qr(gaussian)[0]


def near_zero(sigma: Array, start: int, stop: int, fraction: float = 0.05) -> list[int]:
    """Directions of the band [start, stop) with `sigma_i < fraction * median` of the band's sigma."""
    limit = fraction * np.median(sigma[start:stop])
    return [i for i in range(start, stop) if sigma[i] < limit]


def carried(u: Array, mean_state: Array, part: Array, whole: Array) -> tuple[float, float]:
    """Share of `|du|^2` of the subspace `whole` [q, m] that lies in its subspace `part` [q, m0].

    Returns:
        The mean over documents of the ratio, and the ratio of the sums.
    """
    of_part = squared_lengths(change(u, projector(part), mean_state))
    of_whole = squared_lengths(change(u, projector(whole), mean_state))
    return float((of_part / of_whole).mean()), float(of_part.sum() / of_whole.sum())


def top_variance(calibration_states: Array, mean_state: Array, removed: int) -> Array:
    """Leading eigenvectors [q, m] of the calibration states' covariance about mu."""
    moment = np.zeros((len(mean_state), len(mean_state)))
    for state in calibration_states:
        moment += np.outer(state - mean_state, state - mean_state) / len(calibration_states)
    return np.linalg.eigh(moment)[1][:, ::-1][:, :removed]


def overlap(first: Array, second: Array) -> float:
    """`tr(P_a P_b) / m`, P onto the ranges of columns [q, m] and [q, .]: the share of a inside b.

    An oblique removal counts by its range, the subspace in which it changes the state.
    """
    a, b = orthonormal(first), orthonormal(second)
    return float(np.trace(projector(a) @ projector(b)) / a.shape[1])


# --- Contrasts (Section 4.1): shares are [bands] or [n], for dense projections --------------------


def contrast_share(weight: Array, first: int, second: int, projection: Array) -> float:
    """`|P (w_1 - w_2)|^2 / |w_1 - w_2|^2`; for a band's P its contrast share."""
    contrast = weight[first] - weight[second]
    return float(contrast @ projection @ contrast / (contrast @ contrast))


def candidates_shares(weight: Array, logits: Array, projection: Array, other: int = 2) -> Array:
    """Share of the contrast of each document's first and `other`-th candidate (2 or 3), [n]."""
    orders = [leading(x) for x in logits]
    return np.array([contrast_share(weight, o[0], o[other - 1], projection) for o in orders])


def uniform_pair(weight: Array, projection: Array) -> tuple[float, float]:
    """The uniform pair's share, over all V (V - 1) / 2 pairs.

    Returns:
        The mean of the pairs' shares, and the ratio of the sums (the band's share of sigma^2).
    """
    shares, inside, whole = [], 0.0, 0.0
    for i in range(len(weight)):
        for j in range(i):
            contrast = weight[i] - weight[j]
            shares.append(contrast_share(weight, i, j, projection))
            inside += contrast @ projection @ contrast
            whole += contrast @ contrast
    return float(np.mean(shares)), inside / whole


def uniform_pair_closed_form(weight: Array, projection: Array) -> float:
    """The ratio of the sums without the pairs: `|C W P|^2 / |C W|^2` (W centred here, whatever it was)."""
    centred = weight - weight.mean(axis=0)
    return float(((centred @ projection) ** 2).sum() / (centred**2).sum())


def pair_probability(p: Array, i: int, j: int) -> float:
    """Of the unordered pair {i, j}: two draws in proportion to p, the second among the others."""
    return float(p[i] * p[j] / (1.0 - p[i]) + p[j] * p[i] / (1.0 - p[j]))


def frequency_pair(weight: Array, p: Array, projection: Array) -> float:
    """Expected share of two distinct tokens drawn in proportion to p, the mean calibration prediction."""
    pairs = [(i, j) for i in range(len(p)) for j in range(i)]
    return sum(pair_probability(p, i, j) * contrast_share(weight, i, j, projection) for i, j in pairs)


def mean_prediction(folded: Folded, calibration_states: Array) -> Array:
    """Mean probability of each token over the calibration documents, [V]."""
    logits = oracle.after_cap(folded, oracle.before_cap(folded, calibration_states))
    return np.mean([np.exp(oracle.log_softmax(x)) for x in logits], axis=0)


# --- Correlation and regression -------------------------------------------------------------------


def correlation(a: Array, b: Array) -> float:
    """Pearson's."""
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / np.sqrt((a @ a) * (b @ b)))


def log_correlation(a: Array, b: Array) -> float:
    """Correlation of the logarithms of two spectra over the bands: share ratio and C_b (Figure 3a)."""
    return correlation(np.log(a), np.log(b))


def spearman(a: Array, b: Array) -> float:
    """Correlation of the ranks; equal values have the mean of their ranks."""

    def ranks(x: Array) -> Array:
        return np.array([np.sum(x < value) + 0.5 * (np.sum(x == value) - 1) for value in x])

    return correlation(ranks(a), ranks(b))


def regression(outcome: Array, *predictors: Array) -> Array:
    """Least squares with an intercept, by the normal equations: [intercept, slope, slope, ...].

    In E.3: the loss excess on the contrast share, the entropy and the margin.
    """
    design = np.column_stack([np.ones(len(outcome)), *predictors])
    return np.linalg.solve(design.T @ design, design.T @ outcome)


# --- Parts of K against the references ------------------------------------------------------------


def part_share_difference(
    part: Array, whole: Array, reference_part: Array, reference_whole: Array
) -> tuple[float, float]:
    """A part's share of K less the same share for the random changes (Section 4.2, E.3).

    Returns:
        With ratios of sums over documents, and as a mean over documents of the differences.
    """
    pooled = part.sum() / whole.sum() - reference_part.sum() / reference_whole.sum()
    each = part / whole - reference_part.mean(axis=0) / reference_whole.mean(axis=0)
    return float(pooled), float(each.mean())


def part_of_excess(part: Array, whole: Array, reference_part: Array, reference_whole: Array) -> float:
    """A part's share of the band's excess K over its random changes (Figure 9b)."""
    return float(excess(part, reference_part).sum() / excess(whole, reference_whole).sum())


# --- Donors (Section 4.2, Appendix C, E.3) --------------------------------------------------------


def is_matched(logits: Array, recipient: int, donor: int) -> bool:
    """Whether the donor's top token is the recipient's runner-up; logits [n, V]."""
    return leading(logits[donor])[0] == leading(logits[recipient])[1]


def donor_transfer(
    folded: Folded, u: Array, pairs: Sequence[tuple[int, int]], projection: Array, bases: Sequence[Array]
) -> dict[str, Array]:
    """What replacing the band's component by a donor's does, `du = -P (u_i - u_j)`, [pairs] each.

    Returns:
        gap (the donor's log-odds of the recipient's leading pair less the recipient's own), shift
        (the change of those log-odds), random_shift (the mean over random replacements of equal
        length), fraction (of the gap closed beyond random), predicted (the band's contrast share
        less the random subspaces' mean), adopted and random_adopted (whether the donor's top token
        becomes the prediction; for random, how often), donor_rank (the donor's rank of the
        recipient's top token).
    """
    logits = oracle.after_cap(folded, oracle.before_cap(folded, u))
    names = "gap shift random_shift fraction predicted adopted random_adopted donor_rank".split()
    values = {name: np.zeros(len(pairs)) for name in names}
    for k, (i, j) in enumerate(pairs):
        first, second = leading(logits[i])[:2]

        def log_odds(x: Array, first: int = first, second: int = second) -> float:
            return x[first] - x[second]

        own, du = u[i : i + 1], change(u[i : i + 1], projection, u[j])
        random = to_equal_length(random_changes(own, bases, u[j]), du)
        after = fixed_scale(folded, own, du).after[0]
        random_after = [fixed_scale(folded, own, du_s).after[0] for du_s in random]
        gap = log_odds(logits[j]) - log_odds(logits[i])
        shift = log_odds(after) - log_odds(logits[i])
        random_shift = np.mean([log_odds(x) - log_odds(logits[i]) for x in random_after])
        share = contrast_share(folded.weight, first, second, projection)
        random_share = np.mean([contrast_share(folded.weight, first, second, projector(b)) for b in bases])
        donors_top = logits[j].argmax()
        values["gap"][k], values["shift"][k], values["random_shift"][k] = gap, shift, random_shift
        values["fraction"][k] = (shift - random_shift) / gap
        values["predicted"][k] = share - random_share
        values["adopted"][k] = after.argmax() == donors_top
        values["random_adopted"][k] = np.mean([x.argmax() == donors_top for x in random_after])
        values["donor_rank"][k] = 1 + np.sum(logits[j] > logits[j, first])
    return values


def pooled_fraction(gap: Array, shift_beyond_random: Array) -> float:
    """`sum sign(gap) (shift beyond random) / sum |gap|`."""
    return float(np.sum(np.sign(gap) * shift_beyond_random) / np.sum(np.abs(gap)))


def linked_groups(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """A group number of each pair: pairs share one where documents that they share link them."""
    groups, before = list(range(len(pairs))), None
    while groups != before:
        before = list(groups)
        for a, first in enumerate(pairs):
            for b, second in enumerate(pairs):
                if set(first) & set(second):
                    groups[a] = groups[b] = min(groups[a], groups[b])
    return groups
