"""The door of the calls that take a ``worker``: limits hold, and a worker keeps its own timeout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fitter.errors import UsageError
from fitter.llama.client import Worker
from fitter.planning import limits

_P = ParamSpec("_P")
_R = TypeVar("_R")


def held(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``limits.held``, and ``UsageError`` for a ``timeout`` or an ``on_log`` that is not the given worker's own."""
    call = limits.held(function)

    @functools.wraps(function)
    def with_worker(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        worker = kwargs.get("worker")
        if isinstance(worker, Worker):
            for name, own in (("timeout", worker.timeout), ("on_log", worker.on_log)):
                if kwargs.get(name) not in (None, own):
                    raise UsageError(
                        f"the worker that is given has its own {name}: leave {name} out of this call, and give it to "
                        f"fitter.llama.client.Worker({name}=...)"
                    )
        return call(*args, **kwargs)

    return with_worker
