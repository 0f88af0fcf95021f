"""Files that others may have written: read TOML, and ask for trust in native code and in this machine's keys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fitter.errors import UsageError
from fitter.model.files.source import show
from fitter.model.location import is_address
from fitter.model.shapes.catalogue import SHAPE, wanted
from fitter.storage import parse_toml, read_text

_MARKERS = ("<<<<<<<", "=======", ">>>>>>>")
"""The beginnings of the lines with which git marks a merge conflict."""

_MOST_PARTS = 50
"""More parts than any key has. The parser takes memory for the square of their number."""
_TOKEN = re.compile(r""""(?:[^"\\]+|\\.)*"?|'[^']*'?|[\w-]+|\s+|.""", re.DOTALL)
"""A part of a key, a dot, or anything else, as far as that can be told of one line."""


def read_toml(path: Path, remedy: str) -> Mapping[str, Any]:
    """Read the tables in ``path``. Raises ``UsageError``, with ``remedy`` in the message if there is no such file."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise UsageError(f"{show(path)} does not exist: {remedy}") from None
    except ValueError:
        raise UsageError(f"{show(path)} is not UTF-8 text, so it is not a TOML file") from None
    except OSError as error:
        raise UsageError(f"{show(path)} cannot be read: {error.strerror}") from None
    try:
        _check_keys(path, text)
        return parse_toml(text)
    except RecursionError:
        raise UsageError(f"{show(path)} has tables or lists inside too many others: flatten them") from None
    except ValueError as error:
        if type(error) is ValueError:
            raise UsageError(f"{show(path)} cannot be read: it has a number with thousands of digits") from None
        if line := _conflict(text):
            raise UsageError(
                f"{show(path)} has a merge conflict in line {line}: resolve it in fitter.toml, then run 'fitter lock'"
            ) from None
        raise UsageError(f"{show(path)} is not valid TOML: {' '.join(str(error).split())}") from None


def _check_keys(path: Path, text: str) -> None:
    """Raise ``UsageError`` for a key with too many parts, such as ``a.a.a``."""
    for number, line in enumerate(text.split("\n"), start=1):
        dots = 0
        for token in _TOKEN.findall(line) if line.count(".") > _MOST_PARTS else ():
            dots = dots + 1 if token == "." else dots if re.match(r"[\w\s\"'-]", token) else 0
            if dots > _MOST_PARTS:
                raise UsageError(
                    f"{show(path)} has a key of more than {_MOST_PARTS} parts in line {number}: shorten it"
                )


def _conflict(text: str) -> int:
    """The number of the first line that marks a merge conflict, 0 without one."""
    numbered = enumerate(text.splitlines(), start=1)
    return next((number for number, line in numbered if line.startswith(_MARKERS)), 0)


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
