"""The most whole layers for which devices have room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fitter.api.gpu_layers import most_layers
from fitter.planning.placing.layer_sizes import Unit
from fitter.planning.placing.placement import Placement
from tests.support.cases import named_cases

UNITS = [Unit(index, fixed=10, cache=2) for index in range(4)] + [Unit(4, fixed=30, cache=0)]
"""Four layers of 12 bytes, and an output of 30."""

Rest = Callable[[Placement], Sequence[int]]
"""Bytes on each device beside its units."""


def nothing(placement: Placement) -> Sequence[int]:
    return [0 for _ in placement.counts]


def five_each(placement: Placement) -> Sequence[int]:
    return [5 if count else 0 for count in placement.counts]


def more_of_a_part(placement: Placement) -> Sequence[int]:
    return [20 if placement.first else 0 for _ in placement.counts]


def more_of_all(placement: Placement) -> Sequence[int]:
    return [0 if placement.first else 40 for _ in placement.counts]


@named_cases(
    ("all", [78], nothing, (5,)),
    ("a byte too few for all", [77], nothing, (4,)),
    ("the output alone", [30], nothing, (1,)),
    ("not even that", [29], nothing, None),
    ("no room", [-5], nothing, None),
    ("two devices", [24, 54], nothing, (2, 3)),
    ("an idle one", [0, 78], nothing, (0, 5)),
    ("what is beside them", [82], five_each, (4,)),
    ("just enough for that", [83], five_each, (5,)),
    ("of two devices", [29, 58], five_each, (2, 2)),
    ("more with a part of the model", [77], more_of_a_part, (3,)),
    ("less with a part of the model", [78], more_of_all, (4,)),
)
def test_most_layers(rooms: list[int], rest: Rest, counts: tuple[int, ...] | None) -> None:
    def used(placement: Placement) -> list[int]:
        held = [sum(unit.weights + unit.cache for unit in UNITS[a:b]) for a, b in placement.ranges()]
        return [a + b for a, b in zip(held, rest(placement), strict=True)]

    asked: list[Placement] = []
    found = most_layers(UNITS, rooms, lambda placement: (asked.append(placement), used(placement))[1])
    assert (found and found.counts) == counts
    assert found is None or all(a <= max(0, b) for a, b in zip(used(found), rooms, strict=True))
    assert len(asked) <= 8
