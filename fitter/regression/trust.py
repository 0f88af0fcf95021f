"""Trust: native code and addresses that need this machine's keys are only read from a trusted file."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fitter.errors import UsageError
from fitter.model.location import is_address
from fitter.model.shapes.catalogue import SHAPE, wanted

VARIABLE = "FITTER_TRUST"
"""The environment variable that is 1 where all files are trusted."""

_PUBLIC = ("http", "https", "hf")
"""Schemes of addresses that are read without keys of this machine; only the hub of Hugging Face gets its token."""


def is_trusted(option: bool = False) -> bool:
    """Whether files are trusted: by an option (``option``), or by the environment."""
    return option or os.environ.get(VARIABLE) == "1"


def code(key: str, text: str) -> str:
    """Write that the value ``text`` of ``key`` is native code."""
    return f"{key} is '{text}', which is native code"


def address(key: str, text: str) -> str | None:
    """Say why the file ``text`` of ``key`` needs trust; ``None`` for paths and for addresses that take no keys."""
    request = wanted(text)
    if request is not None and request.scheme == SHAPE:
        return None
    if request is not None:
        text = request.name
    if not is_address(text) or text.partition(":")[0].lower() in _PUBLIC:
        return None
    return f"{key} is '{text}', which is read with this machine's own keys"


def check(reasons: Iterable[str], file: str, option: bool) -> None:
    """Raise ``UsageError`` with the first of ``reasons`` to trust ``file``, unless it is trusted."""
    why = next(iter(reasons), None)
    if why is not None and not is_trusted(option):
        raise UsageError(f"{file}: {why}: if you trust whoever wrote that file, give --trust or set {VARIABLE}=1")
