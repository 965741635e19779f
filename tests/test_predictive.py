"""The predictive subspaces: what they span, what moves along and across them, and how they are stored."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny
import torch

from csprune.analysis.results import read_result
from csprune.errors import CspruneError, InputError
from csprune.predictive.checks import check, divergence
from csprune.predictive.jacobian import JacobianSums, accumulate
from csprune.predictive.job import subspace_job
from csprune.predictive.last_mlp import find_last_mlp
from csprune.predictive.subspaces import (
    SpannedSubspace,
    check_share,
    final_subspace,
    logits_subspace,
    post_subspace,
)
from csprune.readout import load_readout
from csprune.settings import Settings

IDS = torch.randint(4, 11, (3, 12), generator=torch.Generator().manual_seed(5))
SMALL = 11  # tokens, fewer than the width of 32


def readings(model: Any, gained: bool = True) -> torch.Tensor:
    """What reads the residual or, without the gain, the norm's output: float64 [V, d], by definition."""
    parts = tiny.parts(model)
    u = parts.weight * parts.factor
    u = u if parts.cap else u - u.mean(0)
    if not gained:
        return u
    g = parts.gamma * u
    return g - g.mean(1, keepdim=True) if parts.kind == "layernorm" else g


def dense(subspace: SpannedSubspace) -> torch.Tensor:
    return subspace.vectors * subspace.eigenvalues @ subspace.vectors.mT


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- What they span ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [SMALL, tiny.VOCABULARY])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_gram_matrices_are_those_of_the_definition(kind: str, vocabulary: int) -> None:
    model = tiny.make(kind, vocab_size=vocabulary)
    readout = load_readout(model)
    for subspace, g in (
        (final_subspace(readout), readings(model, gained=False)),
        (post_subspace(readout), readings(model)),
    ):
        torch.testing.assert_close(dense(subspace), g.mT @ g, atol=1e-10, rtol=1e-9)
        assert subspace.rank == int(torch.linalg.matrix_rank(g, rtol=1e-7))
        root = subspace.reading_root()
        assert root.shape == (subspace.rank, tiny.WIDTH)
        torch.testing.assert_close(root.mT @ root, g.mT @ g, atol=1e-10, rtol=1e-9)
    # Control: the norm's gain is seen.
    without = readings(model, gained=False)
    assert not torch.allclose(dense(post_subspace(readout)), without.mT @ without, rtol=0.05)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "granite", "cohere"])
def test_a_small_vocabulary_is_read_along_one_direction_less_than_it_has_tokens(kind: str) -> None:
    readout = load_readout(tiny.make(kind, vocab_size=SMALL))
    subspaces = (logits_subspace(readout), final_subspace(readout), post_subspace(readout))
    assert [each.rank for each in subspaces] == [SMALL - 1] * 3
    # A vocabulary larger than the width is read along all of it, but for what a LayerNorm takes away.
    large = load_readout(tiny.make(kind))
    assert final_subspace(large).rank == tiny.WIDTH
    assert post_subspace(large).rank == large.unembedding.width


def test_under_a_soft_cap_a_shift_before_it_is_not_harmless() -> None:
    """So the uncentred rows span the subspace; padding's own row of zeros adds nothing."""
    readout = load_readout(tiny.make("gemma2", vocab_size=SMALL, tie_word_embeddings=False))
    assert final_subspace(readout).rank == SMALL
    assert final_subspace(load_readout(tiny.make("gemma3", vocab_size=SMALL))).rank == SMALL - 1


def test_the_dimension_is_the_fewest_directions_that_hold_the_share() -> None:
    values = torch.tensor([6.0, 3.0, 1.0, 0.0]).double()
    subspace = SpannedSubspace("final", values, torch.eye(4, dtype=torch.float64))
    expected = {0.5: 1, 0.6: 1, 0.61: 2, 0.9: 2, 0.91: 3, 1: 3}
    assert {share: subspace.dimension(share) for share in expected} == expected
    assert subspace.rank == 3
    x = gaussian(5, 4)
    assert torch.equal(subspace.project(x, 2), x * torch.tensor([1, 1, 0, 0]))


