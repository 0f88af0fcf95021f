"""Why a plan is as it is, as people and programs read it."""

from __future__ import annotations

import io
import json
import math

from fitter.output.documents.plan_document import to_dict
from fitter.output.tables import plan_table
from fitter.output.tables.plan_facts import default_speeds, explain_lines, explanation, far_lines
from fitter.planning.plan.plan import Plan, Problem
from fitter.planning.pricing.pricing import SpeedSource
from fitter.planning.speed.cost import Part
from fitter.planning.speed.explain import Bound, Choice, Reason
from fitter.text import duration
from tests.support.cases import cases, named_cases
from tests.support.plans import make_plan, make_price

PRICE = make_price(prompt=1000, generation=10)
PARTS = (
    Part("CUDA0: layers", 0.00002, 0.002),
    Part("CUDA0: weights", 0.0006, 0.03),
    Part("CUDA0: attention", 0.00008, 0.008),
    Part("host: weights", 0.0003, 0.06),
)
WEIGHTS = "where the weights go"
FEED_FORWARD = "feed-forward tensors of 12 layers on the host"


def test_the_three_largest_parts_are_named() -> None:
    assert explain_lines(make_price(prompt=1000, generation=10, parts=PARTS)) == [
        "prompt: 2.05 s (CUDA0: weights 60 %, host: weights 30 %, CUDA0: attention 8 %, other 2 %)",
        "generation: 51.2 s (host: weights 60 %, CUDA0: weights 30 %, CUDA0: attention 8 %, other 2 %)",
    ]


def test_fewer_parts_are_all_there_are() -> None:
    price = make_price(prompt=1000, generation=10, parts=(Part("host: weights", 0.001, 0), Part("splits", 0, 0.1)))
    assert explain_lines(price) == ["prompt: 2.05 s (host: weights 100 %)", "generation: 51.2 s (splits 100 %)"]
    assert explain_lines(PRICE) == ["prompt: 2.05 s", "generation: 51.2 s"]


@cases(
    (Choice(WEIGHTS, FEED_FORWARD, 12.5), f"{WEIGHTS}: {FEED_FORWARD} (12.5 s)"),
    (
        Choice(WEIGHTS, FEED_FORWARD, 12.5, "whole layers"),
        f"{WEIGHTS}: {FEED_FORWARD} (12.5 s); runner-up: whole layers",
    ),
    (
        Choice(WEIGHTS, FEED_FORWARD, 12.5, "whole layers", 25.0),
        f"{WEIGHTS}: {FEED_FORWARD} (12.5 s); runner-up: whole layers (25 s: +12.5 s, +100.0 %)",
    ),
    (
        Choice("context", "131072", 12.5, "65536", 12.0),
        "context: 131072 (12.5 s); runner-up: 65536 (12 s: -0.5 s, -4.0 %)",
    ),
    (Choice("devices", "CUDA0", 2.0, "both", 2.0004), "devices: CUDA0 (2 s); runner-up: both (2 s: +0.4 ms, +0.0 %)"),
    (Choice("devices", "CUDA0", 0.0, "both", 0.5), "devices: CUDA0 (0 s); runner-up: both (0.5 s: +0.5 s)"),
)
def test_a_choice(choice: Choice, line: str) -> None:
    assert explain_lines(PRICE, [choice])[2:] == [line]


@cases(
    (Bound(PRICE.seconds / 1.031), "at most 3.1 % more than the best placement of these tensors could, by"),
    (Bound(PRICE.seconds / 1.03101), "at most 3.2 % more than"),
    (Bound(PRICE.seconds), "at most 0.0 % more than"),
    (Bound(PRICE.seconds * (1 + 1e-12)), "at most 0.0 % more than"),
    (Bound(PRICE.seconds / 1.5, "the best context"), "at most 50.0 % more than the best context"),
    # of generation alone, which is what was asked for
    (Bound(40.0, "the best", reached=50.0), "lower bound: 40 s; this plan takes at most 25.0 % more than the best"),
)
def test_the_proven_distance(bound: Bound, line: str) -> None:
    (said,) = explain_lines(PRICE, (), bound)[2:]
    assert line in said


