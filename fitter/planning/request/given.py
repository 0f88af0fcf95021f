"""The parts of a plan that are decided before the search: by the user, or by llama.cpp's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.llama.types import MAX_USED_DEVICES, Params
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement, llama_placement, merge_overrides, overrides_of
from fitter.planning.request.request import DeviceLimit, Request


def is_priced(request: Request) -> bool:
    """Return whether the search compares placements by estimated time."""
    return request.strategy == "fastest" and request.host_speed is not None


def chooses_devices(request: Request, devices: Sequence[DeviceLimit]) -> bool:
    """Return whether the search chooses among ``devices``."""
    return is_priced(request) and len(devices) > 1 and not request.fixed & {"devices", "tensor_split"}


def chooses_split(request: Request, devices: Sequence[DeviceLimit]) -> bool:
    """Return whether the search chooses how many layers each of ``devices`` has."""
    return is_priced(request) and len(devices) > 1 and "tensor_split" not in request.fixed


def smallest_context(request: Request) -> int:
    """Return the smallest context of a plan: the user's, if set."""
    return request.params.n_ctx if "n_ctx" in request.fixed else request.n_ctx_min


def pinned_devices(request: Request) -> set[DeviceLimit]:
    """Return the devices on which the user's overrides put tensors; llama.cpp must see them."""
    return {request.devices[target] for target in request.pinned.values() if target != HOST}


def user_chose_devices(request: Request) -> bool:
    """Return whether the user decides which devices take part."""
    return bool(request.fixed & {"devices", "tensor_split"} or pinned_devices(request))


def needs_devices(request: Request) -> bool:
    """Return whether the user wants layers, or a cache of experts, on devices."""
    wants_layers = "n_gpu_layers" in request.fixed and request.params.n_gpu_layers != 0
    return wants_layers or request.params.moe_cache_size > 0


def usable_devices(request: Request) -> tuple[DeviceLimit, ...]:
    """Return the devices with room beyond their margin; the largest, if there are more than llama.cpp can use."""
    if request.fixed & {"devices", "tensor_split"}:
        return request.devices
    named = pinned_devices(request)
    by_size = sorted(request.devices, key=lambda device: (device not in named, -device.target))
    usable = [device for device in by_size[:MAX_USED_DEVICES] if device.target > 0 or device in named]
    if not usable and needs_devices(request):
        usable = by_size[:MAX_USED_DEVICES]
    return tuple(device for device in request.devices if device in usable)


def units_on_devices(request: Request) -> int:
    """Return the number of layers on devices, the output included: all, or the user's number."""
    n_units, asked = request.n_layer + 1, request.params.n_gpu_layers
    return n_units if "n_gpu_layers" not in request.fixed or asked < 0 else min(asked, n_units)


def split_counts(request: Request, devices: Sequence[DeviceLimit], n_gpu_layers: int) -> tuple[int, ...]:
    """Return the layers per device as llama.cpp splits them: by the user's ``tensor_split``, else by free memory."""
    split = request.params.tensor_split if "tensor_split" in request.fixed else None
    return llama_placement(request.n_layer + 1, n_gpu_layers, split, [device.free for device in devices]).counts


def default_placement(request: Request, devices: Sequence[DeviceLimit]) -> Placement:
    """Return llama.cpp's own placement: all layers, or the user's number, split by free memory."""
    n_units = request.n_layer + 1
    n_gpu_layers = units_on_devices(request) if devices else 0
    return Placement(n_units - n_gpu_layers, split_counts(request, devices, n_gpu_layers))


def keeps_layers_on_host(request: Request, devices: Sequence[DeviceLimit]) -> bool:
    """Return whether the user keeps layers on the host whose weights alone may go to devices."""
    return is_priced(request) and bool(devices) and units_on_devices(request) <= request.n_layer


def is_whole(request: Request, devices: Sequence[DeviceLimit], placement: Placement) -> bool:
    """Return whether ``placement`` has all wanted layers whole on devices, and no more could be there."""
    if placement.moved or keeps_layers_on_host(request, devices):
        return False
    return placement.n_gpu_layers == default_placement(request, devices).n_gpu_layers


def devices_in_use(request: Request, devices: Sequence[DeviceLimit], placement: Placement) -> list[int]:
    """Return the indices of devices to name to llama.cpp: an idle one would still cost a context and graph splits."""
    every = list(range(len(devices)))
    idle = placement.idle
    if not is_priced(request) or request.fixed & {"devices", "tensor_split"} or len(idle) == len(every):
        return every
    named_by_user = pinned_devices(request)
    return [d for d in every if d not in idle or devices[d] in named_by_user]


def params_of(request: Request, devices: Sequence[DeviceLimit], placement: Placement, n_ctx: int) -> Params:
    """Build the parameters that tell llama.cpp to place the model like ``placement``, with the user's parameters."""
    used = devices_in_use(request, devices, placement)
    names = tuple(devices[d].name for d in used)
    params = replace(request.params, n_ctx=n_ctx, devices=names)
    if "n_gpu_layers" not in request.fixed:
        params = replace(params, n_gpu_layers=placement.n_gpu_layers)
    if "tensor_split" not in request.fixed:
        several = len(names) > 1 and placement.n_gpu_layers > 0
        params = replace(params, tensor_split=tuple(float(placement.counts[d]) for d in used) if several else None)
    overrides = overrides_of(placement, [device.buffer_type for device in devices])
    return replace(params, tensor_buft_overrides=merge_overrides((*request.params.tensor_buft_overrides, *overrides)))
