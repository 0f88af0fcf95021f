"""The decorator of public calls that take a ``worker``, whose own timeout and log apply."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from fitter.api.checked_call import door
from fitter.errors import UsageError
from fitter.llama.client import Worker
from fitter.parameters.values import shown

_P = ParamSpec("_P")
_R = TypeVar("_R")


def door_with_worker(call: Any = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a public call as ``door`` does, and check its ``worker``.

    The call also raises ``UsageError`` if ``worker`` is not a ``Worker``, or if ``timeout`` or ``on_log`` is given
    beside it and is not the worker's own.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        enter = door(call)(function)

        @functools.wraps(enter)
        def with_worker(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            worker = kwargs.get("worker")
            if worker is not None and not isinstance(worker, Worker):
                raise UsageError(f"worker is {shown(worker)}: give a fitter.llama.client.Worker, or leave it out")
            if worker is not None:
                for name, own in (("timeout", worker.timeout), ("on_log", worker.on_log)):
                    if kwargs.get(name) not in (None, own):
                        raise UsageError(
                            f"the given worker has its own {name}: leave {name} out of this call, or make the worker "
                            f"with fitter.llama.client.Worker({name}=...)"
                        )
            return enter(*args, **kwargs)

        return with_worker

    return decorate
