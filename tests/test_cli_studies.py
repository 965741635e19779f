"""`csprune spectrum`, `analyze` and `subspace`: their files, refusals and what they print."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tiny
import torch
from commands import PROGRESS, Run, csprune_command, write_jsonl
from results_examples import estimates

from csprune.analysis.catalogue import ANALYSES, SPECTRUM
from csprune.analysis.results import read_result

SMALL = ("--sequence-length", "16", "--bands", "4", "--random-subspaces", "2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an instruct model, and texts."""
    place = tmp_path_factory.mktemp("studies")
    tiny.save(tiny.make("llama", max_position_embeddings=256), place / "model")
    tiny.save(tiny.make("llama", seed=1, max_position_embeddings=256), place / "instruct")
    write_jsonl(place / "docs.jsonl", varied(60))
    write_jsonl(place / "code.jsonl", varied(60, seed=1))
    return place


def varied(count: int, seed: int = 0) -> list[str]:
    """Texts that differ from the first word on."""
    return [text.split("here. ")[1] for text in tiny.texts(count, seed=seed)]


def study(command: str, place: Path, out: Path, *more: str | Path) -> Run:
    return csprune_command(command, place / "model", "--data", place / "docs.jsonl", *SMALL, "-o", out, *more)


@pytest.fixture(scope="module")
def spectrum(place: Path) -> tuple[Run, Path]:
    run = study("spectrum", place, place / "spectrum")
    assert run.status == 0, run.err
    return run, place / "spectrum"


@pytest.fixture(scope="module")
def analysis(place: Path) -> tuple[Run, Path]:
    code, instruct = ("--code", place / "code.jsonl"), ("--instruct", place / "instruct")
    run = study("analyze", place, place / "analysis", *code, *instruct)
    assert run.status == 0, run.err
    return run, place / "analysis"


def test_spectrum_writes_the_contracts_file(spectrum: tuple[Run, Path]) -> None:
    run, out = spectrum
    report = json.loads((out / "spectrum.json").read_text())
    assert len(report["consequence"]) == 4 == report["protocol"]["bands"]
    assert report["schema"] == 1 and report["kind"] == "spectrum"
    assert report["protocol"]["position"] == 16 and report["protocol"]["random_subspaces"] == 2
    assert report["documents"] == report["protocol"]["evaluation_documents"]
    assert [each["name"] for each in report["results"]] == list(SPECTRUM)
    low, high = report["base_loss"]["ci95"]
    assert low < report["base_loss"]["mean"] < high
    assert "Consequence spectrum" in run.out and "spectrum.html" in run.out
    assert all(PROGRESS.match(line) for line in run.err.splitlines() if line)


def test_the_figures_can_be_redone_from_the_values(spectrum: tuple[Run, Path]) -> None:
    _, out = spectrum
    report = json.loads((out / "spectrum.json").read_text())
    table = pq.read_table(out / "spectrum.parquet").to_pandas()
    sums = table[table.analysis == "consequence"].groupby("series").value.sum()
    for band in range(4):
        own, random = f"consequence.{band + 1}", f"consequence.{band + 1}.random"
        own = sums[f"band.{band + 1}.fisher_term"] / sums[f"band.{band + 1}.logit_distance"]
        random = sums[f"band.{band + 1}.random.fisher_term"] / sums[f"band.{band + 1}.random.logit_distance"]
        assert report["consequence"][band] == pytest.approx(own / random, rel=1e-9)
    random = table[table.series == "band.1.random.fisher_term"]
    assert sorted(random.subspace.unique()) == [0, 1] and set(random.block) == {1, 2}
    assert len(random) == 2 * report["documents"]


def test_analyze_does_everything_by_default(analysis: tuple[Run, Path]) -> None:
    run, out = analysis
    report = json.loads((out / "analysis.json").read_text())
    assert [each["name"] for each in report["results"]] == list(ANALYSES)
    for described in report["results"]:
        result = read_result(described)
        assert result.title and result.place and result.definition and result.findings, result.name
        assert result.tables and all(table.rows for table in result.tables), result.name
        for name, estimate in estimates(result):
            assert set(estimate) >= {"value", "ci95"}, name
    assert (out / "analysis.html").is_file() and (out / "analysis-pictures").is_dir()
    (conditions,) = (each for each in report["results"] if each["name"] == "conditions")
    labels = [row["label"] for row in conditions["tables"][0]["rows"]]
    assert labels == [f"{kind}, token 8" for kind in ("text", "code", "instruct: text", "instruct: code")]
    assert "In brackets" not in run.out  # of so many results the terminal shows the sentences


def test_chosen_analyses_alone(place: Path, tmp_path: Path) -> None:
    run = study(
        "analyze", place, tmp_path / "out", "--what", "scalings,consequence", "--what", "brier", "--json"
    )
    assert run.status == 0, run.err
    report = json.loads(run.out)
    assert [each["name"] for each in report["results"]] == ["consequence", "scalings", "brier"]
    assert len(report["consequence"]) == 4
    assert json.loads((tmp_path / "out" / "analysis.json").read_text()) == report


def test_the_same_run_gives_the_same_bytes(place: Path, spectrum: tuple[Run, Path], tmp_path: Path) -> None:
    assert study("spectrum", place, tmp_path / "again").status == 0
    for name in ("spectrum.json", "spectrum.html", "spectrum.md"):
        assert (tmp_path / "again" / name).read_bytes() == (spectrum[1] / name).read_bytes()
    assert study("spectrum", place, tmp_path / "other", "--seed", "1").status == 0
    other = (tmp_path / "other" / "spectrum.json").read_bytes()
    assert other != (spectrum[1] / "spectrum.json").read_bytes()  # control


