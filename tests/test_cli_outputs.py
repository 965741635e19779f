"""`csprune evaluate MODEL OUT...`, `report` and `bench`: what is done with the outputs of other commands."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Run, csprune_command, write_jsonl
from exports import unverified

from csprune.measurement import QUANTITIES
from csprune.report import read_evaluation

TEXT = ("--sequence-length", "32", "--documents", "20", "--evaluation-documents", "20")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, exports of it made from two texts, and one of another model."""
    place = tmp_path_factory.mktemp("outputs")
    tiny.save(tiny.make("gpt2"), place / "model")
    tiny.save(tiny.make("gpt2", seed=1), place / "foreign")
    write_jsonl(place / "docs.jsonl", tiny.texts(100))
    write_jsonl(place / "more.jsonl", tiny.texts(60, seed=1))
    for name, model, method, data in (
        ("fisher", "model", "fisher", "docs.jsonl"),
        ("random", "model", "random", "docs.jsonl"),
        ("elsewhere", "model", "whitened", "more.jsonl"),
        ("foreign-out", "foreign", "fisher", "docs.jsonl"),
    ):
        with unverified():
            run = csprune_command(
                *("compress", place / model, "--rank", "0.3", "--method", method, "--data", place / data),
                *(*TEXT, "-o", place / name, "--json"),
            )
        assert run.status == 0, run.err
    return place


def evaluate(place: Path, *arguments: Any) -> Run:
    return csprune_command("evaluate", place / "model", "--data", place / "docs.jsonl", *TEXT, *arguments)


@pytest.fixture(scope="module")
def report(place: Path) -> dict[str, Any]:
    outputs = [place / name for name in ("fisher", "random", "elsewhere")]
    run = evaluate(place, *outputs, "-o", place / "report", "--json")
    assert run.status == 0, run.err
    return json.loads(run.out)


def test_without_ranks_and_methods_the_outputs_own_are_measured(report: dict[str, Any]) -> None:
    found = [(entry["method"], entry["rank"]) for entry in report["truncations"]]
    assert found == [("fisher", 0.3), ("whitened", 0.3), ("random", 0.3)]
    assert [entry["name"] for entry in report["checkpoints"]] == ["fisher", "random", "elsewhere"]


def test_a_checkpoint_measures_as_its_truncation(report: dict[str, Any], place: Path) -> None:
    fisher, random, elsewhere = report["checkpoints"]
    assert fisher["same_calibration"]
    for name in QUANTITIES:
        allowed = 0 if name == "top1_agreement" else 1e-4 * abs(fisher[name]["mean"])
        assert abs(fisher["in_memory"][name]["difference"]) <= allowed
    # Control: of another text's calibration it is another truncation, and that is said.
    assert not elsewhere["same_calibration"]
    assert abs(elsewhere["in_memory"]["logit_distance"]["difference"]) > 1e-2
    # A random checkpoint is the first of the eight subspaces, not their mean.
    assert random["in_memory"] is None
    values = read_evaluation(place / "report").measurements[2].values["logit_distance"]
    assert random["logit_distance"]["mean"] == pytest.approx(values[0].mean(), rel=1e-4)
    assert random["logit_distance"]["mean"] != pytest.approx(values.mean(), rel=1e-2)


def test_the_terminal_shows_them(place: Path, tmp_path: Path) -> None:
    run = evaluate(place, place / "fisher", place / "elsewhere", "--rank", "0.1", "-o", tmp_path / "r")
    assert run.status == 0, run.err
    assert "Checkpoints as they load" in run.out and "elsewhere+ " in run.out
    assert "fisher+" not in run.out and "another calibration than this run's" in run.out
    # Beside what was asked for, what the outputs need: all methods at 0.1, and their own truncations.
    report = json.loads((tmp_path / "r/report.json").read_text())
    found = {(entry["method"], entry["rank"]) for entry in report["truncations"]}
    assert len(found) == 5 + 3 and {("fisher", 0.3), ("whitened", 0.3), ("random", 0.3)} < found


