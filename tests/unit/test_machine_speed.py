"""How fast a device is taken to be, by what its driver calls it."""

from __future__ import annotations

import pytest

from fitter.llama.types import DeviceInfo, VirtualDevice
from fitter.machine import gpu_catalogue
from fitter.machine.gpu import parse_gpus
from fitter.machine.machine import virtual_machine
from fitter.machine.speed import named, speed_of
from tests.support.cases import cases, named_cases, stored_rows

GIB = 2**30
MIB = 2**20

NAMES = {
    # what ggml reports as description: the backend, and the card that it is
    "NVIDIA GeForce RTX 4090": ("CUDA", 24077, "rtx-4090"),
    "NVIDIA GeForce RTX 4090 D": ("CUDA", 24077, "rtx-4090-d"),
    "NVIDIA GeForce RTX 4090 Laptop GPU": ("CUDA", 16000, "rtx-4090-laptop"),
    "NVIDIA GeForce RTX 3060": ("CUDA", 11900, "rtx-3060-12gb"),
    "GeForce GTX 1080 Ti": ("CUDA", 11172, "gtx-1080-ti"),
    "Tesla P40": ("CUDA", 24438, "tesla-p40"),
    "Tesla V100-SXM2-16GB": ("CUDA", 16144, "tesla-v100-16gb"),
    "Tesla T4": ("CUDA", 14930, "tesla-t4"),
    "NVIDIA A100-SXM4-40GB": ("CUDA", 40337, "a100-40gb"),
    "NVIDIA A100-SXM4-80GB": ("CUDA", 81038, "a100-80gb"),
    "NVIDIA A100 80GB PCIe": ("CUDA", 81038, "a100-80gb-pcie"),
    "NVIDIA H100 80GB HBM3": ("CUDA", 81081, "h100-sxm"),
    "NVIDIA H100 PCIe": ("CUDA", 81081, "h100-pcie"),
    "NVIDIA GH200 480GB": ("CUDA", 97871, "gh200"),
    "NVIDIA RTX 6000 Ada Generation": ("CUDA", 48508, "rtx-6000-ada"),
    "NVIDIA RTX A6000": ("CUDA", 48000, "rtx-a6000"),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": ("CUDA", 97000, "rtx-pro-6000-blackwell"),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": ("CUDA", 97000, "rtx-pro-6000-max-q"),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("CUDA", 97000, "rtx-pro-6000-server"),
    "NVIDIA GB10": ("CUDA", 122000, "dgx-spark"),
    "Orin": ("CUDA", 62800, "jetson-agx-orin-64gb"),
    "AMD Radeon RX 7900 XTX": ("ROCm", 24560, "rx-7900-xtx"),
    "AMD Radeon RX 7900 XTX (RADV NAVI31)": ("Vulkan", 24560, "rx-7900-xtx"),
    "AMD Radeon RX 7900 XT (RADV NAVI31)": ("Vulkan", 20464, "rx-7900-xt"),
    "AMD Radeon RX 6700 XT (RADV NAVI22)": ("Vulkan", 12272, "rx-6700-xt"),
    "AMD Radeon RX 9070 XT (RADV GFX1201)": ("Vulkan", 16304, "rx-9070-xt"),
    "AMD Radeon Pro W7900 (RADV NAVI31)": ("Vulkan", 49136, "w7900"),
    "AMD Radeon(TM) RX 6800 XT": ("Vulkan", 16368, "rx-6800-xt"),
    "AMD Instinct MI210": ("ROCm", 65520, "mi210"),
    "AMD Instinct MI250X / MI250": ("ROCm", 65520, "mi250x"),
    "AMD Instinct MI60 / MI50": ("ROCm", 32752, "mi50-32gb"),
    "AMD Instinct MI300X": ("ROCm", 196592, "mi300x"),
    "AMD Radeon 8060S": ("ROCm", 98304, "strix-halo"),
    "Radeon 8060S Graphics (RADV GFX1151)": ("Vulkan", 65536, "strix-halo"),
    "AMD Radeon Graphics (RADV GFX1151)": ("Vulkan", 110000, "strix-halo"),
    "Intel(R) Arc(tm) Graphics (MTL)": ("Vulkan", 23592, "arc-meteor-lake"),
    "Intel(R) Arc(tm) Graphics (LNL)": ("Vulkan", 23592, "arc-140v"),
    "NVIDIA Thor": ("CUDA", 125829, "jetson-agx-thor"),
    "AMD Radeon 780M Graphics (RADV PHOENIX)": ("Vulkan", 16384, "radeon-780m"),
    "Intel(R) Arc(tm) A770 Graphics (DG2)": ("Vulkan", 16288, "arc-a770-16gb"),
    "Intel(R) Arc(TM) B580 Graphics": ("Vulkan", 12216, "arc-b580"),
    "Intel(R) Arc(tm) B580 Graphics (BMG G21)": ("Vulkan", 12216, "arc-b580"),
    "Intel(R) Arc(TM) Pro B60 Graphics": ("SYCL", 24000, "arc-pro-b60"),
    "Apple M1": ("Metal", 10922, "m1"),
    "Apple M2 Ultra": ("MTL", 147456, "m2-ultra"),
    "Apple M4 Pro": ("Metal", 18186, "m4-pro"),
}


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
