"""The command ``fitter``. Adding a subcommand takes a file of its own and a line here."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

import fitter
from fitter.errors import EXIT_USAGE, FitterError
from fitter.text import printable

_COMMANDS = {
    "fit": "The parameters that fit (the default).",
    "devices": "What there is to plan with.",
    "inspect": "What a model is made of.",
    "backend": "Virtual GPUs for any llama.cpp program.",
    "verify": "A plan loaded for real.",
    "calibrate": "Real devices against their virtual twins.",
    "lock": "Write down what the cases of fitter.toml take.",
    "check": "Fail where a case takes more than was locked.",
    "diff": "What differs between two plans.",
}
"""What ``--help`` says about each. A command is a file and a function of its name, imported when it is called."""

_INTERRUPTED = 128 + 2
_BROKEN_PIPE = 128 + 13

_EPILOG = """\
Examples:
  fitter model.gguf                                    what fits on this machine
  fitter model.gguf --gpu rtx-4090                     what fits on a GPU that is not here
  args=$(fitter model.gguf --format shell) && eval "llama-server -m model.gguf $args"
                                                       run it, if it fits

All options of fit: fitter fit --help

Exit status of every command: 0 it fits, or holds; 1 it does not fit, and nothing else; 2 usage; 3 the model cannot be
read or llama.cpp failed; 4 a check failed; 5 the answer cannot be written; 130 and 141 interrupted, or nobody reads.
"""


class _Fitter(click.Group):
    """The group of all commands. What does not begin with a command's name is for ``fit``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(EXIT_USAGE)
        if args[0] not in _COMMANDS and args[0] not in ("-h", "--help", "--version"):
            args = ["fit", *args]
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write(_EPILOG)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"fitter.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "MODEL [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGUMENTS]", prefix=" " * len("Usage: "))


@click.group(cls=_Fitter, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fitter.__version__, prog_name="fitter", message="%(prog)s %(version)s")
def cli() -> None:
    """Find the llama.cpp parameters that run a GGUF model best within the memory of every device, real or described.

    fitter MODEL is fitter fit MODEL. A file named like a command is ./devices.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line ``args`` (by default the process's own) and return its exit status.

    Every error is one line on stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # names of models and devices may hold what the terminal's encoding does not
            stream.reconfigure(errors="backslashreplace")
    try:
        # Not cli.main(): it ends with status 1, "does not fit", where nobody reads stdout any more.
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
        # Whoever read stdout has gone: let nothing at exit try to write to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _fail(message: str, status: int) -> int:
    click.echo(f"fitter: error: {' '.join(printable(message).split())}", err=True)
    return status
