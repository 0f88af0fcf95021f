from __future__ import annotations

from fitter.text import MIB, human, mib
from tests.support.cases import cases


@cases(
    (None, "-"), (0, "0"), (MIB - 1, "0"), (MIB, "1"), (3 * MIB - 1, "2"), (-1, "-1"), (-MIB, "-1"), (-MIB - 1, "-2")
)
def test_mib_rounds_down_on_both_sides_of_zero(size: int | None, expected: str) -> None:
    assert mib(size) == expected


@cases(
    (0, "0 B"),
    (1023, "1023 B"),
    (1024, "1.0 KiB"),
    (3 * MIB // 2, "1.5 MiB"),
    (2**30, "1.0 GiB"),
    (2**41, "2048.0 GiB"),
)
def test_human(size: int, expected: str) -> None:
    assert human(size) == expected
