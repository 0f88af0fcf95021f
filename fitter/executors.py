"""Executors that are named by a text: those of a Dask cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from fitter.errors import LibraryError, UsageError
from fitter.values import shown

_DASK = re.compile(r"dask://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>\d{1,5})/?")
_PATIENCE = "10s"
_RETRIES = 3
"""How often a cell is given to another worker when the one that had it is lost."""


def check_executor(text: str) -> None:
    """Raise ``UsageError`` where ``text`` names no executor."""
    match = _DASK.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(f"--executor {shown(text)}: name the scheduler of a Dask cluster, such as dask://host:8786")


@contextmanager
def executor_of(text: str) -> Iterator[Executor]:
    """The executor that ``text`` names. Raises ``UsageError`` for another text, ``LibraryError`` if it is not there."""
    check_executor(text)
    address = text.removeprefix("dask://").rstrip("/")
    try:
        import distributed
    except ImportError:
        raise LibraryError("a Dask cluster needs the package distributed: pip install 'llama-fitter[dask]'") from None
    try:
        make: Any = distributed.Client
        client = make(f"tcp://{address}", timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LibraryError(
            f"the Dask scheduler at {address} does not answer ({reason}): start one with 'dask scheduler', or name "
            "another one with --executor"
        ) from None
    try:
        yield client.get_executor(pure=False, retries=_RETRIES)
    finally:
        client.close()
