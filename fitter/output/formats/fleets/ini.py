"""Write a fleet as a preset of llama-server, which starts a process for each model that a request names.

It unloads the least recently used model when it has as many as it may have, whichever these are
(``tools/server/server-models.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator

from fitter.output.formats.fleets.names import distinct
from fitter.output.formats.ini import model, safe_name
from fitter.planning.fleet.fleet import Fleet


def text(fleet: Fleet) -> str:
    """Write the command as a comment, and a section for each model.

    Raises :class:`PlanError` for a value that llama-server would not read completely, and for two names that would be
    the same.
    """
    names = distinct(fleet, safe_name)
    first = [each.name for each in fleet.models if each.is_resident][: fleet.any_together]
    lines = [*(f"# {line}" for line in _comments(fleet)), "version = 1"]
    for each in fleet.models:
        lines += ["", *model(names[each.name], each.plan)]
        if each.name in first:
            lines.append("load-on-startup = true")
    return "\n".join(lines)


def _comments(fleet: Fleet) -> Iterator[str]:
    most, count = fleet.any_together, len(fleet.models)
    yield f"llama-server --models-preset FILE --models-max {most}"
    if most >= count:
        yield "All models fit together."
        return
    if most == 1:
        yield "Some two of these models do not fit together, so it has only one in memory."
    else:
        yield f"Any {most} of these models fit together, but not any {most + 1}."
    yield "llama-server only counts them: it unloads the least recently used one before it loads one more."
    yield "It cannot be told which sets of models fit together, nor which model must stay."
    resident = sum(each.is_resident for each in fleet.models)
    if resident > most:
        yield f"It loads {most} of {resident} models at the start, because it may have no more."
