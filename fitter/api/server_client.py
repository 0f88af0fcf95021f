"""``fitter.Client``: ask a server (``fitter serve``) for plans, instead of planning here."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

from fitter.errors import (
    CancelledError,
    FitterError,
    LlamaCppError,
    ModelError,
    RemoteError,
    TimeLimitError,
    UsageError,
    WorkerError,
)
from fitter.output.documents.plan_document import plan_of
from fitter.parameters.table import PARAMETERS
from fitter.parameters.values import shown
from fitter.planning.plan.plan import Plan
from fitter.text import LONGEST_NAME, LONGEST_TEXT, printable

_ERRORS: dict[int, type[FitterError]] = {
    400: UsageError,
    409: CancelledError,
    422: ModelError,
    500: LlamaCppError,
    503: WorkerError,
    504: TimeLimitError,
}
"""The error of each status of an answer."""

_MOST_AT_ONCE = 64
"""Most questions in a request."""
_HEADERS = {"Content-Type": "application/json"}
_LONGEST = 64 << 20
"""Most bytes of an answer that are read."""


class Client:
    """Asks a server for plans; nothing of llama.cpp is needed here. Threads may ask at the same time.

    Args:
        url: The server's address, as it prints it.
        timeout: Seconds to wait for the whole of an answer.

    Raises:
        UsageError: ``url`` is no address of a web server, or ``timeout`` no time.
    """

    def __init__(self, url: str = "http://127.0.0.1:8080/", *, timeout: float = 120.0) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme not in ("http", "https"):
            raise UsageError(f"{shown(url)} is no address of a server: give one such as http://127.0.0.1:8080/")
        self._url, self._path, self._is_secure = url.rstrip("/"), parts.path.rstrip("/"), parts.scheme == "https"
        self._timeout: float = PARAMETERS["timeout"].check(timeout)

    def fit(self, model: str, **keywords: Any) -> Plan:
        """Ask for a plan, as ``fitter.fit`` makes it.

        Args:
            model: An address, a shape, or a path below the server's directory.
            keywords: Those of ``fitter.fit`` that the server takes; its page ``/api`` lists them.

        Raises:
            FitterError: As ``fitter.fit`` raises it; ``RemoteError`` if the server does not answer in time, or is
                none of fitter's.
        """
        (answer,) = self.fit_all([{"model": model, **keywords}])
        if isinstance(answer, FitterError):
            raise answer
        return answer

    def fit_all(self, questions: Sequence[Mapping[str, Any]]) -> list[Plan | FitterError]:
        """Ask for several plans at once; return a plan or an error for each question, in their order.

        Args:
            questions: The keywords of each, ``model`` among them.

        Raises:
            UsageError: A question is written wrongly, so that none was read.
            RemoteError: The server does not answer in time, or is none of fitter's.
        """
        answers: list[Plan | FitterError] = []
        for start in range(0, len(questions), _MOST_AT_ONCE):
            asked = [dict(each) for each in questions[start : start + _MOST_AT_ONCE]]
            document = self._ask("/api/v1/plans", {"questions": asked})
            try:
                found = [(each["status"], each["answer"]) for each in document["answers"]]
            except (LookupError, TypeError):
                found = []
            if len(found) != len(asked):
                raise self._no_server("answers in another way")
            answers += [self._answer(*each) for each in found]
        return answers

    def health(self) -> Mapping[str, Any]:
        """Return the server's version, how many questions wait, and whether its llama.cpp has started (``ready``).

        Raises ``RemoteError`` if it does not answer.
        """
        health = self._ask("/health", None)
        if not isinstance(health, dict):
            raise self._no_server("answers in another way")
        return health

    def _answer(self, status: Any, document: Any) -> Plan | FitterError:
        if status == 200:
            try:
                return plan_of(document, self._url)
            except UsageError as error:
                return RemoteError(str(error))
        return self._error(status, document)

    def _error(self, status: Any, document: Any) -> FitterError:
        """Make the error of an answer that is no plan."""
        reason = document.get("error") if isinstance(document, dict) else None
        if not isinstance(status, int) or not isinstance(reason, str):
            return self._no_server(f"answered with status {shown(status)}")
        return _ERRORS.get(status, RemoteError)(printable(reason, LONGEST_TEXT))

    def _no_server(self, what: str) -> RemoteError:
        return RemoteError(f"{self._url} {what}: is it a server of fitter's?")

    def _ask(self, path: str, body: Any) -> Any:
        try:
            data = None if body is None else json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"a question holds only what JSON has: {error}") from None
        # not by urllib: an address of this machine or network is no matter of a proxy, and an answer leads nowhere else
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        answering: Future[tuple[int, bytes]] = Future()

        def ask() -> None:
            try:
                connection.request("GET" if data is None else "POST", self._path + path, data, _HEADERS)
                answer = connection.getresponse()
                answering.set_result((answer.status, answer.read(_LONGEST)))
            except BaseException as error:
                answering.set_exception(error)
            finally:
                connection.close()

        # a connection limits the time of each read: a server that sends a byte now and then would go on forever
        threading.Thread(target=ask, daemon=True).start()
        try:
            status, text = answering.result(self._timeout)
        except (TimeoutError, FutureTimeout):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
            raise RemoteError(
                f"{self._url} did not answer within {self._timeout:g} s: give it more time with timeout"
            ) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = printable(str(error), LONGEST_NAME) or type(error).__name__
            raise RemoteError(f"{self._url} does not answer ({reason}): start it with fitter serve") from None
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if status == 200 and document is not None:
            return document
        raise self._error(status, document)
