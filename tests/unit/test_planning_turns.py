"""Turns of several users: a closed queue, checked against a simulation and against its limits."""

from __future__ import annotations

import csv
import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.planning.plan.turns import Turns, neighbours, step_seconds, turns_of
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.session import Session
from fitter.planning.speed.cost import Estimate, Workload
from tests.support.cases import cases, named_cases

STEPS = ((1, 0.02), (2, 0.022), (4, 0.026), (8, 0.034))


def priced(prompt: float = 0.001, steps: tuple[tuple[int, float], ...] = STEPS) -> Price:
    estimate = Estimate(prompt, steps[-1][1], 1.0)
    return Price(estimate, Workload(), 0.0, (), None, steps)  # type: ignore[arg-type]


def turns(session: Session, slots: int = 8, kept: Callable[[int], float] = lambda users: 1.0) -> Turns:
    return turns_of(session, priced(), slots, kept)


def simulated(session: Session, slots: int, rounds: int = 20_000) -> float:
    """Simulate the queue: every waiting user with a slot has an equal part of the server. Returns turns per second."""
    draw = random.Random(1)
    reading = [draw.expovariate(1 / session.gap) for _ in range(session.users)]
    heapq.heapify(reading)
    now, waiting, done = 0.0, 0, 0
    while done < rounds:
        busy = min(waiting, slots)
        rate = busy / (busy * 0.001 * session.prompt + session.answer * step_seconds(STEPS, busy)) if busy else 0.0
        ends = now + draw.expovariate(rate) if rate else float("inf")
        if reading and reading[0] < ends:
            now = heapq.heappop(reading)
            waiting += 1
        else:
            now = ends
            waiting -= 1
            done += 1
            heapq.heappush(reading, now + draw.expovariate(1 / session.gap))
    return done / now


@named_cases(
    ("a slot for each", Session(500, 100, users=6, gap=5.0), 8),
    ("users wait for slots", Session(500, 100, users=12, gap=5.0), 4),
)
def test_the_queue_is_a_simulated_one(session: Session, slots: int) -> None:
    found = turns(session, slots).all
    assert found.together / session.answer == pytest.approx(simulated(session, slots), rel=0.03)


def test_one_user_waits_for_nobody() -> None:
    alone = turns(Session(500, 100, users=1, gap=9.0)).all
    assert alone.seconds == pytest.approx(500 * 0.001 + 100 * 0.02)
    assert alone.each == pytest.approx(50)
    assert alone.together == pytest.approx(100 / (2.5 + 9))


def test_users_without_a_gap_share_steps_and_wait_for_prompts() -> None:
    found = turns(Session(500, 100, users=4)).all
    assert found.seconds == pytest.approx(4 * 0.5 + 100 * 0.026)
    assert found.together == pytest.approx(4 * 100 / 4.6)
    # the prompts of three others come between a user's own tokens
    assert found.each == pytest.approx(100 / 4.1)


def test_users_without_slots_wait() -> None:
    found = turns(Session(500, 100, users=8), slots=4)
    few, every = found.points[3], found.all
    assert every.together == pytest.approx(few.together)
    assert every.seconds == pytest.approx(2 * few.seconds)
    assert every.each == pytest.approx(few.each)


def test_what_is_not_kept_is_computed_again() -> None:
    session = Session(5000, 100, 0.9, 10, 4)
    all_kept, none_kept = turns(session), turns(session, kept=lambda users: 1.0 if users < 4 else 0.0)
    assert none_kept.points[2] == all_kept.points[2]
    assert none_kept.all.seconds - all_kept.all.seconds == pytest.approx(4 * 0.001 * 0.9 * 0.9 * 5000)


@cases((1.0, 8), (24.0, 4), (50.0, 1), (51.0, 0))
def test_how_many_users_get_a_speed(at_least: float, holds: int) -> None:
    found = replace(turns(Session(500, 100, users=8)), at_least=at_least)
    assert found.holds == holds


def test_the_knee_is_where_a_user_brings_less_than_half_of_one_alone() -> None:
    # a step for more users takes as long as their tokens one after the other, from the fourth on
    steps = ((1, 0.02), (2, 0.02), (4, 0.02), (8, 0.04))
    assert turns_of(Session(1, 100, users=8), priced(0.0, steps), 8, lambda users: 1.0).knee == 4