def test_what_is_no_output_of_this_model_is_refused(place: Path, tmp_path: Path) -> None:
    for output, message in (
        ("foreign-out", "was not made from .*its weights are others"),
        ("foreign", "no checkpoint that csprune wrote"),
        ("nothing", "no checkpoint that csprune wrote"),
    ):
        run = evaluate(place, place / output, "-o", tmp_path / "r")
        assert run.status == 2
        assert re.search(message, run.message)
    assert not (tmp_path / "r").exists()


def test_text_that_calibrated_an_output_is_no_test_of_it(place: Path, tmp_path: Path) -> None:
    command = ("evaluate", place / "model", place / "elsewhere", *TEXT, "-o", tmp_path / "r")
    text = ("--calibration-data", place / "docs.jsonl", "--evaluation-data", place / "more.jsonl")
    run = csprune_command(*command, *text)
    assert run.status == 2 and "also calibrated" in run.message
    # Control: with an output that has not read it.
    fine = csprune_command(*command[:2], place / "fisher", *command[3:], *text)
    assert fine.status == 0, fine.err


def test_a_broken_output_is_refused(place: Path, tmp_path: Path) -> None:
    for name, message in (
        ("truncated weights", "it is cut short"),
        ("no kept", "not what csprune writes"),
        ("another method", "not what csprune writes"),
        ("another rank", "not what csprune writes"),
    ):
        broken = tmp_path / name.replace(" ", "-")
        shutil.copytree(place / "fisher", broken)
        config = json.loads((broken / "config.json").read_text())
        entry = config["quantization_config"]
        if name == "no kept":
            del entry["kept"]
        elif name == "another method":
            entry["method"] = "zz"
        elif name == "another rank":
            entry["rank"] = 0.5
        else:
            weights = broken / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-100])
        (broken / "config.json").write_text(json.dumps(config))
        for run in (
            evaluate(place, broken, "-o", tmp_path / "r"),
            csprune_command("bench", place / "model", broken, "--tasks", "x", "--device", "cpu"),
        ):
            assert run.status == 2 and re.search(message, run.message), (name, run.message)
    assert not (tmp_path / "r").exists()


def test_an_output_named_twice_is_measured_once(place: Path, tmp_path: Path) -> None:
    outputs = (place / "fisher", f"{place / 'fisher'}/", f"{place}/./fisher")
    run = evaluate(place, *outputs, "-o", tmp_path / "r", "--json")
    assert run.status == 0 and len(json.loads(run.out)["checkpoints"]) == 1


def test_the_report_of_an_export_is_not_replaced(place: Path) -> None:
    before = (place / "random/report.json").read_bytes()
    run = evaluate(place, "-o", place / "random", "--overwrite")
    assert run.status == 2 and "exported checkpoint" in run.message
    assert (place / "random/report.json").read_bytes() == before


