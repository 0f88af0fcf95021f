"""Builds of llama.cpp as a table and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fitter.llama.build.virtual_backends import compared
from fitter.machine.gpu import PROFILES
from fitter.output.documents.document import SCHEMA
from fitter.text import printable

if TYPE_CHECKING:
    from fitter.llama.build.inspect_build import BuildReport
    from fitter.llama.build.virtual_backends import Compared
    from fitter.llama.types import LlamaCpp


def builds_to_dict(looks: Iterable[BuildReport]) -> dict[str, Any]:
    """Write the document of ``fitter llama-cpp``; a figure is ``null`` if the build does not tell it."""
    return {
        "schema": SCHEMA,
        "builds": [
            {
                **{name: None if value == "" else value for name, value in asdict(look).items()},
                "rules": {profile: rule and asdict(rule) for profile, rule in _rules(look).items()},
            }
            for look in looks
        ],
    }


def _rules(look: BuildReport) -> dict[str, Compared | None]:
    """Return the comparison of each profile's rules with a build."""
    return {profile: None if look.problem else compared(profile, look.ggml, look.commit) for profile in PROFILES}


def of_other_server(server: BuildReport, planned: LlamaCpp) -> str:
    """Say that a ``llama-server`` has another llama.cpp than the plan, and how to plan with it."""
    from fitter.llama.build.library import Versions

    its = Versions(server.version, server.ggml, server.commit)
    where = printable(shlex.quote(server.where))
    return (
        f"{where} is llama.cpp {its}, which may take other memory than {planned.version}: to plan with it, "
        f"add --llama-cpp {where}"
    )


def builds_table(looks: Iterable[BuildReport]) -> RenderableType:
    """Draw a row for each build, and below them why one cannot be used."""
    looks = tuple(looks)
    table = Table(box=None, pad_edge=False)
    table.add_column("llama.cpp", overflow="fold")
    for column in ("version", "ggml", "commit", "backends", "layout", "checked"):
        table.add_column(column, no_wrap=True)
    for look in looks:
        lists = " ".join(look.backends), look.layout, " ".join(look.checks)
        values = (look.version, look.ggml, look.commit, *lists)
        table.add_row(printable(look.where), *(printable(text) or "-" for text in values))
    if not looks:
        return Text(
            "There is no llama.cpp: pip install llama-cpp-python, or name a directory with libllama.so: fitter "
            "llama-cpp DIRECTORY"
        )
    parts: list[RenderableType] = [table, *(Text(printable(look.problem)) for look in looks if look.problem)]
    if usable := [look for look in looks if not look.problem]:
        rules = Table(box=None, pad_edge=False)
        rules.add_column("fitter's rules", overflow="fold")
        for profile in _rules(usable[0]):
            rules.add_column(profile, no_wrap=True)
        for look in usable:
            coverage = _rules(look).values()
            texts = (f"{each.equal} of {each.rows}" if each else "never compared" for each in coverage)
            rules.add_row(printable(look.where), *texts)
        parts += [Text(), rules, Text("loads of which fitter's rules and the build's own backend said the same bytes")]
    return Group(*parts)
