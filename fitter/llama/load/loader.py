"""Dummy loads: models and contexts that allocate nothing, and the memory that they would take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from fitter.errors import LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.build.layouts import read_whole
from fitter.llama.build.log import captured_log, failure, flash_attn_from, lines_of_context, n_splits_from, unused_from
from fitter.llama.header.read_header import Headers
from fitter.llama.load.backend_devices import Device, Registry, every_device, register_virtual
from fitter.llama.load.breakdown import (
    breakdown_of,
    check_split_mode,
    model_info_of,
    split_counted,
    takes_nothing,
    untouched,
)
from fitter.llama.load.caches import PADDED, caches_of
from fitter.llama.load.structs import Adapters, apply, apply_context, model_key
from fitter.llama.types import (
    LAYOUT_DEVICE,
    Breakdown,
    Caches,
    CacheTensor,
    Layout,
    LayoutEntry,
    Lora,
    ModelInfo,
    Params,
    Row,
    Skeleton,
)

_LAYOUT = "layout"
"""Role of the model whose tensors' sizes are recorded."""


class Loader:
    """Makes dummy loads, and keeps the last model so that another context of it needs no new load.

    A model is a file, or a ``Skeleton``, which ``headers`` makes. Not thread-safe. Call ``close`` before virtual
    devices are replaced.

    Attributes:
        loads: Number of dummy loads.
    """

    def __init__(self, devices: Registry, headers: Headers | None = None) -> None:
        self.devices = devices
        self._headers = headers or Headers()
        self.loads = 0
        self._without_skeleton = set[Skeleton]()
        self._models: dict[str, _Dummy] = {}
        self._library = native.libraries()

    def close(self) -> None:
        """Free all models."""
        while self._models:
            self._models.popitem()[1].free()

    def measure(
        self, path: str | Skeleton, params: Params, role: str = "measure", *, reserve: bool = False
    ) -> Breakdown:
        """Measure the memory of loading ``path`` with ``params``, by a dummy load.

        llama.cpp's own figure for a dummy load ignores the devices of single nodes and all graphs but the first;
        ``reserve`` also reserves compute buffers as a real load does, without memory (``Row.reserved``).

        Args:
            path: The model.
            params: Parameters of the load.
            role: The last model of each role is kept.
            reserve: Whether to reserve too.

        Raises:
            LlamaCppError: llama.cpp refuses the load.
        """
        dummy = self._model(role, path, params, self.devices)
        with dummy.context(params) as context:
            lora = dummy.apply(params.lora, context)
            breakdown = breakdown_of(context)
            log = [line.text for line in captured_log()]
            rows = breakdown.rows
            if reserve and self._library.fitter.fitter_reserve(self._library.pointer(context)):
                rows = _with_reserved(rows, breakdown_of(context).rows)
        return Breakdown(rows, breakdown.devices, breakdown.n_ctx, flash_attn_from(log), n_splits_from(log), lora)

    def model_info(self, path: str | Skeleton, params: Params) -> ModelInfo:
        """Load ``path`` like ``measure``, and describe the model. Raises ``LlamaCppError``."""
        dummy = self._model("measure", path, params, self.devices)
        return model_info_of(self._library, dummy.model)

    def layout(self, path: str | Skeleton, params: Params) -> Layout:
        """Record the size of every weight and cache tensor, with all layers on one device.

        Raises ``LlamaCppError``.
        """
        backend = native.open_backend()
        with self._recorded(path, replace(params, ctx_type=Params.ctx_type)) as context:
            total = breakdown_of(context)
        entries = tuple(record.entry for record in _records(self._library, backend))
        unused = self._models[_LAYOUT].unused
        layout = Layout(entries, int(backend.fitter_virtual_alignment()), total.n_ctx, unused)
        _check_layout(layout, total)
        return layout

    def caches(self, path: str | Skeleton, params: Params) -> Caches:
        """List the caches of a context with ``params``, recorded as for ``layout``. Raises ``LlamaCppError``."""
        if params.flash_attn == "off":
            with self._recorded(path, params) as context:
                caches = self._caches(context)
                if not any(PADDED in line.text for line in captured_log()):
                    return caches
        # "auto" would depend on the recording device
        with self._recorded(path, replace(params, flash_attn="on")) as context:
            return self._caches(context)

    def _caches(self, context: Any) -> Caches:
        breakdown_of(context)
        log = lines_of_context([line.text for line in captured_log()])
        records = _records(self._library, native.open_backend())
        tensors = [
            CacheTensor(each.name, each.row_bytes, each.rows, each.planes) for each in records if not each.is_weight
        ]
        return caches_of(self._library, context, log, tensors)

    @contextmanager
    def _recorded(self, path: str | Skeleton, params: Params) -> Iterator[Any]:
        """Create a context with all layers on one device; asking for the sizes of its caches' tensors records them."""
        backend = native.open_backend()
        recorder = _recorder(self._library, backend)
        everything = replace(
            params,
            n_gpu_layers=Params.n_gpu_layers,
            tensor_split=None,
            tensor_buft_overrides=(),
            split_mode=Params.split_mode,
            main_gpu=Params.main_gpu,
            devices=None,
            offload_kqv=Params.offload_kqv,
            n_outputs_max=Params.n_outputs_max,
            lora=(),
        )
        dummy = self._model(_LAYOUT, path, everything, Registry((recorder,), (recorder,)))
        backend.fitter_virtual_record_clear()
        try:
            backend.fitter_virtual_record(1)
            with dummy.context(everything) as context:
                backend.fitter_virtual_record(2)
                yield context
        finally:
            backend.fitter_virtual_record(0)

    def _model(self, role: str, path: str | Skeleton, params: Params, devices: Registry) -> _Dummy:
        key = model_key(path, params)
        kept = self._models.get(role)
        if kept is not None and kept.key == key and kept.has_layers(params.n_gpu_layers):
            return kept
        if kept is not None:
            del self._models[role]
            kept.free()
        dummy = self._models[role] = self._loaded(key, path, params, devices)
        return dummy

    def _loaded(self, key: tuple[object, ...], path: str | Skeleton, params: Params, devices: Registry) -> _Dummy:
        """Load a model; the file itself where llama.cpp refuses its skeleton."""
        name = path if isinstance(path, str) else next(iter(path.files), "")
        if not isinstance(path, str) and path not in self._without_skeleton:
            with suppress(LlamaCppError):
                return self._load(key, self._headers.skeleton(path), name, params, devices)
        dummy = self._load(key, name, name, params, devices)
        if not isinstance(path, str):
            self._without_skeleton.add(path)
        return dummy

    def _load(self, key: tuple[object, ...], file: str, name: str, params: Params, devices: Registry) -> _Dummy:
        self.loads += 1
        model, pointers = _load_dummy(self._library, file, name, params, devices)
        return _Dummy(self._library, key, name, params, model, pointers)


