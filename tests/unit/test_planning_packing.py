"""Packing, split points, and options and margins that decide it: the rules, one by one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo
from fitter.parameters.values import parse_overrides
from fitter.planning.placing.host_flags import host_overrides
from fitter.planning.placing.layer_sizes import HOST, Item, Unit
from fitter.planning.placing.packing import pack, pack_whole
from fitter.planning.placing.placement import Placement, counts_for_split, gaps_of
from fitter.planning.placing.spill import Ranges
from fitter.planning.request.constraints import device_limits
from tests.support.cases import cases, named_cases
from tests.support.units import is_within, layer, model

MIB = 1024 * 1024


@named_cases(
    ("just-fits", [4 * 85 + 15], (5,)),
    ("a-byte-short", [4 * 85 + 14], None),
    ("two-just-fit", [2 * 85, 2 * 85 + 15], (2, 3)),
    ("two-a-byte-short", [2 * 85 - 1, 2 * 85 + 15], None),
    ("what-is-left-is-even", [1000, 1000], (2, 3)),
    ("empty-first", [0, 4 * 85 + 15], (0, 5)),
    ("less-than-empty", [-1, 4 * 85 + 15], (0, 5)),
    ("no-device", [], None),
)
def test_whole_layers(budgets: list[int], counts: tuple[int, ...] | None) -> None:
    placement = pack_whole(model(4), budgets)
    assert (placement.counts if placement else None) == counts


def host_bytes(placement: Placement) -> int:
    """Bytes of items of devices' layers that are on the host."""
    return sum(item.bytes for item, target in placement.moved if target == HOST)


@named_cases(
    ("everything", 4 * 85 + 15, 0, {}),
    ("smallest-tensor-leaves", 4 * 85 + 14, 0, {0: 20}),
    ("two-tensors-leave", 3 * 85 + 15 + 15 + 29, 0, {0: 50}),
    ("one-layer's-leave", 3 * 85 + 15 + 15, 0, {0: 70}),
    ("and-one-of-the-next", 3 * 85 + 15 + 14, 0, {0: 70, 1: 20}),
    ("all-leave", 75, 0, dict.fromkeys(range(4), 70)),
    ("a-byte-less", 74, 0, None),
    ("from-the-second-layer-on", 80, 1, {1: 70, 2: 70, 3: 50}),
    ("output-alone", 15, 4, {}),
    ("nothing", 14, 4, None),
)
def test_the_first_layers_on_a_device_lose_their_items(budget: int, first: int, spilled: dict[int, int] | None) -> None:
    units = model(4)
    placement = pack(Ranges(units), [budget], first)
    assert (placement is None) is (spilled is None)
    if placement is not None and spilled is not None:
        assert (placement.first, placement.counts) == (first, (5 - first,)) and is_within(units, placement, [budget])
        assert {target for _, target in placement.moved} <= {HOST}
        lost = Counter[int]()
        for item, _ in placement.moved:
            lost[item.layer] += item.bytes
        assert lost == spilled


def test_layers_with_states_lose_the_last_ones() -> None:
    units = [replace(unit, state=unit.cache) for unit in model(4)]
    placement = pack(Ranges(units), [4 * 85 + 15 - 71], 0)
    assert placement is not None
    assert [(item.layer, item.bytes) for item, _ in placement.moved] == [(2, 20), (3, 30), (3, 20), (3, 20)]


def test_what_one_device_cannot_hold_goes_to_another_before_the_host() -> None:
    units = [layer(0), layer(1), Unit(2, 15, 0)]
    placement = pack(Ranges(units), [60, 15 + 85 + 40], 0, counts=(1, 2))
    assert placement is not None
    assert [(item.stem, target) for item, target in placement.moved] == [("blk.0.ffn_down", 1)]


def test_no_item_is_said_to_be_apart_on_its_own_device() -> None:
    """Layers of one item, of 5 and of 30 bytes, and room for 29 bytes: the smaller one can stay."""
    units = [layer(0, 0, 0, (5,)), layer(1, 0, 0, (30,))]
    for far in ((), (0,)):
        placement = pack(Ranges(units), [29], 0, far=far)
        assert placement is not None
        assert [(item.layer, target) for item, target in placement.moved] == [(1, HOST)]


