"""Plain functions over llama.cpp: parameters into its structs, dummy loads, and what they measure.

Everything here runs llama.cpp in the calling process: the worker, or a process that loads models itself.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fitter.errors import LibraryError, LlamaCppError, ModelError, UsageError
from fitter.llama import library as native
from fitter.llama.ahead import MAX_HELD_OVERRIDES, Ahead, TensorBuftOverride, identity
from fitter.llama.allocations import counted, untouched
from fitter.llama.types import (
    LAYOUT_DEVICE,
    MAX_DEVICES,
    MAX_USED_DEVICES,
    RPC,
    Array,
    Breakdown,
    DeviceInfo,
    Header,
    Layout,
    LayoutEntry,
    Lora,
    MetadataValue,
    ModelInfo,
    Params,
    Row,
    Skeleton,
    TensorInfo,
)
from fitter.parameters import of_a_struct
from fitter.text import printable

MAX_ARRAY_VALUES = 4096
"""Metadata arrays of numbers up to this length keep their values."""

_DEVICE_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}
_POINTERS = ("devices", "tensor_split", "tensor_buft_overrides")
"""Parameters of a model that its struct points to."""

_PLACED = ("n_gpu_layers", *_POINTERS)
"""Those that a load may be told when it has begun."""

_MAX_ROWS = 1024
_LOG_ERROR = 4
_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
_CUDA = "CUDA"


# --- devices


@dataclass(frozen=True)
class Device:
    """A device of ggml's registry with the addresses that llama.cpp wants."""

    info: DeviceInfo
    device_id: str | None
    address: int
    buffer_type: str | None
    buffer_type_address: int


@dataclass(frozen=True)
class Registry:
    """The devices that names in ``Params`` refer to. ``default`` are those that llama.cpp offloads to by itself."""

    devices: tuple[Device, ...]
    default: tuple[Device, ...]


def registry(virtual: bool = False) -> Registry:
    """The real devices of this process, or with ``virtual`` the described ones beside the CPU; remote ones always."""
    library = native.load()
    every = tuple(_devices(library))
    if virtual:
        backend = native.open_backend()
        addresses = []
        for i in range(MAX_DEVICES):
            pointer = backend.fitter_virtual_device(i)
            if pointer == library.ffi.NULL:
                break
            addresses.append(library.address(pointer))
        described = tuple(next(d for d in every if d.address == address) for address in addresses)
        host = tuple(d for d in every if d.info.type in ("cpu", "accel"))
        offered = remote_devices(every) + described
        return Registry(offered + host, offered)
    real = tuple(d for d in every if not d.info.virtual)
    return Registry(real, default_devices(real))


def cuda_registry() -> Registry:
    """The cards of a CUDA backend that runs without a GPU (``load_cuda_backend``), remote devices and the CPU."""
    every = tuple(_devices(native.load()))
    cards = tuple(replace(d, info=replace(d.info, virtual=True)) for d in every if d.info.backend == _CUDA)
    offered = remote_devices(every) + cards
    return Registry(offered + tuple(d for d in every if d.info.type in ("cpu", "accel")), offered)


