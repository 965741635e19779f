"""The command line: parse, call one job, print."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console

from csprune import jobs
from csprune.bench.job import bench_job
from csprune.bench.tables import bench_table
from csprune.errors import CspruneError, InputError
from csprune.export import FORMATS
from csprune.models import DTYPES
from csprune.options import (
    LARGEST_SEED,
    PATH,
    calibration_options,
    count,
    evaluation_options,
    methods_option,
    model_options,
)
from csprune.settings import Settings
from csprune.terminal import Terminal, print_result, print_sizes
from csprune.truncation import canonical_method


class _Commands(click.Group):
    """Commands, of which an unknown one is answered with those that exist."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. Choose from: {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


# Without no_args_is_help=False a bare `csprune` would be a usage error of many lines.
@click.group(
    cls=_Commands,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  csprune compress MODEL --rank 0.2 --method fisher",
)
@click.version_option(package_name="csprune", message="%(prog)s %(version)s")
def cli() -> None:
    """Compress a language model's head by what matters least to its predictions.

    MODEL is a local folder, a hub id, or demo (see `python -m csprune.demo`).
    """


@cli.command(
    epilog="\b\nExamples:\n"
    "  csprune compress demo --rank 0.2 --method fisher\n"
    "  csprune compress ./my-model --rank 0.1 --method whitened --data corpus.jsonl -o small"
)
@model_options
@click.option(
    "--rank",
    "ranks",
    type=float,
    metavar="FRACTION",
    multiple=True,
    required=True,
    help="Fraction of the head's directions to remove.",
)
@methods_option("How the directions are chosen.", required=True)
@click.option(
    "-o", "--output", type=PATH, metavar="OUT", help="Folder to write.  [default: ./MODEL-METHOD-RANK]"
)
@calibration_options
@evaluation_options
@click.option(
    "--export",
    "export_format",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    show_default=True,
    help="How the truncated head is stored.",
)
def compress(
    ranks: Sequence[float],
    methods: Sequence[str],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    export_format: str,
    **options: Any,
) -> None:
    """Truncate MODEL's head, measure what it costs, and write the checkpoint to OUT."""
    if len(ranks) != 1 or len(methods) != 1:
        raise InputError(
            "compress writes one checkpoint: give one --rank and one --method (evaluate compares several)"
        )
    settings = Settings(**options)
    method = canonical_method(methods[0])
    output = output or Path(f"{_base_name(settings.model)}-{method}-{ranks[0]:g}")
    result = jobs.compress_job(settings, method, ranks[0], output, export_format, overwrite, Terminal())
    print_result(result, as_json)
    if not as_json:
        print_sizes(result.details, output)


def _base_name(model: str) -> str:
    """The last part of a hub id or of a folder's real path (`.` and `..` name nothing)."""
    return Path(model).name if Path(model).name not in ("", "..") else Path(model).resolve().name


@cli.command(
    epilog="\b\nExamples:\n"
    "  csprune calibrate demo --data demo -o demo.safetensors\n"
    "  csprune compress demo --rank 0.2 --method fisher --calibration demo.safetensors"
)
@model_options
@calibration_options
@click.option(
    "-o", "--output", type=PATH, metavar="FILE", required=True, help="The .safetensors file to write."
)
def calibrate(output: Path, **options: Any) -> None:
    """Accumulate MODEL's statistics over text and save them in FILE.

    A long run that is interrupted leaves FILE.partial; the same command resumes it.
    """
    calibration, notes = jobs.calibrate_job(Settings(**options), output, Terminal())
    click.echo(
        f"{output}: {calibration.details['tokens']:,} tokens of {len(calibration.documents)} documents, "
        f"{calibration.width} directions"
    )
    for note in notes:
        click.echo(note)


@cli.command(
    epilog="\b\nExamples:\n"
    "  csprune evaluate demo --rank 0.05 --rank 0.2 --data demo -o report\n"
    "  csprune evaluate ./my-model ./smaller --data corpus.jsonl -o report"
)
@model_options
@click.argument("outputs", metavar="[OUT]...", nargs=-1)
@click.option(
    "--rank",
    "ranks",
    type=float,
    metavar="FRACTION",
    multiple=True,
    help="Fraction of the head's directions to remove; repeat for several.  [default: 0.05, 0.1, 0.2]",
)
@methods_option("Repeat for several; random always stands beside them.  [default: all]")
@click.option(
    "-o", "--output", type=PATH, metavar="DIR", required=True, help="Folder to write the report into."
)
@calibration_options
@evaluation_options
def evaluate(
    outputs: Sequence[str],
    ranks: Sequence[float],
    methods: Sequence[str],
    output: Path,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare truncations of MODEL on held-out text, without writing a checkpoint.

    Each OUT, a checkpoint that compress made from MODEL, is measured as it loads, beside the same truncation
    in memory. Then no others but random ones are evaluated, unless --rank or --method asks for them.
    """
    settings = Settings(**options)
    result = jobs.evaluate_job(
        settings, list(methods), list(ranks), list(outputs), output, overwrite, Terminal()
    )
    print_result(result, as_json)
    if not as_json:
        click.echo(f"\nWritten to {output}: look at report.html; the figures are in report.json")


@cli.command(
    epilog="\b\nExamples:\n  csprune report report\n  csprune report small-model large-model -o comparison",
)
@click.argument("reports", metavar="DIR...", nargs=-1, required=True)
@click.option(
    "-o", "--output", type=PATH, metavar="OUT", help="Folder to write.  [default: DIR, where it is one]"
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier page.")
def report(reports: Sequence[str], output: Path | None, overwrite: bool) -> None:
    """Redo the page, the summary and the pictures of reports from their files alone.

    DIR is a folder that evaluate or compress wrote; several are compared on one page.
    """
    *_, page = jobs.report_job(list(reports), output, overwrite, Terminal())
    click.echo(f"Written to {page.parent}: look at {page.name}")


@cli.command(
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


def main() -> None:
    """Run the command line; errors are one line on stderr, and an exit status of 2 or 1."""
    _quiet()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing half-written stays
    try:
        status = cli.main(prog_name="csprune", standalone_mode=False)
    except CspruneError as error:
        status = _fail(str(error), error.exit_status)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "csprune"
        status = _fail(f"{error.format_message()} (see {command} --help)", 2)
    except click.ClickException as error:
        status = _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        status = _fail("interrupted; nothing half-written was left", 1)
    except (torch.OutOfMemoryError, MemoryError):
        status = _fail("out of memory: give a smaller --batch-size or --dtype, or another --device", 1)
    except OSError as error:
        status = _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
    sys.exit(status or 0)


def _fail(message: str, status: int) -> int:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    return status


def _quiet() -> None:
    """Leave stderr to our own progress and errors."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # datasets reads this when a hub data set first needs it.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
