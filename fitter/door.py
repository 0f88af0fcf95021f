"""The one door for what comes in from Python: keywords by the table of parameters, checked before anything is done."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from fitter.errors import UsageError
from fitter.kinds import Path
from fitter.parameters import PARAMETERS, Parameter, taken_by

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MODEL = Parameter(Path(), name="model")


def door(call: Any = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A public call whose keywords are checked, and converted to what fitter keeps.

    ``call`` is the class of the keywords that it takes beside its own. ``None`` is not set: such a keyword is not
    passed on. The signature has every keyword, and the documentation what each one is.

    The call raises ``UsageError`` for a keyword that it does not have, and for a value that makes no sense.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        own = _own(function)

        @functools.wraps(function)
        def enter(*args: _P.args, **given: _P.kwargs) -> _R:
            known = _known(own, call)
            names = [name for name, each in own.items() if each.kind is not each.KEYWORD_ONLY]
            for name in given:
                if name not in own and name not in known:
                    raise UsageError(_unknown(function.__name__, name, (*own, *known)))
            values = {**dict(zip(names, args, strict=False)), **given}
            checked = {name: _checked(known, name, value) for name, value in values.items() if value is not None}
            for name, value in values.items():
                if value is None and name in own and own[name].default is inspect.Parameter.empty:
                    checked[name] = _checked(known, name, value)
            # what is too much is said as Python says it
            return function(*args[len(names) :], **checked)  # type: ignore[arg-type]

        enter.__signature__ = _signature(function, own, call)  # type: ignore[attr-defined]
        enter.__doc__ = _documentation(function, own, call)
        return enter

    return decorate


def _own(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that a function itself has."""
    found = inspect.signature(function).parameters
    return {name: each for name, each in found.items() if each.kind is not each.VAR_KEYWORD}


def _known(own: Mapping[str, Any], call: Any) -> dict[str, Parameter]:
    taken = {each.name: each for each in taken_by(call)} if call else {}
    return {**{name: PARAMETERS[name] for name in own if name in PARAMETERS}, **taken}


def _checked(known: Mapping[str, Parameter], name: str, value: Any) -> Any:
    each = _MODEL if name == "model" else known.get(name)
    return value if each is None else each.check(value)


def _unknown(call: str, name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"{call} has no keyword {name}: {f'did you mean {close[0]}?' if close else f'see help(fitter.{call})'}"


def _signature(function: Callable[..., Any], own: Mapping[str, inspect.Parameter], call: Any) -> inspect.Signature:
    taken = (
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=each.hint)
        for each in (taken_by(call) if call else ())
    )
    return inspect.signature(function).replace(parameters=[*own.values(), *taken])


def _documentation(function: Callable[..., Any], own: Mapping[str, Any], call: Any) -> str:
    lines = (f"    ``{name}``: {each.text}" for name, each in _known(own, call).items())
    title = "Keywords, none of which is set where it is ``None``:"
    return "\n".join([inspect.cleandoc(function.__doc__ or ""), "", title, "", *lines])
