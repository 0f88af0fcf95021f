"""Memory that devices share with the host: of which machines, how much of it, and what a GPU may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo, SharedMemory, VirtualDevice
from fitter.machine import device_memory
from fitter.machine.device_memory import pools_here, set_aside, typed, used_by_default
from fitter.machine.gpu import parse_gpus
from fitter.machine.host import HostMemory
from fitter.machine.machine import Machine, machine_of, real_machine, speed_of_host, virtual_machine
from fitter.machine.speed import default_host
from tests.support.cases import named_cases

MIB, GIB = 2**20, 2**30
HOST = HostMemory(31 * GIB, 28 * GIB)


def device(name: str, type: str = "gpu", backend: str = "", total: int = 16 * GIB) -> DeviceInfo:
    return DeviceInfo(name, f"{name} of a maker", type, backend or name.rstrip("0123456789"), total, total)


@named_cases(
    ("a card", [device("CUDA0")], None),
    ("a card of another machine", [device("RPC0", "gpu", "RPC")], None),
    ("a Mac", [device("MTL0")], ("MTL0+host", "metal")),
    ("a Mac, through an older backend", [device("Metal", backend="Metal")], ("Metal+host", "metal")),
    ("a Jetson", [device("CUDA0", "igpu", "CUDA")], ("CUDA0+host", "cuda")),
    ("a processor's, with ROCm", [device("ROCm0", "igpu", "ROCm")], ("ROCm0+host", "amdgpu")),
    ("a processor's, with Vulkan", [device("Vulkan0", "igpu")], ("Vulkan0+host", "amdgpu")),
    ("beside a card", [device("CUDA0"), device("Vulkan0", "igpu")], ("Vulkan0+host", "amdgpu")),
    ("beside a server", [device("RPC0", "gpu", "RPC"), device("MTL0")], ("MTL0+host", "metal")),
    ("one that is seen twice", [device("MTL0"), device("MTL1")], ("MTL0+MTL1+host", "metal")),
)
def test_the_pool_of_this_machine(devices: list[DeviceInfo], expected: tuple[str, str] | None, tmp_path: Path) -> None:
    found = pools_here(devices, HOST, tmp_path)
    assert [(pool.name, pool.memory.system) for pool in found] == ([expected] if expected else [])
    assert all((pool.memory.total, pool.memory.free) == (HOST.total, HOST.available) for pool in found)


NAMED = {"Intel(R) Arc(tm) Graphics (LNL)": "anv", "NVIDIA GB10": "cuda", "AMD Radeon 890M (RADV GFX1150)": "amdgpu"}


@pytest.mark.parametrize(("description", "system"), NAMED.items(), ids=NAMED)
def test_with_vulkan_a_maker_is_told_by_its_name(tmp_path: Path, description: str, system: str) -> None:
    shared = DeviceInfo("Vulkan0", description, "igpu", "Vulkan", 8 * GIB, 8 * GIB)
    assert pools_here([shared], HOST, tmp_path)[0].memory.system == system


MIB_OF_SPARK = (124610, 42516, 118425)
"""MemTotal, MemFree and MemAvailable of a DGX Spark that has just written 60 GB: unslothai/unsloth#10704."""


@named_cases(
    # type, backend, description, MiB that the backend reports and that a plan takes
    ("what CUDA reports", "igpu", "CUDA", "NVIDIA GB10", 42516, 118425),
    ("what ggml-cuda reports on Linux", "igpu", "CUDA", "NVIDIA GB10", 118425, 118425),
    ("with Vulkan", "igpu", "Vulkan", "NVIDIA GB10", 42516, 118425),
    ("a card", "gpu", "CUDA", "NVIDIA GeForce RTX 4090", 20000, 20000),
    ("an AMD processor's", "igpu", "Vulkan", "AMD Radeon 890M", 20000, 20000),
    ("a Spark behind RPC", "igpu", "RPC", "NVIDIA GB10", 42516, 42516),
)
def test_the_page_cache_of_shared_memory_is_free(
    type: str, backend: str, description: str, says: int, free: int
) -> None:
    total, _, available = (each * MIB for each in MIB_OF_SPARK)
    info = DeviceInfo("D0", description, type, backend, total, says * MIB)
    (found,) = real_machine([info], HostMemory(total, available)).devices
    assert found.free == free * MIB


