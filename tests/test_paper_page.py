"""The page of benchmarks/paper: why models differ, explanations, and that it comes from the files alone."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import paper_cases
import pytest
import run
import torch
from explanations import NOT_EXPLAINED, Group, explanation
from page import described, heading, page_results, verdicts_of
from reports import Reports
from study_cases import study_case
from why import haar_weights, state_geometry

from csprune.analysis.spaces import band_slice
from csprune.linalg import haar_columns
from csprune.pages.results_summary import results_markdown


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("paper")
    paper_cases.write_reports(directory / "tiny", "llama")
    shutil.copytree(directory / "tiny", directory / "twin")
    return directory


def test_the_second_moment_of_a_random_projection() -> None:
    width, size = 7, 3
    a, b = haar_weights(width, size)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    matrix = matrix @ matrix.mT
    drawn = torch.zeros_like(matrix)
    for seed in range(20_000):
        columns = haar_columns(width, size, seed)
        drawn += columns @ (columns.mT @ matrix @ columns) @ columns.mT / 20_000
    expected = a * matrix + b * matrix.trace() * torch.eye(width, dtype=torch.float64)
    error = float((drawn - expected).norm() / expected.norm())
    assert error < 0.02
    # Exactly: the identity is kept in m of q directions, and all of everything where nothing is left out.
    assert a + width * b == pytest.approx(size / width)
    assert haar_weights(width, width) == pytest.approx((1.0, 0.0))


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_expected_distances_against_drawn_subspaces(kind: str) -> None:
    study = study_case(kind).study
    u, unembedding = study.calibration.u, study.unembedding
    found = state_geometry(unembedding, u, study.bands)
    deviation = (u - u.mean(0)).numpy()
    gram = unembedding.gram.numpy()
    width = unembedding.width
    size = len(range(*band_slice(study.bands - 1, study.bands, width).indices(width)))
    values, vectors = np.linalg.eigh(deviation.T @ deviation / len(deviation))
    first = vectors[:, -1]
    assert found["second_moment"]["1"] == pytest.approx(values[-1] / values.sum())
    assert found["amplification"]["first principal direction"] == pytest.approx(
        first @ gram @ first / np.trace(gram) * width
    )
    # Drawn: the distance of whole removals, of what they take from the state along the first principal
    # direction, and of the change along it.
    whole, taken, moved, count = 0.0, 0.0, 0.0, 4000
    for seed in range(count):
        columns = haar_columns(width, size, seed).numpy()
        change = deviation @ columns @ columns.T
        of_first = np.outer(deviation @ first, columns @ (columns.T @ first))
        whole += np.einsum("di,ij,dj->", change, gram, change) / len(deviation) / count
        taken += np.einsum("di,ij,dj->", of_first, gram, of_first) / len(deviation) / count
        moved += np.square(change @ first).mean() * (first @ gram @ first) / count
    assert found["taken_from"]["1"] == pytest.approx(taken / whole, rel=0.05)
    assert found["moved_along"]["1"] == pytest.approx(moved / whole, rel=0.05)
    own = study.band(-1).removal(u - u.mean(0)).coordinates.numpy() @ study.band(-1).vectors.numpy().T
    distance = np.einsum("di,ij,dj->d", own, gram, own).mean()
    band = found["bottom_band"]
    assert band["logit_distance"] == pytest.approx(distance / whole, rel=0.05)
    assert band["squared_length"] * band["distance_per_length"] == pytest.approx(band["logit_distance"])
    length = np.square(own).sum() / np.square(deviation).sum() / (size / width)
    assert band["squared_length"] == pytest.approx(length)
    # All directions together are everything.
    assert found["taken_from"]["20"] <= 1 and found["moved_along"]["20"] <= 1


def test_states_along_one_direction_are_taken_from_it_alone() -> None:
    study = study_case("llama").study
    direction = torch.linspace(-1, 1, study.unembedding.width, dtype=torch.float64)
    states = torch.outer(torch.arange(9, dtype=torch.float64), direction)
    found = state_geometry(study.unembedding, states, study.bands)
    assert found["second_moment"]["1"] == pytest.approx(1.0)
    assert found["taken_from"]["1"] == pytest.approx(1.0)
    assert found["moved_along"]["1"] < 0.9  # a random subspace holds it only in part


def test_explanations() -> None:
    single = {("a", "overlap"): "This one."}
    groups = (Group("a", ("fisher-*", "overlap"), "These."), Group("b", ("fisher-*",), "Others."))
    assert explanation("a", "overlap", single, groups) == "This one."
    assert explanation("a", "fisher-random", single, groups) == "These."
    assert explanation("b", "fisher-random", single, groups) == "Others."
    assert explanation("b", "fisher", single, groups) == NOT_EXPLAINED
    assert explanation("c", "overlap", single, groups) == NOT_EXPLAINED


def test_the_page_says_of_every_claim_what_became_of_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [Reports.read(directory / name) for name in ("tiny", "twin")]
    verdicts = verdicts_of(reports)
    claims = described(reports, verdicts)["claims"]
    differing = [each for each in claims if each["models"]["tiny"]["verdict"] == "differs"]
    assert differing and all(each["models"]["tiny"]["explanation"] == NOT_EXPLAINED for each in differing)
    monkeypatch.setattr("page.explanation", lambda model, key: f"Because {model}.")
    text = results_markdown(heading(reports), page_results(reports, verdicts))
    assert NOT_EXPLAINED not in text and "Because tiny." in text and "Because twin." in text
    for each in claims:
        assert re_escaped(each["text"]) in text and re_escaped(each["said"]) in text
        marks = {found["verdict"] for found in each["models"].values()}
        assert len(marks) == 1  # both are the same model
    count = sum(each["models"]["tiny"]["verdict"] == "reproduced" for each in claims)
    assert f"tiny {count} of " in text


def re_escaped(text: str) -> str:
    """As Markdown has it."""
    return text.replace("_", "\\_").replace("|", "\\|")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page as Markdown only: drawing its pictures takes longer than all else."""

    def write(directory: Path, title: object, results: object, *, page: str) -> None:
        text = results_markdown(title, results)  # type: ignore[arg-type]
        (directory / f"{page}.md").write_text(text, encoding="utf-8")

    monkeypatch.setattr("page.write_results", write)


def test_redoing_it_needs_no_model(
    directory: Path, drawn: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def arguments(*given: str) -> None:
        monkeypatch.setattr(sys, "argv", ["run.py", "-o", str(directory), *given])

    arguments("--redo")
    with pytest.raises(SystemExit, match=r"verdicts.json cannot be read .*: name the models"):
        run.main()
    arguments("--redo", "twin", "tiny")
    run.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["twin", "tiny"]
    files = [directory / name for name in ("paper.md", "verdicts.json")]
    before = [path.read_bytes() for path in files]
    for path in files[:1]:
        path.unlink()
    arguments("--redo")  # the models of the page that is there, in their order
    run.main()
    assert [path.read_bytes() for path in files] == before
    # Control: another figure gives another page.
    path = directory / "tiny/why.json"
    kept = path.read_text()
    path.write_text(json.dumps({**json.loads(kept), "gain": {"smallest": 7, "median": 8, "largest": 9}}))
    run.main()
    path.write_text(kept)
    assert files[0].read_bytes() != before[0]


def test_a_model_or_redo_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "-o", "somewhere"])
    with pytest.raises(SystemExit) as error:
        run.main()
    assert error.value.code == 2 and "name at least one model, or --redo" in capsys.readouterr().err
