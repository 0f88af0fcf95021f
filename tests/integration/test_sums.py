"""A plan is the same whichever way Python adds: from 3.12 on its ``sum`` rounds floating-point numbers otherwise."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest

import fitter
from tests.support.cases import named_cases
from tools.models import shapes

GPUS = ("4GiB", "3GiB")
"""Two places of the same price for a tensor, one of which is a rounding cheaper."""


@named_cases(("exact, in order", (math.fsum, lambda numbers: reduce(add, numbers, 0.0))))
def test_a_plan_is_the_same(ways: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.write("nemotron-h-9b", tmp_path, vocab=False)
    plain = builtins.sum
    plans = []
    for way in ways:

        def added(numbers: Iterable[Any], start: Any = 0, way: Any = way) -> Any:
            found = list(numbers)
            is_real = start == 0 and any(type(each) is float for each in found)
            return way(found) if is_real else plain(found, start)

        monkeypatch.setattr(builtins, "sum", added)
        plan = fitter.fit(model, gpus=GPUS, program="llama-server")
        plans.append((plan.params, plan.arguments(), plan.estimate))
    assert plans[0] == plans[1]
