"""The request of a fit: limits of devices and host, and the user's parameters. Bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fitter.llama.types import Breakdown, Layout, Params
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.parameters.table import DEFAULTS

# What ``--allow`` accepts; ``fitter.planning.search.levers`` makes changes of a request of them.
from fitter.parameters.table import LEVERS as LEVERS
from fitter.planning.request.request_limits import own_context, with_whole_inputs
from fitter.planning.request.session import Session
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.model_facts import ModelFacts
from fitter.text import MIB

DEFAULT_MARGIN = 1024 * MIB
"""``--fit-target`` of llama.cpp."""
DEFAULT_HOST_MARGIN: int = DEFAULTS["host_margin"]
"""``--host-margin``."""
DEFAULT_FIT_CTX: int = DEFAULTS["fit_ctx"]
"""``--fit-ctx`` of llama.cpp."""
OBJECTIVES = ("request", "generation", "prompt", "context")
"""Goals of a fit: the least time of the request, of generation or of prompts, or the most context."""
STRATEGIES = ("fastest", "llama.cpp")
"""Ways to place: by estimated time, or like upstream's own fit."""


@dataclass(frozen=True)
class DeviceLimit:
    """A device, and the memory that must stay free on it.

    Attributes:
        name: Its name in llama.cpp.
        description: The driver's name for it.
        total: Its memory.
        free: Its free memory.
        margin: Memory that must stay free.
        buffer_type: Name of its default buffer type.
        largest_tensor: Most bytes of one tensor; ``None`` if it names no limit.
        is_default: Whether llama.cpp uses it without ``-dev``: not an integrated GPU beside a card.
    """

    name: str
    description: str
    total: int
    free: int
    margin: int
    buffer_type: str
    largest_tensor: int | None = None
    is_default: bool = True

    @property
    def target(self) -> int:
        """Most bytes that a plan may use."""
        return self.free - self.margin


@dataclass(frozen=True)
class HostLimit:
    """Host memory.

    Attributes:
        total: All of it.
        free: Free memory; ``None`` if unlimited.
        margin: Memory that must stay free.
        paging: Whether weights do not count.
    """

    total: int | None
    free: int | None
    margin: int
    paging: bool = False

    @property
    def target(self) -> int | None:
        """Most bytes that a plan may use; ``None`` if unlimited."""
        return None if self.free is None else self.free - self.margin


