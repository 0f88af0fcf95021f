"""How fast a device is taken to be, by what its driver calls it."""

from __future__ import annotations

import pytest

from fitter.llama.types import DeviceInfo, VirtualDevice
from fitter.machine import gpu_catalogue
from fitter.machine.gpu import parse_gpus
from fitter.machine.machine import virtual_machine
from fitter.machine.speed import named, speed_of
from tests.support.cases import cases, named_cases, stored, stored_rows

GIB = 2**30
MIB = 2**20

NAMES = stored("machine_speed", "names")


def _device(description: str, backend: str, total: int, kind: str = "gpu") -> DeviceInfo:
    return DeviceInfo(f"{backend}0", description, kind, backend, total, total)


@pytest.mark.parametrize(("description", "card"), NAMES.items(), ids=NAMES)
def test_a_real_device_by_its_name(description: str, card: tuple[str, int, str]) -> None:
    backend, total, key = card
    speed = speed_of(_device(description, backend, total * MIB))
    known = gpu_catalogue.gpus()[key]
    assert speed.known
    assert speed.source.startswith(f"catalogue: {known.description}")
    assert speed.bandwidth == known.bandwidth
    kinds = {"CUDA": "cuda", "ROCm": "rocm", "Vulkan": "vulkan", "SYCL": "vulkan", "Metal": "metal", "MTL": "metal"}
    assert speed.kind == kinds[backend]


@named_cases(
    # the same name, and which card of that memory it is
    ("4060 Ti, small", "NVIDIA GeForce RTX 4060 Ti", "CUDA", 7800, "rtx-4060-ti-8gb"),
    ("4060 Ti, large", "NVIDIA GeForce RTX 4060 Ti", "CUDA", 15900, "rtx-4060-ti-16gb"),
    ("2060, large", "NVIDIA GeForce RTX 2060", "CUDA", 11900, "rtx-2060-12gb"),
    ("A770, small", "Intel(R) Arc(tm) A770 Graphics (DG2)", "Vulkan", 8100, "arc-a770-8gb"),
    ("M3 Max of 36 GiB", "Apple M3 Max", "Metal", 36 * 768, "m3-max-30c"),
    ("M3 Max of 48 GiB", "Apple M3 Max", "Metal", 48 * 768, "m3-max"),
    ("M3 Max of 96 GiB", "Apple M3 Max", "Metal", 96 * 768, "m3-max-30c"),
    ("M3 Max of 128 GiB", "Apple M3 Max", "Metal", 128 * 768, "m3-max"),
    ("M4 Max of 128 GiB", "Apple M4 Max", "Metal", 110100, "m4-max"),
)
def test_memory_tells_cards_of_one_name_apart(description: str, backend: str, total: int, key: str) -> None:
    assert speed_of(_device(description, backend, total * MIB)).bandwidth == gpu_catalogue.gpus()[key].bandwidth


@pytest.mark.parametrize("key", list(gpu_catalogue.gpus()))
def test_a_virtual_device_is_as_fast_as_its_card(key: str) -> None:
    card = gpu_catalogue.gpus()[key]
    devices = parse_gpus([key])
    for device in (*devices, *virtual_machine(devices).devices):
        speed = speed_of(device)
        assert speed.known
        assert speed.bandwidth == card.bandwidth
        assert speed.compute == card.compute or card.compute is None
        assert speed.pcie == (card.pcie if card.pcie else card.bandwidth)
        assert speed.kind == card.profile.partition("-")[0]
        assert ("estimated" in speed.source) == (card.compute is None)


@cases(*stored_rows("machine_speed", "another_device_is_not_taken_for_a_known_one"))
def test_another_device_is_not_taken_for_a_known_one(description: str) -> None:
    assert named(description) == ()


def _virtual(spec: str) -> VirtualDevice:
    (device,) = parse_gpus([spec])
    return device


