"""``fitter.Client``: ask a server (``fitter serve``) for plans, instead of planning here."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
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
from fitter.output.plan_file import plan_of
from fitter.parameters.values import shown
from fitter.planning.plan.plan import Plan

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
_LONGEST = 64 << 20
"""Most bytes of an answer that are read."""


class Client:
    """Asks a server for plans; nothing of llama.cpp is needed here. Threads may ask at the same time.

    Args:
        url: The server's address, as it prints it.
        timeout: Seconds to wait for an answer.

    Raises:
        UsageError: ``url`` is no address of a web server.
    """

    def __init__(self, url: str = "http://127.0.0.1:8080/", *, timeout: float = 120.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{shown(url)} is no address of a server: give one such as http://127.0.0.1:8080/")
        self._url, self._timeout = url.rstrip("/"), timeout
        # an address of this machine or network is no matter of a proxy
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fit(self, model: str, **keywords: Any) -> Plan:
        """Ask for a plan, as ``fitter.fit`` makes it.

        Args:
            model: An address, a shape, or a path below the server's directory.
            keywords: Those of ``fitter.fit`` that the server takes; its page ``/api`` lists them.

        Raises:
            FitterError: As ``fitter.fit`` raises it; ``RemoteError`` if the server does not answer.
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
            RemoteError: The server does not answer.
        """
        answers: list[Plan | FitterError] = []
        for start in range(0, len(questions), _MOST_AT_ONCE):
            asked = [dict(each) for each in questions[start : start + _MOST_AT_ONCE]]
            document = self._ask("/api/v1/plans", {"questions": asked})
            answers += [self._answer(each["status"], each["answer"]) for each in document["answers"]]
        return answers

    def health(self) -> Mapping[str, Any]:
        """Return the server's version, how many questions wait, and whether its llama.cpp has started (``ready``).

        Raises ``RemoteError`` if it does not answer.
        """
        health: dict[str, Any] = self._ask("/health", None)
        return health

    def _answer(self, status: int, document: Any) -> Plan | FitterError:
        if status != 200:
            return _ERRORS.get(status, LlamaCppError)(str(document.get("error", "no reason is given")))
        return plan_of(document, self._url)

    def _ask(self, path: str, body: Any) -> Any:
        try:
            data = None if body is None else json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"a question holds only what JSON has: {error}") from None
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return json.loads(answer.read(_LONGEST))
        except urllib.error.HTTPError as error:
            try:
                reason = json.loads(error.read(_LONGEST))["error"]
            except (ValueError, KeyError, TypeError):
                reason = f"{self._url} answered with status {error.code}: is it a server of fitter's?"
            raise _ERRORS.get(error.code, RemoteError)(str(reason)) from None
        except (OSError, ValueError) as error:
            reason = " ".join(str(getattr(error, "reason", error)).split())
            raise RemoteError(f"{self._url} does not answer ({reason}): start it with fitter serve") from None
