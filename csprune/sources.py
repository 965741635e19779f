"""Documents, one string after another, from whatever a user has: files, folders, the hub, a list.

Nothing here holds more than a document or two in memory (of a .parquet file: one small batch), and
nothing is read before it is asked for, so that a reader who has enough may simply stop.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from csprune.demo_texts import demo_code, demo_prose, package, paragraphs, pieces
from csprune.errors import InputError

Source = str | os.PathLike[str] | Iterable[str]

DEFAULT_FIELD = "text"
DEFAULT_SPLIT = "train"
TEXT_PIECE = 500  # characters: the least that a piece of a .txt file has
PARQUET_BATCH = 64  # rows
LONGEST_QUOTE = 300  # characters of another library's message, or of a mistaken source, in ours
SNIFFED = 8192  # bytes at the start of a file in which a NUL means "not text"
KINDS = "a .txt, .jsonl or .parquet file, a folder, hf:name:config:split:field, demo, or demo-code"
_DEMOS = {"demo": demo_prose, "demo-code": demo_code}


def source_name(source: Source) -> str:
    """The source as given; `texts` for an iterable of strings."""
    return os.fspath(source) if isinstance(source, str | os.PathLike) else "texts"


def read_documents(source: Source) -> Iterator[str | None]:
    """Yields the documents of `source` in an order that never changes.

    Args:
        source: `demo` or `demo-code`; `hf:name:config:split:field` (empty parts keep their default); the
            path of a .txt, .jsonl or .parquet file (`path:field` for the latter two) or of a folder; or an
            iterable of strings. A path object is always a path, even if it is called `demo`.

    Yields:
        A document that can be encoded as UTF-8 (a lone surrogate becomes U+FFFD), possibly empty;
        None for a binary file of a folder, so that the reader can count what was left out.

    Raises:
        InputError: the source is missing, of an unknown kind, unreadable, or holds something that
            is not text. Raised when the document concerned is asked for.
    """
    for text in _documents(source):
        yield None if text is None else _well_formed(text)


def _documents(source: Source) -> Iterator[str | None]:
    if isinstance(source, os.PathLike):
        return _read_path(Path(source), "", os.fspath(source))
    if isinstance(source, str):
        if source in _DEMOS:
            return _DEMOS[source]()
        if source.startswith("hf:"):
            return _hub(source)
        path, field = _split_field(source)
        return _read_path(path, field, source)
    if isinstance(source, bytes | bytearray) or not isinstance(source, Iterable):
        raise InputError(f"the text source is {_kind(source)}: give {KINDS}, or an iterable of strings")
    return _strings(source)


def _strings(texts: Iterable[str]) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise InputError(f"document {number} of the texts is {_kind(text)}: give strings only")
        yield text


def _split_field(source: str) -> tuple[Path, str]:
    """Splits `path:field`; a colon belongs to the path where that makes a path that exists."""
    end = len(source)
    while end > 0:
        if os.path.exists(source[:end]):  # noqa: PTH110 (Path raises where a name is too long)
            return Path(source[:end]), source[end + 1 :]
        end = source.rfind(":", 0, end)
    raise InputError(f"{_one_line(source)!r}: no such file or folder: give {KINDS}")


def _read_path(path: Path, field: str, source: str) -> Iterator[str | None]:
    suffix = path.suffix.lower()
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: check the path")
    if field and (path.is_dir() or suffix == ".txt"):
        raise InputError(f"{source}: {path} has no fields: leave out {':' + field!r}")
    if path.is_dir():
        return _folder(path)
    if suffix == ".txt":
        return pieces(paragraphs(line for _, line in _lines(path)), TEXT_PIECE)
    if suffix == ".jsonl":
        return _jsonl(path, field or DEFAULT_FIELD)
    if suffix == ".parquet":
        return _parquet(path, field or DEFAULT_FIELD)
    raise InputError(f"{path}: cannot read a file of the kind {suffix or '(no extension)'!r}: give {KINDS}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its end); a byte order mark is left out."""
    with _readable(path), path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            yield number, _decode(raw, f"{path}, line {number}", first=number == 1).rstrip("\r\n")


def _jsonl(path: Path, field: str) -> Iterator[str]:
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where}: not valid JSON ({_one_line(error)}): each line must be one JSON object"
            ) from error
        if not isinstance(record, dict):
            raise InputError(f"{where}: the value is {_kind(record)}: each line must be one JSON object")
        yield _text(record, field, where)


def _parquet(path: Path, field: str) -> Iterator[str]:
    pyarrow = package("pyarrow", "a .parquet file")
    parquet = package("pyarrow.parquet", "a .parquet file")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            _require(field, file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=PARQUET_BATCH, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield _text({field: value.as_py()}, field, f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        where = f"{path}, row {number}" if number else str(path)
        raise InputError(
            f"{where}: not readable as parquet ({_one_line(error)}): write the file again"
        ) from error


def _folder(folder: Path) -> Iterator[str | None]:
    """One document a file; None for a file that is plainly binary (a NUL at its beginning)."""
    for path in _files(folder, set()):
        with _readable(path), path.open("rb") as file:
            head = file.read(SNIFFED)
            utf_16 = head.startswith((b"\xff\xfe", b"\xfe\xff"))  # full of NULs, yet text: an error
            if b"\0" in head and not utf_16:
                yield None
            else:
                yield _decode(head + file.read(), str(path), first=True).replace("\r\n", "\n")


def _files(folder: Path, visited: set[str]) -> Iterator[Path]:
    """Yields the files in and below `folder` sorted by name, hidden ones left out.

    Links are followed, but no folder is entered twice (a link may lead back up).
    """
    real = os.path.realpath(folder)
    if real in visited:
        return
    visited.add(real)
    with _readable(folder):
        paths = sorted(folder.iterdir(), key=lambda path: path.name)
    for path in paths:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files(path, visited)
        elif path.is_file():
            yield path
        else:  # a dangling link, a socket, a pipe that would block
            raise InputError(f"{path}: neither a file nor a folder: remove it or mend the link")


def _hub(source: str) -> Iterator[str]:
    parts = source.split(":", 4)[1:]
    name, config, split, field = parts + [""] * (4 - len(parts))
    if not name:
        raise InputError(f"{source}: no data set named: give hf:name:config:split:field")
    datasets = package("datasets", "a hub data set")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or DEFAULT_SPLIT, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield _text(row, field or DEFAULT_FIELD, f"{source}, record {number}")
    except InputError:
        raise
    except Exception as error:  # the library raises nearly anything, its loaders and network too
        raise InputError(
            f"{source}: {type(error).__name__}: {_one_line(error)}: check the parts of "
            "hf:name:config:split:field and the connection"
        ) from error


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    _require(field, record, where)
    if not isinstance(record[field], str):
        raise InputError(
            f"{where}: field {field!r} is {_kind(record[field])}, not a string: "
            "name another field after a colon, or leave out such records"
        )
    return record[field]


def _require(field: str, names: Iterable[str], where: str) -> None:
    names = list(names)
    if field not in names:
        raise InputError(
            f"{where}: no field {field!r}; there are: {_one_line(', '.join(names)) or 'none'}. "
            "Name the one that holds the text after a colon at the source's end"
        )


def _decode(raw: bytes, where: str, *, first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: not UTF-8 text (byte 0x{raw[error.start]:02x}): convert the file to UTF-8"
        ) from error


def _well_formed(text: str) -> str:
    """JSON escapes and Python strings may hold lone surrogates, which no tokenizer takes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}: check the path and its permissions") from error


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _one_line(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3].rstrip() + "..."
