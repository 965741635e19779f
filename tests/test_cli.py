"""The command line's contract: options, exit statuses, what goes to stdout and to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import exports
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from commands import PROGRESS, Run, csprune_command, write_jsonl

import csprune
from csprune import cli
from csprune.calibration import Calibration
from csprune.commands import truncation
from csprune.measurement import QUANTITIES
from csprune.truncation import STRATEGIES

LENGTH = ("--sequence-length", "32")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tied model, texts and a calibration, none of which a test changes."""
    place = tmp_path_factory.mktemp("cli")
    tiny.save(tiny.make("llama_tied", max_position_embeddings=256), place / "model")
    tiny.save(tiny.make("llama_tied", seed=1), place / "foreign")
    write_jsonl(place / "docs.jsonl", [*tiny.texts(60), "too short"])
    write_jsonl(place / "other.jsonl", tiny.texts(20, seed=1))
    write_jsonl(place / "mixed.jsonl", tiny.texts(20, seed=1)[:3] + tiny.texts(9, seed=2))
    return place


@pytest.fixture(scope="module")
def calibrated(place: Path) -> Path:
    file = place / "calibration.safetensors"
    run = csprune_command("calibrate", place / "model", "--data", place / "docs.jsonl", *LENGTH, "-o", file)
    assert run.status == 0, run.err
    return file


@pytest.fixture(scope="module")
def evaluated(place: Path) -> tuple[Run, Path]:
    """One evaluation of every method at two ranks, as JSON."""
    out = place / "report"
    text = ("--calibration-data", place / "docs.jsonl", "--evaluation-data", place / "other.jsonl")
    ranks = ("--rank", "0.1", "--rank", "0.5")
    run = csprune_command("evaluate", place / "model", *ranks, *text, *LENGTH, "-o", out, "--json")
    assert run.status == 0, run.err
    return run, out


@pytest.fixture(scope="module")
def compressed(place: Path) -> tuple[Run, Path]:
    """The literal command of the README, with no other option, in an empty folder."""
    work = place / "work"
    work.mkdir()
    with contextlib.chdir(work) if sys.version_info >= (3, 11) else _chdir(work):
        run = csprune_command("compress", place / "model", "--rank", "0.2", "--method", "fisher")
    assert run.status == 0, run.err
    return run, work


@contextlib.contextmanager
def _chdir(folder: Path):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# --- compress -------------------------------------------------------------------------------------


def test_compress_needs_no_other_option(compressed: tuple[Run, Path]) -> None:
    _, work = compressed
    # The default name; no temporary sibling or lock stays beside it.
    assert [p.name for p in work.iterdir()] == ["model-fisher-0.2"]
    report = json.loads((work / "model-fisher-0.2/report.json").read_text())
    protocol = report["protocol"]
    assert protocol["evaluation"]["source"] == protocol["calibration"]["corpus"]["source"] == "demo"
    assert protocol["evaluation"]["documents"] == protocol["calibration"]["corpus"]["documents"] == 128
    assert (protocol["name"], protocol["positions"]) == ("quick", "all")
    assert (protocol["random_subspaces"], protocol["bootstrap"]["draws"]) == (8, 20_000)
    assert protocol["evaluation"]["sequence_length"] == 128
    assert [(t["method"], t["rank"]) for t in report["truncations"]] == [("fisher", 0.2), ("random", 0.2)]


def test_compress_shows_what_a_person_asks_for(compressed: tuple[Run, Path]) -> None:
    run, work = compressed
    report = json.loads((work / "model-fisher-0.2/report.json").read_text())
    for shown in ("base loss", "loss change", "top-1", "fisher", "random", "the checkpoint grows"):
        assert shown in run.out
    sizes = report["export"]["sizes"]
    for figure in (*sizes["before"].values(), *sizes["after"].values()):
        assert f"{figure:,}" in run.out
    # Rank 0.2 of a tiny head saves nothing, and the command says so.
    assert sizes["after"]["head_bytes"] >= sizes["before"]["head_bytes"]
    assert "no smaller than the head" in run.out
    assert "model-fisher-0.2/README.md" in run.out
    assert all(PROGRESS.match(line) for line in run.err.splitlines() if line)


