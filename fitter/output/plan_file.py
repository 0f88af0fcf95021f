"""Read a plan that ``fitter --json`` wrote. Bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fitter.errors import UsageError
from fitter.llama.types import Breakdown, LlamaCpp, Params, Row
from fitter.model.files.source import show
from fitter.output.documents.document import SCHEMA
from fitter.parameters.kinds import Flag
from fitter.parameters.table import PARAMETERS, SHARED, of_a_load
from fitter.parameters.targets import PROGRAMS
from fitter.planning.plan.plan import Plan
from fitter.planning.pricing.pricing import Price, SpeedAt
from fitter.planning.request.request_limits import check_params
from fitter.planning.request.summary import (
    DeviceUse,
    HostUse,
    ModelSummary,
    PoolUse,
    Problem,
    Search,
    Setting,
    SharedUse,
)
from fitter.planning.speed.cost import Estimate, Workload
from fitter.planning.speed.explain import REASONS, Bound, Choice, Reason
from fitter.programs.later import Later
from fitter.storage.files import read_text
from fitter.text import LONGEST_TEXT, printable

_T = TypeVar("_T")

_LARGEST = 2**63
"""A number from which on none is of a plan; some have no equal among floating-point numbers."""


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that ``fitter --json`` wrote; unknown keys are ignored.

    A file does not say whether the devices are virtual, the number of layers and the keywords of ``fit``: these have
    their defaults.

    Raises:
        UsageError: The file cannot be read, or is not a plan of this schema.
    """
    path = Path(path)
    try:
        document = json.loads(read_text(path))
    except FileNotFoundError:
        raise UsageError(f"{show(path)}: no such file; 'fitter model.gguf --json' writes a plan") from None
    except OSError as error:
        raise UsageError(f"{show(path)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{show(path)} is not JSON: give a file that 'fitter model.gguf --json' wrote") from None
    return plan_of(document, show(path))


def plan_of(document: Any, name: str) -> Plan:
    """Return the plan of a JSON ``document`` from the place ``name``, as ``read_plan``. Raises ``UsageError``."""
    try:
        return _plan(_Entry("", document))
    except _Wrong as wrong:
        raise UsageError(f"{name}: {wrong}") from None
    except RecursionError:
        raise UsageError(f"{name}: it has lists or objects inside too many others") from None


class _Wrong(Exception):
    """An error in a document, without the file's name."""


class _Entry:
    """A value of the document, and the keys that lead to it. A missing key or a wrong type raises ``_Wrong``."""

    def __init__(self, where: str, value: Any) -> None:
        self._where = where
        self._value = value

    def __getitem__(self, key: str) -> _Entry:
        if not isinstance(self._value, dict):
            raise self._wrong("an object")
        where = f"{self._where}.{key}" if self._where else key
        if key not in self._value:
            raise _Wrong(f"'{where}' is missing: give a plan that this version's fitter --json wrote")
        return _Entry(where, self._value[key])

    def __contains__(self, key: str) -> bool:
        return isinstance(self._value, dict) and key in self._value

    def later(self, key: str, read: Callable[[_Entry], _T], default: _T) -> _T:
        """Read a key that the first plans did not have."""
        return read(self[key]) if key in self else default

    def text(self) -> str:
        return self._plain(str, "a text")

    def shown(self) -> str:
        """Read a text that is only shown."""
        return printable(self.text(), LONGEST_TEXT)

    def flag(self) -> bool:
        return self._plain(bool, "true or false")

    def whole(self) -> int:
        return self._plain(int, "a whole number")

    def size(self) -> int:
        if (size := self._plain(int, "a number of bytes")) < 0:
            raise self._wrong("a number of bytes")
        return size

    def number(self) -> float:
        if isinstance(self._value, float) and abs(self._value) < float("inf"):
            return self._value
        return float(self._plain(int, "a number"))

    def one_of(self, *choices: str) -> Any:
        if self._value not in choices:
            raise self._wrong(f"one of {', '.join(choices)}")
        return self._value

    def maybe(self, kind: Callable[[_Entry], _T]) -> _T | None:
        return None if self._value is None else kind(self)

    def options(self, allowed: set[str]) -> tuple[str, ...]:
        """Read options of llama-server with their values; refuse others, because the server starts with them."""
        words = self.each(_Entry.text)
        if len(words) % 2 or not allowed.issuperset(words[::2]):
            raise self._wrong("options that a plan has, each with a value")
        return words

    def each(self, kind: Callable[[_Entry], _T]) -> tuple[_T, ...]:
        if not isinstance(self._value, list):
            raise self._wrong("a list")
        return tuple(kind(_Entry(f"{self._where}[{i}]", value)) for i, value in enumerate(self._value))

    def _plain(self, kind: type[_T], what: str) -> _T:
        if not isinstance(self._value, kind) or (isinstance(self._value, bool) and kind is not bool):
            raise self._wrong(what)
        if isinstance(self._value, int) and abs(self._value) >= _LARGEST:
            raise self._wrong(what)
        return self._value

    def _wrong(self, what: str) -> _Wrong:
        text = json.dumps(self._value)
        text = text if len(text) <= 40 else f"{text[:40]}…"
        where = f"'{self._where}'" if self._where else "the document"
        return _Wrong(f"{where} is {text}, not {what}")