def test_the_logits_need_no_basis() -> None:
    subspace = logits_subspace(load_readout(tiny.make("llama")))
    assert subspace.dimension(0.5) == subspace.rank == tiny.VOCABULARY - 1
    x = gaussian(3, tiny.VOCABULARY)
    once = subspace.project(x, subspace.rank)
    torch.testing.assert_close(once.sum(-1), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(subspace.project(once, subspace.rank), once)
    # Nothing of the size V x V is held.
    assert not [v for v in vars(subspace).values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="give 0.99"):
        check_share(share)


# --- What moves the prediction ------------------------------------------------------------------------


def test_the_divergence_is_the_definition_and_keeps_what_is_tiny() -> None:
    logits, change = 3 * gaussian(4, 7), gaussian(4, 7, seed=1)
    p, changed = logits.softmax(-1), (logits + change).softmax(-1)
    torch.testing.assert_close(divergence(logits, change), (p * (p / changed).log()).sum(-1))
    # Second order in a small change, where the difference of logarithms would be rounding.
    tiny_change = 1e-9 * change
    fisher = ((p * change.square()).sum(-1) - (p * change).sum(-1).square()) / 2
    torch.testing.assert_close(divergence(logits, tiny_change), 1e-18 * fisher, rtol=1e-5, atol=0)
    # And finite where exponentials are not.
    large = divergence(logits, 2000 * change)
    exact = (p * (logits.log_softmax(-1) - (logits + 2000 * change).log_softmax(-1))).sum(-1)
    torch.testing.assert_close(large, exact)
    with pytest.raises(CspruneError, match="not finite"):
        divergence(logits, change / 0)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma2", "granite", "phi", "bloom"])
def test_across_the_subspace_nothing_moves_where_that_is_exact(kind: str) -> None:
    readout = load_readout(tiny.make(kind, vocab_size=SMALL))
    mlp = find_last_mlp(readout)
    post = post_subspace(readout)
    subspaces = [logits_subspace(readout), final_subspace(readout), post, post_subspace(readout, "mlp_out")]
    effects = check(readout, subspaces, IDS, mlp=mlp, size=0.5)
    assert [(e.site, e.held) for e in effects] == [
        ("logits", ""),
        ("final", ""),
        ("post", "RMS held"),
        ("post", "RMS recomputed"),
        ("mlp_out", "RMS held"),
        ("mlp_out", "RMS recomputed"),
    ]
    for effect in effects:
        kl = effect.divergence
        assert effect.whole and kl["orthogonal"].shape == IDS.shape
        assert float(kl["inside"].min()) > 1e-6 and float(kl["random"].mean()) > 1e-5
        if effect.held == "RMS recomputed":  # its own length is what an orthogonal change changes
            assert 1e-7 < float(kl["orthogonal"].mean()) < 0.2 * float(kl["inside"].mean())
        else:
            assert float(kl["orthogonal"].max()) < 1e-22


def test_chosen_positions_are_those_that_are_changed_and_compared() -> None:
    readout = load_readout(tiny.make("gpt_neox", vocab_size=SMALL))
    mlp = find_last_mlp(readout)
    sites = [post_subspace(readout, "mlp_out"), final_subspace(readout)]
    some = check(readout, sites, IDS, positions=torch.tensor([2, 7]), mlp=mlp)
    assert all(kl.shape == (len(IDS), 2) for effect in some for kl in effect.divergence.values())
    assert float(some[0].divergence["orthogonal"].max()) < 1e-22
    assert all(float(effect.divergence["inside"].min()) > 1e-6 for effect in some)
    # Nothing of the change at a position reaches another: all of them at once do as much.
    every = check(readout, sites, IDS[:, :3], positions=torch.tensor([0, 1, 2]), mlp=mlp)
    whole = check(readout, sites, IDS[:, :3], mlp=mlp)
    for one, other in zip(every, whole, strict=True):
        for way, kl in one.divergence.items():
            assert torch.equal(kl, other.divergence[way])


def test_the_wrong_subspace_is_no_refuge() -> None:
    """Controls: the norm's gain matters at post, and does not belong at final."""
    readout = load_readout(tiny.make("llama", vocab_size=SMALL))
    final, post = final_subspace(readout), post_subspace(readout)
    wrong = [
        SpannedSubspace("final", post.eigenvalues, post.vectors),
        SpannedSubspace("post", final.eigenvalues, final.vectors),
    ]
    effects = check(readout, wrong, IDS)
    assert all(float(e.divergence["orthogonal"].mean()) > 1e-6 for e in effects)


def test_a_vocabulary_larger_than_the_width_leaves_only_the_share() -> None:
    readout = load_readout(tiny.make("gpt_neox"))
    final = final_subspace(readout)
    (effect,) = check(readout, [final], IDS, share=0.9)
    assert not effect.whole and effect.dimension == final.dimension(0.9) < tiny.WIDTH
    mean = {way: float(kl.mean()) for way, kl in effect.divergence.items()}
    assert 1e-6 < mean["orthogonal"] < mean["inside"]
    (all_of_it,) = check(readout, [final], IDS, share=1)
    assert set(all_of_it.divergence) == {"inside", "random"}  # nothing is orthogonal to everything


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "opt", "cohere"])
def test_the_content_is_the_centred_log_probabilities(kind: str) -> None:
    """At final exactly; at post divided by the norm's own number, one for each position."""
    model = tiny.make(kind, vocab_size=SMALL)
    parts, readout = tiny.parts(model), load_readout(model)
    mlp = find_last_mlp(readout)
    r = mlp.run(IDS).residual.double()
    h = readout.norm.normalise(r) * parts.gamma
    h = h if parts.beta is None else h + parts.beta
    bias = torch.zeros(SMALL).double() if parts.bias is None else parts.bias * parts.factor
    with torch.no_grad():
        log_p = model(input_ids=IDS).logits.double().log_softmax(-1)
    own = log_p - log_p.mean(-1, keepdim=True)
    read = h @ readings(model, gained=False).mT + bias - bias.mean()
    torch.testing.assert_close(read, own, atol=1e-4, rtol=1e-4)
    constant = 0 if parts.beta is None else readings(model, gained=False) @ parts.beta
    scale = r.var(-1, unbiased=False) if parts.kind == "layernorm" else r.square().mean(-1)
    read = r @ readings(model).mT / (scale + parts.eps).sqrt().unsqueeze(-1)
    torch.testing.assert_close(read + constant + bias - bias.mean(), own, atol=1e-4, rtol=1e-4)


