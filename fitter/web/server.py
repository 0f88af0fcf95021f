"""The web server: where it listens, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import os
import signal
import socket
import threading
import time
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from fitter import system
from fitter.api.planner import Planner
from fitter.errors import EXIT_FITS, UsageError
from fitter.llama.build import build_folder
from fitter.llama.processes import memory_limit
from fitter.llama.worker import process
from fitter.model.files import reach
from fitter.output.pages import page
from fitter.parameters.table import AnyPath
from fitter.text import LONGEST_TEXT, printable
from fitter.web.allowed_files import Root
from fitter.web.app import Settings, application
from fitter.web.guard import LONGEST_HEADERS, Connection, Hosts
from fitter.web.pool import WORKERS, Pool
from fitter.web.questions import PROGRAM, SECONDS

HOST, PORT = "127.0.0.1", 8080
_CONNECTIONS = 256
_WAITING = 128
"""Connections that the system keeps until they are accepted."""
_SILENCE = 60.0
"""Seconds before the same complaint is made again."""
_GRACE = 3
"""Seconds for questions to end with the server."""
_LONGEST_END = 8.0
"""Seconds after which the server ends whatever still runs, such as reading a directory that does not answer."""
_AGAIN = 0.1
"""Seconds between two checks for newly started processes."""
_SMALL_MODEL = "shape://qwen3-0.6b"
"""The model of the first question of a planner, which needs no file."""


def serve(
    root: Path | None = None,
    host: str = HOST,
    port: int = PORT,
    workers: int = WORKERS,
    *,
    llama_cpp: AnyPath | None = None,
    allow_private_addresses: bool = False,
    open_browser: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the planner until the process is interrupted.

    Args:
        root: Directory whose models are offered.
        host: Address to listen at.
        port: Port to listen at; 0 is any free one.
        workers: Plans at the same time.
        llama_cpp: The llama.cpp to use, as in ``fit``.
        allow_private_addresses: Whether to fetch headers from private networks.
        open_browser: Whether to open the page in the default browser.
        say: Called with the server's address once it listens.

    Raises:
        UsageError: ``llama_cpp``, ``root`` or ``host`` cannot be used.
        LibraryError: A package or a llama.cpp is missing.
    """
    page.check_installed()
    build_folder.find(build_folder.named(None if llama_cpp is None else os.fsdecode(llama_cpp)))
    settings = Settings(None if root is None else Root.of(root), host)
    # a plan may have two
    memory_limit.divide(2 * workers)
    pool = Pool(workers, make=partial(Planner, llama_cpp=llama_cpp), first=(_SMALL_MODEL, first_question))
    reach.only_public(not allow_private_addresses)
    with _listening(host, port) as sock:
        number = sock.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        server = _Server(
            uvicorn.Config(
                application(settings, pool),
                http=Connection,
                ws="none",
                lifespan="on",
                # the application itself reports errors
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=_WAITING,
                h11_max_incomplete_event_size=LONGEST_HEADERS,
                limit_concurrency=_CONNECTIONS,
                timeout_graceful_shutdown=_GRACE,
            ),
            pool,
            say,
        )
        for each in (signal.SIGINT, signal.SIGTERM):
            # restore handlers after uvicorn: a requested end is no failure
            signal.signal(each, server.asked_to_end)
        say(f"serving at http://{shown}:{number}/ (Ctrl-C ends it)")
        if Hosts.of(host).is_everywhere:
            say("other machines can ask it, and there is no password: do so in a network that you trust")
        if open_browser:
            _open(f"http://{'127.0.0.1' if Hosts.of(host).is_everywhere else shown}:{number}/", say)
        server.run(sockets=[sock])


def first_question(planner: Planner) -> None:
    """Start the processes of a planner and import what an answer needs. Raises ``FitterError``."""
    json.dumps(planner.fit(gpus=["24GiB"], n_ctx=4096, program=PROGRAM, time_limit=SECONDS).to_dict())


def _open(url: str, say: Callable[[str], None]) -> None:
    """Open ``url`` in the default browser, in a thread: a browser may run until it is closed."""

    def run() -> None:
        if not _has_display() or not webbrowser.open(url):
            say(f"no browser can be opened here: open {url} in one")

    # a relative entry would start a program of the current directory
    os.environ["PATH"] = os.pathsep.join(filter(os.path.isabs, os.get_exec_path()))
    threading.Thread(target=run, daemon=True).start()


def _has_display() -> bool:
    """Return whether a browser can have a window, or the user names one; otherwise Python may start a text browser."""
    return system.has_display() or "BROWSER" in os.environ


class _Server(uvicorn.Server):
    """uvicorn, without waiting for plans at its end."""

    def __init__(self, config: uvicorn.Config, pool: Pool, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self._pool, self._say, self._said = pool, say, -_SILENCE

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; what fails outside of an answer is then said in a line."""
        asyncio.get_running_loop().set_exception_handler(self._complain)
        await super().startup(sockets)

    def _complain(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.should_exit or time.monotonic() < self._said + _SILENCE:
            return
        self._said = time.monotonic()
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self._say("this process may open no more files, so new connections wait: raise their limit (ulimit -n)")
        else:
            self._say(printable(f"{context['message']}: {error}", LONGEST_TEXT))

    def asked_to_end(self, *_: object) -> None:
        """Handle a signal: end as soon as possible."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End every question, then the connections that wait for answers; wait for no worker."""
        threading.Thread(target=_end, daemon=True).start()
        self._pool.stop()
        await super().shutdown(sockets)


def _end() -> None:
    """Kill processes of llama.cpp, also starting ones, until this process ends."""
    end = time.monotonic() + _LONGEST_END
    while time.monotonic() < end:
        process.interrupt_all()
        time.sleep(_AGAIN)
    os._exit(EXIT_FITS)


def _listening(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ``UsageError``."""
    if not host:
        raise UsageError("--host is empty: name an address, such as 127.0.0.1, or 0.0.0.0 for all of this machine's")
    try:
        is_6 = isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        is_6 = False
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if is_6 else socket.AF_INET, backlog=_WAITING)
    except OSError as error:
        # unknown names have their own error numbers
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UsageError(f"nothing can listen at {host}:{port} ({reason}): give another --port, or --host") from None
