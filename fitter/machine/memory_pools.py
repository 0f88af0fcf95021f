"""Memory pools that devices and the host share, on this machine and on described ones. Bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fitter.llama.types import RPC, DeviceInfo, SharedMemory, VirtualDevice
from fitter.machine.device_memory import system_of_device
from fitter.machine.host import HostMemory

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
    sharing = [device for device in virtual if device.shared is not None]
    # a machine has one memory, so its devices agree
    memories = [device.shared for device in sharing if device.shared is not None]
    return (Pool(tuple(device.name for device in sharing), memories[0]),) if memories else ()


def pools_here(devices: Sequence[DeviceInfo], host: HostMemory, root: Path = Path("/")) -> tuple[Pool, ...]:
    """Return the pool of this machine; none if every device has memory of its own.

    Args:
        devices: The devices.
        host: Host memory.
        root: Directory of ``sys``.
    """
    systems = {device: system_of_device(device) for device in devices if device.backend != RPC}
    sharing = {device: system for device, system in systems.items() if system is not None}
    if not sharing:
        return ()
    first, system = next(iter(sharing.items()))
    carved, carved_free = set_aside(first.total, root) if system == "amdgpu" else (0, 0)
    memory = SharedMemory(host.total + carved, host.available + carved_free, carved, system)
    return (Pool(tuple(device.name for device in sharing), memory),)


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
