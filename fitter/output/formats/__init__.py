"""A plan written for other programs. A format is a file here with ``text(plan)``, and a line in ``FORMATS``.

One that is arguments on one line without quotes is in ``UNQUOTED`` too, and its file has ``words(plan)`` in place of
``text``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fitter.errors import UsageError

if TYPE_CHECKING:
    from fitter.planning.plan import Plan

FORMATS = {
    "args": "llama.cpp's arguments on one line",
    "shell": "those, quoted for eval in sh, bash, zsh, fish",
    "json": "the whole plan, sizes in bytes",
    "ini": "a preset for llama-server --models-preset",
    "env": "LLAMA_ARG_ lines for sh, systemd or docker",
    "python": "a script that loads with llama-cpp-python",
    "ik_llama": "arguments of ik_llama.cpp on one line",
}
"""What ``--help`` says about each."""


UNQUOTED = ("args", "ik_llama")
"""Formats that are arguments on one line, as ``$(...)`` takes them."""


def render(plan: Plan, name: str, *, anyway: bool = False) -> str:
    """``plan`` in the format ``name``, one of ``FORMATS``, without a newline at the end.

    Every format says every parameter of the plan, or raises :class:`PlanError` that names what its reader has no word
    for. One that is there to be run raises it too for a plan that does not fit, unless that is asked for ``anyway``.
    Raises :class:`UsageError` for a name that is none.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format '{name}'; there are: {', '.join(FORMATS)}")
    if name != "json" and not anyway:
        from fitter.planning.plan import check_fits

        check_fits(plan, f"format('{name}', anyway=True)")
    if name in UNQUOTED:
        return " ".join(words(plan, name))
    text: str = import_module(f"fitter.output.formats.{name}").text(plan)
    return text


def words(plan: Plan, name: str) -> list[str]:
    """The arguments of ``plan`` in the format ``name``, one of ``UNQUOTED``, whether it fits or not.

    Raises :class:`PlanError` for what cannot be on one line, and what ``render`` raises.
    """
    from fitter.output.arguments import check_line

    found: list[str] = import_module(f"fitter.output.formats.{name}").words(plan)
    check_line(found)
    return found
