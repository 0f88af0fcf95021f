"""Sums of floating-point numbers that are the same in every Python."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce


def float_sum(numbers: Iterable[float]) -> float:
    """Add numbers in their order. From Python 3.12 on ``sum`` rounds otherwise, which decides between equal plans."""
    return reduce(operator.add, numbers, 0.0)
