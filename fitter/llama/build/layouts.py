"""Layouts of llama.cpp's parameter structs, and the one that a loaded libllama has.

A libllama does not tell the layout of its structs, but its functions for default parameters write them. Each is called
twice, into memory filled with different values: bytes that are then equal were written. A layout agrees if all bytes of
its fields were written, none behind the struct was, and every field holds a default of some version.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import struct

from fitter.errors import LibraryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, TypeAlias

    from fitter.llama.build.llama_h import Fields

    Layout: TypeAlias = "dict[str, Fields]"
    """The fields of each parameter struct, by its name in C."""

    Probe: TypeAlias = "Callable[[str, Any], None]"
    """Calls the named function of libllama, which returns a struct, and has it written to the given memory."""

STRUCTS = {
    "llama_model_params": "llama_model_default_params",
    "llama_context_params": "llama_context_default_params",
}
"""The parameter structs, and llama.cpp's functions that return their defaults."""

HEADER = "llama.h"
"""Name of a layout that was read from a header beside libllama."""

_LOAD_MODE_NONE = 0
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
_SIZES = {kind: ctypes.sizeof(type_) for kind, type_ in _KINDS.items()}
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


def written_by(probe: Probe) -> dict[str, tuple[bytes, bytes]]:
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


def disagreement(layout: Layout, written: Mapping[str, tuple[bytes, bytes]]) -> str | None:
    """Say in a few words where ``layout`` disagrees with the written bytes; ``None`` if it agrees."""
    for name, fields in layout.items():
        first, second = written[name]
        places, size = _places(fields)
        if size > len(first):
            return f"{name} has {size} bytes"
        for (field, kind), (start, end) in zip(fields.items(), places, strict=True):
            if first[start:end] != second[start:end]:
                return f"{name}.{field} is not written"
            if not _is_default(name, field, kind, first[start:end]):
                return f"{name}.{field} has another value"
        if first[size:].strip(bytes(_FILLINGS[:1])) or second[size:].strip(bytes(_FILLINGS[1:])):
            return f"{name} has more than {size} bytes"
    return None


def _places(fields: Fields) -> tuple[list[tuple[int, int]], int]:
    """Return where each field begins and ends, and the size of the struct. The alignment of every kind is its size."""
    places, end, largest = [], 0, 1
    for kind in fields.values():
        size = _SIZES[kind]
        start = -(-end // size) * size
        end = start + size
        largest = max(largest, size)
        places.append((start, end))
    return places, -(-end // largest) * largest


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


def name_of(written: Mapping[str, tuple[bytes, bytes]], known: Mapping[str, Layout] | None = None) -> str:
    """Return the name of the only ``known`` layout that agrees with the written bytes.

    Raises ``LibraryError`` if none or several agree.
    """
    known = layouts() if known is None else known
    agreeing = [name for name, layout in known.items() if disagreement(layout, written) is None]
    if len(agreeing) != 1:
        raise LibraryError(
            "its parameters could be laid out as in several versions that fitter knows: " + ", ".join(agreeing)
            if agreeing
            else "its parameters are laid out as in no version that fitter knows"
        )
    return agreeing[0]


def layout_of(
    probe: Probe, headers: Iterable[str] = (), known: Mapping[str, Layout] | None = None
) -> tuple[str, Layout]:
    """Return name and layout of the libllama that ``probe`` calls.

    The name is ``HEADER`` if only a ``llama.h`` among ``headers`` agrees. Raises ``LibraryError``, whose message is the
    end of a sentence.
    """
    known = layouts() if known is None else known
    written = written_by(probe)
    try:
        name = name_of(written, known)
        return name, known[name]
    except LibraryError as error:
        reason = str(error)
    for path in headers:
        try:
            layout = read_header(path)
        except (OSError, ValueError) as unreadable:
            reason += f", and {path} {_reason_of(unreadable)}"
            continue
        wrong = disagreement(layout, written)
        if wrong is None:
            return HEADER, layout
        reason += f", and {path} belongs to another version ({wrong})"
    raise LibraryError(reason)


def read_header(path: str) -> Layout:
    """Read the layout of a ``llama.h``. Raises ``OSError``, and ``ValueError`` if it has none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    from fitter.llama.build.llama_h import fields_of

    return {name: fields_of(text, name) for name in STRUCTS}


def read_whole(model_params: Any) -> None:
    """Make llama.cpp read a model's file instead of mapping it, in ``llama_model_params`` of any layout."""
    names = {name for name, *_ in model_params._fields_}
    if "load_mode" in names:
        model_params.load_mode = _LOAD_MODE_NONE
        return
    for name in ("use_mmap", "use_direct_io", "use_mlock"):
        setattr(model_params, name, False)


def _reason_of(error: Exception) -> str:
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