# --- mlp_in ------------------------------------------------------------------------------------------


def by_hand(kind: str, model: Any, x: torch.Tensor) -> torch.Tensor:
    """d(write)/d(mlp_in), float64 [tokens, d, d], of the closed forms; x [tokens, d]."""
    module = model.get_submodule(find_last_mlp(load_readout(model)).reads)
    if kind == "llama":
        gate, up, down = (getattr(module, f"{n}_proj").weight for n in ("gate", "up", "down"))
        a, b = x @ gate.mT, x @ up.mT
        s = a.sigmoid()
        inner = (s * (1 + a * (1 - s)) * b)[:, :, None] * gate + (a * s)[:, :, None] * up
        return down @ inner
    first, second = module.dense_h_to_4h, module.dense_4h_to_h
    z = x @ first.weight.mT + first.bias
    slope = torch.special.ndtr(z) + z * (-z.square() / 2).exp() / (2 * torch.pi) ** 0.5
    return second.weight @ (slope[:, :, None] * first.weight)


@pytest.mark.parametrize("vocabulary", [SMALL, tiny.VOCABULARY])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_the_gram_matrix_at_mlp_in_is_that_of_all_derivatives(kind: str, vocabulary: int) -> None:
    """A gated and a plain MLP: the stack of V rows a position, by its closed form."""
    model = tiny.make(kind, vocab_size=vocabulary).double()
    readout = load_readout(model)
    mlp = find_last_mlp(readout)
    g = readings(model)
    seen = mlp.run(IDS)
    with torch.no_grad():
        slopes = by_hand(kind, model, seen.read.flatten(0, 1))
    stack = (g @ slopes).flatten(0, 1)  # [positions V, d]
    expected = stack.mT @ stack
    sums = accumulate(mlp, post_subspace(readout).reading_root(), IDS, batch_size=2)
    assert sums.positions == IDS.numel()
    torch.testing.assert_close(sums.gram, expected, rtol=1e-8, atol=1e-8)
    largest = (g @ slopes).square().sum((1, 2)).max()
    assert sums.largest == pytest.approx(float(largest), rel=1e-8)
    # V products instead of the root's rows give the same.
    torch.testing.assert_close(accumulate(mlp, g, IDS).gram, expected, rtol=1e-8, atol=1e-8)
    values = torch.linalg.svdvals(stack).square() / IDS.numel()
    torch.testing.assert_close(sums.subspace().eigenvalues, values, rtol=1e-6, atol=1e-8)
    # Controls: the norm's 1 / RMS, and no gain, would both be seen.
    rms = readout.norm.normalise(seen.residual).norm(dim=-1) / seen.residual.norm(dim=-1)
    scaled = ((g @ slopes) * rms.flatten()[:, None, None]).flatten(0, 1)
    assert not torch.allclose(scaled.mT @ scaled, expected, rtol=0.05)
    ungained = (readings(model, gained=False) @ slopes).flatten(0, 1)
    assert not torch.allclose(ungained.mT @ ungained, expected, rtol=0.05)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_derivatives_are_those_of_small_changes(kind: str) -> None:
    overrides = {"residual_multiplier": 0.22} if kind == "granite" else {}
    # A small vocabulary, and float64: a ReLU has a kink, which a step of 1e-6 rarely crosses.
    readout = load_readout(tiny.make(kind, vocab_size=SMALL, **overrides).double())
    mlp = find_last_mlp(readout)
    root = post_subspace(readout).reading_root()
    # Gemma's and OLMo's norms compute in float32 whatever the model's dtype.
    low = kind.startswith(("gemma", "olmo2"))
    step = 1e-3 if low else 1e-6
    columns = []
    for k in range(tiny.WIDTH):
        change = torch.zeros(*IDS.shape, tiny.WIDTH, dtype=torch.float64)
        change[..., k] = step
        there, back = (mlp.run(IDS, change_read=sign * change).residual for sign in (1, -1))
        columns.append((there - back).flatten(0, 1) @ root.mT / (2 * step))
    rows = torch.stack(columns, -1).flatten(0, 1)
    expected = rows.mT @ rows
    gram = accumulate(mlp, root, IDS).gram
    scale = float(expected.diagonal().max())
    torch.testing.assert_close(gram / scale, expected / scale, atol=2e-3 if low else 1e-5, rtol=0)


