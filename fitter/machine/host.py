"""This machine as its system describes it: memory, a disk's speed, other programs, and GPUs that llama.cpp lacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitter import system
from fitter.errors import Message, Remedy
from fitter.llama.types import DeviceInfo
from fitter.storage import read_data
from fitter.text import MIB

_V1_UNLIMITED = 2**60
"""cgroup v1 reports "no limit" as a number near 2**63."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory. ``available`` is without swapping, with droppable page cache."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of this machine, or of this process's container if that is smaller.

    Args:
        root: Directory of ``proc`` and ``sys``.
    """
    memory = _machine_memory()
    limits = cgroup_limits(root)
    return HostMemory(
        min([memory.total, *(limit.total for limit in limits)]),
        min([memory.available, *(limit.available for limit in limits)]),
    )


def _machine_memory() -> HostMemory:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return HostMemory(*(int(sizes[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    except (OSError, KeyError, ValueError):
        pass
    try:
        # Not Linux, or a /proc that hides it. Imported here, since that is slow.
        import psutil

        memory = psutil.virtual_memory()
        return HostMemory(memory.total, memory.available)
    except OSError:
        # without /proc, available memory does not include the page cache
        return HostMemory(system.physical_memory(), system.free_memory())


def cgroup_limits(root: Path = Path("/")) -> tuple[HostMemory, ...]:
    """Return the memory limits of all control groups of this process (Linux, version 1 or 2); empty on other systems.

    ``available`` is the limit minus the group's memory, without file cache, which the kernel can drop.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    limits = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            of_groups = [_limit_v2(group) for group in _groups(root / "sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            of_groups = [_limit_v1(group) for group in _groups(root / "sys/fs/cgroup/memory", path)]
        else:
            continue
        limits += [limit for limit in of_groups if limit]
    return tuple(limits)


def _groups(mount: Path, path: str) -> list[Path]:
    """Return the directories of a group and its parents.

    In a container whose ``/proc`` shows the host's path, only the mount point exists, and it is the group.
    """
    group = mount / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))] if group != mount else [mount]


def _limit_v2(group: Path) -> HostMemory | None:
    return _limit(
        group / "memory.max", group / "memory.current", group / "memory.stat", ("inactive_file", "active_file")
    )


def _limit_v1(group: Path) -> HostMemory | None:
    return _limit(
        group / "memory.limit_in_bytes",
        group / "memory.usage_in_bytes",
        group / "memory.stat",
        ("total_inactive_file", "total_active_file"),
    )


def _limit(limit: Path, usage: Path, stat: Path, cache: tuple[str, ...]) -> HostMemory | None:
    try:
        # "max" if there is no limit; no files if this process may not read the group
        most = int(limit.read_text())
        used = int(usage.read_text())
        stats = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most >= _V1_UNLIMITED:
        return None
    reclaimable = sum(int(stats.get(key, 0)) for key in cache)
    return HostMemory(most, max(0, min(most, most - used + reclaimable)))


_BLOCK = 8 * MIB
_LEAST_READ = 64 * MIB
"""Least bytes to read: of less, the disk's own cache has much."""
_MOST_READ = 1024 * MIB
_SECONDS = 0.5
"""Seconds after which enough was read."""


def default_disk_bandwidth() -> tuple[float, str]:
    """Return the bandwidth of a common disk, and its source in words."""
    data = read_data(__file__, "disk.toml")
    return float(data["bandwidth"]), str(data["source"])


