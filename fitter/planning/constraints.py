"""From what a user says to what a fit keeps: overrides, margins, the levers. Bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo, TensorBuftOverride
from fitter.planning.request import DEFAULT_MARGIN, LEVERS, MIB, DeviceLimit

_EXPERTS = ".ffn_(up|down|gate|gate_up)_(ch|)exps"
"""What ``--cpu-moe`` moves (``LLM_FFN_EXPS_REGEX`` upstream); the dot stands for itself."""

SLACK = 512 * MIB
"""Beside what was measured outside of llama.cpp's accounting: work spaces that a larger model needs, other programs."""


def default_margin(outside: int | None) -> int:
    """Upstream's margin; what was measured ``outside`` of llama.cpp's accounting and ``SLACK`` where that is more."""
    return max(DEFAULT_MARGIN, 0 if outside is None else outside + SLACK)


def parse_overrides(texts: Sequence[str]) -> tuple[TensorBuftOverride, ...]:
    """Overrides from ``pattern=buffer type`` texts, several in one after commas, as ``-ot`` takes them.

    Raises ``UsageError`` where a part is not of that form.
    """
    overrides = []
    for text in texts:
        for part in text.split(","):
            pattern, equals, buffer_type = part.partition("=")
            if not equals or not pattern or not buffer_type:
                raise UsageError(f"tensor override '{part}' is not of the form <tensor name pattern>=<buffer type>")
            overrides.append(TensorBuftOverride(pattern, buffer_type))
    return tuple(overrides)


def expert_overrides(cpu_moe: bool, n_cpu_moe: int | None) -> tuple[TensorBuftOverride, ...]:
    """What ``--cpu-moe`` and ``--n-cpu-moe`` stand for. Raises ``UsageError`` for a negative number."""
    if n_cpu_moe is not None and n_cpu_moe < 0:
        raise UsageError(f"n_cpu_moe is {n_cpu_moe}: it must be 0 or more")
    if cpu_moe:
        return (TensorBuftOverride(_EXPERTS, "CPU"),)
    if n_cpu_moe:
        layers = "|".join(map(str, range(n_cpu_moe)))
        return (TensorBuftOverride(f"^blk.({layers}){_EXPERTS}", "CPU"),)
    return ()


def device_limits(
    devices: Sequence[DeviceInfo], margin: int | Sequence[int] | None, defaults: Sequence[int] | None = None
) -> tuple[DeviceLimit, ...]:
    """Devices with the margin of each: one for all, or one per device; without a word of the user's, ``defaults``.

    Raises ``UsageError`` for a negative margin, one that the user set larger than the device, or a list of the wrong
    length.
    """
    if margin is None:
        margins = [DEFAULT_MARGIN] * len(devices) if defaults is None else list(defaults)
    elif isinstance(margin, int):
        margins = [margin] * len(devices)
    elif len(margin) == 1:
        margins = list(margin) * len(devices)
    else:
        margins = list(margin)
        if len(margins) != len(devices):
            raise UsageError(f"{len(margins)} margins for {len(devices)} devices: give one for all, or one per device")
    for device, size in zip(devices, margins, strict=True):
        if size < 0:
            raise UsageError(f"a margin of {size // MIB} MiB is negative: it is what must stay free")
        if margin is not None and size > device.total:
            raise UsageError(
                f"a margin of {size // MIB} MiB is larger than {device.name} with {device.total // MIB} MiB: "
                "nothing could be placed there"
            )
    return tuple(
        DeviceLimit(device.name, device.description, device.total, device.free, size, device.buffer_type or device.name)
        for device, size in zip(devices, margins, strict=True)
    )


def levers(allow: Collection[str]) -> frozenset[str]:
    """What the user lets a fit do. Raises ``UsageError`` for a lever that there is not."""
    for lever in allow:
        if lever not in LEVERS:
            raise UsageError(f"unknown lever '{lever}': there is {', '.join(LEVERS)}")
    return frozenset(allow)
