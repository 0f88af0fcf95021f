"""Notes on memory that devices and the host share."""

from __future__ import annotations

from fitter.planning.plan.plan import Plan
from fitter.text import MIB, human


def pool_lines(plan: Plan) -> list[str]:
    """Write a line for each fact about the pools of ``plan`` that a table of figures does not show."""
    lines = []
    for pool in plan.pools:
        if pool.mapped_twice >= MIB:
            lines.append(
                f"{pool.name}: {human(pool.mapped_twice)} of weights are mapped by both, and counted once in their sum"
            )
        if pool.mapped_between >= MIB and not pool.load_mode:
            lines.append(
                f"{pool.members[0]}: {human(pool.mapped_between)} of its margin are for weights of the host that lie "
                "between its own in the file, since it maps those as well"
            )
        if pool.load_mode and plan.fits:
            lines.append(
                "the file must not be mapped: the GPU would map what the host has of the layers as well "
                f"(--load-mode {pool.load_mode}, in older builds of llama.cpp --no-mmap)"
            )
        if pool.setting is not None:
            lines.append(pool.setting.message)
    return lines
