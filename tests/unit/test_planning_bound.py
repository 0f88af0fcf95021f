"""The lower bound: never above any placement's price, and as near to the best as it can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.layer_sizes import HOST, Unit
from fitter.planning.speed.bound import lower_bound
from fitter.planning.speed.cost import Attention, Costs, Family, HostCosts, SplitCounts, Work, Workload, default, price
from fitter.planning.speed.model_facts import LayerFacts, ModelFacts, WeightFacts
from fitter.planning.speed.work import HostOnlyTensors, Pieces
from tests.support.cases import named_cases

FAST = DeviceSpeed(1000e9, 160e12, 31.5e9, "cuda", "8.9", "test", True)
SLOW = DeviceSpeed(300e9, 40e12, 15.8e9, "cuda", "8.9", "test", True)
HBM = DeviceSpeed(2000e9, 300e12, 64e9, "cuda", "8.0", "test", True)
DESKTOP = HostSpeed(60e9, "test", 8)
ATTENTION = Attention(kv_bytes=4096, flops=16384, sharing=4)
MIB = 2**20
GIB = 2**30


def model(
    layers: Sequence[Sequence[tuple[int, float, bool]]],
    cache: int = 256 * MIB,
    attention: Attention | None = ATTENTION,
    state: int = 0,
    pinned: Mapping[str, int] | None = None,
    n_attention: int = 0,
    looked_up: bool = False,
    host_only: Collection[str] = (),
    **more: object,
) -> tuple[Pieces, tuple[Unit, ...]]:
    """A model by its layers' tensors (bytes, bits per parameter, whether experts), each layer with a cache.

    The first ``n_attention`` of them that are no experts project its attention. ``looked_up``: those of few bits are.
    """
    facts = ModelFacts(
        n_layer=len(layers),
        layers=tuple(
            LayerFacts(
                tuple(
                    WeightFacts(f"blk.{i}.{j}.weight", size, round(8 * size / bits), experts, looked_up and bits < 3)
                    for j, (size, bits, experts) in enumerate(tensors)
                ),
                n_attention=len(list(itertools.takewhile(lambda tensor: not tensor[2], tensors[:n_attention]))),
            )
            for i, tensors in enumerate(layers)
        ),
        output=(WeightFacts("output.weight", 300 * MIB, 500 * MIB, False),),
        n_embd=4096,
        n_expert=16,
        n_expert_used=2,
        window=0,
    )
    given = {"n_ubatch": 512, "op_offload": True, "cache_on_host": False, **more}
    count = len(layers)
    pieces = Pieces(
        facts,
        (attention,) * count,
        (float(state),) * count,
        pinned=pinned or {},
        host_only=HostOnlyTensors(frozenset(host_only)),
        **given,
    )  # type: ignore[arg-type]
    units = tuple(Unit(i, 0, cache + state, (), state) for i in range(count))
    return pieces, (*units, Unit(count, 0, 0))


def placements(pieces: Pieces, units: Sequence[Unit], used: Sequence[int]) -> Iterator[tuple[Work, dict[int, int]]]:
    """Every placement on the devices ``used``, which are first to last in that order, with the bytes on each place."""
    order = {d: position for position, d in enumerate(used)}
    # of devices that are left out nothing can be pinned to
    if not set(pieces.pinned.values()) <= {HOST, *order}:
        return
    ordered = replace(pieces, pinned={name: order.get(target, HOST) for name, target in pieces.pinned.items()})
    facts = pieces.facts
    places = [HOST, *order]
    ways = []
    for index, (layer, unit) in enumerate(zip(facts.layers, units, strict=False)):
        free = [each for each in layer.tensors if each.name not in (*pieces.pinned, *pieces.host_only.without_kernels)]
        ways.append(
            [
                (
                    ordered.layer(
                        index,
                        order.get(home, HOST),
                        tuple(((tensor.name,), order.get(at, HOST)) for tensor, at in zip(free, apart, strict=True)),
                    ),
                    [
                        (HOST if pieces.cache_on_host else home, unit.cache),
                        *((at, tensor.bytes) for tensor, at in zip(free, apart, strict=True)),
                    ],
                )
                for home in places
                for apart in itertools.product(places, repeat=len(free))
            ]
        )
    free = [tensor for tensor in facts.output if tensor.name not in (*pieces.pinned, *pieces.host_only.without_kernels)]
    ways.append(
        [
            (ordered.layer(len(facts.layers), order.get(home, HOST)), [(home, tensor.bytes) for tensor in free])
            for home in places
        ]
    )
    for chosen in itertools.product(*ways):
        held: dict[int, int] = {}
        for _, uses in chosen:
            for place, size in uses:
                held[place] = held.get(place, 0) + size
        layers = tuple(layer for layer, _ in chosen)
        yield (
            Work(layers, facts.n_embd, facts.n_expert, facts.n_expert_used, pieces.n_ubatch, pieces.op_offload),
            held,
        )


def cheapest(
    pieces: Pieces,
    units: Sequence[Unit],
    budgets: Sequence[int],
    host_budget: int | None,
    devices: Sequence[DeviceSpeed],
    workload: Workload,
    host: HostSpeed = DESKTOP,
    costs: Costs | None = None,
) -> float:
    """The least price of all placements within the budgets, on any of the devices in any order."""
    room = {**dict(enumerate(budgets)), HOST: math.inf if host_budget is None else host_budget}
    best = math.inf
    for count in range(len(devices) + 1):
        for used in itertools.permutations(range(len(devices)), count):
            for work, held in placements(pieces, units, used):
                if all(size <= room[place] for place, size in held.items()):
                    best = min(best, price(work, [devices[d] for d in used], host, workload, costs).seconds)
    return best


sizes = st.sampled_from([MIB, 50 * MIB, 200 * MIB, 1024 * MIB])
tensors = st.tuples(sizes, st.sampled_from([2.06, 4.5, 16.0]), st.booleans())
cards = st.builds(
    lambda card, bandwidth, compute, pcie: replace(card, bandwidth=bandwidth, compute=compute, pcie=pcie),
    st.sampled_from([FAST, HBM, replace(FAST, kind="vulkan", compute_capability="")]),
    st.floats(20e9, 4e12),
    st.floats(1e12, 1e15),
    st.floats(1e9, 64e9),
)
workloads = st.builds(
    Workload,
    st.sampled_from([0, 16, 2048]),
    st.sampled_from([0, 512]),
    st.sampled_from([0, 30000]),
    st.sampled_from([1, 1, 2, 31, 32]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Pieces, tuple[Unit, ...], list[int], int | None, list[DeviceSpeed], Workload]:
    layers = draw(st.lists(st.lists(tensors, min_size=1, max_size=2), min_size=1, max_size=2))
    attention = draw(
        st.sampled_from([None, ATTENTION, replace(ATTENTION, flash=False), replace(ATTENTION, quantized=True)])
    )
    names = ["output.weight", "token_embd.weight", "blk.0.0.weight"]
    pieces, units = model(
        layers,
        draw(st.sampled_from([0, 64 * MIB, 512 * MIB])),
        attention,
        draw(st.sampled_from([0, 0, 20 * MIB])),
        draw(st.just({}) | st.dictionaries(st.sampled_from(names), st.sampled_from([HOST, 0, 1]), max_size=2)),
        n_ubatch=draw(st.sampled_from([16, 512])),
        op_offload=draw(st.booleans()),
        cache_on_host=draw(st.booleans()),
        n_attention=draw(st.integers(0, 2)),
        looked_up=draw(st.booleans()),
        host_only=draw(st.just([]) | st.lists(st.sampled_from(["output.weight", "blk.0.0.weight", "blk.0.1.weight"]))),
    )
    total = sum(size for tensors in layers for size, _, _ in tensors) + 300 * MIB + sum(unit.cache for unit in units)
    share = st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])
    budgets = [round(total * draw(share)) for _ in range(2)]
    host_budget = draw(st.none() | share.map(lambda part: round(total * part)))
    devices = [draw(cards)]
    devices.append(draw(st.just(devices[0]) | cards))
    return pieces, units, budgets, host_budget, devices, draw(workloads)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_no_placement_is_faster(
    case: tuple[Pieces, tuple[Unit, ...], list[int], int | None, list[DeviceSpeed], Workload],
) -> None:
    pieces, units, budgets, host_budget, devices, workload = case
    bound = lower_bound(pieces, units, budgets, host_budget, devices, DESKTOP, workload)
    best = cheapest(pieces, units, budgets, host_budget, devices, workload)
    assert 0 <= bound <= best * (1 + 1e-9) or bound == best == math.inf


def compared(
    model: tuple[Pieces, tuple[Unit, ...]],
    budget: int,
    devices: list[DeviceSpeed],
    workload: Workload,
    host: HostSpeed = DESKTOP,
    costs: Costs | None = None,
) -> float:
    """The bound as a share of the best placement's price, with so many bytes on each device."""
    budgets = [budget] * len(devices)
    best = cheapest(*model, budgets, None, devices, workload, host, costs)
    return lower_bound(*model, budgets, None, devices, host, workload, costs) / best


