"""Packing, patterns and split points: the rules, one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.errors import UsageError
from fitter.llama.types import LAYOUT_DEVICE, DeviceInfo, Layout, LayoutEntry
from fitter.parameters.values import parse_overrides
from fitter.planning.placing.host_flags import host_overrides
from fitter.planning.placing.layer_sizes import HOST, Item, Unit, units_of
from fitter.planning.placing.packing import bring_back, bring_first, pack, pack_fastest, pack_whole
from fitter.planning.placing.placement import (
    Placement,
    caches_on,
    counts_for_split,
    overrides_of,
    pattern_for,
    weights_on,
)
from fitter.planning.request.constraints import device_limits
from fitter.planning.search.compute_buffers import LearnedCompute

MIB = 1024 * 1024


def layer(index: int, fixed: int = 10, cache: int = 5, items: tuple[int, ...] = (20, 20, 30)) -> Unit:
    names = ("gate", "up", "down")
    return Unit(
        index,
        fixed,
        cache,
        tuple(Item(index, f"blk.{index}.ffn_{n}", ("weight",), size) for n, size in zip(names, items, strict=False)),
    )


def model(n_layer: int, output: int = 15) -> list[Unit]:
    """Layers of 80 bytes of weights and 5 of cache, and an output."""
    return [*map(layer, range(n_layer)), Unit(n_layer, output, 0)]


@pytest.mark.parametrize(
    ("budgets", "counts"),
    [
        pytest.param([4 * 85 + 15], (5,), id="just-fits"),
        pytest.param([4 * 85 + 14], None, id="a-byte-short"),
        pytest.param([2 * 85, 2 * 85 + 15], (2, 3), id="two-just-fit"),
        pytest.param([2 * 85 - 1, 2 * 85 + 15], None, id="two-a-byte-short"),
        pytest.param([1000, 1000], (2, 3), id="what-is-left-is-even"),
        pytest.param([0, 4 * 85 + 15], (0, 5), id="empty-first"),
        pytest.param([-1, 4 * 85 + 15], (0, 5), id="less-than-empty"),
        pytest.param([], None, id="no-device"),
    ],
)
def test_whole_layers(budgets: list[int], counts: tuple[int, ...] | None) -> None:
    placement = pack_whole(model(4), budgets)
    assert (placement.counts if placement else None) == counts


@pytest.mark.parametrize(
    ("budget", "n_gpu_layers", "on_device"),
    [
        pytest.param(85 * 4 + 15, 5, 335, id="everything"),
        pytest.param(85 * 4 + 14, 5, 315, id="one-tensor-leaves"),
        pytest.param(85 * 3 + 15 + 35, 5, 335 - 50, id="two-tensors-leave"),
        pytest.param(85 * 3 + 15 + 34, 5, 335 - 70, id="two-do-not-do"),
        pytest.param(85 * 3 + 15 + 15, 5, 335 - 70, id="attention-alone"),
        pytest.param(85 * 3 + 15 + 14, 4, 255, id="whole-layers-only"),
        pytest.param(14, 0, 0, id="nothing"),
        pytest.param(15, 1, 15, id="output-alone"),
    ],
)
def test_dense_model_spills_layers_and_one_part(budget: int, n_gpu_layers: int, on_device: int) -> None:
    units = model(4)
    placement = pack(units, [budget], spread=False)
    if n_gpu_layers == 0:
        assert placement is None
        return
    assert placement is not None and placement.n_gpu_layers == n_gpu_layers
    weights, caches = weights_on(units, placement), caches_on(units, placement)
    assert weights[0] + caches[0] <= budget
    assert weights[0] == on_device
    assert len({item.layer for item, _ in placement.moved}) <= 1


@pytest.mark.parametrize(
    ("budget", "n_gpu_layers", "spilled"),
    [
        pytest.param(75 + 4 * 70, 5, 0, id="everything"),
        pytest.param(75 + 4 * 70 - 1, 5, 20, id="smallest-tensor-leaves"),
        pytest.param(75 + 3 * 70, 5, 70, id="one-layer's-leave"),
        pytest.param(75, 5, 280, id="dense-alone"),
        pytest.param(74, 4, 210, id="a-byte-less-and-a-layer-leaves"),
    ],
)
def test_experts_leave_before_dense_weights(budget: int, n_gpu_layers: int, spilled: int) -> None:
    units = model(4)
    placement = pack(units, [budget], spread=True)
    assert placement is not None and placement.n_gpu_layers == n_gpu_layers
    assert sum(item.bytes for item, _ in placement.moved) == spilled
    assert weights_on(units, placement)[0] + caches_on(units, placement)[0] <= budget


def test_what_one_device_cannot_hold_goes_to_another_before_the_host() -> None:
    units = [layer(0), layer(1), Unit(2, 15, 0)]
    placement = pack(units, [60, 15 + 85 + 40], spread=True, counts=(1, 2))
    assert placement is not None
    assert [(item.stem, target) for item, target in placement.moved] == [("blk.0.ffn_down", 1)]


def test_larger_layers_use_more_of_a_gap() -> None:
    units = [layer(0, items=(20, 20, 20)), layer(1, items=(20, 20, 29)), Unit(2, 15, 0)]
    placement = pack(units, [15 + 15 + 15 + 69], spread=True)
    assert placement is not None
    assert {item.layer for item, _ in placement.moved} == {0}


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 60)), min_size=1, max_size=12),
    st.booleans(),
)
def test_never_more_than_a_budget(budgets: list[int], sizes: list[tuple[int, int, int]], spread: bool) -> None:
    units = [layer(i, *size[:2], items=(size[2], size[2] // 2)) for i, size in enumerate(sizes)]
    units.append(Unit(len(units), 15, 0))
    placement = pack(units, budgets, spread=spread)
    if placement is None:
        return
    used = map(sum, zip(weights_on(units, placement), caches_on(units, placement), strict=True))
    assert all(u <= b for u, b in zip(used, budgets, strict=True))
    assert placement.first + placement.n_gpu_layers == len(units)


@pytest.mark.parametrize(
    ("n_gpu_layers", "split", "counts"),
    [
        pytest.param(33, (1.0, 1.0), (17, 16), id="halves"),
        pytest.param(33, (20.0, 13.0), (20, 13), id="counts-are-kept"),
        pytest.param(62, (9.0, 5.0, 5.0, 5.0, 8.0, 8.0, 10.0, 12.0), (9, 5, 5, 5, 8, 8, 10, 12), id="eight"),
        pytest.param(5, (0.0, 1.0), (0, 5), id="none-on-the-first"),
        pytest.param(5, (1.0, 0.0), (5, 0), id="none-on-the-last"),
        pytest.param(0, (1.0, 1.0), (0, 0), id="no-layers"),
    ],
)
def test_split_points(n_gpu_layers: int, split: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert counts_for_split(n_gpu_layers, split) == counts


@given(st.lists(st.integers(0, 60), min_size=1, max_size=15).filter(any))
def test_counts_as_split_give_the_same_counts(counts: list[int]) -> None:
    assert counts_for_split(sum(counts), [float(count) for count in counts]) == tuple(counts)


def test_patterns_find_their_tensors_and_no_others() -> None:
    items = [
        Item(1, "blk.1.ffn_up", ("weight",), 1),
        Item(11, "blk.11.ffn_up", ("weight",), 1),
        Item(11, "blk.11.ffn_down", ("bias", "weight"), 1),
    ]
    pattern = pattern_for(items)
    names = [
        f"blk.{n}.ffn_{k}.{s}"
        for n in (0, 1, 2, 11, 111)
        for k in ("up", "up_exps", "down")
        for s in ("weight", "bias")
    ]
    found = {name for name in names if re.search(pattern, name)}
    assert found == {"blk.1.ffn_up.weight", "blk.11.ffn_up.weight", "blk.11.ffn_down.weight", "blk.11.ffn_down.bias"}
    assert not set(pattern) & set("\\ '\",*?[]=")


GATE, UP, DOWN, ALL = "ffn_gate", "ffn_up", "ffn_down", range(4)


@pytest.mark.parametrize(
    ("tensors", "pattern"),
    [
        pytest.param({GATE: [0], UP: [1]}, "^blk.(0.ffn_gate|1.ffn_up).weight$", id="nothing-in-common"),
        pytest.param({UP: [3], f"{UP}_exps": [3]}, "^blk.3.ffn_up(|_exps).weight$", id="a-name-that-goes-on"),
        pytest.param({GATE: ALL, UP: ALL}, "^blk.(0|1|2|3).ffn_(gate|up).weight$", id="every-layer-has-all"),
        pytest.param(
            {GATE: [1], UP: [1, 2], DOWN: [2]}, "^blk.(2.ffn_(down|up)|1.ffn_(gate|up)).weight$", id="by-layer"
        ),
        pytest.param({GATE: [1, 2], UP: [1, 2, 3]}, "^blk.((1|2).ffn_(gate|up)|3.ffn_up).weight$", id="some-have-all"),
    ],
)
def test_patterns_are_short(tensors: dict[str, Sequence[int]], pattern: str) -> None:
    items = [Item(n, f"blk.{n}.{name}", ("weight",), 1) for name, layers in tensors.items() for n in layers]
    found = pattern_for(items)
    assert found == pattern
    names = [f"blk.{n}.{name}.weight" for n in range(14) for name in (GATE, UP, DOWN, f"{UP}_exps")]
    assert {name for name in names if re.search(found, name)} == {f"{item.stem}.weight" for item in items}


def test_one_override_per_target() -> None:
    a, b, c = (Item(n, f"blk.{n}.ffn_up", ("weight",), 1) for n in range(3))
    overrides = overrides_of(Placement(0, (2, 2), ((a, HOST), (b, 1), (c, HOST))), ["CUDA0", "CUDA1"])
    assert [(o.pattern, o.buffer_type) for o in overrides] == [
        ("^blk.(0|2).ffn_up.weight$", "CPU"),
        ("^blk.1.ffn_up.weight$", "CUDA1"),
    ]


def test_layout_becomes_layers() -> None:
    def entry(name: str, kind: str, size: int, where: str = LAYOUT_DEVICE) -> LayoutEntry:
        return LayoutEntry(where, name, kind, size)  # type: ignore[arg-type]

    layout = Layout(
        (
            entry("token_embd.weight", "model", 999, "CUDA_Host"),
            entry("token_embd.weight", "model", 130),
            entry("blk.0.attn_q.weight", "model", 128),
            entry("blk.0.ffn_up.weight", "model", 127),
            entry("blk.0.ffn_up.bias", "model", 1),
            entry("blk.1.ffn_up.weight", "model", 256),
            entry("blk.1.scale", "model", 128),
            entry("enc.layer.0.weight", "model", 128),
            entry("cache_k_l0", "context", 256),
            entry("cache_v_l1 (view)", "context", 1),
        ),
        128,
        256,
    )
    units = units_of(layout, 2, lambda name: "ffn_up" in name, {"blk.1.ffn_up.weight": HOST})
    assert [(u.fixed, u.cache, u.movable) for u in units] == [(128, 256, 256), (128, 128, 0), (384, 0, 0)]
    assert units[0].items[0].suffixes == ("weight", "bias")
    # what is not named as tensors of a layer are cannot be placed apart
    assert [[item.stem for item in unit.rest] for unit in units] == [["blk.0.attn_q"], [], []]


def test_compute_is_learned() -> None:
    learned = LearnedCompute()
    assert learned.at("CUDA0", 5) is None
    learned.learn("CUDA0", 1000, 100)
    assert learned.at("CUDA0", 9999) == 100
    learned.learn("CUDA0", 3000, 300)
    assert [learned.at("CUDA0", n) for n in (1000, 2000, 3000, 4000, 0)] == [100, 200, 300, 400, 0]
    learned.learn("CUDA0", 3000, 500)
    assert learned.at("CUDA0", 2000) == 300


@pytest.mark.parametrize("text", ["", "a", "=CPU", "a=", "a=CPU,", ",a=CPU"])
def test_overrides_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not of the form"):
        parse_overrides([text])


@pytest.mark.parametrize(
    ("cpu_moe", "n_cpu_moe", "caught"),
    [
        pytest.param(True, None, {"blk.0.ffn_up_exps", "blk.12.ffn_gate_up_exps", "blk.2.ffn_down_chexps"}, id="all"),
        pytest.param(False, 2, {"blk.0.ffn_up_exps"}, id="first-two"),
        pytest.param(False, 13, {"blk.0.ffn_up_exps", "blk.12.ffn_gate_up_exps", "blk.2.ffn_down_chexps"}, id="many"),
        pytest.param(False, 0, set(), id="none"),
    ],
)
def test_expert_options(cpu_moe: bool, n_cpu_moe: int | None, caught: set[str]) -> None:
    names = [
        "blk.0.ffn_up_exps",
        "blk.12.ffn_gate_up_exps",
        "blk.2.ffn_down_chexps",
        "blk.0.ffn_up",
        "blk.1.ffn_up_shexp",
    ]
    patterns = [override.pattern for override in host_overrides(cpu_moe, n_cpu_moe, None, names)]
    assert {name for name in names if any(re.search(pattern, name + ".weight") for pattern in patterns)} == caught


def test_a_negative_number_of_expert_layers() -> None:
    with pytest.raises(UsageError, match=r"^n_cpu_moe \(-ncmoe\) is -1: give 0 or more$"):
        host_overrides(False, -1, None, [])


@pytest.mark.parametrize(
    ("n_cpu_ffn", "caught"),
    [
        (None, set()),
        (0, set()),
        (1, {"blk.0.ffn_up", "blk.0.ffn_gate"}),
        (99, {"blk.0.ffn_up", "blk.0.ffn_gate", "blk.7.ffn_down"}),
    ],
)
def test_feed_forward_weights_of_the_first_layers(n_cpu_ffn: int | None, caught: set[str]) -> None:
    names = [
        "blk.0.ffn_up",
        "blk.0.ffn_gate",
        "blk.7.ffn_down",
        "blk.0.ffn_up_exps",
        "blk.0.ffn_up_shexp",
        "blk.0.ffn_norm",
    ]
    patterns = [override.pattern for override in host_overrides(False, None, n_cpu_ffn, names)]
    assert {name for name in names if any(re.search(pattern, name + ".weight") for pattern in patterns)} == caught
    with pytest.raises(UsageError, match=r"^n_cpu_ffn \(-ncffn\) is -1: give 0 or more$"):
        host_overrides(False, None, -1, [])


def test_experts_and_feed_forward_weights() -> None:
    names = ["blk.0.ffn_up", "blk.1.ffn_up_exps"]
    assert [each.pattern for each in host_overrides(True, None, 1, names)] == [
        ".ffn_(up|down|gate|gate_up)_(ch|)exps",
        "^blk.(0).ffn_(up|down|gate).(weight|bias|scale)$",
    ]


def device(name: str, total: int) -> DeviceInfo:
    return DeviceInfo(name, "", "gpu", "CUDA", total, total)


@pytest.mark.parametrize(
    ("margin", "expected"),
    [
        pytest.param(None, [1024, 1024], id="default"),
        pytest.param(5 * MIB, [5, 5], id="one-for-all"),
        pytest.param([7 * MIB], [7, 7], id="list-of-one"),
        pytest.param([1 * MIB, 2 * MIB], [1, 2], id="one-each"),
        pytest.param(2048 * MIB, [2048, 2048], id="as-large-as-the-device"),
        pytest.param(2049 * MIB, [2049, 2049], id="larger-than-the-device"),
        pytest.param(-1, "a margin of -1 MiB is negative: give 0 or more, which must stay free", id="negative"),
        pytest.param([1, 2, 3], "3 margins for 2 devices: give one for all, or one per device", id="too-many"),
        pytest.param([], "0 margins for 2 devices: give one for all, or one per device", id="too-few"),
    ],
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


def test_a_visit_decides_between_devices() -> None:
    units = [layer(index) for index in range(4)]
    seconds = [[1.0] * 4, [1.5] * 4]
    budgets = [4 * 85, 4 * 85]
    assert pack_fastest(units, budgets, seconds, 0.0) == Placement(0, (4, 0))
    # all there saves 2 seconds
    assert pack_fastest(units, budgets, seconds, 0.0, visits=[1.9, 0.0]) == Placement(0, (4, 0))
    assert pack_fastest(units, budgets, seconds, 0.0, visits=[2.1, 0.0]) == Placement(0, (0, 4))


def test_nothing_is_moved_to_a_far_device() -> None:
    """The first device holds two layers but one tensor, for which only the second one has room."""
    units = model(4)
    budgets = [2 * 85 - 5, 2 * 85 + 15 + 40]
    near, far = (pack(units, budgets, spread=True, counts=(2, 3), far=far) for far in ((), (1,)))
    assert near is not None
    assert far is not None
    assert [target for _, target in near.moved] == [1]
    assert [target for _, target in far.moved] == [HOST]


def with_rest(units: list[Unit]) -> list[Unit]:
    """The same layers, whose fixed weights are known by name."""
    return [
        replace(unit, rest=(Item(unit.index, f"blk.{unit.index}.attn_q", ("weight",), unit.fixed),))
        if unit.items
        else unit
        for unit in units
    ]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("spread", [True, False], ids=["experts", "dense"])
def test_a_device_without_room_changes_nothing(place: int, spread: bool) -> None:
    budgets = [85 * 2, 85 * 2]
    without = pack(model(8), budgets, spread=spread)
    with_one = pack(model(8), [*budgets[:place], -1, *budgets[place:]], spread=spread)
    assert without is not None and with_one is not None and sum(without.counts) > 0
    assert with_one.counts == (*without.counts[:place], 0, *without.counts[place:])
    assert with_one.first == without.first and len(with_one.moved) == len(without.moved)


def test_layers_on_the_host_bring_their_tensors_to_devices_with_room() -> None:
    units = with_rest(model(4))
    # the last two layers and the output, and room for one layer's items and 15 bytes more
    budgets = [85 * 2 + 15 + 70 + 15]
    base = pack(units, budgets, spread=True, first=2)
    assert base is not None
    together = bring_back(units, budgets, base, "layers")
    assert {item.layer for item, _ in together.moved} == {1} and len(together.moved) == 3
    whole = bring_back(units, budgets, base, "all")
    assert {item.layer for item, _ in whole.moved} == {1} and len(whole.moved) == 4
    for placement in (together, whole):
        assert weights_on(units, placement)[0] + caches_on(units, placement)[0] <= budgets[0]
        assert all(target == 0 for _, target in placement.moved), "what stays with its layer is not moved"


def test_layers_on_the_host_come_before_items_of_the_devices_own_layers() -> None:
    units = with_rest(model(4))
    # without items the last two layers and the output take 45 bytes, and a layer of the host 80
    base = pack(units, [45 + 140], spread=True, first=2)
    assert base is not None and not base.moved
    found = bring_first(units, [45 + 140], base, "all")
    assert [(item.layer, item.bytes) for item, at in found.moved if at == HOST] == [(2, 20), (3, 30), (3, 20), (3, 20)]
    assert {item.layer for item, at in found.moved if at == 0} == {1} and weights_on(units, found) == [35 + 80 + 50]
    # no room
    assert bring_first(units, [40], base, "all") == base


@pytest.mark.parametrize("bring", ["layers", "all"])
def test_layers_on_the_host_stay_there_where_all_devices_are_far(bring: Literal["layers", "all"]) -> None:
    nowhere = Placement(5, (0,))
    assert bring_back(with_rest(model(4)), [1000], nowhere, bring, far=(0,)) == nowhere


def test_what_leaves_a_device_leaves_room_for_others_tensors() -> None:
    """The first device is 25 bytes short: the tensor of 30 leaves it, and one of the second takes its place."""
    units = [layer(0), layer(1, items=(5, 50)), Unit(2, 15, 0)]
    placement = pack(units, [85 - 25, 70 + 15 - 5], spread=True, counts=(1, 2))
    assert placement is not None
    moved = [(item.stem, target) for item, target in placement.moved]
    assert moved == [("blk.0.ffn_down", HOST), ("blk.1.ffn_gate", 0)]


def test_a_tensor_goes_where_the_least_room_is_left() -> None:
    """A tensor of 20 leaves the first device; the others have room for 30 and for 22 bytes more."""
    units = [*map(layer, range(3)), Unit(3, 15, 0)]
    placement = pack(units, [85 - 20, 85 + 30, 85 + 15 + 22], spread=True, counts=(1, 1, 2))
    assert placement is not None and [target for _, target in placement.moved] == [2]


def test_only_the_caches_of_bare_layers_are_on_devices() -> None:
    units = with_rest(model(4))
    placement = pack(units, [85 * 2 + 15 + 10], spread=True, first=0, bare=2)
    assert placement is not None and placement.counts == (5,)
    assert caches_on(units, placement) == [20] and weights_on(units, placement) == [2 * 80 + 15]
    assert {(item.layer, target) for item, target in placement.moved} == {(0, HOST), (1, HOST)}
    assert pack(units, [85 * 2 + 15 + 9], spread=True, first=0, bare=2) is not None, "an item of a whole layer leaves"
    states = [replace(unit, state=unit.cache) for unit in units]
    assert pack(states, [1000], spread=True, first=0, bare=2) is None, "a recurrent state needs its weights"


def test_compute_buffers_are_copied_by_the_part_that_a_device_has() -> None:
    learned = LearnedCompute()
    learned.learn("CUDA0", 4096, 100)
    learned.learn("CUDA1", 4096, 30)
    copy = learned.copy({"CUDA0": "CUDA1", "CUDA1": "CUDA0"})
    assert (copy.at("CUDA0", 4096), copy.at("CUDA1", 4096)) == (30, 100)
    copy.learn("CUDA0", 8192, 60)
    assert learned.at("CUDA1", 8192) == 30, "the original learns nothing of it"


def test_a_placement_on_some_of_its_devices() -> None:
    item = Item(1, "blk.1.ffn_up", ("weight",), 20)
    placement = Placement(1, (0, 3, 0, 1), ((item, 3), (Item(2, "blk.1.ffn_up", ("weight",), 20), HOST)))
    assert placement.on([1, 3]) == Placement(1, (3, 1), ((item, 1), (Item(2, "blk.1.ffn_up", ("weight",), 20), HOST)))
