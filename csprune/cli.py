"""The command line: parse, call one job, print."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import click
import torch
import transformers

from csprune.commands.scores import bench
from csprune.commands.studies import analyze, spectrum, subspace
from csprune.commands.truncation import calibrate, compress, evaluate, report
from csprune.errors import CspruneError


class _Commands(click.Group):
    """Commands, of which an unknown one is answered with those that exist."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. Choose from: {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


# Without no_args_is_help=False a bare `csprune` would be a usage error of many lines.
@click.group(
    cls=_Commands,
    commands=[compress, calibrate, evaluate, report, spectrum, analyze, subspace, bench],
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  csprune compress MODEL --rank 0.2 --method fisher",
)
@click.version_option(package_name="csprune", message="%(prog)s %(version)s")
def cli() -> None:
    """Compress a language model's head by what matters least to its predictions, and study it.

    MODEL is a local folder, a hub id, or demo (see `python -m csprune.demo`).
    """


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
