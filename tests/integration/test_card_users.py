"""Turns of 1 to 32 users that a card took (``tests/data/speeds/card_users.csv``), beside estimates without a card."""

from __future__ import annotations

import itertools
import statistics

import pytest

from tools.measurements import card_users
from tools.measurements.card_users import RUNS, Turn


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    return list(card_users.turns(tmp_path_factory.mktemp("models")))


def test_every_row_is_estimated(every: list[Turn]) -> None:
    assert len(every) == 35
    assert {turn.run for turn in every} == set(RUNS)


def test_how_far_off_turns_are(every: list[Turn]) -> None:
    """The guide on users states these errors."""
    off = [abs(turn.estimated / turn.measured - 1) for turn in every]
    assert statistics.median(off) < 0.18
    assert sum(each < 0.5 for each in off) >= 33


def test_the_order(every: list[Turn]) -> None:
    """More users, other settings, and other work: slower where it was slower by a tenth."""
    pairs = [
        (one.measured < other.measured) == (one.estimated < other.estimated)
        for one, other in itertools.combinations(every, 2)
        if one.run.model == other.run.model
        and one.run.placement == other.run.placement
        and max(one.measured, other.measured) > 1.1 * min(one.measured, other.measured)
    ]
    assert len(pairs) > 200
    assert sum(pairs) / len(pairs) > 0.9


def test_what_saving_idle_slots_costs(every: list[Turn]) -> None:
    def turn(settings: str, slots: int, users: int) -> Turn:
        return next(
            each
            for each in every
            if each.run.model == "llama-3.1-8b"
            and (each.run.work, each.run.settings, each.run.slots) == ("conversation", settings, slots)
            and each.users == users
        )

    for users in (8, 32):
        saved, stayed = (turn(settings, 32, users) for settings in (card_users.SAVED, card_users.STAY))
        assert saved.measured > 1.9 * stayed.measured
        assert saved.estimated > 1.9 * stayed.estimated
