"""What is better: of two plans, of two that lack something, of what is given up for it, of what may be tried."""

from __future__ import annotations

from functools import cmp_to_key
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import (
    WORTH_OF_CONTEXT,
    beats,
    does_as_well,
    is_better,
    is_worth_a_correction,
    is_worth_a_load,
    justifies_concession,
    lacks_less,
    ordered,
    rank,
)
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import Request
from tests.support.synthetic import limits


class _Wanting:
    def __init__(self, objective: str) -> None:
        self.objective = objective


_REQUEST = cast(Request, _Wanting("request"))
_MOST_CONTEXT = cast(Request, _Wanting("context"))
_PLANS = st.tuples(st.integers(1, 10**7), st.floats(1e-3, 1e5))


@pytest.mark.parametrize(
    ("n_ctx", "seconds", "expected"),
    [
        pytest.param(9840, 8.0, True, id="a-fifth-of-the-time-for-a-sixtieth-of-the-context"),
        pytest.param(9840, 9.68, True, id="a-thirtieth-of-the-time"),
        pytest.param(9840, 9.69, False, id="less-than-that"),
        pytest.param(9000, 8.0, True, id="a-tenth-of-the-context-for-a-fifth-of-the-time"),
        pytest.param(9000, 8.2, False, id="for-less-than-that"),
        pytest.param(5000, 2.4, True, id="half-of-the-context-for-three-quarters-of-the-time"),
        pytest.param(5000, 2.6, False, id="for-less-than-three-quarters"),
        pytest.param(9999, 10.0, False, id="no-time"),
        pytest.param(9999, 11.0, False, id="slower"),
        pytest.param(10000, 9.9, True, id="the-same-context"),
        pytest.param(10001, 10.0, True, id="longer"),
    ],
)
def test_a_shorter_context_is_better_where_it_saves_enough_time(n_ctx: int, seconds: float, expected: bool) -> None:
    assert beats(_REQUEST, (n_ctx, seconds), (10000, 10.0)) is expected
    assert beats(_REQUEST, (10000, 10.0), (n_ctx, seconds)) is not expected


@given(_PLANS, _PLANS, _PLANS)
def test_what_is_better_than_something_better_is_better(
    one: tuple[int, float], other: tuple[int, float], third: tuple[int, float]
) -> None:
    assert not (beats(_REQUEST, one, other) and beats(_REQUEST, other, one))
    if beats(_REQUEST, one, other) and beats(_REQUEST, other, third):
        assert beats(_REQUEST, one, third)


@given(_PLANS, _PLANS)
def test_nothing_counts_more_than_context_where_it_is_the_objective(
    one: tuple[int, float], other: tuple[int, float]
) -> None:
    if one[0] > other[0]:
        assert beats(_MOST_CONTEXT, one, other)


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_plan_without_a_time_is_compared_by_its_context(seconds: float) -> None:
    assert beats(_REQUEST, (4097, 0.0), (4096, seconds))
    assert not beats(_REQUEST, (4096, seconds), (4097, 0.0))


def test_the_worth_of_context_is_what_the_readme_names() -> None:
    assert WORTH_OF_CONTEXT == 2


DEVICE = limits(1000)


def trial(n_ctx: int = 8192, seconds: float | None = 10.0, missing: tuple[int, ...] = (), weights: int = 100) -> Trial:
    breakdown = Breakdown((Row("CUDA0", "CUDA0", False, weights, 0, 0),), ("CUDA0",), n_ctx, True)
    lacks = tuple((f"CUDA{d}", bytes_) for d, bytes_ in enumerate(missing))
    return Trial(Placement(0, (1,)), DEVICE, Params(n_ctx=n_ctx), breakdown, lacks, seconds)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(trial(n_ctx=4096, seconds=99.0), trial(missing=(1,)), id="it-fits"),
        pytest.param(trial(n_ctx=4096, missing=(5,)), trial(missing=(6,)), id="it-lacks-less"),
        pytest.param(trial(n_ctx=8448, seconds=99.0), trial(), id="more-context"),
        pytest.param(trial(seconds=9.0), trial(), id="less-time"),
        pytest.param(trial(seconds=None, weights=101), trial(seconds=None), id="more-weights-where-nothing-is-priced"),
    ],
)
def test_rank(better: Trial, worse: Trial) -> None:
    assert rank(better) > rank(worse)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param(trial(n_ctx=8448, seconds=99.0), trial(), False, id="context-that-costs-too-much"),
        pytest.param(trial(n_ctx=8448, seconds=99.0), trial(seconds=None), True, id="one-without-a-price"),
        pytest.param(trial(n_ctx=8448, seconds=99.0), trial(missing=(1,)), True, id="the-other-does-not-fit"),
    ],
)
def test_is_better_counts_time_against_context_where_both_fit(one: Trial, other: Trial, expected: bool) -> None:
    assert is_better(_REQUEST, one, other) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param((900,), (1000,), True, id="fewer-bytes"),
        pytest.param((1000,), (900,), False, id="more-bytes"),
        pytest.param((995,), (500, 500), True, id="about-the-same-in-one-place"),
        pytest.param((1005,), (500, 500), True, id="a-little-more-in-one-place"),
        pytest.param((500, 495), (1000,), False, id="a-little-less-in-two"),
        pytest.param((400, 400), (1000,), True, id="much-less-in-two"),
    ],
)
def test_lacks_less(one: tuple[int, ...], other: tuple[int, ...], expected: bool) -> None:
    assert lacks_less(trial(missing=one), trial(missing=other)) is expected


