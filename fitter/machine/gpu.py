"""Parse the descriptions of virtual GPUs (``--gpu SPEC``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fitter.errors import Message, Remedy, UsageError
from fitter.llama.types import MAX_DEVICES, SharedMemory, VirtualDevice
from fitter.machine import device_memory, gpu_catalogue
from fitter.parameters.values import SIZE, UNITS, parse_size

PROFILES = ("cuda", "rocm", "vulkan", "metal")
"""Profiles for GPUs outside the catalogue."""

VULKAN_DRIVERS = {
    "radv": "AMD with Mesa's RADV",
    "anv": "Intel with Mesa's ANV",
    "nvidia": "NVIDIA's driver",
    "lavapipe": "Mesa's software device",
}
"""Drivers whose limits the Vulkan profile knows; the first is the default."""

_PREFIXES = {"cuda": "CUDA", "rocm": "ROCm", "vulkan": "Vulkan", "metal": "MTL"}
"""Names of a backend's devices in llama.cpp, without the number."""

NO_GPU = "none"
"""The spec of a machine without a GPU."""

_NO_GPUS = (NO_GPU, "cpu")
"""How people write it."""

OLDEST_CUDA = 500
"""The oldest compute capability that ggml-cuda can be compiled for."""

OLDEST_ROCM = gpu_catalogue.AMD_OFFSET + 0x803
"""The oldest architecture that ggml-hip knows: gfx803."""

_UNNAMED = ""
"""The name of a device until ``parse_gpus`` numbers all of them."""

_COUNT = re.compile(r"([0-9]{1,6})\s*[x×*]\s*(?!tx?\b)(.*)", re.IGNORECASE | re.DOTALL)
_COUNT_AFTER = re.compile(r"(.*[\s0-9])[x×*]\s*([0-9]{1,6})", re.IGNORECASE | re.DOTALL)
_BETWEEN = re.compile(r",|\+(?!(?<=max\+)\s*(?:pro\s+)?[0-9]{3}\b)", re.IGNORECASE)
"""Between two descriptions; the plus of a Ryzen AI Max+ 395 is part of its name."""
_SIZED = re.compile(r"(.+?)[\s-]*([0-9]{1,4})\s*gi?b", re.IGNORECASE | re.DOTALL)
"""A name and its memory in GiB: m2-32gb, RTX 3090 24GB."""
_FORMS = Message(
    "name a GPU (rtx-4090), a size (24GiB), cuda:8.9:24GiB, rocm:gfx1100:24GiB, vulkan:24GiB, metal:64GiB, or none "
    "for a machine without a GPU",
    Remedy("; fitter devices --catalogue lists the names", "catalogue"),
)


def parse_gpus(specs: Sequence[str]) -> tuple[VirtualDevice, ...]:
    """Parse descriptions of virtual devices; name them ``CUDA0``, ``CUDA1``, ``ROCm0``, ``Vulkan0``, ``MTL0`` and so
    on.

    A description is one of these:

    - a GPU of the catalogue (``rtx-4090``); if it uses the machine's memory, with a size (``m2-ultra:128GiB``);
    - a size (``24GiB``), for an NVIDIA card;
    - profile, compute capability or architecture, and memory (``cuda:8.9:24564MiB``, ``rocm:gfx1100:24GiB``);
    - profile and memory, optionally with a driver (``vulkan:24GiB``, ``vulkan:nvidia:24GiB``);
    - the memory of a Mac (``metal:64GiB``), of which macOS gives the GPU a part.

    It may begin with a count (``2x``, or end with ``x2``) and end with the free memory (``:free=20GiB``). By default a
    GPU of the catalogue has as much free memory as an idle card, and other GPUs have all their memory free. ``none`` or
    ``cpu`` alone is a machine without a GPU. Several descriptions may stand in one text, with ``+`` or a comma between
    them.

    For a GPU that uses the machine's memory, the size is the machine's. ``:free=`` then sets the part that the system
    lets the GPU use, and ``:available=`` the memory for programs and GPU together; by default both are as on an idle
    system.

    Raises:
        UsageError: A description is not valid, there are more than 16 devices, or several share one machine's memory.
    """
    specs = [part for spec in specs for part in split_gpus(spec)]
    none = next((word for spec in specs if (word := spec.strip().lower()) in _NO_GPUS), None)
    if none is not None:
        if len(specs) > 1:
            raise UsageError(f"--gpu {specs[-1]!r}: {none} means a machine without a GPU: leave out the other GPUs")
        return ()
    kinds: list[VirtualDevice] = []
    for spec in specs:
        count, kind = _parse(spec)
        if len(kinds) + count > MAX_DEVICES:
            raise UsageError(f"--gpu {spec!r}: llama.cpp has room for {MAX_DEVICES} devices at most")
        kinds += [kind] * count
    _check_one_memory(kinds)
    numbers: Counter[str] = Counter()
    devices = []
    for kind in kinds:
        prefix = _PREFIXES[kind.profile.partition("-")[0]]
        devices.append(replace(kind, name=f"{prefix}{numbers[prefix]}"))
        numbers[prefix] += 1
    return tuple(devices)


