"""The analyses' oracle against closed forms and theorems; each property with a control that must fail."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import analysis_oracle as found
import numpy as np
import oracle
import pytest
import scipy.stats
from oracle import Array, Folded
from scipy.special import softmax

DOCUMENTS, WIDTH, VOCABULARY, BANDS, SUBSPACES = 30, 13, 23, 4, 3
EPS = 1e-3


@dataclass(frozen=True)
class Random:
    """A readout with nothing convenient in it, states of two sets of documents, and subspaces."""

    folded: Folded
    kind: str
    gamma: Array
    beta: Array
    head: Array
    bias: Array
    residuals: Array
    u: Array
    calibration: Array
    mean: Array
    targets: Array
    directions: Array

    @property
    def q(self) -> int:
        return self.u.shape[1]

    def band(self, b: int) -> Array:
        start, stop = found.bands(self.q, BANDS)[b]
        return self.directions[:, start:stop]

    def bases(self, columns: int, count: int = SUBSPACES) -> list[Array]:
        rng = np.random.default_rng(7)
        return [np.linalg.qr(rng.normal(size=(self.q, columns)))[0] for _ in range(count)]


def build(kind: str = "layernorm", cap: float | None = None, factor: float = 1.0) -> Random:
    rng = np.random.default_rng(0)
    head = rng.normal(size=(VOCABULARY, WIDTH)) * np.geomspace(1.5, 0.3, WIDTH)
    bias, beta = rng.normal(size=VOCABULARY), rng.normal(size=WIDTH)
    gamma = 1.0 + 0.4 * rng.normal(size=WIDTH)
    folded = oracle.fold(head, bias, gamma, beta, kind, factor=factor, cap=cap)
    shift = rng.normal(size=WIDTH)
    residuals, others = (shift + 2.0 * rng.normal(size=(DOCUMENTS, WIDTH)) for _ in range(2))
    u, calibration = oracle.states(residuals, kind, EPS), oracle.states(others, kind, EPS)
    return Random(
        folded,
        kind,
        gamma,
        beta,
        head,
        bias,
        residuals,
        u,
        calibration,
        calibration.mean(axis=0),
        rng.integers(VOCABULARY, size=DOCUMENTS),
        found.folded_bands(folded),
    )


@pytest.fixture(
    scope="module", params=[("layernorm", None, 1.0), ("rmsnorm", None, 0.5), ("rmsnorm", 3.0, 2.0)]
)
def case(request: pytest.FixtureRequest) -> Random:
    return build(*request.param)


@pytest.fixture(scope="module")
def plain() -> Random:
    return build()


def changed(case: Random, columns: Array) -> tuple[Array, found.Logits, dict[str, Array]]:
    du = found.change(case.u, found.projector(columns), case.mean)
    logits = found.fixed_scale(case.folded, case.u, du)
    return du, logits, found.effects(logits, case.targets)


def given(probabilities: Any, changed_probabilities: Any) -> found.Logits:
    """One document whose prediction changes from the one to the other."""
    before, after = np.log(np.array([probabilities])), np.log(np.array([changed_probabilities]))
    return found.Logits(before, after, after - before)


def test_the_oracle_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(found.__file__).read_text(encoding="utf-8"))
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    ]
    assert "oracle" in names and not any(name.split(".")[0] == "csprune" for name in names)


# --- Bands and changes ----------------------------------------------------------------------------


def test_bands_partition_the_directions_and_have_the_papers_sizes() -> None:
    assert found.bands(10, 4) == [(0, 2), (2, 5), (5, 8), (8, 10)]
    for q, bottom in ((4096, 205), (2048, 102)):  # Section A: Llama, Qwen
        edges = found.bands(q, 20)
        assert [i for start, stop in edges for i in range(start, stop)] == list(range(q))
        assert edges[-1][1] - edges[-1][0] == bottom
    assert found.bands(2048, 20)[-1][0] != 2048 // 20 * 19  # control: floors give another bottom band


def test_band_changes_sum_to_the_whole_and_their_distances_add_up(plain: Random) -> None:
    parts = [changed(plain, plain.band(b)) for b in range(BANDS)]
    np.testing.assert_allclose(sum(du for du, _, _ in parts), plain.mean - plain.u, atol=1e-13)
    whole = changed(plain, np.eye(plain.q))[2]
    for name, additive in (("logit_distance", True), ("fisher_term", False)):  # F is the control
        added = sum(values[name] for _, _, values in parts)
        assert np.allclose(added, whole[name], rtol=1e-9) is additive


def test_references_have_the_bands_length_as_each_scaling_says(case: Random) -> None:
    p, bases = found.projector(case.band(-1)), case.bases(3)
    calibration = found.change(case.calibration, p, case.mean)
    free = found.random_changes(case.calibration, bases, case.mean)
    equal = found.to_equal_length(free, calibration)
    lengths = found.squared_lengths(calibration)
    np.testing.assert_allclose(found.squared_lengths(equal), np.tile(lengths, (SUBSPACES, 1)), rtol=1e-12)
    matched = found.calibration_coefficient(case.calibration, p, bases, case.mean) * free
    assert found.squared_lengths(matched).mean() == pytest.approx(lengths.mean(), rel=1e-12)
    # Controls: matched on average is not matched by document or by subspace, and unscaled is neither.
    assert not np.allclose(found.squared_lengths(matched), lengths, rtol=0.1)
    assert not np.allclose(found.squared_lengths(matched).mean(axis=1), lengths.mean(), rtol=1e-3)
    assert found.squared_lengths(free).mean() != pytest.approx(lengths.mean(), rel=0.01)
    # Rescaling leaves each change in its subspace.
    for s, basis in enumerate(bases):
        np.testing.assert_allclose(equal[s] @ basis @ basis.T, equal[s], atol=1e-13)


# --- What a change does ---------------------------------------------------------------------------


def test_cup_and_glass() -> None:
    """Two tokens at 1/2 each, one raised and one lowered by e (Section 2.2)."""
    e = 1e-3
    logits = found.Logits(np.zeros((1, 2)), np.array([[e, -e]]), np.array([[e, -e]]))
    values = found.effects(logits, np.array([1]))
    assert values["logit_distance"] == pytest.approx(2 * e**2)
    assert values["fisher_term"] == pytest.approx(e**2 / 2)
    assert values["prediction_change"] == pytest.approx(np.log(np.cosh(e)))
    assert values["brier"] == pytest.approx(np.tanh(e) ** 2 / 2)
    # The same distance between two improbable tokens of four.
    far = np.array([[0.0, 0.0, -40.0, -40.0]])
    dl = np.array([[0.0, 0.0, e, -e]])
    improbable = found.effects(found.Logits(far, far + dl, dl), np.array([0]))
    assert improbable["logit_distance"] == pytest.approx(2 * e**2)
    assert improbable["fisher_term"] < 1e-15 * e**2


def test_top_tokens_and_ranks_of_a_case_by_hand() -> None:
    logits = given([0.5, 0.3, 0.15, 0.05], [0.2, 0.1, 0.3, 0.4])
    values = found.effects(logits, np.array([0]))
    by_hand = dict(
        brier=0.3**2 + 0.2**2 + 0.15**2 + 0.35**2,
        top1_agreement=0,
        new_top=3,
        to_runner_up=0,
        old_top_rank=3,
        right_before=1,
        right_after=0,
        loss_change=np.log(0.5 / 0.2),
    )
    for name, value in by_hand.items():
        assert values[name][0] == pytest.approx(value), name
    to_second = found.effects(given([0.5, 0.3, 0.2], [0.3, 0.5, 0.2]), np.array([1]))
    assert to_second["to_runner_up"] == 1 and to_second["old_top_rank"] == 2


def test_effects_of_a_removal_are_those_of_the_other_oracle(case: Random) -> None:
    p = found.projector(case.band(1))
    values = changed(case, case.band(1))[2]
    measured = oracle.measure(case.folded, case.u, case.targets, p, case.mean)
    for name in "logit_distance fisher_term prediction_change loss_change top1_agreement".split():
        np.testing.assert_allclose(values[name], measured[name], rtol=1e-8, atol=1e-12, err_msg=name)
    logits = found.fixed_scale(case.folded, case.u, 0 * case.u)
    np.testing.assert_allclose(found.entropy(logits.before), measured["entropy"], rtol=1e-12)
    np.testing.assert_allclose(found.entropy(np.zeros((1, 5))), np.log(5))
    np.testing.assert_allclose(found.margin(np.array([[1.0, 4.0, 2.5]])), 1.5)


# --- The consequence spectrum ---------------------------------------------------------------------


def consequences(case: Random, stretch: float = 1.0) -> list[float]:
    values = []
    for b in range(BANDS):
        du = stretch * found.change(case.u, found.projector(case.band(b)), case.mean)
        band = found.effects(found.fixed_scale(case.folded, case.u, du), case.targets)
        free = found.random_changes(case.u, case.bases(3), case.mean)
        refs = found.effects_of_all(
            case.folded, case.u, found.to_equal_length(free, du / stretch), case.targets
        )
        values.append(
            found.consequence(*(x[n] for x in (band, refs) for n in ("fisher_term", "logit_distance")))
        )
    return values


def test_consequence_is_one_for_the_uniform_prediction_whatever_the_singular_values(plain: Random) -> None:
    """At p = 1/V the Fisher term is D / 2V along every direction (the quotient of the two metrics)."""
    weight = plain.folded.uncentred
    constant = -weight @ plain.u[0]  # the first document's prediction is uniform
    flat = Folded(weight, constant, plain.folded.weight, plain.folded.basis, 1.0, None)
    one = {**plain.__dict__, "folded": flat, "u": plain.u[:1], "targets": plain.targets[:1]}
    np.testing.assert_allclose(consequences(Random(**one)), 1.0, rtol=1e-10)
    assert not np.allclose(consequences(plain), 1.0, rtol=0.05)  # control: peaked predictions


def test_consequence_does_not_see_the_size_of_a_bands_change(case: Random) -> None:
    """Nor, therefore, the overall size of the band's singular values, which multiplies `W du` alike."""
    if case.folded.cap is None:
        np.testing.assert_allclose(consequences(case, 1.0), consequences(case, 3.0), rtol=1e-9)
    else:  # control: under a cap D is of the capped logits, and does
        assert not np.allclose(consequences(case, 1.0), consequences(case, 3.0), rtol=1e-3)


