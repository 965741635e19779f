"""The folder of a benchmark's report: nothing of others' is replaced, and `bench.json` comes last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from csprune.bench.harness import Scores
from csprune.files import check_replaceable, write_files

SCHEMA = 1
KIND = "lm-evaluation-harness, paired"
"""What the report is, in its field `kind`; by it an earlier one is known."""

BENCH_FILE = "bench.json"
ITEMS_FILE = "items.parquet"
MARKDOWN_FILE = "bench.md"
PICTURE_FILES = ("bench.svg", "bench.png")


def check_bench_target(directory: Path, overwrite: bool) -> None:
    """Refuse to replace files in a folder, unless they are an earlier benchmark that may be overwritten.

    Raises:
        InputError: A file of a benchmark's name is there, and is not ours or not to be replaced.
    """
    names = (BENCH_FILE, ITEMS_FILE, MARKDOWN_FILE, *PICTURE_FILES)
    check_replaceable(directory, names, _is_bench, "benchmark", overwrite)


def _is_bench(directory: Path) -> bool:
    try:
        report = json.loads((directory / BENCH_FILE).read_text(encoding="utf-8"))
        return report["kind"] == KIND and {"schema", "models", "tasks"} <= set(report)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def write_bench(
    directory: Path, report: dict[str, Any], items: pa.Table, markdown: str, pictures: Sequence[bytes]
) -> None:
    """Write a benchmark's files into a folder, which is made if need be.

    Each appears whole or not at all, and `bench.json` last: where there is one, what is beside it is its own.

    Args:
        directory: The folder.
        report: The content of `bench.json`.
        items: What `items_table` made.
        markdown: The tables for people.
        pictures: As SVG and as PNG.

    Raises:
        CspruneError: The files cannot be written.
        ValueError: If the report has a NaN or an infinity, which JSON does not know.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    files = {
        ITEMS_FILE: partial(pq.write_table, items),
        MARKDOWN_FILE: markdown.encode(),
        **dict(zip(PICTURE_FILES, pictures, strict=True)),
        BENCH_FILE: text.encode(),
    }
    write_files(directory, files, "benchmark")


def items_table(names: Sequence[str], scores: Sequence[Scores]) -> pa.Table:
    """Every item's value: one row for each task, metric, filter, model and document.

    Where an item's value is no number (a log-likelihood with its weight, a text), `value` is null and
    `parts` has it as JSON.
    """
    rows: dict[str, list[Any]] = {name: [] for name in _FIELDS.names}
    for name, each in zip(names, scores, strict=True):
        for task, items in each.items.items():
            for item in items:
                for metric, value in item.values.items():
                    number = isinstance(value, int | float)
                    cells = (task, metric, item.filter, name, item.doc_id, item.hashes[0])
                    rows["value"].append(float(value) if number else None)
                    rows["parts"].append(None if number else json.dumps(value, default=_plain))
                    for field, cell in zip(_FIELDS.names[:6], cells, strict=True):
                        rows[field].append(cell)
    return pa.table(rows, schema=_FIELDS)


def _plain(value: Any) -> Any:
    """An array or a number of numpy's as JSON has it; any other thing as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


_FIELDS = pa.schema(
    [
        ("task", pa.string()),
        ("metric", pa.string()),
        ("filter", pa.string()),
        ("model", pa.string()),
        ("doc_id", pa.int64()),
        ("doc_hash", pa.string()),
        ("value", pa.float64()),
        ("parts", pa.string()),
    ]
)
