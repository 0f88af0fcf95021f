"""Read headers of GGUF files by ggml, make skeletons of them, and headers in the types that llama-quantize chooses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fitter import system
from fitter.errors import LibraryError, LlamaCppError, ModelError
from fitter.llama.build import library as native
from fitter.llama.build.log import captured_log, reason
from fitter.llama.header import limits
from fitter.llama.types import Array, FileType, FileTypes, Header, MetadataValue, Skeleton, TensorInfo
from fitter.storage import identity

MAX_ARRAY_VALUES = 4096
"""Longest array of numbers whose values are read."""
_MOST_SKELETONS = 4
"""A model and its draft models, in turn."""
MOST_TEXT = 1 << 20
"""Most bytes of all texts in a header; the longest texts, chat templates, have some 20 kB."""


class Headers:
    """Reads headers of GGUF files, and makes skeletons without reading them again.

    A header stays in memory, without its tokenizer, until a skeleton is made of it or another model's header is read.
    The last skeletons stay too. Not thread-safe.

    Attributes:
        parsed: Headers in memory, by path.
    """

    def __init__(self) -> None:
        self.parsed: dict[str, tuple[tuple[int, ...], Any]] = {}
        self._made: dict[tuple[object, ...], int] = {}
        self._last: tuple[str, tuple[int, ...], Header | None] = ("", (), None)
        self.library = native.libraries()

    def close(self) -> None:
        """Free everything, also the file of a skeleton."""
        self._forget()
        while self._made:
            system.close_file(self._made.popitem()[1])

    def read(self, path: str) -> Header:
        """Read the header of one file. Raises ``ModelError`` with ggml's reason if it is malformed."""
        last, last_identity, header = self._last
        if header is not None and (last, last_identity) == (path, identity(path)):
            return header
        self._last = (path, identity(path), None)
        found, gguf = self.parse(path)
        self._last = (*self._last[:2], found)
        if not found.metadata.get("split.no"):
            self._forget()
        tokens = found.metadata.get("tokenizer.ggml.tokens")
        self._keep(path, gguf, tokens.length if isinstance(tokens, Array) else -1)
        return found

    def skeleton(self, skeleton: Skeleton) -> str:
        """Return the path of the skeleton, valid in this process for some further ones. Raises ``LlamaCppError``."""
        if not skeleton.files:
            raise LlamaCppError("a skeleton needs the files of its model")
        if system.DESCRIPTORS and not os.path.isdir(system.DESCRIPTORS):
            raise LlamaCppError(
                f"the header of {skeleton.files[0]} cannot be copied without {system.DESCRIPTORS}: mount /proc"
            )
        key = tuple((os.path.abspath(file), identity(file)) for file in skeleton.files)
        if key not in self._made:
            self._made[key] = self._make(skeleton)
            if len(self._made) > _MOST_SKELETONS:
                system.close_file(self._made.pop(next(iter(self._made))))
        # on some systems opening a descriptor's path duplicates it, with its position in the file
        os.lseek(self._made[key], 0, os.SEEK_SET)
        return system.path_of(self._made[key])

    def write_skeleton(self, skeleton: Skeleton, path: str) -> None:
        """Write the skeleton's header to a file of its length. Raises ``LlamaCppError``."""
        made = self.skeleton(skeleton)
        gguf = self.open(made)
        try:
            header_bytes = header_of(self.library, gguf).data_offset
        finally:
            self.library.fitter.fitter_gguf_close(gguf)
        try:
            with open(made, "rb") as source, open(path, "wb") as file:
                source.seek(0)
                file.write(source.read(header_bytes))
                system.extend(file, os.fstat(source.fileno()).st_size)
        except OSError as error:
            raise LlamaCppError(
                f"a header cannot be made as long as its file ({error.strerror}): set TMPDIR to a directory that takes "
                "files of that length"
            ) from None

    def _make(self, skeleton: Skeleton) -> int:
        library = self.library
        try:
            parsed = library.ffi.new("void *[]", [self._parsed_header(file) for file in skeleton.files])
            descriptor = int(library.fitter.fitter_skeleton_write(parsed, len(parsed)))
        except ModelError as error:
            raise LlamaCppError(str(error)) from error
        finally:
            self._forget()
        if descriptor < 0:
            raise LlamaCppError(f"no skeleton of {skeleton.files[0]} can be made: {library.last_error()}")
        return descriptor

    def _parsed_header(self, path: str) -> Any:
        parsed_identity, gguf = self.parsed.get(os.path.abspath(path), ((), None))
        if gguf is None or parsed_identity != identity(path):
            gguf = self.library.fitter.fitter_skeleton_open(os.fsencode(path))
            if gguf == self.library.ffi.NULL:
                gguf = self.open(path)
            self._keep(path, gguf)
        return gguf

    def open(self, path: str) -> Any:
        """Let ggml read the file. Raises ``ModelError`` with ggml's reason if it is malformed."""
        gguf = self.library.fitter.fitter_gguf_open(os.fsencode(path))
        if gguf == self.library.ffi.NULL:
            raise ModelError(f"{path}: {reason(captured_log()) or self.library.last_error()}")
        return gguf

    def parse(self, path: str) -> tuple[Header, Any]:
        """Read the header, also one in memory. Returns ggml's, too, for the caller to close. Raises as ``open``."""
        arrays, data_offset = self.library.ffi.new("fitter_columns_t *"), self.library.ffi.new("uint64_t *")
        gguf = self.library.fitter.fitter_gguf_skim(os.fsencode(path), MAX_ARRAY_VALUES, arrays, data_offset)
        left_out: dict[int, tuple[str, Array]] = {}
        if gguf == self.library.ffi.NULL:
            self.library.fitter.fitter_log_clear()
            gguf = self.open(path)
        else:
            (keys, types), (entries, lengths) = self.library.columns(arrays, 2, 2)
            left_out = dict(zip(entries, zip(keys, map(Array, types, lengths), strict=True), strict=True))
        try:
            header = header_of(self.library, gguf, left_out)
            return (replace(header, data_offset=int(data_offset[0])) if left_out else header), gguf
        except BaseException:
            self.library.fitter.fitter_gguf_close(gguf)
            raise

    def _keep(self, path: str, gguf: Any, n_tokens: int = -1) -> None:
        self.library.fitter.fitter_skeleton_strip(gguf, n_tokens)
        replaced = self.parsed.pop(os.path.abspath(path), None)
        self.parsed[os.path.abspath(path)] = (identity(path), gguf)
        if replaced is not None:
            self.library.fitter.fitter_gguf_close(replaced[1])

    def _forget(self) -> None:
        while self.parsed:
            self.library.fitter.fitter_gguf_close(self.parsed.popitem()[1][1])