def sysfs(root: Path, **mib: tuple[int, int, int]) -> None:
    for card, sizes in mib.items():
        directory = root / "sys/class/drm" / card / "device"
        directory.mkdir(parents=True)
        for name, size in zip(("vram_total", "vram_used", "gtt_total"), sizes, strict=True):
            (directory / f"mem_info_{name}").write_text(f"{size * MIB}\n")


@named_cases(
    # what the driver reports in MiB, and of it what is set aside and free
    ("both", 512 + 15872, (512, 412)),
    ("what Linux lends alone", 15872, (512, 412)),
    ("almost the same", 16000, (512, 412)),
    ("another card", 24000, (24000, 23000)),
    ("none of them", 9000, (0, 0)),
)
def test_what_the_firmware_has_set_aside(total: int, expected: tuple[int, int], tmp_path: Path) -> None:
    sysfs(tmp_path, card0=(24000, 1000, 12000), card1=(512, 100, 15872))
    assert set_aside(total * MIB, tmp_path) == (expected[0] * MIB, expected[1] * MIB)


def test_what_is_set_aside_is_no_part_of_the_hosts_memory(tmp_path: Path) -> None:
    sysfs(tmp_path, card0=(96 * 1024, 1024, 16 * 1024))
    (pool,) = pools_here([device("ROCm0", "igpu", total=96 * GIB)], HOST, tmp_path)
    assert pool.memory == SharedMemory(127 * GIB, 123 * GIB, 96 * GIB, "amdgpu")


@named_cases(
    ("a card", ["gpu"], [0]),
    ("a processor's", ["igpu"], [0]),
    ("both", ["igpu", "gpu"], [1]),
    ("beside a server", ["remote", "igpu"], [0, 1]),
    ("all", ["remote", "igpu", "gpu"], [0, 2]),
)
def test_what_llama_cpp_uses(kinds: list[str], used: list[int]) -> None:
    devices = [
        device(f"D{i}", "gpu" if kind == "remote" else kind, "RPC" if kind == "remote" else "D")
        for i, kind in enumerate(kinds)
    ]
    assert used_by_default(devices) == tuple(devices[i] for i in used)


def test_virtual_devices_have_the_types_of_real_ones() -> None:
    virtual = parse_gpus(["strix-halo", "rtx-4090"])
    found = [DeviceInfo(each.name, "", "gpu", "fitter", 0, 0, virtual=True) for each in virtual]
    assert [each.type for each in typed([*found, device("CUDA7")], virtual)] == ["igpu", "gpu", "gpu"]
    assert [each.type for each in virtual_machine(virtual).devices] == ["igpu", "gpu"]
    assert parse_gpus(["metal:64GiB"])[0].type == "gpu"


def described(*specs: str, host: int | None = None) -> Machine:
    virtual = parse_gpus(specs)
    return machine_of(lambda: (), virtual, host, is_described=True, has_rpc=False)