def test_compress_with_a_calibration_reads_only_evaluation_text(place: Path, calibrated: Path) -> None:
    out = place / "whitened"
    run = csprune_command(
        *("compress", place / "model", "--rank", "0.75", "--method", "whitened", "-o", out),
        *("--calibration", calibrated, "--evaluation-data", place / "other.jsonl", "--json", "--seed", "3"),
        *("--random-subspaces", "2", "--evaluation-documents", "10", "--batch-size", "4"),
        *("--export", "factorized"),
    )
    assert run.status == 0, run.err
    report = json.loads(run.out)
    assert report == json.loads((out / "report.json").read_text())
    assert "Reading calibration text" not in run.err and "Calibrating" not in run.err
    protocol = report["protocol"]
    assert protocol["evaluation"]["sequence_length"] == 32  # the file's, not the default
    assert (
        protocol["calibration"]["corpus"]["identity"]
        == Calibration.load(calibrated).details["corpus"]["identity"]
    )
    assert (protocol["seed"], protocol["bootstrap"]["seed"], protocol["random_subspaces"]) == (3, 3, 2)
    assert (report["documents"], protocol["batch_size"]) == (10, 4)
    assert report["export"]["kept"] == 8
    # A second run does not touch it, nor does --overwrite touch what csprune did not write.
    again = (
        "compress",
        place / "model",
        "--rank",
        "0.75",
        "--method",
        "whitened",
        "--calibration",
        calibrated,
    )
    assert "--overwrite" in csprune_command(*again, "-o", out).message
    (place / "precious").mkdir()
    kept = write_jsonl(place / "precious/notes.jsonl", ["x"])
    refused = csprune_command(*again, "-o", place / "precious", "--overwrite")
    assert (refused.status, kept.is_file()) == (2, True)
    assert "leaves it alone" in refused.message


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("org/name", "name"),
        ("org/name/", "name"),
        (".", "here"),
        ("..", "above"),
        ("../here", "here"),
    ],
)
def test_the_default_output_is_named_after_the_model(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "above/here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "above/here")
    assert truncation._base_name(model) == name


# --- calibrate ------------------------------------------------------------------------------------


def test_calibrate_replaces_a_finished_file(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.safetensors"
    command = ("calibrate", place / "model", "--data", place / "docs.jsonl", *LENGTH, "-o", file)
    first = csprune_command(*command, "--documents", "8")
    assert first.status == 0 and "8 documents" in first.out
    second = csprune_command(*command, "--documents", "9", "--positions", "last", "--skip-first", "2")
    assert second.status == 0 and "9 documents" in second.out
    details = Calibration.load(file).details
    assert (details["positions"], details["skip_first"]) == ("last", 2)
    assert (details["fisher_tokens"], details["tokens"]) == (9, 9 * 30)
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_calibrate_resumes_only_its_own_partial(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.safetensors"
    partial = tmp_path / "c.safetensors.partial"
    command = ("calibrate", place / "model", "--data", place / "docs.jsonl", *LENGTH, "-o", file)
    shutil.copy(_finished(command, file), partial)  # no partial file at all
    file.write_bytes(partial.read_bytes())
    refused = csprune_command(*command)
    assert refused.status == 2
    assert "c.safetensors.partial" in refused.message and "delete it" in refused.message
    assert file.read_bytes() == partial.read_bytes()


def _finished(command: tuple, file: Path) -> Path:
    assert csprune_command(*command).status == 0
    return file


def test_an_interrupted_calibration_is_resumed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csprune.persistence.SAVE_SECONDS", 0.0)
    command = ("calibrate", place / "model", "--data", place / "docs.jsonl", *LENGTH, "--batch-size", "2")
    whole = _finished((*command, "-o", tmp_path / "whole"), tmp_path / "whole")
    states = csprune.Readout.states
    batches = 0

    def interrupted(self: csprune.Readout, input_ids: object) -> object:
        nonlocal batches
        batches += 1  # two of them are the readout's proof
        if batches == 7:
            raise KeyboardInterrupt
        return states(self, input_ids)  # type: ignore[arg-type]

    file = tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr(csprune.Readout, "states", interrupted)
        stopped = csprune_command(*command, "-o", file)
    assert stopped.status == 1 and "interrupted" in stopped.message
    assert (tmp_path / "c.partial").is_file() and not file.exists()
    with monkeypatch.context() as patch:
        batches = 100  # on from here, so that it only counts
        patch.setattr(csprune.Readout, "states", interrupted)
        assert csprune_command(*command, "-o", file).status == 0
    assert not (tmp_path / "c.partial").exists()
    # A whole run is 2 + 13 batches, of 26 documents; this one only did what was left.
    assert 2 + 8 <= batches - 100 <= 2 + 9
    assert file.read_bytes() == whole.read_bytes()


def test_calibrate_never_replaces_what_is_no_calibration(place: Path) -> None:
    weights = place / "foreign/model.safetensors"
    before = weights.read_bytes()
    for target in (weights, place / "docs.jsonl"):
        run = csprune_command("calibrate", place / "foreign", "--data", place / "docs.jsonl", "-o", target)
        assert run.status == 2 and "no calibration" in run.message
    assert weights.read_bytes() == before


def test_calibrate_says_when_there_are_fewer_documents(place: Path, tmp_path: Path) -> None:
    command = ("calibrate", place / "model", *LENGTH, "-o", tmp_path / "c")
    run = csprune_command(*command, "--calibration-data", place / "docs.jsonl")
    assert "60 documents" in run.out and "all there are of the 128 asked for" in run.out
    assert "1 of 61 calibration documents were shorter than 33 tokens" in run.out
    enough = csprune_command(*command, "--calibration-data", place / "docs.jsonl", "--documents", "20")
    assert "asked for" not in enough.out and "shorter" not in enough.out


# --- evaluate -------------------------------------------------------------------------------------


def test_json_prints_nothing_but_the_report(evaluated: tuple[Run, Path]) -> None:
    run, out = evaluated
    assert json.loads(run.out) == json.loads((out / "report.json").read_text())
    # What a person is told goes to stderr instead, and progress with it.
    assert "of the 128 asked for" in run.err and "Evaluating" in run.err


def test_the_report_has_the_contracts_schema(evaluated: tuple[Run, Path]) -> None:
    report = json.loads(evaluated[0].out)
    assert report["schema"] == 1 and report["documents"] == 20
    contract = {"schema", "model", "protocol", "documents", "base_loss", "truncations"}
    assert set(report) == contract | {"base_entropy", "between_methods", "families"}
    assert set(report["base_loss"]) == {"mean", "ci95"}
    entries = report["truncations"]
    found = [(entry["method"], entry["rank"]) for entry in entries]
    assert sorted(found) == sorted((method, rank) for method in STRATEGIES for rank in (0.1, 0.5))
    for entry in entries:
        assert entry["removed"] + entry["kept"] == tiny.WIDTH
        assert entry["removed"] == round(entry["rank"] * tiny.WIDTH)
        rest = {"method", "rank", "removed", "kept", "loss", "vs_random", "per_unit_vs_random", *QUANTITIES}
        statement = {"side", "adjusted_ci95", "checks", "established"}
        assert set(entry) == rest | ({"subspaces"} if entry["method"] == "random" else set())
        assert set(entry["vs_random"]) == set(QUANTITIES)
        assert set(entry["per_unit_vs_random"]) == {"fisher_term", "prediction_change", "loss_change"}
        for name in QUANTITIES:
            low, high = entry[name]["ci95"]
            assert low <= entry[name]["mean"] <= high
            differences = {"ratio", "ci95", "difference", "difference_ci95"}
            assert set(entry["vs_random"][name]) == differences | statement
        assert all(
            set(each) == {"ratio", "ci95"} | statement for each in entry["per_unit_vs_random"].values()
        )
    random = next(entry for entry in entries if entry["method"] == "random")
    means = random["subspaces"]["loss_change"]
    assert len(means) == 8 and sum(means) / 8 == pytest.approx(random["loss_change"]["mean"])
    assert len(set(means)) == 8  # eight different subspaces


def test_evaluate_keeps_an_old_report(evaluated: tuple[Run, Path], place: Path, calibrated: Path) -> None:
    out = evaluated[1]
    before = (out / "report.json").read_bytes()
    command = (
        *("evaluate", place / "model", "--rank", "0.25", "--rank", "0.25", "--method", "consequence"),
        *("--method", "fisher", "--calibration", calibrated, "--evaluation-data", place / "other.jsonl"),
        *("-o", out, "--seed", "5"),
    )
    refused = csprune_command(*command)
    assert refused.status == 2 and "--overwrite" in refused.message
    assert (out / "report.json").read_bytes() == before
    copy = place / "report-copy"
    shutil.copytree(out, copy)
    replaced = csprune_command(*command[:-3], copy, *command[-2:], "--overwrite")
    assert replaced.status == 0, replaced.err
    # An alias and its method, and a rank given twice, are one entry.
    report = json.loads((copy / "report.json").read_text())
    assert [(t["method"], t["rank"]) for t in report["truncations"]] == [("fisher", 0.25), ("random", 0.25)]
    assert "Written to" in replaced.out and "base loss" in replaced.out


def test_data_is_divided_and_never_shared(place: Path, tmp_path: Path) -> None:
    command = ("evaluate", place / "model", "--rank", "0.5", "--method", "singular", *LENGTH)
    table = pa.table({"body": tiny.texts(40)})
    pq.write_table(table, tmp_path / "docs.parquet")
    run = csprune_command(
        *command, "--data", f"{tmp_path / 'docs.parquet'}:body", "-o", tmp_path / "r", "--json"
    )
    assert run.status == 0, run.err
    protocol = json.loads(run.out)["protocol"]
    assert protocol["evaluation"]["block"] == "confirmation"
    assert protocol["calibration"]["corpus"]["block"] == "calibration"
    documents = pq.read_table(tmp_path / "r/documents.parquet")
    assert set(documents["block"].to_pylist()) == {1, 2}
    # Given separately, documents of both are refused with their count.
    both = ("--calibration-data", place / "other.jsonl", "--evaluation-data", place / "mixed.jsonl")
    refused = csprune_command(*command, *both, "-o", tmp_path / "r2")
    assert refused.status == 2 and "3 of 12 evaluation documents" in refused.message
    assert not (tmp_path / "r2").exists()


def test_a_calibrations_documents_are_not_evaluated_on(place: Path, calibrated: Path, tmp_path: Path) -> None:
    command = (
        "evaluate",
        place / "model",
        "--rank",
        "0.5",
        "--calibration",
        calibrated,
        "-o",
        tmp_path / "r",
    )
    shared = len(Calibration.load(calibrated).documents)
    refused = csprune_command(*command, "--evaluation-data", place / "docs.jsonl")
    assert refused.status == 2 and f"{shared} of 60 evaluation documents" in refused.message


def test_the_paper_protocol(place: Path, tmp_path: Path) -> None:
    command = (
        "evaluate",
        place / "model",
        "--rank",
        "0.5",
        "--method",
        "fisher",
        *LENGTH,
        "--protocol",
        "paper",
    )
    text = ("--calibration-data", place / "docs.jsonl", "--evaluation-data", place / "other.jsonl")
    run = csprune_command(*command, *text, "-o", tmp_path / "r", "--json")
    protocol = json.loads(run.out)["protocol"]
    assert (protocol["name"], protocol["positions"]) == ("paper", "last")
    assert protocol["calibration"]["fisher_tokens"] == 60
    assert "60 documents of" in run.err and "of the 512 asked for" in run.err and "of the 1024" in run.err


# --- Bad usage and bad input ----------------------------------------------------------------------

BOTH = ("--rank", "0.2", "--method", "fisher")
USAGE = {
    "no command": ((), ["command", "csprune --help"]),
    "unknown command": (("prune",), ["prune", "calibrate, compress, evaluate"]),
    "unknown option": (("compress", "MODEL", *BOTH, "--fast"), ["--fast", "csprune compress --help"]),
    "no model": (("compress", *BOTH), ["MODEL"]),
    "no rank": (("compress", "MODEL", "--method", "fisher"), ["--rank"]),
    "no method": (("compress", "MODEL", "--rank", "0.2"), ["--method", *STRATEGIES]),
    "two ranks": (("compress", "MODEL", *BOTH, "--rank", "0.1"), ["one --rank", "evaluate"]),
    "two methods": (("compress", "MODEL", *BOTH, "--method", "random"), ["one --method"]),
    "unknown method": (("evaluate", "MODEL", "--method", "svd", "-o", "r"), ["svd", *STRATEGIES]),
    "unknown format": (("compress", "MODEL", *BOTH, "--export", "onnx"), ["onnx", "factorized"]),
    "unknown dtype": (("compress", "MODEL", *BOTH, "--dtype", "int8"), ["int8", "float32", "bfloat16"]),
    "unknown protocol": (("compress", "MODEL", *BOTH, "--protocol", "x"), ["quick", "paper"]),
    "unknown positions": (("compress", "MODEL", *BOTH, "--positions", "x"), ["all", "last"]),
    "rank no number": (("compress", "MODEL", "--rank", "x", "--method", "fisher"), ["--rank", "'x'"]),
    "rank 0": (("compress", "MODEL", "--rank", "0", "--method", "fisher"), ["rank 0", "between 0 and 1"]),
    "rank 20": (("evaluate", "MODEL", "--rank", "20", "-o", "r"), ["rank 20", "between 0 and 1"]),
    "rank nan": (("evaluate", "MODEL", "--rank", "nan", "-o", "r"), ["between 0 and 1"]),
    "rank of one direction less": (
        ("evaluate", "MODEL", "--rank", "0.001", "--data", "DOCS", *LENGTH, "-o", "r"),
        ["0.001 of 32 directions removes 0"],
    ),
    "negative seed": (("evaluate", "MODEL", "--seed", "-1", "-o", "r"), ["--seed"]),
    "no batch": (("evaluate", "MODEL", "--batch-size", "0", "-o", "r"), ["--batch-size"]),
    "no subspaces": (("evaluate", "MODEL", "--random-subspaces", "0", "-o", "r"), ["--random-subspaces"]),
    "one document": (("evaluate", "MODEL", "--documents", "1", "-o", "r"), ["--documents"]),
    "no output": (("evaluate", "MODEL"), ["-o"]),
    "output is a file": (("evaluate", "MODEL", "-o", "DOCS"), ["docs.jsonl", "is a file"]),
    "output below a file": (("compress", "MODEL", *BOTH, "-o", "DOCS/out"), ["docs.jsonl is a file"]),
    "output is the model": (("compress", "MODEL", *BOTH, "-o", "MODEL"), ["choose another -o"]),
    "output in the model": (("compress", "MODEL", *BOTH, "-o", "MODEL/out"), ["choose another -o"]),
    "calibrate without text": (("calibrate", "MODEL", "-o", "c"), ["--data", "--calibration-data"]),
    "calibrate with two texts": (
        ("calibrate", "MODEL", "--data", "DOCS", "--calibration-data", "OTHER", "-o", "c"),
        ["give one of them"],
    ),
    "calibrate into no folder": (("calibrate", "MODEL", "--data", "DOCS", "-o", "no/c"), ["no/c"]),
    "calibrate onto a folder": (("calibrate", "MODEL", "--data", "DOCS", "-o", "MODEL"), ["give a file"]),
    "a text not used": (
        (
            *("evaluate", "MODEL", "--data", "DOCS", "--calibration-data", "DOCS"),
            *("--evaluation-data", "OTHER", "-o", "r"),
        ),
        ["--data is not used"],
    ),
    "no such text": (("evaluate", "MODEL", "--data", "no.jsonl", "-o", "r"), ["no.jsonl"]),
    # As "$CORPUS" is where it was never set: not a wish for the demo text.
    "empty text": (("evaluate", "MODEL", "--data", "", "-o", "r"), ["no such file"]),
    "no such field": (("evaluate", "MODEL", "--data", "DOCS:body", "-o", "r"), ["body", "text"]),
    "longer than the model": (
        ("evaluate", "MODEL", "--data", "DOCS", "--sequence-length", "300", "-o", "r"),
        ["256"],
    ),
    "all skipped": (
        ("evaluate", "MODEL", "--data", "DOCS", *LENGTH, "--skip-first", "32", "-o", "r"),
        ["skip_first 32"],
    ),
    "no such model": (("compress", "./nowhere", *BOTH), ["./nowhere"]),
    "revision of a folder": (("compress", "MODEL", *BOTH, "--revision", "v1"), ["--revision"]),
    "unknown device": (("compress", "MODEL", *BOTH, "--device", "gpu"), ["'gpu'"]),
    "no such calibration": (("compress", "MODEL", *BOTH, "--calibration", "c"), ["c", "csprune calibrate"]),
    "no calibration": (
        ("compress", "MODEL", *BOTH, "--calibration", "MODEL/model.safetensors"),
        ["model.safetensors is not a csprune calibration"],
    ),
    "foreign calibration": (
        (
            "evaluate",
            "FOREIGN",
            "--rank",
            "0.5",
            "--calibration",
            "CALIBRATION",
            "--data",
            "OTHER",
            "-o",
            "r",
        ),
        ["weights differ", "calibrate this one"],
    ),
    **{
        f"calibration and {option}": (
            ("compress", "MODEL", *BOTH, "--calibration", "CALIBRATION", option, value),
            [option, "calibration file"],
        )
        for option, value in [
            ("--positions", "all"),
            ("--sequence-length", "32"),
            ("--skip-first", "0"),
            ("--documents", "5"),
            ("--calibration-data", "OTHER"),
        ]
    },
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_usage_exits_2_with_one_line(
    case: str, place: Path, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, expected = USAGE[case]
    names = {
        "MODEL": place / "model",
        "FOREIGN": place / "foreign",
        "DOCS": place / "docs.jsonl",
        "OTHER": place / "other.jsonl",
        "CALIBRATION": calibrated,
    }

    def fill(argument: str) -> str:
        name = re.match(r"[A-Z]*", argument)[0]
        return str(names[name]) + argument[len(name) :] if name in names else argument

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CSPRUNE_CACHE", str(tmp_path))
    run = csprune_command(*map(fill, arguments))
    assert run.status == 2
    for fragment in expected:
        assert fragment in run.message
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_read_only_place_is_refused_before_the_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser, whom tests may run as, is never refused: so the system's answer is replaced.
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path)
    for command in (("compress", *BOTH), ("evaluate",), ("calibrate", "--data", "demo")):
        run = csprune_command(*command, place / "model", "-o", tmp_path / "out")
        assert run.status == 2 and "read-only" in run.message and "Loading" not in run.err


def test_a_defect_is_no_usage_error(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Status 1 for anything else: csprune's own failures, a full disk, no memory, Ctrl-C."""
    import torch

    for error, words in (
        (csprune.CspruneError("the logits of 3 tokens"), "3 tokens"),
        (OSError(28, "No space left on device", "weights"), "weights: No space left"),
        (torch.OutOfMemoryError("CUDA out of memory"), "--batch-size"),
        (KeyboardInterrupt(), "interrupted"),
    ):

        def fail(*_args: object, error: BaseException = error, **_options: object) -> None:
            raise error

        monkeypatch.setattr("csprune.jobs.load_readout", fail)
        run = csprune_command(
            "calibrate", place / "model", "--data", place / "docs.jsonl", *LENGTH, "-o", tmp_path / "c"
        )
        assert run.status == 1 and words in run.message
    assert list(tmp_path.iterdir()) == []


# --- Help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *cli.cli.commands])
@pytest.mark.parametrize("columns", ["80", "200"])
def test_help_has_an_example_and_fits(command: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    run = csprune_command(*([command] if command else []), "--help")
    lines = run.out.splitlines()
    assert run.status == 0 and run.err == ""
    assert max(map(len, lines)) <= 100
    example = next(i for i, line in enumerate(lines) if line.startswith(("  Example:", "  Examples:")))
    shown = lines[example + 1 :]
    assert shown and all(line.strip().startswith("csprune ") for line in shown)
    assert "\b" not in run.out and "\\b" not in run.out
    short = csprune_command(*([command] if command else []), "-h")
    assert short.out == run.out


def test_every_example_of_the_help_is_one_that_parses(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in (
        "jobs.compress_job",
        "jobs.calibrate_job",
        "jobs.evaluate_job",
        "jobs.report_job",
        "commands.scores.bench_job",
        "commands.studies.spectrum_job",
        "commands.studies.analyze_job",
        "commands.studies.subspace_job",
    ):

        def job(*_args: object, name: str = name, **_options: object) -> None:
            called.append(name)
            raise csprune.CspruneError("stopped")

        monkeypatch.setattr(f"csprune.{name}", job)
    for command in ("", *cli.cli.commands):
        text = csprune_command(*([command] if command else []), "--help").out
        for line in text[text.index("Example") :].splitlines()[1:]:
            before = len(called)
            assert "stopped" in csprune_command(*line.split()[1:]).message
            assert len(called) == before + 1
    assert len(called) == 17
    # Control: a mistyped example would be seen.
    assert "stopped" not in csprune_command("evaluate", "demo", "--ranks", "0.05", "-o", "report").message


def test_every_option_is_explained() -> None:
    for command in cli.cli.commands.values():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert getattr(parameter, "help", None), f"{command.name} {parameter.name}"


def test_version() -> None:
    assert csprune_command("--version").out == f"csprune {csprune.__version__}\n"


# --- Real processes -------------------------------------------------------------------------------


def test_the_console_script_gives_its_exit_status(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("csprune")
    command = [script, "compress", tmp_path / "nowhere", *BOTH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("Error: ")


def test_ctrl_c_leaves_nothing(place: Path, calibrated: Path, tmp_path: Path) -> None:
    """Interrupted while the export verifies itself, as by a terminal: the whole process group."""
    command = [
        *(sys.executable, "-m", "csprune", "compress", place / "model", *BOTH, "-o", tmp_path / "out"),
        *("--calibration", calibrated, "--evaluation-data", place / "other.jsonl"),
    ]
    # Tests that run in the background of a shell ignore SIGINT, and so would their children.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, start_new_session=True, preexec_fn=heed
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".*/config.json")):  # it has begun to write
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == "" and err.splitlines()[-1] == "Error: interrupted; nothing half-written was left"
    assert list(tmp_path.iterdir()) == []


def test_evaluate_never_replaces_what_is_no_report(place: Path, calibrated: Path, tmp_path: Path) -> None:
    """A corpus may bear the name of the per-document values, in the folder that -o names."""
    mine = tmp_path / "documents.parquet"
    mine.write_bytes(b"mine")
    command = (
        "evaluate",
        place / "model",
        "--calibration",
        calibrated,
        "--evaluation-data",
        place / "other.jsonl",
    )
    for overwrite in ((), ("--overwrite",)):
        run = csprune_command(*command, "-o", tmp_path, *overwrite)
        assert run.status == 2 and str(mine) in run.message
        assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_a_low_precision_checkpoint_is_also_measured_as_stored(
    stored: str, place: Path, tmp_path: Path
) -> None:
    tiny.save(tiny.make("llama_tied").to(getattr(torch, stored)), tmp_path / "model")
    text = ("--calibration-data", place / "docs.jsonl", "--evaluation-data", place / "other.jsonl")
    with exports.unverified():
        run = csprune_command(
            "compress", tmp_path / "model", *BOTH, *text, *LENGTH, "-o", tmp_path / "out", "--json"
        )
    report = json.loads(run.out)
    exact = report["truncations"][0]["loss_change"]["mean"]
    measured = report["export"]["stored_loss_change"]
    card = (tmp_path / "out" / "README.md").read_text()
    if stored == "float32":  # control: nothing is rounded, and nothing said of it
        assert measured is None and "as they are stored" not in card
    else:
        assert measured != exact and abs(measured - exact) < 0.05
        assert f"as they are stored here, the loss change is {measured:+.4f} nats" in card
