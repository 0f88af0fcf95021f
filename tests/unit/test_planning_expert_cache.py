"""The cache of experts: groups and slots by hand, what a token finds there, and what it costs."""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.request.constraints import check_expert_cache
from fitter.planning.speed.cost import ExpertCache, Layer, Setting, Weights, Work, Workload, setting, tensor_seconds
from fitter.planning.speed.expert_cache import (
    Experts,
    Group,
    cached_tensors,
    experts_on_host,
    groups_of,
    hit_rate,
    least_size,
    with_cache,
)
from fitter.planning.speed.model_facts import WeightFacts
from tests.support.placements import facts, model_of
from tests.support.synthetic import CARD, DESKTOP, MIB, SLOW_CARD
from tools.expert_caches import bytes_on
from tools.shapes import SHAPES

PUBLISHED = Path(__file__).parents[1] / "data" / "speeds" / "expert_caches.csv"
# eight experts of 1000 and 500 bytes: 1024 and 512 of a buffer, and 24 less for the next slot
SMALL = (("Q4_K", 8000), ("Q6_K", 4000))
LARGE = (("Q4_K", 16000), ("Q6_K", 8000))


def experts(*layers: tuple[int, tuple[tuple[str, int], ...]]) -> list[Experts]:
    return [Experts(index, device, tensors) for index, (device, tensors) in enumerate(layers)]


@pytest.mark.parametrize(
    ("layers", "size", "shares", "expected"),
    [
        # 3 slots and one more take PAD(4000) + PAD(2000) = 4096 + 2048
        pytest.param(experts((0, SMALL)), 6144, [1], [(0, (0,), 3, 6144)], id="as many as fit"),
        pytest.param(experts((0, SMALL)), 6143, [1], [(0, (0,), 2, 4608)], id="a byte less"),
        pytest.param(experts((0, SMALL)), 10**6, [1], [(0, (0,), 8, 13696)], id="all of them"),
        pytest.param(experts((0, SMALL)), 4607, [1], [(0, (0,), 0, 0)], id="too few for a token"),
        pytest.param(experts((0, SMALL), (0, SMALL)), 10**6, [1], [(0, (0, 1), 16, 25600)], id="layers share slots"),
        pytest.param(
            experts((0, SMALL), (0, LARGE)), 18432, [1], [(0, (0,), 3, 6144), (0, (1,), 3, 12160)], id="by their bytes"
        ),
        pytest.param(
            experts((0, SMALL), (0, (("Q4_0", 8000), ("Q6_K", 4000)))),
            12288,
            [1],
            [(0, (0,), 3, 6144), (0, (1,), 3, 6144)],
            id="another type, as many bytes",
        ),
        pytest.param(
            experts((0, SMALL), (1, SMALL)),
            3 * 6144,
            [2, 1],
            [(0, (0,), 7, 12160), (1, (1,), 3, 6144)],
            id="devices by their shares",
        ),
        pytest.param(experts((1, SMALL)), 6144, [9, 1], [(1, (0,), 3, 6144)], id="a device without them has no share"),
        pytest.param([], 6144, [1], [], id="none"),
    ],
)
def test_slots(
    layers: list[Experts], size: int, shares: list[float], expected: list[tuple[int, tuple[int, ...], int, int]]
) -> None:
    found = groups_of(layers, size, shares, 8, 2, 128)
    assert [(group.device, group.layers, group.n_slots, group.bytes) for group in found] == expected
    assert all(group.share == group.n_slots / (8 * len(group.layers)) for group in found)


def test_bytes_on_each_device_and_of_the_tables_on_the_host() -> None:
    groups = [Group(0, (0, 1), 5, 600, 0.3), Group(1, (2,), 4, 400, 0.5), Group(1, (3, 4), 0, 0, 0.0)]
    # 8 numbers of 4 bytes are a whole step of 32, 9 are two; a group without slots has no tables
    assert bytes_on(groups, 3, 8) == ([600, 400, 0], 3 * 32)
    assert bytes_on(groups, 2, 9) == ([600, 400], 3 * 64)


@pytest.mark.parametrize(
    ("name", "is_cached"),
    [
        ("blk.3.ffn_gate_exps.weight", True),
        ("blk.3.ffn_gate_up_exps.weight", True),
        ("blk.12.ffn_down_exps.weight", True),
        ("blk.3.ffn_down_exps.bias", False),
        ("blk.3.ffn_gate_chexps.weight", False),
        ("blk.3.ffn_gate_shexp.weight", False),
    ],
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


def test_hits_are_as_many_as_published() -> None:
    rows = list(csv.DictReader(line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")))
    skews = [math.log(1 - float(row["hit_rate"])) / math.log(1 - float(row["share"])) for row in rows]
    median = statistics.median(skews)
    assert len(rows) == 12 and 1 - 0.9**median == pytest.approx(hit_rate(0.1), abs=0.005)
    assert hit_rate(0) == 0 and hit_rate(1) == hit_rate(1.5) == 1
    assert all(hit_rate(n / 100) > n / 100 for n in range(1, 100)), "uniform routing finds fewer"


def at(*devices: object) -> Setting:
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


@pytest.mark.parametrize(
    ("shape", "changed", "message"),
    [
        ("qwen3-30b-a3b", {"moe_cache_size": 2048 * MIB}, None),
        ("qwen3-30b-a3b", {"moe_cache_size": 0, "split_mode": "tensor"}, None),
        ("llama-3.1-8b", {"moe_cache_size": 0}, None),
        ("llama-3.1-8b", {"moe_cache_size": 2048 * MIB}, "has no experts to cache: leave --moe-cache-mib out"),
        (
            "qwen3-30b-a3b",
            {"moe_cache_size": MIB},
            "no room for .*: give --moe-cache-mib 23 or more",
        ),
        ("qwen3-30b-a3b", {"moe_cache_size": 2048 * MIB, "split_mode": "tensor"}, "or use -sm layer"),
    ],
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
