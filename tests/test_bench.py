"""`bench_job`: truncated checkpoints beside their original, and what its folder holds."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny
from harness_cases import AGREEMENT, TASKS, brief, make_models, write_tasks
from rich.console import Console

from csprune import CspruneError, InputError
from csprune.bench import harness, paired
from csprune.bench.files import write_bench
from csprune.bench.job import bench_job
from csprune.bench.picture import forest
from csprune.bench.tables import bench_markdown, bench_table
from csprune.pages import theme

Report = dict[str, Any]
FILES = {"bench.json", "bench.md", "bench.png", "bench.svg", "items.parquet"}
ALL = ["tiny_rolling,tiny_generate", "tiny_group", "tiny_mcc", "tiny_own"]
NAMES = "tiny_rolling tiny_generate tiny_group tiny_mcc tiny_own".split()


class Steps:
    """A progress that keeps the names of its stages."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def stage(self, what: str, tokens: int = 1) -> Iterator[None]:
        self.names.append(what)
        yield None


def run(model: Path | str, outs: list[Path], tasks: list[str], out: Path, **options: Any) -> Report:
    return bench_job(str(model), [str(each) for each in outs], tasks, out, Steps(), device="cpu", **options)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with brief(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "BOOTSTRAP_DRAWS", 30)
        patch.setattr(paired, "DRAWS", 200)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def case(
    models: tuple[Path, Path], own_tasks: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Report, Path]:
    """Every kind of task, on the original, its export, and a copy of the original."""
    source, out = models
    copy = tmp_path_factory.mktemp("other") / "copy"
    shutil.copytree(source, copy)
    folder = tmp_path_factory.mktemp("bench") / "report"
    return run(source, [out, copy], ALL, folder, include_path=own_tasks, batch_size=16), folder


def metrics(report: Report) -> Iterator[tuple[str, Report]]:
    for entry in report["tasks"] + report["groups"]:
        for metric in entry["metrics"]:
            yield entry.get("task") or entry["group"], metric


