"""Methods of results that write, load and verify them: ``fitter.api`` provides them, since planning cannot."""

from __future__ import annotations

from typing import Any

_providers: dict[type, Any] = {}


def provide(result: type, methods: Any) -> None:
    """Have results of this type use the functions that ``methods`` has as attributes."""
    _providers[result] = methods


def methods_of(result: object) -> Any:
    """Return the functions for ``result``. Raises ``RuntimeError`` if nothing has provided them."""
    if type(result) not in _providers:
        raise RuntimeError(f"nothing provides the methods of {type(result).__name__}: import fitter.api first")
    return _providers[type(result)]
