"""The differences between two measurements of one case, and what may have caused them, or between two plans.

Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fitter.llama.types import TensorBuftOverride
from fitter.output.documents.document import four_digits
from fitter.output.documents.plan_document import params_to_dict
from fitter.planning.plan.plan import Plan
from fitter.regression.cases import Budget, Case
from fitter.regression.lockfile import LockedDevice, LockedHost, LockedModel, LockedPool, Memory, Snapshot, expand_types
from fitter.text import LONGEST_NAME, human, printable, speed

Unit = Literal["bytes", "tokens", "layers", "tokens/s", ""]
_NAMED = 6
"""How many tensors a cause lists by name; more are only counted."""
_UNSET = "unset"
_PARTS = ("model", "context", "compute")


@dataclass(frozen=True)
class Move:
    """A number that changed, or exceeds a budget."""

    what: str
    """The compared number's name, such as ``CUDA0``, ``host`` or ``n_ctx``."""
    before: float | None
    """The locked number, or the budget; ``None`` if there was none."""
    after: float
    """The number that was measured now."""
    unit: Unit
    """``bytes``, ``tokens``, ``layers`` or ``tokens/s``; without one, 1 means yes and 0 means no."""
    detail: str = ""
    """The parts that changed."""
    failure: str = ""
    """One sentence if this fails the case; else empty."""
    is_budget: bool = False
    """Whether ``before`` is a budget."""

    @property
    def is_least(self) -> bool:
        """Whether a smaller number is worse, as for everything but memory."""
        return self.unit != "bytes"


@dataclass(frozen=True)
class Cause:
    """A change that may explain changed numbers."""

    kind: str
    """``setting``, ``device``, ``header``, ``llama.cpp`` or ``fitter``."""
    what: str
    """The name of the changed setting, device or file."""
    before: str
    """The old value; empty if there was none."""
    after: str
    """The new value; empty if there is none."""

    def __str__(self) -> str:
        text = f"{self.what} {self.before} → {self.after}" if self.before or self.after else self.what
        return text if self.kind in ("llama.cpp", "fitter") else f"{self.kind}: {text}"


