"""The files of a report: written whole or not at all, and read back bit for bit; its tables."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluations import DOCUMENTS, RANKS, SUBSPACES, make_evaluation, replace_values, with_checkpoints
from rich.console import Console

from csprune.comparisons import summarise
from csprune.errors import CspruneError, InputError
from csprune.measurement import QUANTITIES
from csprune.report import read_evaluation, redo_report, write_report
from csprune.tables import markdown, table


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
    np.testing.assert_array_equal(again.base_entropy, evaluation.base_entropy)
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


def test_values_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    values = make_evaluation().measurements[1].values["fisher_term"].copy()
    values[0, 3] = np.nan
    evaluation = replace_values(make_evaluation(), 1, fisher_term=values)
    with pytest.raises(CspruneError, match="1 NaN and 0 infinite"):
        write_report(tmp_path, evaluation, summarise(make_evaluation(), draws=10))
    assert not list(tmp_path.iterdir())


def test_documents_table_is_tidy(tmp_path: Path) -> None:
    evaluation = make_evaluation()
    write_report(tmp_path, evaluation, summarise(evaluation, draws=10))
    frame = pq.read_table(tmp_path / "documents.parquet")
    assert frame.column_names == [
        *(
            "document",
            "block",
            "base_loss",
            "base_entropy",
            "checkpoint",
            "method",
            "rank",
            "subspace",
            "loss",
        ),
        *QUANTITIES,
    ]
    assert frame.num_rows == len(RANKS) * DOCUMENTS * (1 + SUBSPACES)
    for row in frame.to_pylist():
        assert (row["subspace"] is None) == (row["method"] == "fisher")
    row = frame.to_pylist()[DOCUMENTS + 2 * DOCUMENTS + 7]
    assert (row["method"], row["rank"], row["subspace"]) == ("random", 0.05, 2)
    assert row["document"] == evaluation.document_ids[7]
    assert row["fisher_term"] == evaluation.measurements[1].values["fisher_term"][2, 7]
    loss_change = evaluation.measurements[1].values["loss_change"][2, 7]
    assert row["loss"] == evaluation.base_loss[7] + loss_change
    assert row["checkpoint"] is None


def test_checkpoints_round_trip(tmp_path: Path) -> None:
    evaluation = with_checkpoints(make_evaluation())
    report = summarise(evaluation, draws=50)
    write_report(tmp_path, evaluation, report)
    again = read_evaluation(tmp_path)
    assert summarise(again, draws=50) == report
    assert len(again.measurements) == 4 and len(again.checkpoints) == 2
    for new, old in zip(again.checkpoints, evaluation.checkpoints, strict=True):
        assert (new.path, new.dtype, new.same_calibration) == (old.path, old.dtype, old.same_calibration)
        for name in QUANTITIES:
            np.testing.assert_array_equal(new.measurement.values[name], old.measurement.values[name])


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
    check("report.json", text.replace(b'"documents": 24', b'"documents": 23'), "not 23")
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
    stored = markdown(summarise(with_checkpoints(make_evaluation()), draws=50))
    assert "| fisher-0.05 | " in stored and "| random-0.2 | " in stored and "random-0.2" not in text


def test_what_is_established_is_marked() -> None:
    evaluation = make_evaluation()
    random = evaluation.measurements[1].values["loss_change"]
    clear = replace_values(evaluation, 0, loss_change=random.mean(axis=0) - 9)
    row = markdown(summarise(clear, draws=50)).splitlines()[4]
    assert row.split("|")[2].strip() == "fisher*"
    alike = replace_values(evaluation, 0, loss_change=random.mean(axis=0))
    assert "*" not in markdown(summarise(alike, draws=50)).splitlines()[4]


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("scale", [1e-7, 1.0, 20.0])
def test_table_fits_the_terminal(width: int, scale: float) -> None:
    evaluation = make_evaluation(methods=METHODS)
    for place, each in enumerate(evaluation.measurements):
        scaled = {name: each.values[name] * scale for name in QUANTITIES[:-1]}
        evaluation = replace_values(evaluation, place, **scaled)
    report = summarise(with_checkpoints(evaluation), draws=50)

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


def test_a_report_is_redone_from_its_files(tmp_path: Path) -> None:
    evaluation = with_checkpoints(make_evaluation())
    report = {**summarise(evaluation, draws=70, seed=3), "export": {"name": "kept"}}
    write_report(tmp_path, evaluation, report)
    again, values = redo_report(tmp_path)
    assert again == report and values.document_ids == evaluation.document_ids
    # Statistics that the file lacks (of an earlier version) are there again.
    older = {name: value for name, value in report.items() if name != "families"}
    (tmp_path / "report.json").write_text(json.dumps(older))
    assert redo_report(tmp_path)[0]["families"] == report["families"]
    # Values that were changed are not those of the report.
    text = json.dumps(report)
    mean = json.dumps(report["truncations"][0]["fisher_term"]["mean"])
    (tmp_path / "report.json").write_text(text.replace(mean, str(float(mean) * 1.001)))
    with pytest.raises(InputError, match="does not have the means"):
        redo_report(tmp_path)
    for key, value in (("protocol", []), ("base_loss", {"mean": "x"}), ("base_loss", None)):
        (tmp_path / "report.json").write_text(json.dumps({**report, key: value}))
        with pytest.raises(InputError, match="report"):
            redo_report(tmp_path)
    endless = {**report["protocol"], "bootstrap": {**report["protocol"]["bootstrap"], "draws": 10**12}}
    (tmp_path / "report.json").write_text(json.dumps({**report, "protocol": endless}))
    with pytest.raises(InputError, match="1000000000000 draws"):
        redo_report(tmp_path)
    broken = {**report, "protocol": {}}
    (tmp_path / "report.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match="not whole"):
        redo_report(tmp_path)


def test_values_that_are_not_the_same_documents_are_refused(tmp_path: Path) -> None:
    """Truncations are paired by row: a table in another order, or of other documents, is not read."""
    evaluation = make_evaluation()
    write_report(tmp_path, evaluation, summarise(evaluation, draws=10))
    file = tmp_path / "documents.parquet"
    whole = pq.read_table(file)
    rows = whole.to_pylist()
    mine = [i for i, row in enumerate(rows) if (row["method"], row["rank"]) == ("fisher", 0.2)]

    def check(changed: list[dict]) -> None:
        pq.write_table(pa.Table.from_pylist(changed, schema=whole.schema), file)
        with pytest.raises(InputError, match=r"of fisher at rank 0\.2 are not the others'"):
            read_evaluation(tmp_path)

    swapped = list(rows)
    swapped[mine[0]], swapped[mine[2]] = rows[mine[2]], rows[mine[0]]
    check(swapped)
    for name, value in (("block", 3), ("base_loss", 1.5), ("base_entropy", 1.5), ("document", "other")):
        check([{**row, name: value} if i == mine[3] else row for i, row in enumerate(rows)])
    pq.write_table(pa.Table.from_pylist(rows, schema=whole.schema), file)  # control
    assert len(read_evaluation(tmp_path).measurements) == 4


def test_the_means_of_checkpoints_are_checked_too(tmp_path: Path) -> None:
    evaluation = with_checkpoints(make_evaluation())
    report = summarise(evaluation, draws=10)
    write_report(tmp_path, evaluation, report)
    report["checkpoints"][1]["loss_change"]["mean"] += 5
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match="does not have the means"):
        redo_report(tmp_path)
