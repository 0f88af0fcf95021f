"""Memory of a plan when its model is loaded for real. Bytes."""

from __future__ import annotations

from dataclasses import replace

from fitter.planning.plan.plan import Plan
from fitter.planning.request.shared import HOST_NAME


def counting_real_load(plan: Plan) -> Plan:
    """Count the compute buffers of a real load of a fitting ``plan`` where they are larger (``more_in_use``)."""
    if not plan.fits:
        return plan
    dummy, most = plan.breakdown, plan.breakdown.most
    more = {use.name: most.on(use.name).compute - dummy.on(use.name).compute for use in plan.devices}
    more[HOST_NAME] = most.host.compute - dummy.host.compute
    in_pools = {pool.name: sum(more.get(name, 0) for name in pool.members) for pool in plan.pools}
    return replace(
        plan,
        devices=tuple(
            replace(use, compute=use.compute + more[use.name], more_in_use=more[use.name]) for use in plan.devices
        ),
        host=replace(plan.host, compute=plan.host.compute + more[HOST_NAME], more_in_use=more[HOST_NAME]),
        pools=tuple(
            replace(pool, used=pool.used + in_pools[pool.name], more_in_use=in_pools[pool.name]) for pool in plan.pools
        ),
    )
