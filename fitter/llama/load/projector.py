"""Measure multimodal projectors with libmtmd, which loads them in llama.cpp's programs."""

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
from fitter.llama.build import library as native
from fitter.llama.build.linking import LIBRARY, address_for
from fitter.llama.build.log import captured_log, reason
from fitter.llama.header.read_header import read_header
from fitter.llama.load.backend_devices import Registry, select
from fitter.llama.load.breakdown import counted
from fitter.llama.types import FlashAttn, Row
from fitter.parameters.table import FLASH_ATTN


def measure(
    path: str,
    device: str | None,
    devices: Registry,
    flash_attn: FlashAttn = "auto",
    image_min_tokens: int = -1,
    image_max_tokens: int = -1,
) -> tuple[Row, ...]:
    """Measure a projector without allocating; return rows by buffer type.

    Weights are model bytes; compute is for libmtmd's warm-up image.

    Args:
        path: The projector.
        device: Name of one of ``devices``; ``None`` for the host.
        devices: The devices.
        flash_attn: Flash attention.
        image_min_tokens: Fewest tokens of an image; -1 for the projector's own.
        image_max_tokens: Most tokens of an image; -1 for the projector's own.

    Raises:
        ModelError: The file is no projector.
        UsageError: The device is unknown.
        LibraryError: There is no matching libmtmd.
    """
    library = _libraries()
    _check(path)
    request, _name = _request(library, path, device, devices, flash_attn, image_min_tokens, image_max_tokens)
    reported = library.ffi.new("uint64_t *")
    with counted() as allocations:
        is_measured = library.fitter.fitter_projector_measure(request, reported)
        if not is_measured:
            raise ModelError(f"{path}: {_refusal(library, request)}")
    # libmtmd reports the weights in the file, without the part that generates audio
    if sum(row.used for row in allocations.rows) < reported[0]:
        raise LlamaCppError(f"libmtmd reports {reported[0]} bytes for {path}, but ggml was asked for fewer")
    return allocations.rows


@contextmanager
def loaded(
    path: str, device: str | None, devices: Registry, model: Any = None, flash_attn: FlashAttn = "auto"
) -> Iterator[Any]:
    """Load a projector for real (``mtmd_context *``), for ``model`` (llama_cpp's pointer) or for no model."""
    library = _libraries()
    _check(path)
    request, _name = _request(library, path, device, devices, flash_attn, -1, -1)
    projector = library.fitter.fitter_projector_load(request, library.pointer(model or 0))
    if projector == library.ffi.NULL:
        raise ModelError(f"{path}: {_reason()}")
    try:
        yield projector
    finally:
        library.fitter.fitter_projector_free(projector)


_ENCODERS = ("clip.has_vision_encoder", "clip.has_audio_encoder", "clip.has_gen_audio_encoder")


def _check(path: str) -> None:
    """Raise ``ModelError`` unless it is a complete projector: libmtmd measures the header only."""
    if not any(read_header(path).metadata.get(encoder) for encoder in _ENCODERS):
        raise ModelError(
            f"{path} is not a multimodal projector; convert one with llama.cpp's convert_hf_to_gguf.py --mmproj"
        )


def _request(
    library: native.Library,
    path: str,
    device: str | None,
    devices: Registry,
    flash_attn: FlashAttn,
    image_min_tokens: int,
    image_max_tokens: int,
) -> tuple[Any, object]:
    """Build a ``fitter_projector_t``; return it with the memory that it points to."""
    address = 0
    if device is not None:
        selected = select((device,), devices)
        address = selected[0].address
    if image_max_tokens != -1 and image_max_tokens < max(image_min_tokens, 1):
        raise UsageError(
            f"image_max_tokens is {image_max_tokens}, less than image_min_tokens ({max(image_min_tokens, 1)}): raise it"
        )
    name = library.ffi.new("char[]", os.fsencode(path))
    request = library.ffi.new(
        "fitter_projector_t *",
        {
            "path": name,
            "device": library.pointer(address),
            "flash_attn": FLASH_ATTN[flash_attn],
            "image_min_tokens": image_min_tokens,
            "image_max_tokens": image_max_tokens,
        },
    )
    return request, name


def _refusal(library: native.Library, request: Any) -> str:
    """Return libmtmd's reason, which it reports only when it loads."""
    projector = library.fitter.fitter_projector_load(request, library.ffi.NULL)
    if projector != library.ffi.NULL:
        library.fitter.fitter_projector_free(projector)
        return "libmtmd does not report the memory of this projector"
    return _reason()


_PREFIXES = re.compile(r"^(\w+: )*(error: )?(failed to load model '.*?': )?(\w+: )*")
_CONSEQUENCES = re.compile(r"error: Failed to load CLIP model from")


def _reason() -> str:
    lines = [line for line in captured_log() if not _CONSEQUENCES.search(line.text)]
    return _PREFIXES.sub("", reason(lines) or "libmtmd cannot load it")


@functools.cache
def _libraries() -> native.Library:
    """Load the native libraries with libmtmd. Raises ``LibraryError``."""
    library = native.libraries()
    path = _path()
    try:
        # the linker finds its dependencies by name among the loaded libraries
        mtmd = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"libmtmd cannot be loaded ({' '.join(str(error).split())}): {_FIX}") from error
    for symbol in ("llama_backend_init", "ggml_backend_dev_count"):
        if address_for(mtmd, symbol) != address_for(library.llama.library, symbol):
            raise LibraryError(f"{path} belongs to another libllama than the loaded one: {_FIX}")
    if not library.fitter.fitter_projector_library(library.ffi.cast("void *", mtmd._handle)):
        raise LibraryError(
            f"{path} is not the libmtmd of llama.cpp {native.built_versions(library)}: {library.last_error()}; {_FIX}"
        )
    return library


_FIX = native.FIX


def _path() -> Path:
    directory = os.environ.get("MTMD_CPP_LIB") or native.directory()
    path = Path(directory) / LIBRARY.format("mtmd")
    if path.is_file():
        return path
    raise LibraryError(
        f"a projector needs libmtmd, but there is none in {directory}: {_FIX}, or set MTMD_CPP_LIB to its directory"
    )
