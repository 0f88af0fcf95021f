"""What one device must have to run a model at a speed. Bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fitter.text import MIB

_LEAST, _MOST = 1e9, 1e15
"""Bytes per second of memory that no device falls short of or beats."""


@dataclass(frozen=True)
class DeviceClaim:
    """What one device must have to run a model at a speed, as llmfit-dra reads it."""

    model: str
    """The model as the caller named it."""
    name: str
    """A name for the claim."""
    file_type: str
    """The model's file type."""
    weights: int
    """Bytes of all tensors."""
    memory: int
    """Bytes of memory that a card must have by its datasheet for all of the model, with its context."""
    bandwidth: float
    """Bytes per second that a card's datasheet must say."""
    min_tps: float
    """Tokens per second of generation that are asked for."""
    efficiency: int
    """Percent of the bandwidth that reading the weights alone takes."""
    version: str
    """Version of fitter."""

    @property
    def memory_gib(self) -> int:
        """``memory`` in whole GiB, rounded up."""
        return math.ceil(self.memory / (1024 * MIB))

    @property
    def bandwidth_gb(self) -> int:
        """``bandwidth`` in whole GB per second, rounded up."""
        return math.ceil(self.bandwidth / 1e9)

    @property
    def weights_gb(self) -> float:
        """``weights`` in GB."""
        return round(self.weights / 1e9, 1)


def least_bandwidth(speed: Callable[[float], float], least: float) -> float | None:
    """Return the least bandwidth at which ``speed`` reaches ``least`` tokens per second, to 10 MB per second.

    Args:
        speed: Tokens per second for a bandwidth in bytes per second; it grows with it.
        least: Tokens per second.

    Returns:
        Bytes per second; ``None`` if no bandwidth is enough.
    """
    low, high = 0.0, _LEAST
    while speed(high) < least:
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1e7:
        middle = (low + high) / 2
        low, high = (low, middle) if speed(middle) >= least else (middle, high)
    return high
