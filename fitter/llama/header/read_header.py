"""Read headers of GGUF files by ggml, make skeletons of them, and learn whether llama.cpp reads their tokenizers.

Loads of a model are made without its tokenizer, which takes most of the time of a load, and on which no byte of memory
depends. So it is read once for each build of llama.cpp, and the answer is kept by its key.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fitter import system
from fitter.errors import LlamaCppError, ModelError
from fitter.llama.build import library as native
from fitter.llama.build.layouts import read_whole
from fitter.llama.build.log import captured_log, failure, reason
from fitter.llama.build.verdicts import read_answer, write_answer
from fitter.llama.header import limits
from fitter.llama.types import Array, Header, MetadataValue, Skeleton, TensorInfo
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


_PIECE = 1 << 20
_LEAST_TOKENIZER = 1 << 16
"""llama.cpp reads a smaller tokenizer as fast as its key is computed."""


def tokenizer_key(path: str) -> str:
    """Return a key that is equal for equal tokenizers, of one architecture, in one build of llama.cpp.

    The key is a digest of all metadata that only a tokenizer reads, byte for byte. So llama.cpp accepts all tokenizers
    with one key, or refuses all. It is empty for a small tokenizer, and for a header of an unknown form.
    """
    library = native.libraries()
    out = library.ffi.new("fitter_columns_t *")
    if not library.fitter.fitter_tokenizer_entries(os.fsencode(path), out):
        return ""
    _, (offsets, sizes) = library.columns(out, 0, 2)
    if sum(sizes) < _LEAST_TOKENIZER:
        return ""
    digest = hashlib.sha256(native.loaded().key.encode())
    try:
        with open(path, "rb") as file:
            for offset, size in zip(offsets, sizes, strict=True):
                file.seek(offset)
                while size > 0 and (piece := file.read(min(size, _PIECE))):
                    digest.update(piece)
                    size -= len(piece)
    except OSError:
        # the load of the file reports it
        return ""
    return digest.hexdigest()


def is_tokenizer_read(path: str) -> bool:
    """Return whether llama.cpp is known to read the tokenizer of the model at ``path``.

    A small tokenizer is read at once. Raises ``LlamaCppError`` where llama.cpp refuses that.
    """
    if key := tokenizer_key(path):
        return read_answer(_tokenizer_name(key)) is not None
    _read_tokenizer(path)
    return True


def check_tokenizer(path: str) -> None:
    """Read a tokenizer, and remember that llama.cpp can. Raises ``LlamaCppError`` with its reason if it cannot."""
    key = tokenizer_key(path)
    _read_tokenizer(path)
    if key and key == tokenizer_key(path):
        write_answer(_tokenizer_name(key), {"tokenizer": key})


def _read_tokenizer(path: str) -> None:
    llama = native.libraries().llama
    params = llama.llama_model_default_params()
    nothing = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.cast(nothing, ctypes.c_void_p)
    params.vocab_only = True
    read_whole(params)
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise failure(path, "llama.cpp cannot load the model")
    llama.llama_model_free(model)


def _tokenizer_name(key: str) -> str:
    return f"tokenizer-{key}"