@dataclass(frozen=True)
class CaseComparison:
    """One case, compared with its lock and its budget.

    ``moves``: the numbers that changed. ``causes``: changes that may explain them. ``chosen``: parameters that were
    fitted differently. ``locked`` is ``None`` if the case has a budget but no lock; both are for a set of a fleet.
    """

    name: str
    locked: Snapshot | None
    measured: Snapshot | None
    moves: tuple[Move, ...]
    causes: tuple[Cause, ...]
    chosen: tuple[Cause, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence for each limit that the case exceeds."""
        return tuple(move.failure for move in self.moves if move.failure)

    @property
    def fits(self) -> bool:
        """Whether it fits now."""
        return not self.failures if self.measured is None else self.measured.fits

    @property
    def status(self) -> Literal["failed", "changed", "same"]:
        """``changed``: different from the lock, but within its limits."""
        if self.failures:
            return "failed"
        return "changed" if self.moves or self.causes else "same"


def compare(case: Case, locked: Snapshot | None, measured: Snapshot) -> CaseComparison:
    """Compare the ``measured`` memory with the lock, if there is one, and with the budget of ``case``."""
    moves = [] if locked is None else _moves(case, locked, measured)
    moves += _beyond_budget(case.budget, measured)
    causes = () if locked is None else tuple(_causes(locked, measured))
    chosen = () if locked is None else tuple(_choices(locked, measured))
    return CaseComparison(case.name, locked, measured, tuple(moves), causes, chosen)


# --- moves


def _moves(case: Case, locked: Snapshot, measured: Snapshot) -> list[Move]:
    moves = []
    if locked.fits != measured.fits:
        failure = f"it no longer fits: {missing(measured)}" if locked.fits else ""
        moves.append(Move("fits", int(locked.fits), int(measured.fits), "", failure=failure))
    elif not measured.fits and missing(measured) != missing(locked):
        before, after = (sum(_missing_bytes(snapshot).values()) for snapshot in (locked, measured))
        moves.append(Move("missing", before, after, "bytes", detail=missing(measured)))
    names = dict.fromkeys((*locked.devices, *measured.devices))
    uses: list[tuple[str, LockedDevice | LockedHost | None, LockedDevice | LockedHost | None]] = [
        (name, locked.devices.get(name), measured.devices.get(name)) for name in names
    ]
    for name, old, new in [*uses, ("host", locked.host, measured.host)]:
        before, after = old.used if old else 0, new.used if new else 0
        detail = _detail(old, new)
        if before == after and not detail:
            continue
        allowed = case.max_growth.of(before)
        failure = ""
        if after > before + allowed:
            limit = f"; it may grow by {human(allowed)}" if allowed else ""
            failure = f"{name} takes {_growth_text(before, after)}{limit}"
        moves.append(Move(name, before, after, "bytes", detail, failure))
    for name in dict.fromkeys((*locked.pools, *measured.pools)):
        # what grows there grows on a device or the host, of which it is said whether it may
        used = [pools[name].used if name in pools else 0 for pools in (locked.pools, measured.pools)]
        if used[0] != used[1]:
            moves.append(Move(name, used[0], used[1], "bytes"))
    before, after = _weights(locked.host), _weights(measured.host)
    allowed = case.max_growth.of(before)
    if after > before + allowed:
        failure = f"weights on the host take {_growth_text(before, after)}"
        moves.append(Move("weights on the host", before, after, "bytes", failure=failure))
    if locked.n_ctx != measured.n_ctx:
        shorter = measured.n_ctx < locked.n_ctx
        failure = f"the context has {measured.n_ctx} tokens instead of {locked.n_ctx}" if shorter else ""
        moves.append(Move("context", locked.n_ctx, measured.n_ctx, "tokens", failure=failure))
    return moves + _slower(case, locked, measured)


def _slower(case: Case, locked: Snapshot, measured: Snapshot) -> list[Move]:
    if locked.estimate is None or measured.estimate is None:
        return []
    moves = []
    for kind in ("prompt", "generation"):
        before: float = getattr(locked.estimate, f"{kind}_tokens_per_second")
        after: float = getattr(measured.estimate, f"{kind}_tokens_per_second")
        if before == after:
            continue
        failure = ""
        if after < before * (1 - case.max_slowdown):
            lost = f"{(1 - after / before) * 100:.1f} % slower, and {case.max_slowdown * 100:g} % is allowed"
            failure = f"{kind} is estimated at {speed(after)} tokens/s instead of {speed(before)}: {lost}"
        moves.append(Move(f"{kind} speed", before, after, "tokens/s", failure=failure))
    return moves


def _beyond_budget(budget: Budget, measured: Snapshot) -> list[Move]:
    moves = []
    if budget and not measured.fits:
        moves.append(Move("fits", 1, 0, "", failure=f"it does not fit: {missing(measured)}", is_budget=True))
    used = {name.lower(): device.used for name, device in measured.devices.items()} | {"host": measured.host.used}
    names = {name.lower(): name for name in measured.devices}
    for name, limit in budget.memory.items():
        size = used.get(name, 0)
        if size > limit:
            whose = names.get(name, name)
            over = f"{whose} takes {human(size)}, {human(size - limit)} more than its budget of {human(limit)}"
            moves.append(Move(f"{name} budget", limit, size, "bytes", failure=over, is_budget=True))
    if budget.n_ctx is not None and measured.n_ctx < budget.n_ctx:
        short = f"the context has {measured.n_ctx} tokens, fewer than its budget of {budget.n_ctx}"
        moves.append(Move("context budget", budget.n_ctx, measured.n_ctx, "tokens", failure=short, is_budget=True))
    for kind in ("prompt", "generation"):
        least: float | None = getattr(budget, f"{kind}_tokens_per_second")
        estimated = 0.0 if measured.estimate is None else getattr(measured.estimate, f"{kind}_tokens_per_second")
        if least is not None and estimated < least:
            slow = f"{kind} is estimated at {estimated:g} tokens/s, below its budget of {least:g}"
            moves.append(Move(f"{kind} speed budget", least, estimated, "tokens/s", failure=slow, is_budget=True))
    return moves


def missing(snapshot: Snapshot) -> str:
    """Write the memory that a plan that does not fit lacks on each device and on the host."""
    lacking = [f"{name} lacks {human(size)}" for name, size in _missing_bytes(snapshot).items()]
    return ", ".join(lacking) or "llama.cpp cannot place it"


def _missing_bytes(snapshot: Snapshot) -> dict[str, int]:
    uses: dict[str, LockedDevice | LockedHost | LockedPool]
    uses = {**snapshot.devices, "the host": snapshot.host, **snapshot.pools}
    return {name: use.missing for name, use in uses.items() if use.missing > 0}


def _weights(host: LockedHost) -> int:
    return sum(memory.model for memory in host.memory.values())


def _growth_text(before: int, after: int) -> str:
    part = f", {(after - before) / before * 100:+.1f} %" if before else ""
    return f"{human(after)} instead of {human(before)} ({change(before, after, 'bytes')}{part})"


def change(before: float | None, after: float, unit: Unit) -> str:
    """Write the difference with its sign: ``+12.0 MiB``; small ones to the byte."""
    if before is None or not unit:
        return ""
    delta = after - before
    sign = "+" if delta > 0 else "-" if delta < 0 else "±"
    if unit == "bytes":
        return f"{sign}{human(int(abs(delta)))}"
    if unit in ("tokens", "layers"):
        return f"{sign}{abs(delta):.0f}"
    return f"{sign}{speed(abs(delta))}"


def sizes(before: int | str, after: int | str) -> tuple[str, str]:
    """Write two sizes for people to read, in bytes if they would look the same otherwise; strings stay as they are."""
    first, second = (human(size) if isinstance(size, int) else size for size in (before, after))
    return (f"{before} B", f"{after} B") if first == second else (first, second)


def _detail(old: LockedDevice | LockedHost | None, new: LockedDevice | LockedHost | None) -> str:
    """The parts that changed, and by how much."""
    before, after = _parts(old.memory.values() if old else ()), _parts(new.memory.values() if new else ())
    parts = [f"{name} {change(before[name], after[name], 'bytes')}" for name in _PARTS if before[name] != after[name]]
    for name in ("shared", "later"):
        more = getattr(new, name, 0) - getattr(old, name, 0)
        if more:
            parts.append(f"{name} {change(0, more, 'bytes')}")
    return ", ".join(parts)


def _parts(memories: Iterable[Memory]) -> dict[str, int]:
    rows = tuple(memories)
    return {name: sum(getattr(row, name) for row in rows) for name in _PARTS}


# --- causes


def _causes(locked: Snapshot, measured: Snapshot) -> Iterable[Cause]:
    yield from _changes("setting", locked.settings, measured.settings)
    for name in dict.fromkeys((*locked.devices, *measured.devices)):
        old, new = locked.devices.get(name), measured.devices.get(name)
        if old is None or new is None:
            yield Cause("device", name, old.description if old else "none", new.description if new else "none")
        elif old.description != new.description:
            yield Cause("device", name, old.description, new.description)
        for word in ("total", "free", "margin"):
            if old and new and getattr(old, word) != getattr(new, word):
                yield Cause("device", f"{name} {word}", *sizes(getattr(old, word), getattr(new, word)))
    for name in measured.pools:
        for word in ("total", "free", "margin"):
            sizes_of = [getattr(pools[name], word, 0) for pools in (locked.pools, measured.pools) if name in pools]
            if len(set(sizes_of)) > 1:
                yield Cause("device", f"{name} {word}", *sizes(*sizes_of))
    if locked.model.file != measured.model.file:
        yield Cause("model", "file", locked.model.file, measured.model.file)
    if locked.model.header != measured.model.header:
        yield from _header_causes(locked.model, measured.model)
    if locked.llama_cpp != measured.llama_cpp:
        yield Cause("llama.cpp", "llama.cpp", locked.llama_cpp, measured.llama_cpp)
    if locked.cpu and locked.cpu != measured.cpu:
        yield Cause("llama.cpp", "CPU backend", locked.cpu, measured.cpu or "another one")
    if locked.fitter != measured.fitter:
        yield Cause("fitter", "fitter", locked.fitter, measured.fitter)


def _changes(kind: str, old: Mapping[str, object], new: Mapping[str, object]) -> Iterable[Cause]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield Cause(kind, name, _value_text(name, old.get(name)), _value_text(name, new.get(name)))


def _value_text(name: str, value: object) -> str:
    if value is None:
        return _UNSET
    if isinstance(value, bool):
        return str(value).lower()
    if name in ("margin", "host_margin", "host_memory") and isinstance(value, int):
        return human(value)
    return ", ".join(_value_text(name, item) for item in value) if isinstance(value, tuple) else printable(str(value))


def _header_causes(old: LockedModel, new: LockedModel) -> Iterable[Cause]:
    for name in ("architecture", "name"):
        if getattr(old, name) != getattr(new, name):
            yield Cause("header", name, getattr(old, name), getattr(new, name))
    before, after = expand_types(old.tensors), expand_types(new.tensors)
    changed = [name for name in after if name in before and before[name] != after[name]]
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in changed:
        kinds.setdefault((before[name], after[name]), []).append(name)
    for (was, now), names in kinds.items():
        yield Cause("header", _names(names), was, now)
    if gone := [name for name in before if name not in after]:
        yield Cause("header", _names(gone), "there", "gone")
    if added := [name for name in after if name not in before]:
        yield Cause("header", _names(added), "not there", "there")
    if old.bytes != new.bytes:
        yield Cause("header", "all tensors", *sizes(old.bytes, new.bytes))
    elif not (changed or gone or added):
        yield Cause("header", "its metadata changed, but no tensor's type", "", "")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _choices(locked: Snapshot, measured: Snapshot) -> Iterable[Cause]:
    """Parameters that were fitted differently; those that the user set are among the settings."""
    user_set = {"gpu", *locked.settings, *measured.settings}
    before, after = locked.params.planned(), measured.params.planned()
    for name, old in before.items():
        if old != after[name] and name not in user_set:
            yield Cause("fitted", name, _parameter(old), _parameter(after[name]))


def _parameter(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(_parameter, value)) or "none"
    if isinstance(value, TensorBuftOverride):
        return printable(f"{value.pattern}={value.buffer_type}")
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


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
    changes = [*_plan_changes("model", _model(a), _model(b)), *_plan_changes("parameter", _params(a), _params(b))]
    if a.llama_cpp and b.llama_cpp and a.llama_cpp.version != b.llama_cpp.version:
        changes.append(Cause("llama.cpp", "llama.cpp", a.llama_cpp.version, b.llama_cpp.version))
    facts = _facts(a), _facts(b)
    for name in _devices_first(*facts):
        changes += _plan_changes(name, *(each.get(name, {}) for each in facts))
    return PlanDiff(tuple(moves), tuple(changes))


def _devices_first(a: Iterable[str], b: Iterable[str]) -> tuple[str, ...]:
    return (*(name for name in dict.fromkeys((*a, *b)) if name != "host"), "host")


def _plan_changes(kind: str, a: Mapping[str, str | int], b: Mapping[str, str | int]) -> Iterable[Cause]:
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
