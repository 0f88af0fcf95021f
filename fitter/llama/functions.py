"""llama.cpp's C functions that fitter calls, with its parameter structs in the layout that the loaded libllama has.

llama-cpp-python's own bindings need every symbol of the version that they are for, so they are not used for planning.
"""

from __future__ import annotations

import ctypes
import platform

from fitter.errors import LibraryError
from fitter.llama.layouts import layout_of, layouts, structs_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from fitter.llama.layouts import Layout, Probe

LLAMA_SPLIT_MODE_LAYER = 1

_HIDDEN_POINTER = ("x86_64", "AMD64")
"""Machines whose C calling convention passes the place of a large result as if it were the first argument."""

ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
"""``llama_progress_callback``: false cancels the load."""


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.c_void_p),
    )


_MODEL_PARAMS, _CONTEXT_PARAMS = "llama_model_params", "llama_context_params"
_POINTER, _TEXT, _FLAG = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
_INT, _UINT, _SIZE = ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "llama_backend_init": (None,),
    "llama_version": (_TEXT,),
    "llama_max_devices": (_SIZE,),
    "llama_model_default_params": (_MODEL_PARAMS,),
    "llama_context_default_params": (_CONTEXT_PARAMS,),
    "llama_model_load_from_file": (_POINTER, _TEXT, _MODEL_PARAMS),
    "llama_model_free": (None, _POINTER),
    "llama_model_n_ctx_train": (_INT, _POINTER),
    "llama_model_has_encoder": (_FLAG, _POINTER),
    "llama_model_has_decoder": (_FLAG, _POINTER),
    "llama_init_from_model": (_POINTER, _POINTER, _CONTEXT_PARAMS),
    "llama_free": (None, _POINTER),
    "llama_get_model": (_POINTER, _POINTER),
    "llama_get_memory": (_POINTER, _POINTER),
    "llama_memory_clear": (None, _POINTER, _FLAG),
    "llama_n_ctx": (_UINT, _POINTER),
    "llama_n_ctx_seq": (_UINT, _POINTER),
    "llama_n_ubatch": (_UINT, _POINTER),
    "llama_n_seq_max": (_UINT, _POINTER),
    "llama_encode": (_INT, _POINTER, Batch),
    "llama_decode": (_INT, _POINTER, Batch),
    "llama_synchronize": (None, _POINTER),
    "llama_adapter_lora_init": (_POINTER, _POINTER, _TEXT),
    "llama_adapter_lora_free": (None, _POINTER),
    "llama_set_adapters_lora": (
        _INT,
        _POINTER,
        ctypes.POINTER(_POINTER),
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_float),
    ),
}
"""The result and the arguments of each function; structs by their names."""


_ABSENT = frozenset({"llama_version"})
"""Functions that a llama.cpp that fitter can use may lack."""


class Functions:
    """The functions of the libllama at ``path``, called as in C. Models, contexts and adapters are addresses.

    ``layout``: which layout its parameter structs have, by name. It is asked with ``probe``, and if it is none that
    fitter knows, the ``llama.h`` among the files ``headers`` is read. A function that it may lack is ``None`` then.
    Raises ``LibraryError`` if it is not a llama.cpp that fitter can use, and ``OSError`` if it cannot be loaded.
    """

    def __init__(self, path: str, headers: Iterable[str] = (), probe: Probe | None = None) -> None:
        self.library = ctypes.CDLL(path)
        functions = {name: getattr(self.library, name, None) for name in _SIGNATURES}
        missing = [name for name, function in functions.items() if function is None and name not in _ABSENT]
        if missing:
            raise LibraryError(f"{path} is not a llama.cpp that fitter can use: it has no {missing[0]}")
        try:
            self.layout, layout = self._layout(headers, probe)
        except LibraryError as error:
            raise LibraryError(f"{path} is not a llama.cpp that fitter can use: {error}") from None
        structs = structs_of(layout)
        for name, (result, *arguments) in _SIGNATURES.items():
            if function := functions[name]:
                function.restype = structs.get(result, result)
                function.argtypes = [structs.get(kind, kind) for kind in arguments]
            setattr(self, name, function)

    def _layout(self, headers: Iterable[str], probe: Probe | None) -> tuple[str, Layout]:
        if probe is None and platform.machine() not in _HIDDEN_POINTER:
            # Without a compiled probe, it is taken for the llama.cpp that fitter is compiled for.
            return list(layouts().items())[-1]
        return layout_of(probe or self._probe, headers)

    def _probe(self, name: str, memory: Any) -> None:
        """Call a function that returns a large struct: where to, is a hidden first argument."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)((name, self.library))(ctypes.addressof(memory))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
