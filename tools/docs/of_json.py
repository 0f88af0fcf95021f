"""The shape of every JSON document, as JSON schema and as a reference page.

Types and meanings are those of the dataclasses that a document is made of, and of the table of parameters.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from fitter.api.compare_builds import OnBuild
from fitter.llama.types import Array, DeviceInfo, LlamaCpp, Params, Row
from fitter.machine.gpu_catalogue import CatalogueGpu, Sources
from fitter.model.shapes.listing import ShapeInfo
from fitter.output.plan_json import SCHEMA
from fitter.parameters import kinds
from fitter.parameters.kinds import Kind
from fitter.parameters.table import Parameter, of_a_load
from fitter.parameters.values import Lora, TensorBuftOverride
from fitter.planning.checked.calibration import Calibration, Comparison, DeviceCalibration, Difference
from fitter.planning.plan.inspection import Inspection, LayerSize, RoleSize
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.verified import LaterUse, MemoryUse, ServerUse, Verification
from fitter.planning.pricing.pricing import Price
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
from fitter.planning.speed.explain import Bound, Choice, Reason
from fitter.planning.tables.exploration import Exploration, ExploredAnswer, ExploredCell
from fitter.planning.tables.quantizations import Quantization, Quantizations
from fitter.planning.tables.repository import Repository, RepositoryFile, SideFile
from fitter.programs.later import Later
from fitter.regression.check_cases import CaseResult
from fitter.regression.compare import CaseComparison, Cause, Move
from fitter.regression.plans import PlanDiff
from tools.docs.attributes import documented, hints_of
from tools.docs.markdown import code, heading, page, plain, sentence, table

Schema = dict[str, Any]

_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def schema_of(hint: Any) -> Schema:
    """The schema of values of a Python type."""
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (types.UnionType, typing.Union):
        found = [schema_of(each) for each in inner]
        return {"type": [each["type"] for each in found]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(inner[0])}
    # A path.
    return {"type": "string"}


def member(kind: type, name: str) -> Schema:
    """The schema of a field or property of a class, with what is said of it there."""
    return {"description": said(kind, name), **schema_of(hints_of(kind)[name])}


def said(kind: type, name: str) -> str:
    """What is said of a field or property, as plain text."""
    text = sentence(documented(kind)[name])
    return text.replace("`None`", "null").replace(" (`SharedUse`)", "").replace("`", "")


def members(kind: type, *names: str, **others: str | Schema) -> dict[str, Schema]:
    """Keys of an object: fields of ``kind`` by their name, and others by the field's name or with their schema."""
    renamed = {key: member(kind, each) if isinstance(each, str) else each for key, each in others.items()}
    return {**{name: member(kind, name) for name in names}, **renamed}


def an_object(keys: Mapping[str, Schema], description: str = "") -> Schema:
    """An object with exactly these keys."""
    about = {"description": description} if description else {}
    return {
        **about,
        "type": "object",
        "properties": dict(keys),
        "required": list(keys),
        "additionalProperties": False,
    }