def _plan(document: _Entry) -> Plan:
    if (schema := document["schema"].whole()) != SCHEMA:
        raise _Wrong(f"it has schema {schema}, but this fitter reads schema {SCHEMA}: install a newer fitter")
    problems = document["problems"].each(
        lambda entry: Problem(entry["device"].text(), entry["missing"].size(), entry["message"].shown())
    )
    if document["fits"].flag() == bool(problems):
        raise _Wrong("'fits' and 'problems' contradict each other")
    model, params = _model(document["model"]), _params(document["params"])
    devices, host = document["devices"].each(_device), _host(document["host"])
    if unknown := [name for name in params.devices or () if name not in {use.name for use in devices}]:
        raise _Wrong(f"'params.devices' has '{unknown[0]}', which is not in 'devices'")
    words = document["arguments"].each(_Entry.text) if "arguments" in document else ("-dev",)
    breakdown = Breakdown(document["memory"].each(_row), params.devices or (), params.n_ctx)
    return Plan(
        model=model,
        params=params,
        breakdown=breakdown,
        devices=devices,
        host=host,
        search=_search(document["search"]),
        problems=problems,
        default_devices=() if "-dev" in words else params.devices or (),
        estimate=document["estimate"].maybe(lambda entry: _price(entry, breakdown)),
        choices=document["explanation"]["choices"].each(_choice) if "explanation" in document else (),
        bound=document["explanation"]["bound"].maybe(_bound) if "explanation" in document else None,
        levers=document.later("levers", lambda entry: entry.each(_Entry.text), ()),
        shared=document.later("shared", lambda entry: entry.each(_shared), ()),
        program=document.later("program", lambda entry: entry.one_of(*PROGRAMS), "any"),
        own_split=document.later("own_split", lambda entry: entry.each(_Entry.number), ()),
        later=document.later("later", lambda entry: entry.each(_read_later), ()),
        rpc=document.later("rpc", lambda entry: entry.each(_Entry.text), ()),
        notes=document.later("notes", lambda entry: entry.each(_Entry.shown), ()),
        llama_cpp=document.later("llama_cpp", lambda entry: entry.maybe(_llama_cpp), None),
        pools=document.later("pools", lambda entry: entry.each(_pool), ()),
    )


def _llama_cpp(entry: _Entry) -> LlamaCpp:
    return LlamaCpp(**{each.name: entry.later(each.name, _Entry.shown, "") for each in fields(LlamaCpp)})


def _price(entry: _Entry, breakdown: Breakdown) -> Price:
    """Read the speeds as the price of a usual request; the file does not say which request it was."""
    prompt = _seconds(entry["prompt_tokens_per_second"])
    generation = entry["generation_tokens_per_second"].maybe(_seconds) or 0.0
    tokens = entry.later("input_tokens", lambda each: each.maybe(_Entry.whole), None)
    workload = Workload() if tokens is None else Workload(tokens, 0)
    estimate = Estimate(prompt, generation, workload.prompt * prompt + workload.generate * generation)
    full = entry.later("full_context", lambda each: each.maybe(_speed_at), None)
    depths = () if full is None else (full,)
    return Price(estimate, workload, workload.prompt + workload.generate / 2, (), breakdown, depths=depths)


def _speed_at(entry: _Entry) -> SpeedAt:
    return SpeedAt(entry["tokens"].whole(), _seconds(entry["generation_tokens_per_second"]))


def _seconds(speed: _Entry) -> float:
    """Read tokens per second; return seconds per token."""
    rate = speed.number()
    return 1 / rate if rate else float("inf")


def _choice(entry: _Entry) -> Choice:
    return Choice(
        entry["subject"].shown(),
        entry["chosen"].shown(),
        entry["seconds"].number(),
        entry["runner_up"].maybe(_Entry.shown),
        entry["runner_up_seconds"].maybe(_Entry.number),
    )


