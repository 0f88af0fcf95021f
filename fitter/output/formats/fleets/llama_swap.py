"""Write a fleet as a config.yaml of llama-swap, whose matrix has the sets of models that fit together.

The syntax is that of its ``config-schema.json``. Of the sets with the model that is asked for, llama-swap takes the
first one whose evictions cost least (``internal/matrix``). It sorts the sets by their names when it replaces macros
(``internal/config/macros.go``), so the names are in the order of the sets.
"""

from __future__ import annotations

import math

from fitter.output.formats.llama_swap import model, scalar
from fitter.planning.fleet.fleet import Fleet

_LOAD_SECONDS = 120
"""Seconds that llama-swap waits for a model if not told."""


def text(fleet: Fleet) -> str:
    """Write the models, what is loaded at the start, and the matrix.

    Raises :class:`PlanError` for a name or a value that llama-swap would change.
    """
    ids = {each.name: f"m{number}" for number, each in enumerate(fleet.models, 1)}
    width = len(str(len(fleet.sets)))
    sets = [" & ".join(ids[name] for name in each.models) for each in fleet.sets]
    return "\n".join(
        [
            *models(fleet),
            "matrix:",
            "  vars:",
            *(f"    {ids[each.name]}: {scalar(each.name)}" for each in fleet.models),
            "  evict_costs:",
            *(f"    {ids[each.name]}: {each.evict_cost}" for each in fleet.models),
            "  sets:",
            *(f'    s{number:0{width}}: "{each}"' for number, each in enumerate(sets, 1)),
        ]
    )


def models(fleet: Fleet) -> list[str]:
    """Write everything of a config.yaml but the models that may be in memory together."""
    lines = ["# llama-swap --config config.yaml"]
    slowest = math.ceil(2 * max(each.load_seconds for each in fleet.models))
    if slowest > _LOAD_SECONDS:
        lines.append(f"healthCheckTimeout: {slowest}")
    if first := [each.name for each in fleet.models if each.is_resident]:
        lines += ["hooks:", "  on_startup:", "    preload:", *(f"      - {scalar(name)}" for name in first)]
    lines.append("models:")
    for each in fleet.models:
        lines += model(each.name, each.plan)
        if each.stays:
            # whatever the user's globalTTL is
            lines.append("    ttl: 0")
    return lines