def remote_devices(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Those of rpc-servers."""
    return tuple(d for d in devices if d.info.backend == RPC)


def rpc_devices(server: str) -> tuple[Device, ...]:
    """The devices of an rpc-server (``host:port``), unknown to ggml's registry. Their memory is not asked for.

    Raises ``LibraryError`` where libllama has no RPC. llama.cpp ends the process where nobody answers.
    """
    library = native.load()
    out = library.ffi.new("fitter_device_t *")
    found: list[Device] = []
    while True:
        if not library.fitter.fitter_rpc_device(server.encode(), len(found), out):
            raise LibraryError(f"the devices of the RPC server {server} cannot be used: {library.last_error()}")
        if out.device == library.ffi.NULL:
            return tuple(found)
        found.append(_device(library, out))


def _devices(library: native.Library) -> Iterator[Device]:
    out = library.ffi.new("fitter_device_t *")
    for i in range(library.fitter.fitter_device_count()):
        if not library.fitter.fitter_device_get(i, out):
            raise LibraryError(f"ggml does not describe its device {i}: {library.last_error()}")
        yield _device(library, out)


def _device(library: native.Library, out: Any) -> Device:
    backend = library.text(out.backend) or ""
    return Device(
        info=DeviceInfo(
            name=library.text(out.name) or "",
            description=printable(library.text(out.description) or ""),
            type=_DEVICE_TYPES.get(out.type, str(out.type)),
            backend=backend,
            total=int(out.total),
            free=int(out.free),
            virtual=backend == "fitter",
            buffer_type=library.text(out.buffer_type_name),
            largest_tensor=int(out.largest_tensor) or None,
        ),
        device_id=library.text(out.device_id),
        address=library.address(out.device),
        buffer_type=library.text(out.buffer_type_name),
        buffer_type_address=library.address(out.buffer_type),
    )


def default_devices(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The devices that llama.cpp offloads to by itself, in its order: RPC servers, GPUs, else integrated GPUs."""
    rpc: list[Device] = []
    gpus: list[Device] = []
    igpus: list[Device] = []
    for device in devices:
        if device.info.type == "gpu" and device.info.backend == RPC:
            rpc.append(device)
        elif device.info.type == "gpu":
            known = {gpu.device_id for gpu in gpus if gpu.device_id is not None}
            if device.device_id not in known:
                gpus.append(device)
        elif device.info.type == "igpu" and (not igpus or device.info.backend == igpus[-1].info.backend):
            igpus.append(device)
    return tuple(rpc + (gpus or igpus))


def device(name: str, devices: Registry) -> Device:
    """The device of that name. Raises ``UsageError``."""
    return select((name,), devices)[0]


def host(devices: Registry) -> DeviceInfo:
    """The CPU as ggml reports it (on Linux ggml counts all of the memory as free)."""
    for device in devices.devices:
        if device.info.type == "cpu":
            return device.info
    raise LibraryError("libllama has no CPU backend: install a llama-cpp-python that has one")


# --- parameters


def apply(params: Params, model_params: Any, context_params: Any, devices: Registry | None = None) -> list[object]:
    """Write ``params`` into llama-cpp-python's two parameter structs.

    Names of devices and buffer types are looked up in ``devices``, by default the real ones of this process; only then
    does ``params.devices`` of ``None`` leave the choice to llama.cpp. Fields that ``Params`` lacks are left alone.

    Returns what the structs point to: keep it as long as the model lives. Raises ``UsageError`` for an unknown name or
    a number out of range.
    """
    known = devices or registry()
    keep: list[object] = []
    _apply_model(params, model_params, known, leave_default=devices is None, keep=keep)
    _apply_context(params, context_params)
    return keep


def _apply_model(params: Params, out: Any, known: Registry, leave_default: bool, keep: list[object]) -> None:
    llama_cpp = native.load().llama_cpp
    selected = known.default if params.devices is None else select(params.devices, known)
    _check_count(params, selected)
    if params.devices is not None or not leave_default:
        pointers = (ctypes.c_void_p * (len(selected) + 1))(*(d.address for d in selected), None)
        out.devices = ctypes.cast(pointers, ctypes.c_void_p)
        keep.append(pointers)

    for each in of_a_struct("model"):
        if each.key not in _POINTERS:
            setattr(out, each.field, each.kind.native(str(each.key), params.of_parameter(each)))

    if params.tensor_split is not None:
        limit = int(llama_cpp.llama_max_devices())
        if len(params.tensor_split) > limit:
            raise UsageError(f"tensor_split has {len(params.tensor_split)} values; llama.cpp takes at most {limit}")
        split = (ctypes.c_float * limit)(*params.tensor_split)
        out.tensor_split = split
        keep.append(split)

    if params.tensor_buft_overrides:
        overrides = (TensorBuftOverride * (len(params.tensor_buft_overrides) + 1))()
        for entry, (pattern, buffer_type) in zip(overrides, _overrides(params, known), strict=False):
            entry.pattern, entry.buft = pattern, buffer_type
            keep.append(pattern)
        out.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        keep.append(overrides)


def _overrides(params: Params, known: Registry) -> list[tuple[bytes, int]]:
    """Pattern and buffer type of every override."""
    buffer_types = {d.buffer_type: d.buffer_type_address for d in known.devices if d.buffer_type is not None}
    found = []
    for override in params.tensor_buft_overrides:
        if override.buffer_type not in buffer_types:
            raise UsageError(
                f"unknown buffer type '{override.buffer_type}'; there are: {', '.join(buffer_types) or 'none'}"
            )
        found.append((override.pattern.encode("utf-8", "surrogateescape"), buffer_types[override.buffer_type]))
    return found


def _apply_context(params: Params, out: Any) -> None:
    for each in of_a_struct("context"):
        setattr(out, each.field, each.kind.native(str(each.key), params.of_parameter(each)))


def select(names: Sequence[str], known: Registry) -> tuple[Device, ...]:
    """The devices of those names. Raises ``UsageError`` for an unknown one."""
    by_name = {d.info.name: d for d in reversed(known.devices) if d.info.type not in ("cpu", "accel")}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(f"unknown device '{unknown[0]}'; there are: {', '.join(reversed(by_name)) or 'none'}")
    return tuple(by_name[name] for name in names)


def _check_count(params: Params, selected: tuple[Device, ...]) -> None:
    # GGML_SCHED_MAX_BACKENDS: one more, and llama.cpp aborts.
    if len(selected) > MAX_USED_DEVICES and params.split_mode != "none":
        raise UsageError(
            f"llama.cpp runs a model on {MAX_USED_DEVICES} devices at most beside the CPU; name those to use of the "
            f"{len(selected)} with --device"
        )


# --- what a context says


def breakdown_of(context: Any) -> Breakdown:
    """Measure a context, dummy or real: ``llama_cpp``'s pointer to it, such as ``llama._ctx.ctx`` of a ``Llama``.

    Raises ``LlamaCppError`` if llama.cpp does not answer.
    """
    library = native.load()
    pointer = library.pointer(context)
    rows = library.ffi.new("fitter_row_t[]", _MAX_ROWS)
    # Asked once: a recorder notes each size that is asked for.
    count = library.fitter.fitter_breakdown(pointer, rows, _MAX_ROWS)
    if not 0 <= count <= _MAX_ROWS:
        raise LlamaCppError(f"llama.cpp does not say how much memory a context takes: {library.last_error()}")
    llama_cpp = library.llama_cpp
    return Breakdown(
        rows=tuple(
            Row(
                buffer_type=library.text(row.buffer_type) or "",
                device=library.text(row.device),
                is_host=bool(row.is_host),
                model=int(row.model),
                context=int(row.context),
                compute=int(row.compute),
            )
            for row in rows[0:count]
        ),
        devices=_model_devices(library, llama_cpp.llama_get_model(context)),
        n_ctx=int(llama_cpp.llama_n_ctx(context)),
    )


def _model_devices(library: native.Library, model: Any) -> tuple[str, ...]:
    names: list[str] = []
    while name := library.text(library.fitter.fitter_model_device(library.pointer(model), len(names))):
        names.append(name)
    return tuple(names)


def _model_info(library: native.Library, model: Any) -> ModelInfo:
    out = library.ffi.new("fitter_model_info_t *")
    if not library.fitter.fitter_model_info(library.pointer(model), out):
        raise LlamaCppError(f"llama.cpp does not describe the model: {library.last_error()}")
    return ModelInfo(
        n_layer=int(out.n_layer),
        n_layer_nextn=int(out.n_layer_nextn),
        n_ctx_train=int(out.n_ctx_train),
        n_embd=int(out.n_embd),
        n_head=int(out.n_head),
        n_head_kv=int(out.n_head_kv),
        n_swa=int(out.n_swa),
        n_expert=int(out.n_expert),
        n_vocab=int(out.n_vocab),
        n_params=int(out.n_params),
        bytes=int(out.size),
        has_encoder=bool(out.has_encoder),
        is_recurrent=bool(out.is_recurrent),
        is_hybrid=bool(out.is_hybrid),
        devices=_model_devices(library, model),
    )


_RESOLVED = re.compile(r": Flash Attention (enabled|not supported)")
_CHOSEN = re.compile(r": flash_attn\s+= (\w+)")
_SPLITS = re.compile(r": graph.*: nodes = .*, splits = (\d+)(?: / (\d+))?,")


def flash_attn_from(log: Iterable[str]) -> bool | None:
    """Whether a context uses flash attention, by what llama.cpp logged while making it."""
    answer: bool | None = None
    for line in log:
        if chosen := _CHOSEN.search(line):
            answer = {"enabled": True, "disabled": False}.get(chosen[1])
        elif resolved := _RESOLVED.search(line):
            answer = resolved[1] == "enabled"
    return answer


def n_splits_from(log: Iterable[str]) -> tuple[int, int] | None:
    """Graph splits of prompt processing and of generation, by what llama.cpp logged."""
    answer: tuple[int, int] | None = None
    for line in log:
        if found := _SPLITS.search(line):
            answer = (int(found[1]), int(found[2] or found[1]))
    return answer


# --- llama.cpp's log


class LogLine(NamedTuple):
    """A line of llama.cpp's log; ``level`` as ggml counts it (2 information, 3 warning, 4 error)."""

    level: int
    text: str


def captured_log() -> tuple[LogLine, ...]:
    """Lines since the log was cleared, if this process captures it."""
    return log_lines(native.load().fitter.fitter_log_lines)


def log_lines(fill: Callable[[Any], bool]) -> tuple[LogLine, ...]:
    """The lines that ``fill`` writes into a ``fitter_columns_t``, none where it fails."""
    library = native.load()
    out = library.ffi.new("fitter_columns_t *")
    if not fill(out):
        return ()
    (texts,), (levels,) = _columns(library, out, 1, 1)
    return tuple(map(LogLine, levels, texts))


def _columns(
    library: native.Library, out: Any, n_texts: int, n_numbers: int
) -> tuple[list[list[str]], list[list[int]]]:
    """What a ``fitter_columns_t`` holds, by column: so many texts and so many numbers per record."""
    joined = bytes(library.ffi.buffer(out.texts, out.texts_size)).decode("utf-8", "replace")
    texts = joined.split("\0")[:-1]
    numbers = library.ffi.unpack(out.numbers, out.n_numbers) if out.n_numbers else []
    return [texts[i::n_texts] for i in range(n_texts)], [numbers[i::n_numbers] for i in range(n_numbers)]


# Lines that only say that what the line before them named has failed.
_CONSEQUENCES = re.compile(
    r"failed to load model( from .*)?$|failed to read (header|key-value pairs|tensor info|tensor data)$"
)
_PREFIXES = re.compile(r"^(\w+: )?(error loading model: |failed to initialize the context: )?(llama_model_loader: )?")


def reason(lines: Sequence[LogLine]) -> str | None:
    """llama.cpp's own words for what went wrong: its last error that is not just the consequence of another one."""
    errors = [line.text.strip() for line in lines if line.level == _LOG_ERROR and line.text.strip()]
    causes = [text for text in errors if not _CONSEQUENCES.search(text)]
    if not errors:
        return None
    return _PREFIXES.sub("", (causes or errors)[-1], count=1) or errors[-1]


# --- dummy loads


def _with_reserved(rows: Sequence[Row], real: Sequence[Row]) -> tuple[Row, ...]:
    reserved = {(row.buffer_type, row.device): row for row in real}
    known = [replace(row, reserved=reserved.pop((row.buffer_type, row.device)).compute) for row in rows]
    return (*known, *(replace(row, compute=0, reserved=row.compute) for row in reserved.values()))


class Loader:
    """Makes dummy loads (``loads`` of them), and keeps the last model so that another context of it costs none.

    Not thread-safe. ``close`` frees what is kept; do it before virtual devices are described anew. ``is_reordered``
    says that they are no longer in the order in which they were described. The model is a file or the ``Skeleton`` of
    one, which ``headers`` makes.
    """

    def __init__(self, devices: Registry, headers: Headers | None = None) -> None:
        self.devices = devices
        self._headers = headers or Headers()
        self.loads = 0
        self.is_reordered = False
        self._models: dict[str, _Dummy] = {}
        self._held: Ahead | None = None
        self._library = native.load()

    def close(self) -> None:
        """Free the models that are kept."""
        self._drop_held()
        while self._models:
            self._models.popitem()[1].free()

    def keep(self, ahead: Ahead) -> None:
        """Keep what was loaded ahead of its use, as if ``model_info`` had loaded it; one that is held for its use."""
        if ahead.is_held:
            self._drop_held()
            self._held = ahead
            return
        model, params = ahead.take(), Params(devices=(self.devices.default[0].info.name,))
        key = _model_key(ahead.path, params)
        if not model:
            return
        self.loads += 1
        self._models["measure"] = _Dummy(self._library, key, ahead.path, params, model, ahead.pointers)

    def measure(
        self, path: str | Skeleton, params: Params, role: str = "measure", *, reserve: bool = False
    ) -> Breakdown:
        """Load ``path`` with ``params`` without allocating, and say what it would take. Raises ``LlamaCppError``.

        The last model of each ``role`` is kept. With ``reserve``, compute buffers are also reserved as for a real load,
        though without memory (``Row.reserved``): llama.cpp's own figure for them leaves out where a graph's builder
        wants single nodes, and all graphs but the first.
        """
        dummy = self._model(role, path, params, self.devices)
        with dummy.context(params) as context:
            lora = dummy.apply(params.lora, context)
            found = breakdown_of(context)
            log = [line.text for line in captured_log()]
            rows = found.rows
            if reserve and self._library.fitter.fitter_reserve(self._library.pointer(context)):
                rows = _with_reserved(rows, breakdown_of(context).rows)
        return Breakdown(rows, found.devices, found.n_ctx, flash_attn_from(log), n_splits_from(log), lora)

    def model_info(self, path: str | Skeleton, params: Params) -> ModelInfo:
        """Load ``path`` as ``measure`` would and describe the model. Raises ``LlamaCppError``."""
        dummy = self._model("measure", path, params, self.devices)
        return _model_info(self._library, dummy.model)

    def layout(self, path: str | Skeleton, params: Params) -> Layout:
        """Size of every weight and cache tensor, recorded with all layers on one device. Raises ``LlamaCppError``."""
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
            ctx_type=Params.ctx_type,
            n_outputs_max=Params.n_outputs_max,
            lora=(),
        )
        dummy = self._model("layout", path, everything, Registry((recorder,), (recorder,)))
        backend.fitter_virtual_record_clear()
        try:
            backend.fitter_virtual_record(1)
            with dummy.context(everything) as context:
                backend.fitter_virtual_record(2)
                total = breakdown_of(context)
        finally:
            backend.fitter_virtual_record(0)
        layout = Layout(_recorded(self._library, backend), int(backend.fitter_virtual_alignment()), total.n_ctx)
        _check_layout(layout, total)
        return layout

    @property
    def held(self) -> Ahead | None:
        """The load that waits to be told where its tensors go."""
        return self._held

    def _place_held(self, role: str, path: str | Skeleton, params: Params) -> None:
        """Let the load that waits go on: to be what is asked for, where it can be, or else to its end."""
        held = self._held
        if held is None:
            return
        counts = [int(count) for count in params.tensor_split or (1.0,)]
        is_it = (
            role == "measure"
            and path == held.path
            and sorted(params.devices or ()) == sorted(device.info.name for device in self.devices.default)
            and len(counts) == len(self.devices.default)
            and counts == list(params.tensor_split or (1.0,))
            and 0 < len(params.tensor_buft_overrides) <= MAX_HELD_OVERRIDES
            and all(
                params.of_parameter(each) == each.default for each in of_a_struct("model") if each.key not in _PLACED
            )
        )
        if not is_it:
            self._drop_held()
            return
        self._held = None
        self._reorder(held, params.devices or ())
        overrides = _overrides(params, self.devices)
        model = held.place(counts, overrides)
        if not model:
            return
        self.loads += 1
        pointers = [*held.pointers, overrides]
        all_layers = replace(params, n_gpu_layers=-1)
        kept = self._models.pop(role, None)
        if kept is not None:
            kept.free()
        self._models[role] = _Dummy(self._library, _model_key(path, params), held.path, all_layers, model, pointers)

    def _reorder(self, held: Ahead, names: Sequence[str]) -> None:
        """Make the virtual devices be those ``names`` in this order; the load that waits has only counted them."""
        described = [text.partition(",")[0] for text in held.description.split(";")]
        order = [described.index(name) for name in names]
        if order != sorted(order):
            native.open_backend().fitter_virtual_reorder(order, len(order))
            self.devices = registry(virtual=True)
            self.is_reordered = True

    def _drop_held(self) -> None:
        held, self._held = self._held, None
        if held is not None and (model := held.take()):
            self._library.llama_cpp.llama_model_free(model)

    def _model(self, role: str, path: str | Skeleton, params: Params, devices: Registry) -> _Dummy:
        self._place_held(role, path, params)
        key = _model_key(path, params)
        kept = self._models.get(role)
        if kept is not None and kept.key == key and kept.has_layers(params.n_gpu_layers):
            return kept
        if kept is not None:
            del self._models[role]
            kept.free()
        self.loads += 1
        file, name = (path, path) if isinstance(path, str) else (self._headers.skeleton(path), path.files[0])
        model, pointers = _load_dummy(self._library, file, name, params, devices)
        dummy = self._models[role] = _Dummy(self._library, key, name, params, model, pointers)
        return dummy


