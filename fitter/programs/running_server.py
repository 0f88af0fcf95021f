"""Run a llama-server on a free port of this machine: start it, read its log, ask it, end it. Bytes."""

from __future__ import annotations

import http.client
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fitter.errors import LibraryError, LlamaCppCrashError, LlamaCppError
from fitter.llama.processes.supervisor import SupervisedProgram
from fitter.programs.finding import cannot_start, ending
from fitter.programs.server_log import Listener, Said, reason
from fitter.text import printable

_HOST = "127.0.0.1"
_TRIES = 3
"""Ports to try, because another program may take one first."""
_TICK = 0.05
_KEPT_LINES = 200
_LONGEST_LINE = 1 << 14
_VERBOSITY = "4"
"""``-lv`` that logs checkpoints and prompt cache: debug in older versions, trace in newer ones."""
_NOT_PASSED_ON = ("HOST", "PORT", "SSL_", "API_", "ALIAS", "LOG_", "MODELS_", "REUSE_PORT", "SLEEP_", "TOOLS", "UI")
"""Beginnings of llama-server's environment variables for its network and log."""


class Gone(Exception):
    """The server ended or took too long to answer."""


class Running:
    """A running llama-server; ``running`` starts and ends it."""

    def __init__(
        self,
        words: Sequence[str],
        on_log: Callable[[str], None] | None,
        variables: Mapping[str, str] | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = words[0]
        self.port = free_port()
        self._alias, self._key = f"fitter-{secrets.token_hex(8)}", secrets.token_hex(16)
        server_options = ["--host", _HOST, "--port", str(self.port), "--alias", self._alias, "--api-key", self._key]
        try:
            all_variables = {**environment(), **(variables or {})}
            self._process = SupervisedProgram([*words, *server_options, "-lv", _VERBOSITY], all_variables)
        except OSError as error:
            raise LibraryError(cannot_start(self.path, error)) from None
        self._on_log, self._on_tick = on_log, on_tick
        self._listener = Listener()
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.most: Resident | None = None

    def _read(self) -> None:
        with self._process.output as output:
            while line := output.readline(_LONGEST_LINE):
                self._lines.put(line.decode(errors="replace").rstrip())

    @property
    def said(self) -> Said:
        """The figures of its log until now."""
        return self._listener.said

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines of its log."""
        return tuple(self._last)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; ``None`` while it runs."""
        return self._process.status

    def tick(self, seconds: float = _TICK) -> int | None:
        """Read its log and its memory for ``seconds``; return its ``status``."""
        until = time.monotonic() + seconds
        self.look()
        self._on_tick()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return self.status
            self._hear(line)

    def look(self) -> None:
        """Read its memory; ``most`` is the reading with the most memory of its own."""
        now = resident(self.pid)
        if now is not None and (self.most is None or now.own > self.most.own):
            self.most = now

    def end(self) -> None:
        """End it, and read the rest of its log."""
        try:
            self._process.end()
        finally:
            self._reader.join(1.0)
            while not self._lines.empty():
                self._hear(self._lines.get())

    def _hear(self, line: str) -> None:
        self._last.append(line)
        self._listener.hear(line)
        if self._on_log:
            self._on_log(printable(line))

    def is_itself(self) -> bool:
        """Return whether this server, not another program, answers on its port."""
        try:
            status, answer = self.ask("GET", "/v1/models", None, 5.0)
            return status == 200 and any(each.get("id") == self._alias for each in answer["data"])
        except (Gone, LookupError, TypeError, AttributeError):
            return False

    def is_ready(self) -> bool:
        """Return whether it has loaded the model."""
        try:
            return self.ask("GET", "/health", None, 2.0)[0] == 200
        except Gone:
            return False

    def ask(self, method: str, path: str, body: object, seconds: float) -> tuple[int, Any]:
        """Send a request from any thread; return status and JSON of the answer. Raises ``Gone``."""
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=max(0.01, seconds))
        try:
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            try:
                return answer.status, json.loads(text)
            except ValueError:
                return answer.status, None
        except (OSError, http.client.HTTPException) as error:
            raise Gone(str(error)) from None
        finally:
            connection.close()

    def why(self) -> str:
        """Return the reason of its failure, in its own words."""
        # another program wrote the line: remove control characters, and cut it
        return printable(reason(self._last), 300) or "it says nothing"


def ended(server: Running, status: int, while_what: str) -> LlamaCppCrashError:
    """Make the error for a server that ended unexpectedly."""
    server.end()
    return LlamaCppCrashError(f"{server.path} ended {while_what} ({ending(status)}): {server.why()}", tuple(server.log))


@contextmanager
def running(
    words: Sequence[str],
    patience: float,
    on_log: Callable[[str], None] | None = None,
    variables: Mapping[str, str] | None = None,
    on_tick: Callable[[], None] = lambda: None,
) -> Iterator[Running]:
    """Start a llama-server, wait until it has loaded its model, and end it with the block.

    It listens on a free port of this machine only, and answers only requests with a new random key.

    Args:
        words: Its path and arguments.
        patience: Seconds for the load.
        on_log: Called with every line of its log.
        variables: Further variables of its environment.
        on_tick: Called again and again while it is awaited.

    Raises:
        LibraryError: It cannot be started.
        LlamaCppError: It ended before it was ready, or is not ready in time.
    """
    for left in reversed(range(_TRIES)):
        server = Running(words, on_log, variables, on_tick)
        try:
            if _is_up(server, patience, is_last=not left):
                yield server
                return
        finally:
            server.end()


def _is_up(server: Running, patience: float, *, is_last: bool) -> bool:
    """Return whether it has loaded its model; false if another program took its port."""
    deadline = time.monotonic() + patience
    while (status := server.tick()) is None:
        if server.is_ready():
            if server.is_itself():
                return True
            # another program answers there, and ours cannot
            break
        if time.monotonic() > deadline:
            server.end()
            raise LlamaCppError(
                f"{server.path} has not loaded the model within {patience:.0f} seconds: give it more with --timeout",
                server.log,
            )
    server.tick()
    if status is not None and server.said.can_bind:
        raise ended(server, status, "before it had loaded the model")
    if is_last:
        _refuse_port(server)
    return False


def _refuse_port(server: Running) -> NoReturn:
    raise LlamaCppError(
        f"{server.path} got no port of its own: another program took {_TRIES} free ones before it, last {server.port}; "
        "try again",
        server.log,
    )


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    """Return this process's environment without variables for the server's network and log."""
    names = tuple(f"LLAMA_ARG_{name}" for name in _NOT_PASSED_ON)
    others = ("LLAMA_API_KEY", "LLAMA_LOG_", "LLAMA_SERVER_")
    return {name: value for name, value in os.environ.items() if not name.startswith((*names, *others))}


@dataclass(frozen=True)
class Resident:
    """Resident memory of a process at one moment."""

    total: int
    """All pages."""
    of_files: int
    """Pages of mapped files, such as the model's, which the system can drop."""

    @property
    def own(self) -> int:
        """Its own pages."""
        return self.total - self.of_files


def resident(pid: int, root: Path = Path("/")) -> Resident | None:
    """Return the memory of the process ``pid``; ``None`` if the system does not say, or the process has ended.

    Args:
        pid: The process.
        root: Directory of ``proc``.
    """
    try:
        lines = (root / f"proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        sizes = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS:", "RssFile:")))
        return Resident(*(int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "RssFile")))
    except (OSError, KeyError, ValueError):
        return None