@named_cases(
    # a device, the card that it is taken to be as fast as, and its kind and capability
    ("a size", _virtual("24GiB"), "rtx-4090", "cuda", "8.9"),
    ("a small size", _virtual("7GiB"), "rtx-4060", "cuda", "8.9"),
    ("of a capability", _virtual("cuda:8.6:24GiB"), "rtx-3090", "cuda", "8.6"),
    ("of one that no card has", _virtual("cuda:5.0:8GiB"), "tesla-m40-24gb", "cuda", "5.0"),
    ("of AMD's", _virtual("rocm:gfx1100:24GiB"), "rx-7900-xtx", "rocm", "gfx1100"),
    ("of AMD's for servers", _virtual("rocm:gfx90a:64GiB"), "mi210", "rocm", "gfx90a"),
    ("Vulkan", _virtual("vulkan:24GiB"), "rx-7900-xtx", "vulkan", ""),
    ("Vulkan, NVIDIA's", _virtual("vulkan:nvidia:24GiB"), "rtx-4090", "vulkan", ""),
    ("Vulkan, Intel's", _virtual("vulkan:anv:12GiB"), "arc-b580", "vulkan", ""),
    ("Vulkan, in software", _virtual("vulkan:lavapipe:12GiB"), "radeon-780m", "vulkan", ""),
    ("a Mac", _virtual("metal:192GiB"), "m2-ultra", "metal", ""),
    ("a small Mac", _virtual("metal:16GiB"), "m1", "metal", ""),
    ("real, CUDA", _device("NVIDIA Something New", "CUDA", 24 * GIB), "rtx-4090", "cuda", ""),
    ("real, ROCm", _device("AMD Something New", "ROCm", 20 * GIB), "rx-7900-xt", "rocm", ""),
    ("real, of Intel", _device("Intel(R) Arc(tm) C990", "Vulkan", 16 * GIB), "arc-a770-16gb", "vulkan", ""),
    ("real, integrated", _device("Intel(R) UHD Graphics 770", "Vulkan", 16 * GIB, "igpu"), "radeon-780m", "vulkan", ""),
    ("real, in software", _device("llvmpipe (LLVM 19.1.7, 256 bits)", "Vulkan", 16 * GIB), "radeon-780m", "vulkan", ""),
    ("real, a Mac", _device("Apple M9", "MTL", 96 * GIB, "igpu"), "m1-ultra", "metal", ""),
    ("elsewhere", _device("127.0.0.1:50052", "RPC", 24 * GIB), "rtx-4090", "cuda", ""),
)
def test_a_default_names_its_card(device: DeviceInfo | VirtualDevice, key: str, kind: str, capability: str) -> None:
    speed, card = speed_of(device), gpu_catalogue.gpus()[key]
    assert not speed.known
    assert speed.source.startswith(f"default: as {card.description}, ")
    assert (speed.bandwidth, speed.kind, speed.compute_capability) == (card.bandwidth, kind, capability)


@cases("cuda:8.6:24GiB", "rocm:gfx1100:24GiB", "vulkan:24GiB", "metal:64GiB", "24GiB")
def test_a_device_of_a_virtual_machine_is_the_same(spec: str) -> None:
    (virtual,) = parse_gpus([spec])
    (info,) = virtual_machine([virtual]).devices
    assert speed_of(info).bandwidth == speed_of(virtual).bandwidth
    assert speed_of(info).kind == speed_of(virtual).kind


def test_compute_that_nobody_published_is_estimated() -> None:
    speed = speed_of(_virtual("arc-a380"))
    assert speed.known and speed.source == "catalogue: Intel Arc A380; compute estimated from its bandwidth"
    others = [card for card in gpu_catalogue.gpus().values() if card.profile == "vulkan-anv" and card.compute]
    ratios = sorted((card.compute or 0) / card.bandwidth for card in others)
    assert ratios[0] < speed.compute / speed.bandwidth < ratios[-1]
