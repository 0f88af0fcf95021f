"""Use of memory that devices and the host share: bytes, problems, and system settings that help. Bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.errors import Message, UsageError
from fitter.llama.types import Breakdown
from fitter.machine.device_memory import Limit, limit_of
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.pool_margin import is_unmapped, mapped_twice
from fitter.planning.request.request import PoolLimit, Request
from fitter.planning.request.shared import HOST_NAME, later_of, taken
from fitter.planning.request.summary import DeviceUse, HostUse, PoolUse, Problem, Setting, SharedUse
from fitter.text import MIB, mib, mib_up

_WORTH_SETTING = 256 * MIB
"""Least gain of a GPU that justifies a setting of the system."""

_MORE_COMPUTE = 512 * MIB
"""Growth of compute buffers with more of the model on the GPU; a setting asks for no more than a plan can use."""


def pool_uses(
    request: Request, trial: Trial, breakdown: Breakdown, devices: Sequence[DeviceUse], host: HostUse
) -> tuple[PoolUse, ...]:
    """Compute the use of each pool of ``request``.

    Args:
        request: The request.
        trial: The plan's trial.
        breakdown: Its measurement.
        devices: Memory on the devices, with everything beside the model.
        host: Host memory, with everything beside the model.
    """
    return tuple(_use(pool, request, trial, breakdown, devices, host) for pool in request.pools)


def _use(
    pool: PoolLimit,
    request: Request,
    trial: Trial,
    breakdown: Breakdown,
    devices: Sequence[DeviceUse],
    host: HostUse,
) -> PoolUse:
    of_pool = [device for device in devices if device.name in pool.devices]
    twice = mapped_twice(pool, breakdown, request.model_bytes)
    use = PoolUse(
        pool.name,
        pool.total,
        pool.free,
        pool.margin,
        host.used + sum(device.used for device in of_pool) - twice,
        (*pool.devices, HOST_NAME),
        twice,
        pool.between,
        "none" if is_unmapped(pool, breakdown) else None,
    )
    return replace(use, setting=_setting(pool, request, trial, of_pool, host))


def with_host(pools: Sequence[PoolUse], before: HostUse, after: HostUse) -> tuple[PoolUse, ...]:
    """Change the host's part of each pool from ``before`` to ``after``."""
    return tuple(replace(pool, used=pool.used + after.used - before.used) for pool in pools)


def left_for_host(pools: Sequence[PoolUse], host: HostUse) -> int | None:
    """Return the bytes that the host may still take beside all margins; ``None`` if unlimited."""
    if host.left is None:
        return None
    return min([host.left - host.margin, *(pool.left - pool.margin for pool in pools)])


def _setting(
    pool: PoolLimit, request: Request, trial: Trial, devices: Sequence[DeviceUse], host: HostUse
) -> Setting | None:
    """Find the setting that gives a device more of the pool, if the device's limit keeps the plan from being better."""
    limit = limit_of(pool.system)
    layers = max(0, host.model - pool.input_bytes)
    if limit.setting is None or len(devices) != 1 or {name for name, _ in trial.missing} - {devices[0].name}:
        return None
    device = devices[0]
    if trial.missing:
        better = "the model may fit"
    elif layers > MIB and "n_gpu_layers" not in request.fixed and HOST not in request.pinned.values():
        better = "more of the model can be on the GPU"
    elif "n_ctx" not in request.fixed and trial.params.n_ctx < request.n_ctx_max:
        better = "the context can be longer"
    else:
        return None
    # then the device would hold all layers, with the largest context that the pool has memory for
    longer = 0 if "n_ctx" in request.fixed else device.context * (request.n_ctx_max - trial.params.n_ctx)
    needed = device.used + layers + longer // max(1, trial.params.n_ctx) + device.margin + _MORE_COMPUTE
    size = min(needed, pool.target - (host.used - layers) + device.margin) // MIB * MIB
    if size < device.total + _WORTH_SETTING:
        return None
    return _setting_for(limit, pool, device, size, better)


def _setting_for(limit: Limit, pool: PoolLimit, device: DeviceUse, size: int, better: str) -> Setting | None:
    # Linux lends the memory that is not carved out
    command = limit.set_to(size - pool.carved)
    if command is None:
        return None
    return Setting(
        command,
        size,
        f"{better} where {device.name} may use {mib(size)} MiB instead of {mib(device.total)}: {command} "
        f"({limit.lasts}; {limit.risk})",
    )


def pool_problem(use: PoolUse, missing: int, uses: Sequence[SharedUse], remedy: Message) -> Problem:
    """Describe the bytes that a pool lacks, and the ``remedy``; ``uses`` share the memory with the model."""
    later = later_of(uses)
    beside = sum(taken(uses, None if name == HOST_NAME else name) for name in use.members) - later
    parts = ((beside, "beside the model"), (later, "for what the program keeps later"))
    named = " and ".join(f"{mib_up(size)} MiB of them {what}" for size, what in parts if size)
    return Problem(
        use.name,
        missing,
        f"{' and '.join((', '.join(use.members[:-1]), use.members[-1]))} lack {mib_up(missing)} MiB of the memory "
        f"that they share: {mib_up(use.used)} MiB are needed{f' ({named})' if named else ''} plus a margin of "
        f"{mib(use.margin)} MiB, but {mib(use.free)} MiB are available; " + remedy,
    )


def check_pools(pools: Sequence[PoolLimit]) -> None:
    """Raise ``UsageError`` for a pool smaller than its margin."""
    for pool in pools:
        if pool.target <= 0:
            raise UsageError(
                f"{pool.name} has {mib(pool.free)} MiB of shared memory available, and the margin of the host is "
                f"{mib(pool.margin)} MiB, so nothing can be placed: use a smaller --host-margin, or a machine with "
                "more memory (available=SIZE in --gpu says what there is)"
            )