def test_the_device_with_the_fastest_link_may_come_first() -> None:
    devices = [replace(FAST, pcie=1e9), FAST]
    assert 0.9 < compared(model([[(200 * MIB, 4.5, False)]]), 0, devices, Workload(2048, 0)) <= 1 + 1e-9


def test_no_device_need_be_used() -> None:
    # the prompt is short and the link slow: the host is faster without
    made = model([[(200 * MIB, 4.5, False)]], n_ubatch=32)
    assert 0.99 < compared(made, 0, [replace(FAST, pcie=1e9)], Workload(32, 0)) <= 1 + 1e-9


def test_a_cache_on_the_host_may_be_attended_to_there() -> None:
    # many threads wait long for one another, and here a split costs nothing
    made = model([[(MIB, 4.5, False)]], cache_on_host=True)
    many, free = replace(DESKTOP, threads=256), replace(default(), split=0.0)
    assert 0.5 < compared(made, GIB, [replace(FAST, pcie=1e9)], Workload(0, 512, 30000), many, free) <= 1 + 1e-9


def test_caches_on_the_host_take_its_room() -> None:
    pieces, units = model([LAYER] * 2, cache_on_host=True)
    caches, weights = 2 * 256 * MIB, (2 * 400 + 300) * MIB
    for budget, host_budget, fits in (
        (weights, caches, True),
        (weights, caches - 1, False),
        (weights - 1, caches, False),
        (weights - 1, caches + 1, True),
    ):
        bound = lower_bound(pieces, units, [budget], host_budget, [FAST], DESKTOP, Workload())
        assert math.isfinite(bound) is fits, (budget, host_budget)