@given(
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(0, 60_000).map(lambda milliseconds: milliseconds / 1000),
    st.floats(0, 0.99),
    st.integers(1, 5000),
    st.integers(1, 500),
)
def test_more_users_are_no_quicker(users: int, slots: int, gap: float, reused: float, prompt: int, answer: int) -> None:
    found = turns(Session(prompt, answer, reused, 5, users, gap), slots)
    assert found.all.users == users
    for few, more in zip(found.points, found.points[1:], strict=False):
        assert more.seconds >= few.seconds * (1 - 1e-9)
        assert more.together >= few.together * (1 - 1e-9)
        assert more.each <= few.each * (1 + 1e-9)


def test_conversations_that_move_hold_all_up() -> None:
    session = Session(500, 100, users=8)
    still = turns_of(session, priced(), 4, lambda users: 1.0)
    moving = turns_of(session, priced(), 4, lambda users: 1.0, moved=lambda users, kept: 0.5 if users > 4 else 0.0)
    assert moving.all.seconds == pytest.approx(still.all.seconds + 8 * 0.5)
    assert moving.points[0] == still.points[0]


@cases((1, 1, 1.0), (1, 32, 1.0), (2, 32, 1.9375), (16, 32, 8.5), (32, 32, 1.0), (4, 4, 1.0))
def test_neighbours(busy: int, slots: int, groups: float) -> None:
    assert neighbours(busy, slots) == groups
    draw = random.Random(busy)
    found = 0
    for _ in range(2000):
        chosen = set(draw.sample(range(slots), busy))
        found += sum(slot - 1 not in chosen for slot in chosen)
    assert found / 2000 == pytest.approx(groups, rel=0.05)


def test_slots_with_caches_of_their_own_that_are_no_neighbours_take_a_step_each() -> None:
    session = Session(500, 100, users=2)
    of_all, own, shared = (
        turns_of(session, priced(0.0), slots, lambda users: 1.0, is_unified=is_unified).all.seconds
        for slots, is_unified in ((2, False), (32, False), (32, True))
    )
    assert shared == pytest.approx(of_all)
    assert own == pytest.approx(100 * 1.9375 * step_seconds(STEPS, 2 / 1.9375))


def test_a_conversation_stays_in_its_slot() -> None:
    session = Session(500, 100, reused=0.5, users=2)
    few, many = (turns_of(session, priced(), slots, lambda users: 1.0, is_unified=False).all for slots in (2, 32))
    assert few == many


def test_each_user_waits_until_all_tokens_are_chosen() -> None:
    session = Session(500, 100, users=8)
    without, with_it = (turns_of(session, priced(), 8, lambda users: 1.0, sampling=each).all for each in (0.0, 0.001))
    assert with_it.seconds - without.seconds == pytest.approx(100 * 8 * 0.001)


AGENT_TURNS = Path(__file__).resolve().parents[1] / "data" / "speeds" / "agent_turns.csv"


def test_turns_of_an_agent_that_were_published() -> None:
    """The best prefill has the longest turn, since nothing is reused; the length of answers follows from that turn."""
    with AGENT_TURNS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    first = rows[0]
    answer = round((float(first["turn"]) - int(first["prompt"]) / float(first["prefill"])) * float(first["decode"]))
    found = []
    for row in rows:
        # of a long conversation, so that its first turn counts for nothing
        session = Session(int(row["prompt"]), answer, float(row["reused"]), turns=1000)
        price = priced(1 / float(row["prefill"]), ((1, 1 / float(row["decode"])),))
        found.append(turns_of(session, price, 1, lambda users: 1.0).all.seconds)
    measured = [float(row["turn"]) for row in rows]
    assert sorted(found, reverse=True) == found and sorted(measured, reverse=True) == measured
    assert found[:2] == pytest.approx(measured[:2], rel=0.05)
    # its answers were shorter, or more was reused than the table says: 18,400 tokens went to some 1,700
    assert found[2] == pytest.approx(measured[2], rel=0.35)
