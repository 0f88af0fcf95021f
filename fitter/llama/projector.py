"""What a multimodal projector takes, by libmtmd: the library that llama.cpp's programs load projectors with."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fitter.errors import LibraryError, LlamaCppError, ModelError, UsageError
from fitter.llama import library as native
from fitter.llama.allocations import counted
from fitter.llama.devices import Registry, select
from fitter.llama.headers import read_header
from fitter.llama.log import captured_log, reason
from fitter.llama.types import FlashAttn, Row
from fitter.parameters import FLASH_ATTN


def measure(
    path: str,
    device: str | None,
    devices: Registry,
    flash_attn: FlashAttn = "auto",
    image_min_tokens: int = -1,
    image_max_tokens: int = -1,
) -> tuple[Row, ...]:
    """Bytes by buffer type of the projector at ``path`` on ``device``, or on the host (``None``), without allocating.

    Weights are model bytes, and compute is for the image that libmtmd warms up with. Raises ``ModelError`` where it is
    no projector, ``UsageError`` for an unknown device, ``LibraryError`` where there is no libmtmd that fits.
    """
    library = _load()
    _check(path)
    wanted, _name = _wanted(library, path, device, devices, flash_attn, image_min_tokens, image_max_tokens)
    asked = library.ffi.new("uint64_t *")
    with counted() as allocations:
        is_measured = library.fitter.fitter_projector_measure(wanted, asked)
        if not is_measured:
            raise ModelError(f"{path}: {_refusal(library, wanted)}")
    # libmtmd adds up the weights as they are in the file, and leaves out what generates audio.
    if sum(row.used for row in allocations.rows) < asked[0]:
        raise LlamaCppError(f"{path} takes {asked[0]} bytes by libmtmd, but not of any buffer type that ggml knows")
    return allocations.rows


@contextmanager
def loaded(
    path: str, device: str | None, devices: Registry, model: Any = None, flash_attn: FlashAttn = "auto"
) -> Iterator[Any]:
    """The projector (``mtmd_context *``), really loaded, for ``model`` (llama_cpp's pointer) or for none."""
    library = _load()
    _check(path)
    wanted, _name = _wanted(library, path, device, devices, flash_attn, -1, -1)
    projector = library.fitter.fitter_projector_load(wanted, library.pointer(model or 0))
    if projector == library.ffi.NULL:
        raise ModelError(f"{path}: {_reason()}")
    try:
        yield projector
    finally:
        library.fitter.fitter_projector_free(projector)


_ENCODERS = ("clip.has_vision_encoder", "clip.has_audio_encoder", "clip.has_gen_audio_encoder")


def _check(path: str) -> None:
    """Raise ``ModelError`` unless it is a whole file of a projector: libmtmd's query reads no more than the header."""
    if not any(read_header(path).metadata.get(encoder) for encoder in _ENCODERS):
        raise ModelError(
            f"{path} is no multimodal projector; convert one with llama.cpp's convert_hf_to_gguf.py --mmproj"
        )


def _wanted(
    library: native.Library,
    path: str,
    device: str | None,
    devices: Registry,
    flash_attn: FlashAttn,
    image_min_tokens: int,
    image_max_tokens: int,
) -> tuple[Any, object]:
    """A ``fitter_projector_t`` and what it points to."""
    address = 0
    if device is not None:
        found = select((device,), devices)
        address = found[0].address
    if image_max_tokens != -1 and image_max_tokens < max(image_min_tokens, 1):
        raise UsageError(f"image_max_tokens {image_max_tokens} is less than {max(image_min_tokens, 1)}")
    name = library.ffi.new("char[]", os.fsencode(path))
    wanted = library.ffi.new(
        "fitter_projector_t *",
        {
            "path": name,
            "device": library.pointer(address),
            "flash_attn": FLASH_ATTN[flash_attn],
            "image_min_tokens": image_min_tokens,
            "image_max_tokens": image_max_tokens,
        },
    )
    return wanted, name


def _refusal(library: native.Library, wanted: Any) -> str:
    """Why libmtmd cannot load it: its query for memory keeps that to itself."""
    projector = library.fitter.fitter_projector_load(wanted, library.ffi.NULL)
    if projector != library.ffi.NULL:
        library.fitter.fitter_projector_free(projector)
        return "libmtmd does not say how much memory this projector takes"
    return _reason()


_PREFIXES = re.compile(r"^(\w+: )*(error: )?(failed to load model '.*?': )?(\w+: )*")
_CONSEQUENCES = re.compile(r"error: Failed to load CLIP model from")


def _reason() -> str:
    lines = [line for line in captured_log() if not _CONSEQUENCES.search(line.text)]
    return _PREFIXES.sub("", reason(lines) or "libmtmd cannot load it")


@functools.cache
def _load() -> native.Library:
    """libmtmd, on top of what ``native.load`` has loaded. Raises ``LibraryError``."""
    library = native.load()
    path = _path()
    try:
        # Its own dependencies are found by the names of what is mapped.
        mtmd = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"libmtmd cannot be loaded: {' '.join(str(error).split())}; {_FIX}") from error
    for symbol in ("llama_backend_init", "ggml_backend_dev_count"):
        if _address(mtmd, symbol) != _address(library.llama_cpp._lib, symbol):
            raise LibraryError(f"{path} belongs to another libllama than the one that is loaded; {_FIX}")
    if not library.fitter.fitter_projector_library(library.ffi.cast("void *", mtmd._handle)):
        raise LibraryError(
            f"{path} is not the libmtmd of {native.built_versions(library)}: {library.last_error()}; {_FIX}"
        )
    return library


_FIX = f"install llama-cpp-python=={native.LLAMA_CPP_PYTHON_VERSION}"


def _path() -> Path:
    directory = os.environ.get("MTMD_CPP_LIB") or native.directory()
    for name in ("libmtmd.so", "libmtmd.dylib"):
        path = Path(directory) / name
        if path.is_file():
            return path
    raise LibraryError(
        f"a projector needs libmtmd, and there is none in {directory}: {_FIX}, or set MTMD_CPP_LIB to where it is"
    )


def _address(library: Any, symbol: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    except AttributeError:
        return None
