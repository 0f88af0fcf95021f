"""The data that goes to llama.cpp and comes back, as frozen dataclasses. Bytes.

The file is long because it is one list, of which every room above takes some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from fitter.errors import UsageError
from fitter.parameters.table import DEFAULTS, Parameter, of_a_load

# Imported here so that all types can be imported from this module.
from fitter.parameters.table import FlashAttn as FlashAttn
from fitter.parameters.table import SplitMode as SplitMode
from fitter.parameters.values import Lora as Lora
from fitter.parameters.values import TensorBuftOverride as TensorBuftOverride

ContextType = Literal["default", "mtp"]

RPC = "RPC"
"""The backend of remote devices (of rpc-servers), which are named ``RPC0``, ``RPC1`` and so on."""

MAX_USED_DEVICES = 15
"""Most devices of one model: ggml's scheduler has room for 16 backends, and the CPU is one of them."""


@dataclass(frozen=True)
class Params:
    """Parameters of one load, named as in llama.cpp; the table of parameters explains each.

    Defaults are those of llama.cpp's own tools (``common_params``), not of its library. ``devices`` is ``None`` for
    llama.cpp's default choice and ``()`` for no device; ``tensor_split`` is ``None`` for a split by free memory.
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
    moe_cache_size: int = DEFAULTS["moe_cache_size"]
    devices: tuple[str, ...] | None = DEFAULTS["devices"]
    load_mtp: bool = DEFAULTS["load_mtp"]
    ctx_type: ContextType = DEFAULTS["ctx_type"]
    n_rs_seq: int = DEFAULTS["n_rs_seq"]
    n_outputs_max: int = DEFAULTS["n_outputs_max"]
    lora: tuple[Lora, ...] = DEFAULTS["lora"]
    more: tuple[tuple[str, bool | int | float | str], ...] = ()
    """Names and values of all other parameters of the table without their default, in its order."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Params:
        """Build ``Params`` from values by name; other parameters have their defaults."""
        names = {field.name for field in fields(cls)}
        more = [
            (name, values[name])
            for name, each in of_a_load().items()
            if name in values and name not in names and values[name] != each.default
        ]
        return cls(**{name: value for name, value in values.items() if name in names}, more=tuple(more))

    def of_parameter(self, parameter: Parameter) -> Any:
        """Return the value of one parameter of the table."""
        name = str(parameter.key)
        return getattr(self, name) if hasattr(self, name) else dict(self.more).get(name, parameter.default)

    def having(self, values: Mapping[str, Any]) -> Params:
        """Return the parameters with other values, by name."""
        current = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "more"}
        return Params.of({**current, **dict(self.more), **values})

    def planned(self) -> dict[str, Any]:
        """Return the values of all parameters of a plan, by name: first the fields, then ``more``."""
        parameters = {name: each for name, each in of_a_load().items() if each.is_planned}
        order = [field.name for field in fields(self) if field.name in parameters]
        return {name: self.of_parameter(parameters[name]) for name in dict.fromkeys((*order, *parameters))}


@dataclass(frozen=True)
class Skeleton:
    """A private copy of a model's header without its tokenizer, to load in place of the model.

    llama.cpp measures the copy like the model, but faster, because it reads no tokens. The worker makes it on use, and
    no other process sees it.

    Attributes:
        files: The model's files, in order.
    """

    files: tuple[str, ...]


