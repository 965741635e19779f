"""The report of an evaluation: `report.json` and the per-document values it can be redone from."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from csprune.comparisons import SCHEMA, summarise
from csprune.errors import InputError
from csprune.files import check_replaceable, write_files
from csprune.measurement import QUANTITIES, REFERENCE, Evaluation, Measurement, StoredMeasurement

REPORT_FILE = "report.json"
DOCUMENTS_FILE = "documents.parquet"
_MOST_DRAWS = 10_000_000  # what a file may ask for


def check_report_target(directory: Path, overwrite: bool) -> None:
    """Refuse to replace files in a folder, unless they are an earlier report that may be overwritten.

    Raises:
        InputError: A file of a report's name is there, and is not ours or not to be replaced.
    """
    if _is_report(directory) and _exported(directory):
        raise InputError(
            f"{directory} is an exported checkpoint, whose report says how it was made: choose another -o"
        )
    check_replaceable(directory, (REPORT_FILE, DOCUMENTS_FILE), _is_report, "report", overwrite)


def _exported(directory: Path) -> bool:
    """Whether a report is that of `compress`."""
    return "export" in json.loads((directory / REPORT_FILE).read_text(encoding="utf-8"))


def _is_report(directory: Path) -> bool:
    try:
        report = json.loads((directory / REPORT_FILE).read_text(encoding="utf-8"))
        return {"schema", "protocol", "base_loss", "truncations"} <= set(report)
    except (OSError, ValueError, TypeError):
        return False


def write_report(directory: str | Path, evaluation: Evaluation, report: dict[str, Any]) -> None:
    """Write `documents.parquet` and `report.json` into a folder, which is made if need be.

    Each appears whole or not at all, and the report last: where there is a `report.json`, the
    values beside it are its own.

    Args:
        directory: The folder.
        evaluation: What was measured.
        report: What `summarise` made of it.

    Raises:
        CspruneError: If a value is not finite, or the files cannot be written.
        ValueError: If the report has a NaN or an infinity, which JSON does not know.
    """
    directory = Path(directory)
    evaluation.check_finite()
    # Made before anything is written, so that a defect leaves the earlier files as they were.
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    documents = _long_table(evaluation)
    files = {DOCUMENTS_FILE: partial(pq.write_table, documents), REPORT_FILE: text.encode()}
    write_files(directory, files, "report")


def _long_table(evaluation: Evaluation) -> pa.Table:
    """The per-document values in tidy form: one row for each document of each (sub)truncation.

    Rows keep the order of measurements, subspaces, and documents.
    """
    documents = len(evaluation.document_ids)
    columns: dict[str, list[Any]] = {name: [] for name in _FIELDS.names}

    def add(each: Measurement, checkpoint: str | None) -> None:
        for subspace in range(each.subspaces or 1):
            values = {name: np.atleast_2d(each.values[name])[subspace] for name in QUANTITIES}
            columns["document"] += evaluation.document_ids
            columns["block"] += evaluation.blocks.tolist()
            columns["base_loss"] += evaluation.base_loss.tolist()
            columns["base_entropy"] += evaluation.base_entropy.tolist()
            columns["checkpoint"] += [checkpoint] * documents
            columns["method"] += [each.method] * documents
            columns["rank"] += [each.rank] * documents
            columns["subspace"] += [None if each.subspaces is None else subspace] * documents
            columns["loss"] += (evaluation.base_loss + values["loss_change"]).tolist()
            for name in QUANTITIES:
                columns[name] += values[name].tolist()

    for each in evaluation.measurements:
        add(each, None)
    for stored in evaluation.checkpoints:
        add(stored.measurement, stored.path)
    return pa.table(columns, schema=_FIELDS)


_FIELDS = pa.schema(
    [
        ("document", pa.string()),
        ("block", pa.int64()),
        ("base_loss", pa.float64()),
        ("base_entropy", pa.float64()),
        ("checkpoint", pa.string()),
        ("method", pa.string()),
        ("rank", pa.float64()),
        ("subspace", pa.int64()),
        ("loss", pa.float64()),
        *((name, pa.float64()) for name in QUANTITIES),
    ]
)


def read_evaluation(directory: str | Path) -> Evaluation:
    """Read back what `write_report` wrote, to redo the statistics without the model.

    Args:
        directory: The folder of the report.

    Returns:
        The evaluation, every value bit for bit as it was.

    Raises:
        InputError: If the folder has no report, or its files do not fit one another.
    """
    return _read(Path(directory))[1]


def _read(directory: Path) -> tuple[dict[str, Any], Evaluation]:
    """The content of `report.json`, and the evaluation that it is of; errors as of `read_evaluation`."""
    try:
        report = json.loads((directory / REPORT_FILE).read_text(encoding="utf-8"))
        table = pq.read_table(directory / DOCUMENTS_FILE)
        if report["schema"] != SCHEMA:
            raise InputError(
                f"{directory / REPORT_FILE} has schema {report['schema']}, this version reads "
                f"schema {SCHEMA}: evaluate again, or use the version that wrote it"
            )
        if not table.schema.equals(_FIELDS):
            raise ValueError(f"the columns {', '.join(table.column_names)} are not those expected")
        return report, _evaluation(report, table)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{directory} has no readable report ({type(error).__name__}: {reason}): it needs the "
            f"{REPORT_FILE} and {DOCUMENTS_FILE} that one evaluation wrote"
        ) from error


def redo_report(directory: str | Path) -> tuple[dict[str, Any], Evaluation]:
    """The report of a folder computed anew from its per-document values, with the draws that it had.

    Args:
        directory: The folder of the report.

    Returns:
        The report, with whatever else its file says (of an export), and the values.

    Raises:
        InputError: If the folder has no report, or its means are not those of its values.
    """
    directory = Path(directory)
    stored, evaluation = _read(directory)
    try:
        bootstrap = stored["protocol"]["bootstrap"]
        if not 0 < bootstrap["draws"] <= _MOST_DRAWS:
            raise ValueError(f"{bootstrap['draws']} draws")
        report = summarise(evaluation, draws=bootstrap["draws"], seed=bootstrap["seed"])
        pairs = [(stored["base_loss"]["mean"], report["base_loss"]["mean"])]
        entries = [each["truncations"] + each.get("checkpoints", []) for each in (stored, report)]
        for old, new in zip(*entries, strict=True):
            pairs += [(old[name]["mean"], new[name]["mean"]) for name in QUANTITIES]
        equal = all(math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12) for old, new in pairs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{directory / REPORT_FILE} is not whole ({error!r}): evaluate again") from error
    if not equal:
        raise InputError(
            f"{directory / REPORT_FILE} does not have the means of the values in {DOCUMENTS_FILE}: one of "
            "them was changed; evaluate again"
        )
    return {**stored, **report}, evaluation


def _evaluation(report: dict[str, Any], table: pa.Table) -> Evaluation:
    """The evaluation of a parsed report and its table; ValueError where they do not fit."""
    documents = report["documents"]
    names = ("block", "base_loss", "base_entropy", "rank", *QUANTITIES)
    columns = {name: table[name].to_numpy() for name in names}
    methods, checkpoints = (
        np.array(table[name].to_pylist(), dtype=object) for name in ("method", "checkpoint")
    )

    def rows_of(entry: dict[str, Any], checkpoint: str | None) -> np.ndarray:
        same = np.array([each == checkpoint for each in checkpoints], dtype=bool)
        return np.flatnonzero(same & (methods == entry["method"]) & (columns["rank"] == entry["rank"]))

    def measurement(entry: dict[str, Any], checkpoint: str | None) -> Measurement:
        rows = rows_of(entry, checkpoint)
        shape = (documents,)
        if entry["method"] == REFERENCE:
            # One exported checkpoint is one subspace.
            shape = (len(entry["subspaces"]["loss_change"]) if "subspaces" in entry else 1, documents)
        if len(rows) != math.prod(shape):
            raise ValueError(
                f"{len(rows)} rows for {entry['method']} at rank {entry['rank']}, "
                f"not {' x '.join(map(str, shape))}"
            )
        for name, common in of_documents.items():
            same = table[name].take(pa.array(rows)).to_pylist() == common * (len(rows) // documents)
            if not same:
                raise ValueError(
                    f"the {name} of {entry['method']} at rank {entry['rank']} are not the others'"
                )
        values = {name: columns[name][rows].reshape(shape) for name in QUANTITIES}
        return Measurement(entry["method"], entry["rank"], entry["removed"], entry["kept"], values)

    if not report["truncations"]:
        raise ValueError("it has no truncation")
    first = rows_of(report["truncations"][0], None)[:documents]
    # What belongs to a document, and must be the same, in the same order, for every truncation.
    of_documents = {
        name: table[name].take(pa.array(first)).to_pylist()
        for name in ("document", "block", "base_loss", "base_entropy")
    }
    protocol = {name: value for name, value in report["protocol"].items() if name != "bootstrap"}
    return Evaluation(
        model=report["model"],
        protocol=protocol,
        document_ids=tuple(table["document"].take(pa.array(first)).to_pylist()),
        blocks=columns["block"][first],
        base_loss=columns["base_loss"][first],
        base_entropy=columns["base_entropy"][first],
        measurements=[measurement(entry, None) for entry in report["truncations"]],
        checkpoints=[
            StoredMeasurement(
                entry["path"],
                entry["dtype"],
                entry["weights_sha256"],
                entry["same_calibration"],
                measurement(entry, entry["path"]),
            )
            for entry in report.get("checkpoints", [])
        ],
    )
