"""A fit: its confirmation, its time limit, its problems and its price."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fitter.errors import LlamaCppError, TimeLimitError
from fitter.llama.types import Breakdown, Layout, Params, TensorBuftOverride
from fitter.planning.plan.plan import ModelSummary, Plan
from fitter.planning.request.request import DeviceLimit, HostLimit, Progress, Request
from fitter.planning.request.summary import DeviceUse, HostUse
from fitter.planning.search.best_plan import LoadCalls, fit
from fitter.planning.speed.cost import Workload
from tests.support.cases import cases, named_cases
from tests.support.synthetic import (
    CARD,
    DENSE,
    MIB,
    SLOW_CARD,
    SyntheticLlama,
    SyntheticModel,
    limits,
    load_calls,
    priced,
    request,
)
from tests.support.synthetic import MOE_AFTER_DENSE as MOE

SUMMARY = ModelSummary("model.gguf", "model", "llama", 0)
MACHINES = {
    "everything fits": limits(8000),
    "context shrinks": limits(1500),
    "layers leave": limits(900),
    "two devices": limits(900, 500),
    "three small ones": limits(400, 300, 500),
    "nothing fits": limits(10),
}


def fitted(asked: Request, calls: LoadCalls, on_progress: Callable[[Progress], None] = lambda progress: None) -> Plan:
    return fit(asked, SUMMARY, calls, on_progress, True)


def plain(model: SyntheticModel, devices: tuple[DeviceLimit, ...]) -> Plan:
    return fitted(request(model, devices), load_calls(SyntheticLlama(model, devices)))


def same(a: Plan, b: Plan) -> bool:
    return replace(a, search=b.search) == b


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("devices", MACHINES.values(), ids=MACHINES)
def test_a_plan_is_confirmed_by_one_load(model: SyntheticModel, devices: tuple[DeviceLimit, ...]) -> None:
    llama, confirming = SyntheticLlama(model, devices), SyntheticLlama(model, devices)
    said: list[Progress] = []
    calls = load_calls(llama, confirm=confirming.measure, dummy_loads=lambda: len(llama.asked))
    plan = fitted(request(model, devices), calls, said.append)
    assert same(plan, plain(model, devices))
    assert confirming.asked == [plan.params] and confirming.records == 0
    assert said[-1].text.startswith("confirming context ")


def test_an_error_is_llama_cpps_own() -> None:
    def refuse(params: Params) -> Breakdown:
        raise LlamaCppError("the model")

    devices = limits(8000)
    with pytest.raises(LlamaCppError, match="the model"):
        fitted(request(DENSE, devices), load_calls(SyntheticLlama(DENSE, devices), refuse))


@dataclass
class Hurried(SyntheticLlama):
    """Of a llama.cpp that answers ``left`` more questions before the time limit is reached."""

    left: int = 0
    deadline: float | None = None

    def until(self, deadline: float | None) -> None:
        self.deadline = deadline

    def measure(self, params: Params) -> Breakdown:
        self._count()
        return super().measure(params)

    def record(self, params: Params) -> Layout:
        self._count()
        return super().record(params)

    def _count(self) -> None:
        if self.deadline is not None:
            if self.left == 0:
                raise TimeLimitError("the worker's own words")
            self.left -= 1


def hurried(asked: Request, copy: Hurried, own: SyntheticLlama) -> Plan:
    llama = load_calls(copy, confirm=own.measure, until=copy.until)
    return fit(asked, SUMMARY, llama, lambda progress: None, True, deadline=1.0)


@pytest.mark.parametrize("allow", [frozenset(), frozenset({"kv-q8_0", "no-op-offload"})], ids=["no lever", "levers"])
@pytest.mark.parametrize("devices", [limits(1500), limits(700, 600)], ids=["context shrinks", "two devices"])
def test_the_time_limit_ends_in_the_best_plan_so_far(devices: tuple[DeviceLimit, ...], allow: frozenset[str]) -> None:
    asked = replace(request(DENSE, devices), allow=allow)
    ended = []
    for left in range(60):
        own = SyntheticLlama(DENSE, devices)
        try:
            plan = hurried(asked, Hurried(DENSE, devices, left=left), own)
        except TimeLimitError as error:
            assert re.match(r"no plan that fits was found within the time limit \(in its last \d\.\d s", str(error))
            assert own.asked == []
            ended.append("nothing")
            continue
        assert plan.fits and own.asked == [plan.params], "what was found is confirmed after the time limit"
        ended.append("cut short" if plan.search.is_cut_short else "done")
    # the more time, the further it comes
    assert ended == sorted(ended, key=["nothing", "cut short", "done"].index) and len(set(ended)) == 3
    whole = Hurried(DENSE, devices, left=1000)
    assert same(hurried(asked, whole, SyntheticLlama(DENSE, devices)), plan)


def test_a_plan_that_the_time_limit_leaves_without_a_price_is_cut_short() -> None:
    devices = limits(8000)
    asked = request(DENSE, devices)
    for left, is_cut_short in ((1, True), (2, False)):
        plan = hurried(asked, Hurried(DENSE, devices, left=left), SyntheticLlama(DENSE, devices))
        assert plan.fits and plan.search.is_cut_short is is_cut_short


def test_a_plan_that_does_not_fit_is_none_when_the_time_is_over() -> None:
    devices = limits(10)
    with pytest.raises(TimeLimitError, match=r"seconds: loading with context .*\): raise --time-limit"):
        hurried(request(DENSE, devices, host_mib=10), Hurried(DENSE, devices, left=2), SyntheticLlama(DENSE, devices))


PUT_THERE = {f"blk.{layer}.ffn_up.weight": 0 for layer in range(DENSE.n_layer)}
AS_ASKED = request(
    *(DENSE, limits(200)),
    params=Params(n_gpu_layers=2, n_ctx=4096, tensor_buft_overrides=(TensorBuftOverride("ffn_up", "CUDA0"),)),
    fixed=("n_gpu_layers", "n_ctx"),
)
PAGED = "let weights be read from disk again and again with --allow paging"

CONTEXT: dict[str, Any] = {"params": Params(n_ctx=8192), "fixed": ("n_ctx",)}


def problem(asked: Request, place: str, lacks: int, needed: int, margin: int, free: int, remedy: str) -> Any:
    """What is asked, and the message about what lacks there, in MiB."""
    said = f"{needed} MiB are needed plus a margin of {margin} MiB, but {free} MiB are free; {remedy}"
    return asked, [f"{place} lacks {lacks} MiB: {said}"]


PROBLEMS = {
    "a device": problem(
        request(
            *(DENSE, limits(500, margin=7)), params=Params(n_gpu_layers=9, n_ctx=4096), fixed=("n_gpu_layers", "n_ctx")
        ),
        *("CUDA0", 114, 607, 7, 500, "leave -ngl out"),
    ),
    "tensors that were put there": problem(
        replace(AS_ASKED, pinned=PUT_THERE),
        *("CUDA0", 335, 535, 0, 200),
        "put fewer tensors there with -ot and leave -ngl out: only together they are enough",
    ),
    "the host": problem(
        request(DENSE, (), host_mib=1000),
        *("the host", 299, 1299, 0, 1000, f"{PAGED} or use a machine with 299 MiB more"),
    ),
    "the host and a large context": problem(
        request(DENSE, (), host_mib=1000, **CONTEXT),
        *("the host", 427, 1427, 0, 1000, f"{PAGED} or use a machine with 427 MiB more"),
    ),
    "a host that pages": problem(
        request(DENSE, (), host_mib=100, paging=True),
        *("the host", 39, 1299, 0, 100),
        "no option is enough for this model: use a machine with 39 MiB more",
    ),
    "a little more context than there is room for": problem(
        request(DENSE, (), host_mib=1400, **CONTEXT),
        *("the host", 27, 1427, 0, 1400, f"use a smaller -c or {PAGED}"),
    ),
    "memory of the host that others use": problem(
        replace(
            request(DENSE, (), host_mib=1390, **CONTEXT, paging=True),
            host=HostLimit(1390 * MIB, 100 * MIB, 100 * MIB, paging=True),
        ),
        *("the host", 267, 1427, 100, 100, "free 267 MiB of host memory"),
    ),
    "layers that the user keeps on the host": problem(
        request(DENSE, limits(2000), host_mib=1000, params=Params(n_gpu_layers=0), fixed=("n_gpu_layers",)),
        *("the host", 299, 1299, 0, 1000, f"leave -ngl out or {PAGED}"),
    ),
    "layers for which the user's split has no room": problem(
        request(
            *(DENSE, limits(2000, 200)), host_mib=300, params=Params(tensor_split=(0.0, 1.0)), fixed=("tensor_split",)
        ),
        *("the host", 999, 1299, 0, 300, f"leave -ts out or {PAGED}"),
    ),
    "layers and caches that a smaller context has room for": problem(
        request(DENSE, limits(900), host_mib=200, params=Params(n_ctx=32768), fixed=("n_ctx",)),
        *("the host", 1251, 1451, 0, 200, f"use a smaller -c and {PAGED}: only together they are enough"),
    ),
}


def tried(asked: Request, words: str) -> Plan:
    """The plan with a remedy that a problem names; several are joined by "and"."""
    for each in words.removesuffix(": only together they are enough").split(" and "):
        if option := re.search(r"leave (-\w+) out", each):
            asked = replace(asked, fixed=asked.fixed - {{"-ngl": "n_gpu_layers", "-ts": "tensor_split"}[option[1]]})
        elif each == "use a smaller -c":
            asked = replace(asked, params=replace(asked.params, n_ctx=asked.n_ctx_min))
        elif each == "put fewer tensors there with -ot":
            asked = replace(asked, pinned={}, params=replace(asked.params, tensor_buft_overrides=()))
        elif "with --fit-target" in each:
            asked = replace(asked, devices=tuple(replace(device, margin=0) for device in asked.devices))
        elif PAGED.startswith(each) or PAGED.endswith(each):
            asked = replace(asked, host=replace(asked.host, paging=True))
        else:
            more = re.search(r"(\d+) MiB", each)
            assert more and asked.host.free is not None, each
            asked = replace(asked, host=replace(asked.host, free=asked.host.free + int(more[1]) * MIB))
    return fitted(asked, load_calls(SyntheticLlama(DENSE, asked.devices)))


@cases(PROBLEMS)
def test_what_lacks_is_said_with_what_to_do(asked: Request, messages: list[str]) -> None:
    plan = fitted(asked, load_calls(SyntheticLlama(DENSE, asked.devices)))
    assert [problem.message for problem in plan.problems] == messages and not plan.fits
    for problem in plan.problems:
        use = plan.host if problem.device == "host" else plan.devices[0]
        rounded = -(-problem.missing // MIB)
        assert f"lacks {rounded} MiB: {-(-use.used // MIB)} MiB are needed" in problem.message
        assert all(tried(asked, words).fits for words in problem.message.partition("are free; ")[2].split(" or "))
        if not asked.host.paging:
            assert problem.missing == use.used + use.margin - (use.free or 0)


def planned(asked: Request, llama: SyntheticLlama, record: Callable[[Params], Layout] | None = None) -> Plan:
    calls = load_calls(llama, record=record or llama.record, dummy_loads=lambda: len(llama.asked))
    return fitted(replace(asked, context_cost=0.0), calls)


@named_cases(
    # and what share of the whole request's time the objective has
    ("all on a device", request(DENSE, limits(8000)), 1.0),
    # without flash attention its bound is far
    ("layers leave", request(DENSE, limits(900), fixed=("flash_attn",)), 1.0),
    ("two devices", request(DENSE, limits(900, 500)), 1.0),
    ("generation", replace(request(DENSE, limits(900, 500)), objective="generation"), 0.85),
    ("prompt", replace(request(DENSE, limits(900, 500)), objective="prompt"), 0.01),
)
def test_a_plan_is_priced_by_what_it_was_measured_to_be(asked: Request, share: float) -> None:
    plan = planned(priced(asked, DENSE, CARD, SLOW_CARD), SyntheticLlama(DENSE, asked.devices))
    assert plan.fits and plan.estimate is not None and plan.bound is not None
    assert plan.estimate.breakdown == plan.breakdown and plan.estimate.workload == Workload(2048, 512)
    of_objective = {
        "request": plan.estimate.seconds,
        "generation": 512 / plan.estimate.generation_tokens_per_second,
        "prompt": 2048 / plan.estimate.prompt_tokens_per_second,
    }[asked.objective]
    assert plan.bound.reached == pytest.approx(of_objective)
    assert share * plan.estimate.seconds <= of_objective <= plan.estimate.seconds
    assert plan.bound.seconds <= of_objective * (1 + 1e-9) and not plan.bound.is_far and plan.bound.reasons == ()
    on_host = [override for override in plan.params.tensor_buft_overrides if override.buffer_type == "CPU"]
    is_spilled = bool(on_host) or plan.params.n_gpu_layers < DENSE.n_layer + 1
    assert ("where the weights go" in [choice.subject for choice in plan.choices]) is is_spilled


def test_what_keeps_a_plan_from_its_bound() -> None:
    model = replace(DENSE, compute=300 * MIB)
    devices = limits(900, 500)
    plan = planned(priced(request(model, devices), model, CARD, SLOW_CARD), SyntheticLlama(model, devices))
    assert plan.bound is not None and plan.bound.is_far and plan.params.devices == ("CUDA0",)
    compute, whole = plan.bound.reasons
    assert (compute.kind, whole.kind) == ("compute", "whole")
    # 300 MiB, 4 for the context, 25 for the output, 40 for tensors of the host; the other one has no room
    first = (300 + 4 + 25 + 40) * MIB
    assert plan.devices[0].compute == first and compute.devices == ("CUDA1",) and compute.bytes > first + 500 * MIB
    assert plan.bound.seconds < compute.seconds < whole.seconds == plan.bound.reached


def test_without_sizes_a_plan_has_no_price() -> None:
    def refuse(params: Params) -> Layout:
        raise LlamaCppError("no such tensor")

    devices = limits(8000)
    asked = priced(request(DENSE, devices), DENSE, CARD)
    with_price, without = (planned(asked, SyntheticLlama(DENSE, devices), record) for record in (None, refuse))
    assert with_price.fits and with_price.estimate is not None
    assert without.fits and (without.estimate, without.bound) == (None, None)
    assert same(replace(with_price, estimate=None, bound=None), without)


def test_a_plan_says_what_each_place_has_and_takes() -> None:
    first, second = limits(900, 700, margin=13)
    devices = (replace(first, description="a card", total=1000 * MIB), replace(second, description="another card"))
    asked = request(DENSE, devices)
    asked = replace(asked, host=HostLimit(8000 * MIB, 7000 * MIB, 17 * MIB))
    plan = planned(asked, SyntheticLlama(DENSE, devices))
    measured = SyntheticLlama(DENSE, devices).measure(plan.params)
    assert plan.fits and plan.breakdown == measured
    rows = [next(row for row in measured.rows if row.device == device.name) for device in devices]
    assert plan.devices == tuple(
        DeviceUse(name, what, total * MIB, free * MIB, 13 * MIB, row.model, row.context, row.compute, 0)
        for (name, what, total, free), row in zip(
            [("CUDA0", "a card", 1000, 900), ("CUDA1", "another card", 700, 700)], rows, strict=True
        )
    )
    (on_host,) = (row for row in measured.rows if row.is_host)
    assert plan.host == HostUse(8000 * MIB, 7000 * MIB, 17 * MIB, on_host.model, on_host.context, on_host.compute, 0)
    assert all(min(row.model, row.context, row.compute) > 0 for row in rows)


@cases(True, False)
def test_a_plan_says_how_it_was_found(virtual: bool) -> None:
    devices = limits(900)
    llama = SyntheticLlama(DENSE, devices)
    calls = load_calls(llama, dummy_loads=lambda: len(llama.asked), shared_loads=lambda: 5)
    plan = fit(request(DENSE, devices), SUMMARY, calls, lambda progress: None, virtual)
    assert (plan.virtual, plan.n_layer, plan.model) == (virtual, 8, SUMMARY)
    found = plan.search
    assert (found.dummy_loads, found.shared_loads, found.is_cut_short) == (len(llama.asked), 5, False)
    assert 0 <= found.seconds < 600


@named_cases(
    ("two cards", (True, True), (), ("CUDA0", "CUDA1")),
    ("an integrated GPU beside a card", (True, False), (), ("CUDA0",)),
    ("the user names them", (True, True), ("devices",), ()),
)
def test_devices_of_llama_cpp_itself(
    is_default: tuple[bool, ...], fixed: tuple[str, ...], names: tuple[str, ...]
) -> None:
    devices = tuple(replace(each, is_default=is_it) for each, is_it in zip(limits(100, 3000), is_default, strict=True))
    plan = planned(priced(request(DENSE, devices, fixed=fixed), DENSE), SyntheticLlama(DENSE, devices))
    assert plan.fits and "CUDA1" in (plan.params.devices or ()) and plan.default_devices == names
