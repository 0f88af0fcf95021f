"""Draws the memory of a plan, a bar for each device, as SVG: ``python -m tools.docs.picture`` draws the README's.

    python -m tools.docs.picture [--check]             # docs/images/plan.svg
    fitter model.gguf --json | python -m tools.docs.picture - > plan.svg

All bars have one scale. Colours follow the reader's light or dark theme. Everything that is not a number is escaped.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "images" / "plan.svg"
SHAPE = "gpt-oss-120b"
OPTIONS: dict[str, Any] = {
    "gpus": ["rtx-5090", "rtx-3090"],
    "host_memory": "64GiB",
    "n_ctx": 0,
    "program": "llama-server",
}
"""What the README's first example asks for."""

WIDTH, LEFT, RIGHT = 760, 96, 24
TOP, ROW, BAR = 62, 58, 22

PARTS = (
    ("model", "weights"),
    ("context", "KV cache"),
    ("compute", "compute buffers"),
    ("shared", "beside the model"),
    ("later", "later"),
    ("margin", "margin, stays free"),
    ("left", "left"),
    ("taken", "not free"),
)
"""What a bar is made of, from left to right: the name of its colour, and what the legend calls it."""

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.small { font-size: 12px; fill: #59636e }
.model { fill: #0072b2 } .context { fill: #e69f00 } .compute { fill: #009e73 } .shared { fill: #cc79a7 }
.later { fill: #56b4e9 }
.margin { fill: url(#hatched) } .left { fill: #eaeef2 } .taken { fill: #b6bec7 }
.line { stroke: #8c959f; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b1 }
  .model { fill: #4aa3df } .context { fill: #f0b429 } .compute { fill: #2bb38a }
  .left { fill: #2a313a } .taken { fill: #57606a } .line { stroke: #768390 }
}
"""


def picture(plan: Mapping[str, Any], title: str) -> str:
    """The SVG of a plan, given as its JSON document. A device without a limit ends with what is used."""
    devices = [*plan["devices"], {"name": "host", "description": "", **plan["host"]}]
    largest = max(max(device["total"] or 0, device["used"]) for device in devices)
    scale = (WIDTH - LEFT - RIGHT) / largest
    height = TOP + ROW * len(devices) + 30
    shown = {part for device in devices for part, size in _parts(device) if size}
    rows = [line for index, device in enumerate(devices) for line in _row(device, TOP + ROW * index, scale)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
            f'aria-label="{_text(title)}">',
            f"<style>{STYLE}</style>",
            '<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse"',
            'patternTransform="rotate(45)">',
            '<rect class="left" width="6" height="6"/><path class="line" d="M0 0V6"/></pattern></defs>',
            f'<text class="title" x="{RIGHT}" y="26">{_text(title)}</text>',
            *rows,
            *_legend([part for part in PARTS if part[0] in shown], height - 12),
            "</svg>\n",
        ]
    )


def _parts(device: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """What a bar is made of, in bytes. Without a limit there is nothing left and no margin."""
    for name in ("model", "context", "compute", "shared", "later"):
        yield name, device.get(name, 0)
    if device["total"] is not None:
        left = max(device["left"], 0)
        margin = min(device["margin"] or 0, left)
        yield "margin", margin
        yield "left", left - margin
        yield "taken", max(min(device["total"] - device["free"], device["total"] - device["used"]), 0)


def _row(device: Mapping[str, Any], y: int, scale: float) -> Iterator[str]:
    bar = y + 8
    yield f'<text x="{LEFT - 12}" y="{bar + 16}" text-anchor="end">{_text(device["name"])}</text>'
    total = "" if device["total"] is None else f" of {_gib(device['total'])}"
    words = [device["description"], f"{_gib(device['used'])}{total} used"]
    yield f'<text class="small" x="{LEFT}" y="{y + 2}">{_text(" · ".join(filter(None, words)))}</text>'
    x = float(LEFT)
    for name, size in _parts(device):
        if size:
            yield (
                f'<rect class="{name}" x="{x:.1f}" y="{bar}" width="{max(size * scale, 0.5):.1f}" height="{BAR}">'
                f"<title>{_text(dict(PARTS)[name])}: {_gib(size)}</title></rect>"
            )
        x += size * scale


def _legend(parts: Sequence[tuple[str, str]], y: int) -> Iterator[str]:
    x = LEFT
    for name, words in parts:
        yield f'<rect class="{name}" x="{x}" y="{y - 10}" width="12" height="12"/>'
        yield f'<text class="small" x="{x + 17}" y="{y}">{words}</text>'
        x += 34 + 7 * len(words)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _text(words: str) -> str:
    return escape(words, {'"': "&quot;"})


def readme_picture() -> str:
    """The picture of the README's first example, planned anew."""
    import fitter
    from tools import shapes

    with tempfile.TemporaryDirectory() as folder:
        plan = fitter.fit(shapes.write(SHAPE, Path(folder)), **OPTIONS)
    title = f"{plan.model.name} with {plan.params.n_ctx:,} tokens of context"
    return picture(plan.to_dict(), title)


def main(words: Sequence[str]) -> int:
    """Draw the plan on stdin, or the README's picture; with ``--check`` status 1 if that one is stale."""
    if words == ["-"]:
        plan = json.load(sys.stdin)
        print(picture(plan, plan["model"]["name"]), end="")
        return 0
    drawn = readme_picture()
    if words == ["--check"]:
        fresh = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == drawn
        if not fresh:
            print(f"{TARGET.relative_to(ROOT)} is stale: run 'python -m tools.docs.picture'", file=sys.stderr)
        return 0 if fresh else 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