def _model_key(path: str | Skeleton, params: Params) -> tuple[object, ...]:
    files = (path,) if isinstance(path, str) else path.files
    return (
        isinstance(path, str),
        *((os.path.abspath(file), identity(file)) for file in files),
        # layers on devices are compared as the model has them
        *(params.of_parameter(each) for each in of_a_struct("model") if each.key != "n_gpu_layers"),
    )


def _load_dummy(
    library: native.Library, file: str, name: str, params: Params, devices: Registry
) -> tuple[Any, list[object]]:
    """The model in ``file``, loaded with ``no_alloc``, and what its parameters point to. ``name`` is for errors."""
    llama = library.llama_cpp
    model_params = llama.llama_model_default_params()
    pointers = apply(params, model_params, llama.llama_context_default_params(), devices)
    model_params.no_alloc = True
    model_params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    model = llama.llama_model_load_from_file(os.fsencode(file), model_params)
    if not model:
        raise failure(name, "llama.cpp cannot load the model")
    return model, pointers


class _Dummy:
    """A ``model`` loaded with ``no_alloc``; ``pointers`` are what its parameters point to, ``name`` is for errors."""

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
        self._pointers = pointers
        self._library = library
        self._llama = library.llama_cpp
        self._adapters: Adapters | None = None
        info = _model_info(library, self.model)
        self._all_layers = info.n_layer + info.n_layer_nextn + 1
        self._n_ctx_train = info.n_ctx_train
        self._n_gpu_layers = self._layers(params.n_gpu_layers)

    def has_layers(self, n_gpu_layers: int) -> bool:
        """Whether ``n_gpu_layers`` would have put the same layers on devices."""
        return self._layers(n_gpu_layers) == self._n_gpu_layers

    def _layers(self, n_gpu_layers: int) -> int:
        return min(n_gpu_layers, self._all_layers) if n_gpu_layers >= 0 else self._all_layers

    @contextmanager
    def context(self, params: Params) -> Iterator[Any]:
        context_params = self._llama.llama_context_default_params()
        _apply_context(params, context_params)
        # llama.cpp allocates and clears recurrent states and outputs even where it allocates nothing else
        with untouched(self._cells(params)):
            context = self._llama.llama_init_from_model(self.model, context_params)
        if not context:
            raise failure(self.name, "llama.cpp cannot make a context")
        try:
            yield context
        finally:
            self._llama.llama_free(context)

    def _cells(self, params: Params) -> int:
        """Tokens that each stream of the KV cache has room for."""
        n_ctx = _padded(params.n_ctx or self._n_ctx_train)
        return n_ctx if params.kv_unified else _padded(n_ctx // params.n_seq_max)

    def apply(self, lora: Sequence[Lora], context: Any) -> tuple[tuple[Row, ...], ...]:
        """What the adapters take beside the model; ``context``'s compute is then with them."""
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
    """A context as llama.cpp rounds it."""
    return -(-n_ctx // 256) * 256


class Adapters:
    """LoRA adapters loaded for a model (llama_cpp's pointer). ``rows`` are what each takes, by buffer type.

    Unless ``really``, nothing is allocated for them. Raises ``ModelError`` for one that is not the model's. ``free``
    them before the model.
    """

    def __init__(self, library: native.Library, lora: Sequence[Lora], model: Any, really: bool) -> None:
        self.key = self.key_of(lora)
        self.rows: tuple[tuple[Row, ...], ...] = ()
        self._llama = library.llama_cpp
        self._pointers: list[Any] = []
        try:
            for adapter in lora:
                self._load(adapter.path, model, really)
        except BaseException:
            self.free()
            raise

    @staticmethod
    def key_of(lora: Sequence[Lora]) -> tuple[object, ...]:
        """Equal for the same files, whatever their scale."""
        return tuple((os.path.abspath(adapter.path), identity(adapter.path)) for adapter in lora)

    def apply(self, lora: Sequence[Lora], context: Any) -> None:
        """Have ``context`` compute with the adapters, which are those of ``lora``."""
        n = len(self._pointers)
        pointers = (self._llama.llama_adapter_lora_p_ctypes * n)(*self._pointers)
        scales = (ctypes.c_float * n)(*(adapter.scale for adapter in lora))
        self._llama.llama_set_adapters_lora(context, pointers, n, scales)

    def free(self) -> None:
        """Free the adapters."""
        while self._pointers:
            self._llama.llama_adapter_lora_free(self._pointers.pop())

    def _load(self, path: str, model: Any, really: bool) -> None:
        if read_header(path).metadata.get("general.type") != "adapter":
            raise ModelError(f"{path} is no LoRA adapter; convert one with llama.cpp's convert_lora_to_gguf.py")
        with counted(really) as allocations:
            adapter = self._llama.llama_adapter_lora_init(model, os.fsencode(path))
        if not adapter:
            why = reason(captured_log()) or "llama.cpp cannot load the adapter"
            raise ModelError(f"{path}: {_ADAPTER_PREFIX.sub('', why)}")
        self._pointers.append(adapter)
        self.rows += (allocations.rows,)


_ADAPTER_PREFIX = re.compile(r"^(\w+: )*(failed to apply lora adapter: )?(\w+: )*")


def failure(path: str, what: str) -> LlamaCppError:
    """The error for ``path`` in llama.cpp's own words, ``what`` where it has none."""
    lines = captured_log()
    return LlamaCppError(f"{path}: {reason(lines) or what}", tuple(line.text for line in lines))


def _recorder(library: native.Library, backend: Any) -> Device:
    register_virtual("")
    address = library.address(backend.fitter_virtual_recorder())
    return next(device for device in _devices(library) if device.address == address)


def _recorded(library: native.Library, backend: Any) -> tuple[LayoutEntry, ...]:
    out = library.ffi.new("fitter_columns_t *")
    backend.fitter_virtual_records(out)
    (buffer_types, names), (sizes, weights) = _columns(library, out, 2, 2)
    kinds: list[Literal["model", "context"]] = ["model" if is_weight else "context" for is_weight in weights]
    return tuple(map(LayoutEntry, buffer_types, names, kinds, sizes))


def _check_layout(layout: Layout, total: Breakdown) -> None:
    """A layout that does not add up to llama.cpp's own total is worse than none."""
    for row in total.rows:
        if row.buffer_type != LAYOUT_DEVICE:
            continue
        for kind, expected in (("model", row.model), ("context", row.context)):
            sizes = [e.bytes for e in layout.entries if e.buffer_type == row.buffer_type and e.kind == kind]
            found = sum(-(-size // layout.alignment) * layout.alignment for size in sizes)
            if found != expected:
                raise LlamaCppError(f"recorded {found} bytes of {kind} tensors where llama.cpp counts {expected}")


# --- virtual devices


def register_virtual(description: str) -> None:
    """Make virtual devices (in the format of ``FITTER_DEVICES``) known to this process's ggml.

    An empty description leaves what is described. Nothing may be loaded on virtual devices when they are described
    anew. Raises ``UsageError`` for a description that is not valid, ``LibraryError`` where ggml refuses the backend.
    """
    if not native.register_virtual(description):
        why = reason(captured_log()) or native.load().last_error()
        raise LibraryError(f"ggml refuses the virtual devices: {why}")


def load_cuda_backend(path: str, plugin: bool) -> None:
    """Make the CUDA backend at ``path`` known to this process's ggml, unless libllama has brought it.

    Raises ``LibraryError`` where ggml refuses it, or libllama has brought another one.
    """
    library = native.load()
    if any(device.info.backend == _CUDA for device in _devices(library)):
        # Wheels hold copies under several names.
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            directories = {os.path.dirname(file) for file in re.findall(r"(/.*)$", maps.read(), re.M) if _is_cuda(file)}
        if os.path.dirname(path) not in directories:
            raise LibraryError(
                f"libllama brings a CUDA backend of its own: leave {path} out, or set LLAMA_CPP_LIB_PATH to the "
                "libraries that it belongs to"
            )
        return
    if plugin:
        loaded = library.fitter.fitter_backend_load(os.fsencode(path))
        why = library.last_error()
    else:
        backend = native.open_backend()
        loaded = backend.fitter_virtual_adopt(os.fsencode(path))
        why = library.text(backend.fitter_virtual_error()) or ""
    if not loaded:
        raise LibraryError(f"{path} is of no use to the libllama that is loaded: {reason(captured_log()) or why}")


def _is_cuda(file: str) -> bool:
    return os.path.basename(file).startswith("libggml-cuda.")


# --- headers


class Headers:
    """Reads headers of GGUF files, and makes skeletons of them without reading them again.

    A header that was read is kept, without its tokenizer, until a skeleton is made of it or another model's is read.
    The last skeleton is kept as well. Not thread-safe. ``close`` frees everything.
    """

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[tuple[int, ...], Any]] = {}
        self._made: tuple[tuple[object, ...], int] | None = None
        self._last: tuple[str, tuple[int, ...], Header | None] = ("", (), None)
        self._library = native.load()

    def close(self) -> None:
        """Free what is kept; the file of a skeleton is gone with it."""
        self._forget()
        made, self._made = self._made, None
        if made is not None:
            os.close(made[1])

    def read(self, path: str) -> Header:
        """Read the header of one file. Raises ``ModelError`` if it is malformed, with ggml's own reason."""
        last, last_identity, header = self._last
        if header is not None and (last, last_identity) == (path, identity(path)):
            return header
        self._last = (path, identity(path), None)
        found, gguf = self._read(path)
        self._last = (*self._last[:2], found)
        if not found.metadata.get("split.no"):
            self._forget()
        self._keep(path, gguf)
        return found

    def skeleton(self, skeleton: Skeleton) -> str:
        """Path to load it from, in this process until another is made. Raises ``LlamaCppError`` if it cannot be."""
        if not skeleton.files:
            raise LlamaCppError("a skeleton needs the files of its model")
        key = tuple((os.path.abspath(file), identity(file)) for file in skeleton.files)
        if self._made is None or self._made[0] != key:
            descriptor = self._make(skeleton)
            if self._made is not None:
                os.close(self._made[1])
            self._made = (key, descriptor)
        # Where opening a descriptor's path only duplicates it, the place in the file is shared.
        os.lseek(self._made[1], 0, os.SEEK_SET)
        return f"{_DESCRIPTORS}/{self._made[1]}"

    def _make(self, skeleton: Skeleton) -> int:
        library = self._library
        try:
            parsed = library.ffi.new("void *[]", [self._stripped(file) for file in skeleton.files])
            descriptor = int(library.fitter.fitter_skeleton_write(parsed, len(parsed)))
        except ModelError as error:
            raise LlamaCppError(str(error)) from error
        finally:
            self._forget()
        if descriptor < 0:
            raise LlamaCppError(f"{skeleton.files[0]} has no skeleton: {library.last_error()}")
        return descriptor

    def _stripped(self, path: str) -> Any:
        parsed_identity, gguf = self._parsed.get(os.path.abspath(path), ((), None))
        if gguf is None or parsed_identity != identity(path):
            gguf = self._library.fitter.fitter_skeleton_open(os.fsencode(path))
            if gguf == self._library.ffi.NULL:
                gguf = self._open(path)
            self._keep(path, gguf)
        return gguf

    def _open(self, path: str) -> Any:
        gguf = self._library.fitter.fitter_gguf_open(os.fsencode(path))
        if gguf == self._library.ffi.NULL:
            raise ModelError(f"{path}: {reason(captured_log()) or self._library.last_error()}")
        return gguf

    def _read(self, path: str) -> tuple[Header, Any]:
        gguf = self._open(path)
        try:
            return _read_header(self._library, gguf), gguf
        except BaseException:
            self._library.fitter.fitter_gguf_close(gguf)
            raise

    def _keep(self, path: str, gguf: Any) -> None:
        self._library.fitter.fitter_skeleton_strip(gguf)
        replaced = self._parsed.pop(os.path.abspath(path), None)
        self._parsed[os.path.abspath(path)] = (identity(path), gguf)
        if replaced is not None:
            self._library.fitter.fitter_gguf_close(replaced[1])

    def _forget(self) -> None:
        while self._parsed:
            self._library.fitter.fitter_gguf_close(self._parsed.popitem()[1][1])


def read_header(path: str) -> Header:
    """Header of a file that is loaded beside a model. Raises ``ModelError`` where it is no whole GGUF file."""
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    headers = Headers()
    try:
        header = headers.read(path)
    finally:
        headers.close()
    if missing := max(0, header.file_bytes - size):
        raise ModelError(f"{path} is truncated: the last {missing} bytes of its tensors are missing; download it again")
    return header


def _read_header(library: native.Library, gguf: Any) -> Header:
    info = library.ffi.new("fitter_gguf_info_t *")
    if not library.fitter.fitter_gguf_info(gguf, info):
        raise ModelError(f"ggml cannot read the header: {library.last_error()}")
    metadata: dict[str, MetadataValue] = {}
    entry = library.ffi.new("fitter_gguf_kv_t *")
    for i in range(info.n_kv):
        library.fitter.fitter_gguf_kv(gguf, i, entry)
        key = library.text(entry.key) or ""
        kind = entry.kind.decode()
        if kind == "a":
            metadata[key] = _read_array(library, gguf, i, entry)
        elif kind == "s":
            metadata[key] = library.text(entry.s) or ""
        else:
            metadata[key] = _number(kind, entry)
    return Header(metadata, _read_tensors(library, gguf), int(info.data_offset), int(info.version), int(info.alignment))


def _read_tensors(library: native.Library, gguf: Any) -> tuple[TensorInfo, ...]:
    out = library.ffi.new("fitter_columns_t *")
    if not library.fitter.fitter_gguf_tensors(gguf, out):
        raise ModelError(f"ggml cannot read the header: {library.last_error()}")
    (names, types), (*dimensions, sizes) = _columns(library, out, 2, 5)
    shapes = map(_without_ones, zip(*dimensions, strict=True))
    return tuple(map(TensorInfo, names, types, shapes, sizes))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` without the dimensions at its end that are 1; the first one stays."""
    n = len(shape)
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return shape[:n]


def _read_array(library: native.Library, gguf: Any, index: int, entry: Any) -> Array:
    type_name = library.text(entry.array_type) or ""
    length = int(entry.array_length)
    kind = entry.array_kind.decode().rstrip("\0")
    values: list[int | float | bool] = []
    if kind and length <= MAX_ARRAY_VALUES:
        out = library.ffi.new("fitter_gguf_kv_t *")
        for i in range(length):
            library.fitter.fitter_gguf_element(gguf, index, i, out)
            values.append(_number(kind, out))
    return Array(type_name, length, tuple(values))


def _number(kind: str, entry: Any) -> int | float | bool:
    if kind == "b":
        return bool(entry.i)
    if kind == "f":
        return float(entry.f)
    return int(entry.u if kind == "u" else entry.i)


# --- patterns


def match(patterns: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """For each name the index of the first pattern that matches a part of it, -1 without one, as llama.cpp decides.

    Raises ``UsageError`` for a pattern that is no regular expression.
    """
    library = native.load()
    compiled: list[Any] = []
    try:
        for pattern in patterns:
            regex = library.fitter.fitter_regex_new(pattern.encode("utf-8", "surrogateescape"))
            if regex == library.ffi.NULL:
                raise UsageError(f"pattern '{pattern}' is no regular expression: {library.last_error()}")
            compiled.append(regex)
        return tuple(_first_match(library, compiled, name) for name in names)
    finally:
        for regex in compiled:
            library.fitter.fitter_regex_free(regex)


def _first_match(library: native.Library, compiled: Sequence[Any], name: str) -> int:
    text = name.encode("utf-8", "surrogateescape")
    for i, regex in enumerate(compiled):
        found = library.fitter.fitter_regex_search(regex, text)
        if found < 0:
            raise UsageError(f"a pattern cannot be matched with '{name}': {library.last_error()}")
        if found:
            return i
    return -1
