"""Write a plan as a model of llama-swap, which starts llama-server for the model that a request names, or a fleet.

The syntax is that of its ``config-schema.json``, and of the commands in its ``internal/config``. Of the sets of a
matrix with the model that is asked for, llama-swap takes the first one whose evictions cost least
(``internal/matrix``). It sorts the sets by their names when it replaces macros (``internal/config/macros.go``), so the
names are in the order of the sets.

Groups of older versions allow exactly the sets of models that fit together, or else a part of them
(``internal/router/group.go``): a model that is loaded unloads the others of its group if the group swaps, and the
models of all groups that are not persistent if its group is exclusive. A model of a group that is not exclusive unloads
nothing of other groups, so it is beside whatever was there. Two kinds of groups suffice: exclusive ones, of which one
is in memory, and persistent ones beside them. A model that is loaded before an exclusive group stays beside it in the
end, so exclusive groups that are persistent, and others that are neither, allow no other sets.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations, product
from math import prod

from fitter.errors import PlanError
from fitter.output.arguments import check_line, with_absolute_paths
from fitter.output.formats import MOST_SAID
from fitter.planning.fleet.fleet import Fleet
from fitter.planning.plan.plan import Plan
from fitter.programs.llama_server.text import section

_LOAD_SECONDS = 120
"""Seconds that llama-swap waits for a model if not told."""


def llama_swap_text(plan: Plan) -> str:
    """Write ``models`` of a config.yaml with one model, named as in a preset of llama-server.

    Raises :class:`PlanError` as ``_model``.
    """
    return "\n".join(["models:", *_model(section(plan.model.path), plan)])


def _model(name: str, plan: Plan) -> list[str]:
    """Write the lines of a model, below ``models``, with its ``name`` in requests.

    llama-swap puts a free port in place of ``${PORT}``, and sends requests there. Raises :class:`PlanError` if it would
    change the name or a value.
    """
    if "${" in name:
        raise PlanError(f"llama-swap would take '${{' in '{name}' for a macro: rename the model")
    options = [each.words for each in with_absolute_paths(plan)]
    for words in options:
        check_line(words)
        if macro := next((word for word in words if "${" in word), None):
            raise PlanError(f"llama-swap would take '${{' in '{macro}' for a macro: rename the file")
    lines = ["llama-server --port ${PORT}", *(" ".join(map(_quoted, words)) for words in options)]
    return [f"  {_scalar(name)}:", "    cmd: |", *(f"      {line}" for line in lines)]


def llama_swap_fleet(fleet: Fleet) -> str:
    """Write the models, what is loaded at the start, and the matrix.

    Raises :class:`PlanError` for a name or a value that llama-swap would change.
    """
    ids = {each.name: f"m{number}" for number, each in enumerate(fleet.models, 1)}
    width = len(str(len(fleet.sets)))
    sets = [" & ".join(ids[name] for name in each.models) for each in fleet.sets]
    return "\n".join(
        [
            *_models(fleet),
            "matrix:",
            "  vars:",
            *(f"    {ids[each.name]}: {_scalar(each.name)}" for each in fleet.models),
            "  evict_costs:",
            *(f"    {ids[each.name]}: {each.evict_cost}" for each in fleet.models),
            "  sets:",
            *(f'    s{number:0{width}}: "{each}"' for number, each in enumerate(sets, 1)),
        ]
    )


def _models(fleet: Fleet) -> list[str]:
    """Write everything of a config.yaml but the models that may be in memory together."""
    lines = ["# llama-swap --config config.yaml"]
    slowest = math.ceil(2 * max(each.load_seconds for each in fleet.models))
    if slowest > _LOAD_SECONDS:
        lines.append(f"healthCheckTimeout: {slowest}")
    if first := [each.name for each in fleet.models if each.is_resident]:
        lines += ["hooks:", "  on_startup:", "    preload:", *(f"      - {_scalar(name)}" for name in first)]
    lines.append("models:")
    for each in fleet.models:
        lines += _model(each.name, each.plan)
        if each.stays:
            # whatever the user's globalTTL is
            lines.append("    ttl: 0")
    return lines


def llama_swap_groups_fleet(fleet: Fleet) -> str:
    """Write the models, what is loaded at the start, and the groups.

    Raises :class:`PlanError` for a name or a value that llama-swap would change.
    """
    lines, count = _models(fleet), Counter[str]()
    groups = choose_groups(fleet)
    together = set(largest_together(groups))
    if unsaid := [each.models for each in fleet.sets if frozenset(each.models) not in together]:
        lines.append("# groups cannot keep these sets, which fit, in memory: a newer llama-swap has a matrix for them")
        lines += [f"#   {', '.join(map(_scalar, each))}" for each in unsaid[:MOST_SAID]]
        if len(unsaid) > MOST_SAID:
            lines.append(f"#   and {len(unsaid) - MOST_SAID} more: 'fitter fleet' lists what fits together")
    lines.append("groups:")
    for group in groups:
        count[group.kind] += 1
        lines += _group(f"{group.kind}{count[group.kind]}", group)
    return "\n".join(lines)


def _group(name: str, group: SwapGroup) -> list[str]:
    settings = {"swap": group.swap, "exclusive": group.exclusive, "persistent": not group.exclusive}
    return [
        f"  {name}:",
        *(f"    {key}: {'true' if value else 'false'}" for key, value in settings.items()),
        "    members:",
        *(f"      - {_scalar(each)}" for each in group.members),
    ]


def _scalar(word: str) -> str:
    """Quote a text without control characters for YAML."""
    return json.dumps(word, ensure_ascii=False)


def _quoted(word: str) -> str:
    """Quote a word of a command: if possible so that llama-swap reads it on Windows too, which has only ``"``."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return shlex.quote(word) if re.search(r'"|\\[\\$`]|\\$', word) else f'"{word}"'


