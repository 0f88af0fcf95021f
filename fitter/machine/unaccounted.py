"""What a loaded model takes of a device beyond what llama.cpp counts, by the kind of device. Bytes.

The figures and their sources are in ``unaccounted.toml``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from fitter.llama.types import DeviceInfo, TensorInfo, VirtualDevice
from fitter.storage.data_files import read_data
from fitter.text import MIB

_PROFILES = {"CUDA": "cuda", "ROCm": "rocm", "HIP": "rocm", "Vulkan": "vulkan", "MTL": "metal", "Metal": "metal"}
"""The profile of each backend of ggml's."""

_HALF = "bf16"


def has_half_experts(experts: Iterable[TensorInfo]) -> bool:
    """Whether ``experts`` have weights of 16 bits, for which a device that they are sent to needs work spaces."""
    return any(tensor.type.lower() == _HALF for tensor in experts)


def kind_of(device: DeviceInfo, virtual: Iterable[VirtualDevice]) -> str | None:
    """The profile of ``device``, one of the ``virtual`` ones or a real one; ``None`` where there is none for it."""
    if not device.virtual:
        return _PROFILES.get(device.backend)
    return next((each.profile for each in virtual if each.name == device.name), None)


def unaccounted(device: DeviceInfo, virtual: Iterable[VirtualDevice], *, halves: bool) -> int | None:
    """The most that was measured on devices of the kind of ``device``, ``None`` where nobody has measured any.

    ``virtual`` are the described devices, ``halves`` says that experts of 16 bits may be on the host.
    """
    profile = kind_of(device, virtual)
    return max(
        (mib * MIB for kind, is_wide, mib in _data() if kind == profile and (halves or not is_wide)), default=None
    )


@functools.cache
def _data() -> tuple[tuple[str, bool, int], ...]:
    return tuple((row["profile"], row["halves"], row["mib"]) for row in read_data(__file__)["measured"])