def test_every_difference_is_that_of_the_two_values(case: tuple[Report, Path]) -> None:
    seen = {(name, metric["metric"], metric["filter"]) for name, metric in metrics(case[0])}
    assert seen == {
        *(("tiny_rolling", name, "none") for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")),
        *(("tiny_generate", "exact_match", name) for name in ("first", "whole")),
        *((task, name, "none") for task in ("tiny_choice", "tiny_more") for name in ("acc", "acc_norm")),
        *((task, "choice_margin", "none") for task in ("tiny_choice", "tiny_more", "tiny_mcc", "tiny_group")),
        ("tiny_mcc", "mcc", "none"),
        ("tiny_own", "length", "none"),
        ("tiny_group", "acc", "none"),
    }
    moved = 0
    for _, metric in metrics(case[0]):
        own = metric["outputs"][0]
        assert own["difference"] == pytest.approx(own["value"] - metric["original"]["value"], abs=1e-12)
        low, high = own["difference_ci95"]
        assert low <= high and own["difference_stderr"] >= 0
        moved += own["difference"] != 0
    assert moved > 8


def test_a_copy_differs_by_nothing(case: tuple[Report, Path]) -> None:
    for _, metric in metrics(case[0]):
        first, copy = metric["outputs"]
        assert (copy["difference"], copy["difference_stderr"], copy["difference_ci95"]) == (
            0.0,
            0.0,
            [0.0, 0.0],
        )
        assert copy["value"] == metric["original"]["value"] and copy["stderr"] == metric["original"]["stderr"]
        if copy["flips"]:
            changed = (copy["flips"]["gained"], copy["flips"]["lost"], copy["flips"]["p_value"])
            assert changed == (0, 0, 1.0)
        if metric["metric"] in ("choice_margin", "bits_per_byte"):
            assert first["difference_stderr"] > 0  # control: the truncated one's is not nothing


def test_a_groups_difference_is_of_what_lm_eval_makes_of_its_tasks(case: tuple[Report, Path]) -> None:
    """`weight_by_size: false`: the plain mean of tasks of 12 and 20 items."""
    report = case[0]
    (group,) = report["groups"]
    assert (group["tasks"], group["items"]) == (["tiny_choice", "tiny_more"], 32)
    found = {(task, metric["metric"]): metric["outputs"][0] for task, metric in metrics(report)}
    for name in ("acc", "choice_margin"):
        parts = [found[task, name] for task in group["tasks"]]
        own = found["tiny_group", name]
        assert own["difference"] == pytest.approx(statistics.fmean(each["difference"] for each in parts))
        assert own["difference_stderr"] == pytest.approx(
            sum((each["difference_stderr"] / 2) ** 2 for each in parts) ** 0.5
        )
    flips = found["tiny_group", "acc"]["flips"]
    parts = [found[task, "acc"]["flips"] for task in group["tasks"]]
    for side in ("gained", "lost", "unchanged"):
        assert flips[side] == sum(each[side] for each in parts)


def test_the_report_says_how_it_was_measured(case: tuple[Report, Path], models: tuple[Path, Path]) -> None:
    report, folder = case
    assert report == json.loads((folder / "bench.json").read_text())
    assert report["schema"] == 1
    original, out, copy = report["models"]
    assert (original["csprune"], copy["csprune"]) == (None, None)
    assert (out["csprune"]["method"], out["csprune"]["rank"]) == ("singular", 0.5)
    assert [original["name"], out["name"], copy["name"]] == [str(models[0]), "out", "copy"]
    assert {each["dtype"] for each in report["models"]} == {"float32"}
    assert original["bos"] == out["bos"] and original["bos"]["begins_prompt"]["loglikelihood"] is False
    assert {"lm_eval", "transformers", "torch", "csprune", "datasets"} <= set(report["versions"])
    assert report["settings"]["seeds"] == {
        "random": 0,
        "numpy": 1234,
        "torch": 1234,
        "fewshot": 1234,
        "paired_bootstrap": 0,
    }
    assert report["settings"]["tasks"] == NAMES
    tasks = {entry["task"]: entry for entry in report["tasks"]}
    assert tasks["tiny_more"]["config"]["dataset_kwargs"] == {"count": 20, "shift": 1}
    assert len({entry["config_sha256"] for entry in tasks.values()}) == len(tasks)
    assert str(models[0]) not in json.dumps([entry["config"] for entry in tasks.values()])
    assert {name: entry["num_fewshot"] for name, entry in tasks.items()} == dict.fromkeys(tasks, 0)


def test_every_item_is_kept(case: tuple[Report, Path]) -> None:
    """The means of the file are the values of the report."""
    report, folder = case
    assert {path.name for path in folder.iterdir()} == FILES
    rows = pq.read_table(folder / "items.parquet").to_pylist()
    names = [model["name"] for model in report["models"]]
    for entry in report["tasks"]:
        for metric in entry["metrics"]:
            for place, name in enumerate(names):
                own = [
                    row
                    for row in rows
                    if (row["task"], row["metric"], row["filter"], row["model"])
                    == (entry["task"], metric["metric"], metric["filter"], name)
                ]
                assert [row["doc_id"] for row in own] == list(range(entry["items"]))
                value = (metric["original"], *metric["outputs"])[place]["value"]
                if metric["aggregation"] == "mean":
                    assert statistics.fmean(row["value"] for row in own) == pytest.approx(value, abs=1e-12)
                elif metric["metric"] == "bits_per_byte":
                    pairs = [json.loads(row["parts"]) for row in own]
                    assert {row["value"] for row in own} == {None}
                    bits = -sum(a for a, _ in pairs) / sum(b for _, b in pairs) / 0.6931471805599453
                    assert bits == pytest.approx(value)


def test_the_tables_say_what_the_report_says(case: tuple[Report, Path]) -> None:
    report, folder = case
    text = bench_markdown(report)
    assert (folder / "bench.md").read_text() == text
    out = io.StringIO()
    Console(file=out, width=80).print(bench_table(report))
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    for name, metric in metrics(report):
        own = metric["outputs"][0]
        assert name in text and name in shown and metric["metric"] in shown
        if abs(own["difference"]) < 9:
            assert f"{own['difference']:+.4f}" in text and f"{own['difference']:+.4f}" in shown
    assert text.count("| tiny_choice | acc |") == 2  # once for each checkpoint
    assert "exact_match (first)" in text and "out (singular 0.5)" in text


def test_the_picture_shows_every_difference_and_interval(case: tuple[Report, Path]) -> None:
    report, folder = case
    with theme.drawing():
        figure = forest(report)
    drawn: set[tuple[float, float, float]] = set()
    for axes in figure.axes:
        for container in axes.containers:
            line, _, bars = container.lines  # type: ignore[attr-defined]
            for value, segment in zip(line.get_xdata(), bars[0].get_segments(), strict=True):
                drawn.add((round(float(value), 9), *(round(float(x), 9) for x in segment[:, 0])))
    expected = {
        (round(own["difference"], 9), *(round(end, 9) for end in own["difference_ci95"]))
        for _, metric in metrics(report)
        for own in metric["outputs"]
    }
    assert drawn == expected
    assert len(figure.axes) == len({(m["metric"], m["filter"]) for _, m in metrics(report)})
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "bench.svg").read_bytes()


