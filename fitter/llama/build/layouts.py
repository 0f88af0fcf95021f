"""Layouts of llama.cpp's parameter structs: known ones, that of a ``llama.h``, and the one that a libllama has.

A libllama does not tell the layout of its structs, but its functions for default parameters write them. Each is called
twice, into memory filled with different values: bytes that are then equal were written. A layout agrees if all bytes of
its fields were written, none behind the struct was, and every field holds a default of some version.

Without a header, the defaults of a newer libllama are aligned with the fields of the newest known layout, with as few
fields new or gone as possible. A layout follows only if all ways to do so have each field that fitter writes at one
place. What no default tells, the small models of ``fitter.llama.load.canary`` do.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import struct

from fitter.errors import LibraryError
from fitter.parameters.table import of_a_struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, TypeAlias

    Fields: TypeAlias = "dict[str, str]"
    """The kind of each field of a struct, by their names in C and in their order."""

    Layout: TypeAlias = "dict[str, Fields]"
    """The fields of each parameter struct, by its name in C."""

    Written: TypeAlias = "tuple[bytes, bytes]"
    """The memory after a function wrote into it, filled in the first way and in the second one."""

    Probe: TypeAlias = "Callable[[str, Any], None]"
    """Calls the named function of libllama, which returns a struct, and has it written to the given memory."""

    Placed: TypeAlias = "tuple[tuple[str, str, int], ...]"
    """Name, kind and end of each field."""

STRUCTS = {
    "llama_model_params": "llama_model_default_params",
    "llama_context_params": "llama_context_default_params",
}
"""The parameter structs, and llama.cpp's functions that return their defaults."""

READ_WHOLE: dict[str, int] = {"load_mode": 0, "use_mmap": 0, "use_direct_io": 0, "use_mlock": 0}
"""Fields, and values with which llama.cpp reads a model's file instead of mapping it; versions have the first or the
others.
"""
_ROOM = 4096
"""Bytes for an answer, many times what any version writes."""
_FILLINGS = (0xA5, 0x5A)
_KINDS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "size_t": ctypes.c_size_t,
    "float *": ctypes.POINTER(ctypes.c_float),
    "void *": ctypes.c_void_p,
}
SIZES = {kind: ctypes.sizeof(type_) for kind, type_ in _KINDS.items()}
"""Bytes of each kind of field, which are its alignment as well."""
_FLOAT = struct.Struct("<f")


@functools.cache
def data() -> Any:
    """Read ``layouts.json``."""
    with open(os.path.join(os.path.dirname(__file__), "layouts.json"), encoding="utf-8") as file:
        return json.load(file)


def layouts() -> dict[str, Layout]:
    """Return the known layouts, by the first version of llama-cpp-python, or build, with each. The oldest is first."""
    stored: dict[str, Layout] = data()["layouts"]
    return stored


def structs_of(layout: Layout) -> dict[str, type[ctypes.Structure]]:
    """Build the parameter structs of a layout, by their names in C."""
    return {
        name: type(name, (ctypes.Structure,), {"_fields_": [(field, _KINDS[kind]) for field, kind in fields.items()]})
        for name, fields in layout.items()
    }


def written_by(probe: Probe) -> dict[str, Written]:
    """Call each function for default parameters, into memory filled in two ways, and return the memory after it."""
    found = {}
    for name, function in STRUCTS.items():
        answers = []
        for filling in _FILLINGS:
            memory = ctypes.create_string_buffer(bytes((filling,)) * _ROOM, _ROOM)
            probe(function, memory)
            answers.append(memory.raw)
        found[name] = (answers[0], answers[1])
    return found


def disagreement(layout: Layout, written: Mapping[str, Written]) -> str | None:
    """Say in a few words where ``layout`` disagrees with the written bytes; ``None`` if it agrees."""
    for name, fields in layout.items():
        end = 0
        for field, kind in fields.items():
            end = aligned(end, SIZES[kind]) + SIZES[kind]
            if wrong := disagreement_of_field(name, field, kind, end, written[name]):
                return f"{name}{wrong}"
        size = aligned(end, max(map(SIZES.__getitem__, fields.values())))
        behind = (
            memory[size:].strip(bytes((filling,))) for memory, filling in zip(written[name], _FILLINGS, strict=True)
        )
        if any(behind):
            return f"{name} has more than {size} bytes"
    return None


