"""Text for people: numbers with units, and text from outside, made safe to show.

Names in a header, paths, lines of llama.cpp and files of a repository come from outside. Only shown text changes: what
is opened, matched or passed to llama.cpp stays as it is. The code that writes quotes, Markdown and so on escapes it.
"""

from __future__ import annotations

MIB = 2**20

LONGEST_NAME = 200
"""Most characters of a name to show."""

LONGEST_TEXT = 1000
"""Most characters of a sentence to show."""

_COMMANDS = ("##[", "##vso[", "##teamcity[")
"""Commands of CI systems, anywhere in a line of a log."""

_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0").union(
    map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
"""Letters and marks that are invisible, though Unicode counts them as printable."""


def printable(text: str, longest: int | None = None) -> str:
    """Make ``text`` one safe line, cut to ``longest`` characters if set.

    White space becomes a blank. Invisible characters are escaped as in Python, such as ``\\x1b``: control characters,
    marks that turn or hide text, lone surrogates, unassigned and private characters. Commands to CI systems are broken
    up.
    """
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    if not text.isprintable() or not _UNSEEN.isdisjoint(text):
        text = "".join(map(_visible_char, text))
    if "##" in text:
        for command in _COMMANDS:
            text = text.replace(command, f"# {command[1:]}")
    return text


def as_log_line(text: str) -> str:
    """Break up a ``::`` at the start of a line, which is a command to GitHub."""
    return text.replace("::", ": :", 1) if text.lstrip().startswith("::") else text


def _visible_char(char: str) -> str:
    if char.isprintable() and char not in _UNSEEN:
        return char
    return " " if char.isspace() else char.encode("unicode_escape").decode()


def human(size: int) -> str:
    """Write bytes in the most readable unit: ``0 B``, ``12.3 MiB``, ``4.1 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def mib(size: int | None) -> str:
    """Convert ``size`` from bytes to whole MiB, rounded down as in llama.cpp's own tools; ``-`` for ``None``."""
    return "-" if size is None else str(size // MIB)


def mib_up(size: int) -> int:
    """Convert ``size`` from bytes to whole MiB, rounded up, for memory that is needed or missing."""
    return -(-size // MIB)


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