def test_report_redoes_the_page_from_the_figures(spectrum: tuple[Run, Path], tmp_path: Path) -> None:
    for name in ("spectrum.json", "spectrum.html"):
        shutil.copy(spectrum[1] / name, tmp_path / name)
    whole = (tmp_path / "spectrum.html").read_bytes()
    (tmp_path / "spectrum.html").unlink()
    run = csprune_command("report", tmp_path)
    assert run.status == 0 and "spectrum.html" in run.out
    assert (tmp_path / "spectrum.html").read_bytes() == whole
    report = json.loads((tmp_path / "spectrum.json").read_text())
    del report["protocol"]["bands"]
    (tmp_path / "spectrum.json").write_text(json.dumps(report))
    run = csprune_command("report", tmp_path)
    assert run.status == 2 and "has entries that csprune does not write" in run.message


def test_list_needs_no_model() -> None:
    run = csprune_command("analyze", "--list")
    assert run.status == 0
    assert all(f"{name} " in run.out for name in (*ANALYSES, *SPECTRUM))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--what", "nonsense"), "unknown analysis 'nonsense': choose from consequence"),
        (("--what", ""), "unknown analysis '': choose from consequence"),
        (("--what", "brier", "--instruct", "x"), "--instruct is for the conditions"),
        (("--position", "17"), "--position 17 is not between 1 and the 16 tokens of a document"),
        (("--bands", "40"), "32 directions are too few for 40 bands"),
        (("--data", "missing.txt"), "no such file or folder"),
        (("--code", "missing.txt", "--what", "conditions"), "no such file or folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    place: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    run = study("analyze", place, tmp_path / "out", *options)
    assert run.status == 2 and message in run.message
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_done_does_not_cost_the_rest(place: Path, tmp_path: Path) -> None:
    model = tiny.make("llama", max_position_embeddings=256)
    with torch.no_grad():
        model.lm_head.weight[:] = model.lm_head.weight[:1]  # no two tokens differ
        model.lm_head.weight[0, 0] += 1
    tiny.save(model, tmp_path / "dull")
    text = ("--data", place / "docs.jsonl", *SMALL)
    run = csprune_command("analyze", tmp_path / "dull", *text, "-o", tmp_path / "out")
    assert run.status == 0, run.err
    report = json.loads((tmp_path / "out/analysis.json").read_text())
    assert "contrast-share" in report["not_done"] and len(report["results"]) > 8
    assert f"contrast-share was left out: {report['not_done']['contrast-share']}" in run.out
    # Asked for by name it is an error.
    run = csprune_command(
        "analyze", tmp_path / "dull", *text, "--what", "contrast-share", "-o", tmp_path / "alone"
    )
    assert run.status == 1 and report["not_done"]["contrast-share"] in run.message
    assert not (tmp_path / "alone").exists()
    spectrum = csprune_command("spectrum", tmp_path / "dull", *text, "-o", tmp_path / "spectrum")
    assert spectrum.status == 0, spectrum.err
    found = json.loads((tmp_path / "spectrum/spectrum.json").read_text())["consequence"]
    assert found[1:] == [None] * 3  # one direction reaches the logits: of the others there is only rounding


def test_states_that_do_not_differ_are_refused(place: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "same.jsonl", [f"The {text}" for text in varied(60)])
    model = ("spectrum", place / "model", "--data", tmp_path / "same.jsonl", *SMALL)
    run = csprune_command(*model, "--position", "1", "-o", tmp_path / "out")
    assert run.status == 2 and "the states at token 1 are the same in all" in run.message
    assert not (tmp_path / "out").exists()
    assert csprune_command(*model, "--position", "16", "-o", tmp_path / "out").status == 0  # control


def test_an_earlier_output_is_kept(place: Path, spectrum: tuple[Run, Path], tmp_path: Path) -> None:
    before = (spectrum[1] / "spectrum.json").read_bytes()
    run = study("spectrum", place, spectrum[1])
    assert run.status == 2 and "--overwrite" in run.message
    assert (spectrum[1] / "spectrum.json").read_bytes() == before
    # Control: an analysis of the same model may lie in the same folder.
    assert study("analyze", place, spectrum[1], "--what", "brier").status == 0
    assert (spectrum[1] / "spectrum.json").read_bytes() == before
    (tmp_path / "spectrum.json").write_text('{"mine": 1}')
    run = study("spectrum", place, tmp_path, "--overwrite")
    assert run.status == 2
    assert (tmp_path / "spectrum.json").read_text() == '{"mine": 1}'


def test_subspace_writes_bases_and_shows_dimensions(place: Path, tmp_path: Path) -> None:
    text = ("--data", place / "docs.jsonl", "--sequence-length", "16", "--documents", "4")
    run = csprune_command("subspace", place / "model", *text, "-o", tmp_path / "out")
    assert run.status == 0, run.err
    assert all(PROGRESS.match(line) for line in run.err.splitlines() if line)
    for site in ("logits", "final", "post", "mlp_out", "mlp_in"):
        assert site in run.out
    assert (tmp_path / "out" / "subspace.json").is_file()
    assert (tmp_path / "out" / "subspace.safetensors").is_file()
    assert (tmp_path / "out" / "subspace.html").is_file()
    alone = csprune_command("subspace", place / "model", "--site", "final", *text, "--json")
    assert alone.status == 0 and json.loads(alone.out)["tables"]
    run = csprune_command("subspace", place / "model", *text, "--share", "1.5")
    assert run.status == 2 and "share" in run.message