def disagreement_of_field(name: str, field: str, kind: str, end: int, written: Written) -> str:
    """Say where a field of the struct ``name`` that ends at ``end`` disagrees with the written bytes, or ''."""
    first, second = (memory[end - SIZES[kind] : end] for memory in written)
    if end > len(written[0]) or first != second:
        return f".{field} is not written"
    return "" if _is_default(name, field, kind, first) else f".{field} has another value"


def aligned(offset: int, alignment: int) -> int:
    """Round up to a multiple of ``alignment``."""
    return -(-offset // alignment) * alignment


def _is_default(name: str, field: str, kind: str, value: bytes) -> bool:
    if kind.endswith("*"):
        return not any(value)
    number: float
    if kind == "float":
        (number,) = _FLOAT.unpack(value)
    else:
        number = int.from_bytes(value, "little", signed=kind == "int32_t")
    if kind == "bool" and number > 1:
        return False
    defaults = data()["defaults"][name].get(field)
    return defaults is None or number in defaults


def read_header(path: str) -> Layout:
    """Read the layout of a ``llama.h``. Raises ``OSError``, and ``ValueError`` if it has none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    return {name: fields_of(text, name) for name in STRUCTS}


def read_whole(model_params: Any) -> None:
    """Make llama.cpp read a model's file instead of mapping it, in ``llama_model_params`` of any layout."""
    for name, *_ in model_params._fields_:
        if name in READ_WHOLE:
            setattr(model_params, name, READ_WHOLE[name])


# compiled when they are needed: a header is seldom read, and every worker imports this
_COMMENT = r"//[^\n]*|(?s:/\*.*?\*/)"
_PLAIN = r"[\w\s*]+"
_NAME = r"[A-Za-z_]\w*"
_FUNCTION = r"typedef\b[^;{}()]*\(\s*\*\s*(\w+)\s*\)\s*\("
_POINTER = r"typedef\b[^;{}()]*\*\s*(\w+)\s*;"
_ENUM = r"typedef\s+enum\b[^;]*?(\w+)\s*;"

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
    text = re.sub(_COMMENT, " ", text)
    match = re.search(rf"\bstruct\s+{struct}\s*\{{([^{{}}]*)\}}", text)
    if match is None:
        raise ValueError(f"has no struct {struct}")
    pointers = {*re.findall(_FUNCTION, text), *re.findall(_POINTER, text), *_ELSEWHERE}
    enums = set(re.findall(_ENUM, text))
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
    if not re.fullmatch(_PLAIN, first) or not first.strip():
        raise ValueError(f"has '{_short(declaration)}', which fitter cannot read")
    words = first.replace("*", " * ").split()
    name, words = words[-1], words[:-1]
    kind = _kind([word for word in words if word not in ("const", "struct")], pointers, enums)
    if kind is None or not re.fullmatch(_NAME, name):
        raise ValueError(f"has '{_short(declaration)}', of a size that fitter does not know")
    if others and "*" in words:
        # In C the sign belongs to the first name alone.
        raise ValueError(f"has '{_short(declaration)}', which fitter cannot read")
    names = [name, *(other.strip() for other in others)]
    if not all(re.fullmatch(_NAME, each) for each in names):
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


HEADER = "llama.h"
"""Name of a layout that was read from a header beside libllama."""

UNKNOWN = "unknown"
"""Name of a layout that followed from the defaults alone."""

_MOST_CHANGES = 2
"""Most fields of a struct that may be new or gone, as from 0.3.25 to 0.3.30 and from 0.3.36 to b11549."""
_NEW_KINDS = ("bool", "int32_t", "size_t")
"""A kind of each size. Nothing writes to a new field: llama.cpp's default stays in it."""
_NEW = "unknown_"
WRITTEN = frozenset(
    (*READ_WHOLE, "no_alloc", *(each.field for struct in ("model", "context") for each in of_a_struct(struct)))
)
"""Fields that fitter writes."""


def layout_of(
    probe: Probe, headers: Iterable[str] = (), known: Mapping[str, Layout] | None = None
) -> tuple[str, Layout]:
    """Return name and layout of the libllama that ``probe`` calls.

    The name is ``HEADER`` if a ``llama.h`` among ``headers`` agrees that is of no known version, and ``UNKNOWN`` if
    neither a header nor a known layout agrees and one follows from the newest known. Raises ``LibraryError``, whose
    message is the end of a sentence.
    """
    known = layouts() if known is None else known
    written = written_by(probe)
    reasons = []
    # first: defaults alone cannot tell apart fields of equal value
    for path in headers:
        try:
            layout = read_header(path)
        except (OSError, ValueError) as unreadable:
            reasons.append(f"{path} {_reason_of(unreadable)}")
            continue
        wrong = disagreement(layout, written)
        if wrong is None:
            return next((name for name, each in known.items() if each == layout), HEADER), layout
        reasons.append(f"{path} belongs to another version ({wrong})")
    agreeing = [name for name, layout in known.items() if disagreement(layout, written) is None]
    if len(agreeing) == 1:
        return agreeing[0], known[agreeing[0]]
    if agreeing:
        reason = f"its parameters could be laid out as in several versions that fitter knows: {', '.join(agreeing)}"
        raise LibraryError(reason)
    if known and (unknown := layout_without_header(list(known.values())[-1], written)):
        return UNKNOWN, unknown
    raise LibraryError(", and ".join(("its parameters are laid out as in no version that fitter knows", *reasons)))


def layout_without_header(known: Layout, written: Mapping[str, Written]) -> Layout | None:
    """Return the layout that follows from the written defaults; ``None`` if none or several do.

    Args:
        known: The newest known layout.
        written: What the functions for default parameters wrote (``layouts.written_by``).
    """
    layout = {}
    for name, fields in known.items():
        found = _fields_of(name, fields, written[name])
        if found is None:
            return None
        layout[name] = found
    return layout


def _fields_of(name: str, known: Fields, written: Written) -> Fields | None:
    for changes in range(_MOST_CHANGES + 1):
        ways = list(_ways(name, tuple(known.items()), 0, written, changes))
        if ways:
            places = {frozenset(each for each in way if each[0] in WRITTEN) for way in ways}
            return {field: kind for field, kind, _ in ways[0]} if len(places) == 1 else None
    return None


def _ways(name: str, known: tuple[tuple[str, str], ...], end: int, written: Written, changes: int) -> Iterator[Placed]:
    """Yield every sequence of fields behind ``end`` that fits the written bytes: the ``known`` ones in order, with
    exactly ``changes`` fields new or gone.
    """
    if not known and not changes and not _is_written(written, end, len(written[0])):
        yield ()
    if known:
        yield from _ways_with(name, *known[0], known[1:], end, written, changes)
    if known and changes:
        yield from _ways(name, known[1:], end, written, changes - 1)
    if changes:
        for kind in _NEW_KINDS:
            new = f"{_NEW}{len(known)}_{changes}"
            yield from _ways_with(name, new, kind, known, end, written, changes - 1)


def _ways_with(
    name: str, field: str, kind: str, known: tuple[tuple[str, str], ...], end: int, written: Written, changes: int
) -> Iterator[Placed]:
    """Yield the sequences that begin with ``field``."""
    start = aligned(end, SIZES[kind])
    next_end = start + SIZES[kind]
    if not _is_written(written, end, start) and not disagreement_of_field(name, field, kind, next_end, written):
        for way in _ways(name, known, next_end, written, changes):
            yield ((field, kind, next_end), *way)


def _is_written(written: Written, start: int, end: int) -> bool:
    """Return whether any byte was written there: compilers leave out what belongs to no field."""
    return any(a == b for a, b in zip(*(memory[start:end] for memory in written), strict=True))


def _reason_of(error: Exception) -> str:
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
