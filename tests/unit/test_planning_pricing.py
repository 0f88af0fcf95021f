"""The price of given parameters: what it is of, where its speeds are from, and what a workload may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.errors import UsageError
from fitter.llama.types import LAYOUT_DEVICE, Breakdown, Layout, LayoutEntry, Params, SplitMode
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.parameters.values import check_timeout
from fitter.planning.placing.layer_sizes import HOST as ON_HOST
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.pricing import (
    MeasuredPlacement,
    Price,
    SpeedAt,
    Speeds,
    bound_of,
    price_params,
)
from fitter.planning.request.constraints import (
    check_choices,
    check_live_tokens,
    check_pins,
    check_split_mode,
    params_of,
    workload_of,
)
from fitter.planning.request.request import HostLimit, Request
from fitter.planning.speed.cost import Workload
from fitter.text import MIB
from tests.support.cases import cases, named_cases
from tests.support.placements import MODEL, PLACEMENTS, facts, said
from tests.support.synthetic import limits

N_CTX = 8192
CARD = DeviceSpeed(1e12, 1.6e14, 32e9, "cuda", "8.9", "catalogue: a card", True)
UNKNOWN = replace(CARD, source="default: as a card", known=False)
HOST = HostSpeed(60e9, "measured", 8)
WORKLOAD = Workload(2048, 512)
LAYOUT = Layout(
    (
        *(LayoutEntry(LAYOUT_DEVICE, name, "model", 128) for name in facts(MODEL).names),
        *(LayoutEntry(LAYOUT_DEVICE, f"cache_{kv}_l{i}", "context", 1024 * N_CTX) for i in range(48) for kv in "kv"),
    ),
    128,
    N_CTX,
)


def speeds(*devices: DeviceSpeed, host: HostSpeed = HOST) -> Speeds:
    return Speeds(tuple(f"CUDA{d}" for d in range(len(devices))), devices, (1,) * len(devices), host)


def priced(
    placement: Placement,
    on: Speeds,
    live_tokens: int | None = None,
    n_splits: tuple[int, int] | None = (2, 2),
    workload: Workload = WORKLOAD,
    depths: tuple[int, ...] = (),
) -> Price:
    params, targets = said(placement)
    breakdown = Breakdown((), on.names, N_CTX, True, n_splits)
    return price_params(facts(MODEL), LAYOUT, params, breakdown, on, targets, workload, live_tokens, depths)


def test_the_parts_add_up_and_have_the_devices_names() -> None:
    price = priced(PLACEMENTS["single tensors"], speeds(CARD, CARD))
    names = {part.name.partition(":")[0] for part in price.parts}
    assert {"CUDA0", "CUDA1", "host"} < names
    assert sum(part.prompt for part in price.parts) == pytest.approx(1 / price.prompt_tokens_per_second)
    assert sum(part.generation for part in price.parts) == pytest.approx(1 / price.generation_tokens_per_second)
    assert price.seconds == pytest.approx(
        2048 / price.prompt_tokens_per_second + 512 / price.generation_tokens_per_second
    )
    assert price.live_tokens == 2048 + 256


def test_more_in_the_cache_slows_generation_alone() -> None:
    at = {live: priced(PLACEMENTS["all on one"], speeds(CARD), live) for live in (0, 2304, 8192)}
    usual = priced(PLACEMENTS["all on one"], speeds(CARD))
    speed = {live: price.generation_tokens_per_second for live, price in at.items()}
    assert speed[0] > speed[2304] > speed[8192]
    assert speed[2304] == pytest.approx(usual.generation_tokens_per_second)
    assert {price.prompt_tokens_per_second for price in at.values()} == {usual.prompt_tokens_per_second}
    deep = at[8192]
    assert deep.seconds == pytest.approx(2048 / deep.prompt_tokens_per_second + 512 / deep.generation_tokens_per_second)
    assert sum(part.generation for part in deep.parts) == pytest.approx(1 / deep.generation_tokens_per_second)


def test_depths_are_priced_as_one_at_a_time() -> None:
    depths, on = (8192, 0, 2304), speeds(CARD)
    price = priced(PLACEMENTS["all on one"], on, depths=depths)
    alone = [priced(PLACEMENTS["all on one"], on, depth) for depth in depths]
    assert price.depths == tuple(
        SpeedAt(depth, each.estimate.generation_seconds) for depth, each in zip(depths, alone, strict=True)
    )
    assert [each.generation_tokens_per_second for each in price.depths] == [
        each.generation_tokens_per_second for each in alone
    ]
    assert replace(price, depths=()) == priced(PLACEMENTS["all on one"], on), "and the average stays"


@cases(
    (Params(n_ctx=N_CTX), 1, N_CTX),
    (Params(n_ctx=N_CTX, n_seq_max=4), 4, N_CTX // 4),
    (Params(n_ctx=N_CTX, n_seq_max=4, kv_unified=True), 1, N_CTX),
    (Params(n_ctx=N_CTX, n_seq_max=4, kv_unified=True), 2, N_CTX // 2),
)
def test_a_plan_has_the_speed_with_a_full_context(params: Params, users: int, expected: int) -> None:
    request = replace(asked(devices=limits(80000)), workload=Workload(512, 128, users=users), most_drafted=3)
    placed = Placement(0, (49,)), params, Breakdown((), ("CUDA0",), N_CTX, True, (1, 1)), LAYOUT
    price = MeasuredPlacement(request, request.devices, *placed).price()
    assert price and price.full_context
    assert [each.live_tokens for each in price.depths] == [price.full_context.live_tokens] == [expected]
    assert price.full_context.generation_seconds > price.estimate.generation_seconds
    reads = placed[0], replace(params, embeddings=True), *placed[2:]
    text = MeasuredPlacement(request, request.devices, *reads).price()
    assert text and text.depths == () and text.full_context is None, "a model that only reads generates nothing"


@pytest.mark.parametrize("n_splits", [(1, 2), (2, 1), (9, 9)], ids=str)
@pytest.mark.parametrize("live", [0, 100, 8192])
def test_parts_add_up_whatever_is_in_the_cache(live: int, n_splits: tuple[int, int]) -> None:
    price = priced(PLACEMENTS["two devices"], speeds(CARD, CARD), live, n_splits)
    usual = {part.name: part for part in priced(PLACEMENTS["two devices"], speeds(CARD, CARD), None, n_splits).parts}
    assert sum(part.prompt for part in price.parts) == pytest.approx(1 / price.prompt_tokens_per_second)
    assert sum(part.generation for part in price.parts) == pytest.approx(1 / price.generation_tokens_per_second)
    assert {part.name: part.prompt for part in price.parts} == {name: part.prompt for name, part in usual.items()}


def test_attention_is_priced_as_it_was_measured() -> None:
    params, targets = said(PLACEMENTS["all on the host"])
    on, deep = speeds(CARD), Workload(0, 512, 8000)
    with_it, without, unknown = (
        price_params(facts(MODEL), LAYOUT, params, Breakdown((), (), N_CTX, flash, (1, 1)), on, targets, deep)
        for flash in (True, False, None)
    )
    # a CPU attends faster without; what is not known is as the user asked for it
    assert without.seconds < with_it.seconds == unknown.seconds


def test_what_the_user_has_placed_is_priced_there() -> None:
    names = [f"blk.{i}.ffn_down_exps.weight" for i in range(48)]
    request = asked(devices=limits(80000))
    breakdown = Breakdown((), ("CUDA0",), N_CTX, True, (9, 9))
    found = {
        place: MeasuredPlacement(
            replace(request, pinned=dict.fromkeys(names, place)),
            *(request.devices, Placement(0, (49,)), Params(), breakdown, LAYOUT),
        ).price()
        for place in (0, ON_HOST)
    }
    targets = dict.fromkeys(names, ON_HOST)
    on = Speeds(("CUDA0",), (CARD,), (1,), HOST)
    expected = price_params(facts(MODEL), LAYOUT, Params(), breakdown, on, targets, WORKLOAD)
    there, away = found[0], found[ON_HOST]
    assert there and away and away.seconds == expected.seconds > there.seconds
    assert [source.device for source in away.sources] == ["CUDA0", "host"]


def test_graph_splits_count_as_measured() -> None:
    few = priced(PLACEMENTS["experts on the host"], speeds(CARD), n_splits=(2, 2))
    many = priced(PLACEMENTS["experts on the host"], speeds(CARD), n_splits=(2, 200))
    assert many.generation_tokens_per_second < few.generation_tokens_per_second
    assert many.prompt_tokens_per_second == few.prompt_tokens_per_second


@cases(
    ("all on one", ["CUDA0"]),
    ("all on the host", ["host"]),
    ("experts on the host", ["CUDA0", "host"]),
    ("one without a layer", ["CUDA0", "CUDA2"]),
)
def test_sources_are_those_of_what_is_used(placement: str, expected: list[str]) -> None:
    count = len(PLACEMENTS[placement].counts)
    price = priced(PLACEMENTS[placement], speeds(*[CARD] * count))
    assert [source.device for source in price.sources] == expected


def test_defaults_are_said_to_be() -> None:
    host = replace(HOST, source="default: two channels", known=False)
    price = priced(PLACEMENTS["experts on the host"], speeds(UNKNOWN, host=host))
    assert [(s.text, s.is_default) for s in price.sources] == [
        ("default: as a card", True),
        ("default: two channels", True),
    ]
    price = priced(PLACEMENTS["experts on the host"], speeds(CARD))
    assert [(s.text, s.is_default) for s in price.sources] == [("catalogue: a card", False), ("measured", False)]


def asked(**changed: object) -> Request:
    request = Request(
        params=Params(),
        fixed=frozenset(),
        devices=limits(8000, 9000),
        host=HostLimit(None, None, 0),
        n_layer=48,
        n_ctx_train=N_CTX,
        is_movable=lambda name: True,
        is_expert_model=True,
        facts=facts(MODEL),
        speeds={"CUDA0": CARD, "CUDA1": replace(CARD, bandwidth=2e12)},
        host_speed=HOST,
        workload=WORKLOAD,
    )
    return replace(request, **changed)  # type: ignore[arg-type]


def test_a_placement_is_priced_as_its_parameters_are() -> None:
    request, placement = asked(), PLACEMENTS["single tensors"]
    params, _ = said(placement)
    breakdown = Breakdown((), ("CUDA0", "CUDA1"), N_CTX, True, (9, 9))
    found = MeasuredPlacement(request, request.devices, placement, params, breakdown, LAYOUT).price()
    both = Speeds(("CUDA0", "CUDA1"), (CARD, replace(CARD, bandwidth=2e12)), (1, 1), HOST)
    assert found and found.depths == priced(placement, both, n_splits=(9, 9), depths=(N_CTX,)).depths
    assert replace(found, depths=()) == replace(priced(placement, both, n_splits=(9, 9)), breakdown=breakdown)


def test_a_device_that_is_left_out_is_not_taken_for_the_next() -> None:
    pinned = {f"blk.{i}.ffn_down_exps.weight": 1 for i in range(48)}
    request = asked(pinned=pinned)
    breakdown = Breakdown((), ("CUDA1",), N_CTX, True, (2, 2))
    price = MeasuredPlacement(request, request.devices[1:], Placement(0, (49,)), Params(), breakdown, LAYOUT).price()
    assert price is not None
    assert [source.device for source in price.sources] == ["CUDA1"]
    alone = price_params(
        facts(MODEL),
        LAYOUT,
        Params(),
        breakdown,
        Speeds(("CUDA1",), (request.speeds["CUDA1"],), (1,), HOST),
        {},
        WORKLOAD,
    )
    assert price.generation_tokens_per_second == alone.generation_tokens_per_second


def test_a_device_without_room_is_in_the_bound_where_the_user_has_put_something_there() -> None:
    pinned = {f"blk.{i}.ffn_down_exps.weight": 1 for i in range(48)}
    full = replace(asked().devices[1], margin=9000 * MIB)
    request = asked(pinned=pinned, devices=(asked().devices[0], full))
    on_host = bound_of(replace(request, pinned=dict.fromkeys(pinned, ON_HOST)), LAYOUT, 1.0)
    found = bound_of(request, LAYOUT, 1.0)
    assert found is not None and on_host is not None and found.seconds < on_host.seconds


def least(request: Request, compute: dict[str, int] | None = None) -> float | None:
    found = bound_of(request, LAYOUT, 1.0, compute)
    return found and found.seconds


def test_the_bound_is_of_the_objective() -> None:
    # all of it is best on the one device, so that the least of the whole is that of its parts
    kept = frozenset({"n_ubatch"})
    ample = asked(devices=limits(80000), workload=Workload(2048, 512, 300), fixed=kept)
    whole, prompt, generation = (
        least(replace(ample, objective=objective)) for objective in ("request", "prompt", "generation")
    )
    assert whole and prompt and generation and whole == pytest.approx(prompt + generation)
    usual = MeasuredPlacement(
        *(ample, ample.devices, Placement(0, (49,)), Params(), Breakdown((), ("CUDA0",), N_CTX, True, (2, 2)), LAYOUT)
    ).price()
    assert usual and prompt <= 2048 * usual.estimate.prompt_seconds <= prompt * 1.01
    assert generation <= 512 * usual.estimate.generation_seconds <= generation * 1.01
    assert least(replace(ample, objective="context")) == whole


def test_the_bound_is_of_the_largest_micro_batch() -> None:
    open_, kept = (least(asked(fixed=fixed)) for fixed in (frozenset(), frozenset({"n_ubatch"})))
    assert open_ and kept and open_ < kept


@pytest.mark.parametrize("taken", [{"CUDA0": 100}, {"CUDA1": 3000}, {"CUDA0": 700, "CUDA1": 50}], ids=str)
def test_compute_buffers_leave_less_room(taken: dict[str, int]) -> None:
    request = asked()
    less = tuple(replace(device, free=device.free - taken.get(device.name, 0) * MIB) for device in request.devices)
    found = least(request, {name: mib * MIB for name, mib in taken.items()})
    assert found == least(replace(request, devices=less)) != least(request)


@named_cases(
    ("no limit", HostLimit(None, None, 0), True),
    ("a large host", HostLimit(2**40, 2**40, 0), True),
    ("a small host", HostLimit(2**20, 2**20, 0), False),
    ("a host that is all margin", HostLimit(2**40, 2**40, 2**40), False),
)
def test_where_nothing_fits_there_is_no_bound(host: HostLimit, is_bounded: bool) -> None:
    small = asked(devices=limits(1000, 500))
    assert least(replace(small, host=host)) == (least(small) if is_bounded else None)


def test_the_bound_reads_from_the_disk_what_no_memory_has_room_for() -> None:
    """With a cache of experts none of them may be read."""
    small = asked(devices=limits(1000, 500))
    full = least(small)
    bounds = [least(replace(small, host=HostLimit(size, size, 0, paging=True))) for size in (2**40, 2**20, 0)]
    assert full is not None and bounds[0] == full
    assert bounds[1] is not None and bounds[2] is not None and full < bounds[1] < bounds[2]
    cached = replace(small, params=replace(small.params, moe_cache_size=MIB))
    assert least(replace(cached, host=HostLimit(0, 0, 0, paging=True))) == least(cached)


@cases("host_speed", "devices")
def test_without_prices_there_is_no_bound(lacking: str) -> None:
    changed: dict[str, object] = {lacking: () if lacking == "devices" else None}
    assert least(asked(**changed)) is None


def test_a_cache_of_experts_lowers_the_bound_where_experts_are_on_the_host() -> None:
    cached = Params(moe_cache_size=MIB)
    few, ample = asked(devices=limits(8000)), asked(devices=limits(80000))
    assert (least(replace(few, params=cached)) or 0.0) < 0.9 * (least(few) or 0.0)
    assert least(replace(ample, params=cached)) == least(ample)


@cases(
    (0, "two devices", []),
    (2048 * MIB, "two devices", ["the cache of experts is not made"]),
    (2048 * MIB, "experts on the host", ["estimated hit rate of the cache of experts"]),
)
def test_a_cache_of_experts_is_noted(size: int, name: str, notes: list[str]) -> None:
    request, placement = asked(params=Params(moe_cache_size=size)), PLACEMENTS[name]
    devices = request.devices[: len(placement.counts)]
    breakdown = Breakdown((), ("CUDA0", "CUDA1"), N_CTX)
    found = MeasuredPlacement(request, devices, placement, request.params, breakdown, LAYOUT).notes()
    assert [note.partition(":")[0] for note in found] == notes


def test_a_bound_knows_what_was_reached() -> None:
    found = bound_of(asked(), LAYOUT, 12.5)
    assert found is not None and found.reached == 12.5


def test_devices_of_other_machines_are_said_to_be() -> None:
    far = replace(CARD, kind="remote", round_trip=1e-4)
    price = priced(PLACEMENTS["two devices"], speeds(CARD, far))
    assert [(source.device, source.is_remote) for source in price.sources] == [("CUDA0", False), ("CUDA1", True)]
    (part,) = (part for part in price.parts if part.name == "CUDA1: network")
    assert part.generation > 1e-4


def test_where_a_cache_alone_is_on_the_host_so_is_a_source() -> None:
    params = Params(n_gpu_layers=99, offload_kqv=False)
    on = speeds(CARD)
    price = price_params(
        *(facts(MODEL), LAYOUT, params, Breakdown((), on.names, N_CTX, True, (2, 2)), on, {}, WORKLOAD)
    )
    assert [source.device for source in price.sources] == ["CUDA0", "host"]


def test_names_of_parts() -> None:
    twelve = tuple(f"GPU{d}" for d in range(12))
    on = Speeds(twelve, (CARD,) * 12, (1,) * 12, HOST)
    parts = priced(Placement(0, (*[0] * 11, 49)), on).parts
    assert [part.name for part in parts] == [*("GPU11: weights", "GPU11: layers", "GPU11: attention", "graph splits")]


def test_without_a_speed_of_the_host_there_is_no_estimate() -> None:
    request = asked(host_speed=None)
    breakdown = Breakdown((), ("CUDA0", "CUDA1"), N_CTX)
    assert (
        MeasuredPlacement(request, request.devices, Placement(0, (30, 19)), Params(), breakdown, LAYOUT).price() is None
    )


# --- what a user may ask for


@cases(
    (None, None, 4096, (2048, 512)),
    (None, None, 2560, (2048, 512)),
    (None, None, 2559, (2048, 511)),
    (None, None, 1000, (800, 200)),
    (None, None, 1, (0, 1)),
    (4000, None, 4096, (4000, 96)),
    (None, 4000, 4096, (96, 4000)),
    (None, 100, 4096, (2048, 100)),
    (4000, 96, 4096, (4000, 96)),
    (1, 1, 2, (1, 1)),
)
def test_workloads(prompt: int | None, generate: int | None, context: int, expected: tuple[int, int]) -> None:
    found = workload_of(prompt, generate, context, is_set=True)
    assert (found.prompt, found.generate) == expected


@cases(
    (4000, 97, True, "4000 tokens of prompt and 97 to generate are more than the context of 4096 tokens: ask for"),
    (4096, None, True, "4096 tokens of prompt are more than the context of 4096 tokens"),
    (None, 5000, True, "5000 to generate are more than the context of 4096 tokens: ask for fewer, or for a larger -c"),
    (4000, 97, False, "the model's own context of 4096 tokens: it has no larger one"),
    (0, None, True, "prompt is 0: it must be 1 or more"),
    (None, -1, True, "generate is -1: it must be 1 or more"),
)
def test_impossible_workloads(prompt: int | None, generate: int | None, is_set: bool, says: str) -> None:
    with pytest.raises(UsageError) as error:
        workload_of(prompt, generate, 4096, is_set=is_set)
    assert says in str(error.value)


@cases(-1, 4097)
def test_live_tokens_are_in_the_context(live_tokens: int) -> None:
    for possible in (None, 0, 4096):
        check_live_tokens(possible, 4096)
    with pytest.raises(UsageError, match=f"{live_tokens} live tokens do not fit in a context of 4096"):
        check_live_tokens(live_tokens, 4096)


def test_pins_that_contradict_one_another() -> None:
    with pytest.raises(UsageError, match="-ngl 0 keeps every layer on the host"):
        check_pins(0, (1.0, 1.0))
    for n_gpu_layers, split in ((0, None), (0, (0.0, 0.0)), (1, (1.0, 1.0)), (None, (1.0, 1.0)), (-1, (1.0,))):
        check_pins(n_gpu_layers, split)


@cases(
    ("request", "fastest", ""),
    ("context", "llama.cpp", ""),
    ("best", "fastest", "unknown objective 'best': choose from request, generation, prompt, context"),
    ("request", "upstream", "unknown strategy 'upstream': choose from fastest, llama.cpp"),
)
def test_objectives_and_strategies(objective: str, strategy: str, says: str) -> None:
    if not says:
        check_choices(objective, strategy)
        return
    with pytest.raises(UsageError, match=says):
        check_choices(objective, strategy)


@cases(("none", True), ("layer", True), ("row", False), ("tensor", True))
def test_split_modes(mode: SplitMode, is_planned: bool) -> None:
    assert params_of(None, split_mode=mode).split_mode == mode, "what is measured need not be planned"
    if is_planned:
        check_split_mode(mode)
    else:
        with pytest.raises(UsageError, match=f"split mode '{mode}' cannot be fitted"):
            check_split_mode(mode)


@cases(0, -1, float("nan"))
def test_a_timeout_is_a_time(timeout: float) -> None:
    with pytest.raises(UsageError, match="too short"):
        check_timeout(timeout)


def test_parameters() -> None:
    params = params_of(("CUDA0",), n_ubatch=4096, tensor_split=[3, 1], override_tensor=["a=CPU,b=CUDA0"])
    assert (params.n_batch, params.n_ubatch, params.tensor_split) == (4096, 4096, (3.0, 1.0))
    assert params.devices == ("CUDA0",)
    assert [o.buffer_type for o in params.tensor_buft_overrides] == ["CPU", "CUDA0"]
    assert params_of(None) == Params()


@cases(
    ({"n_ctx": -1}, "n_ctx .-c. is -1: give 0 to 2147483647"),
    ({"n_seq_max": 0}, "n_seq_max .-np. is 0: give 1 to 256"),
    ({"n_ubatch": 0}, "n_ubatch .-ub. is 0"),
    ({"n_batch": -5}, "n_batch .-b. is -5"),
    ({"tensor_split": [1, -1]}, "share below 0"),
    ({"tensor_split": [1, float("nan")]}, "share below 0"),
    ({"n_cpu_moe": -1}, "n_cpu_moe .-ncmoe. is -1: give 0 or more"),
    ({"override_tensor": ["exps"]}, "is not of the form"),
)
def test_parameters_that_make_no_sense(given: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        params_of(None, **given)  # type: ignore[arg-type]
