"""The shape of every JSON document, as JSON schema and as a reference page.

Keys are those of the documents that are declared in ``fitter/output/documents``; types and meanings are those of the
dataclasses that a document is written from, and of the table of parameters.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from fitter.llama.types import Array, MetadataValue, Params
from fitter.output.documents.checked_documents import CALIBRATION, TUNING, VERIFICATION
from fitter.output.documents.deployment_documents import DEVICE_CLAIM, FLEET, POD_CLAIM
from fitter.output.documents.document import SCHEMA, Document, Key
from fitter.output.documents.listing_documents import CATALOGUE, DEVICES, SHAPES
from fitter.output.documents.many_plans import EXPLORATION, QUANTIZATIONS, REPOSITORY, SHAPE_PLANS
from fitter.output.documents.plan_document import INSPECTION, PLAN
from fitter.parameters import kinds
from fitter.parameters.kinds import Kind
from fitter.parameters.table import Parameter, of_a_load
from fitter.parameters.values import Lora, TensorBuftOverride
from fitter.regression.regression_documents import BUILDS, CHECK, DIFF
from tools.docs.attributes import documented, hints_of
from tools.docs.markdown import code, heading, page, plain, sentence, table

Schema = dict[str, Any]

_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_SCALAR = {"type": ["integer", "number", "boolean", "string"]}


def schema_of(hint: Any, of: Document | None = None) -> Schema:
    """The schema of values of a Python type; ``of``: how an object of it is written."""
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (types.UnionType, typing.Union):
        is_null = [each is type(None) for each in inner]
        found = [schema_of(each, of) for each in inner if each is not type(None)]
        if len(found) == 1:
            return {**found[0], "type": [found[0]["type"], "null"]} if any(is_null) else found[0]
        return {"type": [each["type"] for each in found] + ["null"] * any(is_null)}
    if origin is tuple:
        return {"type": "array", "items": schema_of(inner[0], of)}
    if origin in (dict, Mapping):
        if inner[1] is Any:
            return {"type": "object"}
        values = {"anyOf": [_SCALAR, _array()]} if inner[1] == MetadataValue else schema_of(inner[1])
        return {"type": "object", "additionalProperties": values}
    if hint is Params:
        return _params()
    if of is not None:
        return an_object({key.name: key_of(of.kind, key) for key in of.keys})
    # A path.
    return {"type": "string"}


def _array() -> Schema:
    keys = {name: member(Array, name) for name in ("type", "length", "values")}
    return an_object({**keys, "values": {**keys["values"], "items": {}}})


def key_of(kind: type, key: Key) -> Schema:
    """The schema of a key of a document that is written from a ``kind``."""
    if key.field == ".":
        about, hint = key.about, key.hint
    else:
        owner: Any = kind
        *before, name = (key.field or key.name).split(".")
        for part in before:
            owner = _class(hints_of(owner)[part])
        about = key.about or documented(owner)[name]
        hint = key.hint or hints_of(owner)[name]
    about = documented(kind).get(about, about)
    schema = schema_of(hint, key.of)
    return {"description": as_text(about), **schema} if about else schema


def _class(hint: Any) -> Any:
    return next((each for each in typing.get_args(hint) if each is not type(None)), hint)


def member(kind: type, name: str) -> Schema:
    """The schema of a field or property of a class, with what is said of it there."""
    return {"description": as_text(documented(kind)[name]), **schema_of(hints_of(kind)[name])}


def as_text(text: str) -> str:
    """A docstring as plain text."""
    return sentence(text).replace("`None`", "null").replace(" (`SharedUse`)", "").replace("`", "")


def an_object(keys: Mapping[str, Schema]) -> Schema:
    """An object with exactly these keys."""
    return {
        "type": "object",
        "properties": dict(keys),
        "required": list(keys),
        "additionalProperties": False,
    }


def document(declared: Document) -> Schema:
    """A whole document."""
    first = {"schema": {"description": "The version of this document's shape.", "const": SCHEMA}}
    keys = {key.name: key_of(declared.kind, key) for key in declared.keys}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": declared.title,
        **an_object({**first, **keys}),
    }


# --- parameters


def _of_kind(kind: Kind) -> Schema:
    """The schema of what a kind writes into JSON."""
    if isinstance(kind, kinds.Overrides):
        keys = {name: member(TensorBuftOverride, name) for name in ("pattern", "buffer_type")}
        return {"type": "array", "items": an_object(keys)}
    if isinstance(kind, kinds.Adapters):
        return {"type": "array", "items": an_object({name: member(Lora, name) for name in ("path", "scale")})}
    if isinstance(kind, kinds.Shares):
        return {"type": ["array", "null"], "items": {"type": "number"}}
    if isinstance(kind, kinds.Texts):
        return {"type": "array", "items": {"type": "string"}}
    if isinstance(kind, kinds.Flag):
        return {"type": "boolean"}
    if isinstance(kind, (kinds.Whole, kinds.Size)):
        return {"type": "integer"}
    if isinstance(kind, kinds.OneOf) and not kind.is_open:
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
    about = "The parameters of the load, named as in llama.cpp, with what llama.cpp chose itself."
    return {"description": about, **an_object(keys)}


# --- documents

DOCUMENTS: dict[str, tuple[str, Document]] = {
    "plan": ("`fitter MODEL --json`, `plan.to_dict()`", PLAN),
    "verify": ("`fitter verify --json`", VERIFICATION),
    "tune": ("`fitter tune --json`", TUNING),
    "fleet": ("`fitter fleet --json`, `fitter.fleet(…).to_dict()`", FLEET),
    "calibrate": ("`fitter calibrate --json`", CALIBRATION),
    "check": ("`fitter check --json`", CHECK),
    "diff": ("`fitter diff A B --json`", DIFF),
    "history": ("`fitter history --json`, `fitter diff --json` of two builds", BUILDS),
    "inspect": ("`fitter inspect --json`", INSPECTION),
    "quants": ("`fitter quants --json`, `fitter.quants(…).to_dict()`", QUANTIZATIONS),
    "repository": ("`fitter hf://org/repo --json`, `fitter.repository(…).to_dict()`", REPOSITORY),
    "explore": ("`fitter explore --json`, `fitter.explore(…).to_dict()`", EXPLORATION),
    "shapes": ("`fitter shapes --json`", SHAPES),
    "shape-plans": ("`fitter shapes --gpu SPEC --json`, `fitter.best_shapes(…).to_dict()`", SHAPE_PLANS),
    "devices": ("`fitter devices --json`", DEVICES),
    "pod-claim": ("`fitter claim --json`", POD_CLAIM),
    "device-claim": ("`fitter claim --min-tps T --json`", DEVICE_CLAIM),
    "catalogue": ("`fitter devices --catalogue --json`", CATALOGUE),
}
"""Every document: what prints it, and its declaration."""


def schema_files() -> dict[str, Callable[[], str]]:
    """What writes the schema of each document, by its name."""
    return {name: functools.partial(_schema_file, declared) for name, (_, declared) in DOCUMENTS.items()}


def _schema_file(declared: Document) -> str:
    return json.dumps(document(declared), indent=2, ensure_ascii=False) + "\n"


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
    for name, (printed, declared) in DOCUMENTS.items():
        schema = document(declared)
        rows = [(code(path), _type_text(inner), plain(inner.get("description", ""))) for path, inner in keys(schema)]
        parts.append(
            "\n\n".join(
                [
                    heading(2, printed, name),
                    f"{declared.title}. As a JSON schema: [{name}.schema.json]({name}.schema.json).",
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
