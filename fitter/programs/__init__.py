"""The programs that a plan can be for: what each sets for a load, and the memory that it takes later; their formats."""

from __future__ import annotations

import os
from importlib import import_module

from fitter.errors import UsageError
from fitter.parameters.targets import OWN_FORMATS, TARGETS
from fitter.programs.facts import Facts, facts
from fitter.programs.llama_cpp_python import LlamaCppPython
from fitter.programs.llama_server import LlamaServer
from fitter.programs.program import Asked, Attempt, Program, Shape

PROGRAMS: dict[str, Program] = {
    program.name: program
    for name, target in TARGETS.items()
    if target.programs
    for program in import_module(f"fitter.programs.{name}").PROGRAMS
}

SERVER = LlamaServer.name

_VARIABLE = "FITTER_PROGRAM"

_OF_FORMATS = {name: next(iter(each.programs), SERVER) for each in TARGETS.values() for name in each.formats}
"""Programs for which formats are if the user names none."""


def unless_named(default: str) -> str | None:
    """Return ``default``, or ``None`` if the environment names a program."""
    return None if os.environ.get(_VARIABLE) else default


def for_format(name: str | None, given: str | None) -> str | None:
    """Return the program of a plan in the format ``name``: the user's (``given``), or the one with that format alone.

    ``None`` leaves it to the environment.

    Raises:
        UsageError: The format is another program's.
    """
    own = name if name in OWN_FORMATS else None
    if given and own and given != own:
        raise UsageError(f"--format {name} is for {own}, and --for {given} for another program: leave one of them out")
    return given or own or unless_named(_OF_FORMATS.get(name or "", SERVER))


def own_format(program: str | None) -> str | None:
    """Return the format of plans for ``program``, or for the environment's; ``None`` for llama.cpp's arguments."""
    name = program or chosen(SERVER)
    return name if name in OWN_FORMATS else None


def chosen(default: str) -> str:
    """Return the program in the environment variable ``FITTER_PROGRAM``, or ``default``. Raises ``UsageError``."""
    name = os.environ.get(_VARIABLE) or default
    if name not in PROGRAMS:
        raise UsageError(f"{_VARIABLE} is '{name}': give one of {', '.join(PROGRAMS)}, or unset it")
    return name


__all__ = [
    "PROGRAMS",
    "SERVER",
    "Asked",
    "Attempt",
    "Facts",
    "LlamaCppPython",
    "LlamaServer",
    "Program",
    "Shape",
    "chosen",
    "facts",
    "for_format",
    "own_format",
    "unless_named",
]
