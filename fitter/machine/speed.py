"""How fast a device computes and reads its memory, and how fast the host does: what its vendor says, or was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceSpeed:
    """Speeds of one device as its vendor publishes them; what llama.cpp makes of them is the cost model's business.

    ``bandwidth``: bytes per second of its memory. ``compute``: dense fp16 FLOP per second with accumulation in fp32, on
    matrix units where it has them. ``pcie``: bytes per second from host to device, theoretical; where the memory is the
    host's own, its bandwidth. ``kind``: ``cuda``, ``rocm``, ``vulkan`` or ``metal``. ``compute_capability``: ``8.9``,
    ``gfx1100``, or empty where there is none or it is not known. ``source``: one line for people. ``known``: whether
    the device is one of the catalogue; else the speeds are a stated default.
    """

    bandwidth: float
    compute: float
    pcie: float
    kind: str
    compute_capability: str
    source: str
    known: bool


@dataclass(frozen=True)
class HostSpeed:
    """``bandwidth`` of the host's memory, bytes per second, as all cores together read it; ``source``: one line.

    ``threads``: how many llama.cpp computes with, its default being one per physical core; 0 where it is not known.
    """

    bandwidth: float
    source: str
    threads: int = 0