# --- refused before any model is loaded ----------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(harness, "score", refuse)


@pytest.mark.usefixtures("no_model")
def test_bad_input_is_refused_before_a_model_is_loaded(
    models: tuple[Path, Path], own_tasks: Path, tmp_path: Path
) -> None:
    source, out = models
    half = tiny.save(tiny.make("llama").half(), tmp_path / "half")
    bos = tiny.save(tiny.make("llama"), tmp_path / "bos", tokenizer="bos")
    bare = tiny.save(tiny.make("llama"), tmp_path / "bare", tokenizer=None)
    (tmp_path / "empty").mkdir()
    short = write_tasks(tmp_path / "short")
    yaml = (short / "tiny_more.yaml").read_text()
    (short / "tiny_more.yaml").write_text(yaml.replace("count: 20", "count: 1"))
    report = tmp_path / "report"

    def refused(message: str, outs: list[Path], **options: Any) -> None:
        settings = {"include_path": own_tasks, **options}
        tasks = settings.pop("tasks", ["tiny_choice"])
        with pytest.raises(InputError, match=message) as caught:
            run(source, outs, tasks, report, **settings)
        assert "\n" not in str(caught.value) and not report.exists()

    refused("one OUT at least", [])
    refused("no folder .*nowhere", [tmp_path / "nowhere"])
    refused("has no config.json", [tmp_path / "empty"])
    refused("source is given twice", [source])
    refused("out is given twice", [out, out])
    refused(r"different dtypes \(.*source float32, half float16\): give one by --dtype", [half])
    refused(r"prompt begins with .* \(.*source: False, bos: True\)", [bos])
    refused("bare has no tokenizer", [bare])
    refused("unknown dtype 'int4'", [out], dtype="int4")
    refused("--limit 1 leaves no standard error", [out], limit=1)
    refused("tiny_more have less than 2 items", [out], include_path=short, tasks=["tiny_choice,tiny_more"])
    refused("give --tasks", [out], tasks=[","])
    with pytest.raises(InputError, match="device 'nosuch' cannot be used"):
        bench_job(str(source), [str(out)], ["tiny_choice"], report, Steps(), device="nosuch")
    with pytest.raises(AssertionError, match="a model was loaded"):  # control: these two go together
        run(source, [out, half], ["tiny_choice"], report, include_path=own_tasks, dtype="float32")


