"""The catalogue of known GPUs; ``gpu_catalogue.toml`` has the figures and their sources."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitter.machine import device_memory
from fitter.storage import parse_toml
from fitter.text import MIB


@dataclass(frozen=True)
class Sources:
    """The source of each figure of a card; ``None`` if the figure is unknown or does not exist."""

    compute_capability: str | None
    total: str
    usable: str | None
    free: str
    bandwidth: str | None = None
    compute: str | None = None
    pcie: str | None = None
    nvlink: str | None = None


@dataclass(frozen=True)
class CatalogueGpu:
    """A card. Memory in bytes, speeds in bytes per second.

    Attributes:
        key: Its key in the catalogue.
        description: The driver's name for it.
        profile: Its profile.
        compute_capability: As in ggml-cuda (890 for 8.9, see ``capability``); 0 for Vulkan and Metal.
        total: Its memory.
        usable: The part that the driver leaves; ``None`` if unknown.
        free: The part that llama.cpp can use on an idle card.
        sources: The source of each figure.
        bandwidth: Speed of its memory.
        compute: Dense fp16 FLOP per second with accumulation in fp32; ``None`` if not published.
        pcie: Speed from the host, in one direction.
        unified: Whether it uses the machine's memory. Then ``total`` is all of that (the owner's choice), ``usable`` is
            the part that the system lets the GPU use, and there is no ``pcie``.
        sizes: Memory sizes on sale, if they tell cards apart.
        names: All names by drivers, ``description`` first.
        carved: The part of ``usable`` that is reserved for the GPU.
        nvlink: Speed to cards of its kind, in one direction, if every such card has it; bridges do not count.
    """

    key: str
    description: str
    profile: str
    compute_capability: int
    total: int
    usable: int | None
    free: int
    sources: Sources
    bandwidth: float = 0.0
    compute: float | None = None
    pcie: float | None = None
    unified: bool = False
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    carved: int = 0
    nvlink: float | None = None


@dataclass(frozen=True)
class Default:
    """Assumptions where nothing better is known.

    Attributes:
        free_fraction: Free share of a card's memory.
        free_fraction_rocm: The same for AMD's cards with memory of their own.
        profile: Profile of a GPU that is described only by its size.
        compute_capability: Its compute capability.
        integrated: The card whose speed a GPU without own memory gets.
        host_bandwidth: Bytes per second of a host that is not measured.
        remote_link: Bytes per second of a network that is not measured.
        remote_round_trip: Seconds of its round trip.
    """

    free_fraction: float
    free_fraction_rocm: float
    profile: str
    compute_capability: int
    integrated: str
    host_bandwidth: float
    remote_link: float
    remote_round_trip: float


AMD_OFFSET = 0x1000000
"""The offset that ggml adds to AMD's architecture numbers, to tell them from compute capabilities."""


def capability(text: str) -> int:
    """Convert ``8.9`` to 890, and ``gfx1100`` to ggml's number. Raises ``ValueError``."""
    if match := re.fullmatch(r"gfx([0-9a-f]{3,4})", text):
        return AMD_OFFSET + int(match[1], 16)
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
    if not match:
        raise ValueError(text)
    return int(match[1]) * 100 + int(match[2]) * 10


def capability_text(compute_capability: int) -> str:
    """Convert 890 to ``8.9``, and ggml's number of an AMD architecture to ``gfx1100``."""
    if compute_capability >= AMD_OFFSET:
        return f"gfx{compute_capability - AMD_OFFSET:x}"
    return f"{compute_capability // 100}.{compute_capability % 100 // 10}"


@functools.cache
def default() -> Default:
    """Read the defaults of the catalogue."""
    data = parse_toml(_part("default"))["default"]
    return Default(
        data["free_fraction"],
        data["free_fraction_rocm"],
        data["profile"],
        capability(data["compute_capability"]),
        data["integrated"],
        data["host_bandwidth"],
        data["remote_link"],
        data["remote_round_trip"],
    )


def keys() -> list[str]:
    """List the key of every card without reading the cards."""
    return re.findall(r"^\[gpu\.([^\]]+)\]$", _text(), re.MULTILINE)


@functools.cache
def gpus() -> dict[str, CatalogueGpu]:
    """Read every card, by its key, in the catalogue's order."""
    data = parse_toml(_text())
    return {key: _gpu(key, entry, data) for key, entry in data["gpu"].items()}


def find(name: str) -> CatalogueGpu | None:
    """Find a card by its key or a driver's name; ``None`` if it is unknown or ambiguous.

    Case, spaces, ``NVIDIA GeForce``, ``AMD Radeon``, ``Intel``, ``Apple`` and the name of a Mac are ignored. The memory
    size may be missing (``rtx-3060``) if only one card matches.
    """
    key = _normal(name)
    if part := _part(f"gpu.{key}"):
        # parsing the whole catalogue would take longer than most plans
        parts = [_part("pcie"), part]
        words = set(re.findall(r'"([^"]*)"', "".join(parts)))
        source = [line for line in _part("source").splitlines() if line.partition(" =")[0] in words]
        data = parse_toml("\n".join(["[source]", *source, *parts]))
        return _gpu(key, data["gpu"][key], data)
    cards = gpus()
    matches = [gpu for gpu in cards.values() if key in map(_normal, gpu.names)]
    matches = matches or [gpu for gpu in cards.values() if re.fullmatch(re.escape(key) + r"-[0-9]+gb", gpu.key)]
    return matches[0] if len(matches) == 1 else None


