"""Parameters of a load as llama.cpp takes them: its structs, patterns of tensor overrides, and LoRA adapters."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from typing import Any

from fitter.errors import ModelError, UsageError
from fitter.llama.build import library as native
from fitter.llama.build.log import captured_log, reason
from fitter.llama.header.read_header import read_header
from fitter.llama.load.backend_devices import Device, Registry, registry, select
from fitter.llama.load.breakdown import counted
from fitter.llama.types import MAX_USED_DEVICES, Lora, Params, Row, Skeleton
from fitter.parameters.table import of_a_struct
from fitter.storage import identity

_POINTERS = ("devices", "tensor_split", "tensor_buft_overrides")
"""Parameters that are pointers in llama.cpp's struct."""


class OverrideStruct(ctypes.Structure):
    """llama.cpp's ``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def apply(params: Params, model_params: Any, context_params: Any, devices: Registry | None = None) -> list[object]:
    """Write ``params`` into llama.cpp's two parameter structs, fitter's or llama-cpp-python's.

    Fields that ``Params`` lacks stay unchanged; defaults without a field are skipped.

    Args:
        params: The parameters.
        model_params: The struct of a model's parameters.
        context_params: The struct of a context's parameters.
        devices: Devices to look names up in; by default the real ones of this process. Only then ``params.devices`` of
            ``None`` leaves the choice to llama.cpp.

    Returns:
        Objects that the structs point to, which must live as long as the model.

    Raises:
        UsageError: A name is unknown, a number out of range, or a parameter missing in this llama.cpp.
    """
    available = devices or registry()
    pointed_to: list[object] = []
    _apply_model(params, model_params, available, leave_default=devices is None, pointed_to=pointed_to)
    apply_context(params, context_params)
    return pointed_to


def _apply_model(params: Params, out: Any, available: Registry, leave_default: bool, pointed_to: list[object]) -> None:
    llama = native.libraries().llama
    selected = available.default if params.devices is None else select(params.devices, available)
    _check_count(params, selected)
    if params.devices is not None or not leave_default:
        pointers = (ctypes.c_void_p * (len(selected) + 1))(*(d.address for d in selected), None)
        out.devices = ctypes.cast(pointers, ctypes.c_void_p)
        pointed_to.append(pointers)

    write("model", params, out)

    if params.tensor_split is not None:
        limit = int(llama.llama_max_devices())
        if len(params.tensor_split) > limit:
            raise UsageError(f"tensor_split has {len(params.tensor_split)} values; llama.cpp takes at most {limit}")
        split = (ctypes.c_float * limit)(*params.tensor_split)
        out.tensor_split = split
        pointed_to.append(split)

    if params.tensor_buft_overrides:
        overrides = (OverrideStruct * (len(params.tensor_buft_overrides) + 1))()
        for entry, (pattern, buffer_type) in zip(overrides, overrides_of(params, available), strict=False):
            entry.pattern, entry.buft = pattern, buffer_type
            pointed_to.append(pattern)
        out.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        pointed_to.append(overrides)


def overrides_of(params: Params, available: Registry) -> list[tuple[bytes, int]]:
    """Return pattern and address of the buffer type of every override. Raises ``UsageError`` for an unknown one."""
    buffer_types = {d.buffer_type: d.buffer_type_address for d in available.devices if d.buffer_type is not None}
    overrides = []
    for override in params.tensor_buft_overrides:
        if override.buffer_type not in buffer_types:
            raise UsageError(
                f"unknown buffer type '{override.buffer_type}'; there are: {', '.join(buffer_types) or 'none'}"
            )
        overrides.append((override.pattern.encode("utf-8", "surrogateescape"), buffer_types[override.buffer_type]))
    return overrides


def apply_context(params: Params, out: Any) -> None:
    write("context", params, out)


def write(struct: str, params: Params, out: Any) -> None:
    """Write the plain values of ``params`` into ``out``, llama.cpp's ``struct`` (``model`` or ``context``).

    Defaults without a field are skipped. Raises ``UsageError`` for another value without a field.
    """
    fields = {name for name, *_ in out._fields_}
    for each in of_a_struct(struct):
        if each.key in _POINTERS:
            continue
        value = params.of_parameter(each)
        if each.field in fields:
            setattr(out, each.field, each.kind.native(str(each.key), value))
        elif value != each.default:
            raise UsageError(
                f"{each.key} is not a parameter of llama.cpp {native.llama_cpp_version()}: leave it out, or plan with "
                "a newer llama.cpp"
            )


def _check_count(params: Params, selected: tuple[Device, ...]) -> None:
    # GGML_SCHED_MAX_BACKENDS: with one more, llama.cpp aborts.
    if len(selected) > MAX_USED_DEVICES and params.split_mode != "none":
        raise UsageError(
            f"llama.cpp runs a model on at most {MAX_USED_DEVICES} devices beside the CPU: choose some of the "
            f"{len(selected)} with --device"
        )


def model_key(path: str | Skeleton, params: Params) -> tuple[object, ...]:
    files = (path,) if isinstance(path, str) else path.files
    return (
        isinstance(path, str),
        *((os.path.abspath(file), identity(file)) for file in files),
        # n_gpu_layers is compared separately: larger numbers than the model has layers are equal
        *(params.of_parameter(each) for each in of_a_struct("model") if each.key != "n_gpu_layers"),
    )


def match_patterns(patterns: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Return for each name the index of the first pattern that matches a part of it, or -1.

    Raises ``UsageError`` for an invalid regular expression.
    """
    library = native.libraries()
    compiled: list[Any] = []
    try:
        for pattern in patterns:
            regex = library.fitter.fitter_regex_new(pattern.encode("utf-8", "surrogateescape"))
            if regex == library.ffi.NULL:
                raise UsageError(f"pattern '{pattern}' is not a valid regular expression: {library.last_error()}")
            compiled.append(regex)
        return tuple(_first_match(library, compiled, name) for name in names)
    finally:
        for regex in compiled:
            library.fitter.fitter_regex_free(regex)


def _first_match(library: native.Library, compiled: Sequence[Any], name: str) -> int:
    text = name.encode("utf-8", "surrogateescape")
    for i, regex in enumerate(compiled):
        is_match = library.fitter.fitter_regex_search(regex, text)
        if is_match < 0:
            raise UsageError(f"a pattern cannot be matched with '{name}': {library.last_error()}")
        if is_match:
            return i
    return -1


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
