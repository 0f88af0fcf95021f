"""What layers weigh by a recorded layout, what each device has left, and what of a request is said to llama.cpp."""

from __future__ import annotations

from dataclasses import replace

from fitter.llama.types import (
    LAYOUT_DEVICE,
    MAX_USED_DEVICES,
    Breakdown,
    Layout,
    LayoutEntry,
    Params,
    Row,
    TensorBuftOverride,
)
from fitter.planning.placing.layer_sizes import HOST, Item, Unit, units_of
from fitter.planning.placing.placement import Placement, counts_for_split, pattern_for
from fitter.planning.pricing.objective import justifies_concession, lacks_less
from fitter.planning.pricing.trial import Trial
from fitter.planning.request import context_limit, given
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.search.compute_buffers import Buffers
from fitter.planning.search.room import Room, room_left_by
from tests.support.cases import cases, named_cases
from tests.support.synthetic import MIB, SyntheticModel, limits, priced, request

MODEL = SyntheticModel()
TWO = limits(3000, 1000)


def entry(name: str, size: int, kind: str = "model", where: str = LAYOUT_DEVICE) -> LayoutEntry:
    return LayoutEntry(where, name, kind, size)  # type: ignore[arg-type]


# --- layers


def test_units_of_a_layout() -> None:
    layout = Layout(
        (
            entry("token_embd.weight", 7, where="CPU"),
            entry("output.weight", 100),
            entry("rope_freqs.weight", 1),
            entry("blk.0.attn_q.weight", 10),
            entry("blk.0.attn_q.bias", 3),
            entry("blk.0.ffn_up.weight", 33),
            entry("blk.0.ffn_up.bias", 1),
            entry("blk.1.ffn_down.weight", 64),
            entry("blk.1.ssm_in.weight", 20),
            entry("cache_k_l0", 40, "context"),
            entry("cache_v_l0", 32, "context"),
            entry("cache_r_l1", 31, "context"),
            entry("cache_s_l1", 64, "context"),
            entry("cache_k_l1", 1, "context"),
            entry("cache_k_l0", 999, "context", "CPU"),
            entry("cache_idx", 5, "context"),
        ),
        32,
        512,
    )
    found = units_of(layout, 2, lambda name: "ffn_" in name, {"blk.1.ffn_down.weight": HOST})
    query = Item(0, "blk.0.attn_q", ("weight", "bias"), 64)
    up = Item(0, "blk.0.ffn_up", ("weight", "bias"), 96)
    assert found == (Unit(0, 64, 96, (up,), 0, (query,)), Unit(1, 32, 128, (), 96, ()), Unit(2, 160, 32))


@cases(
    (["blk.3.ffn_up"], "^blk.3.ffn_up.weight$"),
    (["blk.3.ffn_up", "blk.3.ffn_gate"], "^blk.3.ffn_(gate|up).weight$"),
    (["blk.3.indexer.attn_k"], "^blk.3.indexer.attn_k.weight$"),
)
def test_patterns_of_one_layer(stems: list[str], expected: str) -> None:
    assert pattern_for([Item(3, stem, ("weight",), 1) for stem in stems]) == expected


# --- what is left


UNITS = (Unit(0, 10 * MIB, 5 * MIB), Unit(1, 10 * MIB, 5 * MIB))


def measured(compute: int) -> Breakdown:
    rows = tuple(Row(f"CUDA{d}", f"CUDA{d}", False, 10 * MIB, 5 * MIB, compute * MIB) for d in (0, 1))
    return Breakdown(rows, ("CUDA0", "CUDA1"), 4096)


def test_what_a_device_was_off_by_is_taken_from_all_room() -> None:
    devices = limits(100, 80)
    buffers = Buffers()
    buffers.learn(measured(20), 4096, False, {"CUDA0": "attention", "CUDA1": "nothing"})
    room = buffers.room(devices, 4096, False, [3 * MIB, 4 * MIB])
    assert (room.with_caches, room.without) == ((77 * MIB, 56 * MIB), (77 * MIB, 56 * MIB))
    trial = Trial(Placement(0, (1, 1)), devices, Params(n_ctx=4096), measured(20), ())
    left = room_left_by(trial, UNITS, Room((0, 0), (0, 0), (0, 0)), [3 * MIB, 4 * MIB])
    assert left == Room(*[(77 * MIB, 56 * MIB)] * 3)


