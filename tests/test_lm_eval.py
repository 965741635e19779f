"""A truncated checkpoint in lm-evaluation-harness, offline and where csprune is not installed.

The task (benchmarks/tasks/agreement/) is minimal pairs; what is compared is every log-likelihood.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from exports import export_quickly, load

import csprune

TASKS = Path(__file__).parents[1] / "benchmarks/tasks"
TASK, PAIRS = "csprune_agreement_relative", 100
Scores = dict[int, list[float]]


def evaluate(model: Any) -> Scores:
    """The log-likelihoods of each pair by the harness's Python API."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    result = lm_eval.simple_evaluate(
        model=model,
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    assert result is not None
    return scores(result["samples"][TASK])


def scores(samples: list[dict[str, Any]]) -> Scores:
    # Written to a file, a response is a list of strings or numbers, by version.
    return {s["doc_id"]: [float(response[0]) for response in s["filtered_resps"]] for s in samples}


def wrapped(model: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tiny.tokenizer(), batch_size=8)


def largest_difference(a: Scores, b: Scores) -> float:
    assert set(a) == set(b) and len(a) == PAIRS
    return max(abs(x - y) for key in a for x, y in zip(a[key], b[key], strict=True))


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The task finds its pairs wherever the harness is started; caches are thrown away."""
    cache = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cache)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
            patch.setenv(name, cache)
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores, Scores]:
    """An exported tied model, the scores of the in-memory truncation, and the original's."""
    folder = tmp_path_factory.mktemp("lm_eval")
    source = tiny.save(tiny.make("llama_tied"), folder / "source")
    loaded = csprune.load_model(str(source))
    windows = csprune.read_windows(loaded.tokenizer, tiny.texts(8), sequence_length=16)
    readout = csprune.load_readout(loaded.model)
    calibration = csprune.calibrate(loaded.model, windows, readout=readout)
    truncation = csprune.truncate(readout, calibration, "fisher", 0.5)
    export_quickly(source, truncation, folder / "out")
    original = evaluate(wrapped(loaded.model))
    with csprune.apply(loaded.model, truncation):
        in_memory = evaluate(wrapped(loaded.model))
    return folder / "out", in_memory, original


def without_csprune(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run where `import csprune` fails: None in sys.modules is Python's own way to say so."""
    (folder / "sitecustomize.py").write_text('import sys\nsys.modules["csprune"] = None\n')
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=folder, check=False
    )


def test_the_truncation_is_what_the_harness_scores(case: tuple[Path, Scores, Scores]) -> None:
    """The harness ties weights again on loading: it must not bring the original head back."""
    out, in_memory, original = case
    reloaded = evaluate(wrapped(load(out)))
    assert largest_difference(reloaded, in_memory) < 1e-4
    assert largest_difference(original, in_memory) > 0.1  # control: the scores can tell


def test_without_csprune_the_checkpoint_brings_its_own_code(
    case: tuple[Path, Scores, Scores], tmp_path: Path
) -> None:
    out, in_memory, original = case
    script = f"""
import json
try:
    import csprune
except ImportError:
    pass
else:
    raise SystemExit("csprune can be imported")
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
try:
    HFLM(pretrained={str(out)!r}, device="cpu")
    refused = ""
except Exception as error:
    refused = str(error)
result = lm_eval.simple_evaluate(
    model=HFLM(pretrained={str(out)!r}, device="cpu", batch_size=8, trust_remote_code=True),
    tasks=[{TASK!r}],
    task_manager=TaskManager(include_path={str(TASKS)!r}, include_defaults=False),
    bootstrap_iters=0,
)
print(json.dumps([refused, result["samples"][{TASK!r}]], default=str))
"""
    done = without_csprune(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, samples = json.loads(done.stdout.splitlines()[-1])
    assert "csprune" in refused  # without trust_remote_code it fails, and says of what it knows nothing
    assert largest_difference(scores(samples), in_memory) < 1e-4
    assert largest_difference(scores(samples), original) > 0.1


@pytest.mark.slow
def test_the_harness_on_the_command_line(case: tuple[Path, Scores, Scores], tmp_path: Path) -> None:
    out, in_memory, original = case
    command = [
        *("-m", "lm_eval", "--model", "hf", "--tasks", TASK, "--include_path", str(TASKS)),
        *("--device", "cpu", "--output_path", str(tmp_path / "results"), "--log_samples", "--model_args"),
    ]
    done = without_csprune(tmp_path, *command, f"pretrained={out},trust_remote_code=True")
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "results").rglob(f"samples_{TASK}_*.jsonl")
    samples = [json.loads(line) for line in written.read_text().splitlines()]
    assert largest_difference(scores(samples), in_memory) < 1e-4
    assert largest_difference(scores(samples), original) > 0.1
    refused = without_csprune(tmp_path, *command, f"pretrained={out}")
    assert refused.returncode != 0 and "csprune" in refused.stderr
