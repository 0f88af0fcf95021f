"""The devices of this process's ggml: real, remote and virtual, and the processor's own layouts of weights."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitter.errors import LibraryError, UsageError
from fitter.llama.build import library as native
from fitter.llama.build import verdicts
from fitter.llama.build.log import captured_log, reason
from fitter.llama.processes import interpreter
from fitter.llama.types import MAX_DEVICES, RPC, DeviceInfo
from fitter.text import printable

_DEVICE_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}
_CUDA = "CUDA"


@dataclass(frozen=True)
class Device:
    """A device of ggml's registry, with its addresses for llama.cpp's structs."""

    info: DeviceInfo
    device_id: str | None
    address: int
    buffer_type: str | None
    buffer_type_address: int


@dataclass(frozen=True)
class Registry:
    """Devices by the names in ``Params``. ``default``: the devices that llama.cpp uses by default."""

    devices: tuple[Device, ...]
    default: tuple[Device, ...]


def registry(virtual: bool = False) -> Registry:
    """Return the real devices, or with ``virtual`` the virtual ones and the CPU; remote ones always."""
    library = native.libraries()
    if not virtual:
        native.load_devices()
    every = tuple(every_device(library))
    if virtual:
        backend = native.open_backend()
        addresses = []
        for i in range(MAX_DEVICES):
            pointer = backend.fitter_virtual_device(i)
            if pointer == library.ffi.NULL:
                break
            addresses.append(library.address(pointer))
        described = tuple(next(d for d in every if d.address == address) for address in addresses)
        host = tuple(d for d in every if d.info.type in ("cpu", "accel"))
        offered = remote_devices(every) + described
        return Registry(offered + host, offered)
    real = tuple(d for d in every if not d.info.virtual)
    return Registry(real, default_devices(real))


def default_names() -> tuple[str, ...]:
    """Return the names of the real devices that llama.cpp uses by default."""
    return tuple(device.info.name for device in registry().default)


def cuda_registry() -> Registry:
    """Return the cards of a CUDA backend without a GPU (see ``load_cuda_backend``), remote devices and the CPU."""
    every = tuple(every_device(native.libraries()))
    cards = tuple(replace(d, info=replace(d.info, virtual=True)) for d in every if d.info.backend == _CUDA)
    offered = remote_devices(every) + cards
    return Registry(offered + tuple(d for d in every if d.info.type in ("cpu", "accel")), offered)


def remote_devices(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices on rpc-servers."""
    return tuple(d for d in devices if d.info.backend == RPC)


def rpc_devices(server: str) -> tuple[Device, ...]:
    """Return the devices of an rpc-server outside ggml's registry, without asking for their memory.

    Raises ``LibraryError`` if libllama has no RPC. If the server does not answer, llama.cpp ends the process.
    """
    library = native.libraries()
    out = library.ffi.new("fitter_device_t *")
    devices: list[Device] = []
    while True:
        if not library.fitter.fitter_rpc_device(server.encode(), len(devices), out):
            raise LibraryError(f"the devices of the RPC server {server} cannot be used: {library.last_error()}")
        if out.device == library.ffi.NULL:
            return tuple(devices)
        devices.append(_device(library, out))


def every_device(library: native.Library) -> Iterator[Device]:
    out = library.ffi.new("fitter_device_t *")
    for i in range(library.fitter.fitter_device_count()):
        if not library.fitter.fitter_device_get(i, out):
            raise LibraryError(f"ggml does not describe its device {i}: {library.last_error()}")
        yield _device(library, out)


def _device(library: native.Library, out: Any) -> Device:
    backend = library.text(out.backend) or ""
    return Device(
        info=DeviceInfo(
            name=library.text(out.name) or "",
            description=printable(library.text(out.description) or ""),
            type=_DEVICE_TYPES.get(out.type, str(out.type)),
            backend=backend,
            total=int(out.total),
            free=int(out.free),
            virtual=backend == "fitter",
            buffer_type=library.text(out.buffer_type_name),
            largest_tensor=int(out.largest_tensor) or None,
        ),
        device_id=library.text(out.device_id),
        address=library.address(out.device),
        buffer_type=library.text(out.buffer_type_name),
        buffer_type_address=library.address(out.buffer_type),
    )


