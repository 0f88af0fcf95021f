"""``fitter backend``: virtual GPUs for any llama.cpp program."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from fitter.cli import options
from fitter.errors import EXIT_FITS, UsageError

_EPILOG = """\
Examples:
  fitter backend --gpu "8x rtx-5090" -- llama-server --list-devices
  fitter backend --gpu rtx-4090 -- llama-server -m model.gguf
  eval "$(fitter backend --gpu rtx-4090 --gpu 24GiB)" && llama-fit-params -m model.gguf -dev CUDA0,CUDA1
"""


@click.command(cls=options.Command, epilog=_EPILOG)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGUMENTS...]")
@options.gpu_option
def backend(gpus: tuple[str, ...] | None, program: tuple[str, ...], **_: Any) -> int:
    """Show virtual GPUs to a llama.cpp program, and to all that it starts.

    It lists them, and fits and places models by their memory. What it computes on them is computed by the CPU, in this
    machine's memory, so that a small model really answers. Programs with llama.cpp built into them see none.

    Without a PROGRAM, two shell commands are printed that make the GPUs visible, to plan and not to compute. Most
    programs then look for them only if -dev or -ot is given.
    """
    if not gpus:
        raise UsageError("there is no GPU to show: describe one with --gpu, such as --gpu rtx-4090")
    from fitter.llama import types
    from fitter.llama.build import library
    from fitter.machine import gpu

    cards = gpu.parse_gpus(gpus)
    if not cards:
        raise UsageError("there is no GPU to show: replace --gpu none, such as with --gpu rtx-4090")
    if program:
        from fitter.api import virtual_program

        path = virtual_program.path_of_program(program[0])
        os.execve(path, program, {**os.environ, **virtual_program.environment_of(path, cards)})
    description = types.describe(cards)
    backend_path = shlex.quote(str(library.backend_path()))
    click.echo(f"export GGML_BACKEND_PATH={backend_path}\nexport FITTER_DEVICES={shlex.quote(description)}")
    return EXIT_FITS
