"""Run the command line in this process, and small texts for it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from csprune import cli

PROGRESS = re.compile(
    r"^(Loading|Reading|Taking|Calibrating|Evaluating|Analysing|Decomposing|Differentiating|Checking|Resampling|Drawing|"
    r"Scoring|Pairing|Writing) "
)


@dataclass
class Run:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The one line of an error; everything before it is progress."""
        *before, last = self.err.splitlines()
        assert all(PROGRESS.match(line) for line in before if line.strip()), self.err
        assert last.startswith("Error: "), self.err
        assert self.out == ""
        return last


def csprune_command(*arguments: str | Path) -> Run:
    """`csprune ARGUMENTS` in this process, by the same function as the console script."""
    out, err = io.StringIO(), io.StringIO()
    argv, term = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["csprune", *map(str, arguments)]
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            cli.main()
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, term)
    return Run(int(end.value.code or 0), out.getvalue(), err.getvalue())


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path
