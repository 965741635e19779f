"""The commands that study a model: spectrum, analyze, subspace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from csprune.analysis.catalogue import ANALYSES, SPECTRUM, summary
from csprune.analysis.job import Found, analyze_job, spectrum_job
from csprune.analysis.study import BANDS
from csprune.analysis.taking import DEMO_CODE, StudySettings
from csprune.options import (
    PATH,
    calibration_options,
    count,
    held_out_options,
    model_options,
    options,
    random_options,
    result_options,
    text_options,
)
from csprune.predictive.job import SHARE, subspace_job
from csprune.predictive.subspaces import SITES
from csprune.results_table import results_table
from csprune.settings import Settings
from csprune.terminal import Terminal

_study_options = options(
    model_options,
    click.option(
        "-o", "--output", type=PATH, metavar="DIR", required=True, help="Folder to write the report into."
    ),
    text_options,
    held_out_options,
    count("--position", 1, "The token of each document whose state is studied.  [default: the last]"),
    count("--bands", 2, "Bands of the spectrum.", default=BANDS, show_default=True),
    random_options,
    result_options,
)


@click.command(
    epilog="\b\nExamples:\n"
    "  csprune spectrum demo -o spectrum\n"
    "  csprune spectrum ./my-model --data corpus.jsonl --protocol paper -o spectrum"
)
@_study_options
def spectrum(
    output: Path, overwrite: bool, as_json: bool, position: int | None, bands: int, **options: Any
) -> None:
    """Measure what changes along MODEL's singular directions do to its predictions.

    The consequence spectrum (prediction change per unit of logit distance, band by band, relative to random
    changes), the bottom band at equal length, and the singular values.
    """
    study = StudySettings(position=position, bands=bands)
    found = spectrum_job(Settings(**options), study, output, overwrite, Terminal())
    _print(found, output, as_json)


def _show_list(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    longest = max(map(len, [*ANALYSES, *SPECTRUM]))
    for name, analysis in ANALYSES.items():
        click.echo(f"{name:<{longest}}  {summary(analysis)}")
    click.echo("\nThese belong to csprune spectrum, and can be asked for too:")
    for name, analysis in SPECTRUM.items():
        click.echo(f"{name:<{longest}}  {summary(analysis)}")
    ctx.exit()


@click.command(
    epilog="\b\nExamples:\n"
    "  csprune analyze demo -o analysis\n"
    "  csprune analyze ./my-model --what contrast-share,chain-rule --data corpus.jsonl -o analysis"
)
@click.option(
    "--list",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_list,
    help="Show the analyses and exit.",
)
@_study_options
@click.option(
    "--what",
    metavar="NAME,...",
    multiple=True,
    help="Analyses to do, separated by commas; repeat for several.  [default: all that --list shows first]",
)
@click.option(
    "--code",
    metavar="TEXT",
    default=DEMO_CODE,
    show_default=True,
    help="Text of code, for the conditions: as --data, or demo-code, Python's standard library.",
)
@click.option(
    "--instruct",
    metavar="MODEL",
    help="The instruction-tuned model of a base MODEL (or the other way round), for the conditions.",
)
def analyze(
    output: Path,
    overwrite: bool,
    as_json: bool,
    position: int | None,
    bands: int,
    what: Sequence[str],
    code: str,
    instruct: str | None,
    **options: Any,
) -> None:
    """Redo the paper's further analyses of MODEL's unembedding."""
    names = [name.strip() for each in what for name in each.split(",")]
    study = StudySettings(position, bands, names, code, instruct)
    found = analyze_job(Settings(**options), study, output, overwrite, Terminal())
    _print(found, output, as_json)


def _print(found: Found, output: Path, as_json: bool) -> None:
    kind = found.report["kind"]
    if as_json:
        whole = {**found.report, "results": [each.describe() for each in found.results]}
        click.echo(json.dumps(whole, indent=2, allow_nan=False))
    else:
        Console().print(results_table(found.results, found.heading))
        click.echo(f"\nWritten to {output}: look at {kind}.html; the figures are in {kind}.json")
    for note in found.notes:
        click.echo(note, err=as_json)


@click.command(
    epilog="\b\nExamples:\n"
    "  csprune subspace demo --site mlp_in\n"
    "  csprune subspace ./my-model --site final --site post --share 0.999 -o subspaces"
)
@model_options
@click.option(
    "--site",
    "sites",
    type=click.Choice(list(SITES)),
    multiple=True,
    help="Where in the last layers; repeat for several.  [default: all]",
)
@click.option(
    "--share",
    type=float,
    metavar="FRACTION",
    default=SHARE,
    show_default=True,
    help="Of the sum of eigenvalues that the subspace's dimension is to hold.",
)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="DIR",
    help="Folder to write the bases and figures into.  [default: none, they are shown]",
)
@calibration_options
@result_options
def subspace(
    sites: Sequence[str],
    share: float,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the subspace of MODEL's activations that its prediction reads, and check it.

    At the logits, the final norm's output and its input, what the last MLP writes and what it reads: the
    predictive subspace, its dimension, and what changes orthogonal to it do to the prediction.
    """
    found = subspace_job(Settings(**options), sites, share, output, overwrite, Terminal())
    if as_json:
        click.echo(json.dumps(found.result.describe(), indent=2, allow_nan=False))
    else:
        Console().print(results_table([found.result], found.heading))
        if output is not None:
            click.echo(f"\nWritten to {output}: look at subspace.html; the bases are in subspace.safetensors")
    for note in found.notes:
        click.echo(note, err=as_json)
