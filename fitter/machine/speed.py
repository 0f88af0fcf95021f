"""Speeds of devices, by their vendors' figures, and of the host."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from fitter.llama.types import DeviceInfo, VirtualDevice
from fitter.machine import device_memory, gpu_catalogue
from fitter.machine.gpu_catalogue import AMD_OFFSET, CatalogueGpu

_BACKENDS = {
    "CUDA": "cuda",
    "MUSA": "cuda",
    "ROCm": "rocm",
    "HIP": "rocm",
    "Vulkan": "vulkan",
    "Metal": "metal",
    "MTL": "metal",
}
"""Kind of a device, by its backend or by its name without the number."""

REMOTE = "remote"
"""The kind of every device of an rpc-server."""

_GIB = 2**30

_OLDEST_RDNA = AMD_OFFSET + 0x1010
"""The compute capability of ``gfx1010``, the first of RDNA, as ggml-cuda counts them."""


class Factor(NamedTuple):
    """Measured time divided by estimated time, from ``fitter tune``; 1 without a measurement."""

    prompt: float = 1.0
    """In prompts."""
    generation: float = 1.0
    """In generation."""


class Factors(NamedTuple):
    """The factors of a device or the host, for each part of an estimate that it has."""

    weights: Factor = Factor()
    """Of reading weights and computing with them."""
    attention: Factor = Factor()
    """Of attention."""
    layers: Factor = Factor()
    """Of each layer, whatever its size."""
    network: Factor = Factor()
    """Of a remote device's network."""


AS_ESTIMATED = Factors()
"""Nothing is measured."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Speeds of one device as its vendor publishes them; the cost model knows the share that llama.cpp reaches.

    A remote device's figures are what llama.cpp reaches over the network instead.

    Attributes:
        bandwidth: Bytes per second of its memory.
        compute: Dense fp16 FLOP per second with accumulation in fp32, on matrix units if it has them.
        pcie: Theoretical bytes per second from host to device; the memory's bandwidth if it uses the host's memory; the
            network's if remote.
        kind: ``cuda``, ``rocm``, ``vulkan``, ``metal`` or ``remote``.
        compute_capability: ``8.9`` or ``gfx1100``; empty if unknown.
        source: The source in one line, with the other card if the speeds are another card's.
        known: Whether the device is in the catalogue; for a remote device, whether its bandwidth is measured or set.
        round_trip: Seconds of the network's round trip.
        nvlink: Bytes per second to other devices; 0 without.
        factors: What ``fitter tune`` measured of it.
    """

    bandwidth: float
    compute: float
    pcie: float
    kind: str
    compute_capability: str
    source: str
    known: bool
    round_trip: float = 0.0
    nvlink: float = 0.0
    factors: Factors = AS_ESTIMATED

    @property
    def is_remote(self) -> bool:
        """Whether it is a device of an rpc-server."""
        return self.kind == REMOTE


@dataclass(frozen=True)
class HostSpeed:
    """Speed of the host.

    Attributes:
        bandwidth: Bytes per second of its memory, with all cores.
        source: The source in one line.
        threads: llama.cpp's threads, by default one per physical core; 0 if unknown.
        known: Whether the bandwidth is measured or set.
        factors: What ``fitter tune`` measured of it.
    """

    bandwidth: float
    source: str
    threads: int = 0
    known: bool = True
    factors: Factors = AS_ESTIMATED


def default_host() -> HostSpeed:
    """Return the speed of a host that is not measured."""
    bandwidth = gpu_catalogue.default().host_bandwidth
    source = f"{bandwidth / 1e9:.0f} GB/s, assumed (two channels of DDR4-3200): --host-bandwidth sets another"
    return HostSpeed(bandwidth, source, known=False)


def host_of_gpu(device: VirtualDevice) -> HostSpeed:
    """Return the speed of a host that shares its memory with ``device``: measured, or else the memory's."""
    speed = speed_of(device)
    cards = named(device.description)
    measured = [bandwidth for card in cards if (bandwidth := device_memory.processor_bandwidth(card.key)) is not None]
    if measured:
        return HostSpeed(min(measured), "catalogue: measured of the processor beside this GPU")
    return HostSpeed(speed.bandwidth, f"the memory that it shares with the GPU ({speed.source})", known=speed.known)


def speed_of(info: DeviceInfo | VirtualDevice) -> DeviceSpeed:
    """Return the speed of the catalogue's card with the device's name, or of a similar card, which ``source`` names.

    Of several cards with the name, and of cards with the same kind and compute capability, the one with the most
    similar memory counts.
    """
    kind = _kind(info)
    if cards := named(info.description):
        card = min(cards, key=lambda card: _distance(card, info.total))
        return _speed(card, kind or card.profile.partition("-")[0], f"catalogue: {card.description}", True)
    return _default(info, kind)


def named(description: str) -> tuple[CatalogueGpu, ...]:
    """Return the catalogue's cards that match a driver's description.

    Vendor, trade marks and Vulkan's additions in parentheses are ignored, nothing else: a laptop's GPU is not the card
    of that name.
    """
    cards = _cards_by_name()
    return cards.get(_normal(description)) or cards.get(_normal(re.sub(r"\s*\([^()]*\)$", "", description)), ())


@functools.cache
def _cards_by_name() -> dict[str, tuple[CatalogueGpu, ...]]:
    cards: dict[str, tuple[CatalogueGpu, ...]] = {}
    for card in gpu_catalogue.gpus().values():
        for name in dict.fromkeys(map(_normal, card.names)):
            cards[name] = (*cards.get(name, ()), card)
    return cards


