"""Decorators of public calls: check every keyword against the table of parameters before anything runs."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from fitter.errors import FitterError, LlamaCppError, UsageError
from fitter.model.files import header_cache
from fitter.model.files.source import with_addresses
from fitter.parameters.kinds import Path
from fitter.parameters.table import PARAMETERS, Parameter, taken_by
from fitter.parameters.values import shown

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MODEL = Parameter(Path(), name="model")


def checked_call(call: Any = None, *, called: str | None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a decorator that checks and converts the keywords of a public call.

    The decorated call shows every keyword in its signature and its docstring. A keyword that is ``None`` counts as not
    set. A call raises ``UsageError`` for an unknown keyword or an invalid value.

    Args:
        call: ``TypedDict`` of the keywords that the call accepts beside its own.
        called: Name of the call in error messages; by default the function's.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = _own(function)

        @functools.wraps(function)
        def enter(*args: _P.args, **given: _P.kwargs) -> _R:
            table = _table(signature, call)
            names = [name for name, each in signature.items() if each.kind is not each.KEYWORD_ONLY]
            for word in given:
                if word not in signature and word not in table:
                    raise UsageError(_unknown_keyword(called or function.__name__, word, (*signature, *table)))
            values = {**dict(zip(names, args, strict=False)), **given}
            checked = {name: _check_value(table, name, value) for name, value in values.items() if value is not None}
            # a word such as "auto" may mean not set
            checked = {name: value for name, value in checked.items() if value is not None}
            for name, value in values.items():
                if value is None and name in signature and signature[name].default is inspect.Parameter.empty:
                    checked[name] = _check_value(table, name, value)
            with header_cache.reading(), naming_addresses():
                # Python itself reports too many positional arguments
                return function(*args[len(names) :], **checked)  # type: ignore[arg-type]

        enter.__signature__ = _signature(function, signature, call)  # type: ignore[attr-defined]
        enter.__doc__ = _documented_text(function, signature, call)
        return enter

    return decorate


def checked_worker_call(call: Any = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a decorator like ``checked_call`` for a call that accepts a ``worker``.

    A call also raises ``UsageError`` where ``worker`` is no ``Worker``, or where ``timeout`` or ``on_log`` differs from
    the worker's.
    """

    from fitter.llama.client import Worker

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        enter = checked_call(call)(function)

        @functools.wraps(enter)
        def with_worker(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            worker = kwargs.get("worker")
            if worker is not None and not isinstance(worker, Worker):
                raise UsageError(f"worker is {shown(worker)}: give a fitter.llama.client.Worker, or leave it out")
            if worker is not None:
                for name, of_worker in (("timeout", worker.timeout), ("on_log", worker.on_log)):
                    if kwargs.get(name) not in (None, of_worker):
                        raise UsageError(
                            f"the given worker has its own {name}: leave {name} out of this call, or make the worker "
                            f"with fitter.llama.client.Worker({name}=...)"
                        )
            return enter(*args, **kwargs)

        return with_worker

    return decorate


@contextmanager
def naming_addresses() -> Iterator[None]:
    """Put the address of a remote model into the errors of the ``with`` block, in place of its local copy."""
    try:
        yield
    except FitterError as error:
        _say_addresses(error)
        raise


def _own(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters in the function's own signature, by name."""
    parameters = inspect.signature(function).parameters
    return {name: each for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}


def _table(signature: Mapping[str, Any], call: Any) -> dict[str, Parameter]:
    """Return the table's entries for all keywords of a call, by name."""
    taken = {each.name: each for each in taken_by(call)} if call else {}
    return {**{name: PARAMETERS[name] for name in signature if name in PARAMETERS}, **taken}


def _check_value(table: Mapping[str, Parameter], name: str, value: Any) -> Any:
    each = _MODEL if name == "model" else table.get(name)
    return value if each is None else each.check(value)


def _say_addresses(error: FitterError) -> None:
    error.args = tuple(with_addresses(each) if isinstance(each, str) else each for each in error.args)
    if isinstance(error, LlamaCppError):
        error.log = tuple(map(with_addresses, error.log))


def _unknown_keyword(call: str, name: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"{call} has no keyword {name}: {f'did you mean {close[0]}?' if close else f'see help(fitter.{call})'}"


def _signature(
    function: Callable[..., Any], signature: Mapping[str, inspect.Parameter], call: Any
) -> inspect.Signature:
    taken = (
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=each.hint)
        for each in (taken_by(call) if call else ())
    )
    return inspect.signature(function).replace(parameters=[*signature.values(), *taken])


def _documented_text(function: Callable[..., Any], signature: Mapping[str, Any], call: Any) -> str:
    lines = (f"    ``{name}``: {each.text}" for name, each in _table(signature, call).items())
    title = "Keywords (``None`` means not set):"
    return "\n".join([inspect.cleandoc(function.__doc__ or ""), "", title, "", *lines])
