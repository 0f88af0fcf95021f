"""Memory of devices: pools shared with the host, bytes beyond llama.cpp's count, and drivers that spill. Bytes.

``unified_memory.toml``, ``unaccounted.toml`` and ``spilling.toml`` have the figures and their sources.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitter.llama.types import RPC, DeviceInfo, SharedMemory, TensorInfo, VirtualDevice
from fitter.machine.host import HostMemory
from fitter.storage import read_data
from fitter.text import MIB, human

_ALIKE = 0.06
"""Allowed deviation of a driver's report from Linux's for the same GPU, as a share."""


@dataclass(frozen=True)
class Pool:
    """Memory that ``devices`` share with the host."""

    devices: tuple[str, ...]
    memory: SharedMemory

    @property
    def name(self) -> str:
        """Its name, such as ``MTL0+host``."""
        return "+".join((*self.devices, "host"))


def described_pools(virtual: Sequence[VirtualDevice]) -> tuple[Pool, ...]:
    """Return the pool of a described machine; none if every device has memory of its own."""
    unified = [device for device in virtual if device.shared is not None]
    # a machine has one memory, so its devices agree
    memories = [device.shared for device in unified if device.shared is not None]
    return (Pool(tuple(device.name for device in unified), memories[0]),) if memories else ()


def pools_here(devices: Sequence[DeviceInfo], host: HostMemory, root: Path = Path("/")) -> tuple[Pool, ...]:
    """Return the pool of this machine; none if every device has memory of its own.

    Args:
        devices: The devices.
        host: Host memory.
        root: Directory of ``sys``.
    """
    systems = {device: system_of_device(device) for device in devices if device.backend != RPC}
    unified = {device: system for device, system in systems.items() if system is not None}
    if not unified:
        return ()
    first, system = next(iter(unified.items()))
    carved, carved_free = set_aside(first.total, root) if system == "amdgpu" else (0, 0)
    memory = SharedMemory(host.total + carved, host.available + carved_free, carved, system)
    return (Pool(tuple(device.name for device in unified), memory),)


def with_page_cache(devices: Sequence[DeviceInfo], host: HostMemory) -> tuple[DeviceInfo, ...]:
    """Count the page cache as free memory of NVIDIA devices that share the host's memory.

    Linux takes it back when they allocate, but ``cudaMemGetInfo`` reports ``MemFree``. ggml-cuda reports
    ``MemAvailable`` instead on Linux (``ggml_backend_cuda_device_get_memory``, llama.cpp's #17368), other backends not.
    """
    return tuple(
        replace(device, free=max(device.free, min(device.total, host.available)))
        if system_of_device(device) == "cuda" and device.backend != RPC
        else device
        for device in devices
    )


def set_aside(total: int, root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes that the firmware reserves for an AMD GPU, and how many of them are free.

    Linux does not count them as its own memory. The GPU is recognized by its ``total`` in the driver's report.
    """
    for device in sorted(root.glob("sys/class/drm/card*/device")):
        with contextlib.suppress(OSError, ValueError):
            carved, used, lent = (
                int((device / f"mem_info_{name}").read_text()) for name in ("vram_total", "vram_used", "gtt_total")
            )
            if any(abs(size - total) <= _ALIKE * total for size in (carved, lent, carved + lent)):
                return carved, max(0, carved - used)
    return 0, 0


def typed(devices: Sequence[DeviceInfo], virtual: Sequence[VirtualDevice]) -> tuple[DeviceInfo, ...]:
    """Give virtual devices the types of the real ones; ggml reports one type for all of them."""
    types = {device.name: device.type for device in virtual}
    return tuple(replace(d, type=types.get(d.name, d.type)) if d.virtual else d for d in devices)


def used_by_default(devices: Sequence[DeviceInfo]) -> tuple[DeviceInfo, ...]:
    """Return the devices that llama.cpp uses by default: an integrated GPU only if it is the only GPU.

    Remote devices do not count as other GPUs (``llama_prepare_model_devices``).
    """
    has_own = any(device.type == "gpu" and device.backend != RPC for device in devices)
    return tuple(device for device in devices if device.type != "igpu" or not has_own)


_PROFILES = {"CUDA": "cuda", "ROCm": "rocm", "HIP": "rocm", "Vulkan": "vulkan", "MTL": "metal", "Metal": "metal"}
"""Profile of each of ggml's backends."""

_HALF = "bf16"


def has_half_experts(experts: Iterable[TensorInfo]) -> bool:
    """Return whether ``experts`` have 16-bit weights, which need work spaces on the device that computes with them."""
    return any(tensor.type.lower() == _HALF for tensor in experts)


def kind_of(device: DeviceInfo, virtual: Iterable[VirtualDevice]) -> str | None:
    """Return the profile of a virtual or real device; ``None`` if there is none."""
    if not device.virtual:
        return _PROFILES.get(device.backend)
    return next((each.profile for each in virtual if each.name == device.name), None)


def unaccounted(device: DeviceInfo, virtual: Iterable[VirtualDevice], *, halves: bool) -> int | None:
    """Return the most bytes measured on devices of this kind; ``None`` if there is no measurement.

    Args:
        device: The device.
        virtual: The described devices.
        halves: Whether 16-bit experts may be on the host.
    """
    profile = kind_of(device, virtual)
    return max(
        (mib * MIB for kind, is_wide, mib in _measured() if kind == profile and (halves or not is_wide)), default=None
    )


@functools.cache
def _measured() -> tuple[tuple[str, bool, int], ...]:
    return tuple(
        (row["profile"], row["halves"], row["mib"]) for row in read_data(__file__, "unaccounted.toml")["measured"]
    )


def spilling_notes(cards: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """Note the cards that a plan nearly fills.

    Args:
        cards: Name, total and left memory of each.
    """
    data = read_data(__file__, "spilling.toml")
    return tuple(
        f"{name} has only {human(left)} left: if other programs take it, Windows' driver moves a part of the model to "
        "the host's shared memory without an error, and the card becomes far slower; raise --fit-target, or forbid it "
        "in the driver's settings (NVIDIA: CUDA - Sysmem Fallback Policy)"
        for name, total, left in cards
        if left < min(total * data["part"], data["most"])
    )


_STEP = 2**14
"""Page size of a Mac; limits are whole pages."""

_PAGE = 4096
"""Page size in which Linux counts the memory that a GPU may map (``ttm.pages_limit``)."""


@dataclass(frozen=True)
class Limit:
    """The limit of a GPU's part of the memory.

    Attributes:
        setting: The command that raises it, with ``{mib}`` or ``{pages}``; ``None`` if nothing does.
        lasts: How long the setting lasts.
        risk: Its risk.
        source: Source of the default limit.
    """

    setting: str | None
    lasts: str
    risk: str
    source: str

    def set_to(self, size: int) -> str | None:
        """Return the command for a limit of ``size`` bytes."""
        return None if self.setting is None else self.setting.format(mib=size // MIB, pages=size // _PAGE)


def limit_of(system: str) -> Limit:
    """Return the limit on machines with this ``SharedMemory.system``."""
    entry = _unified()[system]
    return Limit(entry.get("setting"), entry.get("lasts", ""), entry.get("risk", ""), entry["source"])


def system_of(profile: str) -> str:
    """Return the system that limits a GPU of this profile."""
    kind, _, driver = profile.partition("-")
    if kind in ("metal", "cuda"):
        return kind
    return "anv" if driver == "anv" else "amdgpu"


def system_of_device(device: DeviceInfo) -> str | None:
    """Return the system that limits a device of this machine; ``None`` if it has memory of its own.

    An Apple M has ggml's type ``gpu``; all other devices that share the host's memory are ``igpu``.
    """
    if device.backend in ("MTL", "Metal"):
        return "metal"
    if device.type != "igpu":
        return None
    if device.backend == "CUDA" or "nvidia" in device.description.lower():
        return "cuda"
    return "anv" if "intel" in device.description.lower() else "amdgpu"


def usable(system: str, memory: int, carved: int = 0) -> int:
    """Return the bytes of ``memory`` that the system lets a GPU use; ``carved`` bytes are reserved for it."""
    share = _unified()[system]["share"]
    part, whole = share["large" if memory >= share["large_gib"] * 2**30 else "small"].split("/")
    # macOS and CUDA give a share of all memory, Linux a share of its own
    of = memory if system in ("metal", "cuda") else available(system, memory - carved)
    # ROCm uses either the reserved memory or Linux's share, Vulkan both: count on one of them
    return max(carved, of * int(part) // int(whole)) // _STEP * _STEP


def available(system: str, memory: int) -> int:
    """Return the bytes of ``memory`` that an idle system leaves to programs and the GPU."""
    entry = _unified()[system]
    left = memory - entry["takes_mib"] * MIB if "takes_mib" in entry else int(memory * entry["available"])
    return max(0, left) // MIB * MIB


def free(system: str, memory: int, carved: int = 0) -> int:
    """Return the bytes that llama.cpp finds free on the GPU of an idle machine; ggml-metal always reports the limit."""
    limit = usable(system, memory, carved)
    if system == "metal":
        return limit
    return available(system, carved) if carved == limit else min(limit, available(system, memory))


def unified_memory(system: str, memory: int, carved: int = 0) -> SharedMemory:
    """Describe the memory of a virtual machine."""
    return SharedMemory(memory, available(system, memory), carved, system)


def processor_bandwidth(gpu: str) -> float | None:
    """Return the measured bytes per second of the processor beside a GPU of the catalogue; ``None`` if not measured."""
    return next((row["gbs"] * 1e9 for row in _unified()["processor"] if row["gpu"] == gpu), None)


@functools.cache
def _unified() -> dict[str, Any]:
    return read_data(__file__, "unified_memory.toml")
