"""A plan in the formats of other programs. A format is a file here with ``text(plan)``, and a line in ``FORMATS``.

A format of arguments on one line without quotes has ``words(plan)`` instead. One that leaves out what it cannot
express, and says so, if the user wants the text anyway, has ``text(plan, anyway=False)`` and ``IS_PARTIAL``. A program
with rules of its own has the file ``text.py`` in its folder (``fitter.programs``).
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from fitter.errors import UsageError
from fitter.parameters.table import TEXTS

if TYPE_CHECKING:
    from fitter.planning.plan.plan import Plan

FORMATS = {
    "args": "llama.cpp's arguments on one line",
    "shell": "the same, quoted for eval in sh, bash, zsh, fish",
    "json": "the whole plan, sizes in bytes",
    "ini": "a preset for llama-server --models-preset",
    "env": "LLAMA_ARG_ lines for sh, systemd or docker",
    "python": "a script that loads with llama-cpp-python",
    "llama-swap": "a model for llama-swap's config.yaml",
    "compose": "a compose.yaml with llama.cpp's image",
    "kubernetes": "a Deployment and a Service",
    "llmkube": "LLMKube's Model and InferenceService",
    "gguf-parser": "gguf-parser's document, for schedulers",
}
FORMATS |= TEXTS
"""The help for each format."""


def render(plan: Plan, name: str, *, anyway: bool = False) -> str:
    """Write ``plan`` in the format ``name``, without a newline at the end.

    Raises:
        PlanError: The format cannot express a parameter of the plan, which the message names (with ``anyway``, only if
            the format leaves nothing out); or the plan does not fit, ``anyway`` is false and it is not ``json``.
        UsageError: There is no such format.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format '{name}': choose from {', '.join(FORMATS)}")
    if name != "json" and not anyway:
        from fitter.planning.plan.plan import check_fits

        check_fits(plan, f"format('{name}', anyway=True)")
    if is_unquoted(name):
        return " ".join(words(plan, name))
    module = _module(name)
    text: str = module.text(plan, anyway=anyway) if hasattr(module, "IS_PARTIAL") else module.text(plan)
    return text


def is_unquoted(name: str) -> bool:
    """Return whether a format is arguments on one line without quotes, for ``$(...)``."""
    return hasattr(_module(name), "words")


def words(plan: Plan, name: str) -> list[str]:
    """Write the arguments of ``plan`` in the format ``name``, which is unquoted, whether it fits or not.

    Raises:
        PlanError: An argument cannot be on one line, or as ``render``.
    """
    from fitter.output.arguments import check_line

    arguments: list[str] = _module(name).words(plan)
    check_line(arguments)
    return arguments


def _module(name: str) -> ModuleType:
    """Import the text of a program that has a folder, or of another format."""
    path = f"fitter.programs.{name}.text" if name in TEXTS else f"fitter.output.formats.{name.replace('-', '_')}"
    return import_module(path)
