"""Virtual devices as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitter.errors import UsageError

MAX_DEVICES = 16
"""``llama_max_devices()`` of the pinned llama.cpp."""


@dataclass(frozen=True)
class SharedMemory:
    """Memory of a machine that a device shares with the host. Bytes."""

    total: int
    """All of it."""
    free: int
    """Free memory for device and host together."""
    carved: int = 0
    """The part reserved for the device, included in ``total`` and ``free``."""
    system: str = "cuda"
    """The system that limits the device's part: ``metal``, ``cuda``, ``amdgpu`` or ``anv``."""


@dataclass(frozen=True)
class VirtualDevice:
    """A described device; llama.cpp can plan on it as on the real one."""

    name: str
    """Its name in llama.cpp, such as ``CUDA0``."""
    description: str
    """A driver's name for it."""
    profile: str
    """Its behaviour: ``cuda``, ``rocm``, ``metal``, ``vulkan``, or ``vulkan-`` and a driver."""
    compute_capability: int
    """As in ggml-cuda: major*100 + minor*10 (890 for 8.9); 0x1000000 plus an AMD card's architecture (0x1100 for
    gfx1100); 0 if there is none.
    """
    total: int
    """Its memory in bytes."""
    free: int
    """Free bytes."""
    shared: SharedMemory | None = None
    """Memory that it shares with the host; ``None`` if it has its own."""

    @property
    def type(self) -> str:
        """ggml's type of the device: ``gpu``, or ``igpu`` for one that is used only if there is no other."""
        return "gpu" if self.shared is None or self.shared.system == "metal" else "igpu"


def describe(devices: Sequence[VirtualDevice]) -> str:
    """Write ``FITTER_DEVICES`` for these devices. Raises ``UsageError`` for more than 16 of them."""
    if len(devices) > MAX_DEVICES:
        raise UsageError(f"{len(devices)} devices are described, but llama.cpp supports at most {MAX_DEVICES}")
    return ";".join(
        f"{device.name},{device.profile},{device.compute_capability},{device.total},{device.free},"
        + " ".join(device.description.replace(";", " ").split())
        for device in devices
    )
