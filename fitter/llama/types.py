"""What goes to llama.cpp and what comes back: plain frozen data, sizes in bytes throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

# Known by this module's name, like all that is here.
from fitter.llama.virtual import MAX_DEVICES as MAX_DEVICES
from fitter.llama.virtual import VirtualDevice as VirtualDevice
from fitter.llama.virtual import describe as describe
from fitter.parameters import DEFAULTS, Parameter, of_a_load
from fitter.parameters import FlashAttn as FlashAttn
from fitter.parameters import SplitMode as SplitMode
from fitter.values import Lora as Lora
from fitter.values import TensorBuftOverride as TensorBuftOverride

ContextType = Literal["default", "mtp"]

RPC = "RPC"
"""The backend of remote devices, those of rpc-servers; they are named ``RPC0``, ``RPC1`` and so on."""

MAX_USED_DEVICES = 15
"""Devices that one model can be on: ggml's scheduler has room for 16 backends, and the CPU's is one of them."""


@dataclass(frozen=True)
class Params:
    """Parameters of one load, named as in llama.cpp.

    ``n_ctx`` 0 is the model's training context. ``n_gpu_layers`` counts the output layer; -1 is all.
    ``tensor_split`` has a proportion per device (``None``: by free memory). ``devices`` are device names in
    llama.cpp's order; ``None`` is llama.cpp's default choice, ``()`` is no device at all. ``lora`` are adapters that
    are loaded after the context and applied to it.
    ``load_mtp`` loads the layers for multi-token prediction, and a context of ``ctx_type`` ``mtp`` runs on them alone.
    ``n_rs_seq`` counts the snapshots of a recurrent state that drafted tokens can be taken back to, ``n_outputs_max``
    the tokens of a batch that have an output (0: all).
    The defaults are those of llama.cpp's own tools (``common_params``), not of the library.
    ``more`` has the parameters of the table that have no field here, by their names and in the order of the table:
    those of them that are not what they are by default.
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

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Params:
        """The parameters with these ``values`` by their names; every other one has its default."""
        own = {field.name for field in fields(cls)}
        more = [
            (name, values[name])
            for name, each in of_a_load().items()
            if name in values and name not in own and values[name] != each.default
        ]
        return cls(**{name: value for name, value in values.items() if name in own}, more=tuple(more))

    def of_parameter(self, parameter: Parameter) -> Any:
        """The value of a parameter of the table."""
        name = str(parameter.key)
        return getattr(self, name) if hasattr(self, name) else dict(self.more).get(name, parameter.default)

    def planned(self) -> dict[str, Any]:
        """The values of all that a plan has, by their names: in the order in which they stand here, then ``more``."""
        known = {name: each for name, each in of_a_load().items() if each.is_planned}
        order = [field.name for field in fields(self) if field.name in known]
        return {name: self.of_parameter(known[name]) for name in dict.fromkeys((*order, *known))}


@dataclass(frozen=True)
class Skeleton:
    """A private copy of a model's header without its tokenizer, to be loaded in place of the model.

    ``files`` are those of the model in order. llama.cpp plans on the copy as on the model, without the time that it
    needs for the tokens; the worker makes it when it is first asked for, and nobody else can see it.
    """

    files: tuple[str, ...]


@dataclass(frozen=True)
class DeviceInfo:
    """A device as ggml reports it. ``type`` is ``gpu``, ``igpu``, ``accel`` or ``cpu``; memory in bytes.

    ``buffer_type`` is the name of its default buffer type, where ggml has one for it. ``largest_tensor``: bytes of the
    largest tensor that it computes with, where it has such a limit.
    """

    name: str
    description: str
    type: str
    backend: str
    total: int
    free: int
    virtual: bool = False
    buffer_type: str | None = None
    largest_tensor: int | None = None


@dataclass(frozen=True)
class MeasuredSpeed:
    """What computing on a device showed; 0 is what could not be told.

    ``round_trip``: seconds there and back. ``link``: bytes per second to it. ``bandwidth``: bytes per second of weights
    that products with one vector read. ``compute``: FLOP per second of products with a batch.
    """

    round_trip: float
    link: float
    bandwidth: float
    compute: float


