"""A plan that ``fitter --json`` wrote, read back. Sizes in bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fitter.errors import UsageError
from fitter.llama.types import Breakdown, LlamaCpp, Params, Row
from fitter.output.documents.document import SCHEMA
from fitter.parameters.kinds import Flag
from fitter.parameters.table import PARAMETERS, PROGRAMS, SHARED, of_a_load
from fitter.planning.plan.plan import Plan
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.limits import check_params
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
from fitter.text import LONGEST_TEXT, printable

_T = TypeVar("_T")

_LARGEST = 64 * 2**20
"""No plan is that long; a model is."""


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in the file ``path``. Keys that this version does not know are passed over.

    What the file does not hold has its default: whether the devices are virtual ones, the number of layers, what the
    time goes to, the keywords of ``fit``.

    Raises ``UsageError`` where there is no such file, or where it is no plan, of another schema, or lacks something.
    """
    try:
        text = _text(Path(path))
        document = json.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: the plan cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: this is not JSON: give a file that fitter --json wrote") from None
    try:
        return _plan(_Entry("", document))
    except _Wrong as wrong:
        raise UsageError(f"{path}: {wrong}") from None


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError
    return data.decode()


class _Wrong(Exception):
    """What is wrong with a document, without the file's name."""


class _Entry:
    """A value of the document with the keys that lead to it. What it does not have raises ``_Wrong``."""

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

    def text(self) -> str:
        return self._plain(str, "a text")

    def shown(self) -> str:
        """A text that is only there to be shown."""
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

    def options(self, known: set[str]) -> tuple[str, ...]:
        """Options of llama-server's, each with its value. It is started with them, so there are no others."""
        words = self.each(_Entry.text)
        if len(words) % 2 or not known.issuperset(words[::2]):
            raise self._wrong("options that a plan has, each with a value")
        return words

    def each(self, kind: Callable[[_Entry], _T]) -> tuple[_T, ...]:
        if not isinstance(self._value, list):
            raise self._wrong("a list")
        return tuple(kind(_Entry(f"{self._where}[{i}]", value)) for i, value in enumerate(self._value))

    def _plain(self, kind: type[_T], what: str) -> _T:
        if not isinstance(self._value, kind) or (isinstance(self._value, bool) and kind is not bool):
            raise self._wrong(what)
        return self._value

    def _wrong(self, what: str) -> _Wrong:
        found = json.dumps(self._value)
        found = found if len(found) <= 40 else f"{found[:40]}…"
        where = f"'{self._where}'" if self._where else "the document"
        return _Wrong(f"{where} is {found}, not {what}")


def _plan(document: _Entry) -> Plan:
    if (schema := document["schema"].whole()) != SCHEMA:
        raise _Wrong(f"it has schema {schema}, but this fitter reads schema {SCHEMA}")
    problems = document["problems"].each(
        lambda entry: Problem(entry["device"].text(), entry["missing"].size(), entry["message"].shown())
    )
    if document["fits"].flag() == bool(problems):
        raise _Wrong("'fits' and 'problems' contradict each other")
    model, params = _model(document["model"]), _params(document["params"])
    devices, host = document["devices"].each(_device), _host(document["host"])
    if unknown := [name for name in params.devices or () if name not in {use.name for use in devices}]:
        raise _Wrong(f"'params.devices' has '{unknown[0]}', which is not in 'devices'")
    breakdown = Breakdown(document["memory"].each(_row), params.devices or (), params.n_ctx)
    return Plan(
        model=model,
        params=params,
        breakdown=breakdown,
        devices=devices,
        host=host,
        search=_search(document["search"]),
        problems=problems,
        estimate=document["estimate"].maybe(lambda entry: _price(entry, breakdown)),
        choices=document["explanation"]["choices"].each(_choice) if "explanation" in document else (),
        bound=document["explanation"]["bound"].maybe(_bound) if "explanation" in document else None,
        levers=document["levers"].each(_Entry.text),
        shared=document["shared"].each(_shared),
        program=document["program"].one_of(*PROGRAMS) if "program" in document else "any",
        later=document["later"].each(_later) if "later" in document else (),
        rpc=document["rpc"].each(_Entry.text),
        notes=document["notes"].each(_Entry.shown) if "notes" in document else (),
        llama_cpp=document["llama_cpp"].maybe(_llama_cpp) if "llama_cpp" in document else None,
        pools=document["pools"].each(_pool) if "pools" in document else (),
    )