def test_a_split_is_certain_only_with_the_token_embedding_on_the_host() -> None:
    bounds = []
    for pinned in ({}, {"token_embd.weight": HOST}, {"token_embd.weight": 0}):
        pieces, units = model([LAYER] * 2, pinned=pinned)
        bounds.append(lower_bound(pieces, units, [64 * GIB], None, [FAST], DESKTOP, Workload(0, 512)))
    assert bounds[0] == bounds[1]
    assert bounds[0] - bounds[2] == pytest.approx(512 * default().split)


LAYER = [(100 * MIB, 4.5, False), (300 * MIB, 4.5, False)]
LOW_BITS = [(100 * MIB, 2.06, False), (MIB, 32.0, False), (600 * MIB, 2.06, True)]


@pytest.mark.parametrize("card", [FAST, SLOW, HBM], ids=["fast", "slow", "hbm"])
@pytest.mark.parametrize("layer", [LAYER, LOW_BITS], ids=["dense", "low bits"])
@pytest.mark.parametrize(
    "workload", [Workload(), Workload(0, 512, 100), Workload(2048, 0), Workload(64, 512, 100, 8)], ids=str
)
@pytest.mark.parametrize("state", [0, MIB], ids=["", "recurrent"])
def test_it_is_the_price_where_all_is_on_one_device(
    card: DeviceSpeed, layer: list[tuple[int, float, bool]], workload: Workload, state: int
) -> None:
    pieces, units = model([layer] * 20, state=state)
    work = pieces.work(tuple(pieces.layer(index, 0) for index in range(21)), None)
    expected = price(work, [card], DESKTOP, workload).seconds
    assert lower_bound(pieces, units, [64 * GIB], None, [card], DESKTOP, workload) == pytest.approx(expected, rel=1e-9)
    # of two, the slower one is of no use
    worse = replace(card, bandwidth=card.bandwidth / 2, compute=card.compute / 2, pcie=card.pcie / 2)
    for devices in ([card, worse], [worse, card]):
        bound = lower_bound(pieces, units, [64 * GIB] * 2, None, devices, DESKTOP, workload)
        assert bound == pytest.approx(expected, rel=1e-9)


