"""A dummy load that begins before its process has imported what answers questions about it.

It takes longer than everything else that a fit does, so nothing is imported here that it can do without.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from fitter.errors import LibraryError
from fitter.llama import library as native


class Ahead:
    """The model at ``path`` on its way into this process, with all layers on the one virtual device described.

    Native calls release the interpreter's lock: what begins it goes on. Raises ``LibraryError`` and ``UsageError``.
    """

    def __init__(self, path: str, description: str) -> None:
        self.path = path
        self.description = description
        self._identity = identity(path)
        self._model: Any = None
        model_params, self.pointers = _params(description)
        self._thread = threading.Thread(target=self._load, args=(model_params,), daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """The model, once it is loaded; ``None`` where it was not, or its file has changed since."""
        self._thread.join()
        if self._model and self._identity != identity(self.path):
            native.load().llama_cpp.llama_model_free(self._model)
            self._model = None
        return self._model

    def _load(self, model_params: Any) -> None:
        llama = native.load().llama_cpp
        self._model = llama.llama_model_load_from_file(os.fsencode(self.path), model_params)


def _params(description: str) -> tuple[Any, list[object]]:
    """What ``binding`` makes of parameters that say no more than the device, and what they point to."""
    native.prepare()
    library, backend = native.load(), native.open_backend()
    if not native.register_virtual(description):
        raise LibraryError(library.last_error())
    device = library.address(backend.fitter_virtual_device(0))
    pointers = (ctypes.c_void_p * 2)(device, None)
    llama = library.llama_cpp
    params = llama.llama_model_default_params()
    params.devices = ctypes.cast(pointers, ctypes.c_void_p)
    params.n_gpu_layers = -1
    params.split_mode = llama.LLAMA_SPLIT_MODE_LAYER
    params.main_gpu = 0
    params.no_alloc = True
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    return params, [pointers]


def identity(path: str) -> tuple[int, ...]:
    """Changes when the file does; empty where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_dev, status.st_ino)
