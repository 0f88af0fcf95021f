"""The documents of ``fitter MODEL --json`` and ``fitter inspect --json``, and the plan of such a document. Bytes."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fitter.errors import UsageError
from fitter.llama.types import Array, Breakdown, LlamaCpp, MetadataValue, Params, Row
from fitter.model.files.source import show
from fitter.output.arguments import arguments
from fitter.output.documents.document import SCHEMA, Entry, Key, document, four_digits, rounded
from fitter.parameters.kinds import Flag
from fitter.parameters.table import PARAMETERS, of_a_load
from fitter.parameters.table import SHARED as SHARED_SECTION
from fitter.parameters.targets import PROGRAMS
from fitter.planning.plan.layer_map import Inspection, LayerSize, RoleSize
from fitter.planning.plan.plan import Alternative, Plan, resolved
from fitter.planning.plan.turns import BestDepth, Depth, Drafting, Turns, UserSpeed
from fitter.planning.pricing.pricing import Price, SpeedAt
from fitter.planning.request.request_limits import check_params
from fitter.planning.request.session import Session
from fitter.planning.request.summary import (
    DeviceUse,
    HostUse,
    LeftOut,
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
from fitter.storage import read_text

BYTES = ("model", "context", "compute")
"""The kinds of memory of a row."""

_SHARED_OPTIONS = {"-ts"}.union(
    *(
        each.options
        for each in PARAMETERS.values()
        if each.section == SHARED_SECTION and not isinstance(each.kind, Flag)
    )
)
"""Options for draft models, vision and LoRA: a server starts with those of a plan, so no others are read."""


def _rows_of_devices(entry: Entry) -> tuple[Row, ...]:
    def row(part: Entry) -> Row:
        device = part["device"].maybe(Entry.text)
        found: Row = ROW_OF_DEVICE.read(part, buffer_type=device or "Host", device=device, is_host=device is None)
        return found

    return entry.each(row)


MODEL = document(ModelSummary, Key("path", read=Entry.text), "name", "architecture", "bytes")
ROW_OF_DEVICE = document(Row, "device", *BYTES)
SHARED = document(
    SharedUse,
    "kind",
    Key("name", read=Entry.text),
    Key("memory", "rows", ROW_OF_DEVICE, read=_rows_of_devices),
    Key("arguments", read=lambda entry: entry.options(_SHARED_OPTIONS)),
)
PROBLEM = document(Problem, "device", "missing", "message")

_USE = (*BYTES, "shared", "used", "left")
_DEVICE = document(DeviceUse, "name", "description", "total", "free", "margin", *_USE, "more_in_use")
_HOST = document(HostUse, "total", "free", "margin", *BYTES, "shared", "later", "used", "left", "more_in_use")
_POOL = document(
    PoolUse,
    *("name", "members", "total", "free", "margin", "used", "left", "mapped_twice", "mapped_between"),
    Key("load_mode", read=lambda entry: entry.maybe(lambda mode: mode.one_of("none"))),
    Key("setting", of=document(Setting, "command", "bytes", "message")),
    "more_in_use",
)
_ROW = document(Row, "buffer_type", "device", "is_host", *BYTES, "reserved")
_SPEEDS = (rounded("prompt_tokens_per_second"), rounded("generation_tokens_per_second"))
_FULL = "Speed of generation when the context of a user is full; null where it is unknown, or nothing is generated."
_GENERATION = "Speed of generation, in tokens per second; null for a model that embeds or ranks texts."
_FULL_CONTEXT = document(SpeedAt, Key("tokens", "live_tokens"), rounded("generation_tokens_per_second"))
_ALTERNATIVE = document(Alternative, "arguments", "n_ctx", *_SPEEDS, Key("measured", "is_measured"), "file_type")
_USERS = document(UserSpeed, "users", *map(rounded, ("seconds", "each", "together")))
_DRAFTING = document(
    Drafting,
    "depth",
    rounded("acceptance"),
    rounded("accepted"),
    Key("assumed", "is_assumed"),
    Key("depths", of=document(Depth, "depth", *map(rounded, ("tokens", "each")))),
    Key("by_users", of=document(BestDepth, "users", "depth", *map(rounded, ("each", "off")))),
)
_SESSION = document(Session, "prompt", "answer", "reused", "turns", "users", "gap")
_TURNS = document(
    Turns,
    Key("session", of=_SESSION),
    rounded("computed"),
    rounded("kept"),
    Key("points", of=_USERS),
    "knee",
    "at_least",
    "holds",
    "why",
    rounded("seconds_if_kept"),
)
_CHOICE = document(Choice, "subject", "chosen", rounded("seconds"), "runner_up", rounded("runner_up_seconds"))
_REASON = document(Reason, "kind", rounded("seconds"), "bytes", "devices")


def _reasons(entry: Entry) -> tuple[Reason, ...]:
    """Read the reasons of kinds that this version knows."""
    return tuple(_REASON.read(each) for each in entry.each(lambda each: each) if each["kind"].text() in REASONS)


_BOUND = document(
    Bound,
    rounded("seconds"),
    "text",
    Key(
        "distance",
        change=four_digits,
        hint=float | None,
        about="How far the plan is from the bound, as a share of it.",
    ),
    Key("reasons", of=_REASON, read=_reasons),
)
_LLAMA_CPP = document(LlamaCpp, "version", "ggml", "commit", "libllama", "key", "cpu")


def _generation(price: Price) -> float | None:
    return four_digits(price.generation_tokens_per_second) if price.input_tokens is None else None


def params_to_dict(params: Params) -> dict[str, Any]:
    """Write the parameters of a load, named as in llama.cpp."""
    parameters = of_a_load()
    written = {name: parameters[name].kind.to_json(value) for name, value in params.planned().items()}
    # schema 1 has kv_unified after op_offload
    before = list(written)[: list(written).index("op_offload") + 1]
    return {name: written[name] for name in (*(name for name in before if name != "kv_unified"), *written)}


def _read_llama_cpp(entry: Entry) -> LlamaCpp:
    """Read a build; the first plans did not have all of its keys."""
    found: LlamaCpp = _LLAMA_CPP.read(entry, **{key.name: "" for key in _LLAMA_CPP.keys if key.name not in entry})
    return found


def _bound_of(plan: Plan) -> SimpleNamespace | None:
    bound = plan.bound
    if bound is None:
        return None
    distance = None if plan.estimate is None else bound.distance(plan.estimate.seconds)
    return SimpleNamespace(seconds=bound.seconds, text=bound.text, distance=distance, reasons=bound.reasons)


PLAN = document(
    Plan,
    "fits",
    Key("program", read=lambda entry: entry.one_of(*PROGRAMS)),
    Key("model", of=MODEL, about=f"{ModelSummary.__doc__}"),
    Key("params", ".", change=lambda plan: params_to_dict(resolved(plan)), hint=Params),
    "own_split",
    Key(
        "arguments",
        ".",
        change=arguments,
        hint=tuple[str, ...],
        about="llama.cpp's command-line arguments for all of it.",
    ),
    Key("devices", of=_DEVICE),
    Key("host", of=_HOST),
    Key("pools", of=_POOL),
    Key("memory", "breakdown.rows", _ROW, about="What llama.cpp measured for each buffer type."),
    Key(
        "estimate",
        of=document(
            Price,
            _SPEEDS[0],
            Key("generation_tokens_per_second", ".", change=_generation, hint=float | None, about=_GENERATION),
            Key("full_context", of=_FULL_CONTEXT, about=_FULL),
            "input_tokens",
            rounded("inputs_per_second"),
        ),
        about="Estimated tokens per second; null where the plan does not fit.",
    ),
    Key("drafting", of=_DRAFTING),
    Key("turns", of=_TURNS),
    Key(
        "explanation",
        ".",
        document(Plan, Key("choices", of=_CHOICE), Key("bound", ".", _BOUND, _bound_of, Bound | None, "bound")),
        hint=Plan,
        about="Why the plan is as it is. Seconds.",
    ),
    "levers",
    Key("shared", of=SHARED),
    Key("later", of=document(Later, "kind", "bytes", "each", "count", "per_slot")),
    Key("left_out", of=document(LeftOut, "device", "reason", "message")),
    "rpc",
    "notes",
    Key("llama_cpp", of=_LLAMA_CPP, read=lambda entry: entry.maybe(_read_llama_cpp)),
    Key(
        "search",
        of=document(
            Search,
            "dummy_loads",
            "shared_loads",
            Key("seconds", change=lambda seconds: round(seconds, 3)),
            Key("cut_short", "is_cut_short"),
        ),
    ),
    Key("problems", of=PROBLEM),
    Key("alternatives", of=_ALTERNATIVE),
    title="A plan of llama-fitter",
)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Write ``plan`` in the published schema."""
    return PLAN.write(plan)


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
        return _plan(Entry(name, document))
    except RecursionError:
        raise UsageError(f"{name}: it has lists or objects inside too many others") from None