def read_header(path: str) -> Header:
    """Read the header of a file beside a model. Raises ``ModelError`` unless it is a complete GGUF file."""
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if os.path.isdir(path):
        raise ModelError(f"{path} is a directory; give the GGUF file in it")
    headers = Headers()
    try:
        header = headers.read(path)
    finally:
        headers.close()
    if missing := max(0, header.file_bytes - size):
        raise ModelError(f"{path} is truncated: the last {missing} bytes of its tensors are missing; download it again")
    if wrong := limits.problem(header.metadata, len(header.tensors)):
        raise ModelError(f"{path} {wrong}; download it again")
    return header


def header_of(library: native.Library, gguf: Any, left_out: Mapping[int, tuple[str, Array]] | None = None) -> Header:
    """Convert ggml's header of a file; its metadata is without the entries in ``left_out``. Raises ``ModelError``."""
    info = library.ffi.new("fitter_gguf_info_t *")
    if not library.fitter.fitter_gguf_info(gguf, info):
        raise ModelError(f"ggml cannot read the header: {library.last_error()}")
    left_out = left_out or {}
    metadata: dict[str, MetadataValue] = {}
    left = MOST_TEXT
    entry = library.ffi.new("fitter_gguf_kv_t *")
    indices = iter(range(info.n_kv))
    for i in range(info.n_kv + len(left_out)):
        if i in left_out:
            key, array = left_out[i]
            metadata[key] = array
            continue
        index = next(indices)
        library.fitter.fitter_gguf_kv(gguf, index, entry)
        key = library.text(entry.key) or ""
        kind = entry.kind.decode()
        if kind == "a":
            metadata[key] = _read_array(library, gguf, index, entry)
        elif kind == "s":
            metadata[key] = text = library.text(entry.s, left) or ""
            left -= min(left, len(text.encode()))
        else:
            metadata[key] = _number(kind, entry)
    return Header(metadata, _read_tensors(library, gguf), int(info.data_offset), int(info.version), int(info.alignment))


def _read_tensors(library: native.Library, gguf: Any) -> tuple[TensorInfo, ...]:
    out = library.ffi.new("fitter_columns_t *")
    if not library.fitter.fitter_gguf_tensors(gguf, out):
        raise ModelError(f"ggml cannot read the header: {library.last_error()}")
    (names, types), (*dimensions, sizes) = library.columns(out, 2, 5)
    shapes = map(_without_ones, zip(*dimensions, strict=True))
    return tuple(map(TensorInfo, names, types, shapes, sizes))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Remove trailing dimensions of 1, but not the first dimension."""
    n = len(shape)
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return shape[:n]


def _read_array(library: native.Library, gguf: Any, index: int, entry: Any) -> Array:
    type_name = library.text(entry.array_type) or ""
    length = int(entry.array_length)
    kind = entry.array_kind.decode().rstrip("\0")
    values: list[int | float | bool] = []
    if kind and length <= MAX_ARRAY_VALUES:
        out = library.ffi.new("fitter_gguf_kv_t *")
        for i in range(length):
            library.fitter.fitter_gguf_element(gguf, index, i, out)
            values.append(_number(kind, out))
    return Array(type_name, length, tuple(values))


def _number(kind: str, entry: Any) -> int | float | bool:
    if kind == "b":
        return bool(entry.i)
    if kind == "f":
        return float(entry.f)
    return int(entry.u if kind == "u" else entry.i)


_MOST_TYPES = 256
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
    out = library.ffi.new(f"fitter_file_type_t[{_MOST_TYPES}]")
    count = int(library.fitter.fitter_quant_file_types(out, _MOST_TYPES))
    if count < 0:
        version = native.loaded_versions(library)
        raise LibraryError(
            f"llama.cpp {version} does not tell which tensor llama-quantize gives which type: use a newer one, such as "
            "that of the newest llama-cpp-python (--llama-cpp python)"
        )
    return [(library.text(out[i].name) or "", int(out[i].ftype)) for i in range(min(count, _MOST_TYPES))]


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


_ALIGNMENT = 32
"""Alignment of tensors in a file of llama-quantize."""


def padded(sizes: Sequence[int]) -> int:
    """Return the bytes of tensors in a file, with padding."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
