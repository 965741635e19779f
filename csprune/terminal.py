"""What the command line shows: progress bars on stderr, results on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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

from csprune.jobs import Result
from csprune.tables import table


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
            TextColumn("{task.description:<24}", markup=False),  # a path may have brackets
            BarColumn(24),
            MofNCompleteColumn(),
            _Rate(),
        )
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as progress:
            task = progress.add_task(what, total=None, tokens=tokens)

            def step(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            yield step
            done = progress.tasks[0].completed or 1
            progress.update(task, completed=done, total=done)  # fewer than wanted may be all there is


def print_result(result: Result, as_json: bool) -> None:
    """The report as a table with what was noticed, or alone as JSON (notes on stderr then)."""
    if as_json:
        click.echo(json.dumps(result.report, indent=2, allow_nan=False))
    else:
        Console().print(table(result.report))
        click.echo()
    for note in result.notes:
        click.echo(note, err=as_json)


def print_sizes(details: dict[str, Any], output: Path) -> None:
    """What an export saves and costs, and where it is."""
    before, after = details["sizes"]["before"], details["sizes"]["after"]
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
    if details["stored_loss_change"] is not None:
        click.echo(
            f"\nAs stored, its factors rounded to {details['dtype']}, the loss change is "
            f"{details['stored_loss_change']:+.4f} nats."
        )
    click.echo()
    Console().print(sizes)
    if details["tied"]:
        click.echo(
            "\nThe original's head is tied to its input embedding; the truncated one is stored beside it, so "
            "the checkpoint grows. What shrinks is the work and memory traffic of each token."
        )
    if after["head_bytes"] >= before["head_bytes"]:
        click.echo("\nAt this rank the factors are no smaller than the head: remove more to save anything.")
    error = details["verification"]["loaded"]["rms_error"]
    equal = f"equal to {error:.0e} of their size" if error else "equal"
    click.echo(
        f"\nWritten to {output} (reloaded in a fresh process: logits {equal})."
        f"\nLoad it with `import csprune` or trust_remote_code=True; see {output / 'README.md'}."
    )
