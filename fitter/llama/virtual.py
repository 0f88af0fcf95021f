"""Virtual devices as data. Not in ``types``, so that an early load can import them quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitter.errors import UsageError

MAX_DEVICES = 16
"""``llama_max_devices()`` of the pinned llama.cpp."""

_USUAL_MARGIN = 1 << 30
_SURELY_TOO_LARGE = 0.9


@dataclass(frozen=True)
class SharedMemory:
    """Memory of a machine that a device and the host share."""

    total: int
    """All of it, in bytes."""
    free: int
    """What is free of it for both together, in bytes."""
    carved: int = 0
    """What is set aside for the device alone, in bytes; it is in ``total`` and ``free``, and no part of the host's."""
    system: str = "cuda"
    """What decides how much of it the device may use: ``metal``, ``cuda``, ``amdgpu`` or ``anv``."""


@dataclass(frozen=True)
class VirtualDevice:
    """A device that exists only as a description; llama.cpp can plan on it as on the real one."""

    name: str
    """Its name in llama.cpp, such as ``CUDA0``."""
    description: str
    """What a driver would call it."""
    profile: str
    """How it behaves: ``cuda``, ``rocm``, ``metal``, ``vulkan``, or ``vulkan-`` and a driver."""
    compute_capability: int
    """As ggml-cuda counts it, major*100 + minor*10 (890 for 8.9); 0x1000000 plus an AMD card's architecture (0x1100 for
    gfx1100); 0 if there is none.
    """
    total: int
    """Its memory in bytes."""
    free: int
    """What is free of it, in bytes."""
    shared: SharedMemory | None = None
    """The memory that it shares with the host; ``None`` where it has its own."""

    @property
    def type(self) -> str:
        """ggml's type of such a device: ``gpu``, or ``igpu`` for one that is used only where there is no other."""
        return "gpu" if self.shared is None or self.shared.system == "metal" else "igpu"


def describe(devices: Sequence[VirtualDevice]) -> str:
    """The value of ``FITTER_DEVICES`` that describes ``devices``. Raises ``UsageError`` for more than 16 of them."""
    if len(devices) > MAX_DEVICES:
        raise UsageError(f"{len(devices)} devices are described, but llama.cpp supports at most {MAX_DEVICES}")
    return ";".join(
        f"{device.name},{device.profile},{device.compute_capability},{device.total},{device.free},"
        + " ".join(device.description.replace(";", " ").split())
        for device in devices
    )


def is_surely_spilled(model_bytes: int, devices: Sequence[VirtualDevice]) -> bool:
    """Whether a model of so many bytes is almost certainly too large for ``devices``, so that it will be split up."""
    return model_bytes > _SURELY_TOO_LARGE * sum(max(0, device.free - _USUAL_MARGIN) for device in devices)
