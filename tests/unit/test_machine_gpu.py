"""``--gpu SPEC`` and sizes: what is read, what is refused, and how."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fitter.errors import UsageError
from fitter.llama.types import VirtualDevice
from fitter.machine import catalogue
from fitter.machine.gpu import parse_gpus, parse_size

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
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
    ],
)
def test_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("24", "has no unit: write 24MiB or 24GiB"),
        ("24G", "unknown unit"),
        ("24Gib/s", "is no size"),
        ("", "is no size"),
        ("GiB", "is no size"),
        ("-1GiB", "is no size"),
        ("1e3MiB", "is no size"),
        ("1,5GiB", "is no size"),
        ("1.GiB", "is no size"),
        ("infGiB", "is no size"),
        ("٣GiB", "is no size"),
        ("1048577TiB", "more memory than any machine has"),
        ("9" * 30 + "GiB", "is no size"),
    ],
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
RTX_3090 = ("NVIDIA GeForce RTX 3090", 860, 24576 * MIB, 23860 * MIB)


@pytest.mark.parametrize(
    ("specs", "devices"),
    [
        pytest.param([], [], id="none"),
        pytest.param(["rtx-4090"], [RTX_4090], id="a card"),
        pytest.param(["RTX 4090"], [RTX_4090], id="as people write it"),
        pytest.param(["NVIDIA GeForce RTX 4090"], [RTX_4090], id="as the driver writes it"),
        pytest.param(["2x rtx-3090"], [RTX_3090, RTX_3090], id="two cards"),
        pytest.param(["2×rtx-3090"], [RTX_3090, RTX_3090], id="two cards, with the sign"),
        pytest.param(["rtx-4090", "2 x rtx-3090"], [RTX_4090, RTX_3090, RTX_3090], id="numbered over the whole list"),
        pytest.param(["rtx-3060"], [("NVIDIA GeForce RTX 3060", 860, 12288 * MIB, 11796 * MIB)], id="memory not said"),
        pytest.param(["24GiB"], [("virtual CUDA GPU", 890, 24 * GIB, 24 * GIB)], id="a size"),
        pytest.param(
            ["rtx-4090:free=20GiB"], [("NVIDIA GeForce RTX 4090", 890, 24564 * MIB, 20 * GIB)], id="a card partly free"
        ),
        pytest.param(
            ["rtx-4090:free=24564MiB"],
            [("NVIDIA GeForce RTX 4090", 890, 24564 * MIB, 24564 * MIB)],
            id="a card wholly free",
        ),
        pytest.param(
            ["cuda:8.9:24564MiB"],
            [("virtual CUDA GPU 8.9", 890, 24564 * MIB, 24564 * MIB)],
            id="profile, capability and memory",
        ),
        pytest.param(["cuda:12.1:1GiB"], [("virtual CUDA GPU 12.1", 1210, GIB, GIB)], id="two digits"),
        pytest.param(["cuda:5.0:1GiB"], [("virtual CUDA GPU 5.0", 500, GIB, GIB)], id="the oldest"),
        pytest.param(
            ["2x cuda:8.6:24GiB:free=23GiB"], [("virtual CUDA GPU 8.6", 860, 24 * GIB, 23 * GIB)] * 2, id="all of it"
        ),
        pytest.param(["16x 1GiB"], [("virtual CUDA GPU", 890, GIB, GIB)] * 16, id="as many as there can be"),
    ],
)
def test_gpus(specs: list[str], devices: list[tuple[str, int, int, int]]) -> None:
    assert parse_gpus(specs) == tuple(_device(f"CUDA{i}", *device) for i, device in enumerate(devices))


VULKAN = {
    "memory": (["vulkan:24GiB"], [("Vulkan0", "virtual Vulkan GPU", "vulkan", 24 * GIB, 24 * GIB)]),
    "a driver": (
        ["2x vulkan:nvidia:24GiB:free=20GiB"],
        [(f"Vulkan{i}", "virtual Vulkan GPU (NVIDIA's driver)", "vulkan-nvidia", 24 * GIB, 20 * GIB) for i in range(2)],
    ),
    "in capitals": (
        ["Vulkan:RADV:1GiB"],
        [("Vulkan0", "virtual Vulkan GPU (AMD with Mesa's RADV)", "vulkan-radv", GIB, GIB)],
    ),
    "beside CUDA, each numbered on its own": (
        ["24GiB", "vulkan:1GiB", "24GiB"],
        [
            ("CUDA0", "virtual CUDA GPU", "cuda", 24 * GIB, 24 * GIB),
            ("Vulkan0", "virtual Vulkan GPU", "vulkan", GIB, GIB),
            ("CUDA1", "virtual CUDA GPU", "cuda", 24 * GIB, 24 * GIB),
        ],
    ),
}


# What ggml-metal logs as recommendedMaxWorkingSetSize, in whole pages: 10922.67 of 16, 21845.34 of 32, 49152 of 64 GiB.
METAL = {
    "two thirds of a small one": ("metal:16GiB", 16 * GIB * 2 // 3 // 16384 * 16384, None),
    "as its log says": ("metal:32GiB", 22906486784, None),
    "just below": ("metal:36863MiB", 36863 * MIB * 2 // 3 // 16384 * 16384, None),
    "three quarters of a large one": ("metal:36GiB", 27 * GIB, None),
    "Macs are written in GB": ("Metal: 64 GB", 64 * 10**9 * 3 // 4 // 16384 * 16384, None),
    "partly in use": ("metal:64GiB:free=40GiB", 48 * GIB, 40 * GIB),
    "more than by default": ("metal:64GiB:free=56GiB", 56 * GIB, 56 * GIB),
}


@pytest.mark.parametrize(("spec", "total", "free"), METAL.values(), ids=METAL.keys())
def test_a_mac(spec: str, total: int, free: int | None) -> None:
    assert parse_gpus([spec]) == (VirtualDevice("MTL0", "virtual Apple GPU", "metal", 0, total, free or total),)


@pytest.mark.parametrize("spec", ["none", " None "])
def test_a_machine_without_a_gpu(spec: str) -> None:
    assert parse_gpus([spec]) == ()


@pytest.mark.parametrize(("specs", "devices"), VULKAN.values(), ids=VULKAN.keys())
def test_vulkan_gpus(specs: list[str], devices: list[tuple[str, str, str, int, int]]) -> None:
    assert [(d.name, d.description, d.profile, d.total, d.free) for d in parse_gpus(specs)] == devices


@pytest.mark.parametrize(
    ("spec", "description", "number"),
    [
        ("rocm:gfx1100:24GiB", "virtual ROCm GPU gfx1100", 0x1001100),
        ("rocm:gfx90a:64GiB", "virtual ROCm GPU gfx90a", 0x100090A),
        ("ROCm:GFX90A:64GiB", "virtual ROCm GPU GFX90A", 0x100090A),
        ("rocm:gfx803:8GiB", "virtual ROCm GPU gfx803", 0x1000803),
        ("rx-7900-xtx", "AMD Radeon RX 7900 XTX", 0x1001100),
        ("AMD Radeon RX 7900 XTX", "AMD Radeon RX 7900 XTX", 0x1001100),
        ("AMD Radeon PRO W7900", "AMD Radeon PRO W7900", 0x1001100),
        ("mi300x", "AMD Instinct MI300X", 0x1000942),
        ("strix-halo", "AMD Radeon 8060S", 0x1001151),
    ],
)
def test_gpus_of_amd(spec: str, description: str, number: int) -> None:
    (device,) = parse_gpus([spec])
    assert (device.name, device.profile) == ("ROCm0", "rocm")
    assert (device.description, device.compute_capability) == (description, number)


def test_every_backend_numbers_its_own_devices() -> None:
    devices = parse_gpus(["rtx-4090", "2x mi210", "rtx-3090"])
    assert [device.name for device in devices] == ["CUDA0", "ROCm0", "ROCm1", "CUDA1"]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        pytest.param(["rtx-4099"], "unknown GPU; did you mean rtx-4090", id="a slip"),
        pytest.param(["a100"], "did you mean a100-40gb or a100-80gb", id="two that it may be"),
        pytest.param(["rtx-4060-ti"], "did you mean rtx-4060-ti-8gb or rtx-4060-ti-16gb", id="8 or 16 GB"),
        pytest.param(["4090"], "did you mean rtx-4090", id="a bare model number"),
        pytest.param(["nonsense!"], "name a GPU .rtx-4090., a size", id="nonsense"),
        pytest.param([""], "no GPU", id="empty"),
        pytest.param(["2x"], "no GPU", id="a count of nothing"),
        pytest.param(["24"], "has no unit", id="no unit"),
        pytest.param(["-1GiB"], "unknown GPU", id="negative"),
        pytest.param(["0GiB"], "without memory", id="zero"),
        pytest.param(["24GiB:free=0MiB"], "without memory", id="nothing free"),
        pytest.param(["24GiB:free=24577MiB"], "more memory free than the device has", id="more free than there is"),
        pytest.param(["24GiB:free=-1GiB"], "is no size", id="negative free"),
        pytest.param(["24GiB:free=1GiB:free=1GiB"], "given twice", id="free twice"),
        pytest.param(["24GiB:fre=1GiB"], "unknown option 'fre'", id="unknown option"),
        pytest.param(["cuda:8.9"], "write profile, compute capability and memory", id="no memory"),
        pytest.param(["cuda:8.9:24GiB:x"], "write profile, compute capability and memory", id="too much"),
        pytest.param(["cuda:89:24GiB"], "'89' is no compute capability", id="no point"),
        pytest.param(["cuda:4.9:24GiB"], "older than llama.cpp", id="too old"),
        pytest.param(["cuda:gfx1100:24GiB"], "'gfx1100' is no compute capability", id="AMD's"),
        pytest.param(["rocm:8.9:24GiB"], "'8.9' is no architecture of AMD's", id="NVIDIA's"),
        pytest.param(["rocm:1100:24GiB"], "'1100' is no architecture of AMD's", id="no gfx"),
        pytest.param(["rocm:gfx11:24GiB"], "'gfx11' is no architecture of AMD's", id="too short"),
        pytest.param(["rocm:gfx11000:24GiB"], "'gfx11000' is no architecture of AMD's", id="too long"),
        pytest.param(["rocm:gfx802:24GiB"], "older than llama.cpp", id="too old an architecture"),
        pytest.param(["rocm:gfx1100"], "write profile, architecture and memory", id="no memory, AMD"),
        pytest.param(["abacus:1.0:24GiB"], "unknown profile 'abacus'", id="unknown profile"),
        pytest.param(["vulkan:24"], "has no unit", id="Vulkan without a unit"),
        pytest.param(["vulkan:voodoo:24GiB"], "unknown Vulkan driver 'voodoo'; there is", id="unknown driver"),
        pytest.param(["vulkan:radv:24GiB:x"], "write profile and memory", id="too much for Vulkan"),
        pytest.param(["metal:m3:64GiB"], "write profile and the Mac's memory", id="too much for Metal"),
        pytest.param(["metal:64"], "has no unit", id="Metal without a unit"),
        pytest.param(["none", "rtx-4090"], "name no other beside it", id="none and one"),
        pytest.param(["2x none"], "unknown GPU", id="two of none"),
        pytest.param(["0x rtx-4090"], "at least 1", id="none of them"),
        pytest.param(["17x 1GiB"], "16 devices at most", id="too many at once"),
        pytest.param(["16x 1GiB", "1GiB"], "16 devices at most", id="too many together"),
        pytest.param(["999999x 1GiB"], "16 devices at most", id="far too many"),
    ],
)
def test_bad_gpus(specs: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_gpus(specs)
    assert repr(specs[-1]) in str(caught.value)
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
def test_a_spec_is_read_or_refused(spec: str) -> None:
    try:
        devices = parse_gpus([spec])
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert 1 <= len(devices) <= 16
        assert all(0 < device.free <= device.total for device in devices)


@given(st.integers(1, 16), st.integers(1, 2**30), st.integers(1, 2**30), st.sampled_from([500, 750, 890, 1210]))
def test_gpu_round_trip(count: int, a: int, b: int, capability: int) -> None:
    free, total = sorted((a, b))
    spec = f"{count}x cuda:{capability // 100}.{capability // 10 % 10}:{total}MiB:free={free}MiB"
    devices = parse_gpus([spec])
    assert [device.name for device in devices] == [f"CUDA{i}" for i in range(count)]
    assert {(d.compute_capability, d.total, d.free) for d in devices} == {(capability, total * MIB, free * MIB)}


@pytest.mark.parametrize("key", list(catalogue.gpus()))
def test_a_card_of_the_catalogue_is_a_device(key: str) -> None:
    card = catalogue.gpus()[key]
    (device,) = parse_gpus([key])
    name = {"cuda": "CUDA0", "rocm": "ROCm0"}[card.profile]
    figures = (card.compute_capability, card.total, card.free)
    assert device == VirtualDevice(name, card.description, card.profile, *figures)
    assert card.sources.total
    assert key == key.lower()
    # no driver leaves all of a card, and none takes a tenth of it
    assert 0.9 * card.total < card.free < card.total
    lowest, highest = {"cuda": (600, 1210), "rocm": (0x1000906, 0x1001201)}[card.profile]
    assert lowest <= card.compute_capability <= highest


def test_the_catalogue_is_of_use() -> None:
    assert len(catalogue.gpus()) >= 30
    assert {card.compute_capability for card in catalogue.gpus().values()} >= {610, 700, 750, 800, 860, 890, 900, 1200}


@pytest.mark.parametrize("key", list(catalogue.gpus()))
def test_every_figure_of_the_catalogue_has_a_source(key: str) -> None:
    card = catalogue.gpus()[key]
    sources = card.sources
    for source in (sources.compute_capability, sources.total, *filter(None, [sources.usable])):
        assert re.search(r"https://[a-z.]+/\S+", source), "a page that can be opened"
    assert sources.compute_capability.startswith({"cuda": "NVIDIA, ", "rocm": "AMD, "}[card.profile])
    assert ("nominal" in sources.total) <= (card.total % (1024 * MIB) == 0 or card.total % (512 * MIB) == 0)
    assert (card.usable is None) == (sources.usable is None)
    assert card.free <= (card.usable or card.total) <= card.total
    if "https://" not in sources.free:
        assert sources.free.startswith("estimated: 96% of the total")
        assert card.free == int(card.total // MIB * catalogue.default().free_fraction) * MIB


KNOWN = {
    # MiB: total, what the driver leaves of it, free beside a context
    "rtx-4090": (24564, 24077, 23608),
    "rtx-3090": (24576, 24124, 23860),
    "rtx-6000-ada": (49140, 48508, 48073),
    "h200": (143771, 143149, 138020),
    "rtx-5090": (32607, None, 31302),
}


@pytest.mark.parametrize(("key", "known"), KNOWN.items(), ids=KNOWN)
def test_known_cards(key: str, known: tuple[int, int | None, int]) -> None:
    card = catalogue.gpus()[key]
    assert (card.total // MIB, card.usable and card.usable // MIB, card.free // MIB) == known


def test_the_default_share_is_the_smallest_known() -> None:
    measured = [card for card in catalogue.gpus().values() if "https://" in card.sources.free]
    assert len(measured) >= 4
    smallest = min(card.free / card.total for card in measured)
    assert smallest - 0.005 < catalogue.default().free_fraction <= smallest


def test_free_is_known_or_the_default_share() -> None:
    assert catalogue.gpus()["rtx-4090"].free == 23608 * MIB
    assert catalogue.gpus()["h200"].free == int(143771 * catalogue.default().free_fraction) * MIB