def test_pooled_and_document_consequences_by_hand() -> None:
    fisher, distance = np.array([4.0, 9.0, 2.0]), np.array([2.0, 3.0, 4.0])
    fisher_ref = np.array([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])  # sums 6 and 12, mean 9
    distance_ref = np.array([[4.0, 6.0, 5.0], [4.0, 6.0, 11.0]])  # sums 15 and 21, mean 18
    assert found.consequence(fisher, distance, fisher_ref, distance_ref) == pytest.approx((15 / 9) / (9 / 18))
    ratios = found.document_consequences(fisher, distance, fisher_ref, distance_ref)
    np.testing.assert_allclose(ratios, [2 / (2 / 4), 3 / (3 / 6), 0.5 / (4 / 8)])
    assert found.share_above_one(ratios) == pytest.approx(2 / 3)  # 1 itself is not above
    # Control: the ratio of each subspace's own ratios is another figure.
    per_subspace = np.mean([(15 / s) / (9 / t) for s, t in ((6, 15), (12, 21))])
    assert per_subspace != pytest.approx((15 / 9) / (9 / 18), rel=0.01)
    np.testing.assert_allclose(found.excess(fisher, fisher_ref), [2, 6, -2])


def test_concentration_and_groups_by_hand() -> None:
    excesses = np.array([-1.0] * 9 + [12.0] + [0.5] * 9 + [8.0])  # the tenth of 20 is two documents
    assert found.concentration(excesses) == pytest.approx(20 / 15.5)  # above one: the rest is negative
    assert found.concentration(np.ones(20)) == pytest.approx(0.1)  # control: nothing concentrated
    key, values = np.array([5.0, 1.0, 3.0, 2.0, 6.0, 4.0]), np.array([50.0, 10.0, 30.0, 20.0, 60.0, 40.0])
    np.testing.assert_allclose(found.in_groups(key, values, 3), [15, 35, 55])


