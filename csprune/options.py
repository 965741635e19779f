"""The options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from csprune.calibration import BATCH_SIZE, POSITIONS
from csprune.evaluation import RANDOM_SUBSPACES
from csprune.models import DTYPES
from csprune.settings import PROTOCOLS
from csprune.truncation import ALIASES, STRATEGIES

PATH = click.Path(path_type=Path)
LARGEST_SEED = 2**32 - 1


def options(*decorators: Callable) -> Callable:
    """Several decorators as one."""

    def apply(function: Callable) -> Callable:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def count(name: str, least: int, text: str, **settings: Any) -> Callable:
    """An option for a number that is at least so much."""
    return click.option(name, type=click.IntRange(min=least), metavar="N", help=text, **settings)


def methods_option(text: str, **settings: Any) -> Callable:
    """The option --method."""
    names = ", ".join([*STRATEGIES, *(f"{alias} (= {method})" for alias, method in ALIASES.items())])
    return click.option(
        "--method",
        "methods",
        type=click.Choice([*STRATEGIES, *ALIASES]),
        metavar="METHOD",
        multiple=True,
        help=f"{text} One of {names}.",
        **settings,
    )


model_options = options(
    click.argument("model"),
    click.option("--revision", metavar="NAME", help="Branch, tag or commit of a hub repository."),
    click.option(
        "--dtype",
        type=click.Choice(list(DTYPES)),
        help="Of the model's body; norm and head are always recomputed in float32.  [default: float32]",
    ),
    click.option("--device", metavar="NAME", help="A torch device, such as cuda.  [default: cpu]"),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint."),
    count("--batch-size", 1, "Documents run at once.", default=BATCH_SIZE, show_default=True),
)
text_options = options(
    click.option(
        "--data",
        metavar="TEXT",
        help="demo, FILE.txt, FILE.jsonl[:FIELD], FILE.parquet[:FIELD], a folder, or "
        "hf:NAME:CONFIG:SPLIT:FIELD. Each document goes to calibration or evaluation by its hash. "
        "All but calibrate use demo where no text is named.",
    ),
    click.option(
        "--calibration-data", metavar="TEXT", help="Text to calibrate on, whole, instead of a part of --data."
    ),
    click.option(
        "--protocol",
        type=click.Choice(list(PROTOCOLS)),
        default="quick",
        show_default=True,
        help="quick: 128 + 128 documents; paper: 512 + 1024. Truncations are measured at all positions under "
        "quick, at the last one under paper.",
    ),
    count("--documents", 2, "Calibration documents, at most; the protocol decides by default."),
    count("--sequence-length", 1, "Tokens of each document.  [default: 128]"),
)
calibration_options = options(
    text_options,
    click.option(
        "--positions",
        type=click.Choice(POSITIONS),
        help="Where predictions are taken; the protocol decides by default.",
    ),
    count("--skip-first", 0, "Positions left out at each document's beginning.  [default: 0]"),
)
held_out_options = options(
    click.option(
        "--evaluation-data", metavar="TEXT", help="Text to evaluate on, whole, instead of a part of --data."
    ),
    count("--evaluation-documents", 2, "Evaluation documents, at most; the protocol decides by default."),
)
random_options = options(
    click.option(
        "--seed",
        type=click.IntRange(0, LARGEST_SEED),
        metavar="N",
        default=0,
        show_default=True,
        help="Of random subspaces and resampling.",
    ),
    count(
        "--random-subspaces",
        1,
        "Random subspaces that each figure stands beside.",
        default=RANDOM_SUBSPACES,
        show_default=True,
    ),
)
result_options = options(
    click.option("--overwrite", is_flag=True, help="Replace an earlier output."),
    click.option("--json", "as_json", is_flag=True, help="Print the report alone, as JSON."),
)
evaluation_options = options(
    held_out_options,
    click.option(
        "--calibration",
        type=PATH,
        metavar="FILE",
        help="Made by `csprune calibrate`, instead of calibration text.",
    ),
    random_options,
    result_options,
)
