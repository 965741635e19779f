"""The report of an evaluation: `report.json` and the per-document values it can be redone from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from csprune.bootstrap import DRAWS, LEVEL, Resampling, Statistic, difference, ratio
from csprune.errors import CspruneError, InputError
from csprune.files import atomic_file
from csprune.measurement import QUANTITIES, REFERENCE, Evaluation, Measurement

SCHEMA = 1
REPORT_FILE = "report.json"
DOCUMENTS_FILE = "documents.parquet"

PER_UNIT = ("fisher_term", "prediction_change", "loss_change")
"""The quantities whose size per unit of logit distance is compared with random truncation."""

Statistics = dict[str, Statistic]


def summarise(evaluation: Evaluation, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """Means, comparisons with random truncation of the same rank, and their 95% intervals.

    All intervals are percentile intervals of one paired bootstrap over documents, stratified by
    block; random subspaces are not resampled. How it was done is added to the protocol under
    `bootstrap`. A ratio is None where what it divides by is not positive, and its interval is None
    where that is not positive in some draw: so even random against itself has no ratio of loss
    changes where random truncation lowered the loss.

    Args:
        evaluation: The per-document values.
        draws: Bootstrap draws.
        seed: Seeds them.

    Returns:
        The content of `report.json`, JSON values only.

    Raises:
        CspruneError: If a value is not finite.
        InputError: If `random` was not measured at a rank, or there are fewer than 2 documents.
    """
    evaluation.check_finite()
    references = _references(evaluation)
    resampling = Resampling(evaluation.blocks, draws=draws, seed=seed)
    columns = [evaluation.base_loss]
    for measurement in evaluation.measurements:
        columns += [measurement.per_document(name) for name in QUANTITIES]
    base_loss, *rest = resampling.statistics(np.stack(columns, axis=1))
    width = len(QUANTITIES)
    statistics: list[Statistics] = [
        dict(zip(QUANTITIES, rest[start : start + width], strict=True))
        for start in range(0, len(rest), width)
    ]
    bootstrap = {
        "draws": draws,
        "seed": seed,
        "level": LEVEL,
        "documents_by_block": {
            str(label): int(count)
            for label, count in zip(*np.unique(evaluation.blocks, return_counts=True), strict=True)
        },
    }
    return {
        "schema": SCHEMA,
        "model": evaluation.model,
        "protocol": {**evaluation.protocol, "bootstrap": bootstrap},
        "documents": len(evaluation.document_ids),
        "base_loss": _mean(base_loss),
        "truncations": [
            _entry(measurement, own, statistics[references[measurement.rank]], resampling)
            for measurement, own in zip(evaluation.measurements, statistics, strict=True)
        ],
    }


def _references(evaluation: Evaluation) -> dict[float, int]:
    """Where the random truncation of each rank stands among the measurements."""
    places = {
        each.rank: place for place, each in enumerate(evaluation.measurements) if each.method == REFERENCE
    }
    for each in evaluation.measurements:
        place = places.get(each.rank)
        if place is None or evaluation.measurements[place].removed != each.removed:
            raise InputError(
                f"{each.name} has no {REFERENCE} truncation of {each.removed} directions beside "
                f"it: evaluate {REFERENCE} at the same rank too"
            )
    return places


def _entry(
    measurement: Measurement, own: Statistics, reference: Statistics, resampling: Resampling
) -> dict[str, Any]:
    """One truncation of the report."""
    entry: dict[str, Any] = {
        "method": measurement.method,
        "rank": measurement.rank,
        "removed": measurement.removed,
        "kept": measurement.kept,
    }
    entry |= {name: _mean(own[name]) for name in QUANTITIES}
    entry["vs_random"] = {name: _comparison(own[name], reference[name]) for name in QUANTITIES}
    entry["per_unit_vs_random"] = {name: _ratio(per_unit_ratio(own, reference, name)) for name in PER_UNIT}
    if measurement.method == REFERENCE:
        entry["subspaces"] = {
            name: resampling.observed(measurement.values[name].T).tolist() for name in QUANTITIES
        }
    return entry


def per_unit_ratio(own: Statistics, reference: Statistics, quantity: str) -> Statistic | None:
    """How much a unit of logit distance is worth, against random truncation of the same rank.

    `(sum F / sum D) / (sum F_rand / sum D_rand)` over the documents, the random sums being means
    over the subspaces; likewise for the other quantities.

    Args:
        own: The means of the truncation's quantities.
        reference: Those of random truncation, from the same draws.
        quantity: What to measure per unit, one of `PER_UNIT`.

    Returns:
        The ratio, as `csprune.bootstrap.ratio` defines it.
    """
    return ratio(
        ratio(own[quantity], own["logit_distance"]),
        ratio(reference[quantity], reference["logit_distance"]),
    )


def _mean(statistic: Statistic) -> dict[str, Any]:
    return {"mean": statistic.value, "ci95": _ends(statistic)}


def _ratio(statistic: Statistic | None) -> dict[str, Any]:
    return {"ratio": None if statistic is None else statistic.value, "ci95": _ends(statistic)}


def _comparison(own: Statistic, reference: Statistic) -> dict[str, Any]:
    change = difference(own, reference)
    return {
        **_ratio(ratio(own, reference)),
        "difference": change.value,
        "difference_ci95": _ends(change),
    }


def _ends(statistic: Statistic | None) -> list[float] | None:
    """The 95% interval as JSON has it."""
    ends = None if statistic is None else statistic.interval(LEVEL)
    return None if ends is None else list(ends)


def check_report_target(directory: Path, overwrite: bool) -> None:
    """Refuse to replace files in a folder, unless they are an earlier report that may be overwritten.

    Raises:
        InputError: A file of a report's name is there, and is not ours or not to be replaced.
    """
    there = [name for name in (REPORT_FILE, DOCUMENTS_FILE) if (directory / name).exists()]
    if not there:
        return
    if not _is_report(directory):
        raise InputError(f"{directory / there[0]} is not a report of csprune's: choose another -o")
    if not overwrite:
        raise InputError(f"{directory} holds a report already: choose another -o, or add --overwrite")


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
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / REPORT_FILE).unlink(missing_ok=True)
        with atomic_file(directory / DOCUMENTS_FILE) as path:
            pq.write_table(documents, path)
        with atomic_file(directory / REPORT_FILE) as path:
            path.write_bytes(text.encode())
    except OSError as error:
        raise CspruneError(
            f"the report cannot be written to {directory} ({error.strerror or error}): "
            "give another folder or make room there"
        ) from error


def _long_table(evaluation: Evaluation) -> pa.Table:
    """The per-document values in tidy form: one row for each document of each (sub)truncation.

    Rows keep the order of measurements, subspaces, and documents.
    """
    documents = len(evaluation.document_ids)
    columns: dict[str, list[Any]] = {name: [] for name in _FIELDS.names}
    for each in evaluation.measurements:
        for subspace in range(each.subspaces or 1):
            columns["document"] += evaluation.document_ids
            columns["block"] += evaluation.blocks.tolist()
            columns["base_loss"] += evaluation.base_loss.tolist()
            columns["method"] += [each.method] * documents
            columns["rank"] += [each.rank] * documents
            columns["subspace"] += [None if each.subspaces is None else subspace] * documents
            for name in QUANTITIES:
                columns[name] += np.atleast_2d(each.values[name])[subspace].tolist()
    return pa.table(columns, schema=_FIELDS)


_FIELDS = pa.schema(
    [
        ("document", pa.string()),
        ("block", pa.int64()),
        ("base_loss", pa.float64()),
        ("method", pa.string()),
        ("rank", pa.float64()),
        ("subspace", pa.int64()),
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
    directory = Path(directory)
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
        return _evaluation(report, table)
    except (OSError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{directory} has no readable report ({type(error).__name__}: {reason}): it needs the "
            f"{REPORT_FILE} and {DOCUMENTS_FILE} that one evaluation wrote"
        ) from error


def _evaluation(report: dict[str, Any], table: pa.Table) -> Evaluation:
    """The evaluation of a parsed report and its table; ValueError where they do not fit."""
    documents = report["documents"]
    columns = {name: table[name].to_numpy() for name in ("block", "base_loss", "rank", *QUANTITIES)}
    methods = np.array(table["method"].to_pylist(), dtype=object)
    measurements: list[Measurement] = []
    first: np.ndarray | None = None
    for entry in report["truncations"]:
        rows = np.flatnonzero((methods == entry["method"]) & (columns["rank"] == entry["rank"]))
        subspaces = len(entry["subspaces"]["loss_change"]) if "subspaces" in entry else 1
        if len(rows) != subspaces * documents:
            raise ValueError(
                f"{len(rows)} rows for {entry['method']} at rank {entry['rank']}, "
                f"not {subspaces} x {documents}"
            )
        shape = (subspaces, documents) if "subspaces" in entry else (documents,)
        values = {name: columns[name][rows].reshape(shape) for name in QUANTITIES}
        measurements.append(
            Measurement(entry["method"], entry["rank"], entry["removed"], entry["kept"], values)
        )
        first = rows[:documents] if first is None else first
    if first is None:
        raise ValueError("it has no truncation")
    protocol = {name: value for name, value in report["protocol"].items() if name != "bootstrap"}
    return Evaluation(
        model=report["model"],
        protocol=protocol,
        document_ids=tuple(table["document"].take(pa.array(first)).to_pylist()),
        blocks=columns["block"][first],
        base_loss=columns["base_loss"][first],
        measurements=measurements,
    )
