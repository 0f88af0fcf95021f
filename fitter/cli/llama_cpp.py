"""``fitter llama-cpp``: list the builds of llama.cpp on this machine."""

from __future__ import annotations

from typing import Any

import click

from fitter.cli import answers, options
from fitter.errors import EXIT_FAILURE, EXIT_FITS

_EPILOG = """\
Examples:
  fitter llama-cpp                              those of this Python and on the PATH
  fitter llama-cpp ~/llama.cpp/build/bin        that of a directory as well
"""


@click.command("llama-cpp", cls=options.Command, epilog=_EPILOG)
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
    from fitter.output.tables import builds_table

    where = (*where, *llama_cpp)
    reports = inspect_build.look_around(where)
    if as_json:
        answers.print_json(builds_table.builds_to_dict(reports))
    else:
        answers.print_table(builds_table.builds_table(reports))
    return EXIT_FAILURE if inspect_build.is_any_unusable(reports, where) else EXIT_FITS
