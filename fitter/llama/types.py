"""The data that goes to llama.cpp and comes back: frozen dataclasses, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

# Imported here so that all types can be imported from this module.
from fitter.llama.virtual import MAX_DEVICES as MAX_DEVICES
from fitter.llama.virtual import SharedMemory as SharedMemory
from fitter.llama.virtual import VirtualDevice as VirtualDevice
from fitter.llama.virtual import describe as describe
from fitter.parameters.table import DEFAULTS, Parameter, of_a_load
from fitter.parameters.table import FlashAttn as FlashAttn
from fitter.parameters.table import SplitMode as SplitMode
from fitter.parameters.values import Lora as Lora
from fitter.parameters.values import TensorBuftOverride as TensorBuftOverride

ContextType = Literal["default", "mtp"]

RPC = "RPC"
"""The backend of remote devices, those of rpc-servers; they are named ``RPC0``, ``RPC1`` and so on."""

MAX_USED_DEVICES = 15
"""The most devices for one model: ggml's scheduler has room for 16 backends, and one of them is the CPU's."""


@dataclass(frozen=True)
class Params:
    """The parameters of one load, named as in llama.cpp; the table of parameters says what each means.

    The defaults are those of llama.cpp's own tools (``common_params``), not of the library. ``devices`` is ``None`` for
    llama.cpp's default choice, and ``()`` for no device; ``tensor_split`` is ``None`` for a split by free memory.
    """

    n_ctx: int = DEFAULTS["n_ctx"]
    n_gpu_layers: int = DEFAULTS["n_gpu_layers"]
    tensor_split: tuple[float, ...] | None = DEFAULTS["tensor_split"]
    tensor_buft_overrides: tuple[TensorBuftOverride, ...] = DEFAULTS["override_tensor"]
    n_batch: int = DEFAULTS["n_batch"]
    n_ubatch: int = DEFAULTS["n_ubatch"]
    n_seq_max: int = DEFAULTS["n_seq_max"]
    kv_unified: bool = DEFAULTS["kv_unified"]
    type_k: str = DEFAULTS["type_k"]
    type_v: str = DEFAULTS["type_v"]
    flash_attn: FlashAttn = DEFAULTS["flash_attn"]
    offload_kqv: bool = DEFAULTS["offload_kqv"]
    op_offload: bool = DEFAULTS["op_offload"]
    swa_full: bool = DEFAULTS["swa_full"]
    embeddings: bool = DEFAULTS["embedding"]
    split_mode: SplitMode = DEFAULTS["split_mode"]
    main_gpu: int = DEFAULTS["main_gpu"]
    devices: tuple[str, ...] | None = DEFAULTS["devices"]
    load_mtp: bool = DEFAULTS["load_mtp"]
    ctx_type: ContextType = DEFAULTS["ctx_type"]
    n_rs_seq: int = DEFAULTS["n_rs_seq"]
    n_outputs_max: int = DEFAULTS["n_outputs_max"]
    lora: tuple[Lora, ...] = DEFAULTS["lora"]
    more: tuple[tuple[str, bool | int | float | str], ...] = ()
    """Names and values of all other parameters of the table that do not have their default, in its order."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Params:
        """``Params`` with these ``values`` by name; every other parameter has its default."""
        own = {field.name for field in fields(cls)}
        more = [
            (name, values[name])
            for name, each in of_a_load().items()
            if name in values and name not in own and values[name] != each.default
        ]
        return cls(**{name: value for name, value in values.items() if name in own}, more=tuple(more))

    def of_parameter(self, parameter: Parameter) -> Any:
        """The value of one parameter of the table."""
        name = str(parameter.key)
        return getattr(self, name) if hasattr(self, name) else dict(self.more).get(name, parameter.default)

    def having(self, values: Mapping[str, Any]) -> Params:
        """These with some other values, by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "more"}
        return Params.of({**own, **dict(self.more), **values})

    def planned(self) -> dict[str, Any]:
        """The values of all parameters in a plan, by name: in the order of the fields here, then ``more``."""
        known = {name: each for name, each in of_a_load().items() if each.is_planned}
        order = [field.name for field in fields(self) if field.name in known]
        return {name: self.of_parameter(known[name]) for name in dict.fromkeys((*order, *known))}


@dataclass(frozen=True)
class Skeleton:
    """A private copy of a model's header without its tokenizer, to be loaded in place of the model.

    ``files``: the files of the model, in order. llama.cpp measures the copy as it would the model, but faster, since it
    need not read the tokens. The worker makes it when it is first needed, and no other process can see it.
    """

    files: tuple[str, ...]


@dataclass(frozen=True)
class DeviceInfo:
    """A device as ggml reports it."""

    name: str
    """Its name in llama.cpp, such as ``CUDA0``."""
    description: str
    """What the driver calls it."""
    type: str
    """``gpu``, ``igpu``, ``accel`` or ``cpu``."""
    backend: str
    """The backend that it belongs to, such as ``CUDA``."""
    total: int
    """Its memory in bytes."""
    free: int
    """What is free of it, in bytes."""
    virtual: bool = False
    """Whether it is a described one."""
    buffer_type: str | None = None
    """The name of its default buffer type, if it has one."""
    largest_tensor: int | None = None
    """The most bytes of a tensor that it can compute with, if it has such a limit."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """The measured speed of a device; 0 for what could not be measured.

    ``round_trip``: latency in seconds. ``link``: bytes per second to it. ``bandwidth``: bytes per second of weights
    that are read to multiply with one vector. ``compute``: FLOP per second to multiply with a batch.
    """

    round_trip: float
    link: float
    bandwidth: float
    compute: float


@dataclass(frozen=True)
class LlamaCpp:
    """A build of llama.cpp, as what was planned with it says it."""

    version: str
    """Its version and commit, and the version of ggml: ``0.5.0 (ggml 0.25.3, commit 0c1e57098)``."""
    ggml: str
    """The version of ggml."""
    commit: str
    """Its commit, as the build itself says it; empty where it says none."""
    libllama: str
    """The path of its libllama, on the machine that planned."""
    key: str
    """The same for the same files, wherever they are, and another for any other build."""
    cpu: str
    """The name of the file of the CPU backend that was loaded; empty where libllama is linked to its own."""


@dataclass(frozen=True)
class Row:
    """The memory of one buffer type, in bytes."""

    buffer_type: str
    """Its name in llama.cpp, such as ``CUDA0`` or ``CPU_REPACK``."""
    device: str | None
    """The device that it belongs to; ``None`` for none."""
    is_host: bool
    """Whether it is host memory, as every buffer type is that belongs to none of the model's devices; that includes
    ``CPU_REPACK``, which upstream's total leaves out.
    """
    model: int
    """Bytes of weights."""
    context: int
    """Bytes of KV cache and recurrent state."""
    compute: int
    """Bytes of compute buffers, by llama.cpp's own figure for the load that was measured. That of a dummy load, which
    llama-fit-params prints too, is of the graph for the largest batch alone, and ignores to which device single nodes
    were assigned.
    """
    reserved: int | None = field(default=None, compare=False)
    """Bytes of compute buffers that llama.cpp reserves for all graphs when it loads the model for real, more or less
    than ``compute``; ``None`` if that was not measured, or if the load was a real one.
    """

    @property
    def used(self) -> int:
        """Bytes of all three kinds."""
        return self.model + self.context + self.compute

    @property
    def real(self) -> Row:
        """The row for a real load: with ``reserved`` as its ``compute``, if that is known."""
        return self if self.reserved is None else replace(self, compute=self.reserved, reserved=None)


@dataclass(frozen=True)
class Breakdown:
    """The measurement of one load: a row per buffer type, and what llama.cpp chose."""

    rows: tuple[Row, ...]
    """The memory of each buffer type, without LoRA adapters except in the compute buffers."""
    devices: tuple[str, ...]
    """The names of the model's devices, in order."""
    n_ctx: int
    """The context in tokens."""
    flash_attn: bool | None = None
    """Whether flash attention is on once ``auto`` is resolved; ``None`` if llama.cpp did not report it."""
    n_splits: tuple[int, int] | None = None
    """Graph splits of prompt processing and of generation, if llama.cpp reported them."""
    lora: tuple[tuple[Row, ...], ...] = ()
    """For each LoRA adapter its rows, as model bytes, without a device if on the host."""

    def on(self, device: str) -> Row:
        """The sum of all rows of ``device`` (without host rows), as one row."""
        rows = [row for row in self.rows if row.device == device and not row.is_host]
        return _sum(device, device, False, rows)

    @property
    def real(self) -> Breakdown:
        """The breakdown of a real load: every row's ``real``, which are the figures that a load prints."""
        return replace(self, rows=tuple(row.real for row in self.rows))

    @property
    def most(self) -> Breakdown:
        """The breakdown with the larger of both compute figures in every row."""
        return replace(self, rows=tuple(max(row, row.real, key=lambda each: each.compute) for row in self.rows))

    @property
    def host(self) -> Row:
        """The sum of all rows in host memory, of every host buffer type."""
        return _sum("Host", None, True, [row for row in self.rows if row.is_host])