def _with_reserved(rows: Sequence[Row], real: Sequence[Row]) -> tuple[Row, ...]:
    reserved = {(row.buffer_type, row.device): row for row in real}
    measured = [replace(row, reserved=reserved.pop((row.buffer_type, row.device)).compute) for row in rows]
    return (*measured, *(replace(row, compute=0, reserved=row.compute) for row in reserved.values()))


def _load_dummy(
    library: native.Library, file: str, name: str, params: Params, devices: Registry
) -> tuple[Any, list[object]]:
    """Load a model with ``no_alloc``; return it, and the memory that its parameters point to."""
    check_split_mode(library, params)
    llama = library.llama
    model_params = llama.llama_model_default_params()
    pointers = apply(params, model_params, llama.llama_context_default_params(), devices)
    model_params.no_alloc = True
    read_whole(model_params)
    model = llama.llama_model_load_from_file(os.fsencode(file), model_params)
    if not model:
        raise failure(name, "llama.cpp cannot load the model")
    return model, pointers


class _Dummy:
    """A model loaded with ``no_alloc``.

    Attributes:
        model: The model.
        pointers: The memory that its parameters point to.
        unused: Tensors that llama.cpp does not load, by the log of the load.
    """

    def __init__(
        self,
        library: native.Library,
        key: tuple[object, ...],
        name: str,
        params: Params,
        model: Any,
        pointers: Sequence[object],
    ) -> None:
        self.key = key
        self.model = model
        self.name = name
        self.unused = unused_from(line.text for line in captured_log())
        self._pointers = pointers
        self._library = library
        self._llama = library.llama
        self._adapters: Adapters | None = None
        info = model_info_of(library, self.model)
        self._all_layers = info.n_layer + info.n_layer_nextn + 1
        self._n_ctx_train = info.n_ctx_train
        self._n_gpu_layers = self._layers(params.n_gpu_layers)
        takes_nothing(library, params, model)

    def has_layers(self, n_gpu_layers: int) -> bool:
        """Return whether ``n_gpu_layers`` puts the same layers on devices."""
        return self._layers(n_gpu_layers) == self._n_gpu_layers

    def _layers(self, n_gpu_layers: int) -> int:
        return min(n_gpu_layers, self._all_layers) if n_gpu_layers >= 0 else self._all_layers

    @contextmanager
    def context(self, params: Params) -> Iterator[Any]:
        context_params = self._llama.llama_context_default_params()
        apply_context(params, context_params)
        # llama.cpp allocates and clears recurrent states and outputs even in a dummy load
        with untouched(self._cells(params)), split_counted(self._library, params, self.model) as owner:
            context = self._llama.llama_init_from_model(self.model, context_params)
            owner.append(context)
        if not context:
            raise failure(self.name, "llama.cpp cannot make a context")
        try:
            yield context
        finally:
            self._llama.llama_free(context)

    def _cells(self, params: Params) -> int:
        """Return the cells of each stream of the KV cache."""
        n_ctx = _padded(params.n_ctx or self._n_ctx_train)
        return n_ctx if params.kv_unified else _padded(n_ctx // params.n_seq_max)

    def apply(self, lora: Sequence[Lora], context: Any) -> tuple[tuple[Row, ...], ...]:
        """Add the adapters to ``context``, whose compute buffers then include them; return the memory of each."""
        if not lora:
            return ()
        if self._adapters is None or self._adapters.key != Adapters.key_of(lora):
            self._free_adapters()
            self._adapters = Adapters(self._library, lora, self.model, really=False)
        self._adapters.apply(lora, context)
        if not self._library.fitter.fitter_context_reserve(self._library.pointer(context)):
            raise LlamaCppError(f"libllama cannot plan with LoRA adapters: {self._library.last_error()}")
        return self._adapters.rows

    def free(self) -> None:
        self._free_adapters()
        self._llama.llama_model_free(self.model)

    def _free_adapters(self) -> None:
        adapters, self._adapters = self._adapters, None
        if adapters is not None:
            adapters.free()


def _padded(n_ctx: int) -> int:
    """Round a context up, as llama.cpp does."""
    return -(-n_ctx // 256) * 256


def _recorder(library: native.Library, backend: Any) -> Device:
    register_virtual("")
    address = library.address(backend.fitter_virtual_recorder())
    return next(device for device in every_device(library) if device.address == address)


class _Record(NamedTuple):
    """A recorded tensor."""

    buffer_type: str
    name: str
    bytes: int
    is_weight: int
    row_bytes: int
    rows: int
    planes: int

    @property
    def entry(self) -> LayoutEntry:
        return LayoutEntry(self.buffer_type, self.name, "model" if self.is_weight else "context", self.bytes)


def _records(library: native.Library, backend: Any) -> tuple[_Record, ...]:
    out = library.ffi.new("fitter_columns_t *")
    backend.fitter_virtual_records(out)
    texts, numbers = library.columns(out, 2, 5)
    return tuple(map(_Record, *texts, *numbers))


def _check_layout(layout: Layout, total: Breakdown) -> None:
    """Raise ``LlamaCppError`` if the sizes do not add up to llama.cpp's own total."""
    for row in total.rows:
        if row.buffer_type != LAYOUT_DEVICE:
            continue
        for kind, expected in (("model", row.model), ("context", row.context)):
            sizes = [e.bytes for e in layout.entries if e.buffer_type == row.buffer_type and e.kind == kind]
            padded = sum(-(-size // layout.alignment) * layout.alignment for size in sizes)
            if padded != expected:
                raise LlamaCppError(f"recorded {padded} bytes of {kind} tensors, but llama.cpp counts {expected}")
