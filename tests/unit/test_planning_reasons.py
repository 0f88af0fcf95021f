"""Why a plan is far from the best that it might be: its context, compute buffers, layers that are not divided."""

from __future__ import annotations

from dataclasses import replace

from fitter.llama.types import Params
from fitter.planning.pricing.pricing import bound_of, reasons_of
from fitter.planning.speed.explain import Bound, Reason
from tests.support.cases import named_cases
from tests.support.synthetic import MIB, SyntheticLlama, SyntheticModel, limits, priced, request

MODEL = SyntheticModel(cache=65536)
DEVICES = limits(700, 60)
REQUEST = priced(request(MODEL, DEVICES), MODEL)
SMALL, LARGE = (SyntheticLlama(MODEL, DEVICES).record(Params(n_ctx=n_ctx)) for n_ctx in (256, 4096))
COMPUTE = {"CUDA0": 300 * MIB, "CUDA1": 60 * MIB}
REACHED = 100.0


def seconds_of(bound: Bound | None) -> float:
    assert bound is not None
    return bound.seconds


LEAST = seconds_of(bound_of(REQUEST, SMALL, REACHED))
AT_CONTEXT = seconds_of(bound_of(REQUEST, LARGE, REACHED))
WITH_COMPUTE = seconds_of(bound_of(REQUEST, LARGE, REACHED, COMPUTE))
CACHE = 8 * 65536 * 4096

CONTEXT = Reason("context", AT_CONTEXT, CACHE)
BUFFERS = Reason("compute", WITH_COMPUTE, 360 * MIB, ("CUDA1",))
WHOLE = Reason("whole", REACHED)


def test_each_step_takes_more() -> None:
    assert 0 < LEAST * 1.1 < AT_CONTEXT and AT_CONTEXT * 1.1 < WITH_COMPUTE < REACHED


def test_every_reason_in_its_order() -> None:
    assert reasons_of(REQUEST, Bound(LEAST, reached=REACHED), LARGE, COMPUTE) == (CONTEXT, BUFFERS, WHOLE)


def test_a_plan_that_is_near_needs_none() -> None:
    assert reasons_of(REQUEST, Bound(LEAST, reached=LEAST * 1.5), LARGE, COMPUTE) == ()
    assert reasons_of(REQUEST, Bound(LEAST), LARGE, COMPUTE) == ()
    assert reasons_of(REQUEST, Bound(LEAST, reached=LEAST * 1.51), LARGE, COMPUTE) != ()


def test_what_adds_nothing_is_not_said() -> None:
    bound = Bound(LEAST, reached=REACHED)
    assert [reason.kind for reason in reasons_of(REQUEST, bound, SMALL, COMPUTE)] == ["compute", "whole"]
    assert [reason.kind for reason in reasons_of(REQUEST, bound, LARGE, {})] == ["context", "whole"]
    assert reasons_of(REQUEST, bound, SMALL, {}) == (WHOLE,)


def test_no_reason_is_more_than_the_plan_takes() -> None:
    reached = (LEAST * 1.6, AT_CONTEXT * 0.99)[AT_CONTEXT * 0.99 > LEAST * 1.6]
    found = reasons_of(REQUEST, Bound(LEAST, reached=reached), LARGE, COMPUTE)
    assert all(reason.seconds <= reached for reason in found) and found[-1].seconds == reached


@named_cases(("a MiB of room", 59 * MIB, ()), ("none", 60 * MIB, ("CUDA1",)), ("less than none", 61 * MIB, ("CUDA1",)))
def test_devices_that_cannot_hold_their_own_buffers(taken: int, devices: tuple[str, ...]) -> None:
    compute = {"CUDA0": 300 * MIB, "CUDA1": taken}
    (reason,) = (
        each for each in reasons_of(REQUEST, Bound(LEAST, reached=REACHED), LARGE, compute) if each.kind == "compute"
    )
    assert (reason.devices, reason.bytes) == (devices, 300 * MIB + taken)


def test_a_device_of_nothing_is_not_named() -> None:
    full = replace(REQUEST, devices=(DEVICES[0], replace(DEVICES[1], margin=60 * MIB)))
    found = reasons_of(full, Bound(LEAST, reached=REACHED), LARGE, COMPUTE)
    assert [reason.devices for reason in found if reason.kind == "compute"] == [()]
