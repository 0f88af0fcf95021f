"""``fitter.devices``: list the devices of this machine, or virtual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.api.checked_call import checked_call
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import DeviceInfo, VirtualDevice
from fitter.machine.gpu import virtual_devices
from fitter.machine.host import host_memory
from fitter.machine.machine import described
from fitter.parameters.table import AnyPath as Path


@checked_call()
def devices(
    gpus: str | VirtualDevice | Sequence[str | VirtualDevice] = (),
    *,
    rpc: str | Sequence[str] = (),
    llama_cpp: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[tuple[DeviceInfo, ...], DeviceInfo]:
    """List the devices that llama.cpp offloads to by default, and the host with its available memory.

    Args:
        gpus: Descriptions of virtual devices, in place of this machine's.
        rpc: Addresses of rpc-servers whose devices are listed too.
        llama_cpp: The llama.cpp to use, as in ``fit``.
        timeout: Seconds for one answer of llama.cpp.

    Returns:
        The devices, and the host; memory in bytes.
    """
    virtual = virtual_devices(gpus)
    with Worker(virtual, timeout=timeout, rpc=rpc, llama_cpp=llama_cpp) as worker:
        infos = worker.devices() if virtual or rpc or not gpus else ()
        memory, shown = host_memory(), described(infos, virtual) if gpus else infos
        return shown, replace(worker.host(), total=memory.total, free=memory.available)
