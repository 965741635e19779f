"""The real demo model: figures against the float64 oracle, memory, and the exported model's own loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from commands import csprune_command
from transformers import AutoModelForCausalLM

import csprune
from csprune.linalg import haar_columns

pytestmark = pytest.mark.slow

DOCUMENTS, SUBSPACES = 24, 2
RANKS = (0.05, 0.2)
NAMES = ("loss_change", "logit_distance", "fisher_term", "prediction_change", "top1_agreement")
SMALL = ("--documents", str(DOCUMENTS), "--evaluation-documents", str(DOCUMENTS))


@pytest.fixture(scope="module")
def loaded(demo_folder: Path) -> Any:
    return csprune.load_model(str(demo_folder))


@pytest.fixture(scope="module")
def text(loaded: Any) -> dict[str, csprune.Windows]:
    return {
        block: csprune.read_windows(loaded.tokenizer, "demo", documents=DOCUMENTS, block=block)
        for block in ("calibration", "confirmation")
    }


def ours(loaded: Any, text: dict[str, csprune.Windows]) -> csprune.Evaluation:
    readout = csprune.load_readout(loaded.model, text["calibration"].input_ids)
    calibration = csprune.calibrate(loaded.model, text["calibration"], "last", readout=readout)
    truncations = [
        csprune.truncate(readout, calibration, method, rank) for rank in RANKS for method in oracle.METHODS
    ]
    return csprune.evaluate(
        loaded.model, text["confirmation"], truncations, positions="last", random_subspaces=SUBSPACES
    )


def theirs(loaded: Any, text: dict[str, csprune.Windows]) -> dict[tuple[str, float], list[dict]]:
    """Figures by method and rank, for random of each subspace, each [documents], from the definitions."""
    model = loaded.model
    norm, head = model.model.norm, model.lm_head
    folded = oracle.fold(head.weight.detach(), None, norm.weight.detach(), None, "rmsnorm")
    states = {
        block: [
            oracle.states(oracle.capture(model, ids, norm, head).residual, "rmsnorm", norm.variance_epsilon)
            for ids in windows.input_ids
        ]
        for block, windows in text.items()
    }
    found = oracle.statistics(folded, states["calibration"], positions="last")
    labels: list[tuple[str, float]] = []
    projections = []
    q = folded.weight.shape[1]
    for rank in RANKS:
        removed = oracle.removed_count(rank, q)
        for method in oracle.METHODS:
            labels.append((method, rank))
            projections.append(oracle.projection(method, removed, folded=folded, statistics=found))
        for seed in range(SUBSPACES):
            labels.append(("random", rank))
            basis = haar_columns(q, removed, seed).numpy()
            projections.append(
                oracle.projection("random", removed, folded=folded, statistics=found, basis=basis)
            )
    targets = list(text["confirmation"].target_ids.numpy())
    rows = oracle.evaluate(
        folded, states["confirmation"], targets, projections, found.mean_state, positions="last"
    )
    by_label: dict[tuple[str, float], list[dict]] = {label: [] for label in labels}
    for label, row in zip(labels, rows, strict=True):
        by_label[label].append(row)
    return by_label


def agree(one: float, other: float) -> bool:
    return abs(one - other) <= max(1e-3 * abs(other), 2e-4)


def test_the_figures_are_the_oracles(loaded: Any, text: dict[str, csprune.Windows]) -> None:
    evaluation = ours(loaded, text)
    expected = theirs(loaded, text)
    first = expected["fisher", RANKS[0]][0]
    assert agree(evaluation.base_loss.mean(), first["loss"].mean())
    assert agree(evaluation.base_entropy.mean(), first["entropy"].mean())
    measured = {(m.method, m.rank): m for m in evaluation.measurements}
    assert set(measured) == set(expected) and len(expected) == 10
    means = {
        label: {name: float(np.mean([row[name] for row in rows])) for name in NAMES}
        for label, rows in expected.items()
    }
    for label, row in means.items():
        for name in NAMES:
            value = measured[label].values[name].mean()
            assert agree(value, row[name]), (label, name, value, row[name])
    # Controls: neither another rank nor another method agrees as well.
    for label, row in means.items():
        for other, measurement in measured.items():
            if other != label:
                assert not agree(measurement.values["logit_distance"].mean(), row["logit_distance"])
    # And so are the ratios that a report is read for.
    for entry in csprune.summarise(evaluation, draws=10)["truncations"]:
        own, random = means[entry["method"], entry["rank"]], means["random", entry["rank"]]
        for name, comparison in entry["per_unit_vs_random"].items():
            rate, other = (each[name] / each["logit_distance"] for each in (own, random))
            # On so few documents the loss may fall; then there is no ratio, rather than a negative one.
            assert comparison["ratio"] == (pytest.approx(rate / other, rel=2e-3) if other > 0 else None)
        for name in NAMES[:-1]:
            comparison, expected_ratio = entry["vs_random"][name], own[name] / random[name]
            assert comparison["ratio"] == (
                pytest.approx(expected_ratio, rel=2e-3) if random[name] > 0 else None
            )


# Not getrusage: its peak is inherited from the process that started this one.
_MEASURED = """
import json, sys
from csprune import cli
def kilobytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
before = kilobytes("VmRSS")
sys.argv[0] = "csprune"
try:
    cli.main()
finally:
    print(json.dumps([before * 1024, kilobytes("VmHWM") * 1024]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_calibration_takes_little_more_memory_than_the_model(demo_folder: Path, tmp_path: Path) -> None:
    """Peak above the imports: 1.5 times the float32 model and half a gigabyte.

    A [tokens, V] matrix of one batch of 8 documents alone would be 201 MB in float32, 403 in float64.
    """
    command = [
        "calibrate",
        str(demo_folder),
        "--data",
        "demo",
        "--documents",
        "48",
        "-o",
        str(tmp_path / "c"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *command], capture_output=True, text=True, check=True
    )
    before, after = json.loads(done.stdout.splitlines()[-1])
    size = (demo_folder / "model.safetensors").stat().st_size
    assert size > 500e6  # stored in float32
    assert size < after - before <= 1.5 * size + 0.5e9, f"{(after - before) / 1e6:.0f} MB"


def test_the_exported_model_has_the_loss_that_was_measured(
    loaded: Any, text: dict[str, csprune.Windows], demo_folder: Path, tmp_path: Path
) -> None:
    """The evaluation adds a low-rank change to the logits; the checkpoint runs factors in other order."""
    out = tmp_path / "out"
    command = ("compress", demo_folder, "--rank", "0.2", "--method", "fisher", *SMALL, "-o", out)
    run = csprune_command(*command)
    assert run.status == 0, run.err
    report = json.loads((out / "report.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    windows = text["confirmation"]

    def loss(of: Any) -> float:
        with torch.no_grad():
            losses = [
                F.cross_entropy(of(input_ids=ids[None]).logits[0].double(), targets).item()
                for ids, targets in zip(windows.input_ids, windows.target_ids, strict=True)
            ]
        return float(np.mean(losses))

    base = loss(loaded.model)
    assert report["base_loss"]["mean"] == pytest.approx(base, abs=1e-4)
    change = report["truncations"][0]["loss_change"]["mean"]
    assert loss(model) - base == pytest.approx(change, abs=2e-4)
    assert change > 0.01  # control: it is no copy of the original
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0]
    assert "Paris" in loaded.tokenizer.decode(answer)
