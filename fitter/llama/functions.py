"""llama.cpp's C functions that fitter calls, with the parameter structs of a layout in ``layouts.json``.

llama-cpp-python's own bindings need every symbol of the version that they are for, so they are not used for planning.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os

from fitter.errors import LibraryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LAYOUT = "0.3.36"
"""The layout of the llama.cpp that fitter is compiled for, by the version of llama-cpp-python that it came with."""

LLAMA_LOAD_MODE_NONE = 0
LLAMA_SPLIT_MODE_LAYER = 1

ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
"""``llama_progress_callback``: false cancels the load."""

_KINDS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "size_t": ctypes.c_size_t,
    "float *": ctypes.POINTER(ctypes.c_float),
    "void *": ctypes.c_void_p,
}


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


class Functions:
    """The functions of the libllama at ``path``, called as in C. Models, contexts and adapters are addresses.

    Raises ``LibraryError`` if it lacks one of them, and ``OSError`` if it cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        structs = structs_of(LAYOUT)
        for name, signature in _SIGNATURES.items():
            try:
                function = getattr(self.library, name)
            except AttributeError:
                raise LibraryError(f"{path} is not a llama.cpp that fitter can use: it has no {name}") from None
            function.restype, *function.argtypes = (structs.get(kind, kind) for kind in signature)
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@functools.cache
def structs_of(layout: str) -> dict[str, type[ctypes.Structure]]:
    """The parameter structs of a layout, by their names in C."""
    with open(os.path.join(os.path.dirname(__file__), "layouts.json"), encoding="utf-8") as file:
        layouts: dict[str, dict[str, dict[str, str]]] = json.load(file)
    return {
        name: type(name, (ctypes.Structure,), {"_fields_": [(field, _KINDS[kind]) for field, kind in fields.items()]})
        for name, fields in layouts[layout].items()
    }
