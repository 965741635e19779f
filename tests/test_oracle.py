"""The oracle against closed forms and theorems; each property with a control that must fail."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
from scipy.special import rel_entr, softmax

RANKS = (1, 6)


def readout(model: Any) -> oracle.Folded:
    p = tiny.parts(model)
    return oracle.fold(p.weight, p.bias, p.gamma, p.beta, p.kind, factor=p.factor, cap=p.cap)


def windows(count: int, length: int, seed: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).integers(4, tiny.VOCABULARY, size=(count, length + 1)))


def states_of(model: Any, ids: torch.Tensor) -> list[np.ndarray]:
    p = tiny.parts(model)
    captured = [oracle.capture(model, row[:-1], p.norm, p.head) for row in ids]
    return [oracle.states(c.residual, p.kind, p.eps) for c in captured]


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2", "cohere"])
def case(request: pytest.FixtureRequest) -> Any:
    """(model, folded, calibration states, statistics): RMSNorm, LayerNorm, a cap, a factor."""
    model = tiny.make(request.param)
    folded = readout(model)
    u = states_of(model, windows(6, 24, seed=1))
    return model, folded, u, oracle.statistics(folded, u)


# --- The readout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_folded_readout_gives_the_models_logits(kind: str) -> None:
    model = tiny.make(kind).double()
    p, folded = tiny.parts(model), readout(model)
    ids = windows(1, 40, seed=2)[0, :-1]
    captured = oracle.capture(model, ids, p.norm, p.head)
    u = oracle.states(captured.residual, p.kind, p.eps)
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].double().numpy()
    found = oracle.after_cap(folded, oracle.before_cap(folded, u))
    # Some norms compute in float32 inside a float64 model.
    np.testing.assert_allclose(found, logits, atol=1e-5)
    assert u.shape[-1] == tiny.WIDTH - (p.kind == "layernorm")
    # Control: an eps, a gain or a bias forgotten is seen.
    forgotten = oracle.fold(p.weight, p.bias, None, None, p.kind, factor=p.factor, cap=p.cap)
    wrong = oracle.after_cap(forgotten, oracle.before_cap(forgotten, u))
    assert np.abs(wrong - logits).max() > 0.1


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_tiny_models_are_peaked_varied_and_repeatable(kind: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = tiny.make(kind)
    assert torch.equal(state, torch.get_rng_state())
    again, other = tiny.make(kind), tiny.make(kind, seed=1)
    ids = windows(4, 40, seed=3)[:, :-1]
    with torch.no_grad():
        logits, same, different = (m(input_ids=ids).logits for m in (model, again, other))
    assert torch.equal(logits, same) and not torch.allclose(logits, different)
    best = logits.softmax(-1).amax(-1)
    assert 0.08 < best.mean() < 0.9
    assert len(logits.argmax(-1).unique()) > 5
    assert (logits.argmax(-1) == ids).float().mean() < 0.7  # more than an echo of the input
    assert all(p.dtype == torch.float32 for p in model.parameters()) and not model.training
    for name, p in model.named_parameters():
        assert p.ndim != 1 or p.std() > 0.1, name


def test_helmert_is_an_orthonormal_basis_of_the_complement_of_ones() -> None:
    r = oracle.helmert(7)
    np.testing.assert_allclose(r.T @ r, np.eye(6), atol=1e-14)
    np.testing.assert_allclose(np.ones(7) @ r, 0, atol=1e-14)
    np.testing.assert_allclose(r @ r.T, np.eye(7) - 1 / 7, atol=1e-14)


def test_centring_changes_no_probability_without_a_cap_and_is_left_out_under_one() -> None:
    model = tiny.make("gpt_neox")
    folded = readout(model)
    u = states_of(model, windows(1, 8, seed=4))[0]
    centred = u @ folded.weight.T + folded.constant
    np.testing.assert_allclose(
        softmax(centred, axis=-1), softmax(oracle.before_cap(folded, u), axis=-1), atol=1e-13
    )
    np.testing.assert_allclose(folded.weight.mean(axis=0), 0, atol=1e-14)
    capped = readout(tiny.make("gemma2"))
    np.testing.assert_array_equal(capped.weight, capped.uncentred)


# --- Section 2 ------------------------------------------------------------------------------------


def two_tokens(e: float) -> dict[str, np.ndarray]:
    """Two tokens at 1/2 each; the removal raises the first and lowers the second by e."""
    folded = oracle.fold([[1.0], [-1.0]], None, None, None, "rmsnorm")
    mean = np.array([e])  # du = -(0 - e) = e
    return oracle.measure(folded, np.zeros((1, 1)), np.array([0]), np.eye(1), mean)


@pytest.mark.parametrize("e", [1e-3, 0.1, 2.0])
def test_two_equal_tokens(e: float) -> None:
    found = two_tokens(e)
    assert found["loss"] == pytest.approx(np.log(2))
    assert found["logit_distance"] == pytest.approx(2 * e**2)
    assert found["fisher_term"] == pytest.approx(e**2 / 2)
    assert found["prediction_change"] == pytest.approx(np.log(np.cosh(e)))
    assert found["loss_change"] == pytest.approx(np.log1p(np.exp(-2 * e)) - np.log(2))


def test_fisher_term_is_its_pair_form_and_the_variance() -> None:
    rng = np.random.default_rng(0)
    p, dl = softmax(3 * rng.normal(size=50)), rng.normal(size=50)
    pairs = sum(p[i] * p[j] * (dl[i] - dl[j]) ** 2 for i in range(50) for j in range(50)) / 4
    assert oracle.fisher_term(p, dl) == pytest.approx(pairs)
    padded = np.zeros(oracle.EXPLICIT_VOCABULARY + 1)
    padded_dl = padded.copy()
    padded[:50], padded_dl[:50] = p, dl
    assert oracle.fisher_term(padded, padded_dl) == pytest.approx(pairs)
    assert oracle.fisher_term(p, dl + 7.0) == pytest.approx(pairs)
    # Control: without the outer product it is not invariant under a shift.
    assert 0.5 * p @ (dl + 7.0) ** 2 != pytest.approx(pairs)


def test_measurements_of_a_model_are_those_of_its_changed_logits(case: Any) -> None:
    """By another road: an edited state through the readout, scipy's divergence, torch's loss."""
    _, folded, u, found = case
    target = np.arange(len(u[0])) % tiny.VOCABULARY
    p = oracle.projection("whitened", 6, folded=folded, statistics=found)
    values = oracle.measure(folded, u[0], target, p, found.mean_state)
    edited = u[0] - (u[0] - found.mean_state) @ p.T
    before, after = (oracle.after_cap(folded, oracle.before_cap(folded, v)) for v in (u[0], edited))
    loss = [
        torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(target), reduction="none").numpy()
        for x in (before, after)
    ]
    kl = rel_entr(softmax(before, -1), softmax(after, -1)).sum(-1)
    np.testing.assert_allclose(values["loss"], loss[0], atol=1e-12)
    np.testing.assert_allclose(values["loss_change"], loss[1] - loss[0], atol=1e-10)
    np.testing.assert_allclose(values["prediction_change"], kl, atol=1e-12)
    difference = after - before
    distance = ((difference - difference.mean(-1, keepdims=True)) ** 2).sum(-1)
    np.testing.assert_allclose(values["logit_distance"], distance, rtol=1e-9)
    np.testing.assert_array_equal(
        values["top1_agreement"], (before.argmax(-1) == after.argmax(-1)).astype(float)
    )


def test_prediction_change_tends_to_the_fisher_term(case: Any) -> None:
    _, folded, u, found = case
    target = np.zeros(len(u[0]), dtype=int)
    p = oracle.projection("singular", 6, folded=folded)
    ratios = []
    for size in (1e-1, 1e-3):
        values = oracle.measure(folded, u[0], target, size * p, found.mean_state)
        ratios.append(values["prediction_change"] / values["fisher_term"])
    np.testing.assert_allclose(ratios[1], 1.0, atol=0.02)
    assert np.abs(ratios[0] - 1).max() > np.abs(ratios[1] - 1).max()


# --- Section 3 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "skip_first"), [("all", 0), ("all", 3), ("last", 0)])
def test_large_vocabulary_forms_equal_the_explicit_ones(case: Any, positions: str, skip_first: int) -> None:
    _, folded, u, _ = case
    where: dict[str, Any] = {"positions": positions, "skip_first": skip_first}
    a = oracle.statistics(folded, u, **where, explicit=True)
    b = oracle.statistics(folded, u, **where, explicit=False)
    np.testing.assert_allclose(a.saliency, b.saliency, rtol=1e-8)
    np.testing.assert_allclose(a.mean_fisher, b.mean_fisher, atol=1e-12 * a.mean_fisher.max())
    assert a.fisher_count == (len(u) if positions == "last" else len(u) * (24 - skip_first))
    assert a.moment_count == len(u) * (24 - skip_first)


def test_sums_of_the_design_give_the_same_statistics(case: Any) -> None:
    """The raw sums of a calibration, which know mu only at the end."""
    _, folded, documents, found = case
    u = np.concatenate(documents)
    logits = oracle.before_cap(folded, u)
    p, j = softmax(oracle.after_cap(folded, logits), axis=-1), oracle.cap_slope(folded, logits)
    z, x = folded.weight @ found.directions, u @ found.directions
    var = (p * j**2) @ z**2 - ((p * j) @ z) ** 2
    mu = found.directions.T @ u.mean(0)
    s0, s1, s2 = var.sum(0), (x * var).sum(0), (x**2 * var).sum(0)
    kappa = (s2 - 2 * mu * s1 + mu**2 * s0) / (2 * len(u))
    np.testing.assert_allclose(found.saliency, kappa, rtol=1e-8)
    moment = u.T @ u / len(u) - np.outer(u.mean(0), u.mean(0))
    np.testing.assert_allclose(found.second_moment, moment, atol=1e-12)


def test_last_takes_mu_at_the_end_and_the_moment_everywhere(case: Any) -> None:
    _, folded, u, everywhere = case
    last = oracle.statistics(folded, u, positions="last")
    mu = np.mean([d[-1] for d in u], axis=0)
    np.testing.assert_allclose(last.mean_state, mu, atol=1e-14)
    moment = np.mean([np.outer(s - mu, s - mu) for d in u for s in d], axis=0)
    np.testing.assert_allclose(last.second_moment, moment, atol=1e-12)
    assert not np.allclose(last.second_moment, everywhere.second_moment, atol=1e-3)


@pytest.mark.parametrize("method", oracle.METHODS)
@pytest.mark.parametrize("removed", RANKS)
def test_projections_are_idempotent_of_exact_rank_and_self_adjoint(
    case: Any, method: str, removed: int
) -> None:
    _, folded, _, found = case
    p = oracle.projection(method, removed, folded=folded, statistics=found)
    np.testing.assert_allclose(p @ p, p, atol=1e-9)
    assert np.linalg.matrix_rank(p, tol=1e-6) == removed
    assert np.trace(p) == pytest.approx(removed)
    inner = np.eye(len(p))
    if "whitened" in method:
        assert not np.allclose(p, p.T, atol=1e-3)  # oblique: the control
        inner = np.linalg.inv(found.second_moment)
    np.testing.assert_allclose(inner @ p, (inner @ p).T, atol=1e-8 * np.abs(inner @ p).max())


@pytest.mark.parametrize(("method", "metric"), [("whitened", "logits"), ("fisher-whitened", "fisher")])
def test_whitened_is_optimal_among_projections(case: Any, method: str, metric: str) -> None:
    """tr(P^T G P M), the mean change it costs, against perturbed and random subspaces.

    The challengers are other subspaces under the same rule (near and far), orthogonal projections,
    and the other method's projection (each is best in its own metric only: the control).
    """
    _, folded, _, found = case
    gram = folded.weight.T @ folded.weight if metric == "logits" else found.mean_fisher
    moment, q, m = found.second_moment, folded.weight.shape[1], 6

    def cost(p: np.ndarray) -> float:
        return float(np.trace(p.T @ gram @ p @ moment))

    best = cost(oracle.projection(method, m, folded=folded, statistics=found))
    root = np.linalg.cholesky(moment)  # another root of M: it must not matter
    vectors = np.linalg.eigh(root.T @ gram @ root)[1]
    ours = root @ vectors[:, :m] @ vectors[:, :m].T @ np.linalg.inv(root)
    assert cost(ours) == pytest.approx(best)
    rng = np.random.default_rng(0)
    for size in (1e-3, 1e-2, 0.1, 10.0):
        for _ in range(5):
            v = np.linalg.qr(vectors[:, :m] + size * rng.normal(size=(q, m)))[0]
            assert cost(root @ v @ v.T @ np.linalg.inv(root)) > best
            orthogonal = np.linalg.qr(rng.normal(size=(q, m)))[0]
            assert cost(orthogonal @ orthogonal.T) > best
    other = "fisher-whitened" if method == "whitened" else "whitened"
    assert cost(oracle.projection(other, m, folded=folded, statistics=found)) > best


def test_whitened_attains_the_bound_of_eckart_young(case: Any) -> None:
    """No map of rank q - m is nearer to W on the states than W (I - P) (README, Definitions)."""
    _, folded, _, found = case
    m = 6
    p = oracle.projection("whitened", m, folded=folded, statistics=found)
    root = np.linalg.cholesky(found.second_moment)
    values = np.linalg.svd(folded.weight @ root, compute_uv=False)
    assert np.linalg.norm(folded.weight @ p @ root) ** 2 == pytest.approx(np.sum(values[-m:] ** 2))


def test_mean_logit_distance_and_fisher_term_are_the_costs() -> None:
    """On the calibration states themselves, over all positions, the averages are the traces."""
    model = tiny.make("qwen2")
    folded = readout(model)
    u = states_of(model, windows(6, 24, seed=1))
    found = oracle.statistics(folded, u)
    targets = [np.zeros(24, dtype=int)] * len(u)
    ps = [oracle.projection(method, 6, folded=folded, statistics=found) for method in oracle.METHODS]
    rows = oracle.evaluate(folded, u, targets, ps, found.mean_state)
    for p, row in zip(ps, rows, strict=True):
        cost = np.trace(p.T @ folded.weight.T @ folded.weight @ p @ found.second_moment)
        assert row["logit_distance"].mean() == pytest.approx(cost)
    least = min(rows, key=lambda row: row["logit_distance"].mean())
    assert least is rows[oracle.METHODS.index("whitened")]
    # kappa is the Fisher term of one removed direction.
    one = oracle.projection("fisher", 1, folded=folded, statistics=found)
    row = oracle.evaluate(folded, u, targets, [one], found.mean_state)[0]
    assert row["fisher_term"].mean() == pytest.approx(found.saliency.min())


def test_singular_removes_the_tail_and_random_its_basis(case: Any) -> None:
    _, folded, _, found = case
    sigma = np.linalg.svd(folded.weight, compute_uv=False)
    np.testing.assert_allclose(found.singular_values, sigma, rtol=1e-6)
    p = oracle.projection("singular", 4, folded=folded)
    assert np.linalg.norm(folded.weight @ p) ** 2 == pytest.approx(np.sum(sigma[-4:] ** 2))
    q = folded.weight.shape[1]
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(q, 9)))[0]
    small, large = (oracle.projection("random", m, basis=basis) for m in (4, 9))
    np.testing.assert_allclose(large @ small, small, atol=1e-12)  # nested over ranks
    assert np.trace(small) == pytest.approx(4)


def test_nothing_removed_is_the_original(case: Any) -> None:
    _, folded, u, found = case
    target = np.zeros(len(u[0]), dtype=int)
    for method in oracle.METHODS:
        p = oracle.projection(method, 0, folded=folded, statistics=found)
        values = oracle.measure(folded, u[0], target, p, found.mean_state)
        for name in ("loss_change", "logit_distance", "fisher_term", "prediction_change"):
            np.testing.assert_allclose(values[name], 0, atol=1e-12)
        assert values["top1_agreement"].all()
    p = oracle.projection("singular", 1, folded=folded)
    assert oracle.measure(folded, u[0], target, p, found.mean_state)["logit_distance"].min() > 0


def test_removal_equals_a_truncated_unembedding_with_a_corrected_bias() -> None:
    model = tiny.make("phi")
    folded = readout(model)
    u = states_of(model, windows(6, 24, seed=1))
    found = oracle.statistics(folded, u)
    p = oracle.projection("whitened", 6, folded=folded, statistics=found)
    w, mu = folded.uncentred, found.mean_state
    kept = np.eye(len(p)) - p
    logits = u[0] @ (w @ kept).T + (folded.constant + w @ p @ mu)
    edited = oracle.before_cap(folded, u[0] - (u[0] - mu) @ p.T)
    np.testing.assert_allclose(logits, edited, atol=1e-12)
    assert np.abs(logits - w @ p @ mu - edited).max() > 1e-3  # control: the bias not corrected


def test_a_cap_is_not_shift_invariant_and_a_factor_scales_its_distance() -> None:
    plain = tiny.make("llama")
    p = tiny.parts(plain)
    u = states_of(plain, windows(6, 24, seed=1))
    made = {
        name: oracle.fold(p.weight, p.bias, p.gamma, p.beta, p.kind, **settings)
        for name, settings in {
            "plain": {},
            "half": {"factor": 0.5},
            "cap": {"cap": 5.0},
            "loose": {"cap": 1e6},
        }.items()
    }
    found = {name: oracle.statistics(folded, u) for name, folded in made.items()}
    project = oracle.projection("random", 6, basis=np.eye(tiny.WIDTH))
    target = np.zeros(24, dtype=int)
    values = {
        name: oracle.measure(folded, u[0], target, project, found[name].mean_state)
        for name, folded in made.items()
    }
    np.testing.assert_allclose(values["half"]["logit_distance"], values["plain"]["logit_distance"] / 4)
    for name in ("logit_distance", "fisher_term", "prediction_change", "loss_change"):
        np.testing.assert_allclose(values["loose"][name], values["plain"][name], atol=1e-5)
        assert not np.allclose(values["cap"][name], values["plain"][name], rtol=0.05)
    # The mean Fisher does not see centring; J does change it.
    np.testing.assert_allclose(found["loose"].mean_fisher, found["plain"].mean_fisher, atol=1e-6)
    assert not np.allclose(found["cap"].mean_fisher, found["plain"].mean_fisher, rtol=0.05)


# --- Tokenizer, text, refusals --------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 97, 300])
def test_tokenizer_keeps_its_ids_and_its_bos(size: int) -> None:
    plain, bos = tiny.tokenizer(size), tiny.tokenizer(size, bos=True)
    text = "Any text, 100% (é, ~): ok\nnext"
    ids: Any = plain(text)["input_ids"]
    assert len(plain) == size and max(ids) < size and 3 in ids
    assert bos(text)["input_ids"] == [1, *ids]
    known = tiny.texts(1)[0]
    if size >= 97:
        assert plain.decode(plain(known)["input_ids"]) == known
    assert len(set(tiny.texts(50))) == 50 and min(map(len, tiny.texts(50))) >= 600
    assert tiny.texts(3) == tiny.texts(5)[:3] != tiny.texts(3, seed=1)


@pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.NEGATIVE_KINDS])
def test_saved_models_load_again(kind: str, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    model = tiny.make(kind)
    folder = tiny.save(model, tmp_path / "m", tokenizer="bos", max_shard_size="10KB")
    ids: Any = AutoTokenizer.from_pretrained(folder)("Some text.")["input_ids"]
    assert ids[0] == 1 and max(ids) < model.config.vocab_size
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    loaded = auto.from_pretrained(folder).eval()
    inputs = {"input_ids": torch.tensor([ids])}
    if kind == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


def test_negative_kinds_are_what_they_claim() -> None:
    ids = windows(1, 12, seed=6)[:, :-1]
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 97
    for kind, causal in (("bert_masked", False), ("bert_mlm", False), ("llama", True)):
        model = tiny.make(kind)
        with torch.no_grad():
            a, b = (model(input_ids=x).logits[0, 0] for x in (ids, changed))
        assert torch.allclose(a, b) == causal, kind
    assert tiny.make("t5").config.is_encoder_decoder
    opt = tiny.make("opt_no_norm")
    assert opt.model.decoder.final_layer_norm is None and opt.lm_head.in_features == 16


def test_a_singular_second_moment_is_refused() -> None:
    with pytest.raises(ValueError, match="singular"):
        oracle.oblique(np.eye(3), np.diag([1.0, 1.0, 0.0]), 1)


def test_the_script_prints_the_table_of_the_functions(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.make("llama")
    folder = tiny.save(model, tmp_path / "m")
    texts = tiny.texts(17)
    texts.insert(3, "too short")
    files = [tmp_path / "calibration.jsonl", tmp_path / "evaluation.jsonl"]
    for path, part in zip(files, (texts[:10], texts[10:]), strict=True):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    settings = ["--sequence-length", "24", "--rank", "0.2", "--positions", "last"]
    oracle.main([str(folder), *map(str, files), *settings])
    report = json.loads(capsys.readouterr().out)
    assert report["documents"] == [9, 8] and report["readout_relative_rms_error"] < 1e-5
    assert [row["method"] for row in report["table"]] == list(oracle.METHODS)

    encode = tiny.tokenizer()
    ids = [np.array(encode(text)["input_ids"][:25]) for text in texts if text != "too short"]
    u = [states_of(model, torch.tensor(row[None]))[0] for row in ids]
    folded = readout(model)
    found = oracle.statistics(folded, u[:9], positions="last")
    p = oracle.projection("fisher", 6, folded=folded, statistics=found)
    targets = [row[1:] for row in ids[9:]]
    row = oracle.evaluate(folded, u[9:], targets, [p], found.mean_state, positions="last")[0]
    assert report["base_loss"] == pytest.approx(row["loss"].mean())
    for short, name in (("D", "logit_distance"), ("K", "prediction_change"), ("F", "fisher_term")):
        assert report["table"][1][short] == pytest.approx(row[name].mean())
