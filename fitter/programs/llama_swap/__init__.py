"""Write a plan as a model of llama-swap, which starts llama-server for the model that a request names, or a fleet.

The syntax is that of its ``config-schema.json``, and of the commands in its ``internal/config``. Of the sets of a
matrix with the model that is asked for, llama-swap takes the first one whose evictions cost least
(``internal/matrix``). It sorts the sets by their names when it replaces macros (``internal/config/macros.go``), so the
names are in the order of the sets.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter

from fitter.errors import PlanError
from fitter.output.arguments import check_line, with_absolute_paths
from fitter.output.formats import MOST_SAID
from fitter.planning.fleet.fleet import Fleet
from fitter.planning.plan.plan import Plan
from fitter.programs.llama_server.text import section
from fitter.programs.llama_swap.groups import SwapGroup, choose_groups, largest_together

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
