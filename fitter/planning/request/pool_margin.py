"""Memory pools that devices share with the host, and their margins. Bytes.

A plan keeps the margin of a pool and of each device. Weights that move from a device to the host free no memory of the
pool, so they move only if the device itself has too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.llama.types import Breakdown, Row, TensorInfo
from fitter.model.tensors import stays_on_host
from fitter.planning.request.request import DeviceLimit, PoolLimit, Request

MAPS = "metal"
"""The system whose devices compute with weights in the mapped file (``buffer_from_host_ptr``)."""

_ELSE = 256 << 20
"""Margin for other programs, beside mapped weights of the host."""

_PADDING = 1 << 20
"""Limit for the padding of all tensors together."""


def used_of(pool: PoolLimit, breakdown: Breakdown, model_bytes: int, *, paging: bool = False) -> int:
    """Compute the bytes that a load takes of ``pool``; weights mapped for both sides count once.

    Args:
        pool: The pool.
        breakdown: Memory of the load.
        model_bytes: Bytes of all tensors in the file.
        paging: Whether the host's weights do not count, unless devices map them too.
    """
    host = breakdown.host
    used = host.used + sum(breakdown.on(name).used for name in pool.devices)
    paged = host.model if paging and pages(pool) else 0
    return used - paged - mapped_twice(pool, breakdown, model_bytes)


def mapped_twice(pool: PoolLimit, breakdown: Breakdown, model_bytes: int) -> int:
    """Compute the bytes of weights that device and host map from the same pages of the file.

    For example token embeddings that are the output's weights too.
    """
    if not _may_map(pool) or is_unmapped(pool, breakdown):
        return 0
    return max(0, sum(row.model for row in breakdown.rows if _is_mapped(row, pool)) - model_bytes)


def is_unmapped(pool: PoolLimit, breakdown: Breakdown) -> bool:
    """Return whether ``breakdown`` holds only if the file is not mapped.

    A device maps the file from its first tensor to its last. If layers' weights on the host lie between, they count for
    the device as well.
    """
    on_devices = any(breakdown.on(name).model for name in pool.devices)
    return _may_map(pool) and on_devices and breakdown.host.model > pool.input_bytes + _PADDING


def pages(pool: PoolLimit) -> bool:
    """Return whether the host's weights leave the pool when memory is short; devices then have copies of theirs."""
    return not _may_map(pool)


def _may_map(pool: PoolLimit) -> bool:
    """Return whether devices may map the file."""
    return pool.system == MAPS and not pool.is_read


def _is_mapped(row: Row, pool: PoolLimit) -> bool:
    return row.buffer_type == "CPU" if row.is_host else row.device in pool.devices


def pools_missing(request: Request, breakdown: Breakdown) -> tuple[tuple[str, int], ...]:
    """Compute the bytes that each pool lacks of its margin, by name; 0 or less if it lacks none."""
    bytes_, paging = request.model_bytes, request.host.paging
    return tuple((pool.name, used_of(pool, breakdown, bytes_, paging=paging) - pool.target) for pool in request.pools)


def within_pools(request: Request) -> Request:
    """Limit each device to the memory of its pool.

    Devices of one pool each count on their part of it.
    """
    if not request.pools:
        return request
    targets = {name: pool.target for pool in request.pools for name in pool.devices}
    return replace(request, devices=tuple(_at_most(d, targets.get(d.name, d.target)) for d in request.devices))


def mapped_between(tensors: Sequence[TensorInfo]) -> int:
    """Add up the weights that stay on the host and lie between other weights in a file, so that a device maps them too.

    Weights that are the output's too do not count, because the device has them anyway. llama-quantize sorts tensors by
    name: first the output, then the token embeddings, then the layers.
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
    """Raise margins of ``devices`` to hold the host's weights that they map, and other programs."""
    least = {name: pool.between + _ELSE for pool in pools if pool.between for name in pool.devices}
    return tuple(replace(device, margin=max(device.margin, least.get(device.name, 0))) for device in devices)


def parts(request: Request, breakdown: Breakdown) -> dict[str, tuple[int, int]]:
    """Return the bytes that a load takes of each pool, and the part of them that is not its devices'."""
    bytes_of = {}
    for pool in request.pools:
        used = used_of(pool, breakdown, request.model_bytes, paging=request.host.paging)
        bytes_of[pool.name] = used, used - sum(breakdown.on(name).used for name in pool.devices)
    return bytes_of


def beside_host(
    devices: Sequence[DeviceLimit], pools: Sequence[tuple[PoolLimit, int | None]]
) -> tuple[DeviceLimit, ...]:
    """Limit ``devices`` to the memory of their pool beside the given bytes (``None`` if unknown).

    Devices of one pool get parts of it.
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
    """Limit ``device`` to ``target`` bytes; a negative target goes into the margin."""
    if device.target <= target:
        return device
    free = max(0, device.free - (device.target - target))
    return replace(device, free=free, margin=free - target)


def less(pool: PoolLimit, taken: int) -> PoolLimit:
    """Take bytes from the pool's free memory; a negative rest goes into the margin."""
    free = max(0, pool.free - taken)
    return replace(pool, free=free, margin=free - (pool.target - taken))
