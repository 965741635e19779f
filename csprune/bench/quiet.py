"""Keep another library's log, progress bars and prints from the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval's log, progress bars and prints, and those of what it uses, from the terminal; not errors.

    Its bootstrap stays in this process meanwhile: torch's threads do not survive a fork.
    """
    import tqdm.std

    bars: Any = tqdm.std.tqdm  # every kind of bar is made by its __init__, and it has no switch
    make_bar, multiprocessing = bars.__init__, os.environ.get("DISABLE_MULTIPROC")
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        bars.__init__ = lambda bar, *args, **options: make_bar(bar, *args, **{**options, "disable": True})
        os.environ["DISABLE_MULTIPROC"] = "1"
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        bars.__init__ = make_bar
        if multiprocessing is None:
            os.environ.pop("DISABLE_MULTIPROC", None)
        else:
            os.environ["DISABLE_MULTIPROC"] = multiprocessing
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


@contextlib.contextmanager
def without_git(evaluator: Any) -> Iterator[None]:
    """Keep lm-eval from asking git for the commit of its folder: git complains where there is none."""
    asking = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = asking
