"""Which devices, in which order, and whether a network is worth it, on the synthetic llama.cpp."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fitter.llama.types import Breakdown, Params
from fitter.machine.speed import DeviceSpeed
from fitter.planning.pricing.objective import rank
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import HostLimit
from fitter.planning.request.shared import remembered
from fitter.planning.search.device_choice import (
    in_better_order,
    with_fewer,
    with_fewer_remotes,
    with_others,
)
from fitter.planning.search.search_state import Callbacks, SearchState
from fitter.planning.search.variants import Variant, Variants
from fitter.planning.speed.explain import Choice
from tests.support.cases import cases, named_cases
from tests.support.synthetic import (
    CARD,
    MIB,
    REMOTE_CARD,
    SLOW_CARD,
    SyntheticLlama,
    SyntheticModel,
    limits,
    priced,
    request,
)

MODEL = SyntheticModel()
NARROW = replace(CARD, pcie=1e9)
"""A card with a link that streams slowly."""
FAR_AWAY = replace(REMOTE_CARD, round_trip=0.5)


def known(
    *mib: int,
    speeds: tuple[DeviceSpeed, ...] = (CARD,),
    fixed: tuple[str, ...] = (),
    model: SyntheticModel = MODEL,
    n_ctx: int = 4096,
    **more: object,
) -> tuple[SearchState, list[Choice]]:
    devices = limits(*mib)
    llama, said = SyntheticLlama(model, devices), list[Choice]()
    asked = replace(priced(request(model, devices, fixed=fixed), model, *speeds), **more)  # type: ignore[arg-type]
    callbacks = Callbacks(remembered(llama.measure), llama.record, on_choice=said.append)
    return SearchState(asked, devices, callbacks).at(n_ctx), said


Step = Callable[[Variants], Iterator[Variant]]


def variants_of(state: SearchState) -> Variants:
    """Variants with the answer on all devices of ``state``."""
    variants = Variants(state, lambda kind: state)
    variants.take(variants.ask(variants.first))
    return variants


def after(variants: Variants, *steps: Step) -> Trial:
    """The best trial after these steps."""
    for step in steps:
        for variant in step(variants):
            variants.take(variants.ask(variant))
    return variants.best.trial


@named_cases(
    ("the-wider-link-first", (400, 400), (NARROW, CARD), (), ["CUDA1", "CUDA0"]),
    ("as-it-is", (400, 400), (CARD, NARROW), (), ["CUDA0", "CUDA1"]),
    ("alike", (400, 400), (CARD, CARD), (), ["CUDA0", "CUDA1"]),
    ("nothing-is-streamed", (4000, 4000), (NARROW, CARD), (), ["CUDA0", "CUDA1"]),
    ("the-users-order", (400, 400), (NARROW, CARD), ("devices",), ["CUDA0", "CUDA1"]),
    ("remote-ones-never-stream", (300, 300, 300), (NARROW, FAR_AWAY, CARD), (), ["CUDA1", "CUDA2", "CUDA0"]),
)
def test_in_better_order(
    mib: tuple[int, ...], speeds: tuple[DeviceSpeed, ...], fixed: tuple[str, ...], names: list[str]
) -> None:
    found, said = known(*mib, speeds=speeds, fixed=fixed)
    assert [device.name for device in in_better_order(found).devices] == names
    assert [choice.subject for choice in said] == ["which device is the first"] * (names[0] != "CUDA0")
    assert {choice.runner_up for choice in said} <= {"CUDA0, in the given order"}


@named_cases(
    ("too-small-for-its-buffer", (60, 3000), (), ("CUDA1",)),
    ("the-users", (60, 3000), ("devices",), ("CUDA0", "CUDA1")),
    ("one-computes-a-prompt-with-weights-of-the-host", (20, 20, 20), (), ("CUDA0",)),
)
def test_without_idle(mib: tuple[int, ...], fixed: tuple[str, ...], names: tuple[str, ...]) -> None:
    found, _ = known(*mib, fixed=fixed)
    trial = variants_of(found).best.trial
    assert trial.params.devices == names and (trial.fits or fixed)
    assert (trial.params.tensor_split is None) is (len(names) == 1)


def test_layers_that_the_user_wants_keep_a_device() -> None:
    found, _ = known(10, fixed=("n_gpu_layers",), params=Params(n_gpu_layers=5))
    trial = variants_of(found).best.trial
    assert trial.params.devices == ("CUDA0",) and trial.missing[0][0] == "CUDA0"


@named_cases(("as much as both take", 8192, ("CUDA0",)), ("only the other takes so much", 16384, ("CUDA1",)))
def test_devices_that_take_a_context(n_ctx: int, names: tuple[str, ...]) -> None:
    found, _ = known(4000, 4000, context_limits={"CUDA0": 8192}, n_ctx=n_ctx)
    assert variants_of(found).best.trial.params.devices == names


@named_cases(
    ("slow-ones", (300, 300, 1200), (SLOW_CARD, SLOW_CARD, CARD)),
    ("small-ones", (700, 120, 120), (CARD,)),
    ("one-of-each", (500, 900), (NARROW, SLOW_CARD)),
)
def test_no_step_makes_a_plan_worse(mib: tuple[int, ...], speeds: tuple[DeviceSpeed, ...]) -> None:
    found, _ = known(*mib, speeds=speeds)
    variants = variants_of(found)
    steps = [variants.best.trial, after(variants, with_fewer), after(variants, with_others)]
    seconds = [step.seconds or 0.0 for step in steps]
    assert all(step.fits for step in steps) and seconds == sorted(seconds, reverse=True)


def test_the_users_slow_device_gets_nothing() -> None:
    found, _ = known(700, 300, 300, speeds=(FAR_AWAY, CARD, CARD), fixed=("devices",))
    variants = variants_of(found)
    first, best = variants.best.trial, after(variants, with_others)
    assert first.placement.is_spilled and best.fits
    assert best.params.devices == ("CUDA0", "CUDA1", "CUDA2") and best.placement.counts[0] == 0
    assert (best.seconds or 0.0) < (first.seconds or 0.0) and variants.best.state.closed == {"CUDA0"}


def test_other_devices() -> None:
    found, _ = known(300, 900)
    few = found.on(found.devices[:1])
    variants = variants_of(few)
    alone, variants.devices = variants.best.trial, found.devices
    both = after(variants, with_others)
    assert alone.params.devices == ("CUDA0",) and "CUDA1" in (both.params.devices or ())
    assert (both.seconds or 0.0) < (alone.seconds or 0.0)


@named_cases(
    ("the first two", (900, 900, 900), (CARD,), (0, 2), ("CUDA0", "CUDA1")),
    ("in another order", (900, 500, 900), (CARD,), (1, 2), ("CUDA1", "CUDA0")),
    ("another speed", (900, 900), (CARD, SLOW_CARD), (1,), ("CUDA1",)),
    ("less room", (900, 800), (CARD,), (1,), ("CUDA1",)),
)
def test_thefirst_of_equal_devices(
    mib: tuple[int, ...], speeds: tuple[DeviceSpeed, ...], chosen: tuple[int, ...], names: tuple[str, ...]
) -> None:
    found, _ = known(*mib, speeds=speeds)
    devices = variants_of(found).first_of_equal(found.devices[d] for d in chosen)
    assert tuple(device.name for device in devices) == names


LARGE_BUFFERS = replace(MODEL, compute=200 * MIB)
BOTH = ("CUDA0", "CUDA1")

MID_BUFFERS = replace(MODEL, compute=120 * MIB)


def named(numbers: str) -> tuple[str, ...]:
    """Names of devices by their digits."""
    return tuple(f"CUDA{number}" for number in numbers)


# devices without what is idle, without what is doubtful, and on others, by their digits
STEPS: dict[str, tuple[SyntheticModel, tuple[int, ...], tuple[DeviceSpeed, ...], str, int, str]] = {
    "a slow one leaves": (LARGE_BUFFERS, (1250, 3200), (CARD, SLOW_CARD), "prompt", 4096, "01 0 0"),
    "the slow one of three leaves": (
        *(LARGE_BUFFERS, (1450, 1500, 1400), (CARD, SLOW_CARD, CARD), "prompt", 32768, "012 02 02"),
    ),
    "a small one leaves": (
        *(MODEL, (750, 750, 900, 950), (CARD, SLOW_CARD, CARD, NARROW), "request", 32768, "0123 023 023"),
    ),
    "one of two leaves, and one that had nothing has a use": (
        *(LARGE_BUFFERS, (400, 1400, 950, 1300), (CARD, SLOW_CARD, SLOW_CARD, CARD), "prompt", 4096, "13 3 03"),
    ),
    "a fast one comes first": (LARGE_BUFFERS, (550, 600), (CARD, SLOW_CARD), "generation", 8192, "01 01 10"),
    "an idle one stays idle": (LARGE_BUFFERS, (100, 1200), (CARD, NARROW), "request", 4096, "1 1 1"),
    "another one alone": (MID_BUFFERS, (150, 550), (CARD, NARROW), "prompt", 16384, "1 1 0"),
}


@cases(STEPS)
def test_devices_of_each_step(
    model: SyntheticModel,
    mib: tuple[int, ...],
    speeds: tuple[DeviceSpeed, ...],
    objective: str,
    n_ctx: int,
    expected: str,
) -> None:
    found, _ = known(*mib, speeds=speeds, model=model, objective=objective, n_ctx=n_ctx)
    variants = variants_of(found)
    steps = (variants.best.trial, after(variants, with_fewer), after(variants, with_others))
    assert [step.params.devices for step in steps] == list(map(named, expected.split()))
    for before, later in itertools.pairwise(steps):
        assert later is before or rank(later) > rank(before)
    assert all(step.breakdown.on(device.name).used <= device.free for step in steps for device in step.devices)


@cases("devices", "tensor_split")
def test_the_users_devices_are_never_doubtful(fixed: str) -> None:
    more: dict[str, Any] = {"params": Params(tensor_split=(1.0, 2.0))} if fixed == "tensor_split" else {}
    found, _ = known(1250, 2000, speeds=(SLOW_CARD, CARD), fixed=(fixed,), **more)
    variants = variants_of(found)
    first = variants.best.trial
    assert first.params.devices == BOTH
    assert after(variants, with_fewer, with_others) is first


@named_cases(
    ("a-network-slower-than-the-host", FAR_AWAY, ("CUDA0",)),
    ("a-fast-one", replace(REMOTE_CARD, round_trip=0.0, pcie=1e12), ("CUDA0", "CUDA1")),
    ("no-network", CARD, ("CUDA0", "CUDA1")),
)
def test_worth_their_network(speed: DeviceSpeed, names: tuple[str, ...]) -> None:
    found, said = known(600, 900, speeds=(CARD, speed))
    variants = variants_of(found)
    assert variants.best.trial.params.devices == ("CUDA0", "CUDA1")
    best = after(variants, with_fewer_remotes)
    assert best.params.devices == names
    subject = "whether remote devices are worth their network"
    assert (subject in [choice.subject for choice in said]) is speed.is_remote


NEAR = replace(REMOTE_CARD, round_trip=1e-5, pcie=1e10)
LITTLE = HostLimit(1000 * MIB, 1000 * MIB, 0)


FAR_NEXT = ((600, 900), (CARD, FAR_AWAY))
EIGHT, SPLIT = Params(n_gpu_layers=8), Params(tensor_split=(1.0, 2.0))


@named_cases(
    # the devices that are left, by their digits
    ("the-far-one-leaves", (500,) * 3, (CARD, FAR_AWAY, NEAR), {}, "02", 4096),
    ("the-far-one-is-last", (500,) * 3, (CARD, NEAR, FAR_AWAY), {}, "01", 4096),
    ("both-leave", (500,) * 3, (CARD, FAR_AWAY, FAR_AWAY), {}, "0", 4096),
    ("both-stay", (500,) * 3, (CARD, NEAR, NEAR), {}, "012", 4096),
    ("the-users-devices", *FAR_NEXT, {"fixed": ("devices",)}, "01", 4096),
    ("the-users-tensor-is-there", *FAR_NEXT, {"pinned": {"blk.0.ffn_up.weight": 1}}, "01", 4096),
    ("for-a-prompt", *FAR_NEXT, {"objective": "prompt"}, "0", 4096),
    ("more-than-on-the-host", (600, 3000), (CARD, FAR_AWAY), {"host": LITTLE}, "1", 32768),
    ("no-more-than-on-the-host", (600, 3000), (CARD, FAR_AWAY), {"host": LITTLE}, "0", 4096),
    ("the-users-layers", *FAR_NEXT, {"fixed": ("n_gpu_layers",), "params": EIGHT}, "01", 4096),
    ("the-users-split", *FAR_NEXT, {"fixed": ("tensor_split",), "params": SPLIT}, "01", 4096),
    ("the-host-alone", (3000,), (FAR_AWAY,), {}, "", 32768),
    ("nothing-but-remote", (3000,), (NEAR,), {}, "0", 32768),
)
def test_remotes_that_leave(
    mib: tuple[int, ...], speeds: tuple[DeviceSpeed, ...], more: dict[str, Any], left: str, n_ctx: int
) -> None:
    found, _ = known(*mib, speeds=speeds, n_ctx=n_ctx, **more)
    variants = variants_of(found)
    before, best = variants.best.trial, after(variants, with_fewer_remotes)
    assert best.fits and (best.params.devices, best.params.n_ctx) == (named(left), n_ctx)
    assert (best.params == before.params) is (best.params.devices == before.params.devices)


def test_remotes_that_were_not_worth_it_are_not_asked_for_again() -> None:
    found, _ = known(600, 900, speeds=(CARD, FAR_AWAY))
    measured: list[Params] = []

    def measure(params: Params) -> Breakdown:
        measured.append(params)
        return found.callbacks.measure(params)

    counted = SearchState(found.original_request, found.devices, Callbacks(measure, found.callbacks.record))
    variants = variants_of(counted)
    after(variants, with_fewer_remotes)
    loads = len(measured)
    assert after(variants, with_others).params.devices == ("CUDA0",)
    assert {params.devices for params in measured[loads:]} <= {("CUDA0",)}