# --- The natural path -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_the_natural_path_rescales_the_changed_state(kind: str) -> None:
    """Appendix C: the recomputed scale multiplies u + du by s(r)/s(r')."""
    case = build(kind)
    du = found.change(case.u, found.projector(case.band(0)), case.mean)
    natural = found.natural_path(case.folded, case.residuals, kind, EPS, du)
    for i in range(DOCUMENTS):
        s = found.scale(case.residuals[i], kind, EPS)
        moved = case.residuals[i] + s * (case.folded.basis @ du[i])
        state = (case.u[i] + du[i]) * s / found.scale(moved, kind, EPS)
        np.testing.assert_allclose(natural.after[i], oracle.before_cap(case.folded, state), atol=1e-12)
    fixed = found.fixed_scale(case.folded, case.u, du)
    np.testing.assert_allclose(natural.before, fixed.before, atol=1e-12)
    assert np.abs(natural.after - fixed.after).max() > 0.01  # control


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_the_natural_path_is_the_fixed_scales_at_first_order_across_the_state(kind: str) -> None:
    case = build(kind)
    rng = np.random.default_rng(3)
    across = rng.normal(size=case.u.shape)
    across -= (across * case.u).sum(1, keepdims=True) / (case.u**2).sum(1, keepdims=True) * case.u

    def gap(direction: Array, size: float) -> float:
        natural = found.natural_path(case.folded, case.residuals, kind, EPS, size * direction)
        fixed = found.fixed_scale(case.folded, case.u, size * direction)
        return float(np.abs(natural.after - fixed.after).max())

    assert gap(across, 1e-4) / gap(across, 2e-4) == pytest.approx(1 / 4, rel=0.01)  # second order
    assert gap(case.u, 1e-4) / gap(case.u, 2e-4) == pytest.approx(1 / 2, rel=0.01)  # control: first