def test_the_norm_after_the_mlp_is_differentiated_too() -> None:
    model = tiny.make("gemma3", vocab_size=SMALL)
    readout = load_readout(model)
    mlp = find_last_mlp(readout)
    root = post_subspace(readout).reading_root()
    layer = model.model.layers[-1]
    x = mlp.run(IDS).read.flatten(0, 1)

    def gram(write: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        rows = [torch.autograd.functional.jacobian(write, each).double() for each in x]
        stack = torch.cat([root @ each for each in rows])
        return stack.mT @ stack

    ours = accumulate(mlp, root, IDS).gram
    whole = gram(lambda each: layer.post_feedforward_layernorm(layer.mlp(each)))
    torch.testing.assert_close(ours, whole, rtol=1e-3, atol=1e-3 * float(whole.max()))
    alone = gram(layer.mlp)
    assert not torch.allclose(ours, alone, rtol=0.05, atol=0.05 * float(whole.max()))


def test_sums_merge_whatever_the_batches_and_leave_out_first_positions() -> None:
    readout = load_readout(tiny.make("llama"))
    mlp = find_last_mlp(readout)
    root = post_subspace(readout).reading_root()
    whole = accumulate(mlp, root, IDS, start=3, batch_size=3)
    assert whole.positions == len(IDS) * 9
    merged = JacobianSums.zeros(tiny.WIDTH)
    for row in IDS:
        merged.merge(accumulate(mlp, root, row[None], start=3))
    torch.testing.assert_close(merged.gram, whole.gram, rtol=1e-5, atol=1e-3)
    assert merged.positions == whole.positions and merged.largest == pytest.approx(whole.largest, rel=1e-4)
    assert not torch.allclose(accumulate(mlp, root, IDS).gram, whole.gram, rtol=0.05)  # control


def test_derivatives_leave_the_model_as_it_was() -> None:
    model = tiny.make("llama")
    readout = load_readout(model)
    mlp = find_last_mlp(readout)
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # a frozen model has derivatives all the same
    before = mlp.run(IDS).residual
    with torch.no_grad():
        accumulate(mlp, post_subspace(readout).reading_root(), IDS)
        assert not torch.is_grad_enabled()
    assert torch.equal(mlp.run(IDS).residual, before) and not before.requires_grad
    assert all(p.grad is None for p in model.parameters())


# --- The job -----------------------------------------------------------------------------------------


class Quiet:
    @contextlib.contextmanager
    def stage(self, what: str, tokens: int = 1) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.make("gpt_neox"), tmp_path_factory.mktemp("model"))


