"""``--gpu SPEC`` and sizes: what is read, what is refused, and how."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fitter.errors import UsageError
from fitter.llama.types import SharedMemory, VirtualDevice
from fitter.machine import gpu_catalogue
from fitter.machine.gpu import parse_gpus, split_gpus
from fitter.parameters.values import parse_size
from tests.support.cases import cases, named_cases, outcomes, stored, stored_rows

MIB = 2**20
GIB = 2**30


@cases(
    ("24GiB", 24 * GIB),
    ("24564MiB", 24564 * MIB),
    ("24564 MiB", 24564 * MIB),
    (" 1gib ", GIB),
    ("20GB", 20 * 10**9),
    ("500MB", 500 * 10**6),
    ("1.5GiB", 3 * GIB // 2),
    ("0.1GiB", 107374182),
    ("2TiB", 2 * 2**40),
    ("2TB", 2 * 10**12),
    ("7KiB", 7168),
    ("7KB", 7000),
    ("12B", 12),
    ("0GiB", 0),
    ("1048576TiB", 2**60),
)
def test_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@outcomes(
    {
        "has no unit: write 24MiB or 24GiB": ["24"],
        "may mean two sizes: write 24GiB or 24GB": ["24G"],
        "may mean two sizes: write 24KiB or 24KB": ["24k"],
        "unknown unit": ["24GiBs"],
        "more memory than any machine has": ["1048577TiB"],
        "is not a size": [
            *("24Gb/s", "24Gib/s", "", "GiB", "-1GiB", "1e3MiB", "1,5GiB", "1.GiB", "infGiB", "٣GiB", "9" * 30 + "GiB")
        ],
    }
)
def test_no_size(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_size(text)


@given(st.integers(0, 2**40), st.sampled_from(["MiB", "MB", "KiB", "B", "mib"]), st.sampled_from(["", " "]))
def test_size_round_trip(number: int, unit: str, space: str) -> None:
    scale = {"MiB": 2**20, "mib": 2**20, "MB": 10**6, "KiB": 1024, "B": 1}[unit]
    assert parse_size(f"{number}{space}{unit}") == number * scale


def _device(name: str, description: str, capability: int, total: int, free: int) -> VirtualDevice:
    return VirtualDevice(name, description, "cuda", capability, total, free)


RTX_4090 = ("NVIDIA GeForce RTX 4090", 890, 24564 * MIB, 23608 * MIB)
RTX_3090 = ("NVIDIA GeForce RTX 3090", 860, 24576 * MIB, 23832 * MIB)


@named_cases(
    ("none", [], []),
    ("a card", ["rtx-4090"], [RTX_4090]),
    ("as people write it", ["RTX 4090"], [RTX_4090]),
    ("as the driver writes it", ["NVIDIA GeForce RTX 4090"], [RTX_4090]),
    ("two cards", ["2x rtx-3090"], [RTX_3090, RTX_3090]),
    ("two cards, with the sign", ["2×rtx-3090"], [RTX_3090, RTX_3090]),
    ("numbered over the whole list", ["rtx-4090", "2 x rtx-3090"], [RTX_4090, RTX_3090, RTX_3090]),
    ("memory not said", ["rtx-3060"], [("NVIDIA GeForce RTX 3060", 860, 12288 * MIB, 11796 * MIB)]),
    ("a size", ["24GiB"], [("virtual CUDA GPU", 890, 24 * GIB, 24 * GIB)]),
    ("a card partly free", ["rtx-4090:free=20GiB"], [("NVIDIA GeForce RTX 4090", 890, 24564 * MIB, 20 * GIB)]),
    ("a card wholly free", ["rtx-4090:free=24564MiB"], [("NVIDIA GeForce RTX 4090", 890, 24564 * MIB, 24564 * MIB)]),
    ("profile, capability, memory", ["cuda:8.9:24564MiB"], [("virtual CUDA GPU 8.9", 890, 24564 * MIB, 24564 * MIB)]),
    ("two digits", ["cuda:12.1:1GiB"], [("virtual CUDA GPU 12.1", 1210, GIB, GIB)]),
    ("the oldest", ["cuda:5.0:1GiB"], [("virtual CUDA GPU 5.0", 500, GIB, GIB)]),
    ("all of it", ["2x cuda:8.6:24GiB:free=23GiB"], [("virtual CUDA GPU 8.6", 860, 24 * GIB, 23 * GIB)] * 2),
    ("as many as there can be", ["16x 1GiB"], [("virtual CUDA GPU", 890, GIB, GIB)] * 16),
)
def test_gpus(specs: list[str], devices: list[tuple[str, int, int, int]]) -> None:
    assert parse_gpus(specs) == tuple(_device(f"CUDA{i}", *device) for i, device in enumerate(devices))


# What ggml-metal logs as recommendedMaxWorkingSetSize, in whole pages: 10922.67 of 16, 21845.34 of 32, 49152 of 64 GiB.
@named_cases(
    ("two thirds of a small one", "metal:16GiB", 16 * GIB * 2 // 3 // 16384 * 16384, None),
    ("as its log says", "metal:32GiB", 22906486784, None),
    ("just below", "metal:36863MiB", 36863 * MIB * 2 // 3 // 16384 * 16384, None),
    ("three quarters of a large one", "metal:36GiB", 27 * GIB, None),
    ("Macs are written in GB", "Metal: 64 GB", 64 * 10**9 * 3 // 4 // 16384 * 16384, None),
    ("partly in use", "metal:64GiB:free=40GiB", 48 * GIB, 40 * GIB),
    ("more than by default", "metal:64GiB:free=56GiB", 56 * GIB, 56 * GIB),
)
def test_a_mac(spec: str, total: int, free: int | None) -> None:
    (device,) = parse_gpus([spec])
    size = parse_size(spec.split(":")[1])
    # all but 4 GiB of it are available
    memory = SharedMemory(size, (size - 4 * GIB) // MIB * MIB, 0, "metal")
    assert device == VirtualDevice("MTL0", "virtual Apple GPU", "metal", 0, total, free or total, memory)


@cases("none", " None ", "CPU")
def test_a_machine_without_a_gpu(spec: str) -> None:
    assert parse_gpus([spec]) == ()


@named_cases(
    ("memory", ["vulkan:24GiB"], [("Vulkan0", "virtual Vulkan GPU", "vulkan", 24 * GIB, 24 * GIB)]),
    (
        "a driver",
        ["2x vulkan:nvidia:24GiB:free=20GiB"],
        [(f"Vulkan{i}", "virtual Vulkan GPU (NVIDIA's driver)", "vulkan-nvidia", 24 * GIB, 20 * GIB) for i in range(2)],
    ),
    (
        "in capitals",
        ["Vulkan:RADV:1GiB"],
        [("Vulkan0", "virtual Vulkan GPU (AMD with Mesa's RADV)", "vulkan-radv", GIB, GIB)],
    ),
    (
        "beside CUDA, each numbered on its own",
        ["24GiB", "vulkan:1GiB", "24GiB"],
        [
            ("CUDA0", "virtual CUDA GPU", "cuda", 24 * GIB, 24 * GIB),
            ("Vulkan0", "virtual Vulkan GPU", "vulkan", GIB, GIB),
            ("CUDA1", "virtual CUDA GPU", "cuda", 24 * GIB, 24 * GIB),
        ],
    ),
)
def test_vulkan_gpus(specs: list[str], devices: list[tuple[str, str, str, int, int]]) -> None:
    assert [(d.name, d.description, d.profile, d.total, d.free) for d in parse_gpus(specs)] == devices


@cases(*stored_rows("machine_gpu", "gpus_of_amd"))
def test_gpus_of_amd(spec: str, description: str, number: int) -> None:
    (device,) = parse_gpus([spec])
    found = (device.name, device.profile, device.description, device.compute_capability)
    assert found == ("ROCm0", "rocm", description, number)


@outcomes(stored("machine_gpu", "understood"))
def test_what_can_only_mean_one_card_is_understood(text: str, cards: str) -> None:
    assert parse_gpus([text]) == parse_gpus(cards.split(", "))


@cases("rtx-4090 +", "+", ",rtx-4090", "rtx-4090,,rtx-3090")
def test_a_list_without_a_card(text: str) -> None:
    with pytest.raises(UsageError, match=r"name a GPU on both sides of each \+ or comma") as caught:
        parse_gpus([text])
    assert repr(text) in str(caught.value)


def test_a_drivers_name_is_not_guessed() -> None:
    """Speeds of a real card are never those of another one with a similar name."""
    assert gpu_catalogue.find("4090") is None and gpu_catalogue.find("RTX4090") is None


@cases("rtx-3090:free=0", "24GiB:free=0MiB", "vulkan:24GiB:free=0")
def test_all_memory_of_a_card_may_be_taken(spec: str) -> None:
    assert [(device.total > 0, device.free) for device in parse_gpus([spec])] == [(True, 0)]


def test_every_backend_numbers_its_own_devices() -> None:
    devices = parse_gpus(["rtx-4090", "2x mi210", "rtx-3090"])
    assert [device.name for device in devices] == ["CUDA0", "ROCm0", "ROCm1", "CUDA1"]


@cases(stored("machine_gpu", "bad_gpus"))
def test_bad_gpus(specs: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_gpus(specs)
    assert repr(split_gpus(specs[-1])[-1]) in str(caught.value)
    assert "\n" not in str(caught.value)


_PARTS = st.sampled_from(
    ["2x ", "x", "rtx-4090", "cuda", ":", "8.9", "24GiB", "free=", "=", "1MiB", "0", "-", ".", "\n", "²", "3", " ", "×"]
)


@given(st.one_of(st.text(), st.lists(_PARTS).map("".join)))
@example("²GiB")
@example("²x 1GiB")
@example("²")
@example("1GiB:free=²")
@example("cuda:²:1GiB")
@example("NONE")
def test_a_spec_is_read_or_refused(spec: str) -> None:
    try:
        devices = parse_gpus([spec])
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert (0 if spec.strip().lower() in ("none", "cpu") else 1) <= len(devices) <= 16
        assert all(0 < device.free <= device.total for device in devices)


@given(st.integers(1, 16), st.integers(1, 2**30), st.integers(1, 2**30), st.sampled_from([500, 750, 890, 1210]))
def test_gpu_round_trip(count: int, a: int, b: int, capability: int) -> None:
    free, total = sorted((a, b))
    spec = f"{count}x cuda:{capability // 100}.{capability // 10 % 10}:{total}MiB:free={free}MiB"
    devices = parse_gpus([spec])
    assert [device.name for device in devices] == [f"CUDA{i}" for i in range(count)]
    assert {(d.compute_capability, d.total, d.free) for d in devices} == {(capability, total * MIB, free * MIB)}


BACKENDS = {
    # the name of the first device, the lowest and the highest capability
    "cuda": ("CUDA0", 520, 1210),
    "rocm": ("ROCm0", 0x1000906, 0x1001201),
    "vulkan-anv": ("Vulkan0", 0, 0),
    "vulkan-radv": ("Vulkan0", 0, 0),
    "metal": ("MTL0", 0, 0),
}


@pytest.mark.parametrize("key", list(gpu_catalogue.gpus()))
def test_a_card_of_the_catalogue_is_a_device(key: str) -> None:
    card = gpu_catalogue.gpus()[key]
    (device,) = parse_gpus([key])
    name, lowest, highest = BACKENDS[card.profile]
    total = card.usable if card.unified else card.total
    assert replace(device, shared=None) == VirtualDevice(
        name, card.description, card.profile, card.compute_capability, total or 0, card.free
    )
    assert (device.shared is not None) == card.unified
    assert key == key.lower()
    if device.shared is not None:
        assert device.shared.total == card.total and 0.7 * card.total < device.shared.free < card.total
        assert card.usable is not None and card.free <= card.usable <= card.total
    else:
        # no driver leaves all of a card, and none takes a tenth of it
        assert 0.9 * card.total < card.free < card.total
    assert lowest <= card.compute_capability <= highest


FAMILIES = {
    # what its cards are called, and how many there are at least
    "Maxwell": (r"tesla-m", 1),
    "Pascal": (r"gtx-10|tesla-p", 6),
    "Volta": (r"tesla-v", 2),
    "Turing": (r"gtx-16|rtx-20|titan-rtx|quadro-rtx|tesla-t4", 12),
    "Ampere": (r"rtx-30|rtx-a\d|a10|a30|a40|a100|jetson-agx-orin", 22),
    "Ada": (r"rtx-40[5-9]|rtx-\d000-ada|l4", 19),
    "Hopper": (r"h100|h200|gh200", 6),
    "Blackwell": (r"b200|rtx-50[5-9]|rtx-pro|dgx-spark|jetson-agx-thor", 18),
    "CDNA and Vega": (r"mi\d|radeon-vii", 12),
    "RDNA 2": (r"rx-6|w6", 9),
    "RDNA 3": (r"rx-7|w7|strix-halo|radeon-[78]", 10),
    "RDNA 4": (r"rx-9|r9", 5),
    "Arc of processors": (r"arc-(meteor|140)", 3),
    "Arc A": (r"arc-a", 7),
    "Arc B": (r"arc-(pro-)?b", 6),
    "M1": (r"m1(-|$)", 4),
    "M2": (r"m2(-|$)", 4),
    "M3": (r"m3(-|$)", 5),
    "M4": (r"m4(-|$)", 4),
    "M5": (r"m5(-|$)", 4),
}


@cases(FAMILIES)
def test_a_family_of_cards(pattern: str, least: int) -> None:
    assert len([key for key in gpu_catalogue.gpus() if re.match(pattern, key)]) >= least


def test_every_card_is_of_one_family() -> None:
    assert len(gpu_catalogue.gpus()) >= 160
    for key in gpu_catalogue.gpus():
        assert len([pattern for pattern, _ in FAMILIES.values() if re.match(pattern, key)]) == 1, key


SPEEDS = {
    # 10**9 bytes per second of memory and PCIe, 10**12 FLOP per second: data sheets
    "tesla-p40": (346, 15.76, 12),
    "rtx-2080-ti": (616, 15.76, 53.8),
    "rtx-3090": (936, 31.504, 71),
    "a100-80gb": (2039, 31.504, 312),
    "rtx-4060-ti-16gb": (288, 15.752, 44.1),
    "rtx-4090": (1008, 31.504, 165.2),
    "rtx-6000-ada": (960, 31.504, 364.2),
    "h100-sxm": (3350, 63.008, 989.4),
    "rtx-5090": (1792, 63.008, 209.5),
    "gh200": (4000, 450, 989.4),
    "dgx-spark": (273, None, 125),
    "rx-7900-xtx": (960, 31.504, 122.8),
    "mi300x": (5300, 63.008, 1307.4),
    "strix-halo-96gb": (256, None, 59.4),
    "arc-b580": (456, 15.752, 116.5),
    "arc-a380": (186, 15.752, None),
    "m2-ultra": (800, None, 27.3),
    "m3-max-30c": (300, None, 10.7),
}


@pytest.mark.parametrize(("key", "speeds"), SPEEDS.items(), ids=SPEEDS)
def test_speeds_of_known_cards(key: str, speeds: tuple[float, float | None, float | None]) -> None:
    card = gpu_catalogue.gpus()[key]
    scaled = (card.bandwidth / 1e9, card.pcie and card.pcie / 1e9, card.compute and card.compute / 1e12)
    assert scaled == pytest.approx(speeds)


@pytest.mark.parametrize("key", list(gpu_catalogue.gpus()))
def test_speeds_are_those_of_a_gpu(key: str) -> None:
    card = gpu_catalogue.gpus()[key]
    assert 60e9 <= card.bandwidth <= 8e12
    assert card.unified == (card.pcie is None)
    assert card.pcie is None or 7e9 < card.pcie <= 450e9
    assert card.nvlink is None or (card.pcie or 0) < card.nvlink <= 900e9
    if card.compute is not None:
        assert 2e12 < card.compute < 3e15
        assert 10 < card.compute / card.bandwidth < 600, "FLOP per byte"
    assert bool(card.sizes) == (card.profile == "metal")
    assert not card.sizes or card.total in card.sizes
    assert card.names[0] == card.description


@pytest.mark.parametrize("key", list(gpu_catalogue.gpus()))
def test_every_figure_of_the_catalogue_has_a_source(key: str) -> None:
    card = gpu_catalogue.gpus()[key]
    sources = card.sources
    cited = ("compute_capability", "total", "usable", "bandwidth", "compute", "pcie")
    for source in filter(None, (getattr(sources, each) for each in cited)):
        is_known = re.search(r"https://[a-z0-9.-]+/\S+", source) or source.startswith(("public log", "measured 20"))
        assert is_known, "a page that can be opened, a log that once had one, or a measurement of this project"
    maker = {"cuda": "NVIDIA, ", "rocm": "AMD, "}.get(card.profile)
    assert (sources.compute_capability or "").startswith(maker or "")
    assert (card.compute_capability == 0) == (sources.compute_capability is None) == (maker is None)
    assert ("nominal" in sources.total) <= (card.total % (512 * MIB) == 0)
    assert (card.usable is None) == (sources.usable is None)
    assert sources.bandwidth
    assert (card.compute is None) == (sources.compute is None)
    assert (card.pcie is None) == (sources.pcie is None)
    assert (card.nvlink is None) == (sources.nvlink is None)
    assert card.free <= (card.usable or card.total) <= card.total
    if sources.free.startswith("estimated"):
        is_amd = card.profile == "rocm" and not card.unified
        assert sources.free.startswith(f"estimated: {98 if is_amd else 96}% of the total")
        assert card.free == int(card.total // MIB * (0.98 if is_amd else 0.96)) * MIB


UNIFIED = stored("machine_gpu", "unified")


@pytest.mark.parametrize(("spec", "sizes"), UNIFIED.items(), ids=UNIFIED)
def test_memory_of_a_card_that_shares_it(spec: str, sizes: tuple[int, int]) -> None:
    (device,) = parse_gpus([spec])
    assert (device.total // MIB, device.free // MIB) == sizes


KNOWN = {
    # MiB: total, what the driver leaves of it, free beside a context
    "rtx-4090": (24564, 24077, 23608),
    "rtx-3090": (24576, 24124, 23832),
    "rtx-6000-ada": (49140, 48508, 48073),
    "h100-sxm": (81559, 81079, 80552),
    "h200": (143771, 143149, 142629),
    "rtx-5090": (32607, 32109, 31331),
    "rtx-5060-ti-16gb": (16311, 15849, 15712),
    "a40": (46068, 45498, 45231),
    "rtx-pro-6000-blackwell": (97887, 97288, 96719),
    "rtx-pro-6000-max-q": (97887, 97288, 96727),
    "rx-6700-xt": (12288, 12272, 12094),
    "rx-9070-xt": (16384, 16304, 16140),
    "r9700": (32768, 32624, 32534),
    "mi355x": (294912, None, 294164),
    # estimated
    "rtx-3060-12gb": (12288, None, 11796),
    "rx-7900-xtx": (24576, 24560, 24084),
    "strix-halo-96gb": (131072, 98304, 94371),
    "strix-halo": (131072, 62914, 62914),
}


@pytest.mark.parametrize(("key", "known"), KNOWN.items(), ids=KNOWN)
def test_known_cards(key: str, known: tuple[int, int | None, int]) -> None:
    card = gpu_catalogue.gpus()[key]
    assert (card.total // MIB, card.usable and card.usable // MIB, card.free // MIB) == known


@named_cases(
    ("of any card", {"cuda", "vulkan"}, lambda: gpu_catalogue.default().free_fraction),
    ("of AMD's", {"rocm"}, lambda: gpu_catalogue.default().free_fraction_rocm),
)
def test_the_default_share_is_the_smallest_known(profiles: set[str], share: Callable[[], float]) -> None:
    cards = [card for card in gpu_catalogue.gpus().values() if card.profile.partition("-")[0] in profiles]
    measured = [card for card in cards if not card.unified and not card.sources.free.startswith("estimated")]
    assert len(measured) >= 4
    smallest = min(card.free / card.total for card in measured)
    assert smallest - 0.005 < share() <= smallest


def test_free_is_known_or_the_default_share() -> None:
    assert gpu_catalogue.gpus()["rtx-4090"].free == 23608 * MIB
    assert gpu_catalogue.gpus()["h100-pcie"].free == int(81559 * gpu_catalogue.default().free_fraction) * MIB
