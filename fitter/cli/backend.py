"""``fitter backend``: virtual GPUs for any llama.cpp program."""

from __future__ import annotations

import shlex
from typing import Any

import click

from fitter.cli import options
from fitter.errors import EXIT_FITS, UsageError

_EPILOG = """\
Example:
  eval "$(fitter backend --gpu rtx-4090 --gpu 24GiB)"
  llama-fit-params -m model.gguf -dev CUDA0,CUDA1
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@options.gpu_option
def backend(gpus: tuple[str, ...] | None, **_: Any) -> int:
    """Print two shell commands that make virtual GPUs visible to any llama.cpp program.

    A program can list them (--list-devices) and plan on them (llama-fit-params), but not run a model on them. Most
    programs look for them only if -dev or -ot is given.
    """
    if not gpus:
        raise UsageError("there is no GPU to show: describe one with --gpu, such as --gpu rtx-4090")
    from fitter.llama import types
    from fitter.llama.build import library
    from fitter.machine import gpu

    cards = gpu.parse_gpus(gpus)
    if not cards:
        raise UsageError("there is no GPU to show: replace --gpu none, such as with --gpu rtx-4090")
    description = types.describe(cards)
    path = library.backend_path()
    click.echo(f"export GGML_BACKEND_PATH={shlex.quote(str(path))}\nexport FITTER_DEVICES={shlex.quote(description)}")
    return EXIT_FITS