@named_cases(
    ("dense", LAYER, False),
    ("low bits", LOW_BITS, False),
    ("looked up", [(100 * MIB, 2.06, False), (600 * MIB, 2.06, True)], True),
)
def test_it_is_the_price_on_the_host_alone(layer: list[tuple[int, float, bool]], looked_up: bool) -> None:
    pieces, units = model([layer] * 20, looked_up=looked_up)
    work = pieces.work(tuple(pieces.layer(index, HOST) for index in range(21)), None)
    expected = price(work, [], DESKTOP, Workload()).seconds
    assert lower_bound(pieces, units, [], None, [], DESKTOP, Workload()) == pytest.approx(expected, rel=1e-9)


def test_what_does_not_fit_has_no_bound() -> None:
    pieces, units = model([LAYER] * 2)
    total = 2 * (400 + 256) * MIB + 300 * MIB
    for budgets, host_budget, fits in (
        ([total], 0, True),
        ([total - 1], 0, False),
        ([total - 1], 1, True),
        ([0], None, True),
        ([-1], total, True),
        ([MIB, MIB], total - 2 * MIB, True),
        ([MIB, MIB], total - 2 * MIB - 1, False),
    ):
        devices = [FAST, SLOW][: len(budgets)]
        bound = lower_bound(pieces, units, budgets, host_budget, devices, DESKTOP, Workload())
        assert math.isfinite(bound) is fits, (budgets, host_budget)


def test_the_host_gets_what_it_is_least_bad_at() -> None:
    # of experts a token reads an eighth, so that theirs are the bytes that the device can best do without
    layer = [(100 * MIB, 4.5, False), (800 * MIB, 4.5, True)]
    pieces, units = model([layer] * 10, cache=8 * MIB)
    apart = [((f"blk.{index}.1.weight",), HOST) for index in range(10)]
    workload = Workload(0, 512, 1000)
    for count in (0, 3, 10):
        budget = 10 * 8 * MIB + 300 * MIB + 10 * 900 * MIB - count * 800 * MIB
        layers = [pieces.layer(index, 0, (apart[index],) if index < count else ()) for index in range(10)]
        work = pieces.work((*layers, pieces.layer(10, 0)), None)
        estimate = price(work, [FAST], DESKTOP, workload)
        # what it leaves out: waits of the host, and two splits for each of those layers
        costs = default()
        waits = 512 * count * (DESKTOP.threads * costs.host.sync + 2 * costs.split)
        bound = lower_bound(pieces, units, [budget], None, [FAST], DESKTOP, workload)
        assert bound == pytest.approx(estimate.seconds - waits, rel=1e-6), count


def plain(bandwidth: float, pcie: float) -> DeviceSpeed:
    """A card on which only bytes take time."""
    return DeviceSpeed(bandwidth, 1e30, pcie, "cuda", "8.9", "test", True)


