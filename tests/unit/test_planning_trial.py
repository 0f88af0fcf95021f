"""Which of two plans is the better one."""

from __future__ import annotations

import pytest

from fitter.planning.trial import CONTEXT_GIVEN, WORTH_CONTEXT, pays_for_context


@pytest.mark.parametrize(
    ("n_ctx", "seconds", "expected"),
    [
        pytest.param(9840, 8.0, True, id="a-fifth-of-the-time-for-a-sixtieth-of-the-context"),
        pytest.param(9840, 9.01, False, id="less-than-a-tenth-of-the-time"),
        pytest.param(9840, 8.99, True, id="a-tenth-of-the-time"),
        pytest.param(9000, 8.0, True, id="twice-the-share"),
        pytest.param(9000, 8.01, False, id="less-than-twice-the-share"),
        pytest.param(7500, 1.0, True, id="a-quarter-of-the-context"),
        pytest.param(7499, 1.0, False, id="more-than-a-quarter-of-the-context"),
        pytest.param(7500, 5.1, False, id="a-quarter-for-less-than-half-of-the-time"),
        pytest.param(9999, 10.0, False, id="no-time"),
        pytest.param(9999, 11.0, False, id="slower"),
    ],
)
def test_a_shorter_context_is_better_where_it_saves_enough_time(n_ctx: int, seconds: float, expected: bool) -> None:
    assert pays_for_context(n_ctx, seconds, 10000, 10.0) is expected


def test_the_limits_are_those_that_the_readme_names() -> None:
    assert (CONTEXT_GIVEN, WORTH_CONTEXT) == (0.25, 0.1)
