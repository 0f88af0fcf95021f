"""LoRA adapters, in dummy loads and in real ones."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from typing import Any

from fitter.errors import ModelError
from fitter.llama.build import library as native
from fitter.llama.build.log import captured_log, reason
from fitter.llama.header.read_header import read_header
from fitter.llama.load.breakdown import counted
from fitter.llama.types import Lora, Row
from fitter.storage.files import identity

_ADAPTER_PREFIX = re.compile(r"^(\w+: )*(failed to apply lora adapter: )?(\w+: )*")


class Adapters:
    """LoRA adapters, loaded for a model. Call ``free`` before the model is freed.

    Nothing is allocated for them unless ``really`` is true. Raises ``ModelError`` for an adapter of another model.

    Attributes:
        rows: Bytes of each adapter, by buffer type.
    """

    def __init__(self, library: native.Library, lora: Sequence[Lora], model: Any, really: bool) -> None:
        self.key = self.key_of(lora)
        self.rows: tuple[tuple[Row, ...], ...] = ()
        self._llama = library.llama
        self._pointers: list[Any] = []
        try:
            for adapter in lora:
                self._load(adapter.path, model, really)
        except BaseException:
            self.free()
            raise

    @staticmethod
    def key_of(lora: Sequence[Lora]) -> tuple[object, ...]:
        """Return a key that is equal for equal files, whatever their scale."""
        return tuple((os.path.abspath(adapter.path), identity(adapter.path)) for adapter in lora)

    def apply(self, lora: Sequence[Lora], context: Any) -> None:
        """Add the adapters to ``context``, at the scales in ``lora``."""
        n = len(self._pointers)
        pointers = (ctypes.c_void_p * n)(*self._pointers)
        scales = (ctypes.c_float * n)(*(adapter.scale for adapter in lora))
        self._llama.llama_set_adapters_lora(context, pointers, n, scales)

    def free(self) -> None:
        """Free the adapters."""
        while self._pointers:
            self._llama.llama_adapter_lora_free(self._pointers.pop())

    def _load(self, path: str, model: Any, really: bool) -> None:
        if read_header(path).metadata.get("general.type") != "adapter":
            raise ModelError(f"{path} is not a LoRA adapter; convert one with llama.cpp's convert_lora_to_gguf.py")
        with counted(really) as allocations:
            adapter = self._llama.llama_adapter_lora_init(model, os.fsencode(path))
        if not adapter:
            why = reason(captured_log()) or "llama.cpp cannot load the adapter"
            raise ModelError(f"{path}: {_ADAPTER_PREFIX.sub('', why)}")
        self._pointers.append(adapter)
        self.rows += (allocations.rows,)
