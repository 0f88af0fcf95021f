"""A dummy load that starts before its process has imported anything else.

It takes longer than the rest of a fit, so this module imports only what the load needs.
"""

from __future__ import annotations

import ctypes
import os
import threading

from fitter.errors import LibraryError
from fitter.llama.build import library as native
from fitter.llama.build.functions import LLAMA_SPLIT_MODE_LAYER
from fitter.llama.build.layouts import read_whole
from fitter.llama.header.file_identity import identity
from fitter.llama.load import early_limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MAX_HELD_OVERRIDES = 64
"""Most tensor overrides of a load that waits for its placement."""

_NOTHING = b"^$"


class OverrideStruct(ctypes.Structure):
    """llama.cpp's ``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class Ahead:
    """A dummy load on another thread, with all layers on the described virtual devices.

    With ``is_held`` it reads the tokenizer, which takes longest, and then waits for ``place``. Native calls release the
    interpreter's lock, so the caller can continue. Raises ``LibraryError`` and ``UsageError``.
    """

    def __init__(self, path: str, description: str, *, is_held: bool = False) -> None:
        self.path = path
        self.description = description
        self.is_held = is_held
        self.identity = identity(path)
        self._model: Any = None
        self._library = native.libraries()
        model_params, self.pointers, self._overrides = params_of(description, is_held)
        self._hold: Any = None
        if is_held:
            self._hold = self._library.fitter.fitter_hold_new()
            if self._hold == self._library.ffi.NULL:
                raise LibraryError(self._library.last_error())
        self._thread = threading.Thread(target=self._load, args=(model_params,), daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """Wait for the model and return it; ``None`` if the load failed or did not wait, or if the file has changed."""
        is_as_placed = True
        if self._hold is not None:
            self._library.fitter.fitter_hold_release(self._hold)
        self._thread.join()
        if self._hold is not None:
            # a llama.cpp with another line in its log has placed the tensors too early
            is_as_placed = bool(self._library.fitter.fitter_hold_reached(self._hold))
            self._library.fitter.fitter_hold_free(self._hold)
            self._hold = None
        if self._model and not (is_as_placed and self.identity == identity(self.path)):
            self._library.llama.llama_model_free(self._model)
            self._model = None
        return self._model

    def place(self, counts: Sequence[int], overrides: Sequence[tuple[bytes, int]]) -> Any:
        """Let the load continue with a placement; return as ``take``.

        Args:
            counts: Layers on each device.
            overrides: Pairs of pattern and buffer type, from 1 to ``MAX_HELD_OVERRIDES``.
        """
        for entry, (pattern, buffer_type) in zip(self._overrides, overrides, strict=False):
            entry.pattern, entry.buft = pattern, buffer_type
        backend = native.open_backend()
        for i, count in enumerate(counts):
            # without a tensor split, llama.cpp splits the layers by free memory
            backend.fitter_virtual_say_free(i, count)
        try:
            return self.take()
        finally:
            backend.fitter_virtual_say_described_free()

    def _load(self, model_params: Any) -> None:
        if not early_limits.are_kept(self._library, self.path):
            # the reader of the header reports it
            return
        if self._hold is not None:
            self._library.fitter.fitter_hold_use(self._hold)
        self._model = self._library.llama.llama_model_load_from_file(os.fsencode(self.path), model_params)


def params_of(description: str, is_held: bool, count: int | None = None) -> tuple[Any, list[object], Any]:
    """Build the struct of parameters for the first ``count`` devices (``None``: all), the memory that it points to, and
    its overrides.
    """
    native.prepare()
    library, backend = native.libraries(), native.open_backend()
    if not native.register_virtual(description):
        raise LibraryError(library.last_error())
    devices: list[int] = []
    while len(devices) != count and (device := backend.fitter_virtual_device(len(devices))) != library.ffi.NULL:
        devices.append(library.address(device))
    pointers = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
    # llama.cpp checks at the start whether there are overrides, and reads them when it places tensors
    overrides = (OverrideStruct * (MAX_HELD_OVERRIDES + 1))()
    overrides[0].pattern = _NOTHING
    params = library.llama.llama_model_default_params()
    params.devices = ctypes.cast(pointers, ctypes.c_void_p)
    params.n_gpu_layers = -1
    params.split_mode = LLAMA_SPLIT_MODE_LAYER
    params.main_gpu = 0
    params.no_alloc = True
    read_whole(params)
    if is_held:
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    return params, [pointers, overrides], overrides
