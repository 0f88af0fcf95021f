"""A note where Windows' driver would use the host's memory in silence."""

from __future__ import annotations

from fitter.machine.device_memory import spilling_notes
from fitter.text import human
from tests.support.cases import cases

MIB = 2**20


@cases((8192, 491, True), (8192, 492, False), (24576, 1023, True), (24576, 1024, False))
def test_a_card_that_is_nearly_full(total: int, left: int, is_near: bool) -> None:
    found = spilling_notes([("CUDA0", total * MIB, left * MIB)])
    assert [note.startswith(f"CUDA0 has only {human(left * MIB)} left") for note in found] == [True] * is_near
