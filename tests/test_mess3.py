"""The Mess3 process of benchmarks/: its mathematics, and that a little training comes near its optimum."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mess3_process import Mess3  # noqa: E402  the benchmarks are no package


@pytest.mark.parametrize(("alpha", "x"), [(0.85, 0.05), (0.6, 0.15), (0.2, 0.4)])
def test_the_operators_are_a_process_and_its_usual_matrices(alpha: float, x: float) -> None:
    process = Mess3(alpha, x)
    rows = process.operators.sum((0, 2))
    torch.testing.assert_close(rows, torch.ones(3, dtype=torch.float64))
    assert bool((process.operators > 0).all())
    # The uniform distribution is stationary.
    after = process.stationary @ process.operators.sum(0)
    torch.testing.assert_close(after, process.stationary)
    # As written in the literature, for the first token, with beta = (1 - alpha) / 2 and y = 1 - 2 x.
    b, y = (1 - alpha) / 2, 1 - 2 * x
    first = [[alpha * y, b * x, b * x], [alpha * x, b * y, b * x], [alpha * x, b * x, b * y]]
    torch.testing.assert_close(process.operators[0], torch.tensor(first, dtype=torch.float64))


@pytest.mark.parametrize(("alpha", "x"), [(0, 0.1), (1, 0.1), (0.5, 0), (0.5, 0.5)])
def test_parameters_without_a_process_are_refused(alpha: float, x: float) -> None:
    with pytest.raises(ValueError, match="is not between"):
        Mess3(alpha, x)


def test_predictions_are_the_conditional_probabilities_of_sequences() -> None:
    """The forward algorithm against the probabilities of whole sequences, which need no belief."""
    process = Mess3()
    shorter, before = process.histories(3)
    _, whole = process.histories(4)
    assert float(before.sum()) == pytest.approx(1) and float(whole.sum()) == pytest.approx(1)
    expected = whole.reshape(27, 3) / before[:, None]
    predicted = process.predictions(process.beliefs(shorter)[:, -1])
    torch.testing.assert_close(predicted, expected)
    # Stationarity: leaving out the first token leaves the probabilities as they are.
    torch.testing.assert_close(whole.reshape(3, 27).sum(0), before)


def test_the_optimal_loss_falls_to_the_entropy_rate() -> None:
    process = Mess3()
    loss = process.optimal_loss(7)
    assert bool((loss[1:] < loss[:-1]).all()) and float(loss[0]) < math.log(3)
    assert float(loss[-2] - loss[-1]) < 1e-3
    # The chain rule: the entropy of a sequence is the sum of what each token adds.
    _, p = process.histories(5)
    total = float(-(p * p.log()).sum())
    assert total == pytest.approx(math.log(3) + float(loss[:4].sum()), rel=1e-12)
    # Control: tokens that say nothing of the state leave ln 3.
    assert float(Mess3(1 / 3, 0.05).optimal_loss(3)[-1]) == pytest.approx(math.log(3))


def test_samples_are_of_the_process() -> None:
    process = Mess3()
    tokens = process.sample(20_000, 3, torch.Generator().manual_seed(0))
    assert tokens.shape == (20_000, 3) and tokens.dtype == torch.int64
    counts = torch.bincount(tokens @ torch.tensor([9, 3, 1]), minlength=27) / len(tokens)
    _, p = process.histories(3)
    # Five standard deviations of each count.
    assert bool(((counts - p).abs() < 5 * (p / len(tokens)).sqrt()).all())


@pytest.mark.slow
def test_a_transformer_that_learns_it_has_the_predictive_subspaces(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks/mess3.py", "--steps", "600"]
    command += ["--model", tmp_path / "model", "-o", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "out/mess3.json").read_text())
    optimal, excess = record["loss"]["optimal"], record["loss"]["excess"]
    assert 0 < excess[-1] < 0.01 < math.log(3) - optimal[-1]
    assert all(record["ranks"][site] == 2 for site in ("logits", "final", "post", "mlp_out"))
    assert 2 <= record["dimensions"]["mlp_in"]["0.99"] < 32
    content = record["content"]
    assert content["final differs"] < 1e-5 < content["spread"] and content["shared shifts"] < 1e-20
    # One linear map gives the model's own content exactly, and the optimal one nearly; post alone does not.
    assert content["final"]["own"] > 1 - 1e-9 and content["final"]["optimal"] > 0.97
    assert content["post"]["own"] < content["post / RMS"]["own"]
    for change in record["changes"]:
        moved = change["mean_kl"]
        assert moved["orthogonal"] < (1e-20 if change["kind"] == "exact" else 0.2 * moved["inside"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "mess3.json", "logits.png", "final.png", "post.png", "mlp_in.png"}