def split_gpus(text: str) -> list[str]:
    """Split a text into descriptions of one GPU, or several alike, at each ``+`` and comma.

    Raises:
        UsageError: A description is missing beside one of them.
    """
    parts = [part.strip() for part in _BETWEEN.split(text)]
    if len(parts) > 1 and not all(parts):
        raise UsageError(f"--gpu {text!r}: name a GPU on both sides of each + or comma, such as 'rtx-4090 + rtx-3090'")
    return parts


def virtual_devices(gpus: str | VirtualDevice | Sequence[str | VirtualDevice]) -> tuple[VirtualDevice, ...]:
    """Parse one or several descriptions, or return the given devices. Raises ``UsageError``."""
    if isinstance(gpus, (str, VirtualDevice)):
        gpus = [gpus]
    devices = tuple(gpu for gpu in gpus if isinstance(gpu, VirtualDevice))
    if not devices:
        return parse_gpus([gpu for gpu in gpus if isinstance(gpu, str)])
    if len(devices) < len(gpus):
        raise UsageError("gpus has both strings and VirtualDevice objects: give only one kind")
    return devices


def cards_of(spec: str) -> tuple[str, ...]:
    """Return the name of each card in a description: ``RTX 3090`` and ``2x rtx-3090`` name one card, once and twice.

    ``none`` has no cards. Raises ``UsageError``.
    """
    if spec.strip().lower() in _NO_GPUS:
        return ()
    _parse(spec)
    count, rest = _counted(spec)
    body = _split_options(rest)[0]
    card = gpu_catalogue.find_as_written(body)
    return (card.key if card else body.lower(),) * count


def parse_twin(text: str) -> tuple[str, int]:
    """Parse profile and compute capability, such as ``cuda:8.9``. Raises ``UsageError``."""
    kind = _parse_profile(f"{text}:1MiB")
    return kind.profile, kind.compute_capability


def _parse(spec: str) -> tuple[int, VirtualDevice]:
    count, rest = _counted(spec)
    if count == 0:
        raise UsageError(f"--gpu {spec!r}: the count must be at least 1")
    body, *options = _split_options(rest)
    try:
        kind = _with_options(_parse_kind(body), _parse_options(options))
    except UsageError as error:
        raise UsageError(f"--gpu {spec!r}: " + error.message) from None
    return count, kind


def _counted(spec: str) -> tuple[int, str]:
    """Split the count from a description; 1 if it has none."""
    spec = spec.strip()
    before, after = _COUNT.fullmatch(spec), _COUNT_AFTER.fullmatch(spec)
    if before and not (after and int(after[2]) <= MAX_DEVICES < int(before[1])):
        return int(before[1]), before[2]
    return (int(after[2]), after[1].strip()) if after else (1, spec)


