"""What shares the memory: what llama-server makes of its parameters, and that a plan counts all of it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fitter.errors import LlamaCppError, UsageError
from fitter.llama.types import Breakdown, DeviceInfo, Lora, Params, Row, TensorBuftOverride
from fitter.machine.speed import DeviceSpeed
from fitter.planning.plan.plan import ModelSummary, Plan
from fitter.planning.pricing.trial import missing_of
from fitter.planning.request.request import DeviceLimit, HostLimit
from fitter.planning.request.shared import (
    Companions,
    Draft,
    Mtp,
    Projector,
    beyond,
    draft_seconds,
    lacking,
    lowered,
    parse_reserve,
    places,
    remembered,
    reservation,
)
from fitter.planning.request.summary import SharedUse
from fitter.planning.search.best_plan import fit
from tests.support.cases import cases, named_cases
from tests.support.plans import shared_use
from tests.support.synthetic import (
    CARD,
    DENSE,
    DESKTOP,
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
    "three small ones": limits(500, 300, 500),
}


@dataclass
class SyntheticDraft:
    """A draft model with weights and a cache, wherever it is told to be; it writes down what it was asked."""

    weights: int = 100 * MIB
    cache: int = 2048
    of_batch: int = 0
    asked: list[Params] = field(default_factory=list)

    def measure(self, params: Params) -> Breakdown:
        assert params not in self.asked, "the same parameters were measured twice"
        self.asked.append(params)
        names = params.devices or (None,)
        shares = params.tensor_split or (1.0,)
        rows = []
        for name, share in zip(names, shares, strict=True):
            part = share / sum(shares)
            weights, cache = int(part * self.weights), int(part * self.cache * params.n_ctx)
            compute = 5 * MIB + self.of_batch * params.n_ubatch
            rows.append(Row(name or "CPU", name, name is None, weights, cache, compute))
        return Breakdown(tuple(rows), params.devices or (), params.n_ctx)

    def shared(self, *devices: str, **more: Any) -> Companions:
        draft = Draft("draft.gguf", devices, -1, "f16", "f16", remembered(self.measure))
        return Companions(draft=draft, **more)


def plan_of(
    model: SyntheticModel,
    devices: tuple[DeviceLimit, ...],
    *shared: Companions,
    others: tuple[DeviceLimit, ...] = (),
    host_mib: int | None = None,
) -> Plan:
    own, copy = SyntheticLlama(model, devices), SyntheticLlama(model, devices)
    llama = load_calls(copy, confirm=own.measure)
    return fit(request(model, devices, host_mib), SUMMARY, llama, lambda step: None, True, shared, others)


def less(devices: tuple[DeviceLimit, ...], mib: int) -> tuple[DeviceLimit, ...]:
    """The first device has so much less free."""
    return (replace(devices[0], free=devices[0].free - mib * MIB), *devices[1:])


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("devices", MACHINES.values(), ids=MACHINES)
def test_what_is_known_before_is_memory_not_there(model: SyntheticModel, devices: tuple[DeviceLimit, ...]) -> None:
    plan, other = plan_of(model, devices, Companions((shared_use(CUDA0=120),))), plan_of(model, less(devices, 120))
    assert (plan.params, plan.breakdown) == (other.params, other.breakdown)
    assert [device.left for device in plan.devices] == [device.left for device in other.devices]
    assert [device.shared for device in plan.devices] == [120 * MIB, *[0] * (len(devices) - 1)]
    assert plan.devices[0].free == devices[0].free


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("devices", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("last", [False, True], ids=["on the first device", "on the last device"])
def test_what_grows_with_it_keeps_the_margin(
    model: SyntheticModel, devices: tuple[DeviceLimit, ...], last: bool
) -> None:
    draft = SyntheticDraft()
    name = devices[-1 if last else 0].name
    plan = plan_of(model, devices, draft.shared(name))
    (shared,) = plan.shared
    assert plan.fits and all(device.left >= 0 for device in plan.devices)
    assert shared.on(name) == draft.weights + draft.cache * plan.params.n_ctx + 5 * MIB
    own = plan_of(model, devices)
    assert plan.params.n_ctx <= own.params.n_ctx
    rows = plan.breakdown.rows
    assert sum(each.used for each in plan.devices) + plan.host.used == sum(row.used for row in rows) + shared.on(name)
    measured = SyntheticLlama(model, devices).measure(plan.params)
    assert plan.breakdown == measured, "the plan has the model's own rows"


def test_the_context_is_the_largest_that_leaves_the_draft_model_room() -> None:
    """Wider by one step, the model with all of its layers on the device and its draft model are too large together."""
    devices, draft = limits(1500), SyntheticDraft(cache=4096)
    plan = plan_of(DENSE, devices, draft.shared("CUDA0"))
    wider = replace(plan.params, n_ctx=plan.params.n_ctx + 256)
    used = SyntheticLlama(DENSE, devices).measure(wider).on("CUDA0").used
    assert used + draft.weights + draft.cache * wider.n_ctx + 5 * MIB > devices[0].free


def test_the_best_of_several_places_is_taken() -> None:
    """On the small device the draft model leaves the model a larger context; the host is only for a last resort."""
    devices = limits(1500, 400)
    draft = SyntheticDraft()
    choices = [draft.shared("CUDA0"), draft.shared("CUDA1"), draft.shared(rank=2)]
    alone = [plan_of(DENSE, devices, SyntheticDraft().shared(name)).params.n_ctx for name in ("CUDA0", "CUDA1")]
    plan = plan_of(DENSE, devices, *choices)
    assert plan.params.n_ctx == max(alone) and alone[0] != alone[1]
    assert {params.devices for params in draft.asked} == {("CUDA0",), ("CUDA1",)}, "the host was not asked about"


def spread(draft: SyntheticDraft) -> Companions:
    """As the main model."""
    return Companions(draft=Draft("draft.gguf", None, -1, "f16", "f16", remembered(draft.measure)), rank=1)


def test_a_draft_model_too_large_for_one_device_is_spread_as_the_model_is() -> None:
    """Its cache fills any one of the devices before the model has all of its context."""
    devices = limits(1000, 1000, 1000)
    draft = SyntheticDraft(cache=32 * 1024)
    alone = [plan_of(DENSE, devices, SyntheticDraft(cache=32 * 1024).shared(each.name)) for each in devices]
    plan = plan_of(DENSE, devices, draft.shared("CUDA0"), draft.shared("CUDA2"), spread(draft))
    assert plan.params.n_ctx > max(each.params.n_ctx for each in alone)
    assert all(device.shared and device.left >= 0 for device in plan.devices)
    (shared,) = plan.shared
    words = shared.arguments
    assert words[words.index("-devd") + 1] == ",".join(plan.params.devices or ())
    assert "-ts" not in words and plan.params.tensor_split, "it has the model's"


@named_cases(
    # MiB free, whether the whole model fits with all of its context
    ("a context that grows", 1500, False),
    ("layers on the host", 900, False),
    ("room for all", 8000, True),
)
def test_drafting_has_a_smaller_micro_batch_where_memory_is_short(free: int, has_room: bool) -> None:
    def planned(**more: Any) -> tuple[Plan, set[int]]:
        draft = SyntheticDraft(of_batch=256 * 1024)
        plan = plan_of(DENSE, limits(free), draft.shared("CUDA0", **more))
        return plan, {params.n_ubatch for params in draft.asked}

    (usual, before), (plan, asked) = planned(), planned(may_shrink=True)
    assert before == {512} and asked == ({512} if has_room else {512, 256})
    words = plan.shared[0].arguments
    if has_room:
        assert plan.params == usual.params and "--spec-draft-n-ubatch" not in words
        return
    assert words[words.index("--spec-draft-n-ubatch") + 1] == "256"
    assert plan.shared[0].on("CUDA0") < usual.shared[0].on("CUDA0")
    assert plan.params.n_ctx > usual.params.n_ctx or plan.params.n_gpu_layers > usual.params.n_gpu_layers
    assert plan.choices == usual.choices, "the place is the same"


def test_a_micro_batch_for_drafting_is_a_smaller_one() -> None:
    main = Params(n_batch=4096, n_ubatch=2048)
    draft = Draft("d.gguf", ("CUDA0",), -1, "f16", "f16", SyntheticDraft().measure, n_ubatch=64)
    mtp = Mtp("m.gguf", n_ubatch=64)
    assert [each.params(main).n_ubatch for each in (draft, mtp)] == [64, 64]
    assert [each.params(main).n_batch for each in (draft, mtp)] == [4096, 4096]
    assert draft.arguments(main)[-2:] == mtp.arguments()[-2:] == ("--spec-draft-n-ubatch", "64")
    assert [replace(each, n_ubatch=None).params(main).n_ubatch for each in (draft, mtp)] == [2048, 2048]


def test_a_later_resort_is_not_asked_about_where_it_is_not_needed() -> None:
    draft, devices = SyntheticDraft(), limits(4000, 4000)
    plan = plan_of(DENSE, devices, draft.shared("CUDA0"), draft.shared("CUDA1"), spread(draft), draft.shared(rank=2))
    assert plan.params.n_ctx == DENSE.n_ctx_train
    assert {params.devices for params in draft.asked} == {("CUDA0",), ("CUDA1",)}


@named_cases(("room on a device", 100, "CUDA0"), ("more than the device has", 2000, None))
def test_the_host_is_the_last_resort(weights: int, place: str | None) -> None:
    draft = SyntheticDraft(weights * MIB)
    devices = limits(1500)
    plan = plan_of(DENSE, devices, draft.shared("CUDA0"), draft.shared(rank=2))
    assert plan.fits and plan.shared[0].on(place) > 0
    assert [device.shared for device in plan.devices] == [plan.shared[0].on("CUDA0")]


def test_the_host_is_tried_where_the_model_leaves_no_device_room() -> None:
    """All layers are pinned to the device, and with the draft model there it is too small."""
    devices = limits(900)
    draft = SyntheticDraft(300 * MIB)
    own = SyntheticLlama(DENSE, devices)
    asked = request(DENSE, devices, params=Params(n_ctx=4096, n_gpu_layers=9), fixed=("n_ctx", "n_gpu_layers"))
    asked = replace(asked, is_movable=lambda name: False)
    room = own.measure(replace(asked.params, devices=("CUDA0",))).on("CUDA0").used
    devices = (replace(devices[0], free=room + 200 * MIB),)
    own = SyntheticLlama(DENSE, devices)
    shared = (draft.shared("CUDA0"), draft.shared(rank=2))
    llama = load_calls(own)
    plan = fit(replace(asked, devices=devices), SUMMARY, llama, lambda step: None, True, shared)
    assert plan.fits and plan.host.shared > 0 == plan.devices[0].shared


@pytest.mark.parametrize("mib", [(300, 700), (700, 300)], ids=str)
def test_a_draft_model_that_no_place_has_room_for(mib: tuple[int, ...]) -> None:
    draft, devices = SyntheticDraft(2000 * MIB), limits(*mib)
    plan = plan_of(DENSE, devices, *(draft.shared(device.name) for device in devices))
    # the larger one lacks less, and all of the model is on the host for it
    larger = devices[mib.index(700)].name
    lacks = 2000 * MIB + draft.cache * 4096 + 5 * MIB - 700 * MIB
    assert not plan.fits and plan.shared[0].on(larger) > 0
    assert [(problem.device, problem.missing) for problem in plan.problems] == [(larger, lacks)]


@named_cases(("open", (), True), ("the users context", ("n_ctx",), False))
def test_a_wider_context_is_only_tried_where_it_is_open(fixed: tuple[str, ...], is_asked: bool) -> None:
    devices = limits(1000, 1000, 1000)
    draft = SyntheticDraft(cache=32 * 1024)
    own = SyntheticLlama(DENSE, devices)
    calls = load_calls(own)
    asked = request(DENSE, devices, params=Params(n_ctx=8192), fixed=fixed)
    plan = fit(
        asked, SUMMARY, calls, lambda step: None, True, [draft.shared("CUDA0"), draft.shared("CUDA2"), spread(draft)]
    )
    assert plan.fits
    assert any(len(params.devices or ()) > 1 for params in draft.asked) is is_asked


def test_a_device_that_only_holds_the_draft_model_keeps_its_margin() -> None:
    devices, other = limits(1500), limits(0, 240, margin=100)[1]
    plan = plan_of(DENSE, devices, SyntheticDraft(cache=4096).shared("CUDA1"), others=(other,))
    assert plan.fits and [device.name for device in plan.devices] == ["CUDA0", "CUDA1"]
    used = plan.devices[1]
    assert used.used == used.shared and used.left >= used.margin
    free = plan_of(DENSE, devices).params.n_ctx
    assert plan.params.n_ctx < free, "the context is what the other device has room for"
    tight = plan_of(DENSE, devices, SyntheticDraft(150 * MIB).shared("CUDA1"), others=(other,))
    assert not tight.fits and [problem.device for problem in tight.problems] == ["CUDA1"]
    assert tight.problems[0].missing == tight.devices[1].margin - tight.devices[1].left


def test_reserved_memory_alone_needs_no_margin() -> None:
    """As on a device where another program has it: what is not used has nothing to keep."""
    devices = limits(1500, 100, margin=50)
    reserved = reservation(parse_reserve({"CUDA1": 90 * MIB}), infos(devices), None)
    plan = plan_of(DENSE, devices, Companions(reserved))
    assert plan.fits and plan.devices[1].used == 90 * MIB


@cases((440, True), (100, False))
def test_shared_memory_on_the_host_is_the_hosts(free: int, fits: bool) -> None:
    plan = plan_of(DENSE, limits(8000), Companions((shared_use(host=300),)), host_mib=free)
    assert plan.fits is fits and plan.host.shared == 300 * MIB
    if not fits:
        assert [problem.device for problem in plan.problems] == ["host"]
        assert "300 MiB of them beside the model" in plan.problems[0].message


# --- what llama-server makes of it

MAIN = Params(
    n_ctx=8192,
    n_gpu_layers=33,
    tensor_split=(3.0, 1.0),
    n_batch=1024,
    n_ubatch=256,
    n_seq_max=4,
    kv_unified=True,
    type_k="q8_0",
    type_v="q8_0",
    flash_attn="on",
    op_offload=False,
    devices=("CUDA0", "CUDA1"),
)


def draft(*devices: str, n_gpu_layers: int = -1, type_k: str = "f16") -> Draft:
    return Draft("d.gguf", devices, n_gpu_layers, type_k, "f16", SyntheticDraft().measure)


def test_a_draft_models_parameters_are_the_models_but_for_its_own() -> None:
    found = draft("CUDA1", n_gpu_layers=3, type_k="q4_0").params(MAIN)
    assert found == replace(
        MAIN, n_gpu_layers=3, tensor_split=None, type_k="q4_0", type_v="f16", devices=("CUDA1",), n_outputs_max=4
    )


def test_what_is_the_main_models_alone_is_not_the_draft_models() -> None:
    override = TensorBuftOverride("ffn_up", "CPU")
    own = {"tensor_buft_overrides": (override,), "embeddings": True, "load_mtp": True, "n_rs_seq": 2}
    main = replace(MAIN, **own, lora=(Lora("a.gguf"),))  # type: ignore[arg-type]
    assert draft("CUDA1").params(main) == draft("CUDA1").params(MAIN)


@cases((-1, "all"), (0, "0"), (1, "1"), (20, "20"))
def test_the_layers_of_a_draft_model(n_gpu_layers: int, said: str) -> None:
    words = draft("CUDA1", n_gpu_layers=n_gpu_layers).arguments(MAIN)
    assert words[words.index("-ngld") + 1] == said


@named_cases(
    ("a-fitted-context-begins-small", (), (), 20000, 4096),
    ("the-users", ("n_ctx",), (), 20000, 20000),
    ("the-users-that-may-shrink", ("n_ctx",), ("context",), 20000, 4096),
    ("the-users-that-is-small", ("n_ctx",), ("context",), 2000, 2000),
)
def test_the_context_at_which_a_draft_model_is_known(
    fixed: tuple[str, ...], allow: tuple[str, ...], n_ctx: int, expected: int
) -> None:
    measured = SyntheticDraft()
    asked = request(DENSE, limits(1500), params=Params(n_ctx=n_ctx), fixed=fixed)
    (found,) = measured.shared("CUDA0").known(replace(asked, allow=frozenset(allow)))
    assert [params.n_ctx for params in measured.asked] == [expected]
    assert (found.kind, found.name) == ("draft", "draft.gguf")
    assert found.on("CUDA0") == measured.weights + measured.cache * expected + 5 * MIB


def test_what_has_one_place_is_known_before() -> None:
    projector = Projector("p.gguf", "CUDA0", (), lambda device: [Row("CUDA0", "CUDA0", False, 7, 0, 2)])
    reserved = replace(shared_use(host=3), kind="reserve")
    asked = request(DENSE, limits(1500))
    found = Companions((reserved,), projector=projector, draft=spread(SyntheticDraft()).draft).known(asked)
    assert [(u.kind, u.on("CUDA0"), u.on(None)) for u in found] == [("reserve", 0, 3 * MIB), ("projector", 9, 0)]


@named_cases(
    # of a device with 100 MiB and a margin of 10, what is taken, and what is left with which margin
    ("nothing", 0, 100, 10),
    ("a part", 30, 70, 10),
    ("a part of the margin", 95, 5, 10),
    ("all", 100, 0, 10),
    ("more than all", 120, 0, 30),
)
def test_what_is_left_for_the_model(size: int, free: int, margin: int) -> None:
    devices = limits(100, 100, 100, margin=10)
    asked = request(DENSE, devices[:2], host_mib=500)
    asked = replace(asked, host=HostLimit(900 * MIB, 500 * MIB, 20 * MIB, paging=True))
    use = shared_use(CUDA1=size, CUDA2=size, host=60) if size else shared_use(host=60)
    found = lowered(asked, [use], devices[2:])
    assert found.devices[0] == devices[0]
    assert (found.devices[1].free, found.devices[1].margin) == (free * MIB, margin * MIB)
    assert found.devices[1].target == (90 - size) * MIB
    # what is on a device answers for its margin, whatever the model has there
    assert [(device.name, device.target) for device in found.beside] == [
        (name, (90 - size) * MIB) for name in ("CUDA1", "CUDA2") if size
    ]
    assert found.host == HostLimit(900 * MIB, 440 * MIB, 20 * MIB, paging=True)
    assert lowered(replace(asked, host=HostLimit(None, None, 0)), [use], ()).host == HostLimit(None, None, 0)


@cases(
    (("CUDA1",), MAIN, None, ()),
    ((), MAIN, None, ()),
    (("CUDA1", "CUDA0"), MAIN, (3.0, 1.0), ()),
    (("CUDA1", "CUDA0"), replace(MAIN, tensor_split=None), (1.0, 1.0), ("-ts", "1,1")),
    (("CUDA1", "CUDA0"), replace(MAIN, devices=("CUDA0",)), (1.0, 1.0), ("-ts", "1,1")),
)
def test_the_split_of_a_draft_model_is_what_the_arguments_say(
    devices: tuple[str, ...], main: Params, split: tuple[float, ...] | None, words: tuple[str, ...]
) -> None:
    found = draft(*devices)
    assert found.params(main).tensor_split == split
    told = ("-md", "d.gguf", "-devd", ",".join(devices) or "none", "-ngld", "all", "--spec-type", "draft-simple")
    assert found.arguments(main) == (*told, *words)


@cases(
    (MAIN, ("CUDA0", "CUDA1"), (3.0, 1.0), ()),
    (replace(MAIN, tensor_split=None), ("CUDA0", "CUDA1"), (1.0, 1.0), ("-ts", "1,1")),
    (replace(MAIN, devices=("CUDA1",)), ("CUDA1",), None, ()),
    (replace(MAIN, devices=()), (), None, ()),
)
def test_a_draft_model_on_the_models_devices(
    main: Params, devices: tuple[str, ...], split: tuple[float, ...] | None, words: tuple[str, ...]
) -> None:
    found = Draft("d.gguf", None, -1, "f16", "f16", SyntheticDraft().measure)
    assert (found.params(main).devices, found.params(main).tensor_split) == (devices, split)
    told = ("-devd", ",".join(devices) or "none", "-ngld", "all", "--spec-type", "draft-simple", *words)
    assert found.arguments(main)[2:] == told
    assert not found.is_in_one_place


def test_a_split_that_leaves_a_draft_models_devices_out() -> None:
    main = replace(MAIN, tensor_split=(0.0, 0.0, 1.0), devices=("CUDA0", "CUDA1", "CUDA2"))
    with pytest.raises(UsageError, match="choose one device with -devd"):
        draft("CUDA0", "CUDA1").params(main)
    assert draft("CUDA0").params(main).devices == ("CUDA0",)


@cases(("none", False), ("none", True), ("layer", False))
def test_the_split_mode_of_a_draft_model(split_mode: Any, alone: bool) -> None:
    found = draft(*("CUDA0", "CUDA1")[: 1 if alone else 2]).params(replace(MAIN, split_mode=split_mode, main_gpu=1))
    assert (found.split_mode, found.main_gpu) == (("layer", 0) if alone else (split_mode, 1))


def test_the_context_of_prediction_layers() -> None:
    main = replace(MAIN, load_mtp=True, n_rs_seq=3)
    found = Mtp("m.gguf", "q4_0").params(main)
    assert found == replace(main, ctx_type="mtp", n_rs_seq=0, n_outputs_max=4, type_k="q4_0", type_v="f16")


# --- places


def card(index: int, kind: str = "Card", gib: int = 8) -> DeviceLimit:
    return DeviceLimit(f"CUDA{index}", kind, gib * 1024 * MIB, gib * 1024 * MIB, 0, f"CUDA{index}")


@cases(
    ([], 4, []),
    ([card(0)], 4, [0]),
    ([card(0), card(1, "Fast")], 4, [1, 0]),
    ([card(0), card(1), card(2), card(3)], 4, [0, 3]),
    ([card(0), card(1, "Fast"), card(2), card(3, "Fast")], 4, [1, 3, 0, 2]),
    ([card(0), card(1, "Fast"), card(2), card(3, "Fast")], 2, [1, 3]),
    ([card(0), card(1, gib=12), card(2)], 4, [0, 2, 1]),
)
def test_places_are_the_first_and_last_of_each_kind(cards: list[DeviceLimit], n_max: int, expected: list[int]) -> None:
    speeds = {each.name: speed(900e9 if each.description == "Fast" else 300e9) for each in cards}
    assert list(places(cards, speeds, n_max)) == [f"CUDA{i}" for i in expected]


def speed(bandwidth: float) -> DeviceSpeed:
    return DeviceSpeed(bandwidth, 1e13, 1e10, "cuda", "8.9", "a test", True)


# --- reservations


def infos(devices: tuple[DeviceLimit, ...]) -> list[DeviceInfo]:
    return [DeviceInfo(d.name, d.description, "gpu", "CUDA", d.total, d.free) for d in devices]


@cases(
    ((), {}),
    ("CUDA0=2GiB", {"CUDA0": 2048 * MIB}),
    (["CUDA0=1GiB", "host=3MiB", "CUDA0=1MiB"], {"CUDA0": 1025 * MIB, "host": 3 * MIB}),
    ({"CUDA0": 7, "host": "1KiB"}, {"CUDA0": 7, "host": 1024}),
    (["RPC0[127.0.0.1:50052]=1B"], {"RPC0[127.0.0.1:50052]": 1}),
)
def test_reservations(given: Any, expected: dict[str, int]) -> None:
    assert parse_reserve(given) == expected


@cases(
    (lambda: parse_reserve(["CUDA0"]), "is not a reservation"),
    (lambda: parse_reserve(["CUDA0="]), "is not a reservation"),
    (lambda: parse_reserve({"CUDA0": -1}), "is -1 bytes"),
    (lambda: parse_reserve({"CUDA0": "2"}), "has no unit"),
    (lambda: reservation({"CUDA1": 1}, infos(limits(8)), None), "there are: CUDA0, host"),
    (
        lambda: reservation({"CUDA0": 8 * MIB + 1}, infos(limits(8)), None),
        "9 MiB is more than its total memory of 8 MiB",
    ),
    (lambda: reservation({"host": 8}, infos(limits(8)), 7), "--reserve host"),
)
def test_reservations_that_make_no_sense(check: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check()


# --- counting


def test_beyond_what_was_known() -> None:
    known, found = shared_use(CUDA0=10, host=5), shared_use(CUDA0=12, CUDA1=3, host=5)
    assert [(row.device, row.is_host, row.used) for row in beyond([known], [found])] == [
        ("CUDA0", False, 2 * MIB),
        ("CUDA1", False, 3 * MIB),
    ]
    assert [row.used for row in beyond([found], [known])] == [-2 * MIB, -3 * MIB]
    assert beyond([known], [known]) == ()


def test_what_lacks_by_itself() -> None:
    devices = limits(10, 10)
    host = request(DENSE, devices, host_mib=4).host
    assert lacking([shared_use(CUDA0=10, host=4)], devices, host) == 0
    assert lacking([shared_use(CUDA0=11, CUDA1=9, host=6)], devices, host) == 3 * MIB
    assert lacking([replace(shared_use(CUDA0=11), kind="reserve")], devices, host) == 0


@named_cases(
    # of 1000 bytes a second on CUDA0, 100 on CUDA1 and 10 on the host, for three tokens
    ("on a device", {"CUDA0": 500}, 3 * 0.5),
    ("on the slower one", {"CUDA1": 500}, 3 * 5.0),
    ("on the host", {None: 500}, 3 * 50.0),
    ("on both devices", {"CUDA0": 500, "CUDA1": 100}, 3 * 1.5),
    ("on one of no known speed", {"CUDA2": 500}, 0.0),
)
def test_drafting_reads_the_weights_for_each_token(weights: dict[str | None, int], seconds: float) -> None:
    speeds = {name: replace(CARD, bandwidth=bandwidth) for name, bandwidth in (("CUDA0", 1000.0), ("CUDA1", 100.0))}
    rows = tuple(Row(name or "CPU", name, name is None, size, 77, 99) for name, size in weights.items())
    draft = SharedUse("draft", "draft.gguf", rows)
    beside = [replace(draft, kind="lora"), replace(draft, kind="mtp"), shared_use(CUDA0=5)]
    host = replace(DESKTOP, bandwidth=10.0)
    assert draft_seconds([*beside, draft], speeds, host, 3) == pytest.approx(seconds)
    assert draft_seconds([draft], {}, None, 3) == 0


@cases(False, True)
def test_a_draft_model_is_where_it_drafts_faster(is_slow_first: bool) -> None:
    devices, draft = limits(4000, 4000), SyntheticDraft()
    names = [device.name for device in devices]
    asked = priced(request(DENSE, devices), DENSE, *(SLOW_CARD, CARD)[:: 1 if is_slow_first else -1])
    own = SyntheticLlama(DENSE, devices)
    calls = load_calls(own)
    plan = fit(asked, SUMMARY, calls, lambda step: None, True, [draft.shared(name) for name in names])
    fast, slow = names[:: -1 if is_slow_first else 1]
    assert plan.shared[0].on(fast) > 0 and plan.params.devices == (fast,)
    choice = plan.choices[-1]
    assert (choice.subject, choice.chosen, choice.runner_up) == ("where the draft model is", fast, slow)
    # 100 MiB at 1000 instead of 200 GB/s, for 512 tokens
    assert choice.runner_up_seconds is not None
    assert choice.runner_up_seconds - choice.seconds == pytest.approx(512 * 100 * MIB * (1 / 200e9 - 1 / 1000e9))


def test_a_device_beside_answers_for_its_margin_whatever_is_on_it() -> None:
    devices = limits(10, 10)
    low = replace(devices[1], margin=11 * MIB)
    asked = request(DENSE, devices[:1])
    empty = Breakdown((), ("CUDA0",), 4096)
    assert missing_of(asked, empty, devices[:1]) == ()
    assert missing_of(replace(asked, beside=(low,)), empty, devices[:1]) == (("CUDA1", MIB),)
    assert missing_of(replace(asked, beside=(low,)), empty, (devices[0], low)) == (("CUDA1", MIB),)


def test_a_place_that_llama_cpp_refuses_is_left_out() -> None:
    draft, devices = SyntheticDraft(), limits(1500, 400)

    def measure(params: Params) -> Breakdown:
        if params.devices == ("CUDA0",):
            raise LlamaCppError("no room for a tensor")
        return draft.measure(params)

    def shared(*names: str) -> Companions:
        return Companions(draft=Draft("d.gguf", names, -1, "f16", "f16", remembered(measure)), rank=0 if names else 2)

    plan = plan_of(DENSE, devices, shared("CUDA0"), shared("CUDA1"), shared())
    assert plan.fits and plan.shared[0].on("CUDA1") > 0
    assert plan_of(DENSE, devices[:1], shared("CUDA0"), shared()).shared[0].on(None) > 0
    with pytest.raises(LlamaCppError, match="no room for a tensor"):
        plan_of(DENSE, devices[:1], shared("CUDA0"))