def _sum(name: str, device: str | None, is_host: bool, rows: list[Row]) -> Row:
    return Row(
        name,
        device,
        is_host,
        sum(row.model for row in rows),
        sum(row.context for row in rows),
        sum(row.compute for row in rows),
    )


@dataclass(frozen=True)
class Loaded:
    """A model that is loaded for real: its memory by llama.cpp's count, and the devices with their free memory."""

    breakdown: Breakdown
    devices: tuple[DeviceInfo, ...]


LAYOUT_DEVICE = "Recorder"
"""The buffer type of those entries of a ``Layout`` that are on its device; all others stayed on the host."""


@dataclass(frozen=True)
class ModelInfo:
    """What llama.cpp reports about a loaded model.

    ``n_layer``: repeating layers, without the ``n_layer_nextn`` for multi-token prediction. ``n_swa``: the window of
    sliding-window attention, 0 without. ``bytes``, ``n_params``: of all tensors. ``devices``: the names of the devices
    that it was loaded for.
    """

    n_layer: int
    n_layer_nextn: int
    n_ctx_train: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_swa: int
    n_expert: int
    n_vocab: int
    n_params: int
    bytes: int
    has_encoder: bool
    is_recurrent: bool
    is_hybrid: bool
    devices: tuple[str, ...]