def _with_options(kind: VirtualDevice, sizes: Mapping[str, int]) -> VirtualDevice:
    free = sizes.get("free", kind.free)
    if kind.shared is not None:
        return _of_unified_memory(kind, kind.shared, free, sizes.get("available"))
    if "available" in sizes:
        raise UsageError("available= is for a GPU that uses the machine's memory: write free=SIZE")
    if kind.total == 0:
        raise UsageError("a device must have memory")
    if free > kind.total:
        raise UsageError("free= is more than the device's total memory")
    return replace(kind, free=free)


def _of_unified_memory(kind: VirtualDevice, memory: SharedMemory, free: int, available: int | None) -> VirtualDevice:
    """Set the part of the ``memory`` that the system lets the GPU use, and its ``available`` bytes."""
    if memory.total == 0 or free == 0 or available == 0:
        raise UsageError("a device must have memory")
    for name, size in (("free", free), ("available", available or 0)):
        if size > memory.total:
            raise UsageError(f"{name}= is more than the machine's {memory.total // 2**20} MiB of memory")
    is_limited = memory.system != "cuda"
    if available is None:
        # CUDA reports the system's available memory as free
        available = memory.free if is_limited or free == kind.free else free
    elif not is_limited:
        free = min(free, available)
    # the owner of the machine can raise the GPU's part above the default
    return replace(kind, total=max(kind.total, free), free=free, shared=replace(memory, free=available))


def _check_one_memory(kinds: Sequence[VirtualDevice]) -> None:
    unified = [kind.description for kind in kinds if kind.shared is not None]
    if len(unified) > 1:
        raise UsageError(
            f"--gpu describes {len(unified)} GPUs that share memory with the processor "
            f"({', '.join(dict.fromkeys(unified))}), and a machine has only one such memory: describe one of them; the "
            "GPU of another machine is reached with --rpc"
        )


def _split_options(text: str) -> list[str]:
    """Split the name of the GPU from each ``key=value`` after it."""
    body, *rest = re.split(r":(?=[^:=]*=)", text)
    return [body.strip(), *rest]


