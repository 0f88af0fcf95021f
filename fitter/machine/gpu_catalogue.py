"""The GPUs that fitter knows by name. The numbers and their sources are in ``catalogue.toml``."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitter.machine import shared_memory
from fitter.storage.data_files import parse_toml
from fitter.text import MIB


@dataclass(frozen=True)
class Sources:
    """The source of each figure of a card; ``None`` if the figure is not known, or if the card has none."""

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
    """A card. Memory in bytes.

    ``compute_capability``: as ggml-cuda counts it (890 for 8.9, see ``capability``), 0 for Vulkan and Metal.
    ``total``: the card's memory. ``usable``: what the driver leaves of it (``None``: not known). ``free``: what
    llama.cpp can use on an idle card.

    ``bandwidth``: of its memory, ``pcie``: from the host, in one direction, and ``nvlink``: to cards of its kind, in
    one direction, where every such card has it (bridges are not assumed); all in bytes per second. ``compute``: dense
    fp16 FLOP per second with accumulation in fp32, ``None`` if not published. ``unified``: it uses the machine's own
    memory: ``total`` is all of that, its size the owner's choice, ``usable`` what the system lets the GPU use, of which
    ``carved`` is set aside for it, and there is no ``pcie``. ``sizes``: the sizes that it is sold with, if these tell
    cards apart. ``names``: what drivers call it, ``description`` first.
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
    """What is assumed if nothing better is known.

    ``free_fraction``: the free share of a card's memory, ``free_fraction_rocm`` that of AMD's cards with memory of
    their own. ``profile``, ``compute_capability``: of a GPU that is given only by its size. ``integrated``: the card
    whose speed a GPU without memory of its own gets. ``host_bandwidth``: bytes per second of a host that was not
    measured. ``remote_link``, bytes per second, and ``remote_round_trip``, seconds: of a network that was not measured.
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
"""What ggml adds to the architecture numbers of AMD's cards, to tell them from compute capabilities."""


def capability(text: str) -> int:
    """``8.9`` as 890, and ``gfx1100`` as ggml's number for it. Raises ``ValueError`` for anything else."""
    if match := re.fullmatch(r"gfx([0-9a-f]{3,4})", text):
        return AMD_OFFSET + int(match[1], 16)
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
    if not match:
        raise ValueError(text)
    return int(match[1]) * 100 + int(match[2]) * 10


def capability_text(compute_capability: int) -> str:
    """890 as ``8.9``, and ggml's number of an AMD architecture as ``gfx1100``: the reverse of ``capability``."""
    if compute_capability >= AMD_OFFSET:
        return f"gfx{compute_capability - AMD_OFFSET:x}"
    return f"{compute_capability // 100}.{compute_capability % 100 // 10}"


@functools.cache
def default() -> Default:
    """The defaults of the catalogue."""
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


@functools.cache
def gpus() -> dict[str, CatalogueGpu]:
    """Every card by its key, in the catalogue's order."""
    data = parse_toml(_text())
    return {key: _gpu(key, entry, data) for key, entry in data["gpu"].items()}


def find(name: str) -> CatalogueGpu | None:
    """The card of that name, which is a key or a driver's name for it.

    Case, spaces, ``NVIDIA GeForce``, ``AMD Radeon``, ``Intel`` and ``Apple`` are ignored. The size of the memory may be
    left out of a name (``rtx-3060``) if only one card matches.
    """
    key = _normal(name)
    if part := _part(f"gpu.{key}"):
        # Parsing the whole catalogue would take longer than planning for most models.
        parts = [_part("pcie"), part]
        words = set(re.findall(r'"([^"]*)"', "".join(parts)))
        source = [line for line in _part("source").splitlines() if line.partition(" =")[0] in words]
        data = parse_toml("\n".join(["[source]", *source, *parts]))
        return _gpu(key, data["gpu"][key], data)
    known = gpus()
    matches = [gpu for gpu in known.values() if key in map(_normal, gpu.names)]
    matches = matches or [gpu for gpu in known.values() if re.fullmatch(re.escape(key) + r"-[0-9]+gb", gpu.key)]
    return matches[0] if len(matches) == 1 else None


def similar(name: str) -> list[str]:
    """Up to three keys that are similar to ``name``, the most similar first."""
    import difflib

    key = _normal(name)
    longer = [known for known in gpus() if key and f"-{key}-" in f"-{known}-"]
    close = difflib.get_close_matches(key, list(gpus()), n=3, cutoff=0.6)
    return list(dict.fromkeys([*longer, *close]))[:3]


def _normal(name: str) -> str:
    words = re.sub(r"[\s_]+", "-", name.strip().lower())
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
        system = shared_memory.system_of(entry["profile"])
        usable_size = shared_memory.usable(system, size, carved)
        free_size = shared_memory.free(system, size, carved)
        limit = shared_memory.limit_of(system).source
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
    """The text of the table ``[name]`` of the catalogue; empty if there is none."""
    _, start, rest = _text().partition(f"\n[{name}]\n")
    return start + rest.partition("\n[")[0]