def _llama_cpp(entry: _Entry) -> LlamaCpp:
    return LlamaCpp(**{each.name: entry[each.name].shown() for each in fields(LlamaCpp)})


def _price(entry: _Entry, breakdown: Breakdown) -> Price:
    """The two speeds, as the price of a usual request: which one it was, the file does not say."""
    prompt, generation = (
        1 / speed if (speed := entry[f"{kind}_tokens_per_second"].number()) else float("inf")
        for kind in ("prompt", "generation")
    )
    workload = Workload()
    estimate = Estimate(prompt, generation, workload.prompt * prompt + workload.generate * generation)
    return Price(estimate, workload, workload.prompt + workload.generate / 2, (), breakdown)


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
    # plans had a bound before they had reasons
    reasons = entry["reasons"].each(_reason) if "reasons" in entry else ()
    return Bound(
        seconds,
        entry["text"].shown(),
        None if distance is None else seconds * (1 + distance),
        tuple(reason for reason in reasons if reason is not None),
    )


def _reason(entry: _Entry) -> Reason | None:
    """One reason, ``None`` for a kind that this version does not know."""
    kind = next((kind for kind in REASONS if kind == entry["kind"].text()), None)
    seconds, size = entry["seconds"].number(), entry["bytes"].size()
    return None if kind is None else Reason(kind, seconds, size, entry["devices"].each(_Entry.text))


def _model(entry: _Entry) -> ModelSummary:
    name, architecture = entry["name"].shown(), entry["architecture"].shown()
    return ModelSummary(entry["path"].text(), name, architecture, entry["bytes"].size())


_LATER = ("n_outputs_max",)
"""Fields of ``Params`` that the first plans did not have."""


def _params(entry: _Entry) -> Params:
    known = {name: each.kind for name, each in of_a_load().items() if each.is_planned}
    later = {name for name in known if name not in entry and (not hasattr(Params, name) or name in _LATER)}
    values = {
        name: kind.from_json(entry[name]) for name, kind in known.items() if hasattr(Params, name) and name not in later
    }
    # what came later than the first plans is not in all of them
    more = [name for name in known if name not in values and name not in later]
    params = Params.of({**values, **{name: entry[name].maybe(known[name].from_json) for name in more}})
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
        later=entry["later"].size() if "later" in entry else 0,
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
    )


def _later(entry: _Entry) -> Later:
    sizes = entry["bytes"].maybe(_Entry.size), entry["each"].size(), entry["count"].maybe(_Entry.whole)
    return Later(entry["kind"].shown(), *sizes, entry["per_slot"].maybe(_Entry.whole))


def _used(entry: _Entry) -> dict[str, int]:
    return {kind: entry[kind].size() for kind in ("model", "context", "compute", "shared")}


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


_BESIDE = {"-ts"}.union(
    *(each.options for each in PARAMETERS.values() if each.section == SHARED and not isinstance(each.kind, Flag))
)
"""Options for what is beside the model."""


def _shared(entry: _Entry) -> SharedUse:
    def row(part: _Entry) -> Row:
        device = part["device"].maybe(_Entry.text)
        sizes = (part["model"].size(), part["context"].size(), part["compute"].size())
        return Row(device or "Host", device, device is None, *sizes)

    arguments = entry["arguments"].options(_BESIDE)
    return SharedUse(entry["kind"].text(), entry["name"].text(), entry["memory"].each(row), arguments)


def _search(entry: _Entry) -> Search:
    return Search(
        entry["dummy_loads"].whole(),
        entry["seconds"].number(),
        entry["shared_loads"].whole(),
        entry["cut_short"].flag(),
    )
