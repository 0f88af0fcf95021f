"""The parts of a plan that are decided before the search: by the user, or by llama.cpp's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.llama.types import MAX_USED_DEVICES, Params, TensorBuftOverride
from fitter.planning.placing.host_flags import merge_overrides, override_like
from fitter.planning.placing.layer_sizes import HOST, Item
from fitter.planning.placing.placement import Placement, llama_placement, overrides_of
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


MIN_UBATCH = 64
"""The smallest micro batch that is chosen. With less than 32 tokens no device computes with weights of the host."""

_MAX_UBATCH = 8192
"""The largest one of a published measurement (``tests/data/speeds/later_placements.csv``)."""

_IN_FLIGHT = 4
"""Micro batches that llama.cpp's pipeline has at once by default: ``n_batch`` 2048, ``n_ubatch`` 512."""


def micro_batches(request: Request) -> tuple[int, ...]:
    """List the micro batches that a plan may have, the smallest first: the user's, or powers of two.

    More than the prompt brings nothing, and a step of generation has a token of every sequence.
    """
    params = request.params
    if not is_priced(request) or "n_ubatch" in request.fixed or params.split_mode == "tensor":
        return (params.n_ubatch,)
    most = min(_MAX_UBATCH, params.n_batch) if "n_batch" in request.fixed else _MAX_UBATCH
    most = max(MIN_UBATCH, min(most, 1 << (max(1, request.workload.prompt) - 1).bit_length()))
    least = max(MIN_UBATCH, params.n_seq_max)
    sizes = (1 << power for power in range(MIN_UBATCH.bit_length() - 1, most.bit_length()))
    return tuple(sorted({params.n_ubatch, *(size for size in sizes if least <= size <= most)}))


def with_micro_batch(request: Request, n_ubatch: int) -> Request:
    """Return the request with a micro batch."""
    if n_ubatch == request.params.n_ubatch:
        return request
    return replace(request, params=replace(request.params, n_ubatch=n_ubatch))


def is_pipelined(request: Request, devices: Sequence[DeviceLimit], placement: Placement) -> bool:
    """Return whether llama.cpp has several devices work on several micro batches at once (``llama_context``).

    They must hold the whole model with its caches, and any tensor override ends it.
    """
    params, are_several = request.params, len(devices) - len(placement.idle) > 1
    is_whole = not (placement.first or placement.moved or params.tensor_buft_overrides)
    return are_several and is_whole and params.offload_kqv


def ends_pipeline(request: Request, devices: Sequence[DeviceLimit], placement: Placement) -> bool:
    """Return whether devices with the whole model work on one micro batch at a time because of moved tensors alone."""
    is_spilled = placement.is_spilled or not placement.moved
    return not is_spilled and is_pipelined(request, devices, replace(placement, moved=()))


def keeps_pipeline(request: Request, n_ubatch: int) -> bool:
    """Return whether a prompt of the request has as many micro batches as the pipeline has at once by default."""
    return _IN_FLIGHT * n_ubatch <= max(request.workload.prompt, request.params.n_batch)


def loses_pipeline(request: Request, devices: Sequence[DeviceLimit], placement: Placement) -> bool:
    """Return whether the search chose a micro batch that is too large for devices to work on several at once."""
    is_chosen = len(micro_batches(request)) > 1 and is_pipelined(request, devices, placement)
    return is_chosen and not keeps_pipeline(request, request.params.n_ubatch)


def smallest_context(request: Request) -> int:
    """Return the smallest context of a plan: the user's, if set."""
    return request.params.n_ctx if "n_ctx" in request.fixed else request.n_ctx_min


def pinned_devices(request: Request) -> set[DeviceLimit]:
    """Return the devices on which the user's overrides put tensors; llama.cpp must see them."""
    return {request.devices[target] for target in request.pinned.values() if target != HOST}


def user_chose_devices(request: Request) -> bool:
    """Return whether the user decides which devices take part."""
    return bool(request.fixed & {"devices", "tensor_split"} or pinned_devices(request))


def user_chose_split(request: Request) -> bool:
    """Return whether the user decides which devices have layers, and not only which devices there are."""
    return bool("tensor_split" in request.fixed or pinned_devices(request))


def needs_devices(request: Request) -> bool:
    """Return whether the user wants layers, or a cache of experts, on devices."""
    wants_layers = "n_gpu_layers" in request.fixed and request.params.n_gpu_layers != 0
    return wants_layers or request.params.moe_cache_size > 0


def usable_devices(request: Request) -> tuple[DeviceLimit, ...]:
    """Return the devices with room beyond their margin that llama.cpp uses by default, or that overrides name.

    If there are more than llama.cpp can use, the largest of them.
    """
    if request.fixed & {"devices", "tensor_split"}:
        return request.devices
    named = pinned_devices(request)
    open_to = [device for device in request.devices if device.is_default or device in named]
    by_size = sorted(open_to, key=lambda device: (device not in named, -device.target))
    usable = [device for device in by_size[:MAX_USED_DEVICES] if device.target > 0 or device in named]
    if not usable and needs_devices(request):
        usable = by_size[:MAX_USED_DEVICES]
    return tuple(device for device in request.devices if device in usable)


def other_devices(request: Request) -> tuple[DeviceLimit, ...]:
    """Return the devices with room that llama.cpp uses only where ``-dev`` names them, as a plan may do."""
    if user_chose_devices(request):
        return ()
    return tuple(device for device in request.devices if not device.is_default and device.target > 0)


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


def flag_like(request: Request, placement: Placement) -> tuple[TensorBuftOverride | None, tuple[Item, ...]]:
    """Return the override of ``-cmoe``, ``-ncmoe`` or ``-ncffn`` that gives ``placement``; see ``override_like``."""
    # experts of layers for multi-token prediction are in no facts
    all_layers = not request.params.load_mtp
    return override_like(placement, request.facts.names, request.pinned, all_layers=all_layers)


def overrides_for(
    request: Request, placement: Placement, buffer_types: Sequence[str]
) -> tuple[TensorBuftOverride, ...]:
    """Write the moved items of ``placement`` after the user's overrides, as a flag's override where one gives them."""
    flag, rest = flag_like(request, placement)
    moved = tuple(pair for pair in placement.moved if pair[0] in rest)
    placed = overrides_of(replace(placement, moved=moved), buffer_types, request.facts.names)
    return merge_overrides((*request.params.tensor_buft_overrides, *placed, *((flag,) if flag else ())))


def params_of(request: Request, devices: Sequence[DeviceLimit], placement: Placement, n_ctx: int) -> Params:
    """Build the parameters that tell llama.cpp to place the model like ``placement``, with the user's parameters."""
    used = devices_in_use(request, devices, placement)
    names = tuple(devices[d].name for d in used)
    params = replace(request.params, n_ctx=n_ctx, devices=names)
    if request.one_batch:
        params = replace(params, n_batch=params.n_ubatch)
    elif "n_batch" not in request.fixed and "n_ubatch" not in request.fixed:
        at_once = _IN_FLIGHT if is_pipelined(request, devices, placement) else 1
        params = replace(params, n_batch=max(params.n_batch, at_once * params.n_ubatch))
    if "n_gpu_layers" not in request.fixed:
        params = replace(params, n_gpu_layers=placement.n_gpu_layers)
    if "tensor_split" not in request.fixed:
        several = len(names) > 1 and placement.n_gpu_layers > 0
        params = replace(params, tensor_split=tuple(float(placement.counts[d]) for d in used) if several else None)
    buffer_types = [device.buffer_type for device in devices]
    return replace(params, tensor_buft_overrides=overrides_for(request, placement, buffer_types))
