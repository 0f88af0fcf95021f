"""Words that a shell completes beyond commands, options and files: GPUs, shapes, file types and cases.

Nothing is asked of llama.cpp: an answer comes while somebody types. Each function is a ``shell_complete`` of click.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click

from fitter.errors import FitterError

_BEFORE_GPU = re.compile(r"(?:.*[,+]\s*)?(?:[0-9]+\s*[x*]\s*)?", re.DOTALL | re.IGNORECASE)
"""The part of a text before the name of its last GPU."""


def _continued(incomplete: str, before: str, words: Iterable[str]) -> list[str]:
    """Return the words that begin as the rest of ``incomplete`` does, after the part that stays."""
    rest = incomplete[len(before) :].lower()
    return [before + word for word in words if word.lower().startswith(rest)]


def complete_gpus(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a GPU of the catalogue, also after a count, a ``+`` or a comma."""
    from fitter.machine import gpu_catalogue
    from fitter.machine.gpu import NO_GPU

    match = _BEFORE_GPU.match(incomplete)
    before = match[0] if match else ""
    return _continued(incomplete, before, (*gpu_catalogue.keys(), *(() if before else (NO_GPU,))))


def complete_shapes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a shape, or the file type after a colon."""
    from fitter.model.shapes.catalogue import shape_names

    name, colon, _ = incomplete.partition(":")
    return _continued(incomplete, f"{name}:", _file_types()) if colon else _continued(incomplete, "", shape_names())


def complete_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the last of several file types."""
    return _continued(incomplete, incomplete[: incomplete.rfind(",") + 1], _file_types())


def complete_cases(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a case in the file of ``--cases``, also as the last word of an expression."""
    from fitter.regression.cases import CASES_FILE, read_cases

    with suppress(FitterError):
        names = [case.name for case in read_cases(Path(ctx.params.get("cases_file") or CASES_FILE))]
        return _continued(incomplete, incomplete[: max(map(incomplete.rfind, " (")) + 1], names)
    return []


def _file_types() -> tuple[str, ...]:
    from fitter.model.shapes.catalogue import FILE_TYPES

    return FILE_TYPES
