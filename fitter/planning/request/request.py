"""What a fit is asked for: limits, and the parameters that the user has set. Bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fitter.llama.types import Breakdown, Layout, Params
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.parameters.table import DEFAULTS

# What ``--allow`` accepts; ``fitter.planning.search.levers`` makes changes of a request of them.
from fitter.parameters.table import LEVERS as LEVERS
from fitter.planning.request.request_limits import own_context
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.work import ModelFacts
from fitter.text import MIB

DEFAULT_MARGIN = 1024 * MIB
"""``--fit-target`` of llama.cpp."""
DEFAULT_HOST_MARGIN: int = DEFAULTS["host_margin"]
"""``--host-margin``."""
DEFAULT_FIT_CTX: int = DEFAULTS["fit_ctx"]
"""``--fit-ctx`` of llama.cpp."""
OBJECTIVES = ("request", "generation", "prompt", "context")
"""What a fit can be best at: the time of the request, generation or prompt processing alone, the most context."""
STRATEGIES = ("fastest", "llama.cpp")
"""How a fit places: by estimated time, or as upstream's own fit does."""


@dataclass(frozen=True)
class DeviceLimit:
    """A device and how much of it must stay free. ``buffer_type`` is the name of its default buffer type.

    ``largest_tensor`` is the most that it computes with in one tensor, ``None`` where it names no limit.
    """

    name: str
    description: str
    total: int
    free: int
    margin: int
    buffer_type: str
    largest_tensor: int | None = None

    @property
    def target(self) -> int:
        """The most that a plan may use."""
        return self.free - self.margin


@dataclass(frozen=True)
class HostLimit:
    """Host memory; ``free`` is ``None`` where it is unlimited. With ``paging`` weights do not count."""

    total: int | None
    free: int | None
    margin: int
    paging: bool = False

    @property
    def target(self) -> int | None:
        """The most that a plan may use."""
        return None if self.free is None else self.free - self.margin


@dataclass(frozen=True)
class PoolLimit:
    """Memory that ``devices``, by name, share with the host, and how much of it must stay free.

    ``free``: for all of them together. ``carved``: what is set aside for the devices alone. ``system``: what decides
    how much of it they may use. ``input_bytes``: weights that are on the host even with all layers on devices.
    ``between``: those of them that a device maps as well, in its margin. ``is_read``: whether the load mode that is set
    reads the file and does not map it.
    """

    name: str
    devices: tuple[str, ...]
    total: int
    free: int
    margin: int
    carved: int = 0
    system: str = ""
    input_bytes: int = 0
    between: int = 0
    is_read: bool = False

    @property
    def target(self) -> int:
        """The most that a plan may use."""
        return self.free - self.margin


@dataclass(frozen=True)
class Request:
    """One fit: ``params`` holds every value that the user set and the defaults of the rest.

    ``fixed`` names the fields of ``params`` that fitting must keep (``n_ctx``, ``n_gpu_layers``, ``tensor_split``,
    ``devices``, ``flash_attn``) or that no lever may change (``n_ubatch``, ``type_k``, ``type_v``, ``op_offload``).
    Overrides in ``params`` are the user's and always kept. ``allow`` has the levers (of ``LEVERS``) that the user lets
    it use.
    ``n_ctx_train`` and ``n_layer`` (repeating layers, those for multi-token prediction counted) come from the model;
    ``fit_ctx`` is the smallest context per sequence that is worth having. ``model_bytes`` is what all tensors have in
    the file. ``pinned`` says of the tensors that an override of the user's catches where they go (a device's index or
    ``HOST``).

    ``objective`` (of ``OBJECTIVES``) and ``strategy`` (of ``STRATEGIES``) say which plan is the best. ``workload`` is
    the request that is priced, which every context from ``n_ctx_min`` up holds; ``speeds`` has every device's by name.
    What is to be priced has ``facts`` and ``host_speed``; without them there is no estimate. ``beside`` are devices
    that keep their margin even where nothing of the model is on them, since something else is.

    ``pools`` are memory that devices share with the host: what they take together is limited too. ``notes`` are to be
    said of the plan.

    ``context_limits`` has by name the largest context that a device takes, where that is not all there may be, and
    ``n_ctx_cap`` the largest that can be in a plan.
    """

    params: Params
    fixed: frozenset[str]
    devices: tuple[DeviceLimit, ...]
    host: HostLimit
    n_layer: int
    n_ctx_train: int
    is_movable: Callable[[str], bool]
    is_expert_model: bool
    fit_ctx: int = DEFAULT_FIT_CTX
    model_bytes: int = 0
    pinned: dict[str, int] = field(default_factory=dict)
    facts: ModelFacts | None = None
    speeds: dict[str, DeviceSpeed] = field(default_factory=dict)
    host_speed: HostSpeed | None = None
    workload: Workload = field(default_factory=Workload)
    objective: str = "request"
    strategy: str = "fastest"
    allow: frozenset[str] = frozenset()
    beside: tuple[DeviceLimit, ...] = ()
    context_limits: dict[str, int] = field(default_factory=dict)
    n_ctx_cap: int | None = None
    pools: tuple[PoolLimit, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def n_streams(self) -> int:
        """Separate KV caches that share ``n_ctx``, as upstream counts them."""
        return 1 if self.params.kv_unified else self.params.n_seq_max

    @property
    def too_large(self) -> frozenset[str]:
        """Tensors that are larger than one may be on any device: llama.cpp keeps them on the host."""
        mosts = [device.largest_tensor or math.inf for device in self.devices]
        if self.facts is None or not mosts:
            return frozenset()
        return frozenset(tensor.name for tensor in self.facts.tensors if tensor.bytes > max(mosts))

    @property
    def alignment(self) -> int:
        """What a fitted context is a multiple of: llama.cpp pads to 256 per stream."""
        return 256 * self.n_streams

    @property
    def n_ctx_max(self) -> int:
        """The largest context worth having."""
        most = own_context(self.n_ctx_train, self.n_streams)
        return most if self.n_ctx_cap is None else min(most, self.n_ctx_cap)

    @property
    def n_ctx_min(self) -> int:
        """The smallest context worth having, with a token for each sequence, never above the largest."""
        return min(max(self.fit_ctx * self.n_streams, self.params.n_seq_max), self.n_ctx_max)


SHARED_ROW = "shared"
"""Buffer type of the rows in which a measurement has what shares the memory, beyond what was known before it."""

Measure = Callable[[Params], Breakdown]
"""What a dummy load takes; raises ``LlamaCppError`` where llama.cpp cannot make it."""

Record = Callable[[Params], Layout]
"""Sizes of all tensors, by a dummy load on a recording device."""


@dataclass(frozen=True)
class Progress:
    """Where a fit stands."""

    dummy_loads: int
    """Dummy loads made so far."""
    text: str
    """What is tried now."""
    part: float | None = None
    """What share of that is done, from 0 to 1; ``None`` where nobody knows."""
