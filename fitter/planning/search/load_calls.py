"""Calls by which a fit has llama.cpp load one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fitter.planning.request.request import Measure, Record


@dataclass(frozen=True)
class LoadCalls:
    """Calls by which a fit has llama.cpp load one model.

    Attributes:
        measure: makes a dummy load.
        record: makes a dummy load and returns the size of every tensor.
        confirm: measures the plan, with the compute buffers that a real load reserves.
        dummy_loads: returns how often the model was loaded.
        shared_loads: returns how often other models were loaded.
        until: sets the time after which loads raise ``TimeLimitError``; ``None`` for never.
    """

    measure: Measure
    record: Record
    confirm: Measure
    dummy_loads: Callable[[], int]
    shared_loads: Callable[[], int] = lambda: 0
    until: Callable[[float | None], None] = lambda deadline: None