def disk_bandwidth(path: Path) -> float | None:
    """Measure how fast the end of the file at ``path`` is read, without what the system has of it in memory.

    Returns:
        Bytes per second; ``None`` for a file that is too short, sparse, or cannot be read so.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            size = min(status.st_size // 2, _MOST_READ)
            if size < _LEAST_READ or system.disk_bytes(os.path.realpath(path)) < status.st_size // 2:
                return None
            begin = status.st_size - size
            if not system.drop_cached(file.fileno(), begin, size):
                return None
            file.seek(begin)
            block, done, started = bytearray(_BLOCK), 0, time.perf_counter()
            while done < size:
                count = file.readinto(block)
                if not count:
                    break
                done += count
                if time.perf_counter() - started > _SECONDS and done >= _LEAST_READ:
                    break
            return done / max(1e-6, time.perf_counter() - started)
    except OSError:
        return None


class OtherPrograms:
    """Counts the processor time of all programs but this process and ``pid``, from now on."""

    def __init__(self, pid: int) -> None:
        self._pids = (pid, os.getpid())
        self._began, self._used = time.monotonic(), self._now()

    def share(self) -> float | None:
        """Return their share of all processors until now, from 0 to 1; ``None`` if the system does not say."""
        import psutil

        passed, now = time.monotonic() - self._began, self._now()
        if self._used is None or now is None or passed <= 0:
            return None
        return min(1.0, max(0.0, (now - self._used) / passed / (psutil.cpu_count() or 1)))

    def _now(self) -> float | None:
        # imported here, since that is slow
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            every = psutil.cpu_times()
            # a guest's time is in that of user programs
            idle = (every.idle, *(getattr(every, name, 0.0) for name in ("iowait", "guest", "guest_nice")))
            own = (psutil.Process(pid).cpu_times() for pid in self._pids)
            return float(sum(every) - sum(idle) - sum(each.user + each.system for each in own))
        return None


_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
"""Vendors of GPUs that llama.cpp computes with, by the number on the PCI bus."""

_DISPLAY = "0x03"
"""Beginning of the PCI class of display controllers, with and without a connector."""

_DISPLAY_ONLY = frozenset({("0x1002", "0x515e"), ("0x1002", "0x5969"), ("0x1002", "0x4752")})
"""AMD's graphics of server boards: ES1000 and Rage XL (pci-ids.ucw.cz)."""

_SIGNS = {
    "NVIDIA": (("proc/driver/nvidia/gpus/*",), ("dev/nvhost-gpu",), ("dev/dxg", "usr/lib/wsl/lib/libcuda.so*")),
    "AMD": (("dev/kfd",),),
}
"""Files that drivers make where a GPU is on no visible PCI bus (containers, Jetson, WSL); all of a row exist."""

_BACKENDS = {
    "NVIDIA": ("cuda", "vulkan"),
    "AMD": ("hip", "vulkan"),
    "Intel": ("sycl", "vulkan"),
}
"""ggml's backends for a vendor's GPUs."""

_SETTINGS = {"NVIDIA": "-DGGML_CUDA=on", "AMD": "-DGGML_HIP=on", "Intel": "-DGGML_VULKAN=on"}
"""What llama.cpp is built with for a vendor's GPUs."""

_CHECKS = {"NVIDIA": "nvidia-smi", "AMD": "rocminfo", "Intel": "clinfo"}
"""Programs that show whether a vendor's driver works."""


def unused_gpus(devices: Sequence[DeviceInfo], backends: Callable[[], Collection[str]], root: Path = Path("/")) -> str:
    """Say that this machine has a GPU and llama.cpp no device for it; empty if it has one, or there is no GPU.

    Args:
        devices: llama.cpp's devices.
        backends: Lists the names of its ggml backends; called only where there is a GPU.
        root: Directory of ``sys``, ``proc`` and ``dev``.
    """
    if any(device.type in ("gpu", "igpu") for device in devices):
        return ""
    there = vendors(root)
    if not there:
        return ""
    vendor = there[0]
    names = backends()
    if present := [name for name in _BACKENDS[vendor] if name in names]:
        return (
            f"this machine has a GPU of {vendor}, but llama.cpp's backend {present[0]} finds no device: look whether "
            f"its driver works ({_CHECKS[vendor]}), and whether a variable such as CUDA_VISIBLE_DEVICES hides it"
        )
    return Message(
        f"this machine has a GPU of {vendor}, but this llama.cpp has no backend for it: build it anew with "
        f'CMAKE_ARGS="{_SETTINGS[vendor]}" pip install --force-reinstall --no-cache-dir llama-cpp-python',
        Remedy(", or name another one with --llama-cpp", "llama_cpp"),
    )


def vendors(root: Path = Path("/")) -> tuple[str, ...]:
    """List the vendors of this machine's GPUs, those first whose backends are the fastest."""
    there = {*_on_pci(root), *(vendor for vendor, rows in _SIGNS.items() if any(_all_exist(root, row) for row in rows))}
    return tuple(vendor for vendor in _BACKENDS if vendor in there)


def _on_pci(root: Path) -> Iterator[str]:
    for card in root.glob("sys/bus/pci/devices/*"):
        if not _text(card / "class").startswith(_DISPLAY):
            continue
        vendor = _text(card / "vendor")
        # Intel's graphics inside a processor, at bus 00, are hardly faster than the processor
        is_built_in = vendor == "0x8086" and card.name.split(":")[1:2] == ["00"]
        if vendor in _VENDORS and not is_built_in and (vendor, _text(card / "device")) not in _DISPLAY_ONLY:
            yield _VENDORS[vendor]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _all_exist(root: Path, patterns: Sequence[str]) -> bool:
    return all(any(root.glob(pattern)) for pattern in patterns)
