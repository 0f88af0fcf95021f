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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias

    from fitter.llama.build.llama_h import Fields

    Layout: TypeAlias = "dict[str, Fields]"
    """The fields of each parameter struct, by its name in C."""

    Written: TypeAlias = "tuple[bytes, bytes]"
    """The memory after a function wrote into it, filled in the first way and in the second one."""

    Probe: TypeAlias = "Callable[[str, Any], None]"
    """Calls the named function of libllama, which returns a struct, and has it written to the given memory."""

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
    from fitter.llama.build.llama_h import fields_of

    return {name: fields_of(text, name) for name in STRUCTS}


def read_whole(model_params: Any) -> None:
    """Make llama.cpp read a model's file instead of mapping it, in ``llama_model_params`` of any layout."""
    for name, *_ in model_params._fields_:
        if name in READ_WHOLE:
            setattr(model_params, name, READ_WHOLE[name])
