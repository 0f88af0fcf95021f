"""Read which models the requests in the log of a server are for."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection
from pathlib import Path

from fitter.errors import UsageError
from fitter.programs.log_file import lines_of
from fitter.text import printable

MOST_REQUESTS = 2000
"""The most requests that are read: the last ones."""

_REQUEST = re.compile(
    rb"\bproxying request to model (?P<router>.{1,256}) on port \d+"
    rb"|\bdispatch: using local process for model: (?P<swap>[^\r\n]{0,255}[^\s])"
)
"""The line of a request: of llama-server as a router (whatever its colours and times), and of llama-swap."""

_MOST_NAMES = 3
_LONGEST_NAME = 60


def last_requests(path: Path, names: Collection[str]) -> tuple[str, ...]:
    """Read the models of the last requests in a log, in their order: ``MOST_REQUESTS`` at most.

    A router of llama-server writes a line for each request that it passes on, and llama-swap does with
    ``logLevel: debug``. Requests for other models are left out.

    Args:
        path: The log; of one longer than 256 MiB, its end is read.
        names: The models, by the names that the server has for them.

    Raises:
        UsageError: The log cannot be read, is no text, or has no request for any of ``names``.
    """
    wanted, order = frozenset(names), deque[str](maxlen=MOST_REQUESTS)
    others: dict[str, None] = {}
    for match in filter(None, map(_REQUEST.search, lines_of(path))):
        name = (match["router"] or match["swap"]).decode("utf-8", "replace")
        if name in wanted:
            order.append(name)
        elif len(others) < _MOST_NAMES:
            others[name] = None
    if not order:
        raise UsageError(_without_requests(path, names, others))
    return tuple(order)


def _without_requests(path: Path, names: Collection[str], others: Collection[str]) -> str:
    wanted = ", ".join(names) or "no model"
    if others:
        shown = ", ".join(printable(each, _LONGEST_NAME) for each in others)
        return f"{path} has requests for {shown} and none for {wanted}: name the models as the server does"
    return (
        f"{path} has no request for {wanted}: give the log of a llama-server that routes to models, or of llama-swap "
        "with logLevel: debug"
    )
