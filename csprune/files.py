"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from csprune.errors import InputError


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


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling folder that becomes `path` if the block ends well.

    A lock file beside it keeps two runs from writing the same folder, and tells what a killed run left:
    whatever is there while the lock is free is stale, and removed. A folder that is there already is moved
    aside only once the new one is complete, and put back if the run is killed between the two renames.

    Raises:
        InputError: The parent cannot be written, or another run is writing this folder.
    """
    path = path.absolute()
    lock = FileLock(path.parent / f"{_prefix(path)}lock", timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InputError(f"another run is writing {path}: wait for it, or choose another -o") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): choose another -o") from error
    try:
        _clean(path)
        temporary = Path(tempfile.mkdtemp(prefix=f"{_prefix(path)}new-", dir=path.parent))
        try:
            yield temporary
            temporary.chmod(0o777 & ~_umask())
            if path.exists():
                path.rename(_old(path))
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            _clean(path)
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _clean(path: Path) -> None:
    """Remove what killed runs left, and undo a replacement killed between its two renames."""
    old = _old(path)
    if old.exists() and not path.exists():
        old.rename(path)
    for left in path.parent.glob(f"{_prefix(path)}new-*"):
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _prefix(path: Path) -> str:
    return f".{path.name}.csprune-"


def _old(path: Path) -> Path:
    return path.parent / f"{_prefix(path)}old"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
