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
    """Print the two lines of shell that show virtual GPUs to any llama.cpp program.

    Such a program can plan on them (llama-fit-params, --list-devices), but not run a model. Most look for them only
    when they are told -dev or -ot.
    """
    if not gpus:
        raise UsageError("there is no GPU to show: describe one with --gpu, such as --gpu rtx-4090")
    from fitter.llama import library, types
    from fitter.machine import gpu

    cards = gpu.parse_gpus(gpus)
    if not cards:
        raise UsageError("there is no GPU to show: leave --gpu none out")
    description = types.describe(cards)
    path = library.backend_path()
    click.echo(f"export GGML_BACKEND_PATH={shlex.quote(str(path))}\nexport FITTER_DEVICES={shlex.quote(description)}")
    return EXIT_FITS
