"""The files of an analysis: its figures as JSON, and the values of documents that they can be redone from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from csprune.analysis.results import Result, read_result
from csprune.errors import InputError
from csprune.files import check_replaceable, write_files

SCHEMA = 1
KINDS = ("spectrum", "analysis")
"""What is written: by `csprune spectrum`, by `csprune analyze`."""
_FIELDS = pa.schema(
    [
        ("analysis", pa.string()),
        ("series", pa.string()),
        ("subspace", pa.int32()),
        ("document", pa.string()),
        ("block", pa.int64()),
        ("value", pa.float64()),
    ]
)
_DOCUMENTS, _BLOCKS = ".documents", ".blocks"


def figures_file(kind: str) -> str:
    """The name of the JSON file of one of `KINDS`."""
    return f"{kind}.json"


def values_file(kind: str) -> str:
    """The name of the file with the values of documents."""
    return f"{kind}.parquet"


def check_analysis_target(directory: Path, kind: str, overwrite: bool) -> None:
    """Refuse to replace files in a folder, unless they are an earlier analysis of the kind.

    Raises:
        InputError: A file of its names is there, and is not ours or not to be replaced.
    """

    def is_ours(folder: Path) -> bool:
        return kind in kinds_in(folder)

    check_replaceable(directory, (figures_file(kind), values_file(kind)), is_ours, "report", overwrite)


def kinds_in(directory: Path) -> list[str]:
    """Which of `KINDS` a folder has."""

    def is_there(kind: str) -> bool:
        try:
            found = json.loads((directory / figures_file(kind)).read_text(encoding="utf-8"))
            return {"schema", "kind", "model", "results"} <= set(found) and found["kind"] == kind
        except (OSError, ValueError, TypeError):
            return False

    return [kind for kind in KINDS if is_there(kind)]


def read_analysis(directory: Path, kind: str) -> tuple[dict[str, Any], list[Result]]:
    """What `write_analysis` wrote: the report, and the results without values of documents.

    Raises:
        InputError: There is none, of this schema, or it is not whole.
    """
    path = directory / figures_file(kind)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["schema"] != SCHEMA:
            raise InputError(
                f"{path} has schema {report['schema']}, this version reads schema {SCHEMA}: redo the "
                "analysis, or use the version that wrote it"
            )
        return report, [read_result(each) for each in report.pop("results")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not whole ({error!r}): redo the analysis") from error


def write_analysis(
    directory: Path,
    report: dict[str, Any],
    results: Sequence[Result],
    document_ids: Sequence[str],
    blocks: Sequence[int],
) -> None:
    """Write `KIND.parquet` and `KIND.json` into a folder, each whole or not at all, the figures last.

    Args:
        directory: The folder, made if need be.
        report: With `kind`, and all else that is said of the run; the results are added.
        results: What was found.
        document_ids: Of the evaluation documents.
        blocks: Theirs.

    Raises:
        CspruneError: The files cannot be written.
        ValueError: A figure or value is NaN or infinite where JSON has no word for it.
    """
    kind = report["kind"]
    whole = {**report, "results": [each.describe() for each in results]}
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    table = _long_table(results, document_ids, blocks)
    files = {values_file(kind): partial(pq.write_table, table), figures_file(kind): text.encode()}
    write_files(directory, files, "analysis")


def _long_table(results: Sequence[Result], document_ids: Sequence[str], blocks: Sequence[int]) -> pa.Table:
    """A row for each analysis, series, subspace and document."""
    tables = [_FIELDS.empty_table()]
    for result in results:
        series = {
            name: each for name, each in result.values.items() if not name.endswith((_DOCUMENTS, _BLOCKS))
        }
        others = [name.removesuffix(_DOCUMENTS) for name in result.values if name.endswith(_DOCUMENTS)]
        for name, values in series.items():
            ids, own_blocks = list(document_ids), list(blocks)
            for other in others:
                if name.startswith(f"{other}."):
                    ids = result.values[f"{other}{_DOCUMENTS}"].tolist()
                    given = result.values.get(f"{other}{_BLOCKS}")
                    own_blocks = [None] * len(ids) if given is None else given.tolist()
            rows = np.atleast_2d(values)
            if rows.shape[1] != len(ids):
                raise ValueError(f"{name} has {rows.shape[1]} values for {len(ids)} documents")
            subspaces = [None] if values.ndim == 1 else range(len(rows))
            tables.append(
                pa.table(
                    {
                        "analysis": [result.name] * rows.size,
                        "series": [name] * rows.size,
                        "subspace": [each for each in subspaces for _ in ids],
                        "document": ids * len(rows),
                        "block": own_blocks * len(rows),
                        "value": rows.ravel().astype(np.float64),
                    },
                    schema=_FIELDS,
                )
            )
    return pa.concat_tables(tables)
