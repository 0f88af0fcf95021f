"""``fitter.devices``: list the devices of this machine, or virtual ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from fitter.api.checked_call import checked_call
from fitter.errors import FitterError
from fitter.llama.build.build_folder import find, named
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import DeviceInfo, VirtualDevice
from fitter.machine.gpu import virtual_devices
from fitter.machine.host import host_memory, unused_gpus
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


def why_no_gpu(devices: Sequence[DeviceInfo], llama_cpp: Path | None = None) -> str:
    """Say why this machine's GPU is no device of llama.cpp; empty if a device is one, or there is no GPU.

    Args:
        devices: This machine's devices, as llama.cpp lists them.
        llama_cpp: The llama.cpp, as in ``fit``.
    """
    where = named(None if llama_cpp is None else os.fsdecode(llama_cpp))
    with suppress(FitterError):
        return unused_gpus(devices, lambda: find(where).backends)
    return ""
