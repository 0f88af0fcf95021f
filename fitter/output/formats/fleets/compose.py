"""Write a fleet as a compose file with a service for each model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from fitter.output.formats.compose import PORT, service
from fitter.output.formats.fleets.names import distinct, file_name
from fitter.planning.fleet.fleet import Fleet


def text(fleet: Fleet) -> str:
    """Write the services, each with a port of its own.

    If not all models fit together, only those that are loaded at the start run without being asked for. The others have
    a profile each, and a comment lists the sets that fit together.

    Raises :class:`PlanError` if no image has a plan's devices, and for two names that would be the same.
    """
    names = distinct(fleet, _name)
    is_one_set = len(fleet.sets[0].models) == len(fleet.models)
    lines = [] if is_one_set else [f"# {line}" for line in _comments(fleet, names)]
    lines.append("services:")
    for number, each in enumerate(fleet.models):
        name = json.dumps(names[each.name])
        own = service(each.plan, PORT + number)
        if not is_one_set and not each.is_resident:
            own.append(f"profiles: [{name}]")
        lines += [f"  {name}:", *(f"    {line}" for line in own)]
    return "\n".join(lines)


def _name(name: str) -> str:
    """Name a service: its profile must have two characters at least."""
    safe = file_name(name)
    return safe if len(safe) > 1 else f"model-{safe}"


def _comments(fleet: Fleet, names: Mapping[str, str]) -> Iterator[str]:
    first = [names[each.name] for each in fleet.models if each.is_resident]
    if first:
        yield f"docker compose up -d starts {', '.join(first)}."
    yield "docker compose up -d NAME starts another model, and docker compose stop NAME ends one."
    if len(fleet.sets[0].models) == fleet.any_together:
        many = f"Any {fleet.any_together} of them fit together" if fleet.any_together > 1 else "One of them fits"
        yield f"Compose ends none by itself. {many}, and no more."
        return
    yield "Compose ends none by itself. These fit together:"
    for each in fleet.sets:
        yield f"  {', '.join(names[name] for name in each.models)}"
