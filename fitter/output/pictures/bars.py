"""A picture of a plan's memory: a bar for each device on one scale, and one for the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fitter.output.pictures.drawing import (
    BOLD,
    EDGE,
    NAMES,
    NARROW,
    SMALL,
    WIDE,
    Part,
    fitting,
    hatch,
    legend,
    svg,
    text,
)
from fitter.text import human

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
"""Parts of a bar from left to right: name of the colour, words of the legend."""

_TAKEN = ("model", "context", "compute", "shared", "later")
_BAR = 22
_BOLD = 9.8
"""Width of a wide letter of a name."""
_FAR = 3
"""A host that is larger than the largest device by this factor gets its own scale."""


def shown(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries with a bar, from a plan's JSON document: devices, host, and memory that they share."""
    uses = [_loaded(use) for use in (*plan["devices"], {"name": "host", "description": "", **plan["host"]})]
    return [*uses, *(_pool(pool, uses) for pool in plan.get("pools", ()))]


def _loaded(use: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the memory of a real load, whose compute buffers may be larger."""
    more = use.get("more_in_use", 0)
    left = use["left"]
    loaded = {"used": use["used"] + more, "left": None if left is None else left - more}
    return {**use, **loaded, "compute": use.get("compute", 0) + more, "more_in_use": 0} if more else use


def _pool(pool: Mapping[str, Any], uses: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    members = [use for use in uses if use["name"] in pool["members"]]
    sums = {name: sum(use.get(name, 0) for use in members) for name in _TAKEN}
    # pages of the file that both map count once
    return {**_loaded(pool), **sums, "model": sums["model"] - pool["mapped_twice"], "description": "what they share"}


def parts_of(use: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """List the parts of a bar in bytes. Without a limit there is no rest and no margin."""
    for name in _TAKEN:
        yield name, use.get(name, 0)
    if use["total"] is not None and use["free"] is not None:
        left = max(use["left"], 0)
        margin = min(use["margin"] or 0, left)
        yield "margin", margin
        yield "left", left - margin
        yield "taken", max(min(use["total"] - use["free"], use["total"] - use["used"]), 0)


def bars(plan: Mapping[str, Any], width: int = WIDE) -> tuple[Part, ...]:
    """Draw the bars and their legend. A bar without a limit ends with the used bytes; missing bytes exceed memory."""
    rows_of = shown(plan)
    n_devices = len(plan["devices"])
    left = NAMES if width > NARROW else EDGE
    lacking = {problem["device"]: problem["missing"] for problem in plan.get("problems", ())}
    longest = [max(use["total"] or 0, use["used"]) for use in rows_of]
    devices = max(longest[:n_devices], default=0)
    others = max(longest[n_devices:])
    # a host with far more memory would leave nothing to see of the devices
    is_apart = bool(devices) and others > _FAR * devices
    scales = [devices if is_apart else max(devices, others)] * n_devices
    scales += [others if is_apart else max(devices, others)] * (len(rows_of) - n_devices)
    rows = [
        _row(use, left, width, (width - left - EDGE) / (scale or 1), lacking)
        for use, scale in zip(rows_of, scales, strict=True)
    ]
    if is_apart:
        words = "the host has a scale of its own" + (", as what it shares" if plan.get("pools") else "")
        rows.append(Part((f'<text class="small" x="{left}" y="0">{words}</text>',), 16))
    parts = {part for use in rows_of for part, size in parts_of(use) if size}
    entries = [(_shape(part), words) for part, words in PARTS.items() if part in parts]
    if lacking:
        entries.append(('class="over"', "no more than this may be used"))
    return (*rows, legend(entries, left, width))


def bars_svg(plan: Mapping[str, Any], title: str = "", *, width: int = WIDE, is_alone: bool = True) -> str:
    """Draw the SVG of a plan's memory, given as its JSON document."""
    label = f"{title}: " if title else ""
    return svg(bars(plan, width), label + said(plan), width=width, title=title, is_alone=is_alone)


def said(plan: Mapping[str, Any]) -> str:
    """Describe the bars in words."""
    return "; ".join(f"{use['name']}: {_used(use)}" for use in shown(plan))


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
        name = fitting(use["name"], left - 12 - EDGE, _BOLD)
        # a name that does not fit there stands above the bar
        bar, words = 12, ["" if name == text(use["name"]) else use["name"], use["description"], _used(use)]
        lines = [f'<text class="name" x="{left - 12}" y="{bar + 16}" text-anchor="end">{name}</text>']
        lines.append(f'<text class="small" x="{left}" y="6">{fitting(" · ".join(filter(None, words)), beside)}</text>')
    else:
        bar, words = 24 if use["description"] or missing else 8, [use["name"], _used(use)]
        lines = [f'<text class="name" x="{left}" y="2">{fitting(" · ".join(words), room, BOLD)}</text>']
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
        # the end of the usable memory
        limit = left + max(use["free"] - use["margin"], 0) * scale
        lines.append(f'<path class="limit" d="M{limit:.1f} {bar - 4}v{_BAR + 8}"/>')
    return Part(tuple(lines), bar + _BAR + 24)
