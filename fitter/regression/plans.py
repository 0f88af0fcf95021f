"""The differences between two plans, as ``fitter --json`` writes them. Sizes in bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitter.errors import UsageError
from fitter.model.files.source import show
from fitter.output.documents.document import SCHEMA
from fitter.regression.compare import Cause, Move, change, sizes
from fitter.regression.toml import read_text
from fitter.text import LONGEST_NAME, printable

_KINDS: Mapping[str, type] = {"fits": bool, "model": dict, "params": dict, "devices": list, "host": dict}
_MEMORY = ("model", "context", "compute")
_MORE = ("shared", "later")
"""What the first plans did not say."""

_USED = "used"
"""What is said of memory that devices share with the host."""


@dataclass(frozen=True)
class PlanFile:
    """A plan that was read from a file.

    ``memory``: bytes on each device and on ``host``: model, context, compute, shared and later; of each pool what is
    used in all. ``about``: the other facts about each of them. ``speeds``: the estimated tokens per second.
    ``llama_cpp``: its version, empty where it is unknown.
    """

    fits: bool
    model: Mapping[str, str | int]
    params: Mapping[str, str]
    memory: Mapping[str, Mapping[str, int]]
    about: Mapping[str, Mapping[str, str | int]]
    speeds: Mapping[str, float]
    llama_cpp: str = ""


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans: numbers (``moves``), and anything else (``changes``)."""

    moves: tuple[Move, ...]
    changes: tuple[Cause, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans are the same."""
        return not (self.moves or self.changes)


def read_plan(path: Path) -> PlanFile:
    """The plan in ``path``, as ``fitter --json`` wrote it. Raises ``UsageError`` for anything else."""
    try:
        document = json.loads(read_text(path))
    except FileNotFoundError:
        raise UsageError(f"{show(path)}: no such file; 'fitter model.gguf --json' writes a plan") from None
    except OSError as error:
        raise UsageError(f"{show(path)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{show(path)} is not JSON: give a file that 'fitter model.gguf --json' wrote") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise UsageError(
            f"{show(path)} has schema {schema}, but this fitter reads schema {SCHEMA}: install a newer fitter"
        )
    try:
        if type(schema) is not int or schema < 1:
            raise ValueError("schema")
        return _plan(document)
    except RecursionError:
        raise UsageError(f"{show(path)} is not a plan that fitter wrote: it has lists inside too many others") from None
    except ValueError as error:
        raise UsageError(f"{show(path)} is not a plan that fitter wrote: its '{error}' is missing or damaged") from None


def diff(a: PlanFile, b: PlanFile) -> PlanDiff:
    """The differences of ``b`` from ``a``: memory, context, speed, parameters, devices and the model."""
    moves = []
    if a.fits != b.fits:
        moves.append(Move("fits", int(a.fits), int(b.fits), ""))
    for name in _devices_first(a.memory, b.memory):
        before, after = a.memory.get(name, {}), b.memory.get(name, {})
        parts = [
            f"{kind} {change(before.get(kind, 0), after.get(kind, 0), 'bytes')}"
            for kind in (*_MEMORY, *_MORE, _USED)
            if before.get(kind, 0) != after.get(kind, 0)
        ]
        if parts or bool(before) != bool(after):
            moves.append(Move(name, sum(before.values()), sum(after.values()), "bytes", ", ".join(parts)))
    for name in dict.fromkeys((*a.speeds, *b.speeds)):
        if a.speeds.get(name) != b.speeds.get(name):
            moves.append(Move(f"{name} speed", a.speeds.get(name), b.speeds.get(name, 0.0), "tokens/s"))
    changes = [*_changes("model", a.model, b.model), *_changes("parameter", a.params, b.params)]
    if a.llama_cpp and b.llama_cpp and a.llama_cpp != b.llama_cpp:
        changes.append(Cause("llama.cpp", "llama.cpp", a.llama_cpp, b.llama_cpp))
    for name in _devices_first(a.about, b.about):
        changes += _changes(name, a.about.get(name, {}), b.about.get(name, {}))
    return PlanDiff(tuple(moves), tuple(changes))


def _devices_first(a: Iterable[str], b: Iterable[str]) -> tuple[str, ...]:
    return (*(name for name in dict.fromkeys((*a, *b)) if name != "host"), "host")


def _changes(kind: str, a: Mapping[str, str | int], b: Mapping[str, str | int]) -> Iterable[Cause]:
    for name in dict.fromkeys((*a, *b)):
        before, after = a.get(name, "none"), b.get(name, "none")
        if before != after:
            yield Cause(kind, name, *sizes(before, after))


def _plan(document: Mapping[str, Any]) -> PlanFile:
    """The plan in a document. Raises ``ValueError`` with the key that is missing or damaged."""
    for key, kind in _KINDS.items():
        _value(document, key, kind)
    devices = {_text(device, "name"): device for device in document["devices"]}
    host, model = document["host"], document["model"]
    pools = {_text(pool, "name"): pool for pool in document.get("pools") or ()}
    estimate = document.get("estimate") or {}
    return PlanFile(
        fits=document["fits"],
        model={
            "name": _text(model, "name"),
            "architecture": _text(model, "architecture"),
            "bytes": _bytes(model, "bytes"),
        },
        params={
            **{printable(name, LONGEST_NAME): _shown(value) for name, value in document["params"].items()},
            "program": _shown(document.get("program", "any")),
            "levers": _shown(document.get("levers", [])),
            "rpc": _shown(document.get("rpc", [])),
        },
        memory={
            **{name: _memory(use) for name, use in {**devices, "host": host}.items()},
            **{name: {_USED: _bytes(pool, "used")} for name, pool in pools.items()},
        },
        about={
            "host": {key: _limit(host, key) for key in ("total", "free")},
            **{
                name: {
                    "description": _text(device, "description"),
                    **{key: _bytes(device, key) for key in ("total", "free", "margin")},
                }
                for name, device in devices.items()
            },
            **{name: {key: _bytes(pool, key) for key in ("total", "free", "margin")} for name, pool in pools.items()},
        },
        speeds={kind: _number(estimate, f"{kind}_tokens_per_second") for kind in ("prompt", "generation") if estimate},
        llama_cpp=_text(document["llama_cpp"], "version") if document.get("llama_cpp") else "",
    )


def _memory(use: Mapping[str, Any]) -> dict[str, int]:
    return {kind: _bytes(use, kind) for kind in _MEMORY} | {kind: _bytes(use, kind) for kind in _MORE if kind in use}


def _value(table: Any, key: str, *kinds: type) -> Any:
    value = table.get(key) if isinstance(table, dict) else None
    if type(value) not in kinds:
        raise ValueError(key)
    return value


def _text(table: Any, key: str) -> str:
    return printable(_value(table, key, str), LONGEST_NAME)


def _bytes(table: Any, key: str) -> int:
    return int(_value(table, key, int))


def _limit(table: Any, key: str) -> str | int:
    return "unlimited" if table.get(key) is None else _bytes(table, key)


def _number(table: Any, key: str) -> float:
    return float(_value(table, key, int, float))


def _shown(value: Any) -> str:
    """The value of a parameter, for people to read."""
    if isinstance(value, list):
        return ",".join(map(_shown, value)) or "none"
    if isinstance(value, dict):
        return "=".join(map(_shown, value.values()))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else printable(str(value))