class LayoutEntry(NamedTuple):
    """The bytes of one tensor in ``buffer_type``; ``kind`` is ``model`` (weights) or ``context`` (caches)."""

    buffer_type: str
    name: str
    kind: Literal["model", "context"]
    bytes: int


@dataclass(frozen=True)
class Layout:
    """Every weight and cache tensor, with the size that llama.cpp requested for it.

    Recorded in a dummy load with all layers on one virtual device; ``alignment`` is that device's. What is on the host
    has an entry only where it is in memory that the device can read. ``unused``: tensors that llama.cpp does not load.
    """

    entries: tuple[LayoutEntry, ...]
    alignment: int
    n_ctx: int
    unused: tuple[str, ...] = ()

    @property
    def on_device(self) -> frozenset[str]:
        """The names of all that is on the device."""
        return frozenset(entry.name for entry in self.entries if entry.buffer_type == LAYOUT_DEVICE)


class CacheTensor(NamedTuple):
    """A tensor of a cache: ``planes`` times ``rows`` rows of ``row_bytes`` bytes each."""

    name: str
    row_bytes: int
    rows: int
    planes: int


CacheKind = Literal["kv", "swa", "recurrent", "compressed", "compressor"]


@dataclass(frozen=True)
class Cache:
    """One of the caches that a context consists of, as llama.cpp made it.

    ``kind``: ``kv`` keeps what it has of every token, ``swa`` what sliding-window attention still sees, ``recurrent`` a
    state for each sequence; ``compressed`` and ``compressor`` are DeepSeek-V4's, which keep a row of ``ratio`` tokens,
    and the state that such a row is made of. ``cells``: tokens that it has room for in each of ``n_stream`` streams, or
    sequences. ``n_layer``: as llama.cpp counts the layers. ``cell_bytes``: what it writes of a cell beside its rows.
    A cache may have no tensors.
    """

    kind: CacheKind
    cells: int
    n_stream: int
    n_layer: int
    tensors: tuple[CacheTensor, ...] = ()
    ratio: int = 1
    cell_bytes: int = 0


@dataclass(frozen=True)
class Caches:
    """The caches of a context, and what decides how much of them a sequence has.

    ``n_swa``: the window of sliding-window attention in tokens, 0 without. ``is_chunked``: it begins anew after so many
    tokens, in place of sliding. ``leaves_out_masked``: a state has only the cells of the window, and not all that are
    still in the cache. ``n_seq_max``: sequences. ``n_rs_seq``: tokens that a recurrent state can be taken back by.
    ``empty`` and ``empty_partial``: bytes of the state of a sequence without tokens as this build writes it, and of its
    part that cannot be rolled back.
    """

    caches: tuple[Cache, ...]
    n_swa: int
    is_chunked: bool
    leaves_out_masked: bool
    n_seq_max: int
    n_rs_seq: int
    empty: int
    empty_partial: int


class TensorInfo(NamedTuple):
    """A tensor of a GGUF file. ``shape`` has ggml's order (ne[0] first); ``bytes`` as stored in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    split: int = 0


@dataclass(frozen=True)
class Header:
    """The metadata and tensors of one GGUF file. Arrays in ``metadata`` are ``Array``, long ones without values."""

    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    version: int
    alignment: int

    @property
    def file_bytes(self) -> int:
        """Where the last tensor ends, 0 without tensors; a shorter file is truncated."""
        if not self.tensors:
            return 0
        padded = sum(-(-tensor.bytes // self.alignment) * self.alignment for tensor in self.tensors[:-1])
        return self.data_offset + padded + self.tensors[-1].bytes


@dataclass(frozen=True)
class FileType:
    """What a file of one of llama-quantize's types has.

    ``types`` and ``sizes`` (bytes) are those of its tensors, in order. ``problem``: why the model cannot be quantized
    so, in llama.cpp's words; empty where it can.
    """

    name: str
    types: tuple[str, ...]
    sizes: tuple[int, ...]
    problem: str


@dataclass(frozen=True)
class FileTypes:
    """Every file type of a model. ``tensors``: their names, in the order of such a file.

    ``header_bytes``: where the first tensor begins in a file that llama-quantize writes.
    """

    tensors: tuple[str, ...]
    header_bytes: int
    found: tuple[FileType, ...]


@dataclass(frozen=True)
class Array:
    """A metadata array."""

    type: str
    """The type of its elements, as GGUF calls it."""
    length: int
    """How many there are."""
    values: tuple[int | float | bool, ...] = field(default=())
    """The elements; empty for strings, and for more than 4096 numbers or booleans."""


MetadataValue = int | float | bool | str | Array
"""A value of a header. Of all its texts together the first MiB is here."""