_LEAST_GAIN = 1e-9
"""Seconds."""
_Models = frozenset[str]


@dataclass(frozen=True)
class SwapGroup:
    """A group of models."""

    members: tuple[str, ...]
    """Their names, in the order of the fleet."""
    swap: bool
    """Whether only one of them is in memory."""
    exclusive: bool
    """Whether it unloads other exclusive groups; a group that does not is persistent: no other group unloads it."""

    @property
    def kind(self) -> str:
        """Its kind in a word."""
        if self.exclusive:
            return "turns" if self.swap else "together"
        return "beside" if self.swap else "stay"

    @property
    def largest(self) -> list[_Models]:
        """The largest sets of its members that are in memory together."""
        return [frozenset({name}) for name in self.members] if self.swap else [frozenset(self.members)]


def largest_together(groups: Iterable[SwapGroup]) -> Iterator[_Models]:
    """Yield the largest sets of models that are in memory together at some time."""
    groups = list(groups)
    turns = [each for group in groups if group.exclusive for each in group.largest] or [frozenset[str]()]
    for parts in product(turns, *(group.largest for group in groups if not group.exclusive)):
        yield frozenset[str]().union(*parts)


def choose_groups(fleet: Fleet) -> tuple[SwapGroup, ...]:
    """Choose groups whose combinations are the sets of ``fleet``, or else a part of them with few seconds of loading.

    Models that every set has, among them those that stay, are in one group that keeps them all. Where no groups have
    all sets, the others begin as exclusive groups of one, and the change with the largest gain is made until none gains
    anything: two groups become one, or one group is beside all others.
    """
    choice = _Choice(fleet)
    return choice.exact() or choice.groups()