def _plan(document: Entry) -> Plan:
    if (schema := document["schema"].whole()) != SCHEMA:
        raise document.error(f"it has schema {schema}, but this fitter reads schema {SCHEMA}: install a newer fitter")
    params = _params(document["params"])
    breakdown = Breakdown(document["memory"].each(_ROW.read), params.devices or (), params.n_ctx)
    words = document["arguments"].each(Entry.text) if "arguments" in document else ("-dev",)
    plan: Plan = PLAN.read(
        document,
        params=params,
        breakdown=breakdown,
        default_devices=() if "-dev" in words else params.devices or (),
        estimate=document["estimate"].maybe(lambda entry: _price(entry, breakdown)),
        choices=document["explanation"]["choices"].each(_CHOICE.read) if "explanation" in document else (),
        bound=document["explanation"]["bound"].maybe(_bound) if "explanation" in document else None,
        # of a search that a later fit would repeat, and nothing checks that they hold together
        drafting=None,
        turns=None,
        alternatives=(),
    )
    if document["fits"].flag() != plan.fits:
        raise document.error("'fits' and 'problems' contradict each other")
    if unknown := [name for name in params.devices or () if name not in {use.name for use in plan.devices}]:
        raise document.error(f"'params.devices' has '{unknown[0]}', which is not in 'devices'")
    return plan


