"""The commands that truncate and measure: compress, calibrate, evaluate, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from csprune import jobs
from csprune.analysis.files import kinds_in
from csprune.analysis.job import redo_pages
from csprune.errors import InputError
from csprune.export import FORMATS
from csprune.options import (
    PATH,
    calibration_options,
    evaluation_options,
    methods_option,
    model_options,
)
from csprune.settings import Settings
from csprune.terminal import Terminal, print_result, print_sizes
from csprune.truncation import canonical_method


@click.command(
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


@click.command(
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


@click.command(
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


@click.command(
    epilog="\b\nExamples:\n  csprune report report\n  csprune report small-model large-model -o comparison",
)
@click.argument("reports", metavar="DIR...", nargs=-1, required=True)
@click.option(
    "-o", "--output", type=PATH, metavar="OUT", help="Folder to write.  [default: DIR, where it is one]"
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier page.")
def report(reports: Sequence[str], output: Path | None, overwrite: bool) -> None:
    """Redo the page, the summary and the pictures of reports from their files alone.

    DIR is a folder that evaluate, compress, spectrum or analyze wrote; several of evaluate and compress are
    compared on one page.
    """
    studies = [each for each in reports if kinds_in(Path(each).expanduser())]
    if studies and (output is not None or len(reports) > 1):
        raise InputError(
            f"{studies[0]} was written by spectrum or analyze: give it alone and no -o, for only reports of "
            "truncations are compared"
        )
    if studies:
        pages = redo_pages(Path(studies[0]).expanduser(), Terminal())
        for page in pages:
            click.echo(f"Written to {page.parent}: look at {page.name}")
        return
    *_, page = jobs.report_job(list(reports), output, overwrite, Terminal())
    click.echo(f"Written to {page.parent}: look at {page.name}")
