"""Write a fleet as a config.yaml of llama-swap with groups, which its versions without a matrix have."""

from __future__ import annotations

from collections import Counter

from fitter.output.formats.fleets.groups import Group, choose_groups, largest_together
from fitter.output.formats.fleets.llama_swap import models
from fitter.output.formats.fleets.names import MOST_SAID
from fitter.output.formats.llama_swap import scalar
from fitter.planning.fleet.fleet import Fleet


def text(fleet: Fleet) -> str:
    """Write the models, what is loaded at the start, and the groups.

    Raises :class:`PlanError` for a name or a value that llama-swap would change.
    """
    lines, count = models(fleet), Counter[str]()
    groups = choose_groups(fleet)
    together = set(largest_together(groups))
    if unsaid := [each.models for each in fleet.sets if frozenset(each.models) not in together]:
        lines.append("# groups cannot keep these sets, which fit, in memory: a newer llama-swap has a matrix for them")
        lines += [f"#   {', '.join(map(scalar, each))}" for each in unsaid[:MOST_SAID]]
        if len(unsaid) > MOST_SAID:
            lines.append(f"#   and {len(unsaid) - MOST_SAID} more: 'fitter fleet' lists what fits together")
    lines.append("groups:")
    for group in groups:
        count[group.kind] += 1
        lines += _lines(f"{group.kind}{count[group.kind]}", group)
    return "\n".join(lines)


def _lines(name: str, group: Group) -> list[str]:
    settings = {"swap": group.swap, "exclusive": group.exclusive, "persistent": not group.exclusive}
    return [
        f"  {name}:",
        *(f"    {key}: {'true' if value else 'false'}" for key, value in settings.items()),
        "    members:",
        *(f"      - {scalar(each)}" for each in group.members),
    ]
