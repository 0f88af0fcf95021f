"""From a model's path, or a plan, to a ``llama_cpp.Llama``: what ``fitter.Llama`` and ``Plan.load`` do."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitter.errors import ModelError, OutOfMemoryError, UsageError
from fitter.model.source import model_files, show
from fitter.parameters import CACHE_TYPES, SPLIT_MODES
from fitter.planning.plan import stamp_of

if TYPE_CHECKING:
    import llama_cpp

    from fitter.api import Plan

REFITS = 2
"""How often a load that was refused memory is fitted again."""


def Llama(model_path: str | os.PathLike[str], **kwargs: Any) -> llama_cpp.Llama:
    """Fit ``model_path`` and load it: a ``llama_cpp.Llama`` with the whole plan applied, which is its ``plan``.

    Keywords of ``fitter.fit`` go there (``n_ctx``, ``type_k``, ``margin``, ``rpc``, ...), all others to
    ``llama_cpp.Llama`` (``n_threads``, ``chat_format``, ``verbose``, ...); ``embedding=True`` goes to both. Where
    another process took the memory meanwhile, it is fitted again, at most twice, with a ``PlanWarning``.

    Raises ``PlanError`` where the model does not fit, and what ``fitter.fit`` and ``Plan.load`` raise.
    """
    from fitter import api

    known = inspect.signature(api.fit).parameters
    output = _output()
    asked = {name: _as_fit_says(name, value) for name, value in kwargs.items() if name in known and name != "model"}
    rest = {name: value for name, value in kwargs.items() if name not in asked}
    # Llama's word for a default; fit has others
    asked = {name: value for name, value in asked.items() if value is not None}
    output.check_names(rest)
    return load(api.fit(model_path, **asked), rest)


def _as_fit_says(name: str, value: Any) -> Any:
    """``value`` in ``fit``'s words, where it is in ``Llama``'s: ggml's numbers, and a ``bool`` for flash attention.

    Raises ``UsageError`` for a number that says nothing.
    """
    if name == "flash_attn" and isinstance(value, bool):
        return "on" if value else "off"
    numbers = {"type_k": CACHE_TYPES, "type_v": CACHE_TYPES, "split_mode": SPLIT_MODES}
    if name not in numbers or isinstance(value, bool) or not isinstance(value, int):
        return value
    for word, number in numbers[name].items():
        if number == value:
            return word
    raise UsageError(f"{name}={value} is none of {', '.join(f'{n} ({word})' for word, n in numbers[name].items())}")


def load(plan: Plan, kwargs: Mapping[str, Any]) -> llama_cpp.Llama:
    """Load ``plan``, or what fits now where a device refuses memory that it counts on."""
    from fitter import api

    output = _output()
    timeout = plan.asked.get("timeout", api.DEFAULT_TIMEOUT)
    for again in range(REFITS + 1):
        check_unchanged(plan)
        try:
            loaded: llama_cpp.Llama = output.load(plan, plan.model.path, kwargs, timeout)
            return loaded
        except OutOfMemoryError as refused:
            if not plan.asked:
                raise
            if again == REFITS:
                message = f"{refused} (fitted again {REFITS} times)"
                raise OutOfMemoryError(message, refused.device, refused.missing, refused.log) from refused
            output.warn(f"{refused}. Fitting again with the memory that is free now ({again + 1} of {REFITS})")
            plan = _refit(plan, refused)
    raise AssertionError("every load either succeeds or raises")


def _output() -> Any:
    """What needs llama-cpp-python. Raises ``LibraryError`` where that is missing, or another version."""
    from fitter.llama import library

    library.load()
    from fitter.output import llama_cpp

    return llama_cpp


def check_unchanged(plan: Plan) -> None:
    """Raise ``ModelError`` where the plan's model is gone, or no longer what was fitted."""
    model_files(plan.model.path)
    for stamp in plan.files:
        try:
            is_same = stamp_of(stamp.path) == stamp
        except OSError as error:
            raise ModelError(f"{show(Path(stamp.path))} cannot be read: {error.strerror}") from None
        if not is_same:
            raise ModelError(f"{show(Path(stamp.path))} has changed since it was fitted: fit it again")


def _refit(plan: Plan, refused: OutOfMemoryError) -> Plan:
    from fitter import api

    fitted = api.fit(plan.model.path, **plan.asked)
    if not fitted.fits:
        problem = fitted.problems[0]
        raise OutOfMemoryError(
            f"{refused}; and with the memory that is free now: {problem.message}",
            problem.device,
            problem.missing,
            refused.log,
        ) from refused
    return fitted
