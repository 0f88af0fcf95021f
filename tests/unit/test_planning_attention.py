"""Where flash attention is decided by the search: which ways are asked for, and what is said of the one chosen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fitter.llama.types import Breakdown, Params
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import Request
from fitter.planning.search import flash_attention
from fitter.planning.speed.explain import FAR
from tests.support.cases import cases, named_cases
from tests.support.synthetic import SyntheticModel, limits, request

DEVICES = limits(1000, 2000)
REQUEST = request(SyntheticModel(), DEVICES)
ON_HOST, ON_DEVICES, NOWHERE = Placement(4, (3, 2)), Placement(0, (5, 4)), Placement(9, (0, 0))


def trial(placement: Placement, flash_attn: bool, seconds: float = 2.0) -> Trial:
    params = Params(n_ctx=REQUEST.n_ctx_max, devices=("CUDA0", "CUDA1"))
    return Trial(placement, DEVICES, params, Breakdown((), (), params.n_ctx, flash_attn), (), seconds)


def ways_of(
    asked: Request, best: Trial, distance: float, seen: Collection[bool | None], *, is_last: bool = True
) -> list[str]:
    """Other values of ``flash_attn`` that are asked for, with caches where they are."""
    kinds = flash_attention.kinds(asked, best, distance, seen, is_last=is_last)
    return [kind.flash_attn for kind in kinds if kind.offload_kqv and kind.flash_attn != asked.params.flash_attn]


@named_cases(
    ("it-is-on", trial(ON_DEVICES, True), 9.0, {True}, []),
    ("it-never-was-on", trial(ON_HOST, False), 9.0, {False}, []),
    ("near-its-bound", trial(ON_HOST, False), 1 + GAIN, {True, False}, ["off"]),
    ("the-placement-turned-it-off", trial(ON_HOST, False), 1.1, {True, False}, ["on", "off"]),
    ("in-another-trial", trial(ON_DEVICES, True), 1.1, {True, False}, ["on"]),
    ("caches-on-the-host-and-near", trial(ON_HOST, True), 1 + GAIN, {True}, ["off"]),
    ("weights-on-the-host", trial(ON_HOST, True), 1.1, {True}, ["off"]),
    ("caches-on-the-host-and-far", trial(ON_HOST, True), FAR + 0.1, {True}, ["off"]),
    ("everything-on-the-host", trial(NOWHERE, True), FAR + 0.1, {True}, ["off"]),
    ("both", trial(ON_HOST, True), FAR + 0.1, {True, False}, ["on", "off"]),
)
def test_what_is_asked_for(best: Trial, distance: float, seen: Collection[bool | None], ways: list[str]) -> None:
    assert ways_of(REQUEST, best, distance, seen) == ways


@named_cases(
    ("caches-on-the-host-and-far", ON_HOST, FAR + 0.1, True),
    ("caches-on-the-host-and-near", ON_HOST, FAR, False),
    ("everything-on-the-host", NOWHERE, FAR + 0.1, False),
)
def test_it_is_on_until_the_context_is_decided(placement: Placement, distance: float, is_asked: bool) -> None:
    found = ways_of(REQUEST, trial(placement, True), distance, {True}, is_last=False)
    assert found == (["off"] if is_asked else [])


@named_cases(
    ("caches-on-the-host", ON_HOST, (), True, True),
    ("caches-on-devices", ON_DEVICES, (), True, False),
    ("the-users", ON_HOST, ("offload_kqv",), True, False),
    ("before-the-context-is-decided", ON_HOST, (), False, False),
)
def test_caches_may_be_on_the_host(placement: Placement, fixed: tuple[str, ...], is_last: bool, is_asked: bool) -> None:
    asked = replace(REQUEST, fixed=frozenset(fixed))
    kinds = flash_attention.kinds(asked, trial(placement, True), 2.0, {True}, is_last=is_last)
    assert any(not kind.offload_kqv for kind in kinds) is is_asked


@named_cases(("left-open", (), ["on"]), ("the-users", ("n_ctx",), []))
def test_a_plan_with_too_little_context_may_get_more(fixed: tuple[str, ...], ways: list[str]) -> None:
    best = trial(ON_DEVICES, True)
    short = replace(best, params=replace(best.params, n_ctx=REQUEST.n_ctx_max // 2))
    assert ways_of(replace(REQUEST, fixed=frozenset(fixed)), short, 1.0, {True, False}) == ways


@named_cases(("one-there", Placement(1, (4, 4))), ("one-here", Placement(8, (0, 1))))
def test_a_single_layer_is_a_cache_on_the_host_or_a_device(placement: Placement) -> None:
    assert ways_of(REQUEST, trial(placement, True), FAR + 0.1, {True}) == ["off"]


def test_a_quantized_v_cache_needs_it() -> None:
    quantized = replace(REQUEST, params=replace(REQUEST.params, type_v="q8_0"))
    assert not ways_of(quantized, trial(ON_HOST, True), 9.0, {True})


@named_cases(
    ("left-to-llama.cpp", {}, True),
    ("auto-as-the-user-says", {"fixed": frozenset({"flash_attn"})}, False),
    ("on-as-the-user-says", {"params": replace(REQUEST.params, flash_attn="on")}, False),
)
def test_what_the_user_sets_stays(changed: dict[str, Any], is_open: bool) -> None:
    asked: Request = replace(REQUEST, **changed)
    assert flash_attention.is_open(asked) is is_open


@cases(
    (True, False, ("on for every layer", "auto, which turns it off")),
    (False, True, ("off", "auto, which turns it on")),
    (False, False, ("off", "auto")),
)
def test_what_is_said(chosen: bool, other: bool, words: tuple[str, str]) -> None:
    choice = flash_attention.choice_of(trial(ON_HOST, chosen), trial(ON_HOST, other, 3.0))
    assert choice is not None and (choice.chosen, choice.runner_up) == words
    assert (choice.seconds, choice.runner_up_seconds) == (2.0, 3.0)
