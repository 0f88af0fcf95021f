"""Executors named by a text: Dask clusters."""

from __future__ import annotations

import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from fitter.errors import LibraryError, UsageError
from fitter.installation import install_command
from fitter.parameters.values import shown
from fitter.text import LONGEST_NAME, printable
from fitter.version import VERSION

_PACKAGE = "distributed"
_DASK = re.compile(r"dask://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>\d{1,5})/?")
PATIENCE = 10.0
"""Seconds for a scheduler's answer, and for its first worker."""
LOST_SECONDS = 60.0
"""Seconds without any worker after which the cluster is lost: restarting a worker takes some."""
_RETRIES = 3
"""How often a cell goes to another worker after its worker was lost."""


def check_executor(text: str) -> None:
    """Raise ``UsageError`` if ``text`` names no executor, ``LibraryError`` if its package is missing."""
    match = _DASK.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(f"--executor {shown(text)}: name the scheduler of a Dask cluster, such as dask://host:8786")
    if sys.modules.get(_PACKAGE, True) is None or find_spec(_PACKAGE) is None:
        raise LibraryError(f"a Dask cluster needs the package distributed: {install_command('dask')}")


@contextmanager
def executor_of(text: str) -> Iterator[tuple[Executor, Callable[[], None]]]:
    """Connect to the executor that ``text`` names; yield it, and a check that raises ``LibraryError`` once it is lost.

    Raises:
        UsageError: ``text`` names no executor.
        LibraryError: It cannot be reached, or a worker has no fitter of this version.
    """
    check_executor(text)
    address = text.removeprefix("dask://").rstrip("/")
    from distributed.utils import silence_logging_cmgr

    silent: Any = silence_logging_cmgr
    with silent(logging.CRITICAL):
        client = _connected(address)
        try:
            _check_workers(client, address)
            yield client.get_executor(pure=False, retries=_RETRIES), _Watch(client, address).check
        finally:
            # the loss of the cluster has been reported already
            with suppress(Exception):
                client.close(timeout=2)


def _connected(address: str) -> Any:
    """Connect to the scheduler. Raises ``LibraryError``.

    A server may accept the connection and never answer, so it runs on another thread.
    """
    from distributed import Client

    make: Any = Client
    clients: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            clients.put(make(f"tcp://{address}", timeout=PATIENCE, set_as_default=False))
        except BaseException as error:
            clients.put(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        client = clients.get(timeout=PATIENCE + 1)
    except queue.Empty:
        client = TimeoutError(f"nothing that a scheduler says in {PATIENCE:g} s")
    if isinstance(client, BaseException):
        raise LibraryError(
            f"the Dask scheduler at {address} does not answer ({_error_text(client)}): start one with 'dask "
            "scheduler', or name another one with --executor"
        ) from None
    return client


def _check_workers(client: Any, address: str) -> None:
    """Raise ``LibraryError`` without workers, or if one lacks this fitter: a cell would fail there."""
    import pydoc

    try:
        client.wait_for_workers(1, timeout=PATIENCE)
        # pydoc is in every Python
        versions = client.run(pydoc.locate, "fitter.version.VERSION", on_error="return")
    except Exception as error:
        if client.status == "running" and isinstance(error, TimeoutError):
            raise _no_worker(address) from None
        raise _lost_error(address, _error_text(error)) from None
    for worker, version in versions.items():
        if version != VERSION:
            has = f"has llama-fitter {version}" if isinstance(version, str) else "has no llama-fitter"
            raise LibraryError(
                f"the Dask worker {worker} {has}, and this machine {VERSION}: install the same on both, with "
                "'llama-fitter[dask]'"
            )


class _Watch:
    """Watches a cluster: its client would wait forever for a worker."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address
        self._seen = time.monotonic()

    def check(self) -> None:
        """Raise ``LibraryError`` if the scheduler is gone, or all workers for a while."""
        try:
            workers = self._client.scheduler_info()["workers"]
        except Exception as error:
            raise _lost_error(self._address, _error_text(error)) from None
        if workers:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > LOST_SECONDS:
            raise _no_worker(self._address)


def _no_worker(address: str) -> LibraryError:
    return LibraryError(
        f"the Dask scheduler at {address} has no worker: start one with 'dask worker tcp://{address}', and go on with "
        "--resume"
    )


def _lost_error(address: str, said: str) -> LibraryError:
    return LibraryError(f"the Dask scheduler at {address} was lost ({said}): start it again, and go on with --resume")


def _error_text(error: BaseException) -> str:
    return printable(" ".join(str(error).split()), LONGEST_NAME) or type(error).__name__
