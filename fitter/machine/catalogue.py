"""The GPUs that fitter knows by name. The numbers and their sources are in ``catalogue.toml``."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1024 * 1024


@dataclass(frozen=True)
class Sources:
    """Where the figures of a card are from; ``usable`` is ``None`` where that figure is not known."""

    compute_capability: str
    total: str
    usable: str | None
    free: str


@dataclass(frozen=True)
class CatalogueGpu:
    """A card: memory in bytes, ``compute_capability`` as ggml-cuda counts it (890 for 8.9, see ``capability``).

    ``total`` is the card's memory, ``usable`` what the driver leaves of it (``None``: not known), ``free`` what an idle
    card leaves to llama.cpp.
    """

    key: str
    description: str
    profile: str
    compute_capability: int
    total: int
    usable: int | None
    free: int
    sources: Sources


@dataclass(frozen=True)
class Default:
    """What a GPU is taken to be where nothing says so: ``free_fraction`` of a card's memory, profile and capability."""

    free_fraction: float
    profile: str
    compute_capability: int


AMD_OFFSET = 0x1000000
"""What ggml adds to the architectures of AMD's cards, so that they are no compute capabilities."""


def capability(text: str) -> int:
    """``8.9`` as 890, and ``gfx1100`` as ggml's number of it. Raises ``ValueError`` where it is neither."""
    if match := re.fullmatch(r"gfx([0-9a-f]{3,4})", text):
        return AMD_OFFSET + int(match[1], 16)
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
    if not match:
        raise ValueError(text)
    return int(match[1]) * 100 + int(match[2]) * 10


@functools.cache
def default() -> Default:
    """The defaults of the catalogue."""
    data = _parsed(_part("default"))["default"]
    return Default(data["free_fraction"], data["profile"], capability(data["compute_capability"]))


@functools.cache
def gpus() -> dict[str, CatalogueGpu]:
    """Every card by its key, in the catalogue's order."""
    data = _parsed(_text())
    return {key: _gpu(key, entry, data["source"]) for key, entry in data["gpu"].items()}


def find(name: str) -> CatalogueGpu | None:
    """The card of that name: a key, or what its driver calls it; case, spaces, ``NVIDIA GeForce`` and ``AMD Radeon`` do
    not matter.

    A name that lacks the memory (``rtx-3060``) is the card where only one has it.
    """
    key = _normal(name)
    if part := _part(f"gpu.{key}"):
        # Not the whole catalogue, which takes longer to parse than most models to plan.
        words = set(re.findall(r'"([^"]*)"', part))
        source = [line for line in _part("source").splitlines() if line.partition(" =")[0] in words]
        data = _parsed("\n".join(["[source]", *source, part]))
        return _gpu(key, data["gpu"][key], data["source"])
    known = gpus()
    matches = [gpu for gpu in known.values() if _normal(gpu.description) == key]
    matches = matches or [gpu for gpu in known.values() if re.fullmatch(re.escape(key) + r"-[0-9]+gb", gpu.key)]
    return matches[0] if len(matches) == 1 else None


def similar(name: str) -> list[str]:
    """Up to three keys that ``name`` may have meant, the likeliest first."""
    import difflib

    key = _normal(name)
    longer = [known for known in gpus() if key and f"-{key}-" in f"-{known}-"]
    close = difflib.get_close_matches(key, list(gpus()), n=3, cutoff=0.6)
    return list(dict.fromkeys([*longer, *close]))[:3]


def _normal(name: str) -> str:
    words = re.sub(r"[\s_]+", "-", name.strip().lower())
    return re.sub(r"^(nvidia-|amd-)?(geforce-|radeon-pro-|radeon-|instinct-)?", "", words)


def _gpu(key: str, entry: dict[str, Any], source: dict[str, str]) -> CatalogueGpu:
    total, usable, free = entry["total"], entry.get("usable"), entry.get("free")
    share = default().free_fraction
    return CatalogueGpu(
        key,
        entry["description"],
        entry["profile"],
        capability(entry["compute_capability"]["value"]),
        total["mib"] * MIB,
        usable["mib"] * MIB if usable else None,
        (free["mib"] if free else int(total["mib"] * share)) * MIB,
        Sources(
            source[entry["compute_capability"]["source"]],
            source[total["source"]],
            source[usable["source"]] if usable else None,
            source[free["source"]]
            if free
            else f"estimated: {share:.0%} of the total, the smallest share among known cards",
        ),
    )


@functools.cache
def _text() -> str:
    return Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")


def _part(name: str) -> str:
    """The table ``[name]`` of the catalogue, "" where there is none."""
    _, start, rest = _text().partition(f"\n[{name}]\n")
    return start + rest.partition("\n[")[0]


def _parsed(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    data: dict[str, Any] = tomllib.loads(text)
    return data
