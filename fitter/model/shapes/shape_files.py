"""Files for models without one: a header, and the length that the file would have.

They are in the platform's cache directory, named by their content.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from fitter import system
from fitter.errors import LibraryError, LlamaCppError, ModelError, UsageError
from fitter.llama.build import build_folder
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.header.gguf_writer import write
from fitter.model.files import header_cache, source
from fitter.model.files.addresses import HUB
from fitter.model.shapes.catalogue import (
    CONFIG,
    CONVERTED,
    DEFAULT_TYPE,
    PACKED_TYPE,
    Wanted,
    published_shape,
    unknown_type,
)
from fitter.model.shapes.common import ShapeHeader
from fitter.model.shapes.config import LONGEST, parse
from fitter.model.shapes.mapping import header_of
from fitter.storage import TemporaryDirectory, cache_folder, portable

_FULL = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
"""File types of the conversion, without quantization."""

PACKED = "mxfp4"
"""Type of tensors that are published in it, and kept."""

_lock = threading.Lock()


def header(wanted: Wanted, timeout: float | None = None) -> ShapeHeader:
    """Make the header of the converted model. Raises ``ModelError``, and ``UsageError`` for an unknown name."""
    if wanted.scheme == CONFIG:
        if not wanted.name.strip():
            raise UsageError("no config.json is named: give its path or its address (--config config.json)")
        where = _config_name(wanted.name)
        made = header_of(parse(_config(wanted.name, timeout), where), where)
        made.metadata["general.name"] = wanted.stem
        return made
    shape = published_shape(wanted.name)
    made = header_of(shape.config, f"the shape {shape.name}")
    made.metadata["general.name"] = shape.title
    return made


def model_files(wanted: Wanted, timeout: float | None = None) -> tuple[Path, ...]:
    """Return the file of the model. Raises ``ModelError`` and ``UsageError``, and what a worker raises."""
    made = header(wanted, timeout)
    full = made.type.upper()
    is_packed = any(tensor.type == PACKED for tensor in made.tensors)
    kind = {"": PACKED_TYPE if is_packed else DEFAULT_TYPE, CONVERTED: full}.get(wanted.file_type, wanted.file_type)
    wanted = wanted.of_type(kind)

    def keep() -> Path:
        if kind in _FULL:
            return _store_header(made, wanted)
        return _quantized(_store_header(made, wanted.of_type(full)), wanted, timeout)

    place = cache_folder(header_cache.SHAPES)
    with _lock:
        try:
            path = header_cache.kept(keep)
        except OSError as error:
            raise ModelError(
                f"the header of {wanted.file_name} cannot be kept in {source.show(place)}: {error.strerror}; set "
                "XDG_CACHE_HOME to a directory that can be written"
            ) from None
    source.call(path, wanted.shown)
    return (path,)


def _config_name(name: str) -> str:
    """Return the name of a ``config.json`` for messages."""
    from fitter.model.files.addresses import as_url, shown

    url = as_url(name)
    return source.show(Path(name)) if url is None else shown(url)


def _config(name: str, timeout: float | None) -> bytes:
    from fitter.model.files import remote_files
    from fitter.model.files.addresses import as_url

    url = as_url(name)
    if url is not None and not url.lower().startswith("file:"):
        return remote_files.beginning(_of_repository(url), LONGEST + 1, timeout=timeout)
    return _of_this_machine(name if url is None else system.path_of_url(urllib.parse.urlsplit(url).path))


def _of_this_machine(name: str) -> bytes:
    path = Path(name)
    try:
        path = path.expanduser()
        if path.is_dir():
            path /= "config.json"
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{source.show(path)} is not a regular file: give the config.json of a model")
        with path.open("rb") as file:
            return file.read(LONGEST + 1)
    except FileNotFoundError:
        raise ModelError(f"{source.show(path)}: no such file; check the path of the config.json") from None
    except RuntimeError:
        raise ModelError(f"{source.show(path)}: no such user; check the path of the config.json") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"{source.show(path)} cannot be read: {reason}") from None


def _of_repository(url: str) -> str:
    """Return the address of the ``config.json`` of a repository on the hub; other addresses stay."""
    scheme, _, path = url.partition("://")
    is_whole = scheme.lower() == HUB and len(path.strip("/").split("/")) == 2
    return f"{scheme}://{path.strip('/')}/config.json" if is_whole else url


def _store_header(made: ShapeHeader, wanted: Wanted) -> Path:
    made = made.of_type(_FULL[wanted.file_type])
    digest = hashlib.sha256(repr((wanted.file_name, sorted(made.metadata.items()), made.tensors)).encode()).hexdigest()
    path = _folder(digest) / portable(wanted.file_name)
    if not _is_there(path):
        _put(path, lambda file: write(file, made.metadata, made.tensors))
    return path


def _quantized(path: Path, wanted: Wanted, timeout: float | None) -> Path:
    """Return the header of the file that llama-quantize would make of the one at ``path``."""
    kind = wanted.file_type
    build = _quantizing()
    status = os.stat(build.libllama)
    made_by = (path.parent.name, kind, build.libllama, status.st_size, status.st_mtime_ns)
    place = _folder(hashlib.sha256(repr(made_by).encode()).hexdigest()) / portable(wanted.file_name)
    if _is_there(place):
        return place
    asked = Worker(llama_cpp=build.where, timeout=DEFAULT_TIMEOUT if timeout is None else timeout)
    with asked as worker, TemporaryDirectory() as directory:
        file_types = worker.file_types([path], directory)
        types = {each.name: each for each in file_types.found}
        if kind not in types:
            raise unknown_type(kind, sorted(types))
        if types[kind].problem:
            raise LlamaCppError(f"{wanted.of_type('').shown} cannot be quantized as {kind}: {types[kind].problem}")
        made = Path(directory, f"{kind}.gguf")
        with made.open("rb") as file:
            length = made.stat().st_size
            data = file.read(length - _data_bytes(types[kind].sizes))

        def fill(file: IO[bytes]) -> None:
            file.write(data)
            system.extend(file, length)

        _put(place, fill)
    return place


def _quantizing() -> build_folder.Build:
    """Return the llama.cpp whose rule chooses types: llama-cpp-python's, or else the one that plans."""
    try:
        return build_folder.find(build_folder.PYTHON)
    except LibraryError:
        return build_folder.find(build_folder.named(None))


def _data_bytes(sizes: Sequence[int]) -> int:
    from fitter.llama.header.read_header import padded

    return padded(sizes)


def _folder(digest: str) -> Path:
    return cache_folder(header_cache.SHAPES) / digest[:32]


def _is_there(path: Path) -> bool:
    """Return whether the file exists, and mark it as used."""
    return header_cache.use(path.parent) and path.exists()


def _put(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file, all or nothing. Raises ``OSError``, and ``ModelError`` if there is no room."""

    def write(place: Path) -> None:
        with (place / path.name).open("xb") as file:
            fill(file)
            # a crash of the machine must not leave a file without its bytes
            file.flush()
            os.fsync(file.fileno())

    header_cache.put(path.parent, write, path.exists)
