"""Which sets of models fit together, what is evicted for what, and the choice of a way for each model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitter.planning.fleet import assignment
from fitter.planning.fleet.assignment import assign
from fitter.planning.fleet.residency import FleetRoom, Member, Residency, Rules, Runs, Way, mask_of, models_of
from tests.support.cases import named_cases


def members(*shares: float, stay: Sequence[int] = (), apart: Sequence[tuple[int, int]] = ()) -> tuple[Member, ...]:
    """Models m0, m1, ... with these shares."""
    return tuple(
        Member(
            f"m{index}",
            share / sum(shares),
            is_resident=index in stay,
            never_with=frozenset(f"m{other}" for one, other in apart if one == index),
        )
        for index, share in enumerate(shares)
    )


def way(seconds: float, reload_seconds: float, **needs: int) -> Way:
    return Way(needs, seconds, reload_seconds)


def replayed(rules: Rules, ways: Sequence[Way], residency: Residency, n: int) -> float:
    """Seconds of a request, from ``n`` drawn ones: a second opinion, written after llama-swap's rules."""
    draw, loaded, total, model = random.Random(7), set(models_of(rules.first)), 0.0, -1
    for _ in range(n):
        if model < 0 or draw.random() < 1 / rules.in_a_row:
            (model,) = draw.choices(range(len(ways)), rules.shares)
        total += ways[model].seconds
        if model in loaded:
            continue
        total += ways[model].reload_seconds
        costs = [
            (sum(residency.evict_costs[gone] for gone in loaded - set(models_of(each))), index)
            for index, each in enumerate(residency.sets)
            if each >> model & 1
        ]
        loaded = (loaded & set(models_of(residency.sets[min(costs)[1]]))) | {model}
    return total / n


CARD = FleetRoom({"CUDA0": 10})


@named_cases(
    ("all fit", members(1, 1, 1), [3, 3, 4], [{0, 1, 2}], 3),
    ("one byte too many", members(1, 1, 1), [3, 3, 5], [{0, 1}, {0, 2}, {1, 2}], 2),
    ("one is alone", members(1, 1, 1), [2, 3, 9], [{0, 1}, {2}], 1),
    ("one stays", members(1, 1, 1, stay=[0]), [2, 5, 5], [{0, 1}, {0, 2}], 2),
    ("two are never together", members(1, 1, 1, apart=[(0, 2)]), [1, 1, 1], [{0, 1}, {1, 2}], 1),
)
def test_the_largest_sets_are_found(
    models: tuple[Member, ...], sizes: list[int], expected: list[set[int]], any_together: int
) -> None:
    runs = Runs(Rules(models, CARD), [way(1, 1, CUDA0=size) for size in sizes])
    assert [set(models_of(each)) for each in runs.sets] == expected
    assert runs.any_together == any_together
    assert runs.can_run


def test_a_model_that_does_not_fit_beside_one_that_stays_cannot_run() -> None:
    rules = Rules(members(1, 1, stay=[0]), CARD)
    assert Runs(rules, [way(1, 1, CUDA0=4), way(1, 1, CUDA0=6)]).can_run
    assert not Runs(rules, [way(1, 1, CUDA0=4), way(1, 1, CUDA0=7)]).can_run


def test_what_is_evicted_costs_least() -> None:
    runs = Runs(Rules(members(1, 1, 1), CARD), [way(1, 9, CUDA0=5), way(1, 2, CUDA0=5), way(1, 1, CUDA0=5)])
    residency = runs.residency((9, 2, 1))
    after = {(load.before, load.model): load.after for load in residency.loads}
    assert after[mask_of([0, 1]), 2] == mask_of([0, 2])
    assert after[mask_of([0, 2]), 1] == mask_of([0, 1])
    assert (mask_of([0, 1]), 0) not in after