@named_cases(
    ("no-bound", None, []),
    ("near", Bound(10.0, reached=15.0), []),
    ("far", Bound(10.0, reached=15.1), ["1.5 times the lower bound of 10 s for any placement"]),
    ("nothing-reached", Bound(10.0), []),
    (
        "why",
        Bound(
            10.0,
            reached=40.0,
            reasons=(
                Reason("context", 12.0, 3 * 2**30),
                Reason("compute", 20.0, 2**31, ("CUDA0", "CUDA1")),
                Reason("whole", 40.0),
            ),
        ),
        [
            "4.0 times the lower bound of 10 s for any placement, because of "
            "3.0 GiB of cache for this context, which raises it to 12 s (a smaller -c takes less); "
            "2.0 GiB of compute buffers, which raise it to 20 s (CUDA0 and CUDA1 have no room for them); "
            "the rest, since layers and tensors cannot be divided and each device takes consecutive layers"
        ],
    ),
)
def test_what_keeps_a_plan_from_its_bound(bound: Bound | None, lines: list[str]) -> None:
    assert far_lines(bound) == lines
    price = make_price(prompt=1000, generation=10)
    shown = " ".join(rendered(make_plan(estimate=price, bound=bound), True).split())
    assert all(line in shown for line in lines) and ("for any placement" in shown) is bool(lines)


@cases(0.0, math.inf)
def test_nothing_is_proven_by_a_bound_of(seconds: float) -> None:
    assert Bound(seconds).distance(1.0) is None
    assert "%" not in explain_lines(PRICE, (), Bound(seconds))[2]


def test_default_speeds_come_last() -> None:
    known, other = SpeedSource("CUDA0", "catalogue", False), SpeedSource("host", "default: two channels", True)
    price = make_price(known, other)
    assert explain_lines(price, [Choice("context", "4096", 1.0)], Bound(1.0))[3:] == [
        "lower bound: 1 s; this plan takes at most 1411.1 % more than the best placement of these tensors could, by "
        "the cost model",
        "speed of host: default: two channels",
    ]


def test_a_remote_device_says_what_its_network_takes() -> None:
    far = SpeedSource("RPC0", "measured; reads 20 GB/s; network: 0.1 GB/s, 0.3 ms round trip", False, True)
    assert explain_lines(make_price(far))[-1] == f"speed of RPC0: {far.text}"
    assert default_speeds(make_price(far)) == []


def test_a_plan_without_an_estimate() -> None:
    assert explanation(make_plan()) == "this plan has no time estimate"
    plan = make_plan(problems=(Problem("host", 1, "too little"),))
    assert explanation(plan) == "a plan that does not fit has no time estimate"


def rendered(plan: Plan, verbose: bool) -> str:
    out = io.StringIO()
    plan_table.print_to(out, plan_table.plan_table(plan, verbose=verbose))
    return out.getvalue()


def test_only_the_verbose_table_explains() -> None:
    price = make_price(SpeedSource("host", "default: two channels", True), prompt=1000, generation=10, parts=PARTS)
    choices = (Choice("context", "4096", 12.0, "2048", 13.0),)
    plan = make_plan(estimate=price, choices=choices, bound=Bound(12.0))
    lines = explanation(plan).splitlines()
    assert len(lines) == 5
    verbose, usual = rendered(plan, True), rendered(plan, False)
    # a line of the table has 120 columns
    unfolded = " ".join(verbose.split())
    assert all(line in unfolded for line in lines)
    assert (verbose.count("speed of host"), usual.count("speed of host")) == (1, 0)
    assert "runner-up" not in usual and "bound:" not in usual


def test_json() -> None:
    price = make_price(prompt=1000, generation=10)
    choices = (Choice("context", "4096", 12.34567, "2048", 13.0), Choice("devices", "CUDA0", 12.34567))
    plan = make_plan(estimate=price, choices=choices, bound=Bound(50.0, "the best"))
    document = to_dict(plan)
    expected = {
        "choices": [
            {"subject": "context", "chosen": "4096", "seconds": 12.35, "runner_up": "2048", "runner_up_seconds": 13.0},
            {"subject": "devices", "chosen": "CUDA0", "seconds": 12.35, "runner_up": None, "runner_up_seconds": None},
        ],
        "bound": {"seconds": 50.0, "text": "the best", "distance": 0.06496, "reasons": []},
    }
    # the order is part of what is stable
    assert json.dumps(document["explanation"]) == json.dumps(expected)
    assert list(document).index("explanation") == list(document).index("estimate") + 3


@cases(
    (12345.6, "12,300 s"),
    (100.0, "100 s"),
    (99.94, "99.9 s"),
    (1.0, "1 s"),
    (0.1, "0.1 s"),
    (0.0999, "99.9 ms"),
    (0.0000521, "0.0521 ms"),
    (0.0, "0 s"),
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
