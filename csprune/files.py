"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from csprune.errors import CspruneError, InputError


def check_replaceable(
    directory: Path, names: Iterable[str], ours: Callable[[Path], bool], what: str, overwrite: bool
) -> None:
    """Refuse to replace files in a folder, unless they are an earlier output that may be overwritten.

    Args:
        directory: The folder; it may not exist.
        names: What would be written there.
        ours: Whether what is in the folder is an output of the kind.
        what: The kind of output, for messages.
        overwrite: Whether an earlier one may be replaced.

    Raises:
        InputError: Something of these names is there, and is not ours or not to be replaced.
    """
    there = [name for name in names if (directory / name).exists()]
    if not there:
        return
    if not ours(directory):
        raise InputError(f"{directory / there[0]} is not a {what} of csprune's: choose another -o")
    if not overwrite:
        raise InputError(f"{directory} holds a {what} already: choose another -o, or add --overwrite")


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary sibling that takes the place of `path` if the block ends well.

    Raises:
        InputError: The folder does not exist or cannot be written.
    """
    path = Path(path)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): choose another path") from error
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_files(directory: Path, files: Mapping[str, bytes | Callable[[Path], object]], what: str) -> None:
    """Write an output of several files into a folder, which is made if need be.

    Each file appears whole or not at all, in the order given. The last one vouches for the others: an earlier
    one goes first, so that where it stands, those beside it are its own.

    Args:
        directory: The folder.
        files: By name (with subfolders), what each has, or what writes it to a path.
        what: The kind of output, for messages.

    Raises:
        CspruneError: They cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / list(files)[-1]).unlink(missing_ok=True)
        for name, content in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(directory / name) as path:
                if isinstance(content, bytes):
                    path.write_bytes(content)
                else:
                    content(path)
    except OSError as error:
        raise CspruneError(
            f"the {what} cannot be written to {directory} ({error.strerror or error}): "
            "give another folder or make room there"
        ) from error


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling folder that becomes `path` if the block ends well.

    A lock file beside it keeps two runs from writing the same folder, and tells what a killed run left:
    whatever is there while the lock is free is stale, and removed. A folder that is there already is moved
    aside only once the new one is complete, and put back if the run is killed between the two renames.

    Raises:
        InputError: The parent cannot be written, or another run is writing this folder.
        CspruneError: Writing failed, on a full disk for instance; nothing was kept.
    """
    path = path.resolve()  # a link's target is replaced, not the link
    lock = FileLock(_sibling(path, "lock"), timeout=0)
    new = _sibling(path, "new")
    try:
        with _uninterrupted():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire()
                _clean(path)
                new.mkdir()
            except Timeout:
                raise InputError(
                    f"another run is writing {path}: wait for it, or choose another -o"
                ) from None
            except OSError as error:
                raise InputError(f"{path} cannot be written ({error.strerror}): choose another -o") from error
        try:
            yield new
            with _uninterrupted():
                if path.exists():
                    path.rename(_sibling(path, "old"))
                new.rename(path)
        except OSError as error:
            raise CspruneError(
                f"{path} could not be written ({error}); nothing was kept: free some space or choose "
                "another -o"
            ) from error
    finally:
        if lock.is_locked:
            with _uninterrupted():
                _clean(path)
                Path(lock.lock_file).unlink(missing_ok=True)
                lock.release()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C, a second one too, waits for the end of the block: nobody tidies up after it."""
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread alone
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


def _clean(path: Path) -> None:
    """Remove what is not finished, and undo a replacement that stopped between its two renames."""
    old = _sibling(path, "old")
    if old.exists() and not path.exists():
        old.rename(path)
    for left in (old, _sibling(path, "new")):
        shutil.rmtree(left, ignore_errors=True)


def _sibling(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.csprune-{what}"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
