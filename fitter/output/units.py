"""Bytes for people: the one place where MiB come in from the command line and go out to the screen."""

from __future__ import annotations

MIB = 1024 * 1024


def from_mib(mib: int) -> int:
    """Bytes in ``mib`` MiB."""
    return mib * MIB


def mib(size: int | None) -> str:
    """``size`` bytes in whole MiB, rounded down as llama.cpp's own tools do; ``-`` where there is no limit."""
    return "-" if size is None else str(size // MIB)


def capability_text(compute_capability: int) -> str:
    """890 as ``8.9``, and ggml's number of an AMD architecture as ``gfx1100``."""
    from fitter.machine.catalogue import AMD_OFFSET

    if compute_capability >= AMD_OFFSET:
        return f"gfx{compute_capability - AMD_OFFSET:x}"
    return f"{compute_capability // 100}.{compute_capability % 100 // 10}"


def dummy_loads(count: int) -> str:
    """``1 dummy load``, ``2 dummy loads``."""
    return "1 dummy load" if count == 1 else f"{count} dummy loads"


def human(size: int) -> str:
    """``size`` bytes in the unit that reads best: ``0 B``, ``12.3 MiB``, ``4.1 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
