"""Text that others wrote, made fit to be shown: names in a header, paths, llama.cpp's log, files of a repository.

It is for showing. What is opened, matched or handed to llama.cpp stays what it is. What one format needs beyond this,
such as quotes or Markdown's escapes, is the business of whoever writes that format.
"""

from __future__ import annotations

LONGEST_NAME = 200
"""Characters of a name that are shown."""

LONGEST_TEXT = 1000
"""The same of a sentence."""

_COMMANDS = ("##[", "##vso[", "##teamcity[")
"""What a CI that collects a log takes for a command, wherever in a line it stands."""

_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0").union(
    map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
"""Letters and marks, by Unicode, that nobody sees."""


def printable(text: str, longest: int | None = None) -> str:
    """``text`` on one line, where nothing in it acts; cut to ``longest`` characters, where that is given.

    White space becomes a blank. Whatever else has no sign of its own is written as Python escapes it, such as
    ``\\x1b``: control characters, marks that turn or hide text, halves of characters, unassigned and private ones.
    A command to a CI is taken apart.
    """
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    if not text.isprintable() or not _UNSEEN.isdisjoint(text):
        text = "".join(map(_shown, text))
    if "##" in text:
        for command in _COMMANDS:
            text = text.replace(command, f"# {command[1:]}")
    return text


def as_log_line(text: str) -> str:
    """``text``, the line of a log, where it does not begin with ``::``, which is a command to GitHub."""
    return text.replace("::", ": :", 1) if text.lstrip().startswith("::") else text


def _shown(char: str) -> str:
    if char.isprintable() and char not in _UNSEEN:
        return char
    return " " if char.isspace() else char.encode("unicode_escape").decode()


def human(size: int) -> str:
    """``size`` bytes in the unit that reads best: ``0 B``, ``12.3 MiB``, ``4.1 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
