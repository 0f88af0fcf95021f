"""Parts of pictures: colours for light and dark, escaped text, one SVG of parts."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from fitter.text import LONGEST_NAME, printable

WIDE, NARROW = 760, 360
"""Widths of pictures: for a page, and for a telephone."""
EDGE = 16
"""Free space at both sides."""
NAMES = 160
"""Width of the names in a wide picture; the bars and rows of all pictures of a page begin there."""

SMALL = 6.5
"""Width of a small letter."""
BOLD = 7.5
"""Width of a letter of a name."""

STYLE = """
.fitter text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: currentColor }
.fitter .title { font-size: 16px; font-weight: 600 } .fitter .name { font-weight: 600 }
.fitter .small { font-size: 12px; opacity: .82 }
.fitter .missing { fill: #cf222e; font-weight: 600; opacity: 1 } .fitter .over { fill: #cf222e }
.fitter .model { fill: #0072b2 } .fitter .context { fill: #e69f00 } .fitter .compute { fill: #009e73 }
.fitter .shared { fill: #cc79a7 } .fitter .later { fill: #9467c8 }
.fitter .left { fill: #8b949e; fill-opacity: .28 } .fitter .taken { fill: #9aa4af }
.fitter .line { stroke: #6e7781; stroke-width: 2 } .fitter .limit { stroke: #cf222e; stroke-width: 2.5 }
.fitter .p0 { fill: #0072b2 } .fitter .p1 { fill: #e69f00 } .fitter .p2 { fill: #009e73 } .fitter .p3 { fill: #cc79a7 }
.fitter .p4 { fill: #56b4e9 } .fitter .p5 { fill: #d55e00 } .fitter .p6 { fill: #f0e442 } .fitter .p7 { fill: #7b4397 }
.fitter .on { font-size: 11px; font-weight: 600; fill: #111 } .fitter .on.p0, .fitter .on.p7 { fill: #fff }
.fitter .layers { stroke: #fff; stroke-width: .6; stroke-opacity: .55 }
"""
"""Style of every picture; it changes nothing on its page, and suits any theme."""

DARK = """
@media screen and (prefers-color-scheme: dark) {
  .fitter .model { fill: #4aa3df } .fitter .context { fill: #f0b429 } .fitter .compute { fill: #2bb38a }
  .fitter .taken { fill: #6e7681 } .fitter .line { stroke: #b1bac4 }
  .fitter .missing, .fitter .over { fill: #ff7b72 } .fitter .limit { stroke: #ff7b72 }
  .fitter .layers { stroke: #0d1117 } .fitter .on.host { fill: #fff }
}
"""
"""Style of a picture that follows the reader's theme."""

_ALONE = ".fitter { color: #1f2328 } @media screen and (prefers-color-scheme: dark) { .fitter { color: #e6edf3 } }"
"""Style of a picture outside a page: the colour of text."""

N_COLOURS = 8


@dataclass(frozen=True)
class Part:
    """Lines of SVG, drawn from the top of the part, and their height."""

    lines: tuple[str, ...]
    height: float


def text(words: str, longest: int | None = LONGEST_NAME) -> str:
    """Write ``words`` as text of SVG, also for attributes: on one line, without invisible characters."""
    return escape(printable(words, longest), {'"': "&quot;", "'": "&#39;"})


def fitting(words: str, width: float, letter: float = SMALL) -> str:
    """Cut ``words`` to ``width``, and escape them."""
    words = printable(words, LONGEST_NAME)
    most = max(int(width / letter), 1)
    return text(words if len(words) <= most else words[: most - 1] + "…")


def svg(parts: Iterable[Part], label: str, *, width: int = WIDE, title: str = "", is_alone: bool = True) -> str:
    """Draw ``parts`` one below the other in one SVG.

    Args:
        parts: The parts.
        label: Their content in words, for screen readers.
        width: The width.
        title: A title.
        is_alone: Whether it brings its style, because it is not part of a page with it.
    """
    drawn: list[str] = []
    y = 12.0
    if title:
        y += 30
        drawn.append(f'<text class="title" x="{EDGE}" y="26">{fitting(title, width - 2 * EDGE, 8.5)}</text>')
    for part in parts:
        drawn += [f'<g transform="translate(0 {y:.0f})">', *part.lines, "</g>"]
        y += part.height
    body = "\n".join(drawn)
    # each of several pictures on a page has its own
    name = f"hatched-{zlib.crc32(body.encode()):08x}"
    space = 'xmlns="http://www.w3.org/2000/svg" ' if is_alone else ""
    return "\n".join(
        [
            f'<svg {space}class="fitter" viewBox="0 0 {width} {y + 4:.0f}" role="img"',
            f'aria-label="{text(label, None)}">',
            *([f"<style>{STYLE}{DARK}{_ALONE}</style>"] if is_alone else []),
            *(_hatched(f"{name}-{kind}", f"{kind}") for kind in HATCHED if f"#{kind}" in body),
            body.replace('fill="url(#', f'fill="url(#{name}-'),
            "</svg>\n",
        ]
    )


HATCHED = ("margin", "host")
"""Hatched kinds, which can be told apart without colours: ``hatch`` gives the ``fill`` of a shape."""


def hatch(kind: str) -> str:
    """Return the attribute of a shape that is hatched."""
    return f'fill="url(#{kind})"'


def _hatched(name: str, kind: str) -> str:
    angle, below = (45, "left") if kind == "margin" else (-45, "taken")
    return (
        f'<defs><pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({angle})"><rect class="{below}" width="6" height="6"/>'
        f'<path class="line" d="M0 0V6"/></pattern></defs>'
    )


def legend(entries: Sequence[tuple[str, str]], left: float, width: float) -> Part:
    """Draw a square and words for each entry, in as many rows as they need: its shape's attributes, and the words."""
    lines: list[str] = []
    x, y = left, 12.0
    for shape, words in entries:
        wide = 28 + SMALL * len(words)
        if x > left and x + wide > width - EDGE:
            x, y = left, y + 20
        narrower = 8 if "over" in shape else 0
        square = f'x="{x + narrower:.0f}" y="{y - 10:.0f}" width="{12 - narrower}" height="12"'
        lines.append(f"<rect {shape} {square}/>")
        lines.append(f'<text class="small" x="{x + 17:.0f}" y="{y:.0f}">{text(words)}</text>')
        x += wide + 8
    return Part(tuple(lines), y + 12)
