"""The cost model: what it must say of any placement, and how well it does on published measurements."""

from __future__ import annotations

import csv
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.machine.host import default_disk_bandwidth
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.speed import cost
from fitter.planning.speed.cost import MIN_OFFLOAD_BATCH, Attention, Estimate, Layer, Weights, Work, Workload, price
from fitter.planning.speed.model_facts import LOOKED_UP
from tests.support import speed_rows
from tests.support.cases import cases, named_cases, stored_rows
from tests.support.speed_orders import Speed, generation_speeds, prompt_speeds
from tests.support.speed_rows import DATA

ROOT = Path(__file__).parents[2]
GB = 1e9
FAST = DeviceSpeed(1000 * GB, 160e12, 31.5 * GB, "cuda", "8.9", "test", True)
SLOW = DeviceSpeed(300 * GB, 40e12, 15.8 * GB, "cuda", "8.9", "test", True)
DESKTOP = HostSpeed(60 * GB, "test", 8)
ATTENTION = Attention(kv_bytes=4096, flops=16384, sharing=4)


def layer(
    home: int, ffn: int | None = None, attention: Attention = ATTENTION, cache: int | None = None, experts: bool = False
) -> Layer:
    """A layer of 0.1 GB of attention and 0.3 GB of FFN in 4 bits; ``ffn`` is where the FFN is, if not at ``home``."""
    return Layer(
        home,
        (Weights(home, 0.1 * GB, 0.2e9), Weights(home if ffn is None else ffn, 0.3 * GB, 0.6e9, experts)),
        attention,
        cache,
    )


def work(*layers: Layer, **more: int | bool | tuple[int, int]) -> Work:
    return replace(Work((*layers, Layer(layers[-1].home, (Weights(layers[-1].home, 0.3 * GB, 0.5e9),))), 4096), **more)


def priced(
    work: Work,
    devices: tuple[DeviceSpeed, ...] = (FAST,),
    host: HostSpeed = DESKTOP,
    workload: Workload = Workload(),  # noqa: B008
) -> Estimate:
    return price(work, devices, host, workload)


# ---- what any placement must obey


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_spilling_one_more_ffn_is_never_faster(spilled: list[bool], data: st.DataObject) -> None:
    more = list(spilled)
    more[data.draw(st.integers(0, len(spilled) - 1))] = True
    few, many = (
        priced(work(*(layer(0, HOST if away else None) for away in places)), workload=Workload(2048, 512))
        for places in (spilled, more)
    )
    assert many.seconds >= few.seconds
    assert many.generation_seconds >= few.generation_seconds
    assert many.prompt_seconds >= few.prompt_seconds


@given(
    st.sampled_from(("bandwidth", "compute", "pcie")),
    st.floats(1, 10),
    st.sampled_from((None, HOST)),
    st.integers(1, 8192),
    st.integers(0, 131072),
)
def test_a_better_card_is_never_slower(name: str, factor: float, ffn: int | None, prompt: int, cached: int) -> None:
    better = replace(FAST, **{name: getattr(FAST, name) * factor})
    placed = work(*[layer(0, ffn)] * 8)
    workload = Workload(prompt, 128, cached)
    assert priced(placed, (better,), workload=workload).seconds <= priced(placed, workload=workload).seconds * 1.000001


def test_parts_add_up() -> None:
    estimate = priced(work(layer(HOST), layer(0, HOST), layer(0), layer(1)), (FAST, SLOW))
    assert estimate.prompt_seconds == pytest.approx(sum(part.prompt for part in estimate.parts))
    assert estimate.generation_seconds == pytest.approx(sum(part.generation for part in estimate.parts))
    assert estimate.seconds == pytest.approx(2048 * estimate.prompt_seconds + 512 * estimate.generation_seconds)
    assert estimate.generation_tokens_per_second == pytest.approx(1 / estimate.generation_seconds)
    assert estimate.prompt_tokens_per_second == pytest.approx(1 / estimate.prompt_seconds)


def added_up(placed: Work, workload: Workload) -> float:
    """The time of a request as a search adds it up, which knows no splits."""
    at = cost.setting(placed, (FAST,), DESKTOP, workload)
    total = sum(at.request(cost.layer_seconds(each, at)) for each in placed.layers)
    return total + sum(at.request(cost.tensor_seconds(each, at)) for layer in placed.layers for each in layer.weights)


def test_single_prices_add_up_to_the_whole() -> None:
    placed = work(layer(HOST), layer(0, HOST), layer(0), n_splits=(1, 1))
    workload = Workload(2048, 512)
    assert price(placed, (FAST,), DESKTOP, workload).seconds == pytest.approx(added_up(placed, workload))


# ---- where things are


def test_the_faster_of_two_cards_first() -> None:
    fast, slow = (priced(work(layer(0), layer(0), layer(1)), cards) for cards in ((FAST, SLOW), (SLOW, FAST)))
    assert fast.seconds < slow.seconds
    assert priced(work(layer(0), layer(0), layer(0))).seconds < fast.seconds