@named_cases(
    # total and free MiB of the host, name of the pool
    ("a Mac", ["metal:64GiB"], None, (65536, 61440), "MTL0+host"),
    ("a Mac whose host is limited", ["metal:64GiB"], 8 * GIB, (65536, 8192), "MTL0+host"),
    ("all of it", ["metal:64GiB"], 64 * GIB, (65536, 61440), "MTL0+host"),
    ("what is available", ["m5:24GiB:available=10GiB"], None, (24576, 10240), "MTL0+host"),
    ("with memory set aside", ["strix-halo-96gb"], None, (32768, 27525), "ROCm0+host"),
    ("beside a card", ["radeon-890m:32GiB", "rtx-4060"], None, (32768, 31457), "Vulkan0+host"),
)
def test_a_described_machines_host(specs: list[str], limit: int | None, sizes: tuple[int, int], name: str) -> None:
    machine = described(*specs, host=limit)
    assert machine.host_total is not None and machine.host_free is not None
    assert (machine.host_total // MIB, machine.host_free // MIB) == sizes
    assert [pool.name for pool in machine.pools] == [name]


@named_cases(
    ("a Mac", ["metal:64GiB"], 65536, ""),
    ("memory set aside", ["strix-halo-96gb"], 32768, ""),
    ("a card of any size", ["radeon 780m"], 32768, "write --gpu radeon-780m:32769MiB for a machine with so much, "),
)
def test_a_host_with_more_than_it_shares_is_refused(specs: list[str], total: int, sized: str) -> None:
    pool = described(*specs).pools[0].name
    with pytest.raises(UsageError) as raised:
        described(*specs, host=total * MIB + 1)
    assert str(raised.value) == (
        f"--host-memory is {total + 1} MiB, and {pool} share {total} MiB: {sized}leave it out, or give the most that "
        "the host's own part may take of them"
    )


def test_the_host_of_this_machine_shares_what_there_is() -> None:
    mac = [device("MTL0", backend="MTL")]
    assert real_machine(mac, HOST, HOST.total).host_free == HOST.available
    assert real_machine(mac, HOST, GIB).host_free == GIB
    with pytest.raises(UsageError, match=r"^--host-memory is "):
        real_machine(mac, HOST, HOST.total + MIB)


def test_without_such_a_gpu_nothing_changes() -> None:
    machine = described("rtx-4090")
    assert (machine.host_total, machine.host_free, machine.pools) == (None, None, ())
    assert real_machine([device("CUDA0")], HOST).pools == ()


@named_cases(("two alike", ["2x dgx-spark"]), ("two kinds", ["metal:64GiB", "strix-halo"]))
def test_a_machine_has_one_memory(specs: list[str]) -> None:
    with pytest.raises(UsageError, match=r"^--gpu describes 2 GPUs that share memory with the processor \(.*--rpc$"):
        parse_gpus(specs)


REFUSED = {
    "metal:64GiB:free=80GiB": "free= is more than the machine's 65536 MiB of memory",
    "dgx-spark:available=200GiB": "available= is more than the machine's 121856 MiB of memory",
    "rtx-4090:available=20GiB": "available= is for a GPU that uses the machine's memory: write free=SIZE",
    "metal:64GiB:available=1GiB:available=2GiB": "available= is given twice",
    "metal:64GiB:cores=3": "unknown option 'cores'; there are free=SIZE and available=SIZE",
    "metal:0GiB": "a device must have memory",
    "metal:64GiB:available=0GiB": "a device must have memory",
    "strix-halo-96gb:96GiB": "98304 MiB are set aside for the GPU: the machine must have more memory",
}


@pytest.mark.parametrize(("spec", "says"), REFUSED.items(), ids=REFUSED)
def test_a_memory_that_cannot_be(spec: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gpus([spec])
    assert str(caught.value) == f"--gpu '{spec}': {says}"


SPEEDS = {
    # GB/s, whether it is known
    "dgx-spark": (273, True),
    "m1-max:64GiB": (243, True),
    "m2-ultra": (800, True),
    "metal:64GiB": (400, False),
}


@pytest.mark.parametrize(("spec", "expected"), SPEEDS.items(), ids=SPEEDS)
def test_a_host_reads_the_same_memory(spec: str, expected: tuple[float, bool]) -> None:
    found = speed_of_host(None, is_described=True, virtual=parse_gpus([spec]))
    assert (found.bandwidth / 1e9, found.known) == expected


def test_a_host_of_its_own_has_the_default() -> None:
    assert speed_of_host(None, is_described=True, virtual=parse_gpus(["rtx-4090"])) == default_host()
    assert speed_of_host("50GB/s", is_described=True, virtual=parse_gpus(["dgx-spark"])).bandwidth == 50e9


def test_every_system_has_what_is_said_of_it() -> None:
    for system in ("metal", "cuda", "amdgpu", "anv"):
        limit = device_memory.limit_of(system)
        assert "https://" in limit.source
        assert (limit.setting is None) == (limit.lasts == "") == (limit.risk == "")
        assert 0 < device_memory.usable(system, 64 * GIB) <= 64 * GIB
        assert 0.9 * 64 * GIB < device_memory.available(system, 64 * GIB) < 64 * GIB
    assert device_memory.limit_of("metal").set_to(56 * GIB) == "sudo sysctl iogpu.wired_limit_mb=57344"


def test_a_device_that_was_made_by_hand_has_its_own() -> None:
    assert VirtualDevice("MTL0", "Apple M5", "metal", 0, GIB, GIB).shared is None
