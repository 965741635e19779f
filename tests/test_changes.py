"""The change of a prediction: every figure against the oracle, where float32 is hard too."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csprune import CspruneError, changes
from csprune.changes import Prediction, check_finite, log_softmax, measure_nested
from csprune.measurement import QUANTITIES
from csprune.unembedding import LogitTransform, Unembedding

VOCABULARY, WIDTH, TOKENS = 61, 7, 5
TRANSFORMS = {
    "plain": LogitTransform(),
    "scale": LogitTransform(scale=0.3),
    # Not so low that changed logits saturate at it: then the top token is a matter of rounding.
    "cap": LogitTransform(cap=12.0),
}


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Setting:
    """A random readout of an RMSNorm, tokens, and the nested removal of the first columns of a basis."""

    def __init__(
        self, name: str, seed: int = 0, dtype: torch.dtype = torch.float64, size: float = 1.0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight = (1.5 * size * normal(generator, VOCABULARY, WIDTH)).to(dtype)
        bias = normal(generator, VOCABULARY).to(dtype)
        gain, norm_bias = 1 + 0.3 * normal(generator, WIDTH), 0.3 * normal(generator, WIDTH)
        transform = TRANSFORMS[name]
        self.unembedding = Unembedding(weight, bias, gain, norm_bias, False, transform)
        self.folded = oracle.fold(
            weight.double(), bias, gain, norm_bias, "rmsnorm", factor=transform.scale, cap=transform.cap
        )
        self.u = normal(generator, TOKENS, WIDTH)
        self.targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        self.mean = 0.2 * normal(generator, WIDTH)
        # An oblique P = left right^T, nested in its columns: right^T left is the unit matrix.
        columns = torch.eye(WIDTH) + 0.15 * normal(generator, WIDTH, WIDTH)
        self.left, self.right = columns, torch.linalg.inv(columns).mT
        # float32 images: what is compared is the sums, not the rounding of what goes into them.
        self.image = self.unembedding.along(-self.left, self.unembedding.compute_dtype)

    def measure(self, sizes: list[int], strength: float = 1.0) -> dict[int, dict[str, np.ndarray]]:
        largest = sizes[-1]
        prediction = Prediction.of(self.unembedding, self.u, self.targets)
        left = self.left[:, :largest]
        found = measure_nested(
            prediction,
            strength * (self.u - self.mean) @ self.right[:, :largest],
            self.image[:, :largest],
            left.mT @ self.unembedding.gram @ left,
            sizes,
        )
        return {m: dict(zip(QUANTITIES, each.numpy(), strict=True)) for m, each in found.items()}

    def expected(self, m: int, strength: float = 1.0) -> dict[str, np.ndarray]:
        p = strength * (self.left[:, :m] @ self.right[:, :m].mT).numpy()
        return oracle.measure(self.folded, self.u.numpy(), self.targets.numpy(), p, self.mean.numpy())


def check(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float, atol: float) -> None:
    for name in QUANTITIES:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.sets(st.integers(0, WIDTH), min_size=1),
    strength=st.sampled_from([1e-3, 0.3, 1.0, 5.0]),
)
def test_figures_are_the_oracles(name: str, seed: int, sizes: set[int], strength: float) -> None:
    setting = Setting(name, seed)
    found = setting.measure(sorted(sizes), strength)
    assert sorted(found) == sorted(sizes)
    for m in sizes:
        check(found[m], setting.expected(m, strength), rtol=1e-8, atol=1e-12)
        if m and m - 1 > 0:  # control: one column fewer is another change
            fewer = setting.expected(m - 1, strength)
            assert not np.allclose(found[m]["fisher_term"], fewer["fisher_term"], rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_loss_and_the_top_token_are_the_oracles(name: str) -> None:
    setting = Setting(name, 4)
    prediction = Prediction.of(setting.unembedding, setting.u, setting.targets)
    np.testing.assert_allclose(prediction.loss, setting.expected(1)["loss"], rtol=1e-10)
    logits = oracle.after_cap(setting.folded, oracle.before_cap(setting.folded, setting.u.numpy()))
    assert prediction.top.squeeze(1).tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(prediction.probabilities.sum(1), 1, atol=1e-14)
    assert (prediction.before_cap is None) == (name != "cap")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("size", [1.0, 50.0])
def test_no_change_is_exactly_none(name: str, dtype: torch.dtype, size: float) -> None:
    setting = Setting(name, 1, dtype, size)
    none = setting.measure([0, 3], strength=0.0)
    for figures in (none[0], none[3], setting.measure([0, 3])[0]):
        for quantity in QUANTITIES:
            assert (figures[quantity] == (quantity == "top1_agreement")).all(), quantity
    # Control: a change of one part in a thousand is seen.
    assert (setting.measure([3], strength=1e-3)[3]["logit_distance"] > 0).all()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_float32_at_ordinary_predictions(name: str) -> None:
    for seed in range(20):
        setting = Setting(name, seed, torch.float32)
        found = setting.measure([2, 5])
        for m in (2, 5):
            check(found[m], setting.expected(m), rtol=1e-5, atol=1e-6)


def certain(doubt: float, seed: int, size: float) -> tuple[Any, ...]:
    """float32 logits whose top token lacks `doubt` of the mass, a change of them, and float64 figures."""
    generator = torch.Generator().manual_seed(seed)
    logits = normal(generator, TOKENS, VOCABULARY)
    logits[:, 0] = torch.logsumexp(logits[:, 1:], 1) - np.log(doubt)
    logits = logits.float()
    image, x = (size * normal(generator, VOCABULARY, 3)).float(), normal(generator, TOKENS, 3).float()
    # The target is the certain token: its loss hardly changes.
    targets = torch.zeros(TOKENS, 1, dtype=torch.int64)
    log_p, p = log_softmax(logits.clone())
    loss = -log_p.gather(1, targets).squeeze(1).double()
    top = logits.argmax(1, keepdim=True)
    prediction = Prediction(None, None, log_p, p, targets, top, loss, loss)  # type: ignore[arg-type]
    change = x.double() @ image.double().mT
    change = (change - change[:, :1]).numpy()
    exact = np.exp(oracle.log_softmax(logits.double().numpy()))
    excess = (exact * np.expm1(change)).sum(1)
    mean = (exact * change).sum(1)
    expected = {
        "loss_change": np.log1p(excess),
        "fisher_term": ((exact * change**2).sum(1) - mean**2) / 2,
        "prediction_change": np.log1p(excess) - mean,
    }
    return prediction, x.double(), image, logits, expected


@pytest.mark.parametrize("doubt", [1e-3, 1e-6, 1e-9, 1e-12])
def test_nearly_certain_predictions_in_float32(doubt: float) -> None:
    """All figures are of the size of the doubt, and right in themselves; the naive ones are lost."""
    for seed in range(5):
        prediction, x, image, logits, expected = certain(doubt, seed, size=1.0)
        gram = image.double().mT @ image.double()
        found = dict(zip(QUANTITIES, measure_nested(prediction, x, image, gram, [3])[3].numpy(), strict=True))
        for name, value in expected.items():
            assert np.abs(value).max() < 1e5 * doubt
            np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6 * doubt, err_msg=name)
        # Control: the definitions themselves, in float32.
        log_p = logits.log_softmax(1)
        change = x.float() @ image.mT
        changed = (logits + change).log_softmax(1)
        naive = (log_p.exp() * (log_p - changed)).sum(1).double().numpy()
        error = np.abs(naive / expected["prediction_change"] - 1).max()
        assert error > (1e-5 if doubt > 1e-4 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["plain", "scale"])
@pytest.mark.parametrize("strength", [30.0, 300.0, 1e4, 1e6])
def test_changes_beyond_what_exp_can_hold(name: str, dtype: torch.dtype, strength: float) -> None:
    beyond = 0
    for seed in range(8):
        setting = Setting(name, seed, dtype)
        found, expected = setting.measure([1, 4], strength), setting.expected(4, strength)
        rtol = 1e-5 if dtype == torch.float32 else 1e-10
        # The loss change is a difference of two of the size of the whole change.
        scale = float(np.sqrt(expected["logit_distance"].max()))
        check(found[4], expected, rtol=rtol, atol=rtol * scale)
        check(found[1], setting.expected(1, strength), rtol=rtol, atol=rtol * scale)
        beyond += int((expected["prediction_change"] > np.log(torch.finfo(torch.float32).max)).sum())
    # Control: this is where exp of a change, or of its normaliser, overflows in float32.
    assert beyond > 0 or strength < 100


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("elements", [1, TOKENS * 7, TOKENS * 60])
def test_blocks_of_the_vocabulary_do_not_matter(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(name, 2)
    for strength in (1.0, 200.0):  # the second has blocks whose exp overflows float32, and others
        for dtype, rtol in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            setting = Setting(name, 2, dtype)
            whole = setting.measure([0, 2, 6], strength)
            with monkeypatch.context() as patch:
                patch.setattr(changes, "_BLOCK_ELEMENTS", elements)
                blocks = setting.measure([0, 2, 6], strength)
            for m in whole:
                check(blocks[m], whole[m], rtol=rtol, atol=rtol * (1 + strength))


def test_the_top_token_is_not_lost_to_the_rounding_of_its_own_change() -> None:
    """Large terms that cancel: a matrix product and a sum of products round them differently."""
    generator = torch.Generator().manual_seed(0)
    tokens, width, strength = 400, 64, 1e3
    logits = normal(generator, tokens, VOCABULARY).float()
    log_p, p = log_softmax(logits)
    targets = torch.zeros(tokens, 1, dtype=torch.int64)
    top = log_p.argmax(1, keepdim=True)
    unused = log_p[:, 0].double()
    prediction = Prediction(None, None, log_p, p, targets, top, unused, unused)  # type: ignore[arg-type]
    x = strength * normal(generator, tokens, width).float()
    row = normal(generator, width).float()
    image = row.expand(VOCABULARY, width).clone()  # every logit changes alike: no prediction does
    products = (x @ image.mT, (x * row).sum(1, keepdim=True))
    assert (products[0] - products[1]).abs().max() > 1e-4  # control: they do differ
    found = measure_nested(prediction, x.double(), image, torch.eye(width).double(), [width])[width]
    assert (found[QUANTITIES.index("top1_agreement")] == 1).all()
    # Control: a change that is larger than rounding is seen. The second token overtakes the first.
    gap = log_p.topk(2, 1).values.diff(dim=1).neg().squeeze(1)
    second = log_p.topk(2, 1).indices[:, 1]
    one = torch.zeros(VOCABULARY, tokens)
    one[second, torch.arange(tokens)] = 1.0
    for factor, agreement in ((0.99, 1.0), (1.01, 0.0)):
        x = torch.diag(factor * gap.double())
        found = measure_nested(prediction, x, one, torch.eye(tokens).double(), [tokens])[tokens]
        clear = gap > 1e-3
        assert (found[QUANTITIES.index("top1_agreement")][clear] == agreement).all()


def test_log_softmax_of_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * normal(generator, 8, 100_000)
    exact = logits.float().double().log_softmax(1)
    given_ = logits.float()
    log_p, p = log_softmax(given_)
    assert (log_p - exact).abs().max() < 2e-6
    np.testing.assert_allclose(p.double().sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(p.double(), exact.exp(), rtol=3e-6)
    assert log_p.data_ptr() == given_.data_ptr()  # the logits' memory is used again
    # An enormous logit is no reason to overflow.
    log_p, p = log_softmax(torch.tensor([[3e38, 0.0, -3e38]]))
    assert p.tolist() == [[1, 0, 0]] and log_p[0, 0] == 0


def test_logits_that_are_not_finite_are_counted() -> None:
    setting = Setting("plain")
    logits = torch.zeros(6, 4)
    check_finite(logits)
    logits[1, 2], logits[4, 0], logits[4, 3] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(CspruneError, match="logits of 2 of 6 tokens"):
        check_finite(logits)
    setting.unembedding.weight[3, 0] = torch.inf
    with pytest.raises(CspruneError, match="logits of 5 of 5 tokens"):
        Prediction.of(setting.unembedding, setting.u, setting.targets)
