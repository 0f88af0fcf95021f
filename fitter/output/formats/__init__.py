"""A plan in the formats of other programs. A format is a file here with ``text(plan)``, and a line in ``FORMATS``.

A format that consists of arguments on one line without quotes is also in ``UNQUOTED``, and its file has ``words(plan)``
instead of ``text``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fitter.errors import UsageError

if TYPE_CHECKING:
    from fitter.planning.plan.plan import Plan

FORMATS = {
    "args": "llama.cpp's arguments on one line",
    "shell": "the same, quoted for eval in sh, bash, zsh, fish",
    "json": "the whole plan, sizes in bytes",
    "ini": "a preset for llama-server --models-preset",
    "env": "LLAMA_ARG_ lines for sh, systemd or docker",
    "python": "a script that loads with llama-cpp-python",
    "ik_llama": "arguments of ik_llama.cpp on one line",
}
"""The help for each format."""


UNQUOTED = ("args", "ik_llama")
"""Formats that are arguments on one line without quotes, for ``$(...)``."""


def render(plan: Plan, name: str, *, anyway: bool = False) -> str:
    """Write ``plan`` in the format ``name``, one of ``FORMATS``, without a newline at the end.

    Every format contains every parameter of the plan, or raises :class:`PlanError` that names the one which it cannot
    express. All but ``json`` also raise it if the plan does not fit, unless ``anyway`` is true. Raises
    :class:`UsageError` for an unknown name.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format '{name}': choose from {', '.join(FORMATS)}")
    if name != "json" and not anyway:
        from fitter.planning.plan.plan import check_fits

        check_fits(plan, f"format('{name}', anyway=True)")
    if name in UNQUOTED:
        return " ".join(words(plan, name))
    text: str = import_module(f"fitter.output.formats.{name}").text(plan)
    return text


def words(plan: Plan, name: str) -> list[str]:
    """Write the arguments of ``plan`` in the format ``name``, one of ``UNQUOTED``, whether it fits or not.

    Raises :class:`PlanError` for an argument that cannot be on one line, and what ``render`` raises.
    """
    from fitter.output.arguments import check_line

    arguments: list[str] = import_module(f"fitter.output.formats.{name}").words(plan)
    check_line(arguments)
    return arguments