@dataclass(frozen=True)
class DeviceInfo:
    """A device as ggml reports it."""

    name: str
    """Its name in llama.cpp, such as ``CUDA0``."""
    description: str
    """The driver's name for it."""
    type: str
    """``gpu``, ``igpu``, ``accel`` or ``cpu``."""
    backend: str
    """Its backend, such as ``CUDA``."""
    total: int
    """Its memory in bytes."""
    free: int
    """Free bytes."""
    virtual: bool = False
    """Whether it is a virtual device."""
    buffer_type: str | None = None
    """The name of its default buffer type, if it has one."""
    largest_tensor: int | None = None
    """Most bytes of one tensor that it can compute with; ``None`` if it names no limit."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """The measured speed of a device; 0 for a figure that could not be measured.

    Attributes:
        round_trip: Latency in seconds.
        link: Bytes per second to the device.
        bandwidth: Bytes per second of weights, multiplied with one vector.
        compute: FLOP per second, multiplying with a batch.
    """

    round_trip: float
    link: float
    bandwidth: float
    compute: float


@dataclass(frozen=True)
class LlamaCpp:
    """A build of llama.cpp."""

    version: str
    """Version and commit, and the version of ggml: ``0.5.0 (ggml 0.25.3, commit 0c1e57098)``."""
    ggml: str
    """The version of ggml."""
    commit: str
    """Its commit, as the build says it; empty if it says none."""
    libllama: str
    """Path of its libllama on the machine of the plan."""
    key: str
    """A key that is equal for equal files, wherever they are."""
    cpu: str
    """File name of the loaded CPU backend; empty if libllama is linked to its own."""


@dataclass(frozen=True)
class Row:
    """The memory of one buffer type, in bytes."""

    buffer_type: str
    """Its name in llama.cpp, such as ``CUDA0`` or ``CPU_REPACK``."""
    device: str | None
    """Its device; ``None`` for none."""
    is_host: bool
    """Whether it is host memory, like every buffer type outside the model's devices; also ``CPU_REPACK``, which
    upstream's total leaves out.
    """
    model: int
    """Bytes of weights."""
    context: int
    """Bytes of KV cache and recurrent state."""
    compute: int
    """Bytes of compute buffers, by llama.cpp's own figure. The figure of a dummy load (llama-fit-params prints it too)
    is for the graph of the largest batch alone, and ignores the devices of single nodes.
    """
    reserved: int | None = field(default=None, compare=False)
    """Bytes of compute buffers that a real load of llama.cpp reserves for all graphs, more or less than ``compute``;
    ``None`` if not measured, or for a real load.
    """

    @property
    def used(self) -> int:
        """Bytes of all three kinds."""
        return self.model + self.context + self.compute

    @property
    def real(self) -> Row:
        """The row of a real load: ``reserved`` as ``compute``, if known."""
        return self if self.reserved is None else replace(self, compute=self.reserved, reserved=None)


@dataclass(frozen=True)
class Breakdown:
    """The measurement of one load: a row per buffer type, and llama.cpp's choices."""

    rows: tuple[Row, ...]
    """Memory of each buffer type; LoRA adapters are only in the compute buffers."""
    devices: tuple[str, ...]
    """Names of the model's devices, in order."""
    n_ctx: int
    """The context in tokens."""
    flash_attn: bool | None = None
    """Whether flash attention is on, with ``auto`` resolved; ``None`` if llama.cpp did not report it."""
    n_splits: tuple[int, int] | None = None
    """Graph splits of prompts and of generation, if llama.cpp reported them."""
    lora: tuple[tuple[Row, ...], ...] = ()
    """Rows of each LoRA adapter, as model bytes; without a device on the host."""

    def on(self, device: str) -> Row:
        """Add up all rows of ``device`` (without host rows) to one row."""
        rows = [row for row in self.rows if row.device == device and not row.is_host]
        return _sum(device, device, False, rows)

    @property
    def real(self) -> Breakdown:
        """The breakdown of a real load: every row's ``real``."""
        return replace(self, rows=tuple(row.real for row in self.rows))

    @property
    def most(self) -> Breakdown:
        """The breakdown with the larger compute figure of every row."""
        return replace(self, rows=tuple(max(row, row.real, key=lambda each: each.compute) for row in self.rows))

    @property
    def host(self) -> Row:
        """All rows of host memory, added up to one."""
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
"""Buffer type of the entries of a ``Layout`` on its device; all others are on the host."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts that llama.cpp reports about a loaded model.

    Attributes:
        n_layer: Repeating layers, without the ``n_layer_nextn`` for multi-token prediction.
        n_swa: Window of sliding-window attention; 0 without.
        n_params: Weights of all tensors.
        bytes: Bytes of all tensors.
        devices: Names of the devices that it was loaded for.
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
    """Bytes of one tensor in ``buffer_type``; ``kind`` is ``model`` (weights) or ``context`` (caches)."""

    buffer_type: str
    name: str
    kind: Literal["model", "context"]
    bytes: int


@dataclass(frozen=True)
class Layout:
    """Every weight and cache tensor, with the size that llama.cpp requested for it.

    Recorded in a dummy load with all layers on one virtual device.

    Attributes:
        entries: The tensors; those on the host only if the device can read their memory.
        alignment: The device's alignment.
        n_ctx: The context.
        unused: Tensors that llama.cpp does not load.
    """

    entries: tuple[LayoutEntry, ...]
    alignment: int
    n_ctx: int
    unused: tuple[str, ...] = ()

    def __hash__(self) -> int:
        # thousands of entries take longer to hash than to compare
        return hash((len(self.entries), self.n_ctx))

    @property
    def on_device(self) -> frozenset[str]:
        """Names of all tensors on the device."""
        return frozenset([entry.name for entry in self.entries if entry.buffer_type == LAYOUT_DEVICE])


class CacheTensor(NamedTuple):
    """A tensor of a cache: ``planes`` times ``rows`` rows of ``row_bytes`` bytes each."""

    name: str
    row_bytes: int
    rows: int
    planes: int


CacheKind = Literal["kv", "swa", "recurrent", "compressed", "compressor"]


@dataclass(frozen=True)
class Cache:
    """One of the caches of a context.

    Attributes:
        kind: ``kv`` holds every token, ``swa`` the tokens that sliding-window attention still sees, ``recurrent`` a
            state for each sequence. DeepSeek-V4's ``compressed`` holds a row for each ``ratio`` tokens, ``compressor``
            the state that makes such a row.
        cells: Tokens (or sequences) in each stream.
        n_stream: Number of streams.
        n_layer: Number of layers, by llama.cpp's count.
        tensors: Its tensors, if any.
        ratio: Tokens of a compressed row.
        cell_bytes: Bytes that llama.cpp writes of a cell beside its rows.
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
    """The caches of a context, and the facts that decide a sequence's part of them.

    Attributes:
        caches: The caches.
        n_swa: Window of sliding-window attention in tokens; 0 without.
        is_chunked: Whether the window starts anew after so many tokens instead of sliding.
        leaves_out_masked: Whether a state has only the window's cells, not all cells that are still in the cache.
        n_seq_max: Number of sequences.
        n_rs_seq: Tokens by which a recurrent state can be rolled back.
        empty: Bytes of an empty sequence's state, as this build writes it.
        empty_partial: The same for the part that cannot be rolled back.
        has_rotations: Whether a cache with cells says how its rows were rotated.
    """

    caches: tuple[Cache, ...]
    n_swa: int
    is_chunked: bool
    leaves_out_masked: bool
    n_seq_max: int
    n_rs_seq: int
    empty: int
    empty_partial: int
    has_rotations: bool = False


