"""Read the parameter structs of a ``llama.h`` from its text."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Fields: TypeAlias = "dict[str, str]"
    """The kind of each field of a struct, by their names in C and in their order."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PLAIN = re.compile(r"[\w\s*]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTION = re.compile(r"typedef\b[^;{}()]*\(\s*\*\s*(\w+)\s*\)\s*\(")
_POINTER = re.compile(r"typedef\b[^;{}()]*\*\s*(\w+)\s*;")
_ENUM = re.compile(r"typedef\s+enum\b[^;]*?(\w+)\s*;")

_SCALARS = {
    "bool": "bool",
    "float": "float",
    "int": "int32_t",
    "int32_t": "int32_t",
    "uint32_t": "int32_t",
    "unsigned int": "int32_t",
    "unsigned": "int32_t",
    "size_t": "size_t",
    "uint64_t": "size_t",
    "int64_t": "size_t",
}
"""Types of fields, with the kind of equal size and alignment in a layout."""

_ELSEWHERE = frozenset({"ggml_backend_sched_eval_callback", "ggml_abort_callback", "ggml_backend_dev_t"})
"""Pointers to types of ggml's headers."""


def fields_of(text: str, struct: str) -> Fields:
    """Read the fields of ``struct`` from the text of a ``llama.h``, in order: name and kind, as in ``layouts.json``.

    Raises ``ValueError`` if the struct is missing, or a field's size is unknown.
    """
    text = _COMMENT.sub(" ", text)
    match = re.search(rf"\bstruct\s+{struct}\s*\{{([^{{}}]*)\}}", text)
    if match is None:
        raise ValueError(f"has no struct {struct}")
    pointers = {*_FUNCTION.findall(text), *_POINTER.findall(text), *_ELSEWHERE}
    enums = set(_ENUM.findall(text))
    fields: Fields = {}
    for declaration in match[1].split(";"):
        if declaration.strip():
            for name, kind in _declared(declaration, pointers, enums):
                if name in fields:
                    raise ValueError(f"has {name} twice in struct {struct}")
                fields[name] = kind
    if not fields:
        raise ValueError(f"has no fields in struct {struct}")
    return fields


def _declared(declaration: str, pointers: set[str], enums: set[str]) -> list[tuple[str, str]]:
    """Return the names in a declaration, with their kinds."""
    first, *others = declaration.split(",")
    if not _PLAIN.fullmatch(first) or not first.strip():
        raise ValueError(f"has '{_short(declaration)}', which fitter cannot read")
    words = first.replace("*", " * ").split()
    name, words = words[-1], words[:-1]
    kind = _kind([word for word in words if word not in ("const", "struct")], pointers, enums)
    if kind is None or not _NAME.fullmatch(name):
        raise ValueError(f"has '{_short(declaration)}', of a size that fitter does not know")
    if others and "*" in words:
        # In C the sign belongs to the first name alone.
        raise ValueError(f"has '{_short(declaration)}', which fitter cannot read")
    names = [name, *(other.strip() for other in others)]
    if not all(map(_NAME.fullmatch, names)):
        raise ValueError(f"has '{_short(declaration)}', which fitter cannot read")
    return [(each, kind) for each in names]


def _kind(words: list[str], pointers: set[str], enums: set[str]) -> str | None:
    if words[-1:] == ["*"]:
        return "float *" if words == ["float", "*"] else "void *" if words[:-1] else None
    if words[:1] == ["enum"]:
        return "int32_t" if len(words) == 2 else None
    if len(words) == 1 and words[0] in pointers:
        return "void *"
    if len(words) == 1 and words[0] in enums:
        return "int32_t"
    return _SCALARS.get(" ".join(words))


def _short(declaration: str) -> str:
    return " ".join(declaration.split())[:80]