def _parse_options(options: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        name = key.strip().lower()
        if name not in ("free", "available"):
            raise UsageError(f"unknown option {key.strip()!r}; there are free=SIZE and available=SIZE")
        if name in sizes:
            raise UsageError(f"{name}= is given twice")
        sizes[name] = 0 if value.strip() == "0" else parse_size(value)
    return sizes


def _parse_kind(body: str) -> VirtualDevice:
    if ":" in body:
        name, _, memory = body.rpartition(":")
        if body.partition(":")[0].strip().lower() in PROFILES or not (gpu := gpu_catalogue.find_as_written(name)):
            return _parse_profile(body)
        return _parse_unified(gpu, memory)
    if (match := SIZE.fullmatch(body)) and match[2].lower() in UNITS:
        return _parse_memory(body)
    if gpu := gpu_catalogue.find_as_written(body):
        return _device_of_card(gpu, gpu.total)
    match = _SIZED.fullmatch(body)
    if match and (gpu := gpu_catalogue.find_as_written(match[1])):
        if gpu.unified:
            return _device_of_card(gpu, int(match[2]) << 30)
        if round(gpu.total / 2**30) == int(match[2]):
            return _device_of_card(gpu, gpu.total)
        raise UsageError(
            f"{gpu.key} has {gpu.total // 2**20} MiB of memory: leave {match[2]} GB out, or write free=SIZE"
        )
    names = (gpu_catalogue.similar(match[1]) if match else []) or gpu_catalogue.similar(body)
    if body[:1].isdigit() and not (re.match("[0-9]{3}", body) and names):
        return _parse_memory(body)
    if not body:
        raise UsageError("no GPU: " + _FORMS)
    raise UsageError(f"unknown GPU; did you mean {' or '.join(names)}?" if names else "unknown GPU: " + _FORMS)


def _parse_memory(body: str) -> VirtualDevice:
    size = parse_size(body)
    default = gpu_catalogue.default()
    return VirtualDevice(
        _UNNAMED, f"virtual {default.profile.upper()} GPU", default.profile, default.compute_capability, size, size
    )


def _device_of_card(gpu: gpu_catalogue.CatalogueGpu, total: int) -> VirtualDevice:
    if not gpu.unified:
        return VirtualDevice(_UNNAMED, gpu.description, gpu.profile, gpu.compute_capability, total, gpu.free)
    return _shared(
        VirtualDevice(_UNNAMED, gpu.description, gpu.profile, gpu.compute_capability, total, total), total, gpu.carved
    )


def _shared(gpu: VirtualDevice, memory: int, carved: int = 0) -> VirtualDevice:
    """Give ``gpu`` the part of the machine's ``memory`` that the system lets it use."""
    system = device_memory.system_of(gpu.profile)
    if carved >= memory > 0:
        raise UsageError(f"{carved // 2**20} MiB are set aside for the GPU: the machine must have more memory")
    return replace(
        gpu,
        total=device_memory.usable(system, memory, carved),
        free=device_memory.free(system, memory, carved),
        shared=device_memory.unified_memory(system, memory, carved),
    )


def _parse_unified(gpu: gpu_catalogue.CatalogueGpu, text: str) -> VirtualDevice:
    if not gpu.unified:
        raise UsageError(f"{gpu.key} has a fixed amount of memory: leave {text.strip()!r} out, or write free=SIZE")
    return _device_of_card(gpu, parse_size(text))


def _parse_profile(body: str) -> VirtualDevice:
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
    return VirtualDevice(_UNNAMED, f"virtual {_PREFIXES[profile]} GPU {text}", profile, parse(text), size, size)


def _compute_capability(text: str) -> int:
    try:
        number = gpu_catalogue.capability(text)
    except ValueError:
        number = gpu_catalogue.AMD_OFFSET
    if number >= gpu_catalogue.AMD_OFFSET:
        raise UsageError(f"{text!r} is not a compute capability; write one such as 8.9")
    if number < OLDEST_CUDA:
        raise UsageError(f"compute capability {text} is older than llama.cpp's CUDA backend supports (5.0)")
    return number


def _architecture(text: str) -> int:
    try:
        number = gpu_catalogue.capability(text.lower())
    except ValueError:
        number = 0
    if number < gpu_catalogue.AMD_OFFSET:
        raise UsageError(f"{text!r} is not an AMD architecture; write one such as gfx1100, as rocminfo shows it")
    if number < OLDEST_ROCM:
        raise UsageError(f"{text} is older than llama.cpp's HIP backend supports (gfx803)")
    return number


def _parse_vulkan(parts: list[str]) -> VirtualDevice:
    *drivers, text = parts
    if len(drivers) > 1:
        raise UsageError("write profile and memory, such as vulkan:24GiB, or with a driver: vulkan:nvidia:24GiB")
    size = parse_size(text)
    if not drivers:
        return VirtualDevice(_UNNAMED, "virtual Vulkan GPU", "vulkan", 0, size, size)
    driver = drivers[0].lower()
    if driver not in VULKAN_DRIVERS:
        raise UsageError(f"unknown Vulkan driver {drivers[0]!r}; the drivers are {', '.join(VULKAN_DRIVERS)}")
    return VirtualDevice(_UNNAMED, f"virtual Vulkan GPU ({VULKAN_DRIVERS[driver]})", f"vulkan-{driver}", 0, size, size)


def _parse_metal(parts: list[str]) -> VirtualDevice:
    if len(parts) != 1:
        raise UsageError("write profile and the Mac's memory, such as metal:64GiB")
    memory = parse_size(parts[0])
    return _shared(VirtualDevice(_UNNAMED, "virtual Apple GPU", "metal", 0, memory, memory), memory)
