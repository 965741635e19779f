"""The command line: parse, call one job, print."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from csprune import jobs
from csprune.calibration import BATCH_SIZE, POSITIONS
from csprune.errors import CspruneError, InputError
from csprune.evaluation import RANDOM_SUBSPACES
from csprune.export import FORMATS
from csprune.models import DTYPES
from csprune.tables import table
from csprune.truncation import ALIASES, STRATEGIES, canonical_method

DEFAULT_RANKS = (0.05, 0.1, 0.2)
_EXISTING_FILE = click.Path(path_type=Path)
_METHODS = [*STRATEGIES, *ALIASES]


class _Rate(ProgressColumn):
    """Tokens a second."""

    def render(self, task: Task) -> Text:
        tokens = task.fields["tokens"]
        if tokens == 1 or not task.speed:
            return Text("")
        return Text(f"{task.speed * tokens:,.0f} tokens/s")


class Terminal:
    """Progress bars on stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)

    @contextmanager
    def stage(self, what: str, tokens: int = 1) -> Iterator[Callable[[int, int], None]]:
        """One bar; it stays when it is done."""
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(24),
            MofNCompleteColumn(),
            _Rate(),
        )
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as progress:
            task = progress.add_task(what, total=None, tokens=tokens)

            def step(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            yield step
            total = progress.tasks[0].total or 1
            progress.update(task, completed=progress.tasks[0].completed or total, total=total)


def _options(*decorators: Callable) -> Callable:
    def apply(function: Callable) -> Callable:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


_model_options = _options(
    click.argument("model"),
    click.option("--revision", help="Revision of a hub repository."),
    click.option(
        "--dtype",
        type=click.Choice(list(DTYPES)),
        help="Of the model's body; norm and head are always recomputed in float32.  [default: float32]",
    ),
    click.option("--device", help="A torch device, such as cuda.  [default: cpu]"),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint."),
    click.option("--batch-size", default=BATCH_SIZE, show_default=True, help="Documents run at once."),
)
_calibration_options = _options(
    click.option(
        "--data",
        help="Text: demo, FILE.txt, FILE.jsonl[:FIELD], FILE.parquet[:FIELD], a folder, or "
        "hf:NAME:CONFIG:SPLIT:FIELD. Each document goes to calibration or evaluation by its hash.",
    ),
    click.option("--calibration-data", help="Calibration text, used whole instead of a part of --data."),
    click.option(
        "--protocol",
        type=click.Choice(list(jobs.PROTOCOLS)),
        default="quick",
        show_default=True,
        help="quick: 128 + 128 documents, all positions; paper: 512 + 1024, last position.",
    ),
    click.option("--documents", type=click.IntRange(min=2), help="Calibration documents, at most."),
    click.option(
        "--sequence-length",
        type=click.IntRange(min=1),
        help="Tokens of each document.  [default: 128]",
    ),
    click.option(
        "--positions",
        type=click.Choice(POSITIONS),
        help="Where predictions are taken; the protocol decides by default.",
    ),
    click.option(
        "--skip-first",
        type=click.IntRange(min=0),
        help="Positions left out at each document's beginning.  [default: 0]",
    ),
)
_evaluation_options = _options(
    click.option("--evaluation-data", help="Evaluation text, used whole instead of a part of --data."),
    click.option("--evaluation-documents", type=click.IntRange(min=2), help="Evaluation documents, at most."),
    click.option(
        "--calibration",
        type=_EXISTING_FILE,
        help="A file made by `csprune calibrate`, instead of text.",
    ),
    click.option("--seed", default=0, show_default=True, help="Of random subspaces and resampling."),
    click.option(
        "--random-subspaces",
        type=click.IntRange(min=1),
        default=RANDOM_SUBSPACES,
        show_default=True,
        help="Random subspaces that each figure stands beside.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace an earlier output."),
    click.option("--json", "as_json", is_flag=True, help="Print the report alone, as JSON."),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="csprune", message="%(prog)s %(version)s")
def cli() -> None:
    r"""Compress a language model's head by what matters least to its predictions.

    \b
    csprune compress MODEL --rank 0.2 --method fisher

    MODEL is a local folder, a hub id, or demo (see `python -m csprune.demo`).
    """


@cli.command()
@_model_options
@click.option(
    "--rank",
    "ranks",
    type=float,
    multiple=True,
    required=True,
    help="Fraction of directions to remove.",
)
@click.option(
    "--method",
    "methods",
    type=click.Choice(_METHODS),
    multiple=True,
    required=True,
    help="How they are chosen.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder to write.  [default: ./MODEL-METHOD-RANK]",
)
@_calibration_options
@_evaluation_options
@click.option("--export", "export_format", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True)
def compress(
    ranks: Sequence[float],
    methods: Sequence[str],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    export_format: str,
    **options: Any,
) -> None:
    r"""Truncate MODEL's head, measure what it costs, and write the checkpoint.

    \b
    csprune compress demo --rank 0.2 --method fisher
    csprune compress ./my-model --rank 0.1 --method fisher-whitened --data corpus.jsonl -o small
    """
    if len(ranks) != 1 or len(methods) != 1:
        raise InputError(
            "compress writes one checkpoint: give one --rank and one --method (evaluate compares several)"
        )
    settings = jobs.Settings(**options)
    method = canonical_method(methods[0])
    if output is None:
        name = Path(settings.model.rstrip("/")).name or Path(settings.model).resolve().name
        output = Path(f"{name}-{method}-{ranks[0]:g}")
    result = jobs.compress_job(settings, method, ranks[0], output, overwrite, Terminal())
    _print(result, as_json)
    if not as_json:
        _print_sizes(result.details, output)


@cli.command()
@_model_options
@_calibration_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The .safetensors file to write.",
)
def calibrate(output: Path, **options: Any) -> None:
    r"""Accumulate MODEL's statistics over text and save them.

    An interrupted run leaves OUTPUT.partial; the same command resumes it.

    \b
    csprune calibrate demo --data demo -o demo.safetensors
    csprune compress demo --rank 0.2 --method fisher --calibration demo.safetensors
    """
    calibration = jobs.calibrate_job(jobs.Settings(**options), output, Terminal())
    corpus = calibration.details["corpus"]
    click.echo(
        f"{output}: {calibration.details['tokens']:,} tokens of {len(calibration.documents)} documents "
        f"({corpus['too_short']} too short), {calibration.width} directions"
    )


