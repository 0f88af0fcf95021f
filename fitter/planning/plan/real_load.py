"""Memory of a plan when its model is loaded for real. Bytes."""

from __future__ import annotations

from dataclasses import replace

from fitter.planning.plan.plan import Plan
from fitter.planning.request.shared import HOST_NAME


def with_real_load(plan: Plan) -> Plan:
    """Set how much larger the compute buffers of a real load of a fitting ``plan`` are (``more_in_use``)."""
    if not plan.fits:
        return plan
    dummy, most = plan.breakdown, plan.breakdown.most
    more = {use.name: most.on(use.name).compute - dummy.on(use.name).compute for use in plan.devices}
    more[HOST_NAME] = most.host.compute - dummy.host.compute
    return replace(
        plan,
        devices=tuple(replace(use, more_in_use=more[use.name]) for use in plan.devices),
        host=replace(plan.host, more_in_use=more[HOST_NAME]),
        pools=tuple(replace(pool, more_in_use=sum(more.get(name, 0) for name in pool.members)) for pool in plan.pools),
    )