def find_as_written(name: str) -> CatalogueGpu | None:
    """Find a card as ``find`` does, or by a shorter spelling that only one card has: ``RTX4090``, ``4090``, ``p40``.

    For words that a person wrote. A driver's name is found by ``find``, which guesses less.
    """
    if card := find(name):
        return card
    keys = _spelt_so(name)
    return gpus()[keys[0]] if len(keys) == 1 else None


def _spelt_so(name: str) -> list[str]:
    """List the keys that ``name`` spells without some hyphens, without the series, or without the memory size."""
    letters = _normal(name).replace("-", "")
    spelling = re.compile("(?:[a-z]+-)*" + "-?".join(map(re.escape, letters)) + "(-[0-9]+gb)?")
    names = ((gpu.key, map(_normal, (gpu.key, *gpu.names))) for gpu in gpus().values())
    return [key for key, called in names if len(letters) > 1 and any(map(spelling.fullmatch, called))]


def similar(name: str) -> list[str]:
    """Return up to three keys similar to ``name``, the most similar first."""
    import difflib

    key = _normal(name)
    longer = [other for other in gpus() if key and f"-{key}-" in f"-{other}-"]
    close = difflib.get_close_matches(key, list(gpus()), n=3, cutoff=0.6)
    return list(dict.fromkeys([*_spelt_so(name), *longer, *close]))[:3]


_LAPTOP = re.compile(r"(?:^|-)(?:laptop(?:-gpu)?|mobile|notebook)(?:-|$)")


def _normal(name: str) -> str:
    words = re.sub(r"[\s_]+", "-", name.strip().lower().replace("+", ""))
    if found := _LAPTOP.search(words):
        # wherever people write it
        words = f"{words[: found.start()]}-{words[found.end() :]}".strip("-") + "-laptop"
    words = re.sub(r"^(macbook-(pro-|air-)?|mac-(studio-|mini-|pro-)|imac-)", "", words)
    return re.sub(r"^(nvidia-|amd-|intel-|apple-)?(geforce-|radeon-pro-|radeon-|instinct-)?", "", words)


def _gpu(key: str, entry: dict[str, Any], data: dict[str, Any]) -> CatalogueGpu:
    total, usable, free, architecture = (entry.get(name) for name in ("total", "usable", "free", "compute_capability"))
    bandwidth, compute, pcie, nvlink = (entry.get(name) for name in ("bandwidth", "compute", "pcie", "nvlink"))
    assert total is not None
    size = total["mib"] * MIB
    is_amd = entry["profile"] == "rocm" and not entry.get("unified", False)
    share = default().free_fraction_rocm if is_amd else default().free_fraction
    cards = "cards of AMD's" if is_amd else "cards"
    source = data["source"]
    sources = Sources(
        _source(architecture, source),
        total=source[total["source"]],
        usable=_source(usable, source),
        free=_source(free, source) or f"estimated: {share:.0%} of the total, as the smallest share among known {cards}",
        bandwidth=_source(bandwidth, source),
        compute=_source(compute, source),
        pcie=_source(pcie, source),
        nvlink=_source(nvlink, source),
    )
    usable_size = usable["mib"] * MIB if usable else None
    free_size = free["mib"] * MIB if free else int(total["mib"] * share) * MIB
    carved = entry["carved"]["mib"] * MIB if "carved" in entry else 0
    if entry.get("unified", False):
        system = device_memory.system_of(entry["profile"])
        usable_size = device_memory.usable(system, size, carved)
        free_size = device_memory.free(system, size, carved)
        limit = device_memory.limit_of(system).source
        sources = replace(sources, usable=limit, free=limit)
    return CatalogueGpu(
        key,
        entry["description"],
        entry["profile"],
        capability(architecture["value"]) if architecture else 0,
        size,
        usable_size,
        free_size,
        sources,
        entry["bandwidth"]["gbs"] * 1e9,
        compute["tflops"] * 1e12 if compute else None,
        _pcie(pcie, data["pcie"]["lane"]) if pcie else None,
        entry.get("unified", False),
        tuple(size * 2**30 for size in entry.get("memory_gib", ())),
        (entry["description"], *entry.get("also", ())),
        carved,
        nvlink["gbs"] * 1e9 if nvlink else None,
    )


def _pcie(figure: dict[str, Any], lane: dict[str, float]) -> float:
    speed: float = figure["gbs"] if "gbs" in figure else lane[str(figure["generation"])] * figure["lanes"]
    return speed * 1e9


def _source(figure: dict[str, Any] | None, source: dict[str, str]) -> str | None:
    return None if figure is None else source[figure["source"]]


@functools.cache
def _text() -> str:
    return Path(__file__).with_name("gpu_catalogue.toml").read_text(encoding="utf-8")


def _part(name: str) -> str:
    """Return the text of a table of the catalogue; empty if there is none."""
    _, start, rest = _text().partition(f"\n[{name}]\n")
    return start + rest.partition("\n[")[0]