def _bound(entry: _Entry) -> Bound:
    seconds, distance = entry["seconds"].number(), entry["distance"].maybe(_Entry.number)
    # the first plans with a bound had no reasons
    reasons = entry["reasons"].each(_reason) if "reasons" in entry else ()
    return Bound(
        seconds,
        entry["text"].shown(),
        None if distance is None else seconds * (1 + distance),
        tuple(reason for reason in reasons if reason is not None),
    )


def _reason(entry: _Entry) -> Reason | None:
    """Read a reason; ``None`` for a kind that this version does not know."""
    kind = next((kind for kind in REASONS if kind == entry["kind"].text()), None)
    seconds, size = entry["seconds"].number(), entry["bytes"].size()
    return None if kind is None else Reason(kind, seconds, size, entry["devices"].each(_Entry.text))


def _model(entry: _Entry) -> ModelSummary:
    name, architecture = entry["name"].shown(), entry["architecture"].shown()
    return ModelSummary(entry["path"].text(), name, architecture, entry["bytes"].size())


_LATER = ("n_outputs_max",)
"""Fields of ``Params`` that the first plans did not have."""


def _params(entry: _Entry) -> Params:
    kinds = {name: each.kind for name, each in of_a_load().items() if each.is_planned}
    values = {}
    for name, kind in kinds.items():
        if not hasattr(Params, name):
            # a parameter of Params.more, which the first plans did not have
            if name in entry:
                values[name] = entry[name].maybe(kind.from_json)
        elif name in entry or name not in _LATER:
            values[name] = kind.from_json(entry[name])
    params = Params.of(values)
    try:
        check_params(params)
    except UsageError as error:
        raise _Wrong(f"'params' is not valid: {error}") from None
    return params


def _device(entry: _Entry) -> DeviceUse:
    return DeviceUse(
        name=entry["name"].text(),
        description=entry["description"].shown(),
        total=entry["total"].size(),
        free=entry["free"].size(),
        margin=entry["margin"].size(),
        **_used(entry),
    )


def _host(entry: _Entry) -> HostUse:
    return HostUse(
        total=entry["total"].maybe(_Entry.size),
        free=entry["free"].maybe(_Entry.size),
        margin=entry["margin"].size(),
        **_used(entry),
        later=entry.later("later", _Entry.size, 0),
    )


def _pool(entry: _Entry) -> PoolUse:
    return PoolUse(
        name=entry["name"].shown(),
        total=entry["total"].size(),
        free=entry["free"].size(),
        margin=entry["margin"].size(),
        used=entry["used"].size(),
        members=entry["members"].each(_Entry.text),
        mapped_twice=entry["mapped_twice"].size(),
        mapped_between=entry["mapped_between"].size(),
        load_mode=entry["load_mode"].maybe(lambda each: str(each.one_of("none"))),
        setting=entry["setting"].maybe(
            lambda each: Setting(each["command"].shown(), each["bytes"].size(), each["message"].shown())
        ),
        more_in_use=entry.later("more_in_use", _Entry.size, 0),
    )


def _read_later(entry: _Entry) -> Later:
    sizes = entry["bytes"].maybe(_Entry.size), entry["each"].size(), entry["count"].maybe(_Entry.whole)
    return Later(entry["kind"].shown(), *sizes, entry["per_slot"].maybe(_Entry.whole))


def _used(entry: _Entry) -> dict[str, int]:
    sizes = {kind: entry[kind].size() for kind in ("model", "context", "compute")}
    return {**sizes, **{name: entry.later(name, _Entry.size, 0) for name in ("shared", "more_in_use")}}


def _row(entry: _Entry) -> Row:
    return Row(
        entry["buffer_type"].text(),
        entry["device"].maybe(_Entry.text),
        entry["is_host"].flag(),
        entry["model"].size(),
        entry["context"].size(),
        entry["compute"].size(),
        entry["reserved"].maybe(_Entry.size),
    )


_SHARED_OPTIONS = {"-ts"}.union(
    *(each.options for each in PARAMETERS.values() if each.section == SHARED and not isinstance(each.kind, Flag))
)
"""Options for draft models, vision and LoRA."""


def _shared(entry: _Entry) -> SharedUse:
    def row(part: _Entry) -> Row:
        device = part["device"].maybe(_Entry.text)
        sizes = (part["model"].size(), part["context"].size(), part["compute"].size())
        return Row(device or "Host", device, device is None, *sizes)

    arguments = entry["arguments"].options(_SHARED_OPTIONS)
    return SharedUse(entry["kind"].text(), entry["name"].text(), entry["memory"].each(row), arguments)


def _search(entry: _Entry) -> Search:
    return Search(
        entry["dummy_loads"].whole(),
        entry["seconds"].number(),
        entry["shared_loads"].whole(),
        entry["cut_short"].flag(),
    )
