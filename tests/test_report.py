"""The report: its schema, every figure against plain loops, and the files it can be redone from."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from csprune import report as report_module
from csprune.bootstrap import interval
from csprune.errors import CspruneError, InputError
from csprune.measurement import QUANTITIES, Evaluation, Measurement
from csprune.report import read_evaluation, summarise, write_report
from csprune.tables import markdown, table

DOCUMENTS, SUBSPACES = 24, 3
RANKS = ((0.05, 3), (0.2, 12))


def make_values(generator: np.random.Generator, size: tuple[int, ...]) -> dict[str, np.ndarray]:
    values = {name: generator.gamma(2.0, size=size) for name in QUANTITIES}
    values["logit_distance"] *= 10_000
    values["top1_agreement"] = generator.uniform(0.5, 1.0, size=size)
    return values


def make_evaluation(seed: int = 0, methods: tuple[str, ...] = ("fisher", "random")) -> Evaluation:
    generator = np.random.default_rng(seed)
    measurements = []
    for rank, removed in RANKS:
        for method in methods:
            size = (SUBSPACES, DOCUMENTS) if method == "random" else (DOCUMENTS,)
            measurements.append(
                Measurement(method, rank, removed, 60 - removed, make_values(generator, size))
            )
    return Evaluation(
        model="some/modèl",
        protocol={"positions": "all", "seed": 0},
        document_ids=tuple(f"{number // 2:016x}" for number in range(DOCUMENTS)),
        blocks=np.repeat([1, 2], [10, 14]),
        base_loss=generator.gamma(3.0, size=DOCUMENTS),
        measurements=measurements,
    )


def replace_values(evaluation: Evaluation, place: int, **values: np.ndarray) -> Evaluation:
    """The evaluation with some values of one measurement replaced."""
    measurements = list(evaluation.measurements)
    old = measurements[place]
    measurements[place] = dataclasses.replace(old, values={**old.values, **values})
    return dataclasses.replace(evaluation, measurements=measurements)


def entry_of(report: dict[str, Any], method: str, rank: float) -> dict[str, Any]:
    (entry,) = [e for e in report["truncations"] if (e["method"], e["rank"]) == (method, rank)]
    return entry


def test_schema() -> None:
    report = summarise(make_evaluation(), draws=200)
    assert list(report) == ["schema", "model", "protocol", "documents", "base_loss", "truncations"]
    assert report["schema"] == 1
    assert report["model"] == "some/modèl"
    assert report["documents"] == DOCUMENTS
    assert report["protocol"]["positions"] == "all"
    assert report["protocol"]["bootstrap"] == {
        "draws": 200,
        "seed": 0,
        "level": 0.95,
        "documents_by_block": {"1": 10, "2": 14},
    }
    assert list(report["base_loss"]) == ["mean", "ci95"]
    named = [(e["method"], e["rank"], e["removed"], e["kept"]) for e in report["truncations"]]
    assert named == [
        ("fisher", 0.05, 3, 57),
        ("random", 0.05, 3, 57),
        ("fisher", 0.2, 12, 48),
        ("random", 0.2, 12, 48),
    ]
    keys = ["method", "rank", "removed", "kept", *QUANTITIES, "vs_random", "per_unit_vs_random"]
    for entry in report["truncations"]:
        assert list(entry) == keys + ["subspaces"] * (entry["method"] == "random")
        assert list(entry["vs_random"]) == list(QUANTITIES)
        assert list(entry["per_unit_vs_random"]) == [
            "fisher_term",
            "prediction_change",
            "loss_change",
        ]
        for name in QUANTITIES:
            low, high = entry[name]["ci95"]
            assert list(entry[name]) == ["mean", "ci95"]
            assert low < entry[name]["mean"] < high
        for comparison in entry["vs_random"].values():
            assert list(comparison) == ["ratio", "ci95", "difference", "difference_ci95"]
        for comparison in entry["per_unit_vs_random"].values():
            assert list(comparison) == ["ratio", "ci95"]
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_every_figure_against_plain_loops() -> None:
    evaluation = make_evaluation()
    draws, seed = 60, 4
    report = summarise(evaluation, draws=draws, seed=seed)
    # The draws, read off by resampling the identity: [draws, documents].
    resampling = report_module.Resampling(evaluation.blocks, draws=draws, seed=seed)
    counts = (DOCUMENTS * resampling.means(np.eye(DOCUMENTS))).round()

    def total(weights: np.ndarray, values: np.ndarray) -> float:
        result = 0.0
        for document in range(DOCUMENTS):
            if values.ndim == 1:
                result += weights[document] * values[document]
            else:
                for subspace in range(SUBSPACES):
                    result += weights[document] * values[subspace, document] / SUBSPACES
        return result

    every = [np.ones(DOCUMENTS), *counts]
    for own, reference in ((0, 1), (2, 3), (1, 1)):
        method = evaluation.measurements[own]
        entry = entry_of(report, method.method, method.rank)
        mine, random = method.values, evaluation.measurements[reference].values
        for name in QUANTITIES:
            means = [total(weights, mine[name]) / DOCUMENTS for weights in every]
            others = [total(weights, random[name]) / DOCUMENTS for weights in every]
            assert entry[name]["mean"] == pytest.approx(means[0], rel=1e-12)
            assert entry[name]["ci95"] == pytest.approx(interval(np.array(means[1:])), rel=1e-12)
            comparison = entry["vs_random"][name]
            ratios = np.array(means) / np.array(others)
            gaps = np.array(means) - np.array(others)
            assert comparison["ratio"] == pytest.approx(ratios[0], rel=1e-12)
            assert comparison["ci95"] == pytest.approx(interval(ratios[1:]), rel=1e-12)
            assert comparison["difference"] == pytest.approx(gaps[0], abs=1e-9)
            assert comparison["difference_ci95"] == pytest.approx(interval(gaps[1:]), abs=1e-9)
        for name, found in entry["per_unit_vs_random"].items():
            ratios = []
            for weights in every:
                own_rate = total(weights, mine[name]) / total(weights, mine["logit_distance"])
                other = total(weights, random[name]) / total(weights, random["logit_distance"])
                ratios.append(own_rate / other)
            assert found["ratio"] == pytest.approx(ratios[0], rel=1e-12)
            assert found["ci95"] == pytest.approx(interval(np.array(ratios[1:])), rel=1e-12)
            if own != reference:
                # Control: the mean of per-document ratios is another figure.
                per_document = (mine[name] / mine["logit_distance"]).mean() / (
                    (random[name] / random["logit_distance"]).mean()
                )
                assert found["ratio"] != pytest.approx(per_document, rel=1e-2)


def test_random_entry() -> None:
    evaluation = make_evaluation()
    report = summarise(evaluation, draws=100)
    entry = entry_of(report, "random", 0.2)
    for name in QUANTITIES:
        expected = evaluation.measurements[3].values[name].mean(axis=1)
        assert entry["subspaces"][name] == pytest.approx(expected.tolist(), rel=1e-12)
        assert entry["vs_random"][name] == {
            "ratio": 1,
            "ci95": [1, 1],
            "difference": 0,
            "difference_ci95": [0, 0],
        }
    for comparison in entry["per_unit_vs_random"].values():
        assert comparison == {"ratio": 1, "ci95": [1, 1]}


def test_a_method_that_measures_like_random() -> None:
    evaluation = make_evaluation()
    same = {name: values.mean(axis=0) for name, values in evaluation.measurements[1].values.items()}
    entry = entry_of(summarise(replace_values(evaluation, 0, **same), draws=100), "fisher", 0.05)
    assert all(each["ratio"] == 1 for each in entry["vs_random"].values())
    assert all(each["difference_ci95"] == [0, 0] for each in entry["vs_random"].values())
    assert all(each["ci95"] == [1, 1] for each in entry["per_unit_vs_random"].values())


def test_random_that_lowers_the_loss_gives_null() -> None:
    evaluation = make_evaluation()
    lower = -np.abs(evaluation.measurements[1].values["loss_change"])
    report = summarise(replace_values(evaluation, 1, loss_change=lower), draws=100)
    entry = entry_of(report, "fisher", 0.05)
    comparison = entry["vs_random"]["loss_change"]
    assert comparison["ratio"] is None and comparison["ci95"] is None
    assert comparison["difference"] > 0 and comparison["difference_ci95"][0] > 0
    assert entry["per_unit_vs_random"]["loss_change"] == {"ratio": None, "ci95": None}
    assert entry["per_unit_vs_random"]["fisher_term"]["ci95"] is not None
    json.dumps(report, allow_nan=False)
    # Just positive on average, but not in every draw: a ratio without interval.
    values = np.where(np.arange(DOCUMENTS) % 2 == 0, 1.0, -0.9) + np.zeros((SUBSPACES, 1))
    report = summarise(replace_values(evaluation, 1, loss_change=values), draws=100)
    comparison = entry_of(report, "fisher", 0.05)["vs_random"]["loss_change"]
    assert comparison["ratio"] > 0 and comparison["ci95"] is None


def test_nothing_changed_gives_null_per_unit() -> None:
    zero = {name: np.zeros(DOCUMENTS) for name in QUANTITIES}
    report = summarise(replace_values(make_evaluation(), 0, **zero), draws=100)
    entry = entry_of(report, "fisher", 0.05)
    assert entry["vs_random"]["fisher_term"]["ratio"] == 0
    assert entry["per_unit_vs_random"]["fisher_term"] == {"ratio": None, "ci95": None}


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    values = make_evaluation().measurements[1].values["fisher_term"].copy()
    values[0, 3] = np.nan
    values[2, 3] = np.inf
    values[2, 5] = -np.inf
    evaluation = replace_values(make_evaluation(), 1, fisher_term=values)
    message = r"in 2 of 24 documents \(fisher_term of random at rank 0.05: 1 NaN and 2 infinite\)"
    with pytest.raises(CspruneError, match=message):
        summarise(evaluation)
    with pytest.raises(CspruneError, match=message):
        write_report(tmp_path, evaluation, summarise(make_evaluation(), draws=10))
    assert not list(tmp_path.iterdir())


def test_bad_input() -> None:
    evaluation = make_evaluation()
    with pytest.raises(InputError, match=r"fisher at rank 0\.05 has no random truncation of 3 dir"):
        summarise(dataclasses.replace(evaluation, measurements=evaluation.measurements[::2]))
    with pytest.raises(InputError, match=r"fisher at rank 0\.05 is there 2 times"):
        dataclasses.replace(evaluation, measurements=[evaluation.measurements[0]] * 2)
    with pytest.raises(InputError, match=r"loss_change of random .* shape \(24,\)"):
        replace_values(evaluation, 1, **make_values(np.random.default_rng(0), (DOCUMENTS,)))
    with pytest.raises(InputError, match=r"fisher_term of fisher .* float32"):
        replace_values(evaluation, 0, fisher_term=np.zeros(DOCUMENTS, dtype=np.float32))
    with pytest.raises(InputError, match="quantities"):
        replace_values(evaluation, 0, other=np.zeros(DOCUMENTS))
    with pytest.raises(InputError, match="blocks"):
        dataclasses.replace(evaluation, blocks=evaluation.blocks[1:])
    one = Evaluation("m", {}, ("a",), np.array([1]), np.zeros(1), [])
    with pytest.raises(InputError, match="at least 2"):
        summarise(one)


def test_round_trip_and_bytes(tmp_path: Path) -> None:
    # Document ids repeat here, so that nothing may hang on them.
    evaluation = make_evaluation(methods=("singular", "random", "fisher"))
    report = summarise(evaluation, draws=100, seed=2)
    write_report(tmp_path / "a" / "b", evaluation, report)
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "documents.parquet",
        "report.json",
    ]
    text = (tmp_path / "a" / "b" / "report.json").read_text(encoding="utf-8")
    assert json.loads(text) == report
    assert "modèl" in text
    again = read_evaluation(tmp_path / "a" / "b")
    assert (again.model, again.protocol) == (evaluation.model, evaluation.protocol)
    assert again.document_ids == evaluation.document_ids
    np.testing.assert_array_equal(again.blocks, evaluation.blocks)
    np.testing.assert_array_equal(again.base_loss, evaluation.base_loss)
    assert len(again.measurements) == len(evaluation.measurements)
    for new, old in zip(again.measurements, evaluation.measurements, strict=True):
        assert (new.method, new.rank, new.removed, new.kept) == (
            old.method,
            old.rank,
            old.removed,
            old.kept,
        )
        for name in QUANTITIES:
            np.testing.assert_array_equal(new.values[name], old.values[name])
    assert summarise(again, draws=100, seed=2) == report
    # Control: other draws, other intervals.
    assert summarise(again, draws=100, seed=3) != report
    write_report(tmp_path / "c", again, summarise(again, draws=100, seed=2))
    for name in ("report.json", "documents.parquet"):
        assert (tmp_path / "a" / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_documents_table_is_tidy(tmp_path: Path) -> None:
    evaluation = make_evaluation()
    write_report(tmp_path, evaluation, summarise(evaluation, draws=10))
    frame = pq.read_table(tmp_path / "documents.parquet")
    assert frame.column_names == [
        *("document", "block", "base_loss", "method", "rank", "subspace"),
        *QUANTITIES,
    ]
    assert frame.num_rows == len(RANKS) * DOCUMENTS * (1 + SUBSPACES)
    for row in frame.to_pylist():
        assert (row["subspace"] is None) == (row["method"] == "fisher")
    row = frame.to_pylist()[DOCUMENTS + 2 * DOCUMENTS + 7]
    assert (row["method"], row["rank"], row["subspace"]) == ("random", 0.05, 2)
    assert row["document"] == evaluation.document_ids[7]
    assert row["fisher_term"] == evaluation.measurements[1].values["fisher_term"][2, 7]


def test_a_failed_write_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = make_evaluation()
    report = summarise(evaluation, draws=10)
    write_report(tmp_path, evaluation, report)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_report(tmp_path, evaluation, {**report, "documents": float("nan")})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CspruneError, match="No space left on device"):
        write_report(tmp_path, evaluation, report)
    # The old values may stay, a report that is not of these values may not.
    assert {path.name for path in tmp_path.iterdir()} == {"documents.parquet"}


def test_files_that_cannot_be_read_back(tmp_path: Path) -> None:
    evaluation = make_evaluation()
    report = summarise(evaluation, draws=10)
    (tmp_path / "file").write_text("")
    with pytest.raises(CspruneError, match="cannot be written"):
        write_report(tmp_path / "file", evaluation, report)
    with pytest.raises(InputError, match="has no readable report"):
        read_evaluation(tmp_path)
    folder = tmp_path / "report"
    write_report(folder, evaluation, report)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}

    def check(name: str, content: bytes, message: str) -> None:
        (folder / name).write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            read_evaluation(folder)
        assert "\n" not in str(caught.value)
        (folder / name).write_bytes(whole[name])

    text = whole["report.json"]
    check("report.json", text.replace(b'"schema": 1', b'"schema": 2'), "has schema 2")
    check("report.json", text[:-20], "has no readable report")
    check("report.json", b"[]", "has no readable report")
    check("report.json", text.replace(b'"documents": 24', b'"documents": 23'), "not 1 x 23")
    check("documents.parquet", whole["documents.parquet"][:-20], "has no readable report")
    fewer = pq.read_table(folder / "documents.parquet").drop_columns(["fisher_term"])
    pq.write_table(fewer, tmp_path / "fewer.parquet")
    check("documents.parquet", (tmp_path / "fewer.parquet").read_bytes(), "the columns")
    # Control: with everything in its place again it is read.
    assert len(read_evaluation(folder).measurements) == 4


METHODS = ("random", "singular", "fisher", "whitened", "fisher-whitened")


def test_markdown() -> None:
    text = markdown(summarise(make_evaluation(methods=METHODS), draws=50))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == "| rank | method | loss change | D | F | K | top-1 |"
    assert len(rows) == 2 + len(RANKS) * len(METHODS)
    assert {row.count("|") for row in rows} == {8}
    assert [row.split("|")[2].strip() for row in rows[2:]] == 2 * [*METHODS[1:], "random"]
    assert "on 24 documents" in text and "nats" in text


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("scale", [1e-7, 1.0, 20.0])
def test_table_fits_the_terminal(width: int, scale: float) -> None:
    evaluation = make_evaluation(methods=METHODS)
    for place, each in enumerate(evaluation.measurements):
        scaled = {name: each.values[name] * scale for name in QUANTITIES[:-1]}
        evaluation = replace_values(evaluation, place, **scaled)
    report = summarise(evaluation, draws=50)

    def shown(columns: int) -> str:
        out = io.StringIO()
        Console(width=columns, file=out).print(table(report))
        return out.getvalue()

    text = shown(width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(text.count(f" {method} ") >= len(RANKS) for method in METHODS)
    # Control: a terminal too narrow does cut, and the cut shows.
    assert "…" in shown(60)
