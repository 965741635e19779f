"""The command that scores: bench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from csprune.bench.job import bench_job
from csprune.bench.tables import bench_table
from csprune.models import DTYPES
from csprune.options import LARGEST_SEED, PATH, count
from csprune.terminal import Terminal


@click.command(
    epilog="\b\nExamples:\n"
    "  csprune bench demo ./smaller --tasks csprune_agreement --include-path benchmarks/tasks -o scores\n"
    "  csprune bench ./my-model ./smaller --tasks lambada_openai,piqa --limit 500 -o scores",
)
@click.argument("model")
@click.argument("outputs", metavar="OUT...", nargs=-1, required=True)
@click.option(
    "--tasks",
    metavar="TASK,...",
    multiple=True,
    required=True,
    help="Tasks, groups and tags of lm-evaluation-harness; * and ? stand for anything.",
)
@click.option(
    "--include-path",
    type=PATH,
    metavar="DIR",
    help="A folder of task files of your own, looked through first.",
)
@count("--limit", 2, "The first items of each task only (of each task in a group).")
@count("--num-fewshot", 0, "Solved items shown before each one.  [default: the task's own]")
@count("--batch-size", 1, "Requests at a time.", default=1, show_default=True)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="Of the models.  [default: the checkpoints' own]"
)
@click.option("--device", metavar="NAME", help="A torch device.  [default: cuda where there is one]")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of MODEL's hub repository.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with a checkpoint.")
@click.option(
    "--seed",
    type=click.IntRange(0, LARGEST_SEED),
    metavar="N",
    help="Of lm-eval and of resampling.  [default: lm-eval's own, and 0]",
)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="DIR",
    help="Folder to write the scores, their picture and every item into.  [default: none, they are shown]",
)
@click.option("--overwrite", is_flag=True, help="Replace earlier scores.")
@click.option("--json", "as_json", is_flag=True, help="Print the report alone, as JSON.")
def bench(
    model: str,
    outputs: Sequence[str],
    tasks: Sequence[str],
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Score MODEL and truncated checkpoints with lm-evaluation-harness, and compare them item by item.

    The scores are those of `lm_eval --model hf --model_args pretrained=OUT,trust_remote_code=True`; added are
    the paired differences to MODEL with their standard errors.
    """
    report = bench_job(model, outputs, tasks, output, Terminal(), **options)
    if as_json:
        click.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        Console().print(bench_table(report))
        if output is not None:
            click.echo(f"\nWritten to {output}: bench.json, bench.md, bench.svg and .png, items.parquet")