def test_no_device() -> None:
    estimate = priced(work(layer(HOST), layer(HOST)), ())
    assert [part.name for part in estimate.parts] == ["host: weights", "host: layers", "host: attention"]
    faster = replace(DESKTOP, bandwidth=2 * DESKTOP.bandwidth)
    assert priced(work(layer(HOST)), (), faster).prompt_seconds < priced(work(layer(HOST)), ()).prompt_seconds


# ---- prompts


@cases((MIN_OFFLOAD_BATCH - 1, True, False), (MIN_OFFLOAD_BATCH, True, True), (MIN_OFFLOAD_BATCH, False, False))
def test_host_weights_are_streamed_from_a_batch_on(tokens: int, op_offload: bool, streams: bool) -> None:
    placed = work(*[layer(0, HOST)] * 8, op_offload=op_offload)
    faster_slot = replace(FAST, pcie=2 * FAST.pcie)
    faster_host = replace(DESKTOP, bandwidth=2 * DESKTOP.bandwidth)
    workload = Workload(tokens, 0)
    base = priced(placed, workload=workload).seconds
    assert (priced(placed, (faster_slot,), workload=workload).seconds < base) == streams
    assert (priced(placed, host=faster_host, workload=workload).seconds < base) == (not streams)


# ---- experts


def test_a_batch_touches_nearly_all_experts() -> None:
    at = cost.setting(work(layer(0), n_expert=128, n_expert_used=8), (FAST,), DESKTOP, Workload())
    assert at.experts_touched == pytest.approx(1)
    one = cost.setting(work(layer(0), n_expert=128, n_expert_used=8), (FAST,), DESKTOP, Workload(1, 1))
    assert one.experts_touched == pytest.approx(8 / 128)
    text = cost.setting(work(layer(0), n_expert=128, n_expert_used=8), (FAST,), DESKTOP, Workload(is_text=True))
    assert text.experts_touched == pytest.approx(1 - (120 / 128) ** (512**0.6))


def test_a_processor_takes_longer_to_look_weights_up_than_to_read_them() -> None:
    """16 threads of the machine that was measured, and whatever else is looked up: never quicker than reading."""
    at = cost.setting(work(layer(HOST)), (FAST,), HostSpeed(135.1e9, "test", 16), Workload())
    read = cost.tensor_seconds(Weights(HOST, 2e9, 8e9), at)
    looked_up = cost.tensor_seconds(Weights(HOST, 2e9, 8e9, n_looked_up=8e9), at)
    assert looked_up.generation == 8e9 / (16 * cost.default().host.lookup) > 2 * read.generation
    assert cost.tensor_seconds(Weights(HOST, 2e9, 8e9, n_looked_up=1e6), at) == read
    assert looked_up.prompt == read.prompt
    on_card = cost.tensor_seconds(Weights(0, 2e9, 8e9, n_looked_up=8e9), at)
    assert on_card == cost.tensor_seconds(Weights(0, 2e9, 8e9), at)