def default_devices(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices that llama.cpp uses by default, in its order: rpc-servers, then GPUs, else integrated GPUs."""
    rpc: list[Device] = []
    gpus: list[Device] = []
    igpus: list[Device] = []
    for device in devices:
        if device.info.type == "gpu" and device.info.backend == RPC:
            rpc.append(device)
        elif device.info.type == "gpu":
            ids = {gpu.device_id for gpu in gpus if gpu.device_id is not None}
            if device.device_id not in ids:
                gpus.append(device)
        elif device.info.type == "igpu" and (not igpus or device.info.backend == igpus[-1].info.backend):
            igpus.append(device)
    return tuple(rpc + (gpus or igpus))


def device_named(name: str, available: Registry) -> Device:
    """Return the device of a name. Raises ``UsageError``."""
    return select((name,), available)[0]


def host_of(devices: Registry) -> DeviceInfo:
    """Return the CPU as ggml reports it; on Linux ggml reports all memory as free."""
    for device in devices.devices:
        if device.info.type == "cpu":
            return device.info
    raise LibraryError("libllama has no CPU backend: reinstall llama-cpp-python with one")


def select(names: Sequence[str], available: Registry) -> tuple[Device, ...]:
    """Return the named devices. Raises ``UsageError`` for an unknown one."""
    by_name = {d.info.name: d for d in reversed(available.devices) if d.info.type not in ("cpu", "accel")}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(f"unknown device '{unknown[0]}'; there are: {', '.join(reversed(by_name)) or 'none'}")
    return tuple(by_name[name] for name in names)


def register_virtual(description: str) -> None:
    """Register virtual devices with this process's ggml, in the format of ``FITTER_DEVICES``.

    An empty description changes nothing. No model may be on virtual devices while they are replaced. Raises
    ``UsageError`` for an invalid description, ``LibraryError`` if ggml refuses the backend.
    """
    if not native.register_virtual(description):
        why = reason(captured_log()) or native.libraries().last_error()
        raise LibraryError(f"ggml refuses the virtual devices: {why}")


def load_cuda_backend(path: str, plugin: bool) -> None:
    """Register the CUDA backend at ``path`` with this process's ggml, unless libllama has already loaded it.

    Raises ``LibraryError`` if ggml refuses it, or if libllama has loaded another one.
    """
    library = native.libraries()
    if any(device.info.backend == _CUDA for device in every_device(library)):
        # Wheels contain copies under several names.
        try:
            maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise LibraryError(f"which CUDA backend libllama has cannot be told without /proc: {error}") from None
        directories = {os.path.dirname(file) for file in re.findall(r"(/.*)$", maps, re.M) if _is_cuda(file)}
        if os.path.dirname(path) not in directories:
            raise LibraryError(
                f"libllama already has another CUDA backend: leave {path} out, or set LLAMA_CPP_LIB_PATH to the "
                "directory of the libraries that it belongs to"
            )
        return
    if plugin:
        loaded = library.fitter.fitter_backend_load(os.fsencode(path))
        why = library.last_error()
    else:
        backend = native.open_backend()
        loaded = backend.fitter_virtual_adopt(os.fsencode(path))
        why = library.text(backend.fitter_virtual_error()) or ""
    if not loaded:
        raise LibraryError(f"{path} cannot be used with the loaded libllama: {reason(captured_log()) or why}")


def _is_cuda(file: str) -> bool:
    return os.path.basename(file).startswith("libggml-cuda.")


@functools.cache
def settle_host_layouts() -> bool:
    """Try the processor's own layouts once for each build, in another process; let this process avoid them if they
    crash.

    Returns whether they are avoided. Raises ``LibraryError`` if there is no llama.cpp.
    """
    backend = native.open_backend()
    if interpreter.is_canary() or not backend.fitter_virtual_has_own_layouts():
        return False
    try:
        problem = verdicts.problem_of_computing(native.loaded_build(), native.own_libraries())
    except LibraryError:
        # without a result, use them
        return False
    if problem:
        backend.fitter_virtual_leave_out_own_layouts()
    return bool(problem)
