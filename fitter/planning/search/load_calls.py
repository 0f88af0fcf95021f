"""Calls by which a fit has llama.cpp load one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fitter.llama.types import Breakdown, Params
from fitter.planning.request.request import Measure, Record


class ConcurrentLoad(Protocol):
    """Measures the user's own file in a second process while the search goes on in the first."""

    def suggest(self, params: Params, *, is_decided: bool = False) -> None:
        """Suggest likely parameters; ``is_decided``: the search's answer, unless a concession changes it."""

    def confirm(self, params: Params) -> Breakdown | None:
        """Return the measured breakdown, also if it is ready soon; ``None`` if another process may as well measure."""


@dataclass(frozen=True)
class DummyLoads:
    """Dummy loads of one file."""

    measure: Measure
    record: Record


@dataclass(frozen=True)
class LoadCalls:
    """Calls by which a fit has llama.cpp load one model.

    Attributes:
        user_file: loads of the user's file.
        dummy_loads: returns how often the model was loaded.
        skeleton: loads of a copy of the file's header, which are faster.
        concurrent: loads of the user's file in a second process.
        shared_loads: returns how often other models were loaded.
        until: sets the time after which loads raise ``TimeLimitError``; ``None`` for never.
    """

    user_file: DummyLoads
    dummy_loads: Callable[[], int]
    skeleton: DummyLoads | None = None
    concurrent: ConcurrentLoad | None = None
    shared_loads: Callable[[], int] = lambda: 0
    until: Callable[[float | None], None] = lambda deadline: None