def _price(entry: Entry, breakdown: Breakdown) -> Price:
    """Read the speeds as the price of a usual request; the file does not say which request it was."""
    prompt = _seconds(entry["prompt_tokens_per_second"])
    generation = entry["generation_tokens_per_second"].maybe(_seconds) or 0.0
    tokens = entry["input_tokens"].maybe(Entry.count) if "input_tokens" in entry else None
    workload = Workload() if tokens is None else Workload(tokens, 0)
    estimate = Estimate(prompt, generation, workload.prompt * prompt + workload.generate * generation)
    full = entry["full_context"].maybe(_speed_at) if "full_context" in entry else None
    depths = () if full is None else (full,)
    return Price(estimate, workload, workload.prompt + workload.generate / 2, (), breakdown, depths=depths)


def _speed_at(entry: Entry) -> SpeedAt:
    return SpeedAt(entry["tokens"].count(), _seconds(entry["generation_tokens_per_second"]))


def _seconds(speed: Entry) -> float:
    """Read tokens per second; return seconds per token."""
    rate = speed.number()
    return 1 / rate if rate else float("inf")


def _bound(entry: Entry) -> Bound:
    distance = entry["distance"].maybe(Entry.number)
    bound: Bound = _BOUND.read(entry)
    return bound if distance is None else replace(bound, reached=bound.seconds * (1 + distance))


_LATER = ("embeddings", "moe_cache_size", "load_mtp", "n_rs_seq", "n_outputs_max", "lora")
"""Fields of ``Params`` that the first plans did not have."""


def _params(entry: Entry) -> Params:
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
        raise entry.error(f"'params' is not valid: {error}") from None
    return params


def _metadata(value: MetadataValue) -> Any:
    if isinstance(value, Array):
        return {"type": value.type, "length": value.length, "values": [_metadata(each) for each in value.values]}
    # JSON has no other numbers
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


INSPECTION = document(
    Inspection,
    Key("model", of=MODEL, about=f"{ModelSummary.__doc__}"),
    Key("metadata", change=lambda metadata: {key: _metadata(value) for key, value in metadata.items()}),
    Key("roles", of=document(RoleSize, "role", "count", "bytes")),
    "n_ctx",
    Key(
        "layers",
        of=document(
            LayerSize,
            Key("layer", "index"),
            "bytes",
            Key("weights", change=lambda roles: {role.role: role.bytes for role in roles}, hint=dict[str, int]),
            "context",
        ),
    ),
    Key("memory", "rows", document(Row, "buffer_type", "device", *BYTES)),
    title="What a model is made of",
)