@pytest.mark.parametrize(
    ("found", "before", "gives_context", "expected"),
    [
        pytest.param(trial(missing=(1,)), trial(missing=(2,)), False, True, id="lacks-less"),
        pytest.param(trial(missing=(2,)), trial(missing=(1,)), False, False, id="lacks-more"),
        pytest.param(trial(seconds=99.0), trial(missing=(1,)), False, True, id="fits-at-last"),
        pytest.param(trial(seconds=1.0, missing=(1,)), trial(), False, False, id="fits-no-more"),
        pytest.param(trial(seconds=9.7), trial(), False, True, id="faster"),
        pytest.param(trial(seconds=9.9), trial(), False, False, id="hardly-faster"),
        pytest.param(trial(n_ctx=4096, seconds=5.0), trial(), False, False, id="less-context"),
        pytest.param(trial(n_ctx=4096, seconds=5.0), trial(), True, True, id="less-context-is-what-is-given"),
        pytest.param(trial(n_ctx=9216, seconds=10.0), trial(), False, False, id="more-context-alone"),
        pytest.param(trial(seconds=None), trial(), False, False, id="nothing-is-priced"),
    ],
)
def test_is_worth_giving_up(found: Trial, before: Trial, gives_context: bool, expected: bool) -> None:
    assert justifies_concession(_REQUEST, found, before, gives_context=gives_context) is expected


@pytest.mark.parametrize(
    ("n_ctx", "gives_context", "expected"),
    [
        pytest.param(9216, False, True, id="more"),
        pytest.param(8192, False, False, id="as-much-and-no-faster"),
        pytest.param(4096, True, False, id="less-though-it-is-given"),
    ],
)
def test_giving_up_for_context(n_ctx: int, gives_context: bool, expected: bool) -> None:
    found = trial(n_ctx=n_ctx, seconds=1.0 if n_ctx < 8192 else 10.0)
    assert justifies_concession(_MOST_CONTEXT, found, trial(), gives_context=gives_context) is expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(trial(), True, id="the-same"),
        pytest.param(trial(seconds=10.1), True, id="hardly-slower"),
        pytest.param(trial(seconds=10.3), False, id="slower"),
        pytest.param(trial(n_ctx=4096, seconds=1.0), False, id="less-context"),
        pytest.param(trial(missing=(1,)), False, id="does-not-fit"),
    ],
)
def test_does_as_well(found: Trial, expected: bool) -> None:
    assert does_as_well(found, trial()) is expected


def test_what_promises_most_is_tried_first() -> None:
    expected = [(8192, 5.0), (8192, 6.0), (4096, 6.0), None]
    found = sorted(
        (expected[i] for i in (3, 1, 0, 2)), key=cmp_to_key(lambda one, other: ordered(_REQUEST, one, other))
    )
    assert found == expected


@pytest.mark.parametrize(
    ("seconds", "load", "correction"),
    [
        pytest.param(9.94, True, True, id="six-thousandths"),
        pytest.param(9.96, False, True, id="four-thousandths"),
        pytest.param(9.99, False, False, id="one-thousandth"),
    ],
)
def test_what_is_worth_another_load(seconds: float, load: bool, correction: bool) -> None:
    assert is_worth_a_load(seconds, 10.0) is load
    assert is_worth_a_correction(seconds, 10.0) is correction