def test_a_uniform_rescaling_of_the_logits_is_all_parallel(case: Random) -> None:
    before = found.fixed_scale(case.folded, case.u, 0 * case.u).before
    # The unchanged logits times 1.3, and any constant per document: a change of temperature.
    after = 1.3 * before + np.arange(DOCUMENTS)[:, None]
    rescaled = found.Logits(before, after, after - before)
    assert found.effects(rescaled, case.targets)["prediction_change"].min() > 1e-4  # control
    left = found.effects(found.without_parallel(rescaled), case.targets)
    for name in ("logit_distance", "fisher_term", "prediction_change"):
        np.testing.assert_allclose(left[name], 0, atol=1e-20 if name == "logit_distance" else 1e-12)
    # Of any change it takes the square of the cosine from D, and what is left is orthogonal.
    logits = changed(case, case.band(0))[1]
    kept = found.without_parallel(logits)
    unchanged, dl = (x - x.mean(axis=1, keepdims=True) for x in (logits.before, logits.after - logits.before))
    cosine = (unchanged * dl).sum(1) ** 2 / ((unchanged**2).sum(1) * (dl**2).sum(1))
    ratio = ((kept.after - kept.before) ** 2).sum(1) / (dl**2).sum(1)
    np.testing.assert_allclose(ratio, 1 - cosine, atol=1e-10)


# --- Bases and subspaces --------------------------------------------------------------------------


def test_bases_agree_on_the_whole_space_and_differ_on_a_band(case: Random) -> None:
    """`dh = -(h - mu_h)` is `du = -(u - mu)` seen after the gain: the same change of the logits."""
    raw = found.raw_readout(case.head, case.bias, case.folded.factor, case.folded.cap)
    h = found.raw_states(case.folded, case.u, case.gamma, case.beta)
    mean = found.raw_states(case.folded, case.calibration, case.gamma, case.beta).mean(axis=0)

    def values(columns: Array, readout: Folded, u: Array, centre: Array) -> dict[str, Array]:
        du = found.change(u, found.projector(columns), centre)
        return found.effects(found.fixed_scale(readout, u, du), case.targets)

    v = found.folded_bands(case.folded, centred=False)
    raw_v = found.folded_bands(raw, centred=False)
    whole = values(case.directions, case.folded, case.u, case.mean)
    others = [values(v, case.folded, case.u, case.mean), values(raw_v, raw, h, mean)]
    for other in others:
        for name in ("logit_distance", "fisher_term", "prediction_change"):
            np.testing.assert_allclose(other[name], whole[name], rtol=1e-9)
    bottom = values(case.band(-1), case.folded, case.u, case.mean)["logit_distance"]
    raw_bottom = values(raw_v[:, -3:], raw, h, mean)["logit_distance"]
    assert not np.allclose(bottom, raw_bottom, rtol=0.1)  # control
    same = found.overlap(case.directions[:, -3:], v[:, -3:])
    assert (same == pytest.approx(1.0)) is (case.folded.cap is not None)  # only a cap leaves W uncentred


def test_extreme_coordinates_by_square_and_by_variance_and_their_u_directions(plain: Random) -> None:
    u, basis = plain.u.copy(), plain.folded.basis
    by_square = found.extreme_coordinates(plain.folded, u, 3, "mean_square")
    z = u @ basis.T
    np.testing.assert_array_equal(by_square, np.sort(np.argsort(-(z**2).mean(0))[:3]))
    np.testing.assert_array_equal(
        found.extreme_coordinates(plain.folded, u, 3, "variance"), np.sort(np.argsort(-z.var(0))[:3])
    )
    # A large constant coordinate has a mean square but no variance.
    constant = np.zeros((5, WIDTH - 1)) + 9.0 * basis[4]
    assert found.extreme_coordinates(plain.folded, constant, 1, "mean_square") == [4]
    varying = constant + np.linspace(-1, 1, 5)[:, None] * basis[7]
    assert found.extreme_coordinates(plain.folded, varying, 1, "variance") == [7]
    span = found.coordinate_span(plain.folded, by_square)
    kept = found.outside(plain.band(0), span)
    assert kept.shape == plain.band(0).shape and span.shape == (WIDTH - 1, 3)
    np.testing.assert_allclose(kept.T @ kept, np.eye(kept.shape[1]), atol=1e-13)
    gaussian = np.random.default_rng(1).normal(size=(WIDTH - 1 - 3, 3))
    for columns in (kept, found.within_complement(span, gaussian)):
        moved = found.change(u, found.projector(columns), plain.mean) @ basis.T
        np.testing.assert_allclose(moved[:, by_square], 0, atol=1e-13)
    # Controls: the band itself moves those coordinates, and so does what leaves out columns of R.
    columns_of_r = np.eye(WIDTH - 1)[:, by_square]
    for columns in (plain.band(0), found.outside(plain.band(0), columns_of_r)):
        moved = found.change(u, found.projector(columns), plain.mean) @ basis.T
        assert np.abs(moved[:, by_square]).max() > 0.01