class _Choice:
    def __init__(self, fleet: Fleet) -> None:
        self._sets = [frozenset(each.models) for each in fleet.sets]
        self._share = {each.name: each.share for each in fleet.models}
        self._load = {each.name: each.load_seconds + each.lost_seconds for each in fleet.models}
        self._always = [each.name for each in fleet.models if all(each.name in one for one in self._sets)]
        self._order = list(self._share)
        self._fits = functools.cache(self._fits_together)

    def exact(self) -> tuple[SwapGroup, ...] | None:
        """Return the groups that allow exactly the sets, if there are such groups.

        Models that are never together must take turns. So the models that such pairs connect share their turns: parts
        of the sets, of which one is in memory, beside any turn of the models elsewhere. Models that are a turn together
        need an exclusive group, and exclusive groups all share their turns.
        """
        connected = self._connected()
        places = [{place & one for one in self._sets} for place in connected]
        is_disjoint = all(sum(map(len, turns)) == len(place) for place, turns in zip(connected, places, strict=True))
        if not is_disjoint or prod(map(len, places)) != len(self._sets):
            return None
        places.sort(key=lambda turns: max(map(len, turns)) > 1)
        if any(len(turn) > 1 for turns in places[:-1] for turn in turns):
            return None
        groups = [self._group(frozenset[str]().union(*turns), swap=True, exclusive=False) for turns in places[:-1]]
        turns = sorted(chain.from_iterable(places[-1:]), key=lambda turn: min(map(self._order.index, turn)))
        groups += [self._group(turn, swap=len(turn) == 1, exclusive=True) for turn in turns]
        return tuple(self._merged([*self._stay(), *groups]))

    def _connected(self) -> list[_Models]:
        """List the models that chains of pairs connect whose two models are in no set together."""
        left = [name for name in self._order if name not in self._always]
        found = []
        while left:
            place, waiting = {left[0]}, [left[0]]
            while waiting:
                one = waiting.pop()
                rivals = {other for other in left if other not in place and not self._fits(frozenset({one, other}))}
                place |= rivals
                waiting += rivals
            found.append(frozenset(place))
            left = [name for name in left if name not in place]
        return found

    def _stay(self) -> list[SwapGroup]:
        return [self._group(self._always, swap=False, exclusive=False)] if self._always else []

    def groups(self) -> tuple[SwapGroup, ...]:
        """Choose groups that allow only sets, with few seconds of loading."""
        stay = self._stay()
        others = [self._group([name], swap=True, exclusive=True) for name in self._order if name not in self._always]
        seconds = self._seconds(others)
        while True:
            better = [
                (self._seconds(changed), index, changed)
                for index, changed in enumerate(self._changes(others))
                if all(map(self._fits, largest_together([*stay, *changed])))
            ]
            least, _, changed = min(better, default=(seconds, 0, others))
            if least > seconds - _LEAST_GAIN:
                return tuple(self._merged([*stay, *others]))
            seconds, others = least, changed

    def _fits_together(self, models: _Models) -> bool:
        return any(models <= one for one in self._sets)

    def _group(self, names: Iterable[str], *, swap: bool, exclusive: bool) -> SwapGroup:
        return SwapGroup(tuple(sorted(names, key=self._order.index)), swap, exclusive)

    def _changes(self, groups: list[SwapGroup]) -> Iterator[list[SwapGroup]]:
        for chosen in (*combinations(groups, 1), *combinations(groups, 2)):
            names = [name for group in chosen for name in group.members]
            rest = [group for group in groups if group not in chosen]
            yield [*rest, self._group(names, swap=True, exclusive=False)]
            yield [*rest, self._group(names, swap=False, exclusive=True)]

    def _seconds(self, groups: list[SwapGroup]) -> float:
        """Return the seconds of loading before a request, on average over random requests."""
        return sum(
            share * self._load[name] * self._miss(name, group, groups)
            for group in groups
            for name in group.members
            if (share := self._share[name])
        )

    def _miss(self, name: str, group: SwapGroup, groups: list[SwapGroup]) -> float:
        """Return the share of a model's requests before which another model took its place."""
        rivals = set(group.members) - {name} if group.swap else set[str]()
        if group.exclusive:
            rivals |= {other for each in groups if each.exclusive and each != group for other in each.members}
        asked = sum(self._share[other] for other in rivals)
        return asked / (asked + self._share[name])

    def _merged(self, groups: list[SwapGroup]) -> Iterator[SwapGroup]:
        """Write groups that say the same as one: those that stay, and exclusive groups of one."""
        kept = [group for group in groups if not group.exclusive and (not group.swap or len(group.members) == 1)]
        turns = [group for group in groups if group.exclusive and (group.swap or len(group.members) == 1)]
        for same, swap in ((kept, False), (turns, True)):
            if same:
                names = [name for group in same for name in group.members]
                yield self._group(names, swap=swap, exclusive=swap)
        yield from (group for group in groups if group not in kept and group not in turns)