@named_cases(("two models in turns", 1, 0.5), ("once a session", 5, 0.1))
def test_models_are_loaded_for_a_part_of_the_requests(in_a_row: int, misses: float) -> None:
    runs = Runs(Rules(members(1, 1), CARD, in_a_row=in_a_row), [way(1, 4, CUDA0=6), way(2, 8, CUDA0=6)])
    residency = runs.best()
    assert residency.misses == pytest.approx((misses, misses))
    assert residency.seconds == pytest.approx(0.5 * (1 + 2) + 0.5 * misses * (4 + 8))


def test_the_order_of_a_log_decides_what_is_together() -> None:
    # by day the first two are asked for in turns, by night the last two: each pair must be on two cards
    order = (0, 1) * 50 + (2, 3) * 50
    room = FleetRoom({"CUDA0": 10, "CUDA1": 10})
    ways = [[way(1, 5, CUDA0=6), way(1, 5, CUDA1=6)] for _ in range(4)]
    choice = assign(Rules(members(1, 1, 1, 1), room, order=order), ways)
    assert choice is not None
    assert choice.ways[0] != choice.ways[1]
    assert choice.ways[2] != choice.ways[3]
    # four loads a day, after the first ones
    assert choice.residency.seconds == pytest.approx(1 + 8 * 5 / 400)
    assert choice.residency.misses == pytest.approx((0.02,) * 4)
    assert choice.bound == pytest.approx(1)


def test_a_model_that_nobody_asks_for_costs_nothing() -> None:
    runs = Runs(Rules(members(1, 0), CARD), [way(1, 4, CUDA0=6), way(2, 8, CUDA0=6)])
    assert runs.best().seconds == pytest.approx(1)


def test_the_cheaper_of_two_evictions_by_use_is_found() -> None:
    # by its seconds alone the first would stay, which is hardly asked for
    rules = Rules(members(1, 50, 49), CARD)
    ways = [way(1, 10, CUDA0=3), way(1, 8, CUDA0=5), way(1, 8, CUDA0=5)]
    runs = Runs(rules, ways)
    by_seconds = runs.residency((10, 8, 8))
    assert runs.best().seconds < by_seconds.seconds


sizes = st.integers(1, 8)
times = st.floats(0.1, 20)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Rules, list[list[Way]]]:
    """A few models, each with some ways to run on two cards and the host."""
    n = draw(st.integers(2, 4))
    shares = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n).filter(any))
    stay = draw(st.lists(st.integers(0, n - 1), max_size=1))
    room = FleetRoom({"CUDA0": 10, "CUDA1": 10, "host": 20}, (("CUDA0", "CUDA1"),))
    ways = []
    for _ in range(n):
        reload_seconds = draw(times)
        one = st.builds(
            lambda a, b, host, seconds, load: way(seconds, load, CUDA0=a, CUDA1=b, host=host),
            st.integers(0, 10),
            st.integers(0, 10),
            sizes,
            times,
            st.just(reload_seconds),
        )
        ways.append(draw(st.lists(one, min_size=1, max_size=4)))
    return Rules(members(*shares, stay=stay), room, draw(st.sampled_from([1.0, 1.0, 4.0]))), ways


def every_choice(rules: Rules, ways: Sequence[Sequence[Way]]) -> list[Runs]:
    return [runs for chosen in itertools.product(*ways) if (runs := Runs(rules, chosen)).can_run]


@given(fleets())
@settings(deadline=None, max_examples=60)
def test_the_choice_is_the_best_of_all_and_its_bound_holds(fleet: tuple[Rules, list[list[Way]]]) -> None:
    rules, ways = fleet
    choice, every = assign(rules, ways), every_choice(rules, ways)
    assert (choice is None) == (not every)
    if choice is None:
        return
    best = min(runs.best().seconds for runs in every)
    assert choice.residency.seconds == pytest.approx(best)
    assert choice.bound <= choice.residency.seconds + 1e-9
    assert choice.bound == pytest.approx(min(runs.static_seconds for runs in every), rel=1e-6) or (
        choice.bound <= min(runs.static_seconds for runs in every)
    )
    chosen = [each[index] for each, index in zip(ways, choice.ways, strict=True)]
    for each in choice.residency.sets:
        inside = [chosen[model] for model in models_of(each)]
        assert rules.room.holds(inside)
        assert each & rules.staying == rules.staying
    for load in choice.residency.loads:
        assert load.after >> load.model & 1
        assert any(load.after & each == load.after for each in choice.residency.sets)
    misses = sum(share * miss for share, miss in zip(rules.shares, choice.residency.misses, strict=True))
    assert misses == pytest.approx(sum(load.share for load in choice.residency.loads))