def test_an_output_without_its_report_is_still_measured(place: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(place / "fisher", bare)
    (bare / "report.json").unlink()
    run = evaluate(place, bare, "-o", tmp_path / "r", "--json")
    assert run.status == 0, run.err
    (entry,) = json.loads(run.out)["checkpoints"]
    assert not entry["same_calibration"]  # nothing says that it is
    assert "whether these documents calibrated it is not known" in run.err
    assert abs(entry["in_memory"]["loss_change"]["difference"]) < 1e-5


# --- report ---------------------------------------------------------------------------------------

VIEWS = {"report.html", "report.md", "pictures"}


def test_evaluate_writes_the_page(report: dict[str, Any], place: Path) -> None:
    folder = place / "report"
    assert {path.name for path in folder.iterdir()} == VIEWS | {"report.json", "documents.parquet"}
    page = (folder / "report.html").read_text()
    assert "fisher" in page and f"{report['documents']} documents" in page


def test_report_redoes_the_page_from_the_files_alone(
    report: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("report.json", "documents.parquet"):
        shutil.copy(place / "report" / name, folder)
    run = csprune_command("report", folder)
    assert run.status == 0 and "look at report.html" in run.out
    for path in sorted((place / "report").rglob("*")):
        if path.is_file():
            assert (folder / path.relative_to(place / "report")).read_bytes() == path.read_bytes(), path.name
    # It may be done again, and an export has a report too.
    assert csprune_command("report", folder).status == 0
    run = csprune_command("report", place / "fisher", "-o", tmp_path / "of-export")
    assert run.status == 0 and {path.name for path in (tmp_path / "of-export").iterdir()} == VIEWS


def test_several_reports_are_compared_on_one_page(
    report: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    both = (place / "report", place / "elsewhere")
    refused = csprune_command("report", *both)
    assert refused.status == 2 and "give -o" in refused.message
    run = csprune_command("report", *both, "-o", tmp_path / "both")
    assert run.status == 0, run.err
    assert (tmp_path / "both/pictures/comparison-loss.svg").is_file()
    again = csprune_command("report", *both, "-o", tmp_path / "both")
    assert again.status == 2 and "--overwrite" in again.message
    assert csprune_command("report", *both, "-o", tmp_path / "both", "--overwrite").status == 0


def test_report_replaces_nothing_of_others(report: dict[str, Any], place: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "report.md").write_text("mine")
    for command in (
        ("report", place / "report", "-o", own, "--overwrite"),
        ("evaluate", place / "model", "--data", place / "docs.jsonl", *TEXT, "-o", own, "--overwrite"),
    ):
        run = csprune_command(*command)
        assert run.status == 2 and "not a report of csprune's" in run.message
    assert (own / "report.md").read_text() == "mine" and len(list(own.iterdir())) == 1
    for nothing in (own, tmp_path / "nowhere", own / "report.md"):
        run = csprune_command("report", nothing)
        assert run.status == 2 and "there is no report in" in run.message


def test_a_report_that_csprune_did_not_write_is_one_line(
    report: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    shutil.copy(place / "report/documents.parquet", folder)
    for key, value in (("calibration", 3), ("departures", [1])):
        changed = {**report, "protocol": {**report["protocol"], key: value}}
        (folder / "report.json").write_text(json.dumps(changed))
        run = csprune_command("report", folder)
        assert run.status == 2 and "that csprune does not write" in run.message


# --- bench ----------------------------------------------------------------------------------------


def test_bench_scores_and_pairs(place: Path, tmp_path: Path) -> None:
    own = ("--include-path", Path(__file__).parents[1] / "benchmarks/tasks")
    tasks = ("--tasks", "csprune_agreement_reflexive", *own, "--limit", "8")
    out = tmp_path / "scores"
    command = ("bench", place / "model", place / "fisher", *tasks, "--device", "cpu", "-o", out)
    run = csprune_command(*command, "--json")
    assert run.status == 0, run.err
    found = json.loads(run.out)
    assert found == json.loads((out / "bench.json").read_text())
    assert {path.name for path in out.iterdir()} == {
        *("bench.json", "bench.md", "bench.svg", "bench.png", "items.parquet")
    }
    refused = csprune_command(*command)
    assert refused.status == 2 and "--overwrite" in refused.message
    shown = csprune_command(*command, "--overwrite")
    assert shown.status == 0 and "csprune_agreement_reflexive" in shown.out and "Written to" in shown.out
    before = sorted(tmp_path.iterdir())
    bare = csprune_command(*command[:-2])  # without -o nothing is written
    assert bare.status == 0 and bare.out in shown.out and sorted(tmp_path.iterdir()) == before
    unknown = csprune_command(*command[:3], "--tasks", "no_such_task", *tasks[2:], "-o", tmp_path / "r")
    assert unknown.status == 2 and "no_such_task" in unknown.message
