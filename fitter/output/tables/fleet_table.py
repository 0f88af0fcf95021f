"""A fleet as tables: its models, the sets that fit together, and what makes room for what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.output.tables.narrow import table_of
from fitter.output.tables.plan_table import text_of
from fitter.planning.plan.plan import resolved
from fitter.text import human, mib, speed

if TYPE_CHECKING:
    from fitter.planning.fleet.fleet import Fleet, FleetModel
    from fitter.planning.pricing.pricing import Price

_SHOWN = 6
"""Sets and swaps that are shown; with ``-v`` all are."""
_NAMED = 3
"""Devices that are named; of more, the first."""


def fleet_table(fleet: Fleet, *, verbose: bool = False) -> RenderableType:
    """Draw a fleet; ``verbose``: all sets and swaps."""
    parts: list[RenderableType] = [_models(fleet), Text()]
    n_sets = len(fleet.sets) if verbose else _SHOWN
    if len(fleet.sets) == 1:
        parts.append(Text("all of them are in memory together:"))
    else:
        parts.append(Text(f"in memory together ({len(fleet.sets)} sets, with room for no other model):"))
    parts += [*_sets(fleet, n_sets), *_more(len(fleet.sets) - n_sets, "sets"), Text()]
    if fleet.swaps:
        n_swaps = len(fleet.swaps) if verbose else _SHOWN
        parts.append(Text("what is loaded, and what makes room for it:"))
        parts += [Text(line, overflow="fold") for line in _swap_lines(fleet, n_swaps)]
        parts += [*_more(len(fleet.swaps) - n_swaps, "swaps"), Text()]
    parts += [Text(line, overflow="fold") for line in _facts(fleet)]
    return Group(*parts)


def fleet_text(fleet: Fleet) -> str:
    """Draw a fleet as text, or say what does not fit."""
    if not fleet.fits:
        return "\n".join(f"does not fit: {problem}" for problem in fleet.problems)
    return text_of(fleet_table(fleet))


def _models(fleet: Fleet) -> RenderableType:
    columns = ("model", "share", "on", "n_ctx", "tokens/s", "s: request", "alone", "load", "loaded before")
    spare = ("share", "alone", "n_ctx", "load")
    table = table_of(*columns, texts=("on",), spare=spare, names="model", fold=16)
    for model in fleet.models:
        price = model.plan.estimate
        table.add_row(
            model.name + (" (stays)" if model.stays else ""),
            f"{model.share:.0%}",
            _places(model),
            str(resolved(model.plan).n_ctx),
            "-" if price is None else _speed(price),
            _seconds(model.seconds),
            _seconds(model.alone_seconds),
            _seconds(model.load_seconds + model.lost_seconds),
            f"{model.miss:.0%}",
        )
    return table


def _speed(price: Price) -> str:
    """Write tokens per second of an answer, or inputs per second of a model that embeds or ranks texts."""
    inputs = price.inputs_per_second
    return speed(price.generation_tokens_per_second) if inputs is None else f"{speed(inputs)} inputs"


def _places(model: FleetModel) -> str:
    names = [use.name for use in model.plan.devices if use.model + use.context]
    if len(names) > _NAMED:
        return f"{names[0]} and {len(names) - 1} more"
    return ", ".join(names) or "host"


def _sets(fleet: Fleet, count: int) -> list[RenderableType]:
    room = ", ".join(f"{use.name} {mib(use.room)}" for use in fleet.sets[0].uses if use.room is not None)
    lines = [f"  MiB within the margins: {room or 'no limit'}"]
    for each in fleet.sets[:count]:
        uses = ", ".join(f"{use.name} {mib(use.used)}" for use in each.uses if use.used)
        lines.append(f"  {', '.join(each.models)}: {uses}")
    return [Text(line, overflow="fold") for line in lines]


def _swap_lines(fleet: Fleet, count: int) -> list[str]:
    lines = []
    for swap in fleet.swaps[:count]:
        out = f"{', '.join(swap.evicted)} out" if swap.evicted else "nothing out"
        lines.append(f"  {swap.asked}: {out} of {', '.join(swap.running) or 'nothing'} ({swap.share:.1%} of requests)")
    return lines


def _more(count: int, what: str) -> list[RenderableType]:
    return [Text(f"  and {count} more {what} (-v)")] if count > 0 else []


def _facts(fleet: Fleet) -> list[str]:
    beyond = fleet.seconds / fleet.bound_seconds - 1 if fleet.bound_seconds else 0.0
    bound = "that" if beyond < 0.005 else f"{_seconds(fleet.bound_seconds)} s"
    return [
        f"a request takes {_seconds(fleet.seconds)} s on average, with loads; no way to run them beats {bound}",
        f"{_seconds(fleet.alone_seconds)} s if each model had the machine for itself and were always in memory",
        f"models are loaded with {human(int(fleet.disk.bandwidth))}/s ({fleet.disk.source})",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"