class TensorInfo(NamedTuple):
    """A tensor of a GGUF file. ``shape`` is in ggml's order (ne[0] first); ``bytes`` as stored in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    split: int = 0


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of one GGUF file. Arrays of metadata are ``Array``, without values if they are long."""

    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    version: int
    alignment: int

    @property
    def file_bytes(self) -> int:
        """End of the last tensor, 0 without tensors; a shorter file is truncated."""
        if not self.tensors:
            return 0
        padded = sum(-(-tensor.bytes // self.alignment) * self.alignment for tensor in self.tensors[:-1])
        return self.data_offset + padded + self.tensors[-1].bytes


@dataclass(frozen=True)
class FileType:
    """The tensors of a file in one of llama-quantize's types.

    Attributes:
        name: The file type.
        types: Type of each tensor, in order.
        sizes: Bytes of each tensor, in order.
        problem: llama.cpp's reason why the model cannot be quantized so; empty if it can.
    """

    name: str
    types: tuple[str, ...]
    sizes: tuple[int, ...]
    problem: str


@dataclass(frozen=True)
class FileTypes:
    """Every file type of a model.

    Attributes:
        tensors: Names of the tensors, in the order of such a file.
        header_bytes: Offset of the first tensor in a file of llama-quantize.
        found: The file types.
    """

    tensors: tuple[str, ...]
    header_bytes: int
    found: tuple[FileType, ...]


@dataclass(frozen=True)
class Array:
    """A metadata array."""

    type: str
    """GGUF's type of its elements."""
    length: int
    """Number of elements."""
    values: tuple[int | float | bool, ...] = field(default=())
    """The elements; empty for strings, and for more than 4096 numbers or booleans."""


MetadataValue = int | float | bool | str | Array
"""A value of a header. Only the first MiB of all texts together is kept."""


MAX_DEVICES = 16
"""``llama_max_devices()`` of the pinned llama.cpp."""


@dataclass(frozen=True)
class SharedMemory:
    """Memory of a machine that a device shares with the host. Bytes."""

    total: int
    """All of it."""
    free: int
    """Free memory for device and host together."""
    carved: int = 0
    """The part reserved for the device, included in ``total`` and ``free``."""
    system: str = "cuda"
    """The system that limits the device's part: ``metal``, ``cuda``, ``amdgpu`` or ``anv``."""


@dataclass(frozen=True)
class VirtualDevice:
    """A described device; llama.cpp can plan on it as on the real one."""

    name: str
    """Its name in llama.cpp, such as ``CUDA0``."""
    description: str
    """A driver's name for it."""
    profile: str
    """Its behaviour: ``cuda``, ``rocm``, ``metal``, ``vulkan``, or ``vulkan-`` and a driver."""
    compute_capability: int
    """As in ggml-cuda: major*100 + minor*10 (890 for 8.9); 0x1000000 plus an AMD card's architecture (0x1100 for
    gfx1100); 0 if there is none.
    """
    total: int
    """Its memory in bytes."""
    free: int
    """Free bytes."""
    shared: SharedMemory | None = None
    """Memory that it shares with the host; ``None`` if it has its own."""

    @property
    def type(self) -> str:
        """ggml's type of the device: ``gpu``, or ``igpu`` for one that is used only if there is no other."""
        return "gpu" if self.shared is None or self.shared.system == "metal" else "igpu"


def describe(devices: Sequence[VirtualDevice]) -> str:
    """Write ``FITTER_DEVICES`` for these devices. Raises ``UsageError`` for more than 16 of them."""
    if len(devices) > MAX_DEVICES:
        raise UsageError(f"{len(devices)} devices are described, but llama.cpp supports at most {MAX_DEVICES}")
    return ";".join(
        f"{device.name},{device.profile},{device.compute_capability},{device.total},{device.free},"
        + " ".join(device.description.replace(";", " ").split())
        for device in devices
    )
