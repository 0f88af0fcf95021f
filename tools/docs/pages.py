"""A page of the documentation as its blocks of code, and what in their output may differ from one run to the next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Kind(Enum):
    """What is done with a block."""

    CONSOLE = "console"
    PYTHON = "python"
    FILE = "file"
    NOT_RUN = "not run"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Block:
    """A fenced block. Its content is the page's lines from ``first`` to before ``last``, counted from 0."""

    kind: Kind
    language: str
    title: str | None
    first: int
    last: int
    indent: str
    text: str
    is_own: bool
    """Whether its output has figures of the machine that it ran on: they are compared without their digits."""


@dataclass(frozen=True)
class Command:
    """A command of a console block, and what it printed when it was written."""

    text: str
    output: str


_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<info>[^`]*)$")
_NOT_RUN = re.compile(r"^ *<!-- not run: \S.*-->$")
_OWN = re.compile(r"^ *<!-- figures of this machine -->$")
_TITLE = re.compile(r'title="([^"]+)"')


def pages() -> tuple[Path, ...]:
    """README.md and every page below docs/, from the root."""
    return tuple(
        path.relative_to(ROOT) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()
    )


def blocks(page: str) -> Iterator[Block]:
    """Every fenced block of ``page``. Raises ``ValueError`` if one does not end."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        if not (start := _FENCE.match(lines[number])):
            number += 1
            continue
        end = re.compile(rf"^ *{start['marks']}`* *$")
        last = next((i for i in range(number + 1, len(lines)) if end.match(lines[i])), None)
        if last is None:
            raise ValueError(f"line {number + 1}: the block does not end")
        info, indent = start["info"].strip(), start["indent"]
        title = _TITLE.search(info)
        before = lines[number - 1] if number else ""
        yield Block(
            kind=_kind(info, before, title is not None),
            language=info.split()[0] if info else "",
            title=title[1] if title else None,
            first=number + 1,
            last=last,
            indent=indent,
            text="\n".join(line.removeprefix(indent) for line in lines[number + 1 : last]),
            is_own=bool(_OWN.match(before)),
        )
        number = last + 1


def _kind(info: str, before: str, has_title: bool) -> Kind:
    if _NOT_RUN.match(before):
        return Kind.NOT_RUN
    language = info.split()[0] if info else ""
    if has_title:
        return Kind.FILE
    return {"console": Kind.CONSOLE, "python": Kind.PYTHON}.get(language, Kind.UNKNOWN)


def commands(block: Block) -> list[Command]:
    """The commands of a console block. Raises ``ValueError`` if it does not begin with one."""
    found: list[tuple[list[str], list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif not found:
            raise ValueError(f"line {block.first + 1}: a console block begins with '$ COMMAND'")
        elif line.startswith("> ") and not found[-1][1]:
            found[-1][0].append(line[2:])
        else:
            found[-1][1].append(line)
    return [Command("\n".join(words), "\n".join(output)) for words, output in found]


_SECONDS = re.compile(r"\d[\d,]*(?:\.\d+)?(?= ?(?:s|ms|seconds|milliseconds)\b)")
_KEY_SECONDS = re.compile(r"""(seconds(?:["']: |=))\d+(?:\.\d+)?(?:e-?\d+)?""")
# Whether the load that began early was of use is a matter of time, too.
_LOADS = re.compile(r"\d+(?= dummy loads?\b)")
# So is how many alternatives to a plan there was time for.
_ALTERNATIVES = re.compile(r"^ *(?:or|fits with) {4}-.*\n?", re.MULTILINE)
# The last column of a table may have a dash in place of a figure.
_FIGURE = re.compile(r"-?\d[\d,]*(?:\.\d+)?|(?<= )-$", re.MULTILINE)
# Of the table of devices; its last column is the processor's name.
_PROCESSOR = re.compile(r"(?<= cpu CPU ).*$", re.MULTILINE)


def same(written: str, printed: str, *, is_own: bool) -> bool:
    """Whether a page says what was printed but for seconds, where it ``is_own`` also for figures and the processor."""
    return _masked(written, is_own) == _masked(printed, is_own)


def _masked(text: str, is_own: bool) -> str:
    text = "\n".join(line.rstrip() for line in text.splitlines())
    text = _ALTERNATIVES.sub("", text).rstrip("\n")
    text = _LOADS.sub("#", _KEY_SECONDS.sub(r"\1#", _SECONDS.sub("#", text)))
    if is_own:
        # Columns are as wide as their figures.
        text = _PROCESSOR.sub("#", re.sub(r"[ ─━]+", " ", _FIGURE.sub("#", text)))
    return text