def job(folder: Path, sites: list[str], out: Path | None, overwrite: bool = False, **settings: Any) -> Any:
    given = Settings(model=str(folder), **{"documents": 3, "sequence_length": 24, **settings})
    return subspace_job(given, sites, 0.95, out, overwrite, Quiet())


def test_the_job_writes_bases_and_a_result_that_can_be_read_back(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "subspace"
    found = job(folder, [], out)
    shown, notes = found.result, found.notes
    written = ["subspace-pictures", "subspace.html", "subspace.json", "subspace.md", "subspace.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == written
    described = json.loads((out / "subspace.json").read_text())
    assert described["results"] == json.loads(json.dumps([shown.describe()]))
    assert json.loads(json.dumps(read_result(described["results"][0]).describe())) == described["results"][0]
    figures = shown.figures
    assert list(figures["sites"]) == ["logits", "final", "post", "mlp_out", "mlp_in"]
    assert figures["positions"] == 72 and figures["mlp"]["reads"] == "gpt_neox.layers.1.mlp"
    tensors = safetensors.torch.load_file(out / "subspace.safetensors")
    readout = load_readout(tiny.make("gpt_neox"))
    for site, described_site in figures["sites"].items():
        if site == "logits":
            continue
        basis = tensors[f"{site}.basis"]
        assert basis.shape == (tiny.WIDTH, described_site["dimension"]) and basis.dtype == torch.float64
        torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1], dtype=torch.float64))
        assert tensors[f"{site}.eigenvalues"].tolist() == described_site["eigenvalues"]
    torch.testing.assert_close(tensors["post.eigenvalues"], post_subspace(readout).eigenvalues)
    assert "3 documents" in notes[0]
    (table, changes) = shown.tables
    assert [row.label for row in table.rows] == list(figures["sites"])
    assert len(changes.rows) == 7 and len(shown.pictures[0].panels[0].curves) == 3
    with pytest.raises(InputError, match="add --overwrite"):
        job(folder, [], out)
    job(folder, ["final"], out, overwrite=True)
    assert set(safetensors.torch.load_file(out / "subspace.safetensors")) == {
        "final.basis",
        "final.eigenvalues",
    }


def test_sites_are_those_asked_for_and_need_no_more(folder: Path, tmp_path: Path) -> None:
    shown = job(folder, ["logits"], tmp_path / "out").result
    assert list(shown.figures["sites"]) == ["logits"] and "mlp" not in shown.figures
    assert not shown.pictures and not (tmp_path / "out" / "subspace.safetensors").exists()
    last = job(folder, ["mlp_in"], None, positions="last").result
    assert last.figures["positions"] == 3


def test_what_cannot_be_is_refused_before_anything_is_loaded(folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no model"
    (tmp_path / "subspace.json").write_text("{}")
    for arguments, message in (
        ((missing, ["middle"], None), "site 'middle' is unknown: use one of logits"),
        ((missing, [], tmp_path), "is not a predictive subspace of csprune's"),
    ):
        with pytest.raises(InputError, match=message):
            job(*arguments)
    with pytest.raises(InputError, match="calibration"):
        job(missing, [], None, calibration=tmp_path / "x")
    with pytest.raises(InputError, match="smaller --skip-first"):
        job(folder, ["final"], None, skip_first=24)
    assert (tmp_path / "subspace.json").read_text() == "{}"
