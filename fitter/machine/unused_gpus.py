"""GPUs that the system lists while llama.cpp has no device: what is missing, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from fitter.llama.types import DeviceInfo

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
"""Vendors of GPUs that llama.cpp computes with, by the number on the PCI bus."""

_DISPLAY = "0x03"
"""Beginning of the PCI class of display controllers, with and without a connector."""

_DISPLAY_ONLY = frozenset({("0x1002", "0x515e"), ("0x1002", "0x5969"), ("0x1002", "0x4752")})
"""AMD's graphics of server boards: ES1000 and Rage XL (pci-ids.ucw.cz)."""

_SIGNS = {
    "NVIDIA": (("proc/driver/nvidia/gpus/*",), ("dev/nvhost-gpu",), ("dev/dxg", "usr/lib/wsl/lib/libcuda.so*")),
    "AMD": (("dev/kfd",),),
}
"""Files that drivers make where a GPU is on no visible PCI bus (containers, Jetson, WSL); all of a row exist."""

_BACKENDS = {
    "NVIDIA": ("cuda", "vulkan"),
    "AMD": ("hip", "vulkan"),
    "Intel": ("sycl", "vulkan"),
}
"""ggml's backends for a vendor's GPUs."""

_SETTINGS = {"NVIDIA": "-DGGML_CUDA=on", "AMD": "-DGGML_HIP=on", "Intel": "-DGGML_VULKAN=on"}
"""What llama.cpp is built with for a vendor's GPUs."""

_CHECKS = {"NVIDIA": "nvidia-smi", "AMD": "rocminfo", "Intel": "clinfo"}
"""Programs that show whether a vendor's driver works."""


def unused_gpus(devices: Sequence[DeviceInfo], backends: Callable[[], Collection[str]], root: Path = Path("/")) -> str:
    """Say that this machine has a GPU and llama.cpp no device for it; empty if it has one, or there is no GPU.

    Args:
        devices: llama.cpp's devices.
        backends: Lists the names of its ggml backends; called only where there is a GPU.
        root: Directory of ``sys``, ``proc`` and ``dev``.
    """
    if any(device.type in ("gpu", "igpu") for device in devices):
        return ""
    there = vendors(root)
    if not there:
        return ""
    vendor = there[0]
    names = backends()
    if present := [name for name in _BACKENDS[vendor] if name in names]:
        return (
            f"this machine has a GPU of {vendor}, but llama.cpp's backend {present[0]} finds no device: look whether "
            f"its driver works ({_CHECKS[vendor]}), and whether a variable such as CUDA_VISIBLE_DEVICES hides it"
        )
    return (
        f"this machine has a GPU of {vendor}, but this llama.cpp has no backend for it: build it anew with "
        f'CMAKE_ARGS="{_SETTINGS[vendor]}" pip install --force-reinstall --no-cache-dir llama-cpp-python, or name '
        "another one with --llama-cpp"
    )


def vendors(root: Path = Path("/")) -> tuple[str, ...]:
    """List the vendors of this machine's GPUs, those first whose backends are the fastest."""
    there = {*_on_pci(root), *(vendor for vendor, rows in _SIGNS.items() if any(_all_exist(root, row) for row in rows))}
    return tuple(vendor for vendor in _BACKENDS if vendor in there)


def _on_pci(root: Path) -> Iterator[str]:
    for card in root.glob("sys/bus/pci/devices/*"):
        if not _text(card / "class").startswith(_DISPLAY):
            continue
        vendor = _text(card / "vendor")
        # Intel's graphics inside a processor, at bus 00, are hardly faster than the processor
        is_built_in = vendor == "0x8086" and card.name.split(":")[1:2] == ["00"]
        if vendor in _VENDORS and not is_built_in and (vendor, _text(card / "device")) not in _DISPLAY_ONLY:
            yield _VENDORS[vendor]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _all_exist(root: Path, patterns: Sequence[str]) -> bool:
    return all(any(root.glob(pattern)) for pattern in patterns)