NO_SPLITS = SplitCounts(*[0] * 8)
NO_WAITS = Costs(
    {"cuda": Family(0, 1, 1, 1, 1, 1)}, HostCosts(0, 1, 5, 5, 5, 5, 5, 1e30, 1e30, 1), 0, 0, 1, 1, 8, NO_SPLITS
)
TEN, TWO, FIVE = plain(10, 4), plain(2, 8), HostSpeed(5, "test", 1)
TEN_APART, TWO_APART = plain(10, 0.1), plain(2, 0.1)
ONE, FEW = [(100, 8e9, False)], [(100, 4, False)]
KEPT = ["blk.0.0.weight"]
EXPERTS = [(100, 8e9, False), (400, 8e9, True)]
# 50 bytes of each cache are attended to for the one token, as fast as weights are read wherever they are
CACHED: dict[str, Any] = {"cache": 50, "attention": Attention(100, 100)}
HEADS: dict[str, Any] = {**CACHED, "n_attention": 1}
DEAR: dict[str, Any] = {"cache": 50, "attention": Attention(1000, 1000)}
STATES: dict[str, Any] = {"cache": 0, "attention": None, "state": 50}
PROMPT, TOKEN = Workload(64, 0), Workload(0, 1)


def hand(
    layers: list[Any],
    budgets: list[int],
    seconds: float,
    host_budget: int | None = None,
    devices: Sequence[DeviceSpeed] = (TEN,),
    workload: Workload = TOKEN,
    **more: Any,
) -> tuple[Any, ...]:
    """Layers within budgets, what they take, and what differs from a token on the one card without caches."""
    return layers, budgets, host_budget, devices, workload, more, seconds


