"""Choices of the items to spill from a device that has no room for all of its layers. Bytes.

A person can read them: whole layers in a row, and a part of one more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from fitter.planning.placing.layer_sizes import Item, Unit


class Times(NamedTuple):
    """Seconds of units on devices that differ in speed.

    Attributes:
        units: for each device, the seconds of each unit that it has as a whole.
        by_byte: for each device, the extra seconds for a byte of its units that is on the host.
    """

    units: tuple[tuple[float, ...], ...]
    by_byte: tuple[float, ...]


class Ranges:
    """Ranges of units on devices, and what each spills.

    A device spills the items of its first layers, as llama.cpp's ``--n-cpu-moe`` does with experts, or of its last ones
    where layers have recurrent states: llama.cpp's compute buffer is smaller then (486 instead of 864 MiB on
    Qwen3-Next).
    """

    def __init__(self, units: Sequence[Unit], times: Times | None = None) -> None:
        self.units = units
        self._by_byte = times.by_byte if times else None
        self._seconds = [list(accumulate(seconds, initial=0.0)) for seconds in times.units] if times else []
        # lists, not generators: searches make thousands of these sums
        self._need = list(accumulate([unit.need for unit in units], initial=0))
        self._movable = list(accumulate([unit.movable for unit in units], initial=0))
        self._is_late = any(unit.state for unit in units)
        self.least = min([item.bytes for unit in units for item in unit.items], default=0)
        self._spilled: dict[tuple[int, int, int], int | None] = {}

    def need(self, start: int, stop: int) -> int:
        """Add up the least bytes that a device must hold to have these units."""
        return self._need[stop] - self._need[start]

    def movable(self, start: int, stop: int) -> int:
        """Add up the weights of these units that can leave them."""
        return self._movable[stop] - self._movable[start]

    def costs(self, device: int, start: int, stops: range, budget: int) -> list[tuple[int, float]]:
        """Rate the ranges from ``start`` to each stop: by seconds, or by the bytes that they spill.

        It ends where even the units without their items are too large.
        """
        seconds = self._seconds[device] if self._by_byte else [0.0] * (len(self.units) + 1)
        by_byte = self._by_byte[device] if self._by_byte else 1.0
        need, movable, rated = self._need, self._movable, list[tuple[int, float]]()
        room = need[start] + movable[start] + budget
        for stop in stops:
            spilled: int | None = 0
            if stop > start and need[stop] + movable[stop] > room:
                # the same range comes back for other first layers, and on other devices
                spilled = self._spilled.get((start, stop, budget)) or self.spilled(start, stop, budget)
            if spilled is None:
                break
            rated.append((stop, seconds[stop] - seconds[start] + spilled * by_byte))
        return rated

    def spilled(self, start: int, stop: int, budget: int) -> int | None:
        """Count the bytes that a range spills; ``None`` where even the units without their items are too large."""
        movable, spilled = self._movable[stop] - self._movable[start], None
        over = self._need[stop] - self._need[start] + movable - budget
        if start == stop or over <= 0:
            return 0
        if over <= movable:
            index, rest = self._last(start, stop, over)
            spilled = over - rest + self.units[index].least_of(rest)[0]
        self._spilled[start, stop, budget] = spilled
        return spilled

    def items(self, start: int, stop: int, budget: int) -> list[Item] | None:
        """List the items that a range spills; ``None`` where even the units without their items are too large."""
        over = self.need(start, stop) + self.movable(start, stop) - budget
        if start == stop or over <= 0:
            return []
        if over > self.movable(start, stop):
            return None
        index, rest = self._last(start, stop, over)
        whole = self.units[index + 1 : stop] if self._is_late else self.units[start:index]
        return [*[item for unit in whole for item in unit.items], *self.units[index].least_of(rest)[1]]

    def _last(self, start: int, stop: int, over: int) -> tuple[int, int]:
        """Find the unit that spills only a part, and the bytes that it must spill."""
        if self._is_late:
            index = bisect_left(self._movable, self._movable[stop] - over + 1, start, stop) - 1
            return index, over - (self._movable[stop] - self._movable[index + 1])
        index = bisect_left(self._movable, self._movable[start] + over, start + 1, stop) - 1
        return index, over - (self._movable[index] - self._movable[start])
