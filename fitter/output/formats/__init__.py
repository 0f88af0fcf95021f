"""A plan written for other programs. A format is a file here with ``text(plan)``, and a line in ``FORMATS``.

One that is a line of arguments is in ``LINES`` too, and its file has ``words(plan)`` in place of ``text``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fitter.errors import UsageError

if TYPE_CHECKING:
    from fitter.planning.plan import PlanData

FORMATS = {
    "args": "llama.cpp's arguments on one line",
    "json": "the whole plan, sizes in bytes",
    "ini": "a preset for llama-server --models-preset",
    "env": "LLAMA_ARG_ lines for sh, systemd or docker",
    "python": "a script that loads with llama-cpp-python",
    "ik_llama": "arguments of ik_llama.cpp on one line",
}
"""What ``--help`` says about each."""


LINES = ("args", "ik_llama")
"""Formats that are arguments on one line."""


def render(plan: PlanData, name: str) -> str:
    """``plan`` in the format ``name``, one of ``FORMATS``, without a newline at the end.

    Arguments are without quotes, as ``$(...)`` wants them. Every format says every parameter of the plan, or raises
    :class:`PlanError` that names what its reader has no word for. Raises :class:`UsageError` for a name that is none.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format '{name}'; there are: {', '.join(FORMATS)}")
    if name in LINES:
        return " ".join(words(plan, name))
    text: str = import_module(f"fitter.output.formats.{name}").text(plan)
    return text


def words(plan: PlanData, name: str) -> list[str]:
    """The arguments of ``plan`` in the format ``name``, one of ``LINES``. Raises what ``render`` does."""
    found: list[str] = import_module(f"fitter.output.formats.{name}").words(plan)
    return found