@pytest.mark.usefixtures("no_model")
def test_nothing_of_others_is_replaced(models: tuple[Path, Path], own_tasks: Path, tmp_path: Path) -> None:
    def target(folder: Path, overwrite: bool) -> None:
        run(models[0], [models[1]], ["tiny_choice"], folder, include_path=own_tasks, overwrite=overwrite)

    for name, content in (("bench.json", "{}"), ("bench.png", "mine"), ("bench.json", '{"kind": "other"}')):
        (tmp_path / name).write_text(content)
        for overwrite in (False, True):
            with pytest.raises(InputError, match=f"{name} is not a benchmark of csprune's"):
                target(tmp_path, overwrite)
        assert (tmp_path / name).read_text() == content
        (tmp_path / name).unlink()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be a folder"):
        target(tmp_path / "file" / "below", False)


def test_an_earlier_benchmark_is_replaced_when_asked(
    case: tuple[Report, Path], models: tuple[Path, Path], own_tasks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "report"
    shutil.copytree(case[1], folder)
    (folder / "note.txt").write_text("mine")
    options = {"include_path": own_tasks, "limit": 4, "batch_size": 16}
    with pytest.raises(InputError, match="holds a benchmark already: .*--overwrite"):
        run(models[0], [models[1]], ["tiny_choice"], folder, **options)
    report = run(models[0], [models[1]], ["tiny_choice"], folder, overwrite=True, **options)
    assert report["tasks"][0]["items"] == 4 and report["tasks"][0]["items_in_task"] == 12
    assert json.loads((folder / "bench.json").read_text()) == report
    assert {path.name for path in folder.iterdir()} == FILES | {"note.txt"}


def test_a_report_that_fails_leaves_the_earlier_one(case: tuple[Report, Path], tmp_path: Path) -> None:
    folder = tmp_path / "report"
    shutil.copytree(case[1], folder)
    items = pq.read_table(folder / "items.parquet")
    with pytest.raises(ValueError, match="JSON"):
        write_bench(folder, {**case[0], "tasks": [float("nan")]}, items, "", (b"", b""))
    assert json.loads((folder / "bench.json").read_text()) == case[0]
    (folder / "bench.svg").unlink()
    (folder / "bench.svg").mkdir()  # cannot be replaced by a file
    with pytest.raises(CspruneError, match="benchmark cannot be written"):
        write_bench(folder, case[0], items, "", (b"", b""))
    assert not (folder / "bench.json").exists()  # what is beside it is no longer its own


def test_tasks_that_make_their_data_make_them_for_the_original(
    models: tuple[Path, Path], own_tasks: Path, tmp_path: Path
) -> None:
    """Some of lm-eval's ask for the model's tokenizer; by each model's own they would be no pairs."""
    report = run(
        models[0], [models[1]], ["tiny_made"], tmp_path / "report", include_path=own_tasks, batch_size=16
    )
    (entry,) = report["tasks"]
    assert entry["items"] == len("source")


# --- refused as soon as it shows -----------------------------------------------------------------


def turn(scores: harness.Scores) -> None:
    scores.items["tiny_choice"].reverse()


def begin_otherwise(scores: harness.Scores) -> None:
    scores.loaded["bos"]["begins_prompt"]["loglikelihood"] = True


def misreport(scores: harness.Scores) -> None:
    scores.results["results"]["tiny_choice"]["acc,none"] += 0.001


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (turn, "out did not answer the same items of tiny_choice .*4 in another order of 4"),
        (begin_otherwise, "prompt begins with .*original: .*False.*, out: .*True"),
        (misreport, r"lm-eval reports .* for acc,none of tiny_choice, but its 4 items give"),
    ],
)
def test_what_was_run_otherwise_is_not_compared(
    change: Any,
    message: str,
    models: tuple[Path, Path],
    own_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = harness.score

    def changed(folder: Path, tasks: Any, options: Any, step: Any) -> harness.Scores:
        found = real(folder, tasks, options, step)
        if folder.name == "out":
            change(found)
        return found

    monkeypatch.setattr(harness, "score", changed)
    options = {"include_path": own_tasks, "limit": 4, "batch_size": 16}
    with pytest.raises(CspruneError, match=message):
        run(models[0], [models[1]], ["tiny_choice"], tmp_path / "report", **options)
    assert not (tmp_path / "report").exists()


def test_a_dtype_that_only_loading_shows_is_refused(
    models: tuple[Path, Path], own_tasks: Path, tmp_path: Path
) -> None:
    """Configs that say nothing: lm-eval then takes the dtype of the weights."""
    half = tiny.save(tiny.make("llama").half(), tmp_path / "half")
    config = json.loads((half / "config.json").read_text())
    del config["dtype"]
    (half / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"in float32 and half in float16: give one dtype by --dtype"):
        run(models[0], [half], ["tiny_choice"], tmp_path / "report", include_path=own_tasks, limit=2)


def test_stages_name_each_model_once(models: tuple[Path, Path], own_tasks: Path, tmp_path: Path) -> None:
    steps = Steps()
    bench_job(
        str(models[0]),
        [str(models[1])],
        ["tiny_choice"],
        tmp_path / "report",
        steps,
        include_path=own_tasks,
        limit=2,
        device="cpu",
        seed=7,
    )
    assert steps.names == ["Loading tasks", f"Scoring {models[0]}", "Scoring out", "Pairing items"]
    report = json.loads((tmp_path / "report/bench.json").read_text())
    assert set(report["settings"]["seeds"].values()) == {7}


# --- the command line of lm-eval -----------------------------------------------------------------


@pytest.mark.slow
def test_the_values_are_those_of_the_command_line(models: tuple[Path, Path], tmp_path: Path) -> None:
    """`lm_eval --model hf --model_args pretrained=OUT,trust_remote_code=True`, in a process of its own."""
    report = run(
        models[0], [models[1]], [AGREEMENT], tmp_path / "bench", include_path=TASKS, limit=20, batch_size=4
    )
    for place, folder in enumerate(models):
        command = [
            *(sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", AGREEMENT, "--device", "cpu"),
            *("--include_path", str(TASKS), "--limit", "20", "--batch_size", "4"),
            *("--output_path", str(tmp_path / f"lm_eval{place}"), "--model_args"),
            f"pretrained={folder},trust_remote_code=True",
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        (written,) = (tmp_path / f"lm_eval{place}").rglob("results_*.json")
        theirs = json.loads(written.read_text())["results"]
        ours = {
            name: (metric["original"], *metric["outputs"])[place]
            for name, metric in metrics(report)
            if metric["metric"] == "acc"
        }
        assert set(ours) == set(theirs) and len(theirs) == 5
        for name, own in ours.items():
            assert own["value"] == theirs[name]["acc,none"]
            assert own["stderr"] == theirs[name]["acc_stderr,none"]
    acc = [metric for _, metric in metrics(report) if metric["metric"] == "acc"]
    assert any(each["outputs"][0]["difference"] for each in acc)  # control: the two models are told apart


def test_the_agreement_pairs_are_what_their_maker_writes() -> None:
    """400 different pairs, the label as often first as second in every cell, and each number as often."""
    folder = TASKS / "agreement"
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    make = runpy.run_path(str(folder / "make.py"))
    assert list(make["pairs"]()) == pairs
    assert len({(pair["context"], *sorted(pair["choices"])) for pair in pairs}) == len(pairs) == 400
    cells: dict[tuple[str, ...], list[int]] = {}
    for pair in pairs:
        cells.setdefault((pair["phenomenon"], pair["number"], pair["distractor"]), []).append(pair["label"])
    assert len(cells) == 16 and {len(labels) for labels in cells.values()} == {25}
    assert {sum(labels) for labels in cells.values()} <= {12, 13}