def test_what_is_looked_up_is_what_was_measured() -> None:
    with (ROOT / "tests" / "data" / "speeds" / "h100_file_types.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["where"] == "host"]
    n_params = next(int(row["bytes"]) / 2 for row in rows if row["type"] == "BF16")
    rates = [n_params * float(r["tokens_per_second"]) / int(r["threads"]) for r in rows if r["type"] in LOOKED_UP]
    assert len(rates) == 3 * len(LOOKED_UP)
    assert cost.default().host.lookup == pytest.approx(statistics.median(rates), rel=1e-3)


def test_of_experts_those_that_are_used_are_looked_up() -> None:
    sparse = work(layer(HOST), n_expert=128, n_expert_used=8)
    at = cost.setting(sparse, (FAST,), DESKTOP, Workload())
    all_of_it, used = (cost.tensor_seconds(Weights(HOST, 1, 8e9, each, 8e9), at).generation for each in (False, True))
    assert used == pytest.approx(all_of_it / 16)


# ---- splits


def splits(*layers: Layer, costs: cost.Costs | None = None) -> tuple[int, int]:
    """Graph splits of a prompt and of generation, as predicted for two devices that compute with host weights."""
    parts = price(work(*layers), (FAST, FAST), DESKTOP, Workload(), costs).parts
    part = next((part for part in parts if part.name == "graph splits"), cost.Part("", 0, 0))
    split = cost.default().split
    return 1 + round(part.prompt * 512 / split), 1 + round(part.generation / split)


def with_bare(count: int) -> cost.Costs:
    """The usual costs, but for the splits of a layer with only its cache on a device."""
    return replace(cost.default(), splits=replace(cost.default().splits, bare=count))


@cases(
    # measured with llama.cpp: dummy loads of Llama 3.1 8B, Qwen3 30B A3B and DeepSeek V3.1 (3 dense layers);
    # splits of a token, and of a prompt where they were counted
    ([layer(0)] * 32, 2, 2),
    ([layer(HOST)] * 13 + [layer(0)] * 19, 2, 159),
    ([layer(HOST)] * 32, 1, None),
    ([layer(0, HOST)] * 10 + [layer(0)] * 22, 22, 32),
    ([layer(0, cache=HOST)] * 32, 66, 66),
    ([layer(0)] * 17 + [layer(1)] * 15, 3, 3),
    ([layer(0, 1)] * 10 + [layer(0)] * 7 + [layer(1)] * 15, 23, None),
    ([layer(0)] * 3 + [layer(0, HOST)] * 28 + [layer(1, HOST)] * 30, 119, 207),
)
def test_predicted_splits(layers: list[Layer], of_step: int, of_prompt: int | None) -> None:
    prompt, step = splits(*layers)
    assert step == of_step
    assert of_prompt is None or prompt == pytest.approx(of_prompt, rel=0.2)


def test_a_cache_without_weights_costs_the_splits_of_the_data_file() -> None:
    bare = Layer(0, (Weights(HOST, 1e8, 1e8),), ATTENTION)
    few, many = (price(work(bare), (FAST,), DESKTOP, Workload(0, 1), with_bare(n)).generation_seconds for n in (1, 11))
    assert many - few == pytest.approx(10 * cost.default().split)
    assert splits(bare, costs=with_bare(11))[1] - splits(bare, costs=with_bare(1))[1] == 10
    # one for the whole, one for the device, and so many for each
    assert splits(bare, bare, costs=with_bare(11))[1] == 2 + 22


def test_weights_of_a_layer_whose_cache_is_on_the_host() -> None:
    """Measured: 7, 10 and 12 splits a layer in generation, 3, 2 and 2 in a prompt (Llama 3.1 8B, Qwen3 8B, Gemma 3)."""
    lent = replace(layer(0), home=HOST, attends=0)
    of_prompt, of_step = splits(*[lent] * 32)
    assert 7 * 32 <= of_step <= 12 * 32
    assert 2 * 32 <= of_prompt <= 3 * 32 + 2
    # experts that stay there: 8.7 and 5.8 (Llama 4 Scout)
    experts = replace(lent, weights=(lent.weights[0], Weights(HOST, 0.3 * GB, 0.6e9, True)))
    assert splits(*[experts] * 32)[0] == pytest.approx(5.8 * 32, rel=0.15)


# ---- devices


@cases(*stored_rows("planning_cost", "family"))
def test_family(kind: str, capability: str, name: str, family: str) -> None:
    device = replace(FAST, kind=kind, compute_capability=capability, source=f"catalogue: {name}")
    assert cost.family_name(device) == family
    assert family in cost.default().families


def test_a_family_says_what_differs() -> None:
    cuda = cost.Family(1e-5, 0.7, 0.6, 0.5, 0.4, 0.3)
    host = cost.HostCosts(1e-6, 0.8, 1e9, 2e9, 1e9, 1e9, 2e9, 3e9, 4e9, 6)
    graph = {"split": 1e-4, "hop": 1e-5, "pcie": 0.9, "pageable": 0.2, "min_bits": 3.0}
    counts = cost.SplitCounts(*range(1, 9))
    families = {"cuda": asdict(cuda), "other": {"layer": 2e-5, "cache": 0.1}}
    found = cost.costs_of({"family": families, "host": asdict(host), "graph": graph, "splits": asdict(counts)})
    assert found.families == {"cuda": cuda, "other": cost.Family(2e-5, 0.7, 0.1, 0.5, 0.4, 0.3)}
    assert found.host == host
    assert (found.split, found.hop, found.pcie, found.pageable) == (1e-4, 1e-5, 0.9, 0.2)
    assert (found.min_bits, found.splits) == (3.0, counts)


@cases(0.0, -1.0)
def test_speeds_that_are_none(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        priced(work(layer(0)), host=replace(DESKTOP, bandwidth=bandwidth))
    for name in ("bandwidth", "compute", "pcie"):
        with pytest.raises(ValueError, match="greater than 0"):
            priced(work(layer(0)), (FAST, replace(FAST, **{name: bandwidth})))


def test_host_threads_that_are_not_known() -> None:
    unknown = replace(DESKTOP, threads=0)
    assert priced(work(layer(HOST)), (), unknown) == priced(
        work(layer(HOST)), (), replace(DESKTOP, threads=cost.default().host.threads)
    )


# ---- figures by hand, of constants that no device has

PLAIN = cost.Costs(
    {
        "cuda": cost.Family(layer=0.5, bandwidth=0.5, cache=0.25, quantized_cache=0.125, compute=0.5, attention=0.2),
        "remote": cost.Family(layer=0.7, bandwidth=1, cache=1, quantized_cache=1, compute=1, attention=1),
    },
    cost.HostCosts(
        sync=0.01,
        bandwidth=0.5,
        attention=10,
        plain_attention=20,
        prompt_attention=10,
        quantized_prompt_attention=5,
        plain_prompt_attention=20,
        compute=4,
        lookup=2,
        threads=3,
    ),
    split=10.0,
    hop=0.25,
    pcie=0.5,
    pageable=0.1,
    min_bits=4,
    splits=replace(cost.default().splits, bare=7),
)
SMALL = DeviceSpeed(100, 1000, 50, "cuda", "8.9", "test", True)
AWAY = DeviceSpeed(100, 1000, 40, "remote", "", "test", True, round_trip=2.0)
PC = HostSpeed(20, "test", 3)
HALF = Attention(kv_bytes=8, flops=16, sharing=4)
# 42 tokens are in the cache on average while 64 are processed as one batch, 76 while four are generated
REQUEST = Workload(prompt=64, generate=4, cached=10)
THERE, HERE = (Weights(0, 200, 100),), (Weights(HOST, 200, 100),)
KEPT = (Weights(HOST, 200, 100, is_host_only=True),)

# seconds of attention to a prompt's batch: on a device, on the host, and there without flash attention
COMPUTED, BY_HOST, BY_HOST_PLAINLY = (16 * 42 * 64 / rate for rate in (200, 30, 60))
COPIED = COMPUTED + 8 * 42 / 25
# and to a token: on a device, on the host, and on a device with its cache copied there
ON_DEVICE, ON_HOST, FROM_HOST = 8 * 76 / 25, 16 * 76 / 30, 8 * 76 / 5
PLAIN_HALF = replace(HALF, flash=False)
AWAY_EXPERTS, KEPT_EXPERTS = (replace(HERE[0], experts=True), *THERE), (replace(KEPT[0], experts=True), *HERE)

ATTENDED: dict[str, tuple[Layer, bool, float, float]] = {
    # whether prompts stream what the host has, and seconds of the prompt's batch and of a token
    "on a device": (Layer(0, THERE, HALF), True, COMPUTED, ON_DEVICE),
    "quantized": (Layer(0, THERE, replace(HALF, quantized=True)), True, COMPUTED, 4 * 8 * 76 / 12.5),
    "a window": (Layer(0, THERE, replace(HALF, window=20)), True, 16 * 20 * 64 / 200, 8 * 20 / 25),
    "on the host": (Layer(HOST, HERE, HALF), True, COPIED, ON_HOST),
    "on the host, nothing streamed": (Layer(HOST, HERE, HALF), False, BY_HOST, ON_HOST),
    "on the host without flash attention": (Layer(HOST, HERE, PLAIN_HALF), False, BY_HOST_PLAINLY, 16 * 76 / 60),
    "copied": (Layer(0, THERE, HALF, HOST), True, COPIED, FROM_HOST),
    "not copied without flash attention": (Layer(0, THERE, PLAIN_HALF, HOST), False, BY_HOST_PLAINLY, 16 * 76 / 60),
    "not copied to where no weights are": (Layer(0, HERE, HALF, HOST), False, BY_HOST, ON_HOST),
    "copied where only experts are away": (Layer(0, AWAY_EXPERTS, HALF, HOST), False, BY_HOST, FROM_HOST),
    "copied where a projection is": (Layer(HOST, HERE, HALF, None, 0), False, BY_HOST, FROM_HOST),
    "copied so without flash attention": (Layer(HOST, HERE, PLAIN_HALF, None, 0), False, BY_HOST_PLAINLY, FROM_HOST),
    "on the host, which projects for it": (Layer(HOST, KEPT, HALF, n_host_only=1), True, BY_HOST, ON_HOST),
    "on the host, with its experts kept there": (Layer(HOST, KEPT_EXPERTS, HALF, n_host_only=1), True, COPIED, ON_HOST),
    "not copied to where the host projects for it": (Layer(0, KEPT, HALF, HOST, n_host_only=1), True, BY_HOST, ON_HOST),
    "on a device that the host projects for": (Layer(0, KEPT, HALF, n_host_only=1), True, COMPUTED, ON_DEVICE),
    "none": (Layer(0, THERE, None), True, 0, 0),
}


def small(
    device: DeviceSpeed, streams: bool = True, workload: Workload = REQUEST, n_expert: int = 0
) -> cost.PriceBasis:
    placed = Work((), 8, n_expert, n_expert // 4, 512, streams)
    families = {**PLAIN.families, cost.family_name(AWAY): PLAIN.families["remote"]}
    return cost.setting(placed, (device,), PC, workload, replace(PLAIN, families=families))


@cases(ATTENDED)
def test_attention_by_hand(placed: Layer, streams: bool, prompt: float, generation: float) -> None:
    found = cost.attention_seconds(placed, small(SMALL, streams))
    assert (found.prompt, found.generation) == (pytest.approx(prompt), pytest.approx(generation))


def test_a_cache_is_copied_over_a_network() -> None:
    found = cost.attention_seconds(Layer(0, THERE, HALF, HOST), small(AWAY))
    assert (found.prompt, found.generation) == (pytest.approx(BY_HOST), pytest.approx(8 * 76 / 40))


def test_attention_on_the_second_of_two_devices() -> None:
    slow = replace(SMALL, pcie=5, compute=10)
    at = cost.setting(Work((), 8), (SMALL, slow), PC, REQUEST, PLAIN)
    on_host = Layer(HOST, HERE, HALF)
    # one token's is copied to where a projection is; a prompt's goes through the first device wherever it is
    for attends, pcie in ((0, 50), (1, 5)):
        found = cost.attention_seconds(replace(on_host, attends=attends), at)
        assert found.generation == pytest.approx(8 * 76 / (0.1 * pcie))
        assert found.prompt == pytest.approx(16 * 42 * 64 / 200 + 8 * 42 / 25)


def test_time_is_said_of_where_it_is_spent() -> None:
    names = [part.name for part in priced(work(layer(0, cache=HOST))).parts]
    assert names == ["device 0: weights", "device 0: layers", "host: attention", "graph splits"]


@named_cases(
    ("on a device", Weights(0, 200, 100), True, 12800 / 500 + 200 / 50, 200 / 50),
    # unpacked as if each weight had four bits
    ("of few bits", Weights(0, 40, 100), True, 12800 / 500 + 40 / 50, 50 / 50),
    ("on the host", Weights(HOST, 200, 100), True, 12800 / 500 + 200 / 25, 200 / 10),
    ("on the host, not streamed", Weights(HOST, 200, 100), False, 12800 / 12 + 200 / 10, 200 / 10),
    ("kept on the host, so never streamed", KEPT[0], True, 12800 / 12 + 200 / 10, 200 / 10),
    # a quarter of eight for each token, and nearly all of them for 64
    ("experts", Weights(0, 200, 100, True), True, 3200 / 500 + 200 / 50, 50 / 50),
    ("experts on the host", Weights(HOST, 200, 100, True), False, 3200 / 12 + 200 / 10, 50 / 10),
)
def test_weights_by_hand(weights: Weights, streams: bool, prompt: float, generation: float) -> None:
    found = cost.tensor_seconds(weights, small(SMALL, streams, n_expert=8))
    assert (found.prompt, found.generation) == (pytest.approx(prompt, rel=1e-6), pytest.approx(generation))


@named_cases(
    # a quarter of them, at half of the bandwidth
    ("experts", Weights(0, 200, 100, True), 50 / 25),
    ("of few bits, which take longer to unpack", Weights(0, 20, 100, True), 12.5 / 50),
    ("other weights", Weights(0, 200, 100), 200 / 50),
    ("in a cache", Weights(HOST, 200, 100, True, cache=cost.ExpertCache(0, 1.0)), 50 / 25),
    ("experts on the host", Weights(HOST, 200, 100, True), 50 / 10),
)
def test_small_experts_reach_less_of_the_bandwidth(weights: Weights, generation: float) -> None:
    at = small(SMALL, n_expert=8)
    families = {name: replace(family, experts=0.5) for name, family in at.costs.families.items()}
    found = cost.tensor_seconds(weights, replace(at, costs=replace(at.costs, families=families)))
    assert found.generation == pytest.approx(generation)


@named_cases(("experts", True, 1 - 0.75**2), ("other weights", False, 1))
def test_two_tokens_touch_few_experts(experts: bool, share: float) -> None:
    found = cost.tensor_seconds(Weights(0, 200, 0, experts), small(SMALL, workload=Workload(2, 1), n_expert=8))
    assert found.prompt == pytest.approx(share * 200 / 50)


FOUR = replace(REQUEST, users=4)


# products of a token with these weights: 200 operations; of three more users 600, at half of what prompts reach
@named_cases(
    ("on a device", Weights(0, 200, 100), True, FOUR, 200 / 50 + 600 / 250),
    ("on the host", Weights(HOST, 200, 100), True, FOUR, 200 / 10 + 600 / 12),
    # a quarter of eight for each user, and 1 - 0.75^4 of them for all
    ("experts", Weights(0, 200, 100, True), True, FOUR, (1 - 0.75**4) * 200 / 50 + 150 / 250),
    ("experts on the host", Weights(HOST, 200, 100, True), True, FOUR, (1 - 0.75**4) * 200 / 10 + 150 / 12),
    ("31 users, on the host", Weights(HOST, 200, 100), True, replace(FOUR, users=31), 200 / 10 + 30 * 200 / 12),
    ("32 users, streamed", Weights(HOST, 200, 100), True, replace(FOUR, users=32), 200 / 25 + 31 * 200 / 250),
    ("32 users, not streamed", Weights(HOST, 200, 100), False, replace(FOUR, users=32), 200 / 10 + 31 * 200 / 12),
    ("32 users, kept on the host", KEPT[0], True, replace(FOUR, users=32), 200 / 10 + 31 * 200 / 12),
    (
        "in a cache of experts",
        Weights(HOST, 200, 100, True, cache=cost.ExpertCache(0, 0.9)),
        *(True, FOUR),
        (1 - 0.75**4) * (200 / 50 + 0.1 * 200 / 25) + 150 / 250,
    ),
)
def test_weights_for_several_users(weights: Weights, streams: bool, workload: Workload, generation: float) -> None:
    at = small(SMALL, streams, workload, n_expert=8)
    families = {name: replace(family, few=0.5, few_experts=0.5) for name, family in at.costs.families.items()}
    found = cost.tensor_seconds(weights, replace(at, costs=replace(at.costs, families=families)))
    assert found.generation == pytest.approx(generation)
    alone = cost.tensor_seconds(weights, small(SMALL, streams, n_expert=8))
    assert found.prompt == alone.prompt


def test_each_user_has_a_cache_and_a_state() -> None:
    placed = Layer(0, THERE, HALF, state=7)
    alone, four = small(SMALL), small(SMALL, workload=FOUR)
    assert cost.attention_seconds(placed, four).generation == pytest.approx(4 * 8 * 76 / 25 + 3 * 2 * 7 / 50)
    assert cost.attention_seconds(placed, four).prompt == cost.attention_seconds(placed, alone).prompt
    more = cost.layer_seconds(placed, four).generation - cost.layer_seconds(placed, alone).generation
    assert more == pytest.approx(3 * 8 * 76 / 25 + 3 * 2 * 7 / 50)


def test_prompts_of_users_come_one_after_the_other() -> None:
    placed = work(layer(0), layer(HOST), n_splits=(1, 1))
    alone, four = (priced(placed, workload=Workload(2048, 512, 0, users)) for users in (1, 4))
    assert four.prompt_seconds == alone.prompt_seconds
    assert four.seconds == pytest.approx(4 * 2048 * alone.prompt_seconds + 512 * four.generation_seconds)
    assert alone.generation_seconds < four.generation_seconds < 4 * alone.generation_seconds
    assert four.seconds == pytest.approx(added_up(placed, Workload(2048, 512, 0, 4)))


def test_a_network_carries_the_tokens_of_all_users() -> None:
    at = small(AWAY, workload=FOUR)
    assert cost.visit_seconds(0, at).generation == pytest.approx(2.0 + 4 * 2 * 4 * 8 / 40)
    output = Layer(0, (Weights(0, 100, 80),))
    assert cost.logits_seconds(output, at).generation == pytest.approx(4 * 4 * 10 / 40)


@named_cases(
    ("on a device", Layer(0, THERE), True, 0.5, 0.5),
    ("with some on the host", Layer(0, (*THERE, *HERE)), True, 0.5, 0.5 + 0.03),
    ("which are not streamed", Layer(0, (*THERE, *HERE)), False, 0.5 + 0.03, 0.5 + 0.03),
    ("which are kept there", Layer(0, (*THERE, *KEPT), n_host_only=1), True, 0.5 + 0.03, 0.5 + 0.03),
    ("all on the host, some kept there", Layer(HOST, (*HERE, *KEPT), n_host_only=1), True, 0.56, 0.06),
    ("on the host", Layer(HOST, HERE), True, 0.5, 0.06),
    ("on the host, not streamed", Layer(HOST, HERE), False, 0.06, 0.06),
)
def test_layers_by_hand(placed: Layer, streams: bool, prompt: float, generation: float) -> None:
    found = cost.layer_seconds(placed, small(SMALL, streams))
    assert (found.prompt, found.generation) == (pytest.approx(prompt), pytest.approx(generation))


@cases((512, Workload(64, 1), 64), (32, Workload(64, 1), 32), (512, Workload(0, 1), 512), (512, Workload(1, 1), 1))
def test_a_batch_is_as_much_as_there_is(n_ubatch: int, workload: Workload, batch: int) -> None:
    assert cost.setting(Work((), 8, n_ubatch=n_ubatch), (SMALL,), PC, workload, PLAIN).batch == batch


def test_a_setting_on_other_devices_streams_where_one_of_them_can() -> None:
    at = small(SMALL)
    for devices, streams in (((SMALL,), True), ((AWAY,), False), ((), False), ((AWAY, SMALL), True)):
        other = at.on(devices)
        assert (other.devices, other.streams) == (devices, streams)
        assert not replace(at, streams=False).on(devices).streams


@named_cases(
    # beside the two that there are without
    ("one", Layer(0, (*THERE, *KEPT), n_host_only=1), 2, 2),
    ("seven", Layer(0, (*THERE, *KEPT), n_host_only=7), 8, 8),
    ("and some that are not", Layer(0, (*THERE, *KEPT, *HERE), n_host_only=7), 8 + 2, 8 + 3),
    ("a layer on the host", Layer(HOST, KEPT, n_host_only=7), 0, 12),
)
def test_splits_of_what_is_kept_on_the_host(placed: Layer, generation: int, prompt: int) -> None:
    placed_as = (Layer(0, THERE), placed) if placed.home == 0 else (placed, Layer(0, THERE))
    assert splits(*placed_as) == (2 + prompt, 2 + generation)


def test_splits_and_hops_by_hand() -> None:
    placed = Work((Layer(0, THERE), Layer(1, (Weights(1, 200, 100),))), 8, n_splits=(3, 5))
    slower = replace(SMALL, pcie=20)
    parts = {part.name: part for part in price(placed, (SMALL, slower), PC, REQUEST, PLAIN).parts}
    # of 64 tokens: two splits and four, the first counted with the layers, and 8 activations of four bytes
    assert parts["graph splits"].prompt * 64 == pytest.approx(2 * 10)
    assert parts["graph splits"].generation == pytest.approx(4 * 10)
    assert parts["device hops"].prompt * 64 == pytest.approx(0.25 + 4 * 8 * 64 / 10)
    assert parts["device hops"].generation == pytest.approx(0.25)


# ---- published measurements, with the constants as they are stored


def median_error(speeds: list[Speed]) -> float:
    return statistics.median(abs(speed.ratio - 1) for speed in speeds)


def test_full_offload() -> None:
    rows, _ = speed_rows.full_offload()
    found = generation_speeds(rows)
    assert len(found) >= 110
    assert median_error(found) <= 0.15 and median_error(prompt_speeds(rows)) <= 0.25
    assert [speed.row.arm for speed in found if not 0.5 <= speed.ratio <= 2] == []


def test_mixtures_on_one_card() -> None:
    """``experts`` was fitted on every second row; the others judge it."""
    rows, skipped = speed_rows.placements(speed_rows.MIXTURES)
    found = generation_speeds(rows)
    assert skipped == [] and len(found) == 10
    assert median_error(found[::2]) <= 0.08
    assert median_error(found[1::2]) <= 0.05
    # all but DeepSeek V2 Lite
    assert sorted(speed.ratio for speed in found)[-2] <= 1.2


def test_placements() -> None:
    rows, _ = speed_rows.placements()
    complete = [row for row in rows if row.complete]
    worker_variables = [row for row in complete if row.cell[3] == "llama.cpp"]
    assert len(generation_speeds(complete)) >= 200
    assert median_error(generation_speeds(complete)) <= 0.25
    assert median_error(generation_speeds(worker_variables)) <= 0.25
    assert median_error(prompt_speeds(worker_variables)) <= 0.3


def test_prompts_of_text_with_experts_on_the_host() -> None:
    """``unlike_of_text`` was fitted on every second of these rows; the others judge it."""
    rows, _ = speed_rows.placements()
    streamed = [
        row
        for row in rows
        if row.prompt_tps and row.cell[3] == "llama.cpp" and row.devices and row.work.n_expert
        # its architecture was not known when the others were fitted
        if "Flash-Next" not in row.cell[0]
        if any(weights.place == HOST for each in row.work.layers for weights in each.weights)
    ]
    judging = streamed[1::2]
    assert len(judging) == 22
    assert median_error(prompt_speeds(judging, is_text=True)) <= 0.125 < 0.15 < median_error(prompt_speeds(judging))


# ---- weights that are read from the disk


def paged(work: Work, host_room: float, workload: Workload = REQUEST) -> cost.Seconds:
    placed = replace(work, n_expert=8, n_expert_used=2, host_room=host_room)
    return cost.paged_seconds(placed, cost.setting(placed, (SMALL,), PC, workload, PLAIN))


def test_weights_beyond_memory_are_read_from_the_disk() -> None:
    rate = default_disk_bandwidth()[0]
    on_host = Weights(HOST, 300, 100), Weights(HOST, 100, 100, True)
    placed = Work((Layer(0, (*THERE, *on_host)),) * 2, 8)
    # of 800 bytes on the host, a quarter of the experts for each token, and nearly all for a prompt of 64
    for room, share in ((800, 0), (10_000, 0), (600, 0.25), (200, 0.75), (0, 1)):
        found = paged(placed, room)
        assert found.generation == pytest.approx(share * (600 + 0.25 * 200) / rate)
        assert found.prompt == pytest.approx(share * 800 / rate)
    cached = replace(on_host[1], cache=cost.ExpertCache(0, 0.9))
    found = paged(Work((Layer(0, (*THERE, on_host[0], cached)),) * 2, 8), 0)
    assert found.generation == pytest.approx((600 + 0.1 * 0.25 * 200) / rate), "those that the cache lacks"
    assert paged(Work((Layer(0, THERE),), 8), 0) == cost.Seconds(), "all weights are on the device"
    estimate = price(replace(placed, host_room=200), (SMALL,), PC, REQUEST, PLAIN)
    assert next(part.generation for part in estimate.parts if part.name == "disk: weights") == 0.75 * 800 / rate


def test_the_disk_is_as_quick_as_published() -> None:
    with (DATA / "paging.csv").open(newline="", encoding="utf-8") as file:
        mixture, dense = csv.DictReader(line for line in file if not line.startswith("#"))
    shares = []
    for row in (mixture, dense):
        weights, read, memory, rate, seconds = (
            float(row[name]) for name in ("weights", "read", "memory", "disk", "seconds")
        )
        shares.append(read * (1 - memory / weights) / rate / seconds)
    assert cost.default().host.paged == pytest.approx(shares[0], abs=0.005)
    assert shares[1] < shares[0], "a dense model takes longer still"


# ---- devices of other machines

FAR = DeviceSpeed(1000 * GB, 160e12, 1 * GB, "remote", "", "test", True, round_trip=1e-3)
TRIP = 1e-3 + 2 * 4 * 4096 / GB
"""Seconds of a token to FAR and back."""
LOGITS = 4 * 0.5e9 / 4096 / GB


def network(estimate: Estimate, device: int) -> float:
    """Seconds of generation that a device's network takes."""
    return sum(part.generation for part in estimate.parts if part.name == f"device {device}: network")


@named_cases(
    ("all there", (0, 0, 0), 0, TRIP + LOGITS),
    ("none there", (1, 1, 1), 0, 0.0),
    ("the first ones there", (0, 0, 1), 0, TRIP),
    ("the last ones there", (1, 0, 0), 0, TRIP + LOGITS),
    ("there and back and there", (0, 1, 0), 0, 2 * TRIP + LOGITS),
    ("from the host", (HOST, 0, 1), 0, TRIP),
)
def test_every_visit_is_a_round_trip(homes: tuple[int, ...], device: int, seconds: float) -> None:
    estimate = priced(work(*map(layer, homes)), (FAR, FAST))
    assert network(estimate, device) == pytest.approx(seconds)
    assert network(estimate, 1) == 0


@named_cases(("near", 0, 0.0), ("far", 1, LOGITS), ("host", HOST, 0.0))
def test_logits_of_each_token_come_from_where_the_output_is(home: int, seconds: float) -> None:
    placed = work(layer(home))
    at = cost.setting(placed, (FAST, FAR), DESKTOP, Workload())
    found = cost.logits_seconds(placed.layers[-1], at)
    assert (found.prompt, found.generation) == (0, pytest.approx(seconds))


def test_a_tensor_apart_from_a_remote_layer_is_another_trip() -> None:
    away = priced(work(layer(0), layer(0, HOST), layer(0, 1), layer(1)), (FAR, FAST))
    assert network(away, 0) == pytest.approx(3 * TRIP)
    for count in (1, 2):
        guest = priced(work(layer(1), *[layer(1, 0)] * count), (FAR, FAST))
        assert network(guest, 0) == pytest.approx(count * TRIP)
    cache = priced(work(layer(0), layer(0, cache=HOST), layer(1)), (FAR, FAST))
    assert network(cache, 0) == pytest.approx(2 * TRIP)


def test_the_output_alone_on_another_machine() -> None:
    placed = Work((layer(1), Layer(0, (Weights(0, 0.3 * GB, 0.5e9),))), 4096)
    estimate = priced(placed, (FAR, FAST))
    assert network(estimate, 0) == pytest.approx(TRIP + LOGITS)
    assert network(priced(replace(placed, layers=placed.layers[::-1]), (FAR, FAST)), 0) == pytest.approx(TRIP)


@pytest.mark.parametrize(
    ("homes", "count"), [((0, 1), 1), ((1, 0), 0), ((1, 0, 1), 1), ((1, 2), 1), ((0, 0), 0)], ids=str
)
def test_what_goes_to_another_machine_is_no_hop(homes: tuple[int, ...], count: int) -> None:
    parts = priced(work(*map(layer, homes)), (FAR, FAST, FAST)).parts
    assert sum(part.generation for part in parts if part.name == "device hops") == count * cost.default().hop


def test_a_prompt_carries_its_activations() -> None:
    estimate = priced(work(layer(0), layer(1)), (FAR, FAST))
    (part,) = (part for part in estimate.parts if part.name == "device 0: network")
    assert part.prompt * 512 == pytest.approx(1e-3 + 2 * 4 * 4096 * 512 / GB)


def test_a_remote_device_streams_no_host_weights() -> None:
    """ggml-rpc does not take operations over; the first device that does is the next one."""
    spilled = work(layer(0), layer(0, HOST), layer(0))
    slow_link = replace(FAR, pcie=FAR.pcie / 1000)
    alone = [priced(spilled, (device,)).parts for device in (FAR, slow_link)]
    on_host = [[part for part in parts if part.name == "host: weights"] for parts in alone]
    assert on_host[0] == on_host[1]
    beside = [
        next(part for part in priced(spilled, devices).parts if part.name == "host: weights")
        for devices in ((FAR, FAST), (FAST, FAR))
    ]
    assert beside[0] == beside[1]
    assert beside[0].prompt < on_host[0][0].prompt


def test_what_a_remote_device_reaches_is_what_was_measured() -> None:
    weights = Weights(0, 1 * GB, 2e9)
    at = cost.setting(work(layer(0)), (FAR,), DESKTOP, Workload())
    assert cost.tensor_seconds(weights, at).generation == pytest.approx(GB / FAR.bandwidth)