@given(
    st.lists(st.integers(-5, 400), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(1, 60)), min_size=1, max_size=7),
    st.sets(st.integers(0, 3)),
    st.integers(0, 2),
    st.integers(0, 40),
)
def test_what_packing_promises(
    budgets: list[int], sizes: list[tuple[int, int, int]], far: set[int], first: int, more: int
) -> None:
    units = [layer(i, *size[:2], items=(size[2], size[2] // 2 + 1)) for i, size in enumerate(sizes)]
    units.append(Unit(len(units), 15, 0))
    ranges, first = Ranges(units), min(first, len(sizes))
    placement, apart = (pack(ranges, budgets, first, far=each) for each in (far, range(4)))
    larger = pack(ranges, [budget + more for budget in budgets], first, far=range(4))
    if placement is None or apart is None:
        assert placement is apart is None
        return
    assert (placement.first, placement.n_gpu_layers) == (first, len(units) - first)
    assert is_within(units, placement, budgets) and is_within(units, apart, budgets), "never more than a budget"
    assert {target for _, target in apart.moved} <= {HOST}
    assert larger is not None and host_bytes(larger) <= host_bytes(apart), "with more room never more on the host"
    open_to = [d for d, count in enumerate(placement.counts) if count and d not in far]
    gaps = gaps_of(units, budgets, placement)
    for item, target in placement.moved:
        assert target in (HOST, *open_to), "not on a device that is far, or has no layers"
        assert target != HOST or item.bytes > max([gaps[d] for d in open_to], default=0), "devices before the host"
    assert host_bytes(placement) <= host_bytes(apart)


@named_cases(
    ("halves", 33, (1.0, 1.0), (17, 16)),
    ("none-on-the-first", 5, (0.0, 1.0), (0, 5)),
    ("none-on-the-last", 5, (1.0, 0.0), (5, 0)),
    ("no-layers", 0, (1.0, 1.0), (0, 0)),
    ("a-split-of-nothing-is-all-on-the-first", 5, (0.0, 0.0, 0.0), (5, 0, 0)),
    ("no-layers-on-one", 0, (0.0,), (0,)),
    ("no-devices", 5, (), ()),
)
def test_split_points(n_gpu_layers: int, split: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert counts_for_split(n_gpu_layers, split) == counts


@given(st.lists(st.integers(0, 60), min_size=1, max_size=15).filter(any))
def test_counts_as_split_give_the_same_counts(counts: list[int]) -> None:
    assert counts_for_split(sum(counts), [float(count) for count in counts]) == tuple(counts)


@cases("", "a", "=CPU", "a=", "a=CPU,", ",a=CPU")
def test_overrides_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not of the form"):
        parse_overrides([text])


EXPERTS = {"blk.0.ffn_up_exps", "blk.12.ffn_gate_up_exps", "blk.2.ffn_down_chexps"}
DENSE = {"blk.0.ffn_up", "blk.0.ffn_gate", "blk.7.ffn_down"}


@named_cases(
    ("all-experts", True, None, None, EXPERTS),
    ("of-the-first-two-layers", False, 2, None, {"blk.0.ffn_up_exps"}),
    ("of-many-layers", False, 13, None, EXPERTS),
    ("of-none", False, 0, None, set()),
    ("no-feed-forward", False, None, 0, set()),
    ("feed-forward-of-the-first-layer", False, None, 1, {"blk.0.ffn_up", "blk.0.ffn_gate"}),
    ("of-99", False, None, 99, DENSE),
)
def test_options_for_the_host(cpu_moe: bool, n_cpu_moe: int | None, n_cpu_ffn: int | None, caught: set[str]) -> None:
    names = [*EXPERTS, *DENSE, "blk.1.ffn_up_shexp", "blk.0.ffn_norm"]
    patterns = [override.pattern for override in host_overrides(cpu_moe, n_cpu_moe, n_cpu_ffn, names)]
    assert {name for name in names if any(re.search(pattern, name + ".weight") for pattern in patterns)} == caught


@cases((-1, None, r"n_cpu_moe \(-ncmoe\)"), (None, -1, r"n_cpu_ffn \(-ncffn\)"))
def test_a_negative_number_of_layers(n_cpu_moe: int | None, n_cpu_ffn: int | None, called: str) -> None:
    with pytest.raises(UsageError, match=rf"^{called} is -1: give 0 or more$"):
        host_overrides(False, n_cpu_moe, n_cpu_ffn, [])


def test_experts_and_feed_forward_weights() -> None:
    names = ["blk.0.ffn_up", "blk.1.ffn_up_exps"]
    assert [each.pattern for each in host_overrides(True, None, 1, names)] == [
        ".ffn_(up|down|gate|gate_up)_(ch|)exps",
        "^blk.(0).ffn_(up|down|gate).(weight|bias|scale)$",
    ]


def device(name: str, total: int) -> DeviceInfo:
    return DeviceInfo(name, "", "gpu", "CUDA", total, total)


@named_cases(
    ("default", None, [1024, 1024]),
    ("one-for-all", 5 * MIB, [5, 5]),
    ("list-of-one", [7 * MIB], [7, 7]),
    ("one-each", [1 * MIB, 2 * MIB], [1, 2]),
    ("as-large-as-the-device", 2048 * MIB, [2048, 2048]),
    ("larger-than-the-device", 2049 * MIB, [2049, 2049]),
    ("negative", -1, "a margin of -1 MiB is negative: give 0 or more, which must stay free"),
    ("too-many", [1, 2, 3], "3 margins for 2 devices: give one for all, or one per device"),
    ("too-few", [], "0 margins for 2 devices: give one for all, or one per device"),
)
def test_margins(margin: int | list[int] | None, expected: list[int] | str) -> None:
    devices = [device("CUDA0", 2048 * MIB), device("CUDA1", 2048 * MIB)]
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=f"^{expected}$"):
            device_limits(devices, margin)
    else:
        assert [limit.margin // MIB for limit in device_limits(devices, margin)] == expected


def test_the_default_margin_may_be_larger_than_a_device() -> None:
    assert device_limits([device("CUDA0", 512 * MIB)], None)[0].target < 0


def test_nothing_is_moved_to_a_far_device() -> None:
    """The first device holds two layers but one tensor, for which only the second one has room."""
    budgets = [2 * 85 - 5, 2 * 85 + 15 + 40]
    near, far = (pack(Ranges(model(4)), budgets, 0, counts=(2, 3), far=far) for far in ((), (1,)))
    assert near is not None and far is not None
    assert [[target for _, target in each.moved] for each in (near, far)] == [[1], [HOST]]


def test_nothing_is_moved_to_a_device_without_layers() -> None:
    placement = pack(Ranges(model(4)), [4 * 85 + 15 - 5, 100], 0, counts=(5, 0))
    assert placement is not None and [target for _, target in placement.moved] == [HOST]


@named_cases(("room-for-one-without-items", [84, 500]), ("for-none", [29, 500]))
def test_counts_that_are_given_are_kept_or_refused(budgets: list[int]) -> None:
    placement = pack(Ranges(model(4)), budgets, 0, counts=(2, 3))
    assert (placement and placement.counts) == ((2, 3) if budgets[0] >= 30 else None)


@cases(0, 1, 2)
def test_a_device_without_room_changes_nothing(place: int) -> None:
    budgets = [85 * 2, 85 * 2]
    without = pack(Ranges(model(8)), budgets, 0)
    with_one = pack(Ranges(model(8)), [*budgets[:place], -1, *budgets[place:]], 0)
    assert without is not None and with_one is not None and sum(without.counts) > 0
    assert with_one.counts == (*without.counts[:place], 0, *without.counts[place:])
    assert with_one.first == without.first and len(with_one.moved) == len(without.moved)


def test_what_leaves_a_device_leaves_room_for_others_tensors() -> None:
    """The first device is 25 bytes short: the tensor of 30 leaves it, and one of the second takes its place."""
    units = [layer(0), layer(1, items=(5, 50)), Unit(2, 15, 0)]
    placement = pack(Ranges(units), [85 - 25, 70 + 15 - 5], 0, counts=(1, 2))
    assert placement is not None
    moved = [(item.stem, target) for item, target in placement.moved]
    assert moved == [("blk.0.ffn_down", HOST), ("blk.1.ffn_gate", 0)]


def test_a_tensor_goes_where_the_least_room_is_left() -> None:
    """A tensor of 20 leaves the first device; the others have room for 30 and for 22 bytes more."""
    units = [*map(layer, range(3)), Unit(3, 15, 0)]
    placement = pack(Ranges(units), [85 - 20, 85 + 30, 85 + 15 + 22], 0, counts=(1, 1, 2))
    assert placement is not None and [target for _, target in placement.moved] == [2]


def test_a_placement_on_some_of_its_devices() -> None:
    item = Item(1, "blk.1.ffn_up", ("weight",), 20)
    placement = Placement(1, (0, 3, 0, 1), ((item, 3), (Item(2, "blk.1.ffn_up", ("weight",), 20), HOST)))
    assert placement.on([1, 3]) == Placement(1, (3, 1), ((item, 1), (Item(2, "blk.1.ffn_up", ("weight",), 20), HOST)))
