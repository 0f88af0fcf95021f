"""llama-quantize's own rule for a model's tensors, and headers with the types that it chooses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fitter import system
from fitter.errors import LibraryError, LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.header.read_header import Headers
from fitter.llama.types import FileType, FileTypes

_MOST = 256
"""A limit above llama.cpp's number of file types."""


def file_types(headers: Headers, files: Sequence[str], directory: str) -> FileTypes:
    """Ask for every file type of a model, and write the header of each to ``directory``.

    The headers have no tokenizer, and files the length of their data.

    Raises:
        LibraryError: This llama.cpp does not tell its rule.
        LlamaCppError: It has no rule for the model, or a header cannot be written.
    """
    library = headers.library
    numbered = _all_types(library)
    opened = [headers.open(file) for file in files]
    try:
        parts = library.ffi.new("void *[]", opened)
        header_bytes = int(library.fitter.fitter_quant_header_bytes(parts, len(opened)))
        if header_bytes < 0:
            raise LlamaCppError(f"the headers of {files[0]} cannot be joined: {library.last_error()}")
        for each in opened:
            library.fitter.fitter_skeleton_strip(each, -1)
        quant = library.fitter.fitter_quant_new(parts, len(opened))
        if quant == library.ffi.NULL:
            raise LlamaCppError(f"llama.cpp has no rule to quantize it: {library.last_error()}")
        try:
            every_type = tuple(_file_type(library, quant, *each, directory) for each in numbered)
        finally:
            library.fitter.fitter_quant_free(quant)
    finally:
        for each in opened:
            library.fitter.fitter_gguf_close(each)
    names = next((names for names, _ in every_type if names), ())
    return FileTypes(names, header_bytes, tuple(each for _, each in every_type))


def _all_types(library: native.Library) -> list[tuple[str, int]]:
    """Return name and number of every file type that the loaded llama.cpp can make."""
    out = library.ffi.new(f"fitter_file_type_t[{_MOST}]")
    count = int(library.fitter.fitter_quant_file_types(out, _MOST))
    if count < 0:
        version = native.loaded_versions(library)
        raise LibraryError(
            f"llama.cpp {version} does not tell which tensor llama-quantize gives which type: use a newer one, such as "
            "that of the newest llama-cpp-python (--llama-cpp python)"
        )
    return [(library.text(out[i].name) or "", int(out[i].ftype)) for i in range(min(count, _MOST))]


def _file_type(
    library: native.Library, quant: Any, name: str, number: int, directory: str
) -> tuple[tuple[str, ...], FileType]:
    """Return names, types and sizes of the tensors in one file type, and write its header."""
    out = library.ffi.new("fitter_columns_t *")
    if not library.fitter.fitter_quant_types(quant, number, out):
        return (), FileType(name, (), (), library.last_error())
    (names, types), (sizes,) = library.columns(out, 2, 1)
    path = os.path.join(directory, f"{name}.gguf")
    if not library.fitter.fitter_quant_write(quant, number, os.fsencode(path)):
        raise LlamaCppError(f"the header of a {name} file cannot be written: {library.last_error()}")
    try:
        # llama.cpp checks that the file is long enough for the tensors' data, and does not read it
        with open(path, "r+b") as file:
            system.extend(file, os.path.getsize(path) + padded(sizes))
    except OSError as error:
        raise LlamaCppError(
            f"the header of a {name} file cannot be made as long as the file ({error.strerror}): set TMPDIR to a "
            "directory that takes files of that length"
        ) from None
    return tuple(names), FileType(name, tuple(types), tuple(sizes), "")


ALIGNMENT = 32
"""Alignment of tensors in a file of llama-quantize."""


def padded(sizes: Sequence[int]) -> int:
    """Return the bytes of tensors in a file, with padding."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