def a_list(items: Schema, description: str) -> Schema:
    """An array."""
    return {"description": description, "type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    """The same, or ``null``."""
    return {**schema, "type": [schema["type"], "null"]}


def a_mapping(values: Schema, description: str) -> Schema:
    """An object whose keys are names."""
    return {"description": description, "type": "object", "additionalProperties": values}


def document(title: str, keys: Mapping[str, Schema]) -> Schema:
    """A whole document."""
    first = {"schema": {"description": "The version of this document's shape.", "const": SCHEMA}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **an_object({**first, **keys}),
    }


# --- parameters


def _of_kind(kind: Kind) -> Schema:
    """The schema of what a kind writes into JSON."""
    if isinstance(kind, kinds.Overrides):
        return {"type": "array", "items": an_object(members(TensorBuftOverride, "pattern", "buffer_type"))}
    if isinstance(kind, kinds.Adapters):
        return {"type": "array", "items": an_object(members(Lora, "path", "scale"))}
    if isinstance(kind, kinds.Shares):
        return {"type": ["array", "null"], "items": {"type": "number"}}
    if isinstance(kind, kinds.Texts):
        return {"type": "array", "items": {"type": "string"}}
    if isinstance(kind, kinds.Flag):
        return {"type": "boolean"}
    if isinstance(kind, kinds.Whole):
        return {"type": "integer"}
    if isinstance(kind, kinds.Choice) and not kind.is_open:
        return {"enum": list(kind.words)}
    return {"type": "string"}


def _parameter(each: Parameter) -> Schema:
    schema = _of_kind(each.kind)
    if each.default is None and isinstance(schema.get("type"), str) and schema["type"] != "array":
        schema["type"] = [schema["type"], "null"]
    return {"description": each.help.replace(" Repeatable.", "").replace("`", ""), **schema}


def _params() -> Schema:
    known = of_a_load()
    keys = {name: _parameter(known[name]) for name in Params().planned()}
    return an_object(keys, "The parameters of the load, named as in llama.cpp, with what llama.cpp chose itself.")


# --- documents

_MEMORY = ("model", "context", "compute")
_BUILD = ("version", "ggml", "commit", "libllama", "key", "cpu")


def _model() -> Schema:
    keys = members(ModelSummary, "path", "name", "architecture", "bytes")
    return an_object(keys, sentence(ModelSummary.__doc__))


def _problems() -> Schema:
    return a_list(an_object(members(Problem, "device", "missing", "message")), said(Plan, "problems"))


def _shared() -> Schema:
    rows = a_list(an_object(members(Row, "device", *_MEMORY)), said(SharedUse, "rows"))
    arguments = member(SharedUse, "arguments")
    keys = {**members(SharedUse, "kind", "name"), "memory": rows, "arguments": arguments}
    return a_list(an_object(keys), said(Plan, "shared"))


def _pools() -> Schema:
    setting = or_null(an_object(members(Setting, "command", "bytes", "message"), said(PoolUse, "setting")))
    sizes = ("total", "free", "margin", "used", "left", "mapped_twice", "mapped_between", "load_mode")
    return a_list(an_object({**members(PoolUse, "name", "members", *sizes), "setting": setting}), said(Plan, "pools"))


def _explanation() -> Schema:
    choices = an_object(members(Choice, "subject", "chosen", "seconds", "runner_up", "runner_up_seconds"))
    distance = {"description": sentence(Bound.distance.__doc__).partition(";")[0] + ".", "type": ["number", "null"]}
    reasons = an_object(members(Reason, "kind", "seconds", "bytes", "devices"))
    keys = members(Bound, "seconds", "text", distance=distance, reasons=a_list(reasons, said(Bound, "reasons")))
    bound = or_null(an_object(keys, said(Plan, "bound")))
    return an_object(
        {"choices": a_list(choices, said(Plan, "choices")), "bound": bound}, "Why the plan is as it is. Seconds."
    )


def plan() -> Schema:
    """The document of ``fitter --json`` and ``Plan.to_dict``."""
    uses = (*_MEMORY, "shared", "used", "left")
    host = members(HostUse, "total", "free", "margin", *_MEMORY, "shared", "later", "used", "left")
    price = members(Price, "prompt_tokens_per_second", "generation_tokens_per_second")
    device = members(DeviceUse, "name", "description", "total", "free", "margin", *uses)
    rows = an_object(members(Row, "buffer_type", "device", "is_host", *_MEMORY, "reserved"))
    search = members(Search, "dummy_loads", "shared_loads", "seconds", cut_short="is_cut_short")
    later = members(Later, "kind", "bytes", "each", "count", "per_slot")
    arguments = a_list({"type": "string"}, "llama.cpp's command-line arguments for all of it.")
    return document(
        "A plan of llama-fitter",
        {
            "fits": member(Plan, "fits"),
            "program": member(Plan, "program"),
            "model": _model(),
            "params": _params(),
            "arguments": arguments,
            "devices": a_list(an_object(device), said(Plan, "devices")),
            "host": an_object(host, said(Plan, "host")),
            "pools": _pools(),
            "memory": a_list(rows, "What llama.cpp measured for each buffer type."),
            "estimate": or_null(an_object(price, "Estimated tokens per second; null where the plan does not fit.")),
            "explanation": _explanation(),
            "levers": member(Plan, "levers"),
            "shared": _shared(),
            "later": a_list(an_object(later), said(Plan, "later")),
            "left_out": a_list(an_object(members(LeftOut, "device", "reason", "message")), said(Plan, "left_out")),
            "rpc": member(Plan, "rpc"),
            "notes": member(Plan, "notes"),
            "llama_cpp": or_null(an_object(members(LlamaCpp, *_BUILD), said(Plan, "llama_cpp"))),
            "search": an_object(search, said(Plan, "search")),
            "problems": _problems(),
        },
    )


def _verify() -> Schema:
    use = members(MemoryUse, free_before="before", free_after="after", counted="counted", unaccounted="unaccounted")
    sizes = an_object(members(Row, *_MEMORY))
    row = {
        **members(Row, "buffer_type", "device", "is_host"),
        "predicted": {**sizes, "description": "What the plan predicts."},
        "real": {
            **an_object({name: or_null(each) for name, each in members(Row, *_MEMORY).items()}),
            "description": "What the real load took; null of what a llama-server does not say.",
        },
    }
    later = members(LaterUse, "kind", "count", "tokens", "predicted", "real", "rounding", "most")
    server = {
        **members(ServerUse, "path", "version", "prompts", "answered", "tokens", "slots", "refused"),
        "later": a_list(an_object(later), said(ServerUse, "later")),
        **members(ServerUse, "resident", "of_files", "counted", "planned", "margin"),
    }
    holds = {**member(Verification, "holds"), "type": ["boolean", "null"]}
    holds["description"] += " null if the plan does not fit."
    return document(
        "A plan that was loaded for real",
        {
            "fits": member(Verification, "fits"),
            "holds": holds,
            "tolerance": member(Verification, "tolerance"),
            "model": _model(),
            "params": _params(),
            "memory": a_list(an_object(row), said(Verification, "rows")),
            "devices": a_list(an_object({"name": member(DeviceInfo, "name"), **use}), sentence(MemoryUse.__doc__)),
            "host": or_null(an_object(use, "The same of the host; null where nothing was loaded.")),
            "shared": _shared(),
            "problems": _problems(),
            "server": or_null(an_object(server, said(Verification, "server"))),
        },
    )


def _calibrate() -> Schema:
    twin: dict[str, Schema] = {
        "profile": {"description": "How the twin behaves.", "type": "string"},
        "compute_capability": {"description": "Such as 8.9 or gfx1100.", "type": ["string", "null"]},
    }
    device: dict[str, Schema] = {
        **members(DeviceInfo, "name", "description", "backend", "total", "free"),
        "twin": or_null(an_object(twin, said(DeviceCalibration, "twin"))),
        **members(DeviceCalibration, "context", "outside", "margin"),
    }
    difference = members(Difference, "model", "configuration", "what", "real", "other")
    comparison = members(
        Comparison,
        "devices",
        "between",
        "loads",
        differences=a_list(an_object(difference), said(Comparison, "differences")),
    )
    return document(
        "A calibration",
        {
            "exact": member(Calibration, "is_exact"),
            "devices": a_list(an_object(device), said(Calibration, "devices")),
            "comparisons": a_list(an_object(comparison), said(Calibration, "comparisons")),
            "stored": {"description": said(Calibration, "stored"), "type": ["string", "null"]},
        },
    )


def _moves(description: str = "") -> Schema:
    unit = {
        "description": said(Move, "unit").replace("without one", "null"),
        "enum": ["bytes", "tokens", "layers", "tokens/s", None],
    }
    keys = members(Move, "what", "before", "after", unit=unit, detail="detail", failure="failure", budget="is_budget")
    return a_list(an_object(keys), description or said(CaseComparison, "moves"))


def _causes(description: str) -> Schema:
    return a_list(an_object(members(Cause, "kind", "what", "before", "after")), description)


def _check() -> Schema:
    status = ["same", "changed", "failed", "added", "removed", "error"]
    case = {
        "name": member(CaseResult, "name"),
        "status": {"description": said(CaseResult, "status"), "enum": status},
        "error": {"description": said(CaseResult, "error"), "type": ["string", "null"]},
        "fits": {"description": "Whether the plan fits; null if it was not measured.", "type": ["boolean", "null"]},
        "failures": {"description": said(CaseComparison, "failures"), "type": "array", "items": {"type": "string"}},
        "moves": _moves(),
        "causes": _causes(said(CaseComparison, "causes")),
        "fitted": _causes(said(CaseComparison, "chosen")),
    }
    passed = {"description": "Whether the exit status is 0.", "type": "boolean"}
    return document("A check", {"passed": passed, "cases": a_list(an_object(case), "Every case, by name.")})


def _diff() -> Schema:
    equal = {"description": said(PlanDiff, "is_empty"), "type": "boolean"}
    return document(
        "The differences between two plans",
        {"equal": equal, "moves": _moves(), "changes": _causes(said(PlanDiff, "changes"))},
    )


def _builds() -> Schema:
    label = {"description": "A short name of the build, the last part of its path.", "type": "string"}
    row = {
        "device": {"description": "The device, or host.", "type": "string"},
        **members(Row, "buffer_type", "model", "context", "compute", "used"),
    }
    version = or_null({"description": "Its version and commit; null if no case could ask it.", "type": "string"})
    error = {"description": "Why it was not measured; null if it was.", "type": ["string", "null"]}
    fits = or_null({"description": said(OnBuild, "fits") + " null if that was not measured.", "type": "boolean"})
    of_a_build = {
        "label": label,
        "error": error,
        "fits": fits,
        "missing": a_mapping({"type": "integer"}, said(OnBuild, "missing")),
        "memory": a_list(an_object(row), "The bytes of those parameters, by buffer type."),
        "moves": _moves("The numbers that differ from those of the first build."),
        "plan": _moves("What is different in this build's own plan; always empty in a history."),
    }
    case = {
        "name": {"description": "The case, or the model.", "type": "string"},
        "error": {"description": "Why no build could plan it; null if one could.", "type": ["string", "null"]},
        "builds": a_list(an_object(of_a_build), "The answer of each build, in their order."),
    }
    build = {"llama_cpp": member(OnBuild, "llama_cpp"), "label": label, "version": version}
    return document(
        "Builds of llama.cpp compared",
        {
            "equal": {
                "description": "Whether nothing differs between the first and the last build.",
                "type": "boolean",
            },
            "grown": {
                "description": "Whether a case takes more with the last build, or fits no more.",
                "type": "boolean",
            },
            "builds": a_list(an_object(build), "The builds, in their order."),
            "cases": a_list(an_object(case), "Every case."),
        },
    )


def _inspect() -> Schema:
    array = an_object(members(Array, "type", "length", values={**member(Array, "values"), "items": {}}))
    scalar = {"type": ["integer", "number", "boolean", "string"]}
    weights = a_mapping({"type": "integer"}, said(LayerSize, "weights"))
    layer = members(LayerSize, layer="index", bytes="bytes", weights=weights, context="context")
    return document(
        "What a model is made of",
        {
            "model": _model(),
            "metadata": a_mapping({"anyOf": [scalar, array]}, said(Inspection, "metadata")),
            "roles": a_list(an_object(members(RoleSize, "role", "count", "bytes")), said(Inspection, "roles")),
            "n_ctx": member(Inspection, "n_ctx"),
            "layers": a_list(an_object(layer), said(Inspection, "layers")),
            "memory": a_list(an_object(members(Row, "buffer_type", "device", *_MEMORY)), said(Inspection, "rows")),
        },
    )


def _quants() -> Schema:
    arguments = a_list({"type": "string"}, "llama.cpp's command-line arguments for the plan; null where none fits.")
    fits = or_null({"description": "Whether the plan fits; null without a plan.", "type": "boolean"})
    on_devices = or_null({"description": said(Quantization, "is_on_devices"), "type": "boolean"})
    problem = {"description": "Why there is no plan, or why it does not fit; null where it fits."}
    file_type = {
        **members(Quantization, "name", "bytes", "bits_per_weight"),
        "types": a_mapping({"type": "integer"}, said(Quantization, "types")),
        **members(Quantization, "needs_imatrix"),
        "fits": fits,
        **members(Quantization, "n_ctx", "longest_context", "host_weights"),
        "on_devices": on_devices,
        **members(Quantization, "tokens_per_second"),
        "arguments": or_null(arguments),
        "problem": {**problem, "type": ["string", "null"]},
    }
    best = {"description": "The name of the best one; null where there is none.", "type": ["string", "null"]}
    return document(
        "A model in every file type of llama-quantize",
        {
            "fits": member(Quantizations, "fits"),
            "model": _model(),
            "source_type": member(Quantizations, "source_type"),
            "best": best,
            "file_types": a_list(an_object(file_type), said(Quantizations, "found")),
            "notes": member(Quantizations, "notes"),
        },
    )


def _repository() -> Schema:
    words: Schema = {"type": "string"}
    arguments = a_list(words, "llama.cpp's command-line arguments for the plan; null where none fits.")
    problem = {"description": "Why there is no plan, or why it does not fit; null where it fits."}
    file = {
        **members(RepositoryFile, "name"),
        "files": a_list(words, said(RepositoryFile, "files")),
        **members(RepositoryFile, "bytes", "file_type", "weights", "bits_per_weight"),
        "fits": or_null({"description": "Whether the plan fits; null without a plan.", "type": "boolean"}),
        **members(RepositoryFile, "n_ctx", "longest_context", "host_weights"),
        "on_devices": or_null({"description": said(RepositoryFile, "is_on_devices"), "type": "boolean"}),
        **members(RepositoryFile, "prompt_tokens_per_second", "generation_tokens_per_second"),
        "arguments": or_null(arguments),
        "problem": {**problem, "type": ["string", "null"]},
    }
    best = {"description": "The name of the best one; null where there is none.", "type": ["string", "null"]}
    return document(
        "The models of a repository",
        {
            "fits": member(Repository, "fits"),
            "repository": member(Repository, "address"),
            "best": best,
            "download": or_null(a_list(words, said(Repository, "download"))),
            "run": or_null(a_list(words, said(Repository, "run"))),
            "hf": or_null(a_list(words, said(Repository, "hf"))),
            "files": a_list(an_object(file), said(Repository, "found")),
            "beside": a_list(an_object(members(SideFile, "name", "kind", "bytes")), said(Repository, "beside")),
        },
    )


def _explore() -> Schema:
    arguments = a_list({"type": "string"}, said(ExploredCell, "arguments"))
    asked = ("model", "file_type", "machine", "asked_context", "type_k", "type_v", "n_ubatch")
    rates = ("prompt_tokens_per_second", "tokens_per_second")
    cell = {
        **members(ExploredCell, *asked, "fits", "n_ctx", "bytes", "used", "host_weights", *rates),
        "arguments": or_null(arguments),
        **members(ExploredCell, "problem", "needs_imatrix", "memory", "cost", "is_best"),
    }
    answer = {
        **members(ExploredAnswer, "model"),
        "cell": or_null({**an_object(cell, said(ExploredAnswer, "cell"))}),
        **members(ExploredAnswer, "is_of_header", "refused"),
    }
    return document(
        "A grid of models, machines and parameters",
        {
            "fits": member(Exploration, "fits"),
            "cost": member(Exploration, "cost"),
            "cells": a_list(an_object(cell), said(Exploration, "cells")),
            "asked": member(Exploration, "asked"),
            "answers": a_list(an_object(answer), said(Exploration, "answers")),
            **members(Exploration, "kept", "seconds"),
        },
    )


def _devices() -> Schema:
    keys = ("name", "description", "type", "backend", "total", "free", "virtual")
    host = members(DeviceInfo, "description", "total", "free")
    return document(
        "Devices and host",
        {
            "devices": a_list(an_object(members(DeviceInfo, *keys)), "The devices, in llama.cpp's order."),
            "host": an_object(host, "The host; free is what is available."),
        },
    )


def _catalogue() -> Schema:
    figures = ("total", "usable", "free", "bandwidth", "pcie", "nvlink", "compute")
    capability = {"description": "Such as 8.9 or gfx1100; null if there is none.", "type": ["string", "null"]}
    sources = an_object(members(Sources, "compute_capability", *figures), "The source of each figure.")
    gpu = members(
        CatalogueGpu,
        name="key",
        description="description",
        profile="profile",
        compute_capability=capability,
        **{name: name for name in figures},
        unified="unified",
        sources=sources,
    )
    return document("The GPUs that --gpu knows", {"gpus": a_list(an_object(gpu), "Every GPU of the catalogue.")})


def _shapes() -> Schema:
    keys = ("name", "model", "title", "architecture", "parameters", "bytes", "type", "n_layer", "n_ctx_train")
    shape = {
        **members(ShapeInfo, *keys, "n_expert", "source"),
        "config": {"description": said(ShapeInfo, "config"), "type": "object"},
    }
    return document("The shapes that --shape knows", {"shapes": a_list(an_object(shape), "Those that were asked for.")})


DOCUMENTS: dict[str, tuple[str, Callable[[], Schema]]] = {
    "plan": ("`fitter MODEL --json`, `plan.to_dict()`", plan),
    "verify": ("`fitter verify --json`", _verify),
    "calibrate": ("`fitter calibrate --json`", _calibrate),
    "check": ("`fitter check --json`", _check),
    "diff": ("`fitter diff A B --json`", _diff),
    "history": ("`fitter history --json`, `fitter diff --json` of two builds", _builds),
    "inspect": ("`fitter inspect --json`", _inspect),
    "quants": ("`fitter quants --json`, `fitter.quants(…).to_dict()`", _quants),
    "repository": ("`fitter hf://org/repo --json`, `fitter.repository(…).to_dict()`", _repository),
    "explore": ("`fitter explore --json`, `fitter.explore(…).to_dict()`", _explore),
    "shapes": ("`fitter shapes --json`", _shapes),
    "devices": ("`fitter devices --json`", _devices),
    "catalogue": ("`fitter devices --catalogue --json`", _catalogue),
}
"""Every document: what prints it, and its schema."""


def schema_files() -> dict[str, Callable[[], str]]:
    """What writes the schema of each document, by its name."""
    return {
        name: functools.partial(lambda schema: json.dumps(schema(), indent=2, ensure_ascii=False) + "\n", schema)
        for name, (_, schema) in DOCUMENTS.items()
    }


def keys(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every key below ``schema`` with its own schema: ``devices[].name``. Names of an author's own are no keys."""
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}", inner
        yield from keys(inner, f"{path}{name}.")
    if "items" in schema:
        yield from keys(schema["items"], f"{path.rstrip('.')}[].")