def lacking(*missing: int) -> Trial:
    names = tuple((f"CUDA{d}", size) for d, size in enumerate(missing))
    return Trial(Placement(0, (1,)), limits(100), Params(n_ctx=4096), Breakdown((), (), 4096), names)


def test_what_lacks_as_much_is_no_better() -> None:
    asked = request(MODEL, TWO)
    for one, other, is_less in ((99, 100, True), (100, 100, False), (101, 100, False)):
        assert justifies_concession(asked, lacking(one), lacking(other), gives_context=True) is is_less
        assert lacks_less(lacking(one * 1000), lacking(other * 1000)) is is_less


# --- what is said


def asked(*fixed: str, params: Params | None = None, devices: tuple[DeviceLimit, ...] = TWO) -> Request:
    return priced(request(MODEL, devices, params=params, fixed=fixed), MODEL)


def test_the_smallest_context_is_the_users() -> None:
    assert given.smallest_context(asked("n_ctx", params=Params(n_ctx=777))) == 777
    assert given.smallest_context(asked(params=Params(n_ctx=777))) == 4096


def test_a_split_that_is_not_the_users_is_none() -> None:
    params = Params(tensor_split=(1.0, 2.0))
    assert given.split_counts(asked("tensor_split", params=params), TWO, 9) == (3, 6)
    assert given.split_counts(asked(params=params), TWO, 9) == (7, 2)


def test_a_split_of_the_users_keeps_idle_devices() -> None:
    idle = Placement(0, (9, 0))
    assert given.devices_in_use(asked("tensor_split", params=Params(tensor_split=(1.0, 0.0))), TWO, idle) == [0, 1]
    assert given.devices_in_use(asked(), TWO, idle) == [0]


def test_the_users_overrides_come_first_and_ours_follow() -> None:
    mine = TensorBuftOverride("ffn_gate", "CPU")
    placement = Placement(0, (7, 2), ((Item(1, "blk.1.ffn_up", ("weight",), 1), HOST),))
    found = given.params_of(asked(params=Params(tensor_buft_overrides=(mine,))), TWO, placement, 4096)
    assert found.tensor_buft_overrides[0].pattern.startswith("ffn_gate")
    assert "blk.1.ffn_up" in found.tensor_buft_overrides[-1].pattern


def test_one_layer_on_two_devices_that_are_named_has_a_split() -> None:
    found = given.params_of(asked("devices"), TWO, Placement(8, (0, 1)), 4096)
    assert (found.n_gpu_layers, found.tensor_split) == (1, (0.0, 1.0))
    found = given.params_of(asked("devices"), TWO, Placement(9, (0, 0)), 4096)
    assert (found.n_gpu_layers, found.tensor_split) == (0, None)


def test_of_many_devices_the_largest_are_used() -> None:
    many = limits(*(range(100, 100 + MAX_USED_DEVICES + 2)))
    names = [device.name for device in given.usable_devices(asked(devices=many))]
    assert names == [device.name for device in many[2:]]
    pinned = replace(asked(devices=many), pinned={"blk.0.attn_q.weight": 0})
    assert [device.name for device in given.usable_devices(pinned)] == ["CUDA0", *(d.name for d in many[3:])]


@named_cases(
    ("one-takes-too-little", (), 4095, ["CUDA0"]),
    ("one-takes-the-smallest", (), 4096, ["CUDA0", "CUDA1"]),
    ("the-user-wants-it", ("devices",), 4095, []),
    ("the-users-split-has-it", ("tensor_split",), 4095, []),
    ("the-users-context", ("n_ctx",), 8191, ["CUDA0"]),
    ("the-users-context-is-taken", ("n_ctx",), 8192, ["CUDA0", "CUDA1"]),
)
def test_devices_that_take_the_context(fixed: tuple[str, ...], limit: int, names: list[str]) -> None:
    limited = replace(asked(*fixed, params=Params(n_ctx=8192)), context_limits={"CUDA1": limit})
    assert [device.name for device in context_limit.usable(limited, TWO)] == names


def test_a_split_of_nothing_is_all_on_the_first_device() -> None:
    assert (counts_for_split(5, (0.0, 0.0, 0.0)), counts_for_split(0, (0.0,)), counts_for_split(5, ())) == (
        (5, 0, 0),
        (0,),
        (),
    )
