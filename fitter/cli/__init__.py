"""The command ``fitter``. Adding a subcommand takes a function in a file, and a line in ``group.py``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import click

import fitter
from fitter.cli.group import COMPLETE, CommandGroup, complete
from fitter.errors import EXIT_USAGE, FitterError
from fitter.text import printable

_INTERRUPTED = 128 + 2
_BROKEN_PIPE = 128 + 13


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fitter.__version__, prog_name="fitter", message="%(prog)s %(version)s")
def cli() -> None:
    """Find the llama.cpp parameters that run a GGUF model fastest in the memory of your GPUs, or of GPUs you describe.

    'fitter MODEL' is short for 'fitter fit MODEL'. If the model's file is named like a command, write ./devices.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line ``args`` (by default the process's own); return its exit status.

    Every error is one line on stderr. With the environment variable of ``complete``, answer a shell instead.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # names of models and devices may contain characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        if COMPLETE in os.environ:
            return complete(cli)
        # not cli.main(), which exits with status 1 ("does not fit") when the reader of stdout is gone
        with cli.make_context("fitter", list(sys.argv[1:] if args is None else args)) as ctx:
            status: int = cli.invoke(ctx)
        sys.stdout.flush()
        return status
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "fitter"
        return _fail(f"{error.format_message().rstrip('.')} (see {command} --help)", EXIT_USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_USAGE)
    except FitterError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader of stdout is gone: the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _fail(message: str, status: int) -> int:
    click.echo(f"fitter: error: {' '.join(printable(message).split())}", err=True)
    return status