@given(fleets())
@settings(deadline=None, max_examples=40)
def test_without_trying_all_the_choice_is_within_its_bound(fleet: tuple[Rules, list[list[Way]]]) -> None:
    rules, ways = fleet
    before = assignment.MOST_TRIED
    assignment.MOST_TRIED = 0
    try:
        choice = assign(rules, ways)
    finally:
        assignment.MOST_TRIED = before
    every = every_choice(rules, ways)
    if choice is None:
        # a local search may find no way to run all beside those that stay
        assert not every or rules.staying
        return
    best = min(runs.best().seconds for runs in every)
    assert choice.bound - 1e-9 <= best <= choice.residency.seconds + 1e-9


@given(fleets())
@settings(deadline=None, max_examples=15)
def test_seconds_are_those_of_drawn_requests(fleet: tuple[Rules, list[list[Way]]]) -> None:
    rules, ways = fleet
    choice = assign(rules, ways)
    if choice is None:
        return
    chosen = [each[index] for each, index in zip(ways, choice.ways, strict=True)]
    drawn = replayed(rules, chosen, choice.residency, 20_000)
    assert drawn == pytest.approx(choice.residency.seconds, rel=0.05)


@given(fleets())
@settings(deadline=None, max_examples=30)
def test_more_models_are_in_memory_if_that_is_the_goal(fleet: tuple[Rules, list[list[Way]]]) -> None:
    rules, ways = fleet
    choice = assign(rules, ways, "resident")
    if choice is None:
        return
    most = max(runs.sets[0].bit_count() for runs in every_choice(rules, ways))
    assert choice.residency.sets[0].bit_count() == most


@given(fleets())
@settings(deadline=None, max_examples=30)
def test_each_runs_as_fast_as_alone_if_that_is_the_goal(fleet: tuple[Rules, list[list[Way]]]) -> None:
    rules, ways = fleet
    choice = assign(rules, ways, "alone")
    if choice is not None:
        for each, index in zip(ways, choice.ways, strict=True):
            assert each[index].seconds == min(way.seconds for way in each)


def test_more_room_lowers_the_bound() -> None:
    ways = [[way(1, 5, CUDA0=6)], [way(1, 5, CUDA0=6)], [way(1, 5, CUDA0=6)]]
    bounds = []
    for size in (6, 12, 18):
        choice = assign(Rules(members(1, 1, 1), FleetRoom({"CUDA0": size})), ways)
        assert choice is not None
        bounds.append(choice.bound)
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == pytest.approx(1)


def test_models_that_are_never_together_raise_the_bound() -> None:
    ways = [[way(1, 4, CUDA0=1)], [way(1, 4, CUDA0=1)]]
    for apart, bound in (((), 1.0), (((0, 1),), 3.0)):
        choice = assign(Rules(members(1, 1, apart=apart), CARD), ways)
        assert choice is not None
        assert choice.bound == pytest.approx(bound)


def test_devices_that_are_the_same_are_exchanged_not_multiplied() -> None:
    # eight cards with a model each: branch and bound must not try all orders
    names = tuple(f"CUDA{index}" for index in range(8))
    room = FleetRoom(dict.fromkeys(names, 10), (names,))
    ways = [[way(1, 5, **{name: 9}) for name in names] for _ in range(8)]
    choice = assign(Rules(members(*[1] * 8), room), ways)
    assert choice is not None
    assert math.isclose(choice.residency.seconds, 1)
    assert math.isclose(choice.bound, 1)
