"""The cache of experts: groups and slots by hand, what a token finds there, and what it costs."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace

import pytest

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.machine.gpu import virtual_devices
from fitter.machine.speed import speed_of
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.request.constraints import check_expert_cache
from fitter.planning.speed.caches import (
    ExpertGroup,
    Experts,
    cached_tensors,
    experts_on_host,
    groups_of,
    hit_rate,
    least_size,
    pays_on,
    with_cache,
)
from fitter.planning.speed.cost import (
    ExpertCache,
    Layer,
    PriceBasis,
    Weights,
    Work,
    Workload,
    figures,
    layer_seconds,
    setting,
    tensor_seconds,
)
from fitter.planning.speed.model_facts import WeightFacts
from tests.support import speed_orders
from tests.support.cases import cases, named_cases
from tests.support.placements import facts, model_of
from tests.support.speed_rows import DATA
from tests.support.synthetic import CARD, DESKTOP, MIB, SLOW_CARD
from tools.comparisons.expert_caches import bytes_on
from tools.models.shapes import SHAPES

PUBLISHED = DATA / "expert_caches.csv"
SIZES = DATA / "expert_cache_sizes.csv"
PAIRS = DATA / "expert_cache_pairs.csv"
# eight experts of 1000 and 500 bytes: 1024 and 512 of a buffer, and 24 less for the next slot
SMALL = (("Q4_K", 8000), ("Q6_K", 4000))
LARGE = (("Q4_K", 16000), ("Q6_K", 8000))
OTHER = (("Q4_0", 8000), ("Q6_K", 4000))


def experts(*layers: tuple[int, tuple[tuple[str, int], ...]]) -> list[Experts]:
    return [Experts(index, device, tensors) for index, (device, tensors) in enumerate(layers)]


@named_cases(
    # 3 slots and one more take PAD(4000) + PAD(2000) = 4096 + 2048
    ("as many as fit", experts((0, SMALL)), 6144, [1], [(0, (0,), 3, 6144)]),
    ("a byte less", experts((0, SMALL)), 6143, [1], [(0, (0,), 2, 4608)]),
    ("all of them", experts((0, SMALL)), 10**6, [1], [(0, (0,), 8, 13696)]),
    ("too few for a token", experts((0, SMALL)), 4607, [1], [(0, (0,), 0, 0)]),
    ("layers share slots", experts((0, SMALL), (0, SMALL)), 10**6, [1], [(0, (0, 1), 16, 25600)]),
    ("by their bytes", experts((0, SMALL), (0, LARGE)), 18432, [1], [(0, (0,), 3, 6144), (0, (1,), 3, 12160)]),
    ("another type, as large", experts((0, SMALL), (0, OTHER)), 12288, [1], [(0, (0,), 3, 6144), (0, (1,), 3, 6144)]),
    ("by their shares", experts((0, SMALL), (1, SMALL)), 18432, [2, 1], [(0, (0,), 7, 12160), (1, (1,), 3, 6144)]),
    ("a device without them has no share", experts((1, SMALL)), 6144, [9, 1], [(1, (0,), 3, 6144)]),
    ("none", [], 6144, [1], []),
)
def test_slots(
    layers: list[Experts], size: int, shares: list[float], expected: list[tuple[int, tuple[int, ...], int, int]]
) -> None:
    found = groups_of(layers, size, shares, 8, 2, 128)
    assert [(group.device, group.layers, group.n_slots, group.bytes) for group in found] == expected
    assert all(group.share == group.n_slots / (8 * len(group.layers)) for group in found)


def test_bytes_on_each_device_and_of_the_tables_on_the_host() -> None:
    groups = [ExpertGroup(0, (0, 1), 5, 600, 0.3), ExpertGroup(1, (2,), 4, 400, 0.5), ExpertGroup(1, (3, 4), 0, 0, 0.0)]
    # 8 numbers of 4 bytes are a whole step of 32, 9 are two; a group without slots has no tables
    assert bytes_on(groups, 3, 8) == ([600, 400, 0], 3 * 32)
    assert bytes_on(groups, 2, 9) == ([600, 400], 3 * 64)


@cases(
    ("blk.3.ffn_gate_exps.weight", True),
    ("blk.3.ffn_gate_up_exps.weight", True),
    ("blk.12.ffn_down_exps.weight", True),
    ("blk.3.ffn_down_exps.bias", False),
    ("blk.3.ffn_gate_chexps.weight", False),
    ("blk.3.ffn_gate_shexp.weight", False),
)
def test_which_tensors_are_cached(name: str, is_cached: bool) -> None:
    assert cached_tensors([WeightFacts(name, 8000, 1, True, type="Q4_K")]) == ((("Q4_K", 8000),) if is_cached else ())


def test_layers_on_devices_with_all_of_their_experts_on_the_host_are_cached() -> None:
    known = facts("qwen3-30b-a3b")
    away, here = Weights(HOST, 1, 1, experts=True), Weights(0, 1, 1, experts=True)
    other = Weights(0, 1, 1)
    layers = [
        Layer(0, (other, away)),
        Layer(0, (here, away)),
        Layer(HOST, (away,)),
        Layer(1, (away,)),
        Layer(0, (here,)),
    ]
    assert [(each.layer, each.device) for each in experts_on_host(known, layers)] == [(0, 0), (3, 1)]


def hits() -> list[tuple[float, float]]:
    """Published shares of experts that are cached, and how often tokens found theirs."""
    with SIZES.open(newline="", encoding="utf-8") as file:
        found = [
            (float(row["cache_mib"]) / float(row["host_experts_mib"]), float(row["hit_rate"]))
            for row in csv.DictReader(file)
            if row["hit_rate"]
        ]
    rows = csv.DictReader(line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#"))
    return [*found, *((float(row["share"]), float(row["hit_rate"])) for row in rows)]


def test_hits_are_as_many_as_published() -> None:
    """Every second row was fitted, from the first on; the others judge it."""
    rows = hits()
    assert len(rows) == 20
    halves = [share * (1 - rate) / (rate - share) for share, rate in rows[::2]]
    assert statistics.median(halves) == pytest.approx(figures()["experts"]["half"], abs=0.001)
    assert statistics.median(abs(hit_rate(share) / rate - 1) for share, rate in rows[1::2]) <= 0.07
    assert hit_rate(0) == 0 and hit_rate(1) == hit_rate(1.5) == pytest.approx(1)
    assert all(hit_rate(n / 100) > n / 100 for n in range(1, 100)), "uniform routing finds fewer"


def test_caches_are_offered_where_one_was_published_to_pay() -> None:
    """Of each kind of device that has a row, and no other."""
    rows = speed_orders.expert_caches()
    without = {row.source: row.generation_tps for row in rows if row.arm.startswith("no cache")}
    pays = {row.devices[0].kind for row in rows if "moe-cache" in row.arm and row.generation_tps > without[row.source]}
    pairs = csv.DictReader(line for line in PAIRS.read_text().splitlines() if not line.startswith("#"))
    pays |= {
        speed_of(virtual_devices([card])[0]).kind
        for pair in pairs
        if float(pair["generation_with"]) > float(pair["generation_without"])
        for card in pair["gpus"].split()
    }
    assert pays == set(figures()["experts"]["kinds"])
    assert pays_on(pays) and not pays_on({"cuda", "vulkan"})


def test_no_cache_that_was_published_to_be_slower_is_estimated_to_be_faster() -> None:
    slower = 0
    for source in {row.source for row in speed_orders.expert_caches()}:
        rows = [row for row in speed_orders.expert_caches(hit_rate) if row.source == source]
        speeds = speed_orders.generation_speeds(rows)
        without = next(speed for speed in speeds if speed.row.arm.startswith("no cache"))
        for speed in speeds:
            if "moe-cache" in speed.row.arm and speed.measured < without.measured:
                slower += 1
                assert speed.priced < without.priced, speed.row.arm
    assert slower == 6


def at(*devices: object) -> PriceBasis:
    work = Work((), 4096, 64, 8)
    return setting(work, devices, DESKTOP, Workload(2048, 512))  # type: ignore[arg-type]


def test_a_token_waits_for_the_experts_that_it_does_not_find() -> None:
    one = at(CARD)
    here, there = Weights(0, 64e6, 128e6, experts=True), Weights(HOST, 64e6, 128e6, experts=True)
    cached = [tensor_seconds(replace(there, cache=ExpertCache(0, rate)), one) for rate in (1.0, 0.75, 0.0)]
    assert cached[0].generation == tensor_seconds(here, one).generation, "found always, it is as on the device"
    uploads = 64e6 / 8 / one.upload(0)
    assert [each.generation - cached[0].generation for each in cached] == pytest.approx([0, uploads / 4, uploads])
    assert {each.prompt for each in cached} == {tensor_seconds(there, one).prompt}, "without slots for large batches"


def test_a_layer_waits_for_them_as_long_as_was_measured() -> None:
    """On Vulkan, where the link is slower for them, too."""
    one, other = at(CARD), at(replace(CARD, kind="vulkan"))
    family = other.families[0]
    there = Weights(HOST, 64e6, 128e6, experts=True, cache=ExpertCache(0, 0.5))
    missed = 0.5 * 64e6 / 8 / (family.misses * other.upload(0))
    found = tensor_seconds(replace(there, cache=ExpertCache(0, 1.0)), other).generation
    assert tensor_seconds(there, other).generation == pytest.approx(found + missed)
    waits = [
        layer_seconds(Layer(0, (weights,)), each).generation - each.families[0].layer
        for weights, each in ((there, one), (there, other), (replace(there, place=0, cache=None), other))
    ]
    assert waits == pytest.approx([0, family.wait, 0]) and family.wait > 0


def test_large_batches_copy_what_is_cached_on_the_device_that_computes_them() -> None:
    two = at(CARD, CARD)
    there = Weights(HOST, 64e6, 128e6, experts=True)
    alone = tensor_seconds(there, two).prompt
    half, all_of_it, elsewhere = (
        tensor_seconds(replace(there, cache=ExpertCache(device, 1.0, spared)), two).prompt
        for device, spared in ((0, 0.5), (0, 1.0), (1, 0.5))
    )
    here = tensor_seconds(Weights(0, 64e6, 128e6, experts=True), two).prompt
    assert here < all_of_it < half < alone == elsewhere
    assert half == pytest.approx((alone + all_of_it) / 2)


def test_a_slow_link_makes_a_cache_slower_than_the_host() -> None:
    there = Weights(HOST, 64e6, 128e6, experts=True)
    most = replace(there, cache=ExpertCache(0, 0.8))
    fast, slow = at(CARD), at(replace(SLOW_CARD, pcie=2e9))
    assert tensor_seconds(most, fast).generation < tensor_seconds(there, fast).generation
    assert tensor_seconds(most, slow).generation > tensor_seconds(there, slow).generation


def test_equal_layers_stay_one_object() -> None:
    known = facts("qwen3-30b-a3b")
    layer = Layer(0, (Weights(HOST, 1, 1, experts=True), Weights(0, 1, 1)))
    layers = (layer,) * len(known.layers)
    found = with_cache(known, layers, 8192 * MIB, (1,))
    marked = [[weights.cache for weights in each.weights] for each in found]
    assert all(cache is not None and other is None for cache, other in marked)
    assert len({id(each) for each in found}) == 1
    assert with_cache(known, layers, 0, (1,)) == layers


@cases(
    ("qwen3-30b-a3b", {"moe_cache_size": 2048 * MIB}, None),
    ("qwen3-30b-a3b", {"moe_cache_size": 0, "split_mode": "tensor"}, None),
    ("llama-3.1-8b", {"moe_cache_size": 0}, None),
    ("llama-3.1-8b", {"moe_cache_size": 2048 * MIB}, "has no experts to cache: leave --moe-cache-mib out"),
    ("qwen3-30b-a3b", {"moe_cache_size": MIB}, "no room for .*: give --moe-cache-mib 23 or more"),
    ("qwen3-30b-a3b", {"moe_cache_size": 2048 * MIB, "split_mode": "tensor"}, "or use -sm layer"),
)
def test_what_llama_cpp_refuses(shape: str, changed: dict[str, object], message: str | None) -> None:
    params = replace(Params(), **changed)  # type: ignore[arg-type]
    if message is None:
        check_expert_cache(params, model_of(SHAPES[shape]))
        return
    with pytest.raises(UsageError, match=message):
        check_expert_cache(params, model_of(SHAPES[shape]))


def test_a_header_that_does_not_say_how_many_experts_there_are_has_none() -> None:
    known = facts("qwen3-30b-a3b")
    assert least_size(replace(known, n_expert=0)) == 0
    assert groups_of(experts((0, (("Q4_K", 7),))), 10**6, [1], 8, 2, 128)[0].n_slots == 8, "less than a byte for each"


def test_the_least_size_is_the_least_with_slots() -> None:
    known = facts("qwen3-30b-a3b")
    least = least_size(known)
    for size, n_slots in ((least, 8), (least - 1, 0)):
        layers = [Experts(0, 0, cached_tensors(layer.tensors)) for layer in known.layers]
        each = [groups_of([layer], size, [1], 128, 8, 128)[0].n_slots for layer in layers]
        assert max(each) == n_slots
