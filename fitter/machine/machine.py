"""The machine of a plan: this one, or a described one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fitter.errors import UsageError
from fitter.llama.types import RPC, DeviceInfo, MeasuredSpeed, VirtualDevice
from fitter.machine import gpu_catalogue
from fitter.machine.device_memory import Pool, described_pools, pools_here, typed, with_page_cache
from fitter.machine.host import HostMemory, host_memory
from fitter.machine.speed import DeviceSpeed, HostSpeed, default_host, host_of_gpu, speed_of
from fitter.text import MIB, mib, mib_up


@dataclass(frozen=True)
class Machine:
    """Devices for offloading, and host memory in bytes (``None``: unlimited).

    Attributes:
        devices: The devices.
        virtual: A virtual device for each of them; empty for a real machine.
        host_total: Host memory.
        host_free: Free host memory.
        pools: Host memory that devices share.
    """

    devices: tuple[DeviceInfo, ...]
    virtual: tuple[VirtualDevice, ...]
    host_total: int | None
    host_free: int | None
    pools: tuple[Pool, ...] = ()


def virtual_machine(virtual: Sequence[VirtualDevice], host: int | None = None) -> Machine:
    """Describe a machine of virtual devices.

    Args:
        virtual: The devices.
        host: Bytes of free host memory; ``None`` for no limit, or for all memory that a device shares with the host.
    """
    devices = tuple(
        DeviceInfo(
            device.name,
            device.description,
            device.type,
            "fitter",
            device.total,
            device.free,
            virtual=True,
            buffer_type=device.name,
        )
        for device in virtual
    )
    pools = described_pools(virtual)
    if not pools:
        return Machine(devices, tuple(virtual), host, host)
    memory = pools[0].memory
    total, free = memory.total - memory.carved, max(0, memory.free - memory.carved)
    card = next((card for each in virtual if each.shared and (card := gpu_catalogue.find(each.description))), None)
    _check_host(host, total, pools, card.key if card and not card.carved else "")
    return Machine(devices, tuple(virtual), total, free if host is None else min(host, free), pools)


def real_machine(devices: Sequence[DeviceInfo], memory: HostMemory, host: int | None = None) -> Machine:
    """Describe this machine, with all of ggml's devices but the CPU.

    Args:
        devices: The devices that ggml reports.
        memory: Host memory.
        host: Available bytes of host memory, if the user sets them.
    """
    offload = with_page_cache([device for device in devices if device.type in ("gpu", "igpu")], memory)
    pools = pools_here(offload, memory)
    if host is None:
        return Machine(offload, (), memory.total, memory.available, pools)
    if pools:
        _check_host(host, memory.total, pools)
        return Machine(offload, (), memory.total, min(host, memory.available), pools)
    return Machine(offload, (), max(memory.total, host), host, pools)


def _check_host(host: int | None, total: int, pools: Sequence[Pool], card: str = "") -> None:
    """Raise ``UsageError`` if ``host`` exceeds the memory that devices share with the host; ``card`` has any size."""
    if host is not None and host > total:
        size = f"{mib_up(host)}MiB" if host % (1024 * MIB) else f"{host // (1024 * MIB)}GiB"
        sized = f"write --gpu {card}:{size} for a machine with so much, " if card else ""
        raise UsageError(
            f"--host-memory is {mib_up(host)} MiB, and {pools[0].name} share {mib(total)} MiB: {sized}leave it out, or "
            "give the most that the host's own part may take of them"
        )


def described(devices: Sequence[DeviceInfo], virtual: Sequence[VirtualDevice] = ()) -> tuple[DeviceInfo, ...]:
    """Return the devices of a described machine: virtual and remote ones, with the types of real devices."""
    return typed([device for device in devices if device.virtual or device.backend == RPC], virtual)


def machine_of(
    devices: Callable[[], Sequence[DeviceInfo]],
    virtual: Sequence[VirtualDevice],
    host: int | None,
    *,
    is_described: bool,
    has_rpc: bool,
) -> Machine:
    """Describe this machine, or the user's.

    Args:
        devices: Asks llama.cpp for its devices; called only if some of them may belong to the machine.
        virtual: The described devices.
        host: Bytes of host memory, if set.
        is_described: Whether the user describes a machine.
        has_rpc: Whether there are rpc-servers.
    """
    if not is_described:
        return real_machine(devices(), host_memory(), host)
    infos = devices() if virtual or has_rpc else ()
    return replace(virtual_machine(virtual, host), devices=described(infos, virtual))


def choose(devices: Sequence[DeviceInfo], names: Sequence[str] | None) -> tuple[DeviceInfo, ...]:
    """Return the named devices, in the order of ``names`` (``none`` for none); all devices without names.

    Raises:
        UsageError: A name is unknown or repeated.
    """
    if names is None:
        return tuple(devices)
    if [name.lower() for name in names] == ["none"]:
        return ()
    by_name = {device.name: device for device in devices}
    for name in names:
        if name not in by_name:
            raise UsageError(f"unknown device '{name}'; there are: {', '.join(by_name) or 'none'}")
    if len(set(names)) != len(names):
        raise UsageError("a device is named twice: leave one out")
    return tuple(by_name[name] for name in names)


def check_main_gpu(main_gpu: int, devices: Sequence[object]) -> None:
    """Raise ``UsageError`` if the main GPU does not exist."""
    if main_gpu >= len(devices):
        raise UsageError(f"main GPU {main_gpu} does not exist: the number of devices is {len(devices)}, counted from 0")


def device_speeds(
    infos: Sequence[DeviceInfo],
    every: Sequence[DeviceInfo],
    virtual: Sequence[VirtualDevice],
    measure: Callable[[str, int, float], MeasuredSpeed],
    remote_bandwidths: Sequence[float] = (),
) -> dict[str, DeviceSpeed]:
    """Return the speed of each device in ``infos``, by name; ``fitter.machine.bandwidth`` measures remote ones.

    Args:
        infos: The devices.
        every: All devices of the machine.
        virtual: The described devices.
        measure: Measures a remote device.
        remote_bandwidths: The user's bandwidths of remote devices.
    """
    by_name = {device.name: device for device in virtual}
    speeds = {info.name: speed_of(by_name.get(info.name, info)) for info in infos}
    if any(info.backend == RPC for info in infos):
        from fitter.machine.bandwidth import remote_speeds

        speeds |= remote_speeds(infos, every, measure, remote_bandwidths)
    return speeds


def speed_of_host(given: float | str | None, *, is_described: bool, virtual: Sequence[VirtualDevice] = ()) -> HostSpeed:
    """Return the host's speed: the user's, this machine's (measured), or the default of a described machine.

    A host that shares its memory with a virtual device reads it as fast. Raises ``UsageError``.
    """
    if given is None and is_described:
        # another machine's host cannot be measured
        unified = [device for device in virtual if device.shared is not None]
        return host_of_gpu(unified[0]) if unified else default_host()
    from fitter.machine import bandwidth

    if given is None:
        return bandwidth.host_speed()
    speed = bandwidth.given_speed(given if isinstance(given, str) else f"{given:.0f}")
    return speed if is_described else replace(speed, threads=bandwidth.this_host().cores)