# layers of 100 bytes, on devices that read 10 and 2 bytes a second and a host that reads 5
BY_HAND = {
    "all on one": hand([ONE] * 3, [300], 30),
    "one on a device": hand([ONE] * 3, [100], 10 + 40),
    "one on each": hand([ONE] * 3, [100, 200], 10 + 20 + 50, 100, [TEN, TWO]),
    "one on each, the slow one first": hand([ONE] * 3, [200, 100], 10 + 20 + 50, 100, [TWO, TEN]),
    "slower than the host": hand([ONE] * 3, [100, 200], 10 + 40, devices=[TEN, TWO]),
    # two of sixteen experts are read
    "experts on the host": hand([EXPERTS] * 2, [200], 20 + 20),
    "half of the experts": hand([EXPERTS] * 2, [600], 20 + 5 + 10),
    "experts on each": hand([EXPERTS] * 2, [200, 400], 20 + 10 + 25, 400, [TEN, TWO]),
    # those that are there first give way
    "experts before other weights": hand([EXPERTS[::-1]] * 2, [200], 20 + 20),
    "half of the experts before": hand([EXPERTS[::-1]] * 2, [600], 20 + 5 + 10),
    "experts on each before": hand([EXPERTS[::-1]] * 2, [200, 400], 20 + 10 + 25, 400, [TEN, TWO]),
    "experts before less room": hand([EXPERTS[::-1]] * 2, [150], 15 + 10 + 20),
    "experts before less room on each": hand(
        [EXPERTS[::-1]] * 2, [150, 450], 15 + 10 + (350 / 5 + 450 / 2) / 8, 400, [TEN, TWO]
    ),
    "experts before, and no room left": hand(
        [EXPERTS[::-1]] * 2, [300, 350], 20 + (100 / 10 + 350 / 5 + 350 / 2) / 8, 350, [TEN, TWO]
    ),
    "no room left anywhere": hand([ONE] * 3, [100, 100], 10 + 20 + 50, 100, [TEN, TWO]),
    "caches": hand([ONE] * 2, [300], 30, **CACHED),
    "a cache on the host": hand([ONE] * 2, [150], 15 + 30, **CACHED),
    "caches on each": hand([ONE] * 3, [150, 300], 15 + 30 + 75, 150, [TEN_APART, TWO_APART], **CACHED),
    # weights are not read faster for being where their cache is not, which is copied at a tenth of a byte a second
    "heads": hand([ONE] * 2, [300], 30, **HEADS),
    "heads on each": hand([ONE] * 3, [150, 300], 15 + 30 + 75, 150, [TEN_APART, TWO_APART], **HEADS),
    "heads, the slow one first": hand([ONE] * 3, [300, 150], 15 + 30 + 75, 150, [TWO_APART, TEN_APART], **HEADS),
    "heads on devices": hand([ONE] * 2, [150, 150], 15 + 75, 0, [TEN_APART, TWO_APART], **HEADS),
    "heads on the host": hand([ONE] * 3, [0], 90, devices=[TEN_APART], **HEADS),
    "heads on the slow ones": hand([ONE] * 2, [0, 150], 30 + 75, 150, [TEN_APART, TWO_APART], **HEADS),
    # the host attends in 100 seconds, and has a cache copied to the device in six
    "caches that are copied": hand(
        [ONE] * 2, [200], 20 + 2 * 50 / 8, devices=[plain(10, 8)], **{**HEADS, "attention": Attention(100, 1000)}
    ),
    # where a second is what a byte of a cache saves, and a tenth a byte of weights
    "caches first": hand([ONE] * 2, [150], 2 * 50 + 5 + 30, **DEAR),
    "caches of heads first": hand([ONE] * 2, [150], 2 * 50 + 5 + 30, **DEAR, n_attention=1),
    "caches on the host": hand([ONE] * 2, [100], 10 + 20 + 20, **CACHED, cache_on_host=True),
    # read and written for every token
    "states": hand([ONE] * 2, [300], 2 * 10 + 2 * 10, **STATES),
    "states first": hand([ONE] * 2, [150], 2 * 10 + 5 + 30, **STATES),
    "states on the host": hand([ONE] * 2, [200], 20 + 40, **STATES, cache_on_host=True),
    "states on the host and a slow one": hand(
        [ONE] * 2, [200, 0], 20 + 40, devices=[TEN, TWO], **STATES, cache_on_host=True
    ),
    "heads with a state": hand([ONE] * 2, [320], 2 * (10 + 5 + 2), **HEADS, state=10),
    "tensors of no bytes": hand([[(0, 4, False), *ONE]] * 2, [200], 20),
    "all pinned": hand([ONE * 2], [0], 20 + 20, pinned={f"blk.0.{j}.weight": HOST for j in (0, 1)}),
    "pinned to the host": hand([ONE] * 2, [100], 20 + 10, pinned={"blk.0.0.weight": HOST}),
    "kept on the host": hand([ONE] * 2, [100], 20 + 10, host_only=KEPT),
    "kept on the host, wherever an override puts it": hand(
        [ONE] * 2, [100], 20 + 10, host_only=KEPT, pinned={"blk.0.0.weight": 0}
    ),
    "a prompt, kept on the host": hand(
        [ONE] * 2, [100], 20 + 5, devices=[plain(10, 20)], workload=PROMPT, host_only=KEPT
    ),
    "pinned to the slow one": hand([ONE] * 2, [100, 0], 50 + 10, devices=[TEN, TWO], pinned={"blk.0.0.weight": 1}),
    "a head whose weights are pinned": hand(
        [ONE] * 2, [150], 20 + 15 + 10, devices=[TEN_APART], **HEADS, pinned={"blk.0.0.weight": HOST}
    ),
    "a head beside what is pinned": hand(
        [ONE * 2] * 2, [350], 20 + 35 + 10, devices=[TEN_APART], **HEADS, pinned={"blk.0.1.weight": HOST}
    ),
    "a prompt": hand([ONE] * 3, [300], 30, workload=PROMPT),
    "a prompt of two batches": hand([ONE] * 3, [300], 2 * 30, workload=Workload(1024, 0)),
    "a prompt, streamed to the better link": hand(
        [ONE] * 3, [100, 0], 10 + 2 * 100 / 8, devices=[TEN, TWO], workload=PROMPT
    ),
    "caches of heads on the host": hand([ONE] * 2, [100], 10 + 20 + 20, **HEADS, cache_on_host=True),
    # unpacked as if each of their weights had eight bits
    "few bits": hand([FEW] * 3, [300], 3 * 20),
    "few bits of some": hand([[*FEW, (20, 8e9, False)]] * 2, [240], 2 * 20),
    "few bits of most": hand([[*FEW, (150, 8e9, False)]] * 2, [500], 2 * 25),
    "few bits of heads": hand([FEW] * 2, [300], 2 * 25, **HEADS),
    "few bits of heads beside experts": hand([[*FEW, (400, 8e9, True)]] * 2, [1100], 2 * (25 + 5), **HEADS),
    "few bits of experts": hand([[*ONE, (400, 4, True)]] * 2, [1000], 2 * (10 + 10)),
    "few bits of experts beside heads": hand([[*ONE, (400, 4, True)]] * 2, [1100], 2 * (15 + 10), **HEADS),
    "few bits of experts beside states": hand([[*ONE, (400, 4, True)]] * 2, [1100], 2 * (10 + 10 + 10), **STATES),
    "few bits of what is pinned": hand([FEW] * 2, [100], 40 + 20, pinned={"blk.0.0.weight": HOST}),
    "a prompt, a fast link without use": hand(
        [ONE] * 3, [100], 10 + 40, devices=[plain(10, 20)], workload=PROMPT, op_offload=False
    ),
    "a prompt, nothing streamed": hand([ONE] * 3, [100], 10 + 40, workload=PROMPT, op_offload=False),
}


