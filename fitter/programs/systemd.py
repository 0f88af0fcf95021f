"""Write a fleet as units of systemd: a model that is started stops those that it does not fit together with.

The quoting is that of systemd.syntax(7), and of command lines in systemd.service(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from fitter.output.arguments import check_line, with_absolute_paths
from fitter.output.formats import MOST_SAID, distinct, file_name
from fitter.planning.fleet.fleet import Fleet, FleetModel
from fitter.programs.compose import PORT

_SMALL_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def systemd_fleet(fleet: Fleet) -> str:
    """Write the units one after the other, each after a comment with its file's name.

    Raises :class:`PlanError` for a value that cannot be on one line, and for two names that would be the same.
    """
    # a model's name alone could be that of a service which the system has, such as dbus
    names = distinct(fleet, lambda name: f"llama-{file_name(name)}")
    lines = [f"# {line}" for line in _comments(fleet, names)]
    for index, each in enumerate(fleet.models):
        lines += ["", f"# {names[each.name]}.service", *_unit(fleet, each, index, names)]
    return "\n".join(lines)


def _comments(fleet: Fleet, names: Mapping[str, str]) -> Iterator[str]:
    first = next((each for each in fleet.models if each.is_resident), fleet.models[0])
    verb = "enable --now" if first.is_resident else "start"
    yield "Save each unit in ~/.config/systemd/user, in a file with the name above it, and then:"
    yield "systemctl --user daemon-reload"
    yield f"systemctl --user {verb} {names[first.name]}.service"
    yield "llama-server is looked for in /usr/local/bin and /usr/bin: write its path if it is elsewhere."
    if any(_conflicts(fleet, each) for each in fleet.models):
        yield "A model that is started stops those that it does not fit together with."
    unsaid = _unsaid(fleet)
    for each in unsaid[:MOST_SAID]:
        fewer = _SMALL_WORDS[len(each) - 2]
        yield (
            f"{_listed([names[name] for name in each])} do not fit together, although any {fewer} of them do: "
            "systemd stops none of them, so stop one yourself."
        )
    if len(unsaid) > MOST_SAID:
        yield f"{len(unsaid) - MOST_SAID} more such groups are not listed: 'fitter fleet' lists what fits together."


def _unit(fleet: Fleet, model: FleetModel, index: int, names: Mapping[str, str]) -> Iterator[str]:
    # systemd replaces a % with something; a backslash at the end would join the next line
    yield from ("[Unit]", f"Description={model.name.replace('%', '%%')} with llama-server")
    if conflicts := _conflicts(fleet, model):
        yield f"Conflicts={_units(conflicts, names)}"
        # in this order the other one has ended before this one starts; one of the two is enough
        if before := [each.name for each in fleet.models[:index] if each.name in conflicts]:
            yield f"After={_units(before, names)}"
    options = [each.words for each in with_absolute_paths(model.plan)]
    words = [word for each in options for word in each]
    check_line(words)
    command = ["llama-server", *words, "--port", str(PORT + index)]
    yield from ("", "[Service]", "Type=exec", f"ExecStart={' '.join(map(_quoted, command))}", "Restart=on-failure")
    if model.is_resident:
        yield from ("", "[Install]", "WantedBy=default.target")


def _units(models: Sequence[str], names: Mapping[str, str]) -> str:
    return " ".join(f"{names[name]}.service" for name in models)


def _conflicts(fleet: Fleet, model: FleetModel) -> list[str]:
    """List the models that are in no set with ``model``."""
    together = {name for each in fleet.sets if model.name in each.models for name in each.models}
    return [each.name for each in fleet.models if each.name not in together]


def _unsaid(fleet: Fleet) -> list[tuple[str, ...]]:
    """List the smallest sets of three or more models that do not fit together, although with any one less they do."""
    sets = [frozenset(each.models) for each in fleet.sets]
    missing: list[tuple[str, ...]] = []
    smallest: list[frozenset[str]] = []
    for size in range(2, len(fleet.models) + 1):
        for names in combinations([each.name for each in fleet.models], size):
            models = frozenset(names)
            if any(each <= models for each in smallest) or any(models <= each for each in sets):
                continue
            smallest.append(models)
            if size > 2:
                missing.append(names)
    return missing


def _quoted(word: str) -> str:
    """Quote a word of a command line."""
    word = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w@%$+=:,./-]+", word, re.ASCII):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _listed(words: Sequence[str]) -> str:
    """Join words for a sentence: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
