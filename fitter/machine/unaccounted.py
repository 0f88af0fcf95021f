"""Memory of a loaded model on a device beyond llama.cpp's count, by kind of device. Bytes.

``unaccounted.toml`` has the figures and their sources.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from fitter.llama.types import DeviceInfo, TensorInfo, VirtualDevice
from fitter.storage.files import read_data
from fitter.text import MIB

_PROFILES = {"CUDA": "cuda", "ROCm": "rocm", "HIP": "rocm", "Vulkan": "vulkan", "MTL": "metal", "Metal": "metal"}
"""Profile of each of ggml's backends."""

_HALF = "bf16"


def has_half_experts(experts: Iterable[TensorInfo]) -> bool:
    """Return whether ``experts`` have 16-bit weights, which need work spaces on the device that computes with them."""
    return any(tensor.type.lower() == _HALF for tensor in experts)


def kind_of(device: DeviceInfo, virtual: Iterable[VirtualDevice]) -> str | None:
    """Return the profile of a virtual or real device; ``None`` if there is none."""
    if not device.virtual:
        return _PROFILES.get(device.backend)
    return next((each.profile for each in virtual if each.name == device.name), None)


def unaccounted(device: DeviceInfo, virtual: Iterable[VirtualDevice], *, halves: bool) -> int | None:
    """Return the most bytes measured on devices of this kind; ``None`` if there is no measurement.

    Args:
        device: The device.
        virtual: The described devices.
        halves: Whether 16-bit experts may be on the host.
    """
    profile = kind_of(device, virtual)
    return max(
        (mib * MIB for kind, is_wide, mib in _data() if kind == profile and (halves or not is_wide)), default=None
    )


@functools.cache
def _data() -> tuple[tuple[str, bool, int], ...]:
    return tuple((row["profile"], row["halves"], row["mib"]) for row in read_data(__file__)["measured"])
