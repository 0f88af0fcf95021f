"""The machine that a plan is for: this one, or a described one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fitter.errors import UsageError
from fitter.llama.types import RPC, DeviceInfo, MeasuredSpeed, VirtualDevice
from fitter.machine.host import HostMemory, host_memory
from fitter.machine.memory_pools import Pool, described_pools, pools_here, typed
from fitter.machine.speed import DeviceSpeed, HostSpeed, default_host, host_of_gpu, speed_of
from fitter.text import mib, mib_up


@dataclass(frozen=True)
class Machine:
    """Devices that a model can be offloaded to, and host memory in bytes (``None``: unlimited).

    ``virtual`` is empty for a real machine; else there is one for each of ``devices``. ``pools``: memory that some of
    them share with the host, whose own memory it then is.
    """

    devices: tuple[DeviceInfo, ...]
    virtual: tuple[VirtualDevice, ...]
    host_total: int | None
    host_free: int | None
    pools: tuple[Pool, ...] = ()


def virtual_machine(virtual: Sequence[VirtualDevice], host: int | None = None) -> Machine:
    """A machine of virtual devices; ``host`` bytes of host memory, all of them free, or no limit.

    Where a device shares the host's memory, the host has that, and of it ``host`` bytes at most.
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
    _check_host(host, total, pools)
    return Machine(devices, tuple(virtual), total, free if host is None else min(host, free), pools)


def real_machine(devices: Sequence[DeviceInfo], memory: HostMemory, host: int | None = None) -> Machine:
    """This machine, with the devices that ggml reports except the CPU.

    ``host``: bytes of available host memory, if the user gives them.
    """
    offload = tuple(device for device in devices if device.type in ("gpu", "igpu"))
    pools = pools_here(offload, memory)
    if host is None:
        return Machine(offload, (), memory.total, memory.available, pools)
    if pools:
        _check_host(host, memory.total, pools)
        return Machine(offload, (), memory.total, min(host, memory.available), pools)
    return Machine(offload, (), max(memory.total, host), host, pools)


def _check_host(host: int | None, total: int, pools: Sequence[Pool]) -> None:
    """Raise ``UsageError`` where ``host`` is more than the ``total`` of the memory that it shares with devices."""
    if host is not None and host > total:
        raise UsageError(
            f"--host-memory is {mib_up(host)} MiB, and {pools[0].name} share {mib(total)} MiB: leave it out, or "
            "give the most that the host's own part may take of them"
        )


def described(devices: Sequence[DeviceInfo], virtual: Sequence[VirtualDevice] = ()) -> tuple[DeviceInfo, ...]:
    """Those of a machine that is described: not this machine's own. ``virtual`` ones have the types of real ones."""
    return typed([device for device in devices if device.virtual or device.backend == RPC], virtual)


def machine_of(
    devices: Callable[[], Sequence[DeviceInfo]],
    virtual: Sequence[VirtualDevice],
    host: int | None,
    *,
    is_described: bool,
    has_rpc: bool,
) -> Machine:
    """The machine to plan for: this one, or one that ``is_described``, whose ``host`` bytes have a limit where given.

    ``devices`` are those that llama.cpp reports; it is asked only where some of them may be part of that machine.
    """
    if not is_described:
        return real_machine(devices(), host_memory(), host)
    found = devices() if virtual or has_rpc else ()
    return replace(virtual_machine(virtual, host), devices=described(found, virtual))


def choose(devices: Sequence[DeviceInfo], names: Sequence[str] | None) -> tuple[DeviceInfo, ...]:
    """Those of ``devices`` that are named, in that order (``none`` for none); all of them where nothing is.

    Raises ``UsageError`` for a name that there is not, or twice.
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
    """Raise ``UsageError`` for a main GPU that is none of ``devices``."""
    if main_gpu >= len(devices):
        raise UsageError(f"main GPU {main_gpu} does not exist: the number of devices is {len(devices)}, counted from 0")


def device_speeds(
    infos: Sequence[DeviceInfo],
    every: Sequence[DeviceInfo],
    virtual: Sequence[VirtualDevice],
    measure: Callable[[str, int, float], MeasuredSpeed],
    remote_bandwidths: Sequence[float] = (),
) -> dict[str, DeviceSpeed]:
    """The speed of each of ``infos`` by its name, which are some of ``every`` device that there is.

    A remote one is measured, or has one of ``remote_bandwidths``: ``fitter.machine.rpc_devices`` says how.
    """
    known = {device.name: device for device in virtual}
    speeds = {info.name: speed_of(known.get(info.name, info)) for info in infos}
    if any(info.backend == RPC for info in infos):
        from fitter.machine.rpc_devices import remote_speeds

        speeds |= remote_speeds(infos, every, measure, remote_bandwidths)
    return speeds


def speed_of_host(given: float | str | None, *, is_described: bool, virtual: Sequence[VirtualDevice] = ()) -> HostSpeed:
    """The host's speed as it is ``given``, or else what this machine reads; of a described one, a stated default.

    Where one of the ``virtual`` devices shares the host's memory, that is as fast for both. Raises ``UsageError`` for
    what is no bandwidth.
    """
    if given is None and is_described:
        # of a host that is not this one, nothing can be measured
        sharing = [device for device in virtual if device.shared is not None]
        return host_of_gpu(sharing[0]) if sharing else default_host()
    from fitter.machine import bandwidth

    if given is None:
        return bandwidth.host_speed()
    speed = bandwidth.given_speed(given if isinstance(given, str) else f"{given:.0f}")
    return speed if is_described else replace(speed, threads=bandwidth.this_host().cores)
