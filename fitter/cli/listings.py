"""``fitter devices``, ``inspect``, ``llama-cpp`` and ``backend``: what there is, of which nothing is planned."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_FAILURE, EXIT_FITS, UsageError


@click.command(cls=options.Command)
@options.gpu_option
@options.rpc_option
@options.llama_cpp_option
@options.timeout_option
@options.catalogue_option
@options.json_option
def devices(as_json: bool | None, catalogue: bool | None, **given: Any) -> int:
    """Show the devices that llama.cpp would use, with their memory, and the host.

    With --catalogue, list the GPUs that --gpu knows by name instead, with the source of each figure.
    """
    if catalogue:
        if given["gpus"] or given["rpc"]:
            raise UsageError(
                "--catalogue lists all GPUs that --gpu knows, and takes neither --gpu nor --rpc: leave them out"
            )
        return _catalogue(as_json)
    from fitter import api

    writer = "fitter.output.documents.listing_documents" if as_json else "fitter.output.tables.plan_table"
    options.import_meanwhile(writer)
    infos, host = api.devices(**options.given(given))
    if as_json:
        from fitter.output.documents.listing_documents import DEVICES, Devices

        answers.print_json(DEVICES.write(Devices(infos, host)))
    else:
        from fitter.output.tables import plan_table

        answers.print_table(plan_table.devices_table(infos, host))
    if not (given["gpus"] or given["rpc"]):
        from fitter.api.device_calls import why_no_gpu

        if problem := why_no_gpu(infos, given["llama_cpp"]):
            click.echo(f"fitter: warning: {problem}", err=True)
    return EXIT_FITS


def _catalogue(as_json: bool | None) -> int:
    from fitter.machine import gpu_catalogue as catalogue
    from fitter.output.documents.listing_documents import CATALOGUE, Catalogue
    from fitter.output.tables import plan_table

    gpus = catalogue.gpus().values()
    if as_json:
        answers.print_json(CATALOGUE.write(Catalogue(tuple(gpus))))
    else:
        answers.print_table(plan_table.catalogue_table(gpus))
    return EXIT_FITS


@click.command(cls=options.Command)
@options.model_argument
@options.parameter("n_ctx", help="Context in tokens; 0 is the model's own. [default: the model's own]")
@options.llama_cpp_option
@options.timeout_option
@options.json_option
def inspect(model: str, as_json: bool | None, **given: Any) -> int:
    """Show MODEL's metadata, its tensors by role, and the bytes of weights and KV cache in each layer.

    KV cache and compute buffers are measured for a context of -c tokens, with everything in host memory.
    """
    from fitter import api

    writer = "fitter.output.documents.plan_document" if as_json else "fitter.output.tables.plan_table"
    options.import_meanwhile(writer)
    with answers.asking() as callbacks:
        inspection = api.inspect(model, on_progress=callbacks["on_progress"], **options.given(given))
    if as_json:
        from fitter.output.documents.plan_document import INSPECTION

        answers.print_json(INSPECTION.write(inspection))
    else:
        from fitter.output.tables import plan_table

        answers.print_table(plan_table.inspection_table(inspection))
    return EXIT_FITS


_BUILDS_EPILOG = """\
Examples:
  fitter llama-cpp                              those of this Python and on the PATH
  fitter llama-cpp ~/llama.cpp/build/bin        that of a directory as well
"""


@click.command("llama-cpp", cls=options.Command, epilog=_BUILDS_EPILOG)
@click.argument("where", nargs=-1)
@options.parameter("llama_cpp", multiple=True, brief="", help="The same as WHERE. Repeatable.")
@options.json_option
def llama_cpp(where: tuple[str, ...], llama_cpp: tuple[str, ...], as_json: bool | None, **_: Any) -> int:
    """Show the builds of llama.cpp on this machine, and whether fitter knows how to talk to them.

    They are the installed llama-cpp-python's, or else the one in fitter's wheel, that of the llama-server on the PATH,
    and those that are named. WHERE is a directory with libllama and ggml's libraries, or a llama-server. The exit
    status is 3 if one that is named cannot be used.
    """
    from fitter.llama.build import inspect_build
    from fitter.output.tables import listing_tables

    where = (*where, *llama_cpp)
    reports = inspect_build.look_around(where)
    if as_json:
        answers.print_json(listing_tables.builds_to_dict(reports))
    else:
        answers.print_table(listing_tables.builds_table(reports))
    return EXIT_FAILURE if inspect_build.is_any_unusable(reports, where) else EXIT_FITS


_BACKEND_EPILOG = """\
Examples:
  fitter backend --gpu "8x rtx-5090" -- llama-server --list-devices
  fitter backend --gpu rtx-4090 -- llama-server -m model.gguf
  eval "$(fitter backend --gpu rtx-4090 --gpu 24GiB)" && llama-fit-params -m model.gguf -dev CUDA0,CUDA1
"""


@click.command(cls=options.Command, epilog=_BACKEND_EPILOG)
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
        from fitter.api import device_calls

        path = device_calls.path_of_program(program[0])
        os.execve(path, program, {**os.environ, **device_calls.environment_of(path, cards)})
    description = types.describe(cards)
    backend_path = shlex.quote(str(library.backend_path()))
    click.echo(f"export GGML_BACKEND_PATH={backend_path}\nexport FITTER_DEVICES={shlex.quote(description)}")
    return EXIT_FITS
