"""The models of a fleet as the user wants them, and the ways to run each: memory by place, and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Member:
    """A model of a fleet, as the user wants it."""

    name: str
    """Its name in ``fitter.toml``, and in the files that are written."""
    share: float
    """Its share of all requests, from 0 to 1."""
    is_resident: bool = False
    """Whether it must be in memory from the start, always."""
    may_be_evicted: bool = True
    """Whether it may make room once it is in memory."""
    never_with: frozenset[str] = frozenset()
    """Names of models that must not be in memory at the same time."""

    @property
    def stays(self) -> bool:
        """Whether every set of models in memory must have room for it."""
        return self.is_resident or not self.may_be_evicted


@dataclass(frozen=True)
class Way:
    """A way to run a model, as a plan measured it."""

    needs: Mapping[str, int]
    """Bytes at each place: a device, ``host``, or a pool that they share."""
    seconds: float
    """Seconds of a request when the model is in memory."""
    reload_seconds: float
    """Seconds to load it from the disk, and to compute again what was lost with its caches."""


@dataclass(frozen=True)
class FleetRoom:
    """The room of a machine for all models together.

    Attributes:
        bytes: Bytes within the margin at each place that has a limit.
        alike: Groups of devices that are the same, so that their names may be exchanged.
    """

    bytes: Mapping[str, int]
    alike: tuple[tuple[str, ...], ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The places with a limit, in their order."""
        return tuple(self.bytes)

    def row(self, needs: Mapping[str, int]) -> list[int]:
        """Return the needs in the order of ``places``."""
        return [needs.get(place, 0) for place in self.bytes]

    def holds(self, ways: Sequence[Way]) -> bool:
        """Whether all of ``ways`` have room together."""
        return all(sum(way.needs.get(place, 0) for way in ways) <= size for place, size in self.bytes.items())
