"""Memory that a GPU and the processor share: how much of it the system lets the GPU use. Bytes.

The figures and their sources are in ``shared_memory.toml``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from fitter.llama.types import DeviceInfo, SharedMemory
from fitter.storage.data_files import read_data
from fitter.text import MIB

_STEP = 2**14
"""The pages of a Mac; a limit is in whole ones."""

_PAGE = 4096
"""The pages in which Linux counts what a GPU may map (``ttm.pages_limit``)."""


@dataclass(frozen=True)
class Limit:
    """What decides how much of the memory a GPU may use.

    ``setting``: what raises it, with ``{mib}`` or ``{pages}`` for the new one; ``None`` where nothing does. ``lasts``
    says how long it holds, ``risk`` what it risks, ``source`` where the default is from.
    """

    setting: str | None
    lasts: str
    risk: str
    source: str

    def set_to(self, size: int) -> str | None:
        """The setting for a limit of ``size`` bytes."""
        return None if self.setting is None else self.setting.format(mib=size // MIB, pages=size // _PAGE)


def limit_of(system: str) -> Limit:
    """What decides on a machine with this ``SharedMemory.system``."""
    entry = _data()[system]
    return Limit(entry.get("setting"), entry.get("lasts", ""), entry.get("risk", ""), entry["source"])


def system_of(profile: str) -> str:
    """What decides for a GPU of this profile that shares the machine's memory."""
    kind, _, driver = profile.partition("-")
    if kind in ("metal", "cuda"):
        return kind
    return "anv" if driver == "anv" else "amdgpu"


def system_of_device(device: DeviceInfo) -> str | None:
    """The same for a device of this machine, ``None`` for one that has memory of its own.

    An Apple M has ggml's type ``gpu``; all others that share the host's memory are ``igpu``.
    """
    if device.backend in ("MTL", "Metal"):
        return "metal"
    if device.type != "igpu":
        return None
    if device.backend == "CUDA":
        return "cuda"
    return "anv" if "intel" in device.description.lower() else "amdgpu"


def usable(system: str, memory: int, carved: int = 0) -> int:
    """Bytes that the system lets a GPU use of ``memory``, of which ``carved`` are set aside for it."""
    share = _data()[system]["share"]
    part, whole = share["large" if memory >= share["large_gib"] * 2**30 else "small"].split("/")
    # of macOS and CUDA it is one of all memory, of Linux one of what that has
    of = memory if system in ("metal", "cuda") else available(system, memory - carved)
    # ROCm has either what is set aside or what Linux lends, Vulkan both: the first one is certain
    return max(carved, of * int(part) // int(whole)) // _STEP * _STEP


def available(system: str, memory: int) -> int:
    """Bytes that an idle system leaves of ``memory`` to programs and the GPU."""
    entry = _data()[system]
    left = memory - entry["takes_mib"] * MIB if "takes_mib" in entry else int(memory * entry["available"])
    return max(0, left) // MIB * MIB


def free(system: str, memory: int, carved: int = 0) -> int:
    """Bytes that llama.cpp finds free on a GPU of an idle machine: ggml-metal reports the limit, whatever is in use."""
    limit = usable(system, memory, carved)
    if system == "metal":
        return limit
    return available(system, carved) if carved == limit else min(limit, available(system, memory))


def shared_memory(system: str, memory: int, carved: int = 0) -> SharedMemory:
    """Memory of a machine that is described."""
    return SharedMemory(memory, available(system, memory), carved, system)


def processor_bandwidth(gpu: str) -> float | None:
    """Bytes per second that the processor beside a GPU of the catalogue reads, ``None`` where nobody measured it."""
    return next((row["gbs"] * 1e9 for row in _data()["processor"] if row["gpu"] == gpu), None)


@functools.cache
def _data() -> dict[str, Any]:
    return read_data(__file__)
