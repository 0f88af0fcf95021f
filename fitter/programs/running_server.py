"""Running a llama-server on a free port of this machine: started, heard, asked, ended. Sizes in bytes."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from fitter.errors import LibraryError, LlamaCppCrashError, LlamaCppError
from fitter.llama.processes.supervisor import SupervisedProgram
from fitter.programs.finding import cannot_start, ending
from fitter.programs.resident import Resident, resident
from fitter.programs.server_log import Listener, Said, reason
from fitter.text import printable

_HOST = "127.0.0.1"
_TRIES = 3
"""Ports that are tried, since another program may take one before the server does."""
_TICK = 0.05
_KEPT_LINES = 200
_LONGEST_LINE = 1 << 14
_VERBOSITY = "4"
"""``-lv``: what older versions call debug, and newer ones trace; checkpoints and the prompt cache are said there."""
_NOT_PASSED_ON = ("HOST", "PORT", "SSL_", "API_", "ALIAS", "LOG_", "MODELS_", "REUSE_PORT", "SLEEP_", "TOOLS", "UI")
"""Beginnings of llama-server's environment variables that are about who reaches it and what it logs where."""


class Gone(Exception):
    """A request was not answered: the server ended, or it took too long."""


class Running:
    """A llama-server that was started; ``running`` makes and ends it."""

    def __init__(self, words: Sequence[str], on_log: Callable[[str], None] | None) -> None:
        self.path = words[0]
        self.port = free_port()
        self._alias, self._key = f"fitter-{secrets.token_hex(8)}", secrets.token_hex(16)
        own = ["--host", _HOST, "--port", str(self.port), "--alias", self._alias, "--api-key", self._key]
        try:
            self._process = SupervisedProgram([*words, *own, "-lv", _VERBOSITY], environment())
        except OSError as error:
            raise LibraryError(cannot_start(self.path, error)) from None
        self._on_log = on_log
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
        """What its log has said so far."""
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
        """Hear what it said and look at its memory, for so many seconds. Returns its ``status``."""
        until = time.monotonic() + seconds
        self.look()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return self.status
            self._hear(line)

    def look(self) -> None:
        """Look at its memory; ``most`` is what it had when it had the most of its own."""
        now = resident(self.pid)
        if now is not None and (self.most is None or now.own > self.most.own):
            self.most = now

    def end(self) -> None:
        """End it, and hear what it still says."""
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
        """Whether it is the one that answers on its port, and nobody else."""
        try:
            status, answer = self.ask("GET", "/v1/models", None, 5.0)
            return status == 200 and any(each.get("id") == self._alias for each in answer["data"])
        except (Gone, LookupError, TypeError, AttributeError):
            return False

    def is_ready(self) -> bool:
        """Whether it has loaded the model."""
        try:
            return self.ask("GET", "/health", None, 2.0)[0] == 200
        except Gone:
            return False

    def ask(self, method: str, path: str, body: object, seconds: float) -> tuple[int, Any]:
        """The status and the JSON of an answer; raises ``Gone``. Safe to call from several threads at once."""
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
        """Why it failed, in its own words."""
        # without the control characters and the length of a line that another program wrote
        return printable(reason(self._last), 300) or "it says nothing"


def ended(server: Running, status: int, while_what: str) -> LlamaCppCrashError:
    """The error for a ``server`` that has ended while it should not."""
    server.end()
    return LlamaCppCrashError(f"{server.path} ended {while_what} ({ending(status)}): {server.why()}", tuple(server.log))


@contextmanager
def running(words: Sequence[str], patience: float, on_log: Callable[[str], None] | None = None) -> Iterator[Running]:
    """The llama-server of ``words``, its path and its arguments, once it has loaded its model; it ends with the block.

    It listens on a free port of this machine alone, and answers only who has a key that is made for it.
    ``patience``: seconds that it has to load. Raises ``LibraryError`` where it cannot be started, ``LlamaCppError``
    where it ends before it is ready, or is not ready in time.
    """
    for left in reversed(range(_TRIES)):
        server = Running(words, on_log)
        try:
            if _is_up(server, patience, is_last=not left):
                yield server
                return
        finally:
            server.end()


def _is_up(server: Running, patience: float, *, is_last: bool) -> bool:
    """Whether it has loaded its model; false where another program took its port before."""
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
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind((_HOST, 0))
        port: int = found.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    """The environment of a server: that of this process without what changes who reaches it and what it logs."""
    names = tuple(f"LLAMA_ARG_{name}" for name in _NOT_PASSED_ON)
    others = ("LLAMA_API_KEY", "LLAMA_LOG_", "LLAMA_SERVER_")
    return {name: value for name, value in os.environ.items() if not name.startswith((*names, *others))}
