"""What is better: of two plans, of two that lack something, of what is given up for it, of what may be tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import (
    best_of,
    best_pair,
    does_as_well,
    is_worth_a_load,
    justifies_concession,
    lacks_less,
    longest_for,
    rank,
)
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import Request
from tests.support.cases import named_cases
from tests.support.synthetic import limits


class _Wanting:
    def __init__(self, objective: str) -> None:
        self.objective = objective
        self.context_cost = 0.1
        self.is_for_most_context = objective == "context"


_REQUEST = cast(Request, _Wanting("request"))
_MOST_CONTEXT = cast(Request, _Wanting("context"))
_PLANS = st.tuples(st.integers(1, 10**7), st.floats(1e-3, 1e5))


def longest(context_cost: float = 0.1, objective: str = "request") -> Callable[[float], float]:
    return lambda quickest: longest_for(objective, context_cost, quickest)


QUICKEST = (4096, 10.0)


@named_cases(
    ("a tenth longer", [(8192, 11.0)], 0.1, (8192, 11.0)),
    ("longer than a tenth", [(8192, 11.01)], 0.1, QUICKEST),
    ("the largest of those", [(8192, 10.5), (16384, 10.9), (32768, 12.0)], 0.1, (16384, 10.9)),
    ("little more than one between", [(16384, 10.3), (18000, 10.6)], 0.1, (18000, 10.6)),
    ("an eighth more context for a fiftieth of the time", [(4600, 10.2)], 0.1, QUICKEST),
    ("more than that", [(4608, 10.2)], 0.1, (4608, 10.2)),
    ("a little more for next to no time", [(4600, 10.05)], 0.1, (4600, 10.05)),
    ("a little more where nothing else counts", [(4600, 99.0)], math.inf, (4600, 99.0)),
    ("as quick but for a hundredth", [(8192, 10.09)], 0.0, (8192, 10.09)),
    ("slower by more", [(8192, 10.11)], 0.0, QUICKEST),
    ("no limit", [(8192, 99.0)], math.inf, (8192, 99.0)),
    ("the same context", [(4096, 9.9)], 0.1, (4096, 9.9)),
    ("less context that is quicker by more than a tenth", [(2048, 9.0)], 0.1, (2048, 9.0)),
    ("less context that is hardly quicker", [(2048, 9.5)], 0.1, QUICKEST),
)
def test_the_best_has_the_most_context_for_little_time(
    pairs: list[tuple[int, float]], cost: float, expected: tuple[int, float]
) -> None:
    for order in ([QUICKEST, *pairs], [*pairs, QUICKEST]):
        assert best_pair(order, longest(cost)) == expected


@given(st.lists(_PLANS, min_size=1), st.floats(0, 2), _PLANS)
def test_the_best_is_never_dominated(plans: list[tuple[int, float]], cost: float, other: tuple[int, float]) -> None:
    n_ctx, seconds = best_pair(plans, longest(cost))
    assert not any(more >= n_ctx and less <= seconds and (more, less) != (n_ctx, seconds) for more, less in plans)
    assert best_pair([*plans, other], longest(cost)) in (*plans, other)


@given(st.lists(_PLANS, min_size=1))
def test_nothing_counts_more_than_context_where_it_is_the_objective(plans: list[tuple[int, float]]) -> None:
    assert best_pair(plans, longest(0.0, "context"))[0] == max(n_ctx for n_ctx, _ in plans)


DEVICE = limits(1000)


def trial(n_ctx: int = 8192, seconds: float | None = 10.0, missing: tuple[int, ...] = (), weights: int = 100) -> Trial:
    breakdown = Breakdown((Row("CUDA0", "CUDA0", False, weights, 0, 0),), ("CUDA0",), n_ctx, True)
    lacks = tuple((f"CUDA{d}", bytes_) for d, bytes_ in enumerate(missing))
    return Trial(Placement(0, (1,)), DEVICE, Params(n_ctx=n_ctx), breakdown, lacks, seconds)


@named_cases(
    ("it-fits", trial(n_ctx=4096, seconds=99.0), trial(missing=(1,))),
    ("it-lacks-less", trial(n_ctx=4096, missing=(5,)), trial(missing=(6,))),
    ("more-context", trial(n_ctx=8448, seconds=99.0), trial()),
    ("less-time", trial(seconds=9.0), trial()),
    ("more-weights-where-nothing-is-priced", trial(seconds=None, weights=101), trial(seconds=None)),
)
def test_rank(better: Trial, worse: Trial) -> None:
    assert rank(better) > rank(worse)


@named_cases(
    ("context-that-costs-too-much", trial(n_ctx=8448, seconds=99.0), trial(), False),
    ("context-that-costs-little", trial(n_ctx=16384, seconds=10.5), trial(), True),
    ("the-other-has-no-price", trial(n_ctx=4096), trial(n_ctx=8448, seconds=None), True),
    ("the-other-does-not-fit", trial(n_ctx=8448, seconds=99.0), trial(missing=(1,)), True),
    ("the-other-lacks-more", trial(missing=(1,)), trial(missing=(2,)), True),
)
def test_best_of_two(one: Trial, other: Trial, is_one: bool) -> None:
    assert (best_of((one, other), _REQUEST) is one) is is_one
    assert (best_of((other, one), _REQUEST) is one) is is_one


@named_cases(
    ("fewer-bytes", (900,), (1000,), True),
    ("hardly-fewer-bytes", (9900,), (10000,), True),
    ("as-many-bytes", (1000,), (1000,), False),
    ("more-bytes", (1000,), (900,), False),
    ("the-same-in-one-place", (1000,), (500, 500), True),
    ("the-same-in-two", (500, 500), (1000,), False),
    ("a-little-more-in-one-place", (1005,), (500, 500), False),
    ("a-little-less-in-two", (500, 495), (1000,), True),
)
def test_lacks_less(one: tuple[int, ...], other: tuple[int, ...], expected: bool) -> None:
    assert lacks_less(trial(missing=one), trial(missing=other)) is expected


@named_cases(
    ("lacks-less", trial(missing=(1,)), trial(missing=(2,)), False, True),
    ("lacks-as-much", trial(missing=(2,)), trial(missing=(2,)), True, False),
    ("lacks-more", trial(missing=(2,)), trial(missing=(1,)), False, False),
    ("fits-at-last", trial(seconds=99.0), trial(missing=(1,)), False, True),
    ("fits-no-more", trial(seconds=1.0, missing=(1,)), trial(), False, False),
    ("faster", trial(seconds=9.7), trial(), False, True),
    ("hardly-faster", trial(seconds=9.9), trial(), False, False),
    ("less-context", trial(n_ctx=4096, seconds=5.0), trial(), False, False),
    ("less-context-is-what-is-given", trial(n_ctx=4096, seconds=5.0), trial(), True, True),
    ("more-context-alone", trial(n_ctx=9216, seconds=10.0), trial(), False, False),
    ("nothing-is-priced", trial(seconds=None), trial(), False, False),
)
def test_is_worth_giving_up(found: Trial, before: Trial, gives_context: bool, expected: bool) -> None:
    assert justifies_concession(_REQUEST, found, before, gives_context=gives_context) is expected


@named_cases(
    ("more", 9216, False, True),
    ("as-much-and-no-faster", 8192, False, False),
    ("less-though-it-is-given", 4096, True, False),
)
def test_giving_up_for_context(n_ctx: int, gives_context: bool, expected: bool) -> None:
    found = trial(n_ctx=n_ctx, seconds=1.0 if n_ctx < 8192 else 10.0)
    assert justifies_concession(_MOST_CONTEXT, found, trial(), gives_context=gives_context) is expected


@named_cases(
    ("the-same", trial(), True),
    ("hardly-slower", trial(seconds=10.1), True),
    ("slower", trial(seconds=10.3), False),
    ("less-context", trial(n_ctx=4096, seconds=1.0), False),
    ("does-not-fit", trial(missing=(1,)), False),
)
def test_does_as_well(found: Trial, expected: bool) -> None:
    assert does_as_well(found, trial()) is expected


@named_cases(("six-thousandths", 9.94, True), ("four-thousandths", 9.96, False))
def test_what_is_worth_another_load(seconds: float, is_worth: bool) -> None:
    assert is_worth_a_load(seconds, 10.0) is is_worth