def test_a_band_inside_the_extreme_coordinates_loses_directions() -> None:
    assert found.outside(np.eye(6)[:, :3], np.eye(6)[:, 1:4]).shape == (6, 1)


def test_near_zero_directions_and_what_they_carry() -> None:
    sigma = np.array([9.0, 8.0, 0.0, 2.0, 1.0, 1.0, 0.04, 1e-9])
    assert found.near_zero(sigma, 3, 8) == [6, 7]
    assert found.near_zero(sigma, 0, 3) == [2]
    assert found.near_zero(sigma, 3, 6) == []
    # The band's own median counts, not the spectrum's.
    assert found.near_zero(np.array([90.0, 80, 70, 60, 2, 1, 0.5, 0.04]), 4, 8) == []
    whole, part = np.eye(4)[:, 1:], np.eye(4)[:, 3:]
    u = np.array([[5.0, 1.0, 0.0, 1.0], [5.0, 0.0, 0.0, 3.0]])
    mean_of_ratios, ratio_of_sums = found.carried(u, np.zeros(4), part, whole)
    assert mean_of_ratios == pytest.approx((1 / 2 + 1) / 2)
    assert ratio_of_sums == pytest.approx(10 / 11)


def test_top_variance_is_the_subspace_with_the_most(case: Random) -> None:
    deviation = case.calibration - case.mean
    best = found.top_variance(case.calibration, case.mean, 3)
    np.testing.assert_allclose(best.T @ best, np.eye(3), atol=1e-13)
    sigma = np.linalg.svd(deviation, compute_uv=False)
    assert ((deviation @ best) ** 2).sum() == pytest.approx((sigma[:3] ** 2).sum())
    for other in [case.band(0)[:, :3], *case.bases(3)]:
        assert ((deviation @ other) ** 2).sum() < (sigma[:3] ** 2).sum()
    about_zero = found.top_variance(case.calibration, np.zeros(case.q), 3)
    assert found.overlap(best, about_zero) < 1 - 1e-3  # control: a second moment is no covariance


def test_overlap_is_of_ranges() -> None:
    rng = np.random.default_rng(0)
    q, m = 10, 3
    a, b = (np.linalg.qr(rng.normal(size=(q, m)))[0] for _ in range(2))
    assert found.overlap(a, a @ rng.normal(size=(m, m))) == pytest.approx(1.0)
    assert found.overlap(np.eye(q)[:, :m], np.eye(q)[:, 2:5]) == pytest.approx(1 / 3)
    everywhere = [found.overlap(np.linalg.qr(rng.normal(size=(q, m)))[0], b) for _ in range(400)]
    assert np.mean(everywhere) == pytest.approx(m / q, abs=0.02)
    blocks = np.linalg.qr(rng.normal(size=(q, q)))[0]
    parts = [found.overlap(a, blocks[:, start:stop]) for start, stop in found.bands(q, 3)]
    assert sum(parts) == pytest.approx(1.0)
    # An oblique projection has the overlap of its range, not that of its trace with another.
    moment = (root := rng.normal(size=(q, q))) @ root.T
    p = oracle.oblique(np.diag(np.arange(1.0, q + 1)), moment, m)
    kept = np.linalg.svd(p)[0][:, :m]
    assert found.overlap(p, kept) == pytest.approx(1.0)
    assert np.trace(p @ p.T) / m > 1.01  # control


def test_removing_the_component_itself_is_not_replacing_it_by_the_mean() -> None:
    """HARP: `dh = -P h`. Three tokens, one direction removed, by hand."""
    raw = found.raw_readout([[2.0, 0.0], [0.0, 1.0], [0.0, -1.0]], None)
    h, p = np.array([[1.0, 3.0], [2.0, 1.0]]), np.diag([0.0, 1.0])
    removed = found.effects(found.fixed_scale(raw, h, found.change(h, p, 0.0)), np.array([0, 1]))
    np.testing.assert_array_equal(removed["top1_agreement"], [0, 1])
    np.testing.assert_array_equal(removed["old_top_rank"], [2, 1])  # logits (2, 0, 0): only one is larger
    np.testing.assert_array_equal(removed["right_after"], [1, 0])
    mean = np.array([0.0, 2.9])  # control: with the mean the first document keeps its prediction
    replaced = found.effects(found.fixed_scale(raw, h, found.change(h, p, mean)), np.array([0, 1]))
    np.testing.assert_array_equal(replaced["top1_agreement"], [1, 1])


