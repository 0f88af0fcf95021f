"""Why the models of a fleet do not fit, in one line each with what would help. Bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from fitter.api.fleets.fleet_candidates import ModelPlanner, context_of
from fitter.planning.fleet.assignment import assign
from fitter.planning.fleet.residency import Rules, Way
from fitter.text import mib_up


def beyond_its_budget(planner: ModelPlanner) -> str:
    """Say that a model fits, but not as quickly, with such a context or in so little memory as the user wants."""
    assert planner.alone is not None
    name, plan, case = planner.name, planner.alone.plan, planner.case
    price = plan.estimate
    if price and price.generation_tokens_per_second < case.generation_tokens_per_second:
        return (
            f"'{name}' makes {price.generation_tokens_per_second:.3g} tokens/s alone on this machine, and its budget "
            f"wants {case.generation_tokens_per_second:g}: lower that, or choose a smaller quantization"
        )
    if price and price.prompt_tokens_per_second < case.prompt_tokens_per_second:
        return (
            f"'{name}' reads {price.prompt_tokens_per_second:.4g} tokens/s of prompts alone on this machine, and its "
            f"budget wants {case.prompt_tokens_per_second:g}: lower that"
        )
    if (n_ctx := context_of(plan)) < case.n_ctx:
        return f"'{name}' has a context of {n_ctx} at most, and its budget wants {case.n_ctx}: lower that"
    return f"'{name}' takes more memory than its budget allows, however it is placed: raise the budget"


def why_not(rules: Rules, ways: Sequence[Sequence[Way]]) -> str:
    """Say which models cannot be in memory beside those that must stay, and what would help.

    Args:
        rules: The models and the room.
        ways: The ways of each model, of which each fits alone.
    """
    members = rules.members
    staying = [index for index, member in enumerate(members) if member.stays]
    for one in staying:
        for other in members:
            if other.name in members[one].never_with or members[one].name in other.never_with:
                name = members[one].name
                return f"'{name}' always stays in memory, but must never be with '{other.name}': let it be evicted"
    for count in range(1, len(staying) + 1):
        for group in combinations(staying, count):
            if lack := _lack(rules, ways, group):
                names = ", ".join(members[index].name for index in group)
                why = f"the models that always stay ({names}) do not fit together: {lack}"
                return why + _remedy(rules, ways, staying)
    names = ", ".join(members[index].name for index in staying)
    for index, member in enumerate(members):
        if index not in staying and (lack := _lack(rules, ways, (*staying, index))):
            beside = f" beside the models that always stay ({names})" if names else " within the margins"
            why = f"'{member.name}' does not fit{beside}: {lack}"
            return why + _remedy(rules, ways, staying)
    return "no way was found to run all models beside those that always stay: let one of them be evicted"


def _lack(rules: Rules, ways: Sequence[Sequence[Way]], group: Sequence[int]) -> str:
    """Say what a group lacks in the ways that need least; empty if it has a way to fit."""
    members = tuple(replace(rules.members[index], is_resident=True, share=1.0) for index in group)
    of_group = [ways[index] for index in group]
    if assign(Rules(members, rules.room), of_group):
        return ""
    least = [min(each, key=lambda way: sum(rules.room.row(way.needs))) for each in of_group]
    sums = {place: sum(way.needs.get(place, 0) for way in least) for place in rules.room.bytes}
    place, size = max(
        ((place, sums[place] - size) for place, size in rules.room.bytes.items()), key=lambda lack: lack[1]
    )
    return f"{place} lacks {mib_up(size)} MiB" if size > 0 else "no combination of their placements has room"


def _remedy(rules: Rules, ways: Sequence[Sequence[Way]], staying: Sequence[int]) -> str:
    for group in (*((index,) for index in staying), tuple(staying)):
        rest = tuple(
            replace(member, is_resident=False, may_be_evicted=True) if index in group else member
            for index, member in enumerate(rules.members)
        )
        if assign(Rules(rest, rules.room), ways):
            names = " and ".join(f"'{rules.members[index].name}'" for index in group)
            return f"; it fits if {names} may be evicted"
    return "; take smaller quantizations or contexts"
