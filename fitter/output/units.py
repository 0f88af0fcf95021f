"""Write numbers with units for people."""

from __future__ import annotations


def scaled(figure: float | None, unit: int) -> str:
    """Write ``figure`` in ``unit``, with one decimal below 100: ``1008``, ``31.5``; ``-`` if unknown."""
    return "-" if figure is None else f"{figure / unit:.{0 if figure >= 100 * unit else 1}f}"


def dummy_loads(count: int) -> str:
    """Write ``1 dummy load``, ``2 dummy loads``."""
    return "1 dummy load" if count == 1 else f"{count} dummy loads"


def duration(seconds: float) -> str:
    """Write ``seconds`` to three digits: ``1,240 s``, ``12.3 s``, ``0.25 s``, ``4.17 ms``."""
    if seconds >= 100:
        return f"{float(f'{seconds:.3g}'):,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 0.1 or not seconds else f"{1000 * seconds:.3g} ms"


def speed(tokens_per_second: float) -> str:
    """Write tokens per second to three digits: ``1,240``, ``38``, ``2.19``, ``0.56``."""
    if tokens_per_second >= 100:
        return f"{float(f'{tokens_per_second:.3g}'):,.0f}"
    return f"{tokens_per_second:.3g}"