@cli.command()
@_model_options
@click.option(
    "--rank",
    "ranks",
    type=float,
    multiple=True,
    default=DEFAULT_RANKS,
    show_default=True,
    help="Fraction of directions to remove; repeat for several.",
)
@click.option(
    "--method",
    "methods",
    type=click.Choice(_METHODS),
    multiple=True,
    help="Repeat for several; random always stands beside them.  [default: all]",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder for the report.")
@_calibration_options
@_evaluation_options
def evaluate(
    ranks: Sequence[float],
    methods: Sequence[str],
    output: Path,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    r"""Compare truncations of MODEL on held-out text, without writing a checkpoint.

    \b
    csprune evaluate demo --rank 0.05 --rank 0.2 --data demo -o report
    """
    settings = jobs.Settings(**options)
    result = jobs.evaluate_job(
        settings, list(methods or STRATEGIES), list(ranks), output, overwrite, Terminal()
    )
    _print(result, as_json)
    if not as_json:
        click.echo(f"\nWritten to {output}: report.json, documents.parquet")


def _print(result: jobs.Result, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.report, indent=2, allow_nan=False))
        return
    console = Console()
    console.print(table(result.report))
    for note in result.notes:
        click.echo(note)


def _print_sizes(details: dict[str, Any], output: Path) -> None:
    before, after = details["sizes"]["before"], details["sizes"]["after"]
    console = Console()
    sizes = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "before", "after", ""):
        sizes.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for label, key in (
        ("head parameters", "head_parameters"),
        ("head bytes read per token", "head_bytes"),
        ("weights on disk, bytes", "bytes_on_disk"),
    ):
        change = after[key] / before[key] - 1
        sizes.add_row(label, f"{before[key]:,}", f"{after[key]:,}", f"{change:+.1%}")
    console.print()
    console.print(sizes)
    if details["tied"]:
        click.echo(
            "\nThe original's head is tied to its input embedding; the truncated one is stored beside it, so "
            "the checkpoint grows. What shrinks is the work and memory traffic of each token."
        )
    if after["head_bytes"] >= before["head_bytes"]:
        click.echo("\nAt this rank the factors are no smaller than the head: remove more to save anything.")
    error = details["verification"]["loaded"]["rms_error"]
    click.echo(
        f"\nWritten to {output} (reloaded in a fresh process: logits equal to {error:.0e} of their size)."
        f"\nLoad it with `import csprune` or trust_remote_code=True; see {output / 'README.md'}."
    )


def main() -> None:
    """Run the command line; errors are one line on stderr, and an exit status of 2 or 1."""
    _quiet()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing half-written stays
    try:
        status = cli.main(standalone_mode=False)
    except CspruneError as error:
        status = _fail(str(error), error.exit_status)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "csprune"
        status = _fail(f"{error.format_message()} (see {command} --help)", 2)
    except click.ClickException as error:
        status = _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        status = _fail("interrupted; nothing half-written was left", 1)
    except OSError as error:
        status = _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
    sys.exit(status or 0)


def _fail(message: str, status: int) -> int:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    return status


def _quiet() -> None:
    """Leave stderr to our own progress and errors."""
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
