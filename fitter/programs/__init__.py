"""The programs that a plan can be for: what each sets for a load, and the memory that it takes later."""

from __future__ import annotations

import os

from fitter.errors import UsageError
from fitter.programs.facts import Facts, facts
from fitter.programs.llama_bench import LlamaBench
from fitter.programs.llama_cpp_python import AnyProgram, LlamaCppPython
from fitter.programs.llama_server import LlamaCli, LlamaServer
from fitter.programs.program import Asked, Program, Shape

PROGRAMS: dict[str, Program] = {
    each.name: each for each in (LlamaServer(), LlamaCli(), LlamaCppPython(), LlamaBench(), AnyProgram())
}

SERVER = LlamaServer.name

_VARIABLE = "FITTER_PROGRAM"


def unless_named(default: str) -> str | None:
    """Return ``default``, or ``None`` if the environment names a program."""
    return None if os.environ.get(_VARIABLE) else default


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
    "Facts",
    "LlamaCppPython",
    "LlamaServer",
    "Program",
    "Shape",
    "chosen",
    "facts",
    "unless_named",
]
