"""Problems of a plan that does not fit: the lack on each device and the host, and its remedies. Bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fitter.planning.plan.pool_use import pool_problem
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.context_limit import Excess
from fitter.planning.request.request import Request
from fitter.planning.request.shared import later_of
from fitter.planning.request.summary import DeviceUse, HostUse, PoolUse, Problem, SharedUse
from fitter.text import mib, mib_up

_PROGRAM_LIMITS = {"cache_ram": "-cram", "ctx_checkpoints": "-ctxcp"}
"""Parameters that limit the memory of a running program, and their options."""


def problems_of(
    request: Request,
    trial: Trial,
    devices: Sequence[DeviceUse],
    host: HostUse,
    excess: Excess | None,
    reserve: Mapping[str, int],
    uses: Sequence[SharedUse] = (),
    pools: Sequence[PoolUse] = (),
) -> tuple[Problem, ...]:
    """Say what ``trial`` lacks where, and what would make it fit; empty if it fits."""
    problems = []
    if excess is not None:
        return (Problem(excess.device, excess.missing, excess.message),)
    lacking_pools = {pool.name: pool for pool in pools if pool.name in dict(trial.missing)}
    for name, missing in trial.missing:
        if name in lacking_pools:
            problems.append(pool_problem(request, lacking_pools[name], missing, trial.params, uses))
            continue
        if any(name in pool.members and _is_limited_by(pool, name, devices, host) for pool in lacking_pools.values()):
            # the pool's problem says it
            continue
        if name == "host":
            remedy = "free host memory or put more of the model on devices"
            if "n_ctx" in request.fixed and trial.params.n_ctx > request.n_ctx_min:
                remedy = "use a smaller -c, " + remedy
            if limits := [option for name, option in _PROGRAM_LIMITS.items() if dict(request.params.more).get(name)]:
                remedy = f"use a smaller {' or '.join(limits)}, " + remedy
            if not request.host.paging:
                remedy += ", or let weights be read from disk again and again with --allow paging"
            used, shared, free, margin = host.used, host.shared, host.free or 0, host.margin
            where = "the host"
        else:
            device = next(device for device in devices if device.name == name)
            used, shared, free, margin = device.used, device.shared, device.free, device.margin
            where = name
            freed = [
                f"leave {flag} out"
                for flag, field in (("-ngl", "n_gpu_layers"), ("-ts", "tensor_split"), ("-c", "n_ctx"))
                if field in request.fixed
            ]
            if request.params.tensor_buft_overrides:
                freed.append("put fewer tensors there with -ot")
            remedy = " or ".join([*freed, "use a smaller margin with --fit-target"])
        on_host = later_of(uses) if name == "host" else 0
        parts = ((shared - on_host, "beside the model"), (on_host, "for what the program keeps later"))
        named = " and ".join(f"{mib_up(size)} MiB of them {what}" for size, what in parts if size)
        needed = f"{mib_up(used)} MiB are needed" + (f" ({named})" if named else "")
        extra = f"a margin of {mib(margin)} MiB"
        if reserve.get(name, 0) > margin:
            extra = f"up to {mib_up(reserve[name])} MiB more in use"
        problems.append(
            Problem(
                name,
                missing,
                f"{where} lacks {mib_up(missing)} MiB: {needed} plus {extra}, but {mib(free)} MiB are free; {remedy}",
            )
        )
    return tuple(problems)


def _is_limited_by(pool: PoolUse, name: str, devices: Sequence[DeviceUse], host: HostUse) -> bool:
    """Whether a device or the host lacks memory only because its pool does."""
    return next((device.fits for device in devices if device.name == name), host.free == pool.free or host.fits)