# --- Contrasts ------------------------------------------------------------------------------------


def test_contrast_shares_of_all_bands_sum_to_one(case: Random) -> None:
    logits = found.fixed_scale(case.folded, case.u, 0 * case.u).before
    p = found.mean_prediction(case.folded, case.calibration)
    weight, projections = case.folded.weight, [found.projector(case.band(b)) for b in range(BANDS)]
    for other in (2, 3):
        shares = [found.candidates_shares(weight, logits, projection, other) for projection in projections]
        np.testing.assert_allclose(np.sum(shares, axis=0), 1.0, rtol=1e-12)
    assert not np.allclose(shares[0], found.candidates_shares(weight, logits, projections[0]))
    for pair in (
        found.uniform_pair,
        found.uniform_pair_closed_form,
        lambda w, x: found.frequency_pair(w, p, x),
    ):
        np.testing.assert_allclose(sum(np.asarray(pair(weight, x)) for x in projections), 1.0, rtol=1e-10)
    overlapping = found.projector(case.directions[:, :4])  # control: not the first band's three
    assert found.candidates_shares(weight, logits, overlapping - projections[0]).max() > 1e-3


def test_contrast_share_by_hand() -> None:
    weight = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]])
    first = np.diag([1.0, 0.0])
    assert found.contrast_share(weight, 0, 1, first) == pytest.approx(9 / 25)
    assert found.contrast_share(weight, 0, 2, first) == pytest.approx(4 / 13)
    logits = np.array([[2.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    np.testing.assert_allclose(found.candidates_shares(weight, logits, first), [9 / 25, 1 / 2])
    np.testing.assert_allclose(found.candidates_shares(weight, logits, first, 3), [4 / 13, 9 / 25])


def test_the_uniform_pairs_ratio_of_sums_is_the_bands_share_of_sigma_squared(case: Random) -> None:
    """Sum over pairs of `|P (w_i - w_j)|^2 = V |C W P|^2`, and `W V = A Sigma` (Section 4.1)."""
    weight = case.folded.weight
    sigma, v = found.right_singular(weight - weight.mean(axis=0))
    for start, stop in found.bands(case.q, BANDS):
        p = found.projector(v[:, start:stop])
        ratio = found.uniform_pair(weight, p)[1]
        assert ratio == pytest.approx((sigma[start:stop] ** 2).sum() / (sigma**2).sum(), rel=1e-10)
        assert found.uniform_pair_closed_form(weight, p) == pytest.approx(ratio, rel=1e-10)
    top = found.projector(v[:, :3])
    assert found.uniform_pair(weight, top)[0] != pytest.approx(found.uniform_pair(weight, top)[1], rel=0.02)
    if case.folded.cap is not None:  # control: an uncentred W's own sigma is another share
        own, v = found.right_singular(weight)
        p = found.projector(v[:, :3])
        assert found.uniform_pair(weight, p)[1] != pytest.approx(
            (own[:3] ** 2).sum() / (own**2).sum(), rel=1e-3
        )


def test_frequency_matched_pairs() -> None:
    p = np.array([0.5, 0.3, 0.2])
    chances = [found.pair_probability(p, i, j) for i, j in ((0, 1), (0, 2), (1, 2))]
    np.testing.assert_allclose(chances, [0.3 + 0.15 / 0.7, 0.2 + 0.1 / 0.8, 0.06 / 0.7 + 0.06 / 0.8])
    assert sum(chances) == pytest.approx(1.0)
    rng = np.random.default_rng(0)
    draws = [tuple(sorted(rng.choice(3, 2, replace=False, p=p))) for _ in range(4000)]
    assert np.mean([d == (0, 1) for d in draws]) == pytest.approx(chances[0], abs=0.03)
    weight, projection = rng.normal(size=(6, 4)), np.diag([1.0, 1.0, 0.0, 0.0])
    uniform = found.frequency_pair(weight, np.full(6, 1 / 6), projection)
    assert uniform == pytest.approx(found.uniform_pair(weight, projection)[0])
    peaked = np.array([0.7, 0.2, 0.04, 0.03, 0.02, 0.01])
    assert found.frequency_pair(weight, peaked, projection) != pytest.approx(uniform, rel=0.02)


def test_mean_prediction_is_the_mean_of_predictions(plain: Random) -> None:
    p = found.mean_prediction(plain.folded, plain.calibration)
    logits = plain.calibration @ plain.folded.weight.T + plain.folded.constant
    np.testing.assert_allclose(p, softmax(logits, axis=1).mean(axis=0), rtol=1e-10)
    assert not np.allclose(p, softmax(logits.mean(axis=0)), rtol=0.1)  # control


# --- The chain rule and the temperature -----------------------------------------------------------


@pytest.mark.parametrize("band", range(BANDS))
def test_the_chain_rules_parts_sum_to_the_prediction_change(case: Random, band: int) -> None:
    _, logits, values = changed(case, case.band(band))
    parts = found.chain_rule(logits)
    np.testing.assert_allclose(sum(parts.values()), values["prediction_change"], rtol=0, atol=1e-12)
    assert all((part > -1e-14).all() for part in parts.values())
    assert not np.allclose(parts["between"] + parts["within"], values["prediction_change"], rtol=1e-3)


def test_each_part_of_the_chain_rule_sees_its_own_change_only() -> None:
    base = np.array([0.5, 0.3, 0.1, 0.06, 0.04])
    moved = {  # p' of a change of one part alone, and that part's value by hand
        "within": (np.array([0.3, 0.5, 0.1, 0.06, 0.04]), 0.2 * np.log(5 / 3)),
        "between": (
            np.concatenate([base[:2] * 0.5, base[2:] * 3]),
            0.8 * np.log(0.8 / 0.4) + 0.2 * np.log(0.2 / 0.6),
        ),
        "rest": (np.array([0.5, 0.3, 0.04, 0.06, 0.1]), 0.06 * np.log(0.1 / 0.04)),
    }
    for name, (probabilities, value) in moved.items():
        parts = found.chain_rule(given(base, probabilities))
        for part, amount in parts.items():
            assert amount[0] == pytest.approx(value if part == name else 0.0, abs=1e-14), (name, part)


def test_parts_of_the_excess_by_hand() -> None:
    part, whole = np.array([2.0, 1.0]), np.array([4.0, 4.0])
    part_ref, whole_ref = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[2.0, 1.0], [2.0, 3.0]])
    pooled, each = found.part_share_difference(part, whole, part_ref, whole_ref)
    assert pooled == pytest.approx(3 / 8 - 2 / 8)
    assert each == pytest.approx(((1 / 2 - 1 / 4) + (1 / 4 - 1 / 4)) / 2)
    assert found.part_of_excess(part, whole, part_ref, whole_ref) == pytest.approx((3 - 1) / (8 - 4))


def test_the_high_temperature_limit_is_the_logit_distance(case: Random) -> None:
    """`T^2 K_T -> D/(2V)`: the error halves where T doubles; at T = 1 it is K (Appendix B)."""
    _, logits, values = changed(case, case.band(0))
    limit = values["logit_distance"] / (2 * VOCABULARY)

    def error(temperature: float) -> float:
        return float(np.abs(temperature**2 * found.divergence_at(logits, temperature) / limit - 1).max())

    np.testing.assert_allclose(found.divergence_at(logits, 1.0), values["prediction_change"], atol=1e-13)
    assert error(1e4) < 2e-3
    assert error(4000) / error(2000) == pytest.approx(1 / 2, rel=0.02)
    assert error(1.0) > 0.1  # control


# --- Correlation and regression -------------------------------------------------------------------


def test_correlations_and_regression_are_scipys() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 6, size=40).astype(float)  # ties
    b = a + 2 * rng.normal(size=40)
    assert found.correlation(a, b) == pytest.approx(scipy.stats.pearsonr(a, b)[0])
    assert found.spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b)[0])
    assert found.spearman(a, np.exp(b)) == pytest.approx(found.spearman(a, b))
    assert found.correlation(a, np.exp(b)) != pytest.approx(found.correlation(a, b), rel=0.05)  # control
    power = np.exp(b)
    assert found.log_correlation(power, 3 * power**2) == pytest.approx(1.0)
    predictors = rng.normal(size=(3, 40))
    exact = 0.5 + np.array([1.0, -2.0, 3.0]) @ predictors
    np.testing.assert_allclose(found.regression(exact, *predictors), [0.5, 1, -2, 3], atol=1e-12)
    noisy = exact + rng.normal(size=40)
    design = np.vstack([np.ones(40), predictors]).T
    np.testing.assert_allclose(
        found.regression(noisy, *predictors), np.linalg.lstsq(design, noisy, rcond=None)[0], rtol=1e-9
    )
    slopes = [np.polyfit(x, noisy, 1)[0] for x in predictors]  # control: one at a time
    assert not np.allclose(found.regression(noisy, *predictors)[1:], slopes, rtol=0.02)