def _normal(description: str) -> str:
    """Normalize a name: ``Intel(R) Arc(tm) A770 Graphics`` becomes ``arc a770``."""
    text = re.sub(r"\((?:r|tm)\)|[®™]", " ", description.lower())
    text = " ".join(text.split()).removesuffix(" graphics")
    return re.sub(r"^(nvidia|amd|ati|intel|apple) ", "", text)


def _kind(info: DeviceInfo | VirtualDevice) -> str | None:
    if isinstance(info, VirtualDevice):
        return info.profile.partition("-")[0]
    return _BACKENDS.get(info.backend) or _BACKENDS.get(info.name.rstrip("0123456789"))


def _distance(card: CatalogueGpu, total: int) -> int:
    """Return how far ``total`` is from the memory that the card may report."""
    if card.profile == "metal":
        return min(abs(device_memory.usable("metal", size) - total) for size in card.sizes)
    return min(abs(size - total) for size in (card.total, card.usable or card.total))


# --- cards that the catalogue does not know


def _default(info: DeviceInfo | VirtualDevice, kind: str | None) -> DeviceSpeed:
    default = gpu_catalogue.default()
    kind = kind or default.profile
    if kind != "metal" and (_is_integrated(info) or _driver(info) == "lavapipe"):
        card = gpu_catalogue.gpus()[default.integrated]
        source = f"default: as {card.description}, for a GPU that uses the host's memory"
        return replace(_speed(card, kind, source, False), compute_capability="")
    architecture = _architecture(info)
    if kind == "cuda":
        number = architecture or default.compute_capability
        cards = _alike("cuda", number)
    elif kind == "rocm" and architecture:
        cards = _alike("rocm", architecture)
    else:
        cards = _of_vendor(kind, _driver(info))
    # In whole GiB, since cards differ by that; the first of several equal ones is the most common card.
    card = min(cards, key=lambda card: round(_distance(card, info.total) / _GIB))
    text = gpu_catalogue.capability_text(architecture) if architecture else ""
    among = f"{text} cards" if text else f"{kind} devices"
    source = f"default: as {card.description}, which has the most similar memory of all known {among}"
    return replace(_speed(card, kind, source, False), compute_capability=text)


def _alike(profile: str, architecture: int) -> list[CatalogueGpu]:
    """Return cards of the nearest architecture with memory of their own."""
    cards = [card for card in _cards() if card.profile == profile]
    nearest = min(abs(card.compute_capability - architecture) for card in cards)
    return [card for card in cards if abs(card.compute_capability - architecture) == nearest]


def _of_vendor(kind: str, driver: str) -> list[CatalogueGpu]:
    if kind == "metal":
        return [card for card in gpu_catalogue.gpus().values() if card.profile == "metal"]
    if driver == "nvidia":
        return _alike("cuda", gpu_catalogue.default().compute_capability)
    if driver == "anv":
        return [card for card in _cards() if card.profile == "vulkan-anv"]
    return [card for card in _cards() if card.profile == "rocm" and card.compute_capability >= _OLDEST_RDNA]


def _cards() -> Iterable[CatalogueGpu]:
    return (card for card in gpu_catalogue.gpus().values() if not card.unified)


def _is_integrated(info: DeviceInfo | VirtualDevice) -> bool:
    return isinstance(info, DeviceInfo) and info.type == "igpu"


def _driver(info: DeviceInfo | VirtualDevice) -> str:
    """Return the Vulkan driver of a device, from a virtual device's profile or a real device's description."""
    if isinstance(info, VirtualDevice):
        return info.profile.partition("-")[2]
    text = info.description.lower()
    words = {"llvmpipe": "lavapipe", "lavapipe": "lavapipe", "nvidia": "nvidia", "intel": "anv"}
    return next((driver for word, driver in words.items() if word in text), "")


def _architecture(info: DeviceInfo | VirtualDevice) -> int:
    """Return the compute capability or architecture, also from the description of ``--gpu``; 0 if unknown."""
    if isinstance(info, VirtualDevice):
        return info.compute_capability
    match = re.fullmatch(r"virtual \w+ GPU (\S+)", info.description) if info.virtual else None
    try:
        return gpu_catalogue.capability(match[1].lower()) if match else 0
    except ValueError:
        return 0


# --- from a card to its speed


def _speed(card: CatalogueGpu, kind: str, source: str, known: bool) -> DeviceSpeed:
    compute = card.compute
    if compute is None:
        compute = card.bandwidth * _middle_intensity(card.profile)
        source += "; compute estimated from its bandwidth"
    pcie = card.bandwidth if card.pcie is None else card.pcie
    text = gpu_catalogue.capability_text(card.compute_capability) if card.compute_capability else ""
    return DeviceSpeed(
        card.bandwidth, compute, pcie, kind, text, source, known, nvlink=(card.nvlink or 0.0) if known else 0.0
    )


@functools.cache
def _middle_intensity(profile: str) -> float:
    """Return the median FLOP per byte of the cards with both figures."""
    cards = [card for card in gpu_catalogue.gpus().values() if card.profile == profile]
    intensities = sorted(card.compute / card.bandwidth for card in cards if card.compute)
    middle = len(intensities) // 2
    return (intensities[middle] + intensities[-1 - middle]) / 2