@dataclass(frozen=True)
class Row:
    """Memory of one buffer type, in bytes. ``device`` is ``None`` where ggml ties the buffer type to none.

    ``is_host`` is true where the memory is the host's: every buffer type that belongs to none of the devices
    that the model is offloaded to. That includes ``CPU_REPACK``, which upstream's total leaves out. ``compute`` is
    llama.cpp's own figure, ``reserved`` what its scheduler reserves for a real load, where that was asked too.
    """

    buffer_type: str
    device: str | None
    is_host: bool
    model: int
    context: int
    compute: int
    reserved: int | None = field(default=None, compare=False)

    @property
    def used(self) -> int:
        """Bytes of all three kinds."""
        return self.model + self.context + self.compute

    @property
    def real(self) -> Row:
        """What a real load takes, as far as it is known."""
        return self if self.reserved is None else replace(self, compute=self.reserved, reserved=None)


@dataclass(frozen=True)
class Breakdown:
    """The answer to one load: a row per buffer type, and what llama.cpp made of the parameters.

    ``devices`` are the names of the model's devices in order. ``n_ctx``: context in tokens that llama.cpp settled on.
    ``flash_attn``: whether flash attention is on after ``auto`` was resolved, ``None`` where llama.cpp did not say.
    ``n_splits``: graph splits of prompt processing and of generation, where llama.cpp said.
    ``lora``: for each adapter of the parameters what it takes, as model bytes, with no device on the host; that is in
    none of ``rows``, whose compute is with the adapters.
    """

    rows: tuple[Row, ...]
    devices: tuple[str, ...]
    n_ctx: int
    flash_attn: bool | None = None
    n_splits: tuple[int, int] | None = None
    lora: tuple[tuple[Row, ...], ...] = ()

    def on(self, device: str) -> Row:
        """Sum of all rows of ``device`` (not host rows), as one row."""
        rows = [row for row in self.rows if row.device == device and not row.is_host]
        return _sum(device, device, False, rows)

    @property
    def real(self) -> Breakdown:
        """What a real load takes, as far as it is known."""
        return replace(self, rows=tuple(row.real for row in self.rows))

    @property
    def host(self) -> Row:
        """Sum of all rows in host memory, every host buffer type counted."""
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
    """A model that is really loaded: what llama.cpp counts for it, and the devices with what is free beside it."""

    breakdown: Breakdown
    devices: tuple[DeviceInfo, ...]


LAYOUT_DEVICE = "Recorder"
"""Buffer type of the entries of a ``Layout`` that are on its device; entries with another one stayed on the host."""


@dataclass(frozen=True)
class ModelInfo:
    """What llama.cpp says about a loaded model.

    ``n_layer`` counts the repeating layers without ``n_layer_nextn`` (next-token prediction); ``n_swa`` is the window
    of sliding-window attention, 0 without; ``bytes`` and ``n_params`` are of all tensors; ``devices`` are the names of
    the devices it was loaded for.
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
    """Bytes that one tensor takes in ``buffer_type``; ``kind`` is ``model`` (weights) or ``context`` (caches)."""

    buffer_type: str
    name: str
    kind: Literal["model", "context"]
    bytes: int


@dataclass(frozen=True)
class Layout:
    """Every weight and cache tensor with the size that llama.cpp asked of the buffer type.

    Recorded during a dummy load with all layers on one virtual device; ``alignment`` is that device's.
    """

    entries: tuple[LayoutEntry, ...]
    alignment: int
    n_ctx: int


class TensorInfo(NamedTuple):
    """A tensor of a GGUF file. ``shape`` has ggml's order (ne[0] first); ``bytes`` as stored in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    split: int = 0


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of one GGUF file. Arrays in ``metadata`` are replaced by their length as ``Array``."""

    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    version: int
    alignment: int

    @property
    def file_bytes(self) -> int:
        """Where the last tensor ends, 0 without any: a shorter file is truncated."""
        if not self.tensors:
            return 0
        padded = sum(-(-tensor.bytes // self.alignment) * self.alignment for tensor in self.tensors[:-1])
        return self.data_offset + padded + self.tensors[-1].bytes


@dataclass(frozen=True)
class Array:
    """A metadata array. ``values`` holds numbers and booleans up to 4096 of them; long and string arrays stay empty."""

    type: str
    length: int
    values: tuple[int | float | bool, ...] = field(default=())


MetadataValue = int | float | bool | str | Array
