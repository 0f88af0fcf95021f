"""Levers: which changes they stand for, which of them stay, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fitter.errors import LlamaCppCrashError, UsageError
from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.placing.layer_sizes import HOST, Item
from fitter.planning.placing.placement import Placement
from fitter.planning.plan.plan import ModelSummary, Plan
from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.pricing import Price
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.constraints import levers
from fitter.planning.request.request import LEVERS, DeviceLimit, Request
from fitter.planning.search.best_plan import fit
from fitter.planning.search.levers import Candidate, apply, changes, concessions, expert_caches, improve
from fitter.planning.speed.cost import Estimate, Workload
from tests.support.cases import cases, named_cases
from tests.support.synthetic import CARD as SPEED
from tests.support.synthetic import DENSE, MIB, SyntheticLlama, SyntheticModel, limits, load_calls, priced, request
from tests.support.synthetic import MOE_AFTER_DENSE as MOE

ALL = frozenset(LEVERS)
CARD = limits(1000)


def asked(
    *allow: str,
    params: Params | None = None,
    fixed: tuple[str, ...] = (),
    devices: tuple[DeviceLimit, ...] = CARD,
    fit_ctx: int = 4096,
    **more: object,
) -> Request:
    made = request(DENSE, devices, params=params, fixed=fixed, fit_ctx=fit_ctx)
    return replace(made, allow=frozenset(allow), **more)  # type: ignore[arg-type]


Q8, Q4 = ({"type_k": name, "type_v": name} for name in ("q8_0", "q4_0"))
FIXED = Params(n_ctx=8192)


@named_cases(
    ("nothing allowed", asked(), []),
    ("paging changes no parameter", asked("paging"), []),
    ("q8_0", asked("kv-q8_0"), [Q8]),
    ("the better one first", asked("kv-q4_0", "kv-q8_0"), [Q8, Q4]),
    ("without flash attention", asked("kv-q8_0", params=Params(flash_attn="off")), []),
    ("with flash attention", asked("kv-q8_0", params=Params(flash_attn="on")), [Q8]),
    ("the user's types", asked("kv-q8_0", fixed=("type_k", "type_v")), []),
    ("not two types", asked("kv-q8_0", fixed=("type_v",)), []),
    ("the other one", asked("kv-q8_0", fixed=("type_v",), params=Params(type_v="q8_0")), [{"type_k": "q8_0"}]),
    ("no op_offload", asked("no-op-offload"), [{"op_offload": False}]),
    ("there is none", asked("no-op-offload", params=Params(op_offload=False)), []),
    ("the user's op_offload", asked("no-op-offload", fixed=("op_offload",)), []),
    ("op_offload without devices", asked("no-op-offload", devices=()), []),
    ("a context that is fitted anyway", asked("context"), []),
    ("the user's context", asked("context", params=FIXED, fixed=("n_ctx",)), [{}]),
    ("one token less", asked("context", params=FIXED, fixed=("n_ctx",), fit_ctx=8191), [{}]),
    ("as small as it may be", asked("context", params=FIXED, fixed=("n_ctx",), fit_ctx=8192), []),
    ("a long request", asked("context", params=FIXED, fixed=("n_ctx",), workload=Workload(8000, 192)), []),
    ("all", asked(*ALL, params=FIXED, fixed=("n_ctx",)), [{"op_offload": False}, Q8, Q4, {}]),
)
def test_what_a_lever_changes(request_: Request, expected: list[dict[str, object]]) -> None:
    found = changes(request_)
    assert [dict(change.params) for change in found] == expected
    for change, params in zip(found, expected, strict=True):
        changed = apply(request_, (change,))
        assert changed.params == replace(request_.params, **params)  # type: ignore[arg-type]
        assert ("n_ctx" in changed.fixed) is ("n_ctx" in request_.fixed and change.kind != "n_ctx")


@named_cases(
    ("one sequence", Params(n_ctx=20000), 4096, 4096, 20000),
    ("the workload is held", Params(n_ctx=20000), 1024, 2560, 20000),
    ("each sequence its own", Params(n_ctx=20480, n_seq_max=4), 3000, 12000, 20480),
    ("one cache for all", Params(n_ctx=20480, n_seq_max=4, kv_unified=True), 4096, 4096, 20480),
)
def test_a_context_shrinks_between_smallest_and_asked_for(params: Params, fit_ctx: int, low: int, high: int) -> None:
    before = asked("context", params=params, fixed=("n_ctx",), fit_ctx=fit_ctx)
    after = apply(before, changes(before))
    assert (after.n_ctx_min, after.n_ctx_max) == (low, high)


SPILLED = ((Item(0, "blk.0.ffn_up", ("weight",), MIB), HOST),)


def found(
    made: Request,
    seconds: float | None = 10.0,
    lacks: int = 0,
    n_ctx: int = 8192,
    flash_attn: bool = True,
    whole: bool = False,
) -> Candidate:
    placement = Placement(0, (9,), () if whole else SPILLED)
    params = replace(made.params, n_ctx=n_ctx, devices=("CUDA0",))
    breakdown = Breakdown((), ("CUDA0",), n_ctx, flash_attn)
    trial = Trial(placement, made.devices, params, breakdown, (("CUDA0", lacks),) if lacks else ())
    price = None
    if seconds is not None and not lacks:
        price = Price(Estimate(1.0, 1.0, seconds), made.workload, 0, (), breakdown)
    return Candidate(made, trial, price)


def pulled(
    made: Request, first: Candidate, answer: Callable[[Request], Candidate | None]
) -> tuple[Candidate, list[Request]]:
    """The best, and what was attempted for it."""
    attempts: list[Request] = []

    def attempt(changed: Request) -> Candidate | None:
        attempts.append(changed)
        return answer(changed)

    return improve(first, attempt), attempts


@cases((1 - GAIN - 1e-6, True), (1 - GAIN + 1e-6, False), (1.5, False))
def test_a_lever_is_used_where_it_gains_enough(share: float, is_kept: bool) -> None:
    made = asked("no-op-offload")
    first = found(made)
    best, attempts = pulled(made, first, lambda changed: found(changed, 10 * share))
    assert len(attempts) == 1 and (not best.trial.params.op_offload) is is_kept
    (choice,) = best.choices
    names = ("no op_offload", "nothing") if is_kept else ("nothing", "no op_offload")
    assert (choice.chosen, choice.runner_up) == names
    assert (choice.seconds, choice.runner_up_seconds) == (10 * share, 10.0)[:: 1 if is_kept else -1]


@cases("generation", "prompt", "request")
def test_time_is_that_of_the_objective(objective: str) -> None:
    made = asked("no-op-offload", objective=objective)
    slow, fast = found(made), found(apply(made, changes(made)))
    estimates = {"generation": Estimate(2.0, 0.5, 11), "prompt": Estimate(0.5, 2.0, 11), "request": Estimate(2, 2, 9)}
    assert slow.price and fast.price
    fast = replace(fast, price=replace(fast.price, estimate=estimates[objective]))
    assert pulled(made, slow, lambda changed: fast)[0].trial is fast.trial
    other = "prompt" if objective == "generation" else "generation"
    worse = replace(fast, price=replace(slow.price, estimate=estimates[other]))
    assert pulled(made, slow, lambda changed: worse)[0].trial is slow.trial


def test_without_a_lever_nothing_is_attempted() -> None:
    for made in (asked(), asked("paging")):
        first = found(made, lacks=MIB)
        assert pulled(made, first, lambda changed: pytest.fail("asked"))[0] is first


def test_each_lever_is_tried_on_top_of_what_won() -> None:
    made = asked("kv-q4_0", "kv-q8_0", "no-op-offload")
    times = {"f16": 10.0, "q8_0": 9.0, "q4_0": 9.5}

    def answer(changed: Request) -> Candidate:
        return found(changed, times[changed.params.type_k] - (not changed.params.op_offload))

    best, attempts = pulled(made, found(made), answer)
    assert (best.trial.params.op_offload, best.trial.params.type_k) == (False, "q8_0")
    said = [(a.params.op_offload, a.params.type_k) for a in attempts]
    assert said == [(False, "f16"), (False, "q8_0"), (False, "q4_0"), (True, "q8_0")]


def test_what_a_later_lever_makes_superfluous_is_not_given_up() -> None:
    made = asked("no-op-offload", "kv-q8_0")
    best, *_ = pulled(made, found(made), lambda c: found(c, 5.0 if c.params.type_k == "q8_0" else 9.0))
    assert (best.trial.params.op_offload, best.trial.params.type_k) == (True, "q8_0")


@named_cases(
    ("the first that fits", {"op_offload"}, (False, "f16")),
    ("a later one that fits alone", {"type_k"}, (True, "q8_0")),
    ("two together", {"both"}, (False, "q8_0")),
    ("what lacks the least", set(), (False, "q8_0")),
)
def test_where_nothing_fits(fitting: set[str], expected: tuple[bool, str]) -> None:
    made = asked("no-op-offload", "kv-q8_0")

    def answer(changed: Request) -> Candidate:
        small, quantized = not changed.params.op_offload, changed.params.type_k == "q8_0"
        there = {"op_offload": small, "type_k": quantized, "both": small and quantized}
        fits = any(is_there for name, is_there in there.items() if name in fitting)
        return found(changed, lacks=0 if fits else 100 - 30 * small - 50 * quantized)

    best, *_ = pulled(made, found(made, lacks=100), answer)
    assert (best.trial.params.op_offload, best.trial.params.type_k) == expected


@cases((True, True), (False, False), (None, False))
def test_a_quantized_cache_counts_with_flash_attention_alone(flash_attn: bool, is_kept: bool) -> None:
    made = asked("kv-q8_0")
    first = found(made, lacks=MIB)
    best, *_ = pulled(made, first, lambda changed: found(changed, flash_attn=flash_attn))
    assert (best.trial is not first.trial) is is_kept


@named_cases(
    ("more context, no faster", "kv-q8_0", "request", 16384, 10.0, False),
    ("more context, faster", "kv-q8_0", "request", 16384, 9.0, True),
    ("faster with less context", "kv-q8_0", "request", 8191, 9.0, False),
    ("faster with less context, as allowed", "context", "request", 8191, 9.0, True),
    ("most context: more of it", "kv-q8_0", "context", 8193, 20.0, True),
    ("most context: as much and faster", "kv-q8_0", "context", 8192, 9.0, True),
    ("most context: less of it", "kv-q8_0", "context", 8191, 9.0, False),
    ("most context: less is no gain", "context", "context", 8191, 9.0, False),
)
def test_context_and_time(allow: str, objective: str, n_ctx: int, seconds: float, is_kept: bool) -> None:
    made = asked(allow, objective=objective, params=FIXED, fixed=("n_ctx",) if allow == "context" else ())
    first = found(made)
    best, *_ = pulled(made, first, lambda changed: found(changed, seconds, n_ctx=n_ctx))
    assert (best.trial is not first.trial) is is_kept


def test_the_runner_up_is_the_fastest_of_the_others() -> None:
    made = asked("no-op-offload", "kv-q8_0", "kv-q4_0")
    times = {"f16": 11.0, "q8_0": 5.0, "q4_0": 9.9}
    best, *_ = pulled(made, found(made), lambda changed: found(changed, times[changed.params.type_k]))
    (choice,) = best.choices
    caches = (f"KV cache {name}/{name} instead of f16/f16" for name in ("q8_0", "q4_0"))
    assert (choice.chosen, choice.runner_up) == tuple(caches)
    made = asked("no-op-offload", "kv-q8_0")
    refused, *_ = pulled(made, found(made), lambda changed: None)
    assert refused.choices == ()
    lacking, *_ = pulled(made, found(made, lacks=MIB), lambda c: None if c.params.type_k == "f16" else found(c))
    (choice,) = lacking.choices
    assert (choice.runner_up, choice.runner_up_seconds) == ("nothing", None)


@named_cases(
    ("memory is of no use", asked(*ALL), ["q8_0", "q4_0"]),
    ("no weights on the host", asked("no-op-offload", devices=limits(8000, 8000)), []),
    ("the user's weights on the host", asked("no-op-offload", pinned={"a": HOST}), ["f16"]),
    ("nor is less context", asked("context", params=FIXED, fixed=("n_ctx",)), []),
    ("one device may do", asked("context", params=FIXED, fixed=("n_ctx",), devices=limits(8000, 8000)), ["f16"]),
)
def test_a_whole_model_on_a_device(made: Request, expected: Sequence[str]) -> None:
    _, attempts = pulled(made, found(made, whole=True), lambda changed: found(changed, whole=True))
    assert [attempt.params.type_k for attempt in attempts] == expected


@cases(
    ({}, ()),
    ({"n_ubatch": 128}, ()),
    ({"type_k": "q8_0", "type_v": "q8_0"}, ("KV cache q8_0/q8_0 instead of f16/f16",)),
    ({"op_offload": False}, ("no op_offload",)),
)
def test_what_is_said(params: dict[str, object], expected: tuple[str, ...]) -> None:
    made = asked()
    assert concessions(made, found(replace(made, params=replace(made.params, **params)))) == expected  # type: ignore[arg-type]


def test_a_smaller_context_is_said() -> None:
    fitted, fixed = asked(), asked(params=FIXED, fixed=("n_ctx",))
    assert concessions(fitted, found(fitted, n_ctx=4096)) == concessions(fixed, found(fixed)) == ()
    assert concessions(fixed, found(fixed, n_ctx=4096)) == ("context 4096 instead of 8192",)


def test_unknown_levers_suggest_the_nearest() -> None:
    assert levers(LEVERS) == ALL
    for wrong, says in (
        ("kv-q8", "did you mean kv-q8_0"),
        ("Paging", "did you mean paging"),
        ("Ubatch", "the levers are no-op-offload"),
        ("x", "the levers are no-op-offload"),
    ):
        with pytest.raises(UsageError, match=says):
            levers(["paging", wrong])


def test_a_former_lever_may_still_be_named() -> None:
    assert "ubatch" not in LEVERS
    assert levers(["ubatch"]) == frozenset()
    assert levers(["ubatch", "kv-q8_0"]) == {"kv-q8_0"}


def planned(llama: SyntheticLlama, made: Request, measure: Callable[[Params], Breakdown] | None = None) -> Plan:
    summary = ModelSummary("model.gguf", "model", "llama", 0)
    return fit(made, summary, load_calls(llama, measure), lambda progress: None, True)


def tight(*allow: str, n_ctx: int = 32768) -> tuple[SyntheticLlama, Request]:
    """A context that devices and host do not hold together, by some hundreds of MiB."""
    devices = limits(1750)
    params = Params(n_ctx=n_ctx)
    made = request(DENSE, devices, host_mib=300, params=params, fixed=("n_ctx",))
    return SyntheticLlama(DENSE, devices), replace(made, allow=frozenset(allow))


def test_a_plan_without_levers_has_none() -> None:
    plan = planned(*tight("paging"))
    assert not plan.fits and plan.levers == ()
    loose = planned(*tight(n_ctx=8192))
    assert loose.fits and loose.levers == ()


@cases(("kv-q8_0", "KV cache q8_0/q8_0 instead of f16/f16"), ("kv-q4_0", "KV cache q4_0"), ("context", "context "))
def test_a_lever_makes_it_fit(lever: str, said: str) -> None:
    llama, made = tight(lever)
    plan = planned(llama, made)
    assert plan.fits and plan.levers[0].startswith(said)
    assert plan.params in llama.asked


def test_paging_is_said_where_it_is_needed() -> None:
    devices = limits(2500)
    said = "2.5 GiB of weights on the host read from disk for every token that needs them"
    for host_mib, expected in ((500, (said,)), (9000, ())):
        plan = planned(SyntheticLlama(MOE, devices), request(MOE, devices, host_mib=host_mib, paging=True))
        assert plan.fits and plan.levers == expected


@named_cases(("dense", DENSE), ("mixture", MOE))
def test_no_plan_that_pages_is_faster_than_its_bound(model: SyntheticModel) -> None:
    """The bound has what no memory has room for read from the disk, as every plan does."""
    devices, bounds = limits(700), list[float]()
    for host_mib in (100_000, 900, 500, 300):
        made = priced(request(model, devices, host_mib, paging=True), model)
        plan = planned(SyntheticLlama(model, devices), made)
        assert plan.estimate is not None and plan.bound is not None
        assert plan.bound.seconds <= plan.estimate.seconds * 1.000001
        bounds.append(plan.bound.seconds)
    assert bounds == sorted(bounds) and bounds[0] < bounds[-1]


def test_what_llama_cpp_refuses_is_left_alone() -> None:
    llama, made = tight("kv-q8_0", "context")

    def refuse(params: Params) -> Breakdown:
        if params.type_k != "f16":
            raise LlamaCppCrashError("GGML_ASSERT", ())
        return llama.measure(params)

    made_alone = replace(made, allow=frozenset({"kv-q8_0"}))
    summary = ModelSummary("model.gguf", "model", "llama", 0)
    plan = fit(made_alone, summary, load_calls(llama, refuse), lambda progress: None, True)
    assert not plan.fits and plan.levers == ()
    llama.asked.clear()
    plan = fit(made, summary, load_calls(llama, refuse), lambda progress: None, True)
    assert plan.fits and plan.params.type_k == "f16" and plan.levers[0].startswith("context ")


# --- a cache of experts

EXPERTS = tuple(Item(layer, f"blk.{layer}.ffn_{kind}_exps", ("weight",), size * MIB)
                for layer in range(1, 8) for kind, size in (("gate", 200), ("up", 200), ("down", 250)))  # fmt: skip


def placed(on_host: int, first: int = 0, used: int = 2000) -> Trial:
    """A trial on a device of 3000 MiB, with the experts of so many layers on the host."""
    moved = tuple((item, HOST) for item in EXPERTS if item.layer <= on_host)
    breakdown = Breakdown((Row("CUDA0", "CUDA0", False, used * MIB, 0, 0),), ("CUDA0",), 4096)
    return Trial(Placement(first, (9 - first,), moved), limits(3000), Params(n_ctx=4096), breakdown, ())


@named_cases(
    # seven layers of 650 MiB, and 1000 MiB are left
    ("the room of experts, and what is left", 4, {}, [2950, 2212, 1475, 737, 368]),
    ("no more than all experts", 1, {}, [4550, 3412, 2275, 1137, 568]),
    ("what is left alone", 7, {}, [1000, 750, 500, 250, 125]),
    ("no experts on the host", 0, {}, []),
    ("not allowed", 4, {"allow": frozenset()}, []),
    ("the user's", 4, {"fixed": frozenset({"moe_cache_size"})}, []),
    ("tensors are split", 4, {"params": Params(split_mode="tensor")}, []),
    ("the user's tensor", 4, {"pinned": {"blk.5.ffn_up_exps.weight": HOST}}, [2750, 2062, 1375, 687, 343]),
)
def test_sizes_of_a_cache_of_experts(on_host: int, changed: dict[str, object], expected: list[int]) -> None:
    made = replace(request(MOE, limits(3000)), allow=frozenset({"moe-cache"}))
    found = expert_caches(replace(made, **changed), placed(on_host))  # type: ignore[arg-type]
    assert [dict(each.params) for each in found] == [{"moe_cache_size": size * MIB, "n_ctx": 4096} for size in expected]


@cases(("cuda", 5), ("rocm", 5), ("vulkan", 0), ("metal", 0), ("remote", 0))
def test_no_cache_of_experts_where_none_was_published_to_pay(kind: str, count: int) -> None:
    made = replace(request(MOE, limits(3000)), allow=frozenset({"moe-cache"}))
    speeds = {device.name: replace(SPEED, kind=kind) for device in made.devices}
    assert len(expert_caches(replace(made, speeds=speeds), placed(4))) == count


def test_without_layers_on_devices_nothing_is_cached() -> None:
    made = replace(request(MOE, limits(3000)), allow=frozenset({"moe-cache"}))
    assert expert_caches(made, placed(4, first=9)) == ()
    assert expert_caches(replace(made, facts=replace(made.facts, layers=())), placed(4)) == ()


def test_a_cache_of_experts_keeps_the_context_and_is_said() -> None:
    made = replace(request(MOE, limits(3000)), allow=frozenset({"moe-cache"}))
    change = expert_caches(made, placed(4))[0]
    after = apply(made, (change,))
    assert after.params.n_ctx == 4096 and "n_ctx" in after.fixed and after.params.moe_cache_size == 2950 * MIB
    assert concessions(made, Candidate(after, replace(placed(4), params=after.params))) == (
        "a cache of 2950 MiB for experts",
    )


def cached(made: Request, seconds: float | None, n_ctx: int = 4096) -> Candidate:
    """A plan with the cache that ``made`` has; it does not fit without ``seconds``."""
    trial = replace(placed(4), params=replace(made.params, n_ctx=n_ctx))
    if seconds is None:
        return Candidate(made, replace(trial, missing=(("CUDA0", MIB),)))
    return Candidate(made, trial, Price(Estimate(1.0, 1.0, seconds), made.workload, 0, (), trial.breakdown))


@named_cases(
    ("the largest", [8.0, 9.0], [2950, 2212], 2950),
    ("until one is slower", [8.0, 7.0, 6.0, 6.5], [2950, 2212, 1475, 737], 1475),
    ("the largest does not fit", [None, 7.0, 8.0], [2950, 2212, 1475], 2212),
    ("slower than none", [12.0, 13.0], [2950, 2212], 0),
    ("the smallest", [8.0, 7.0, 6.0, 5.0, 4.0], [2950, 2212, 1475, 737, 368], 368),
)
def test_smaller_caches_of_experts_are_tried_while_they_are_faster(
    seconds: list[float | None], attempted: list[int], best: int
) -> None:
    made = replace(request(MOE, limits(3000)), allow=frozenset({"moe-cache"}), fixed=frozenset({"n_ctx"}))
    times = iter(seconds)
    found_, attempts = pulled(made, cached(made, 10.0), lambda changed: cached(changed, next(times)))
    assert [each.params.moe_cache_size // MIB for each in attempts] == attempted
    assert found_.trial.params.moe_cache_size == best * MIB


def test_a_llama_cpp_without_a_cache_of_experts_is_asked_once() -> None:
    made = replace(request(MOE, limits(3000)), allow=frozenset({"moe-cache"}))
    first = cached(made, 10.0)
    best, attempts = pulled(made, first, lambda changed: None)
    assert best is first and len(attempts) == 1


@named_cases(
    ("longer and little slower", 16384, 8.7, 16384),
    ("longer and slower", 16384, 8.9, 4096),
    ("shorter", 2048, 7.0, 4096),
    ("hardly longer and slower", 4352, 8.7, 4096),
)
def test_an_open_context_is_planned_with_the_cache_of_experts(n_ctx: int, seconds: float, expected: int) -> None:
    made = replace(request(MOE, limits(3000)), allow=frozenset({"moe-cache"}), context_cost=0.1)

    def answer(changed: Request) -> Candidate:
        if "n_ctx" not in changed.fixed:
            return cached(changed, seconds, n_ctx)
        return cached(changed, 8.0 if changed.params.moe_cache_size == 2950 * MIB else 9.0)

    best, attempts = pulled(made, cached(made, 10.0), answer)
    assert [("n_ctx" in each.fixed, each.params.moe_cache_size // MIB) for each in attempts] == [
        (True, 2950),
        (True, 2212),
        (False, 2950),
    ]
    assert best.trial.params.n_ctx == expected
