"""The memory of a plan as a picture: a bar for each device, all to one scale, and one for the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fitter.output.drawing import EDGE, NARROW, SMALL, WIDE, Part, fitting, hatch, legend, svg, text
from fitter.output.units import human

PARTS = {
    "model": "weights",
    "context": "KV cache",
    "compute": "compute buffers",
    "shared": "beside the model",
    "later": "later",
    "margin": "margin, stays free",
    "left": "left",
    "taken": "not free",
}
"""What a bar is made of, from left to right: the name of its colour, and what the legend calls it."""

_BAR = 22
_FAR = 3
"""How many times the largest device the host is from which on it has a scale of its own."""
_APART = "the host has a scale of its own"


def places(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The devices of a plan, given as its JSON document, and the host."""
    return [*plan["devices"], {"name": "host", "description": "", **plan["host"]}]


def parts_of(use: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """What a bar is made of, in bytes. Without a limit there is nothing left and no margin."""
    for name in ("model", "context", "compute", "shared", "later"):
        yield name, use.get(name, 0)
    if use["total"] is not None and use["free"] is not None:
        left = max(use["left"], 0)
        margin = min(use["margin"] or 0, left)
        yield "margin", margin
        yield "left", left - margin
        yield "taken", max(min(use["total"] - use["free"], use["total"] - use["used"]), 0)


def bars(plan: Mapping[str, Any], width: int = WIDE) -> tuple[Part, ...]:
    """The bars and their legend. A device without a limit ends with what is used; what lacks goes beyond its memory."""
    shown = places(plan)
    left = 96 if width > NARROW else EDGE
    lacking = {problem["device"]: problem["missing"] for problem in plan.get("problems", ())}
    longest = [max(use["total"] or 0, use["used"]) for use in shown]
    devices = max(longest[:-1], default=0)
    # a host with far more memory would leave nothing to see of the devices
    is_apart = bool(devices) and longest[-1] > _FAR * devices
    common = devices if is_apart else max(longest)
    rows = [
        _row(use, left, width, (width - left - EDGE) / (of if is_apart and use is shown[-1] else common or 1), lacking)
        for use, of in zip(shown, longest, strict=True)
    ]
    if is_apart:
        rows.append(Part((f'<text class="small" x="{left}" y="0">{_APART}</text>',), 16))
    found = {part for use in shown for part, size in parts_of(use) if size}
    entries = [(_shape(part), words) for part, words in PARTS.items() if part in found]
    if lacking:
        entries.append(('class="over"', "no more than this may be used"))
    return (*rows, legend(entries, left, width))


def bars_svg(plan: Mapping[str, Any], title: str = "", *, width: int = WIDE, is_alone: bool = True) -> str:
    """The SVG of a plan's memory, given as its JSON document."""
    label = f"{title}: " if title else ""
    return svg(bars(plan, width), label + said(plan), width=width, title=title, is_alone=is_alone)


def said(plan: Mapping[str, Any]) -> str:
    """The bars in words."""
    return "; ".join(f"{use['name']}: {_used(use)}" for use in places(plan))


def _used(use: Mapping[str, Any]) -> str:
    total = "" if use["total"] is None else f" of {human(use['total'])}"
    return f"{human(use['used'])}{total} used"


def _shape(part: str) -> str:
    return f'class="{part}" {hatch(part)}' if part == "margin" else f'class="{part}"'


def _row(use: Mapping[str, Any], left: float, width: int, scale: float, lacking: Mapping[str, int]) -> Part:
    room = width - left - EDGE
    missing = lacking.get(use["name"], 0)
    lacks = f"lacks {human(missing)}" if missing else ""
    beside = room - (SMALL + 1) * (len(lacks) + 2)
    if width > NARROW:
        bar, words = 12, [use["description"], _used(use)]
        lines = [
            f'<text class="name" x="{left - 12}" y="{bar + 16}" text-anchor="end">{fitting(use["name"], 80)}</text>'
        ]
        lines.append(f'<text class="small" x="{left}" y="6">{fitting(" · ".join(filter(None, words)), beside)}</text>')
    else:
        bar, words = 24 if use["description"] or missing else 8, [use["name"], _used(use)]
        lines = [f'<text class="name" x="{left}" y="2">{fitting(" · ".join(words), room, 7.5)}</text>']
        lines.append(f'<text class="small" x="{left}" y="18">{fitting(use["description"], beside)}</text>')
    if missing:
        y = 6 if width > NARROW else 18
        lines.append(f'<text class="small missing" x="{width - EDGE}" y="{y}" text-anchor="end">{text(lacks)}</text>')
    x = float(left)
    for name, size in parts_of(use):
        if size:
            wide = max(size * scale, 0.5)
            lines.append(
                f'<rect {_shape(name)} x="{x:.1f}" y="{bar}" width="{wide:.1f}" height="{_BAR}">'
                f"<title>{text(PARTS[name])}: {human(size)}</title></rect>"
            )
        x += size * scale
    if missing and use["free"] is not None:
        # where it ends that may be used
        limit = left + max(use["free"] - use["margin"], 0) * scale
        lines.append(f'<path class="limit" d="M{limit:.1f} {bar - 4}v{_BAR + 8}"/>')
    return Part(tuple(lines), bar + _BAR + 24)