# --- Donors ---------------------------------------------------------------------------------------

PAIRS = [(i, (i + 7) % DOCUMENTS) for i in range(DOCUMENTS)]


def test_the_bands_shifts_sum_to_the_gap(plain: Random) -> None:
    """Replacing the whole state closes the gap: the shifts of all bands sum to it, and the shares to 1."""
    bases = plain.bases(3)
    runs = [
        found.donor_transfer(plain.folded, plain.u, PAIRS, found.projector(plain.band(b)), bases)
        for b in range(BANDS)
    ]
    np.testing.assert_allclose(sum(run["shift"] for run in runs), runs[0]["gap"], atol=1e-12)
    whole = found.donor_transfer(plain.folded, plain.u, PAIRS, np.eye(plain.q), bases)
    np.testing.assert_allclose(whole["shift"], whole["gap"], atol=1e-12)
    np.testing.assert_array_equal(whole["adopted"], 1)
    assert runs[-1]["adopted"].mean() < 1 and np.abs(runs[-1]["fraction"]).max() > 0.01  # controls
    np.testing.assert_allclose(
        whole["fraction"], (whole["shift"] - whole["random_shift"]) / whole["gap"], rtol=1e-12
    )


def test_a_donor_along_the_contrast_transfers_what_the_geometry_predicts() -> None:
    """With `u_j - u_i` along w_1 - w_2, a projection closes its contrast share of the gap exactly."""
    rng = np.random.default_rng(2)
    folded = oracle.fold(rng.normal(size=(9, 6)), None, None, None, "rmsnorm")
    u = rng.normal(size=(2, 6))
    first, second = found.leading(oracle.before_cap(folded, u)[0])[:2]
    contrast = folded.weight[first] - folded.weight[second]
    u[1] = u[0] - 0.7 * contrast
    p, share = np.diag([1.0, 1, 0, 0, 0, 0]), (contrast[:2] ** 2).sum() / (contrast**2).sum()
    # References along coordinates, whose rescaled changes are known by hand.
    bases = [np.eye(6)[:, 2:4], np.eye(6)[:, 4:]]
    run = found.donor_transfer(folded, u, [(0, 1)], p, bases)
    shares = np.array([(contrast[s] ** 2).sum() for s in (slice(2, 4), slice(4, 6))]) / (contrast**2).sum()
    assert run["gap"] == pytest.approx(-0.7 * contrast @ contrast)
    assert run["shift"] / run["gap"] == pytest.approx(share)
    assert run["random_shift"] / run["gap"] == pytest.approx(np.sqrt(share * shares).mean())
    assert run["predicted"] == pytest.approx(share - shares.mean())
    assert run["fraction"] == pytest.approx(share - np.sqrt(share * shares).mean())
    assert run["fraction"] != pytest.approx(
        run["predicted"], rel=1e-3
    )  # for equal lengths are no projections


