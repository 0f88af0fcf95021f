"""Bytes of layers: in a model's file by the role of tensors, and in a plan by the place of weights and caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.llama.types import LAYOUT_DEVICE, Breakdown, Layout, MetadataValue, Row
from fitter.model.header import Model
from fitter.model.tensors import Role, layer_of, role_of, stays_on_host
from fitter.planning.placing.layer_sizes import HOST, cache_layer, is_state, layer_index, units_of
from fitter.planning.placing.placement import Placement, llama_placement
from fitter.planning.plan.plan import Plan
from fitter.planning.request.summary import ModelSummary


@dataclass(frozen=True)
class RoleSize:
    """The tensors of one role."""

    role: str
    """The role, such as ``attention`` or ``experts``."""
    count: int
    """Number of tensors."""
    bytes: int
    """Bytes of their weights in the file."""


@dataclass(frozen=True)
class LayerSize:
    """One repeating layer, or everything outside the layers."""

    index: int | None
    """The layer's number from 0; ``None`` for tensors outside layers, such as embeddings and output."""
    weights: tuple[RoleSize, ...]
    """Bytes of its weights by role."""
    context: int
    """Bytes of its KV cache at the inspection's ``n_ctx``."""

    @property
    def bytes(self) -> int:
        """Bytes of the layer's weights."""
        return sum(role.bytes for role in self.weights)


@dataclass(frozen=True)
class Inspection:
    """The tensors and layers of a model."""

    model: ModelSummary
    """The model."""
    metadata: Mapping[str, MetadataValue]
    """Every key of the header."""
    roles: tuple[RoleSize, ...]
    """Its tensors by role."""
    layers: tuple[LayerSize, ...]
    """The layers in order, after an entry for tensors outside layers."""
    n_ctx: int
    """Context of the caches and ``rows``, in tokens."""
    rows: tuple[Row, ...]
    """Memory of one dummy load with everything on the host; compute bytes belong to no layer."""


def inspection_of(model: Model, breakdown: Breakdown, layout: Layout) -> Inspection:
    """Build the inspection from a load of ``model`` with everything on the host."""
    units = units_of(layout, model.n_layer)
    layers = [_layer_size(model, None, units[-1].cache)]
    layers += [_layer_size(model, unit.index, unit.cache) for unit in units[:-1]]
    return Inspection(
        model=ModelSummary.of(model),
        metadata=model.metadata,
        roles=_roles([(role_of(tensor.name), tensor.bytes) for tensor in model.tensors]),
        layers=tuple(layers),
        n_ctx=breakdown.n_ctx,
        rows=breakdown.rows,
    )


def _layer_size(model: Model, index: int | None, cache: int) -> LayerSize:
    tensors = [(role_of(tensor.name), tensor.bytes) for tensor in model.tensors if layer_of(tensor.name) == index]
    return LayerSize(index, _roles(tensors), cache)


def _roles(tensors: Sequence[tuple[Role, int]]) -> tuple[RoleSize, ...]:
    sizes = [[size for role, size in tensors if role is wanted] for wanted in Role]
    return tuple(
        RoleSize(role.value, len(of_role), sum(of_role)) for role, of_role in zip(Role, sizes, strict=True) if of_role
    )


HOST_NAME = "host"
"""The host's name, in place of a device's."""

_ENDS = "embedding and output"
_REST = "norms and the rest"
_CACHE = "KV cache"
_STATE = "recurrent state"
_GROUPS = {
    Role.ATTENTION: "attention",
    Role.RECURRENT: "recurrent layers",
    Role.FFN: "feed-forward",
    Role.EXPERT: "experts",
    Role.SHARED_EXPERT: "shared experts",
    Role.PREDICTION: "multi-token prediction",
}
GROUPS = (_ENDS, *_GROUPS.values(), _REST, _CACHE, _STATE)
"""Groups of a layer's bytes, in the order of the drawing."""


@dataclass(frozen=True)
class MapCell:
    """The bytes of one group of tensors in one layer, by place."""

    group: str
    """One of ``GROUPS``."""
    layer: int
    """The layer's number from 0; -1 before all layers, and the number of layers for the output."""
    bytes: tuple[tuple[str, int], ...]
    """Pairs of a place (a device or ``host``) and its bytes, in the order of the map's ``places``."""