def printed(schema: Schema, value: Any, path: str = "") -> Iterator[str]:
    """The keys of ``keys`` that a document has."""
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield f"{path}{name}"
                yield from printed(inner, value[name], f"{path}{name}.")
    elif isinstance(value, list):
        for each in value:
            yield from printed(schema.get("items", {}), each, f"{path.rstrip('.')}[].")


def _type_text(schema: Schema) -> str:
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(code(json.dumps(word)) for word in schema["enum"])
    found = schema.get("type", [])
    names = [found] if isinstance(found, str) else list(found)
    inner = schema.get("items", {}).get("type", "")
    text = [f"array of {inner}s" if name == "array" and isinstance(inner, str) and inner else name for name in names]
    return " or ".join(text)


def json_page() -> str:
    """Every document, key by key."""
    parts = []
    for name, (printed, schema) in DOCUMENTS.items():
        rows = [(code(path), _type_text(inner), plain(inner.get("description", ""))) for path, inner in keys(schema())]
        parts.append(
            "\n\n".join(
                [
                    heading(2, printed, name),
                    f"{schema()['title']}. As a JSON schema: [{name}.schema.json]({name}.schema.json).",
                    table(("key", "type", "meaning"), rows),
                ]
            )
        )
    return page(
        "JSON",
        "Sizes are in bytes, times in seconds. Every key is always there; what is not known is `null`. Within schema "
        f"{SCHEMA} keys are added, never removed or changed. `[]` stands for each element of an array.",
        *parts,
    )
