"""From a model's path to a ``llama_cpp.Llama``: ``fitter.Llama``."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from fitter.errors import UsageError

if TYPE_CHECKING:
    import llama_cpp


def Llama(model_path: str | os.PathLike[str], **kwargs: Any) -> llama_cpp.Llama:
    """Fit ``model_path`` and load it: a ``llama_cpp.Llama`` with the whole plan applied, which is its ``plan``.

    Keywords of ``fitter.fit`` go there (``n_ctx``, ``type_k``, ``margin``, ``rpc``, ...), all others to
    ``llama_cpp.Llama`` (``n_threads``, ``chat_format``, ``verbose``, ...); ``embedding=True`` goes to both. Where
    another process took the memory meanwhile, it is fitted again, at most twice, with a ``PlanWarning``.

    Raises ``PlanError`` where the model does not fit, and what ``fitter.fit`` and ``Plan.load`` raise.
    """
    # naming fitter.Llama costs nothing: what needs these comes with the first model
    from fitter import api, loading

    known = inspect.signature(api.fit).parameters
    native = loading.native()
    asked = {name: _as_fit_says(name, value) for name, value in kwargs.items() if name in known and name != "model"}
    rest = {name: value for name, value in kwargs.items() if name not in asked}
    # Llama's word for a default; fit has others
    asked = {name: value for name, value in asked.items() if value is not None}
    native.check_names(rest)
    return loading.load(api.fit(model_path, **asked), rest, api.fit)


def _as_fit_says(name: str, value: Any) -> Any:
    """``value`` in ``fit``'s words, where it is in ``Llama``'s: ggml's numbers, and a ``bool`` for flash attention.

    Raises ``UsageError`` for a number that says nothing.
    """
    from fitter.llama.parameters import CACHE_TYPES, SPLIT_MODES

    if name == "flash_attn" and isinstance(value, bool):
        return "on" if value else "off"
    numbers = {"type_k": CACHE_TYPES, "type_v": CACHE_TYPES, "split_mode": SPLIT_MODES}
    if name not in numbers or isinstance(value, bool) or not isinstance(value, int):
        return value
    for word, number in numbers[name].items():
        if number == value:
            return word
    raise UsageError(f"{name}={value} is none of {', '.join(f'{n} ({word})' for word, n in numbers[name].items())}")
