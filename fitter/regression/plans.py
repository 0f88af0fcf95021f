"""Differences between two plans. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fitter.output.documents.document import four_digits
from fitter.output.documents.plan_document import params_to_dict
from fitter.planning.plan.plan import Plan
from fitter.regression.compare import Cause, Move, change, sizes
from fitter.text import LONGEST_NAME, printable

_KINDS = ("model", "context", "compute", "shared", "later", "used")
"""Kinds of memory: of a device and the host the first five, of memory that they share only ``used``."""


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans: numbers (``moves``), and anything else (``changes``)."""

    moves: tuple[Move, ...]
    changes: tuple[Cause, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans are the same."""
        return not (self.moves or self.changes)


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Compare the memory, context, speed, parameters, devices and model of ``b`` with those of ``a``."""
    moves = []
    if a.fits != b.fits:
        moves.append(Move("fits", int(a.fits), int(b.fits), ""))
    memory = _memory(a), _memory(b)
    for name in _devices_first(*memory):
        before, after = (uses.get(name, {}) for uses in memory)
        parts = [
            f"{kind} {change(before.get(kind, 0), after.get(kind, 0), 'bytes')}"
            for kind in _KINDS
            if before.get(kind, 0) != after.get(kind, 0)
        ]
        if parts or bool(before) != bool(after):
            moves.append(Move(name, sum(before.values()), sum(after.values()), "bytes", ", ".join(parts)))
    speeds = _speeds(a), _speeds(b)
    for name in dict.fromkeys((*speeds[0], *speeds[1])):
        old, new = (each.get(name) for each in speeds)
        if old != new:
            moves.append(Move(f"{name} speed", old, new or 0.0, "tokens/s"))
    changes = [*_changes("model", _model(a), _model(b)), *_changes("parameter", _params(a), _params(b))]
    if a.llama_cpp and b.llama_cpp and a.llama_cpp.version != b.llama_cpp.version:
        changes.append(Cause("llama.cpp", "llama.cpp", a.llama_cpp.version, b.llama_cpp.version))
    facts = _facts(a), _facts(b)
    for name in _devices_first(*facts):
        changes += _changes(name, *(each.get(name, {}) for each in facts))
    return PlanDiff(tuple(moves), tuple(changes))


def _devices_first(a: Iterable[str], b: Iterable[str]) -> tuple[str, ...]:
    return (*(name for name in dict.fromkeys((*a, *b)) if name != "host"), "host")


def _changes(kind: str, a: Mapping[str, str | int], b: Mapping[str, str | int]) -> Iterable[Cause]:
    for name in dict.fromkeys((*a, *b)):
        before, after = a.get(name, "none"), b.get(name, "none")
        if before != after:
            yield Cause(kind, name, *sizes(before, after))


def _memory(plan: Plan) -> dict[str, dict[str, int]]:
    """Bytes on each device, on the host, and of each pool in all."""
    devices = {_name(use.name): {kind: getattr(use, kind) for kind in _KINDS[:4]} for use in plan.devices}
    host = {kind: getattr(plan.host, kind) for kind in _KINDS[:5]}
    return {**devices, "host": host, **{_name(pool.name): {"used": pool.used} for pool in plan.pools}}


def _facts(plan: Plan) -> dict[str, dict[str, str | int]]:
    """Description and limits of each device, of the host and of each pool."""
    limits = ("total", "free", "margin")
    facts: dict[str, dict[str, str | int]] = {}
    for use in plan.devices:
        description = {"description": _name(use.description)}
        facts[_name(use.name)] = {**description, **{limit: getattr(use, limit) for limit in limits}}
    for pool in plan.pools:
        facts[_name(pool.name)] = {limit: getattr(pool, limit) for limit in limits}
    sizes_of_host = {"total": plan.host.total, "free": plan.host.free}
    facts["host"] = {limit: "unlimited" if size is None else size for limit, size in sizes_of_host.items()}
    return facts


def _speeds(plan: Plan) -> dict[str, float]:
    kinds = ("prompt", "generation") if plan.estimate else ()
    return {kind: four_digits(getattr(plan.estimate, f"{kind}_tokens_per_second")) for kind in kinds}


def _model(plan: Plan) -> dict[str, str | int]:
    return {
        "name": _name(plan.model.name),
        "architecture": _name(plan.model.architecture),
        "bytes": plan.model.bytes,
    }


def _params(plan: Plan) -> dict[str, str]:
    others = {"program": plan.program, "levers": list(plan.levers), "rpc": list(plan.rpc)}
    return {name: _parameter_text(value) for name, value in (params_to_dict(plan.params) | others).items()}


def _name(text: str) -> str:
    return printable(text, LONGEST_NAME)


def _parameter_text(value: Any) -> str:
    """Write the value of a parameter for people to read."""
    if isinstance(value, list):
        return ",".join(map(_parameter_text, value)) or "none"
    if isinstance(value, dict):
        return "=".join(map(_parameter_text, value.values()))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else printable(str(value))
