"""Which of two plans is the better one."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.planning.request import Request
from fitter.planning.trial import WORTH_OF_CONTEXT, beats


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