@dataclass(frozen=True)
class PoolLimit:
    """Memory that ``devices`` share with the host.

    Attributes:
        name: Its name, such as ``MTL0+host``.
        devices: Names of the devices.
        total: All of it.
        free: Free memory for devices and host together.
        margin: Memory that must stay free.
        carved: Memory that is reserved for the devices.
        system: The system that limits the devices' part.
        input_bytes: Weights that stay on the host even with all layers on devices.
        between: The part of those weights that a device maps too, within its margin.
        is_read: Whether the user's load mode reads the file instead of mapping it.
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
        """Most bytes that a plan may use."""
        return self.free - self.margin


@dataclass(frozen=True)
class Request:
    """One fit.

    Attributes:
        params: The user's parameters, and defaults. Its overrides are the user's and always kept.
        fixed: Fields of ``params`` that the fit must keep (``n_ctx``, ``n_gpu_layers``, ``tensor_split``, ``devices``,
            ``flash_attn``) or that no lever may change (``n_ubatch``, ``type_k``, ``type_v``, ``op_offload``).
        devices: The devices.
        host: Host memory.
        n_layer: Repeating layers, with those for multi-token prediction.
        n_ctx_train: The context that the model was trained for.
        is_movable: Whether the tensor with this name may leave its layer.
        is_expert_model: Whether the model is a mixture of experts.
        facts: Facts of the model's header.
        fit_ctx: The smallest useful context per sequence.
        model_bytes: Bytes of all tensors in the file.
        pinned: Places of tensors that the user's overrides match: a device's index, or ``HOST``.
        speeds: Speed of each device, by name.
        host_speed: Speed of the host; ``None`` for no estimate.
        workload: The request to price; every context from ``n_ctx_min`` up holds it, unless the user allows contexts
            below the usual ``fit_ctx``.
        most_drafted: The most tokens of a draft to estimate; 0 without a model that drafts.
        session: The work that the user describes, whose average turn ``workload`` is; ``None`` for one request.
        objective: The goal (``OBJECTIVES``).
        strategy: The way to place (``STRATEGIES``).
        context_cost: The share of its time that the request may take longer for more context.
        allow: Levers that the fit may use.
        beside: Devices that keep their margin even without the model, because something else is on them.
        context_limits: By device name, the largest context that it accepts, if limited.
        n_ctx_cap: The largest context of a plan, if limited.
        pools: Memory that devices share with the host.
        notes: Notes for the plan.
        whole_inputs: Fields of ``params`` that follow the context, since they must hold a whole input.
        one_batch: Whether ``n_batch`` is ``n_ubatch``.
    """

    params: Params
    fixed: frozenset[str]
    devices: tuple[DeviceLimit, ...]
    host: HostLimit
    n_layer: int
    n_ctx_train: int
    is_movable: Callable[[str], bool]
    is_expert_model: bool
    facts: ModelFacts
    fit_ctx: int = DEFAULT_FIT_CTX
    model_bytes: int = 0
    pinned: dict[str, int] = field(default_factory=dict)
    speeds: dict[str, DeviceSpeed] = field(default_factory=dict)
    host_speed: HostSpeed | None = None
    workload: Workload = field(default_factory=Workload)
    most_drafted: int = 0
    session: Session | None = None
    objective: str = "request"
    strategy: str = "fastest"
    context_cost: float = DEFAULTS["context_cost"]
    allow: frozenset[str] = frozenset()
    beside: tuple[DeviceLimit, ...] = ()
    context_limits: dict[str, int] = field(default_factory=dict)
    n_ctx_cap: int | None = None
    pools: tuple[PoolLimit, ...] = ()
    notes: tuple[str, ...] = ()
    whole_inputs: frozenset[str] = frozenset()
    one_batch: bool = False

    @property
    def is_for_most_context(self) -> bool:
        """Whether any time may be spent on more context."""
        return self.objective == "context" or math.isinf(self.context_cost)

    @property
    def n_streams(self) -> int:
        """Number of separate KV caches that share ``n_ctx``, as upstream counts them."""
        return 1 if self.params.kv_unified else self.params.n_seq_max

    @property
    def too_large(self) -> frozenset[str]:
        """Tensors above every device's limit for one tensor: llama.cpp keeps them on the host."""
        mosts = [device.largest_tensor or math.inf for device in self.devices]
        if not mosts:
            return frozenset()
        return frozenset(tensor.name for tensor in self.facts.tensors if tensor.bytes > max(mosts))

    @property
    def alignment(self) -> int:
        """Step of fitted contexts: llama.cpp pads to 256 tokens per stream."""
        return 256 * self.n_streams

    @property
    def n_ctx_max(self) -> int:
        """The largest useful context."""
        most = own_context(self.n_ctx_train, self.n_streams)
        return most if self.n_ctx_cap is None else min(most, self.n_ctx_cap)

    @property
    def n_ctx_min(self) -> int:
        """The smallest useful context, with one token for each sequence; never above the largest."""
        return min(max(self.fit_ctx * self.n_streams, self.params.n_seq_max), self.n_ctx_max)

    def with_context(self, n_ctx: int) -> Request:
        """Return the request with ``n_ctx`` as its only context, which the user did not set."""
        each = n_ctx // self.n_streams
        params = with_whole_inputs(self.params, self.whole_inputs, each)
        return replace(self, params=params, n_ctx_train=each, fit_ctx=each)


SHARED_ROW = "shared"
"""Buffer type of rows for memory of ``SharedUse`` that became known only with the measurement."""

Measure = Callable[[Params], Breakdown]
"""Measures a load by a dummy load; raises ``LlamaCppError`` if llama.cpp refuses it."""

Record = Callable[[Params], Layout]
"""Records the sizes of all tensors, by a dummy load on a recording device."""


@dataclass(frozen=True)
class Progress:
    """The progress of a fit."""

    dummy_loads: int
    """Dummy loads until now."""
    text: str
    """The current step."""
    part: float | None = None
    """Finished share of the step, from 0 to 1; ``None`` if unknown."""
