"""The ways in which a fit may ask llama.cpp about one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fitter.llama.types import Breakdown, Params
from fitter.planning.request.request import Measure, Record


class ConcurrentLoad(Protocol):
    """Measures the user's own file in a process of its own, while the search goes on in another one."""

    def suggest(self, params: Params, *, is_found: bool = False) -> None:
        """Be told what may turn out to be the answer, or ``is_found`` to be unless something is given up for it."""

    def confirm(self, params: Params) -> Breakdown | None:
        """What ``params`` take, where that was measured or is soon; ``None`` where another process may as well."""


@dataclass(frozen=True)
class DummyLoads:
    """Dummy loads of one file."""

    measure: Measure
    record: Record


@dataclass(frozen=True)
class LoadCalls:
    """The ways in which a fit may ask llama.cpp about one model.

    ``own`` loads the user's file, ``skeleton`` a copy of its header that loads faster, ``beside`` the user's file in a
    second process. ``dummy_loads`` tells how often the model was loaded, ``shared_loads`` how often others were.
    ``until`` is told when asking has to end with a ``TimeLimitError``, ``None`` where it need not.
    """

    own: DummyLoads
    dummy_loads: Callable[[], int]
    skeleton: DummyLoads | None = None
    beside: ConcurrentLoad | None = None
    shared_loads: Callable[[], int] = lambda: 0
    until: Callable[[float | None], None] = lambda deadline: None