@pytest.mark.parametrize("case", BY_HAND.values(), ids=BY_HAND)
def test_figures_by_hand(case: tuple[Any, ...]) -> None:
    layers, budgets, host_budget, devices, workload, more, seconds = case
    pieces, units = model(layers, **{"cache": 0, "attention": None, **more})
    bare = replace(pieces, facts=replace(pieces.facts, output=()))
    bound = lower_bound(bare, units, budgets, host_budget, devices, FIVE, workload, NO_WAITS)
    assert bound == pytest.approx(seconds)


@named_cases(
    ("weights", [ONE] * 2, {}, 200, 20, 40),
    ("caches", [ONE] * 2, CACHED, 300, 30, 60),
    ("heads", [ONE] * 2, HEADS, 300, 30, 60),
    ("experts", [ONE, ONE, EXPERTS], HEADS, 850, 45 + 5, 90 + 10),
    ("states", [ONE] * 2, STATES, 300, 40, 80),
    ("nothing cached", [ONE] * 2, {"cache": 0, "attention": Attention(100, 100)}, 200, 30, 60),
)
def test_all_on_the_host_saves_a_split(
    layers: list[Any], more: dict[str, Any], size: int, on_device: float, on_host: float
) -> None:
    pieces, units = model(layers, **{"cache": 0, "attention": None, **more})
    bare = replace(pieces, facts=replace(pieces.facts, output=()))
    costs = replace(NO_WAITS, split=1000)
    for host_budget, expected in ((None, on_host), (size, on_host), (size - 1, on_device + 1000)):
        found = lower_bound(bare, units, [size, 0], host_budget, [TEN_APART, TWO_APART], FIVE, TOKEN, costs)
        assert found == pytest.approx(expected), host_budget
    cheap = replace(costs, split=1)
    found = lower_bound(bare, units, [size, 0], None, [TEN_APART, TWO_APART], FIVE, TOKEN, cheap)
    assert found == pytest.approx(on_device + 1)


@given(st.lists(st.integers(0, 12 * GIB), min_size=3, max_size=3), st.integers(0, 2), st.integers(0, GIB))
def test_more_room_never_raises_it(budgets: list[int], where: int, more: int) -> None:
    pieces, units = model([LAYER, LOW_BITS] * 10)
    devices = [FAST, SLOW, HBM]
    roomier = [budget + (more if d == where else 0) for d, budget in enumerate(budgets)]
    few, many = (
        lower_bound(pieces, units, room, None, devices, DESKTOP, Workload(2048, 512)) for room in (budgets, roomier)
    )
    assert many <= few * (1 + 1e-9)


def test_alike_devices_are_as_good_as_a_large_one() -> None:
    pieces, units = model([LAYER, LOW_BITS] * 10)
    bounds = [
        lower_bound(pieces, units, budgets, None, [SLOW] * len(budgets), DESKTOP, Workload())
        for budgets in ([3 * GIB], [GIB, 2 * GIB], [GIB] * 3)
    ]
    assert bounds == pytest.approx([bounds[0]] * 3)


def test_speeds_that_are_none() -> None:
    pieces, units = model([LAYER])
    with pytest.raises(ValueError, match="greater than 0"):
        lower_bound(pieces, units, [GIB], None, [replace(FAST, bandwidth=0)], DESKTOP, Workload())
