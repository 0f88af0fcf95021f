"""``--gpu SPEC``: parsing descriptions of virtual GPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fitter.errors import UsageError
from fitter.llama.virtual import MAX_DEVICES, VirtualDevice
from fitter.machine import catalogue
from fitter.values import SIZE, UNITS, parse_size

PROFILES = ("cuda", "rocm", "vulkan", "metal")
"""Profiles for a GPU that is not in the catalogue."""

VULKAN_DRIVERS = {
    "radv": "AMD with Mesa's RADV",
    "anv": "Intel with Mesa's ANV",
    "nvidia": "NVIDIA's driver",
    "lavapipe": "Mesa's software device",
}
"""Drivers whose limits the Vulkan profile knows; the first is the default."""

_PREFIXES = {"cuda": "CUDA", "rocm": "ROCm", "vulkan": "Vulkan", "metal": "MTL"}
"""The names of a backend's devices in llama.cpp, without their number."""

NO_GPU = "none"
"""The spec of a machine without a GPU."""

OLDEST_CUDA = 500
"""The oldest compute capability that ggml-cuda can be compiled for."""

OLDEST_ROCM = catalogue.AMD_OFFSET + 0x803
"""The oldest architecture that ggml-hip knows: gfx803."""

_COUNT = re.compile(r"([0-9]{1,6})\s*[x×*]\s*(.*)", re.IGNORECASE | re.DOTALL)
_FORMS = "name a GPU (rtx-4090), a size (24GiB), cuda:8.9:24GiB, rocm:gfx1100:24GiB, vulkan:24GiB or metal:64GiB"


@dataclass(frozen=True)
class _Gpu:
    """A virtual GPU that has no name yet."""

    description: str
    profile: str
    compute_capability: int
    total: int
    free: int


def parse_gpus(specs: Sequence[str]) -> tuple[VirtualDevice, ...]:
    """The virtual devices that ``specs`` describe, named ``CUDA0``, ``CUDA1``, ``ROCm0``, ``Vulkan0`` or ``MTL0``, ….

    A spec is one of these:

    - a GPU of the catalogue (``rtx-4090``); one that uses the machine's memory takes a size (``m2-ultra:128GiB``);
    - a size (``24GiB``), for an NVIDIA card;
    - profile, compute capability or architecture, and memory (``cuda:8.9:24564MiB``, ``rocm:gfx1100:24GiB``);
    - profile and memory, optionally with a driver (``vulkan:24GiB``, ``vulkan:nvidia:24GiB``);
    - the memory of a Mac (``metal:64GiB``), of which the GPU gets what macOS lets it use.

    It may begin with a count (``2x``) and end with the free memory (``:free=20GiB``). By default a GPU of the
    catalogue has as much free memory as an idle card, and any other GPU has all of its memory free. ``none``, alone, is
    a machine without a GPU.

    Raises ``UsageError`` for anything else, and for more than 16 devices.
    """
    if any(spec.strip().lower() == NO_GPU for spec in specs):
        if len(specs) > 1:
            raise UsageError(f"--gpu {specs[-1]!r}: {NO_GPU} means a machine without a GPU: leave out the other GPUs")
        return ()
    kinds: list[_Gpu] = []
    for spec in specs:
        count, kind = _parse(spec)
        if len(kinds) + count > MAX_DEVICES:
            raise UsageError(f"--gpu {spec!r}: llama.cpp has room for {MAX_DEVICES} devices at most")
        kinds += [kind] * count
    numbers: Counter[str] = Counter()
    devices = []
    for kind in kinds:
        prefix = _PREFIXES[kind.profile.partition("-")[0]]
        devices.append(
            VirtualDevice(
                f"{prefix}{numbers[prefix]}",
                kind.description,
                kind.profile,
                kind.compute_capability,
                kind.total,
                kind.free,
            )
        )
        numbers[prefix] += 1
    return tuple(devices)


def virtual_devices(gpus: Sequence[str | VirtualDevice]) -> tuple[VirtualDevice, ...]:
    """The virtual devices of what is all descriptions, or all devices already. Raises ``UsageError``."""
    devices = tuple(gpu for gpu in gpus if isinstance(gpu, VirtualDevice))
    if not devices:
        return parse_gpus([gpu for gpu in gpus if isinstance(gpu, str)])
    if len(devices) < len(gpus):
        raise UsageError("gpus has both strings and VirtualDevice objects: give only one kind")
    return devices


def parse_twin(text: str) -> tuple[str, int]:
    """The profile and compute capability in ``cuda:8.9``. Raises ``UsageError``."""
    kind = _parse_profile(f"{text}:1MiB")
    return kind.profile, kind.compute_capability


def _parse(spec: str) -> tuple[int, _Gpu]:
    count, rest = 1, spec.strip()
    if match := _COUNT.fullmatch(rest):
        count, rest = int(match[1]), match[2]
        if count == 0:
            raise UsageError(f"--gpu {spec!r}: the count must be at least 1")
    body, *options = _split_options(rest)
    try:
        kind = _parse_kind(body)
        free = _parse_free(options)
    except UsageError as error:
        raise UsageError(f"--gpu {spec!r}: {error}") from None
    free = kind.free if free is None else free
    if kind.profile == "metal" and free > kind.total:
        # What macOS lets the GPU use is only a default, which a Mac's owner can raise.
        kind = replace(kind, total=free)
    if kind.total == 0 or free == 0:
        raise UsageError(f"--gpu {spec!r}: a device must have memory")
    if free > kind.total:
        raise UsageError(f"--gpu {spec!r}: free= is more than the device's total memory")
    return count, _Gpu(kind.description, kind.profile, kind.compute_capability, kind.total, free)