def test_matched_pairs_pooling_and_groups_by_hand() -> None:
    logits = np.array([[3.0, 2.0, 1.0], [0.0, 5.0, 1.0], [4.0, 0.0, 2.0]])
    assert found.is_matched(logits, 0, 1) and not found.is_matched(logits, 0, 2)
    assert not found.is_matched(logits, 1, 0) and not found.is_matched(logits, 2, 1)
    gap, beyond = np.array([2.0, -4.0, 1.0]), np.array([1.0, -1.0, -0.5])
    assert found.pooled_fraction(gap, beyond) == pytest.approx((1 + 1 - 0.5) / 7)
    assert beyond.sum() / gap.sum() != pytest.approx(1.5 / 7)  # control: signs not taken
    pairs = [(0, 9), (1, 2), (3, 4), (4, 5), (2, 6), (7, 5), (6, 9)]
    groups = found.linked_groups(pairs)
    together = {frozenset(k for k, g in enumerate(groups) if g == group) for group in groups}
    assert together == {frozenset({0, 1, 4, 6}), frozenset({2, 3, 5})}
    assert len(set(found.linked_groups([(0, 1), (2, 3), (4, 5)]))) == 3


def test_donor_ranks_and_random_adoption_by_hand() -> None:
    folded = oracle.fold(np.eye(3), None, None, None, "rmsnorm")
    u = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])
    bases = [np.eye(3)[:, :1], np.eye(3)[:, 1:2]]
    run = found.donor_transfer(folded, u, [(0, 1)], np.diag([0.0, 1.0, 0.0]), bases)
    assert run["donor_rank"] == 3  # the recipient's top token is the donor's last
    assert run["shift"] == pytest.approx(-2.0) and run["gap"] == pytest.approx(-4.0)
    # Both random changes have length 2: the first token falls to 0, or the second rises to 3.
    assert run["random_shift"] == pytest.approx(-2.0) and run["random_adopted"] == 1
