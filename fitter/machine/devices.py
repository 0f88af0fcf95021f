"""The machine that a plan is for: this one, or a described one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitter.llama.types import DeviceInfo, VirtualDevice
from fitter.machine.host import HostMemory


@dataclass(frozen=True)
class Machine:
    """Devices that a model can be offloaded to, and host memory in bytes (``None``: unlimited).

    ``virtual`` is empty for a real machine; else there is one for each of ``devices``.
    """

    devices: tuple[DeviceInfo, ...]
    virtual: tuple[VirtualDevice, ...]
    host_total: int | None
    host_free: int | None


def virtual_machine(virtual: Sequence[VirtualDevice], host: int | None = None) -> Machine:
    """A machine of virtual devices; ``host`` bytes of host memory, all of them free, or no limit."""
    devices = tuple(
        DeviceInfo(
            device.name,
            device.description,
            "gpu",
            "fitter",
            device.total,
            device.free,
            virtual=True,
            buffer_type=device.name,
        )
        for device in virtual
    )
    return Machine(devices, tuple(virtual), host, host)


def real_machine(devices: Sequence[DeviceInfo], memory: HostMemory, host: int | None = None) -> Machine:
    """This machine, with the devices that ggml reports except the CPU.

    ``host``: bytes of available host memory, if the user gives them.
    """
    offload = tuple(device for device in devices if device.type in ("gpu", "igpu"))
    if host is None:
        return Machine(offload, (), memory.total, memory.available)
    return Machine(offload, (), max(memory.total, host), host)
