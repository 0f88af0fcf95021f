"""The most whole layers for which devices have room, with a split alone and no overrides. Bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fitter.planning.placing.layer_sizes import Unit
from fitter.planning.placing.packing import pack_whole
from fitter.planning.placing.placement import Placement, caches_on, weights_on

Measure = Callable[[Placement], Sequence[int]]
"""Returns the bytes on each device with a placement, as a dummy load measures them."""


def most_layers(units: Sequence[Unit], rooms: Sequence[int], measure: Measure) -> Placement | None:
    """Place as many layers as fit; ``None`` if not even the output does.

    Args:
        units: Sizes of the layers and the output.
        rooms: Bytes that each device may hold.
        measure: Measures a placement.
    """
    rest = [0] * len(rooms)
    best, first = None, 0
    while best is None and first < len(units):
        best, rest = _placed(units, rooms, rest, first, measure)
        first += 1
    # less may be on devices beside the layers than with placements that did not fit
    while best is not None and best.first > 0:
        more, rest = _placed(units, rooms, rest, best.first - 1, measure)
        if more is None:
            break
        best = more
    return best


def _placed(
    units: Sequence[Unit], rooms: Sequence[int], rest: Sequence[int], first: int, measure: Measure
) -> tuple[Placement | None, list[int]]:
    """Place all units from ``first`` on; return the placement if it fits, and what devices had beside units.

    ``rest``: bytes that each device is expected to have beside units.
    """
    expected = list(rest)
    while (placement := pack_whole(units, [a - b for a, b in zip(rooms, expected, strict=True)], first)) is not None:
        used = measure(placement)
        held = [sum(each) for each in zip(weights_on(units, placement), caches_on(units, placement), strict=True)]
        rest = [a - b for a, b in zip(used, held, strict=True)]
        if all(a <= max(0, b) for a, b in zip(used, rooms, strict=True)):
            return placement, rest
        grown = [max(a, b) for a, b in zip(expected, rest, strict=True)]
        if grown == expected:
            break
        expected = grown
    return None, list(rest)