@dataclass(frozen=True)
class LayerMap:
    """The place of every layer's weights and cache."""

    n_layer: int
    """Repeating layers."""
    places: tuple[str, ...]
    """The devices in the plan's order, then ``host``."""
    cells: tuple[MapCell, ...]
    """All cells, by group and then by layer."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of this model."""
        present = {cell.group for cell in self.cells}
        return tuple(group for group in GROUPS if group in present)

    def on(self, place: str) -> int:
        """Add up all bytes at one of the ``places``."""
        return sum(dict(cell.bytes).get(place, 0) for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        """Return the map for JSON: for each group a list of layers, each with bytes by place."""
        return {
            "n_layer": self.n_layer,
            "places": list(self.places),
            "groups": [
                {
                    "group": group,
                    "layers": [
                        {"layer": cell.layer, "bytes": dict(cell.bytes)} for cell in self.cells if cell.group == group
                    ],
                }
                for group in self.groups
            ],
        }


def overridden(plan: Plan) -> list[str]:
    """Return the patterns of the plan's overrides."""
    return [override.pattern for override in plan.params.tensor_buft_overrides]


def placement_of(plan: Plan, n_units: int) -> Placement:
    """Return the place of each layer, and of the output as the last of ``n_units``, as llama.cpp chooses it."""
    free = {use.name: use.free for use in plan.devices}
    on_devices = [free.get(name, 0) for name in plan.breakdown.devices]
    return llama_placement(n_units, plan.params.n_gpu_layers, plan.params.tensor_split, on_devices)


def map_of(plan: Plan, model: Model, layout: Layout, matches: Sequence[int]) -> LayerMap | None:
    """Map the layers of ``plan`` to places.

    A tensor that the layout lacks is on the host, because the recording device does not compute with it, unless a
    device of another kind was measured to have it. A tensor above a device's limit for one tensor is on the host too.

    Args:
        plan: The plan.
        model: Its model.
        layout: Recorded by llama.cpp at the plan's context.
        matches: For each tensor of the model, the index of the override that matches it; -1 for none.

    Returns:
        The map; ``None`` where several devices share a layer, or the map disagrees with the measurement.
    """
    if plan.params.split_mode not in ("layer", "none"):
        return None
    devices = plan.breakdown.devices
    homes = placement_of(plan, model.n_layer + 1).homes
    place_of = {row.buffer_type: row.device for row in plan.breakdown.rows if not row.is_host}
    index_of = {name: index for index, name in enumerate(devices)}
    targets = {
        tensor.name: index_of.get(place_of.get(plan.params.tensor_buft_overrides[layer_map].buffer_type) or "", HOST)
        for tensor, layer_map in zip(model.tensors, matches, strict=True)
        if layer_map >= 0
    }
    sums: _Sums = {}
    by_rule: list[tuple[int, tuple[str, int], int]] = []
    for entry in layout.entries:
        on_device = entry.buffer_type == LAYOUT_DEVICE
        size = -(-entry.bytes // layout.alignment) * layout.alignment if on_device else entry.bytes
        if entry.kind == "context":
            layer = min(cache_layer(entry.name, model.n_layer), model.n_layer)
            place = homes[layer] if plan.params.offload_kqv else HOST
            group = _STATE if is_state(entry.name) else _CACHE
        else:
            layer, group = _cell_of(entry.name, model.n_layer, on_device)
            place = targets.get(entry.name, homes[min(layer, model.n_layer)] if on_device else HOST)
            if on_device and entry.name not in targets:
                by_rule.append((size, (group, layer), place))
        _add(sums, (group, layer), place, size)
    _leave_largest(sums, plan, by_rule)
    _add_unrecorded(sums, plan, model, layout, homes, targets)
    _take_once(sums, plan, model.n_layer, layout)
    layer_map = LayerMap(model.n_layer, (*devices, HOST_NAME), tuple(_cells(sums, devices)))
    return layer_map if _agrees(layer_map, plan) else None


_Sums = dict[tuple[str, int], dict[int, int]]
"""Bytes by group and layer, and by place."""


def _add(sums: _Sums, key: tuple[str, int], place: int, size: int) -> None:
    cell = sums.setdefault(key, {})
    cell[place] = cell.get(place, 0) + size


def _lacks(sums: _Sums, plan: Plan) -> list[int]:
    """Compute the measured bytes of each device that ``sums`` lacks."""
    lacks = [_measured_bytes(plan, name) for name in plan.breakdown.devices]
    for cell in sums.values():
        for place, size in cell.items():
            if place != HOST:
                lacks[place] -= size
    return lacks


def _leave_largest(sums: _Sums, plan: Plan, weights: Iterable[tuple[int, tuple[str, int], int]]) -> None:
    """Move the largest ``weights`` to the host until no device has more than measured.

    Each weight is its size, its group and layer, and its place. Devices limit the size of one tensor.
    """
    lacks = _lacks(sums, plan)
    is_all = [False] * len(lacks)
    for size, key, place in sorted(weights, reverse=True):
        if place != HOST and not is_all[place]:
            is_all[place] = size > -lacks[place]
            if not is_all[place]:
                _add(sums, key, place, -size)
                _add(sums, key, HOST, size)
                lacks[place] += size


def _add_unrecorded(
    sums: _Sums, plan: Plan, model: Model, layout: Layout, homes: Sequence[int], targets: Mapping[str, int]
) -> None:
    """Add loaded tensors that ``layout`` lacks to ``sums``, which has all others."""
    every = {entry.name for entry in layout.entries}
    on_host = {entry.name for entry in layout.entries if entry.buffer_type != LAYOUT_DEVICE}
    placed = []
    for tensor in model.tensors:
        # an embedding that serves as the output is loaded twice
        is_input = stays_on_host(tensor.name)
        if tensor.name not in (on_host if is_input else every) and tensor.name not in layout.unused:
            layer, group = _cell_of(tensor.name, model.n_layer, not is_input)
            home = targets.get(tensor.name, HOST if is_input else homes[min(layer, model.n_layer)])
            placed.append((tensor, (group, layer), home))
    lacks = _lacks(sums, plan)
    of_home = [sum(tensor.bytes for tensor, _, home in placed if home == d) for d in range(len(lacks))]
    for tensor, key, home in placed:
        # a device has all of these tensors, or none
        is_there = home != HOST and (tensor.name in targets or lacks[home] > of_home[home] / 2)
        _add(sums, key, home if is_there else HOST, tensor.bytes)


def _cell_of(name: str, n_layer: int, on_device: bool) -> tuple[int, str]:
    """Return the layer and the group of a weight."""
    layer = layer_index(name)
    if layer is None:
        return (n_layer if on_device else -1), _ENDS
    return min(layer, n_layer), _GROUPS.get(role_of(name), _REST)


def _cells(sums: Mapping[tuple[str, int], Mapping[int, int]], devices: Sequence[str]) -> list[MapCell]:
    cells = []
    for group, layer in sorted(sums, key=lambda key: (GROUPS.index(key[0]), key[1])):
        size_of = sums[group, layer]
        # the host comes last
        order = sorted(size_of, key=lambda place: len(devices) if place == HOST else place)
        named = tuple(
            (HOST_NAME if place == HOST else devices[place], size_of[place]) for place in order if size_of[place]
        )
        if named:
            cells.append(MapCell(group, layer, named))
    return cells


def _take_once(sums: _Sums, plan: Plan, n_layer: int, layout: Layout) -> None:
    """Count an embedding that serves as the output once, if llama.cpp has both in one host buffer."""
    twice = [e for e in layout.entries if e.buffer_type == LAYOUT_DEVICE and stays_on_host(e.name)]
    output = sums.get((_ENDS, n_layer), {})
    on_host = sum(cell.get(HOST, 0) for cell in sums.values())
    for entry in twice:
        if output.get(HOST, 0) >= entry.bytes and on_host - _on_host(plan) > entry.bytes / 2:
            output[HOST] -= -(-entry.bytes // layout.alignment) * layout.alignment


_TOLERANCE = 0.01
"""Allowed deviation of a device's bytes in the map from the measured ones: devices align tensors differently."""


def _agrees(layer_map: LayerMap, plan: Plan) -> bool:
    """Return whether the map has the measured bytes at every place."""
    measured = {name: _measured_bytes(plan, name) for name in plan.breakdown.devices} | {HOST_NAME: _on_host(plan)}
    return all(abs(layer_map.on(name) - size) <= _TOLERANCE * max(size, 2**20) for name, size in measured.items())


def _on_host(plan: Plan) -> int:
    """Return the measured bytes of weights and caches on the host."""
    return plan.breakdown.host.model + plan.breakdown.host.context


def _measured_bytes(plan: Plan, device: str) -> int:
    """Return the measured bytes of weights and caches on a device."""
    row = plan.breakdown.on(device)
    return row.model + row.context
