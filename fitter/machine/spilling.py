"""Drivers that use the host's memory without an error where a card's own ends. Bytes."""

from __future__ import annotations

from collections.abc import Iterable

from fitter.storage.files import read_data
from fitter.text import human


def notes(cards: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """Note the cards that a plan nearly fills.

    Args:
        cards: Name, total and left memory of each.
    """
    data = read_data(__file__)
    return tuple(
        f"{name} has only {human(left)} left: if other programs take it, Windows' driver moves a part of the model to "
        "the host's shared memory without an error, and the card becomes far slower; raise --fit-target, or forbid it "
        "in the driver's settings (NVIDIA: CUDA - Sysmem Fallback Policy)"
        for name, total, left in cards
        if left < min(total * data["part"], data["most"])
    )
