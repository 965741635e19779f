"""Files and folders appear whole or not at all, whoever interrupts."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from csprune.errors import CspruneError, InputError
from csprune.files import atomic_file, atomic_folder, write_files


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_folder_appears_whole(tmp_path: Path):
    out = tmp_path / "deep" / "out"
    with atomic_folder(out) as folder:
        (folder / "a").write_text("1")
        assert not out.exists()
        assert folder.parent == out.parent  # a rename must not cross file systems
    assert _names(out) == ["a"] and _names(out.parent) == ["out"]
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, CspruneError])
@pytest.mark.parametrize("old", [False, True])
def test_an_error_leaves_what_there_was(tmp_path: Path, error: type[BaseException], old: bool):
    out = tmp_path / "out"
    if old:
        out.mkdir()
        (out / "old").touch()
    with pytest.raises(error), atomic_folder(out) as folder:
        (folder / "a").write_text("1")
        raise error
    assert _names(tmp_path) == (["out"] if old else [])
    assert not old or _names(out) == ["old"]


def test_a_full_disk_is_one_line(tmp_path: Path):
    with pytest.raises(CspruneError) as caught, atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        raise OSError(errno.ENOSPC, "No space left on device")
    message = str(caught.value)
    assert "No space left" in message and str(tmp_path / "out") in message and "\n" not in message
    assert _names(tmp_path) == []


def test_replacing_is_undone_if_the_last_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    rename, calls = Path.rename, []

    def fail_once(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == 2:  # the old one is aside, the new one not yet in place
            assert not out.exists()
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(CspruneError, match="Input/output"), atomic_folder(out) as folder:
        (folder / "new").touch()
    assert _names(out) == ["old"] and _names(tmp_path) == ["out"]


_KILLED_BETWEEN = """
import os, signal, sys
from pathlib import Path
from csprune.files import atomic_folder
rename, calls = Path.rename, []
def kill_second(self, target):
    calls.append(self)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = kill_second
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "new").touch()
"""


def test_killed_between_the_renames_the_old_one_comes_back(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    # The module alone, without the package's imports.
    code = _KILLED_BETWEEN.replace("from csprune.files", "from files")
    stub = tmp_path / "stub"
    stub.mkdir()
    text = Path(sys.modules["csprune.files"].__file__ or "").read_text().replace("csprune.errors", "errors")
    (stub / "files.py").write_text(text)
    (stub / "errors.py").write_text(Path(sys.modules["csprune.errors"].__file__ or "").read_text())
    environment = {**os.environ, "PYTHONPATH": str(stub)}
    done = subprocess.run([sys.executable, "-c", code, str(out)], env=environment, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert not out.exists() and len(_names(tmp_path)) > 2  # the lock, the old one, the new one
    with pytest.raises(InputError), atomic_folder(out):
        assert _names(out) == ["old"]  # the next run puts it back before anything else
        raise InputError("refused")
    assert _names(tmp_path) == ["out", "stub"]


def test_what_a_killed_run_left_is_removed(tmp_path: Path):
    (tmp_path / ".out.csprune-new").mkdir()
    (tmp_path / ".out.csprune-new" / "stale").touch()
    (tmp_path / ".out.csprune-old").mkdir()
    (tmp_path / ".out.csprune-lock").touch()
    (tmp_path / ".other.csprune-new").mkdir()  # another output's, perhaps being written
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert _names(tmp_path / "out") == ["a"]
    assert _names(tmp_path) == [".other.csprune-new", "out"]


def test_ctrl_c_while_tidying_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An impatient second Ctrl-C must not leave half of what the first one was clearing away."""
    rmtree, interrupted = shutil.rmtree, []

    def interrupt(*args: Any, **options: Any) -> None:
        interrupted.append(signal.raise_signal(signal.SIGINT))
        rmtree(*args, **options)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
        monkeypatch.setattr("csprune.files.shutil.rmtree", interrupt)
        raise KeyboardInterrupt
    assert interrupted and _names(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is handler


def test_in_another_thread(tmp_path: Path):
    """Where Python has no say over signals."""

    def write() -> None:
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "a").touch()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert _names(tmp_path / "out") == ["a"] and _names(tmp_path) == ["out"]


def test_two_runs_at_once(tmp_path: Path):
    out = tmp_path / "out"
    with atomic_folder(out) as first:
        (first / "first").touch()
        with pytest.raises(InputError, match="another run is writing"), atomic_folder(out):
            pytest.fail("the second run must not start")
        with atomic_folder(tmp_path / "out2"):
            pass  # another output is nobody's business
        assert _names(first) == ["first"]
    assert _names(out) == ["first"]


def test_a_link_is_followed(tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "out").symlink_to(target)
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert (tmp_path / "out").is_symlink() and _names(target) == ["a"]
    assert _names(tmp_path) == ["out", "target"]


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="choose another"), atomic_folder(tmp_path / "file" / "out"):
        pytest.fail("there is no such place")
    with pytest.raises(InputError, match="choose another"), atomic_file(tmp_path / "none" / "x"):
        pytest.fail("there is no such place")

    def denied(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(InputError, match="Permission denied"), atomic_folder(tmp_path / "out"):
        pytest.fail("the parent cannot be written")
    assert _names(tmp_path) == ["file"]


def test_a_file_appears_whole(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and _names(tmp_path) == ["x.json"]
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and _names(tmp_path) == ["x.json"]


def test_several_files_are_whole_and_the_last_one_vouches_for_them(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("values")

    files = {"values.txt": write, "pictures/a.svg": b"picture", "report.json": b"report"}
    write_files(tmp_path / "out", files, "report")
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == {
        "values.txt": "values",
        "pictures/a.svg": "picture",
        "report.json": "report",
    }

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CspruneError, match=r"the report cannot be written to .*out \(No space"):
        write_files(tmp_path / "out", {"values.txt": fail, "report.json": b"new"}, "report")
    # The earlier values stand, but nothing vouches for what was being replaced; no temporary file stays.
    assert (tmp_path / "out/values.txt").read_text() == "values"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["pictures", "values.txt"]