def _split_options(text: str) -> list[str]:
    """The part that names the GPU, then each ``key=value`` after it."""
    body, *rest = re.split(r":(?=[^:=]*=)", text)
    return [body.strip(), *rest]


def _parse_free(options: list[str]) -> int | None:
    free = None
    for option in options:
        key, _, value = option.partition("=")
        if key.strip().lower() != "free":
            raise UsageError(f"unknown option {key.strip()!r}; the only one is free=SIZE")
        if free is not None:
            raise UsageError("free= is given twice")
        free = parse_size(value)
    return free


def _parse_kind(body: str) -> _Gpu:
    if ":" in body:
        name, _, memory = body.rpartition(":")
        if body.partition(":")[0].strip().lower() in PROFILES or not (gpu := catalogue.find(name)):
            return _parse_profile(body)
        return _parse_unified(gpu, memory)
    if (match := SIZE.fullmatch(body)) and match[2].lower() in UNITS:
        return _parse_memory(body)
    if gpu := catalogue.find(body):
        return _known(gpu, gpu.total, gpu.free)
    names = catalogue.similar(body)
    if body[:1].isdigit() and not (body.isdigit() and names):
        return _parse_memory(body)
    if not body:
        raise UsageError(f"no GPU: {_FORMS}")
    raise UsageError(f"unknown GPU; did you mean {' or '.join(names)}?" if names else f"unknown GPU: {_FORMS}")


def _parse_memory(body: str) -> _Gpu:
    size = parse_size(body)
    default = catalogue.default()
    return _Gpu(f"virtual {default.profile.upper()} GPU", default.profile, default.compute_capability, size, size)


def _known(gpu: catalogue.CatalogueGpu, total: int, free: int) -> _Gpu:
    # ggml-metal reports what Metal may use as the total.
    return _Gpu(gpu.description, gpu.profile, gpu.compute_capability, free if gpu.profile == "metal" else total, free)


def _parse_unified(gpu: catalogue.CatalogueGpu, text: str) -> _Gpu:
    if not gpu.unified:
        raise UsageError(f"{gpu.key} has a fixed amount of memory: leave {text.strip()!r} out, or write free=SIZE")
    size = parse_size(text)
    if gpu.profile == "metal":
        return _known(gpu, size, catalogue.metal_working_set(size))
    return _known(gpu, size, int(size * catalogue.default().free_fraction))


def _parse_profile(body: str) -> _Gpu:
    parts = [part.strip() for part in body.split(":")]
    if parts[0].lower() not in PROFILES:
        raise UsageError(f"unknown profile {parts[0]!r}; the profiles are {', '.join(PROFILES)}")
    profile = parts[0].lower()
    if profile == "vulkan":
        return _parse_vulkan(parts[1:])
    if profile == "metal":
        return _parse_metal(parts[1:])
    if len(parts) != 3:
        raise UsageError(
            "write profile, architecture and memory, such as rocm:gfx1100:24GiB"
            if profile == "rocm"
            else "write profile, compute capability and memory, such as cuda:8.9:24GiB"
        )
    text, size = parts[1], parse_size(parts[2])
    parse = _architecture if profile == "rocm" else _compute_capability
    return _Gpu(f"virtual {_PREFIXES[profile]} GPU {text}", profile, parse(text), size, size)


def _compute_capability(text: str) -> int:
    try:
        number = catalogue.capability(text)
    except ValueError:
        number = catalogue.AMD_OFFSET
    if number >= catalogue.AMD_OFFSET:
        raise UsageError(f"{text!r} is not a compute capability; write one such as 8.9")
    if number < OLDEST_CUDA:
        raise UsageError(f"compute capability {text} is older than llama.cpp's CUDA backend supports (5.0)")
    return number


def _architecture(text: str) -> int:
    try:
        number = catalogue.capability(text.lower())
    except ValueError:
        number = 0
    if number < catalogue.AMD_OFFSET:
        raise UsageError(f"{text!r} is not an AMD architecture; write one such as gfx1100, as rocminfo shows it")
    if number < OLDEST_ROCM:
        raise UsageError(f"{text} is older than llama.cpp's HIP backend supports (gfx803)")
    return number


def _parse_vulkan(parts: list[str]) -> _Gpu:
    *drivers, text = parts
    if len(drivers) > 1:
        raise UsageError("write profile and memory, such as vulkan:24GiB, or with a driver: vulkan:nvidia:24GiB")
    size = parse_size(text)
    if not drivers:
        return _Gpu("virtual Vulkan GPU", "vulkan", 0, size, size)
    driver = drivers[0].lower()
    if driver not in VULKAN_DRIVERS:
        raise UsageError(f"unknown Vulkan driver {drivers[0]!r}; the drivers are {', '.join(VULKAN_DRIVERS)}")
    return _Gpu(f"virtual Vulkan GPU ({VULKAN_DRIVERS[driver]})", f"vulkan-{driver}", 0, size, size)


def _parse_metal(parts: list[str]) -> _Gpu:
    if len(parts) != 1:
        raise UsageError("write profile and the Mac's memory, such as metal:64GiB")
    usable = catalogue.metal_working_set(parse_size(parts[0]))
    return _Gpu("virtual Apple GPU", "metal", 0, usable, usable)
