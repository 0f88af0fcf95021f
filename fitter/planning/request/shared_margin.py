"""Memory with several names: what devices and the host that share it take of it together. Bytes.

A plan keeps the margin of such a pool beside that of each device. Weights that leave a device for the host of the same
memory leave nothing there, so they do so only where it is the device that has too little of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.llama.types import Breakdown, Row, TensorInfo
from fitter.model.tensors import stays_on_host
from fitter.planning.request.request import DeviceLimit, PoolLimit, Request

MAPS = "metal"
"""Whose devices compute with weights where the file is mapped (``buffer_from_host_ptr``)."""

_ELSE = 256 << 20
"""What a margin is to be for beside mapped weights that are the host's."""

_PADDING = 1 << 20
"""What the padding of all tensors may come to."""


def used_of(pool: PoolLimit, breakdown: Breakdown, model_bytes: int, *, paging: bool = False) -> int:
    """What a load takes of ``pool``, weights that are mapped for both sides counted once.

    With ``paging`` weights on the host do not count, where devices do not map them as well.
    """
    host = breakdown.host
    used = host.used + sum(breakdown.on(name).used for name in pool.devices)
    paged = host.model if paging and pages(pool) else 0
    return used - paged - mapped_twice(pool, breakdown, model_bytes)


def mapped_twice(pool: PoolLimit, breakdown: Breakdown, model_bytes: int) -> int:
    """Bytes of weights that are on a device and on the host and are the same pages of the file.

    Token embeddings that are the output's weights too. Only where the file is mapped.
    """
    if not _may_map(pool) or is_unmapped(pool, breakdown):
        return 0
    return max(0, sum(row.model for row in breakdown.rows if _is_mapped(row, pool)) - model_bytes)


def is_unmapped(pool: PoolLimit, breakdown: Breakdown) -> bool:
    """Whether the file must not be mapped for ``breakdown`` to be what is taken.

    A device maps the file from the first of its tensors to the last one. Where the host has weights of layers, those
    are between them, and count for what the device may use as well.
    """
    on_devices = any(breakdown.on(name).model for name in pool.devices)
    return _may_map(pool) and on_devices and breakdown.host.model > pool.input_bytes + _PADDING


def pages(pool: PoolLimit) -> bool:
    """Whether weights of the host are in the pool only as long as there is room: devices have those of their own."""
    return not _may_map(pool)


def _may_map(pool: PoolLimit) -> bool:
    """Whether devices map the file, where nothing speaks against it."""
    return pool.system == MAPS and not pool.is_read


def _is_mapped(row: Row, pool: PoolLimit) -> bool:
    return row.buffer_type == "CPU" if row.is_host else row.device in pool.devices


def pools_missing(request: Request, breakdown: Breakdown) -> tuple[tuple[str, int], ...]:
    """What each pool lacks of its margin, by name; 0 or less where it lacks nothing."""
    bytes_, paging = request.model_bytes, request.host.paging
    return tuple((pool.name, used_of(pool, breakdown, bytes_, paging=paging) - pool.target) for pool in request.pools)


def within_pools(request: Request) -> Request:
    """``request`` with devices that count on no more than their pool has.

    Where several share it, each counts on its part.
    """
    if not request.pools:
        return request
    targets = {name: pool.target for pool in request.pools for name in pool.devices}
    return replace(request, devices=tuple(_at_most(d, targets.get(d.name, d.target)) for d in request.devices))


def mapped_between(tensors: Sequence[TensorInfo]) -> int:
    """Bytes of weights that stay on the host and lie between others in a file, so that a device maps them as well.

    Not of those that are the output's weights too, which count for the device anyway. llama-quantize sorts tensors by
    name: the output stands before the token embeddings, and these before the layers.
    """
    is_tied = not any(tensor.name == "output.weight" for tensor in tensors)
    between = 0
    for split in {tensor.split for tensor in tensors}:
        sizes = [(stays_on_host(tensor.name), tensor.bytes, tensor.name) for tensor in tensors if tensor.split == split]
        of_devices = [i for i, (is_of_host, _, _) in enumerate(sizes) if not is_of_host]
        for is_of_host, size, name in sizes[of_devices[0] : of_devices[-1]] if of_devices else ():
            between += size if is_of_host and not (is_tied and name == "token_embd.weight") else 0
    return between


def with_what_they_map(devices: Sequence[DeviceLimit], pools: Sequence[PoolLimit]) -> tuple[DeviceLimit, ...]:
    """``devices`` with a margin that has room for what they map of the host's weights, and for what else it is for."""
    least = {name: pool.between + _ELSE for pool in pools if pool.between for name in pool.devices}
    return tuple(replace(device, margin=max(device.margin, least.get(device.name, 0))) for device in devices)


def parts(request: Request, breakdown: Breakdown) -> dict[str, tuple[int, int]]:
    """By the name of a pool what a load takes of it, and what of that its devices do not have."""
    found = {}
    for pool in request.pools:
        used = used_of(pool, breakdown, request.model_bytes, paging=request.host.paging)
        found[pool.name] = used, used - sum(breakdown.on(name).used for name in pool.devices)
    return found


def beside_host(
    devices: Sequence[DeviceLimit], pools: Sequence[tuple[PoolLimit, int | None]]
) -> tuple[DeviceLimit, ...]:
    """``devices`` with no more than their pool has beside so many bytes, ``None`` where these are not known.

    Where several share it, each has its part.
    """
    targets = {}
    for pool, beside in pools:
        if beside is None:
            continue
        members = [device for device in devices if device.name in pool.devices]
        whole = sum(max(0, device.target) for device in members)
        for device in members if whole else ():
            targets[device.name] = (pool.target - beside) * max(0, device.target) // whole
    return tuple(_at_most(device, targets.get(device.name, device.target)) for device in devices)


def _at_most(device: DeviceLimit, target: int) -> DeviceLimit:
    """``device`` with no more than ``target``; what is below zero is in the margin."""
    if device.target <= target:
        return device
    free = max(0, device.free - (device.target - target))
    return replace(device, free=free, margin=free - target)


def less(pool: PoolLimit, taken: int) -> PoolLimit:
    """``pool`` with so much of its free memory gone; what is below zero is in the margin."""
    free = max(0, pool.free - taken)
    return replace(pool, free=free, margin=free - (pool.target - taken))
