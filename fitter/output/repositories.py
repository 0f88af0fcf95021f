"""The models of a repository: the table of ``fitter hf://org/repo``, and its JSON. Nothing is decided here."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.output.arguments import arguments, command_line
from fitter.output.json import SCHEMA, figure
from fitter.output.narrow import NarrowTable
from fitter.output.units import human, mib, speed
from fitter.text import printable

if TYPE_CHECKING:
    from fitter.planning.repositories import Repository, RepositoryFile

_BEST = "bold green"
_PLURAL = {"importance matrix": "importance matrices"}


def to_dict(found: Repository) -> dict[str, Any]:
    """The document of ``fitter hf://org/repo --json``; a figure is ``null`` where it is not known."""
    return {
        "schema": SCHEMA,
        "fits": found.fits,
        "repository": found.address,
        "best": None if found.best is None else found.best.name,
        "download": _words(found.download),
        "run": _words(found.run),
        "hf": _words(found.hf),
        "files": [_file(each) for each in found.found],
        "beside": [{"name": each.name, "kind": each.kind, "bytes": each.bytes} for each in found.beside],
    }


def _words(command: tuple[str, ...] | None) -> list[str] | None:
    return None if command is None else list(command)


def _file(each: RepositoryFile) -> dict[str, Any]:
    plan = each.plan
    return {
        "name": each.name,
        "files": list(each.files),
        "bytes": each.bytes,
        "file_type": each.file_type,
        "weights": each.weights,
        "bits_per_weight": figure(each.bits_per_weight),
        "fits": None if plan is None else plan.fits,
        "n_ctx": each.n_ctx,
        "longest_context": each.longest_context,
        "host_weights": each.host_weights,
        "on_devices": None if plan is None else each.is_on_devices,
        "prompt_tokens_per_second": figure(each.prompt_tokens_per_second),
        "generation_tokens_per_second": figure(each.generation_tokens_per_second),
        "arguments": arguments(plan) if plan is not None and plan.fits else None,
        "problem": each.problem or (plan.problems[0].message if plan is not None and plan.problems else None),
    }


def repository_table(found: Repository, *, verbose: bool = False) -> RenderableType:
    """A row for each model, and what is said of them; ``verbose``: also the arguments of each plan."""
    table = NarrowTable(spare=("bits", "context", "host MiB", "prompt t/s", "MiB"))
    table.add_column("file", overflow="fold")
    for column in ("MiB", "bits", "fits", "context", "longest", "host MiB", "prompt t/s", "t/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold", style="dim")
    for each in found.found:
        table.add_row(*_row(each, is_best=each is found.best))
    parts: list[RenderableType] = [Text(printable(found.address), "bold", overflow="fold"), table]
    parts += [Text(line, overflow="fold") for line in _below(found, verbose)]
    return Group(*parts)


def _row(each: RepositoryFile, *, is_best: bool) -> tuple[str | Text, ...]:
    style = _BEST if is_best else ""
    bits = "-" if each.bits_per_weight is None else f"{each.bits_per_weight:.2f}"
    fits = "unknown" if each.plan is None else "yes" if each.fits else "no"
    contexts = ("-" if count is None else str(count) for count in (each.n_ctx, each.longest_context))
    rates = (
        "-" if rate is None else speed(rate)
        for rate in (each.prompt_tokens_per_second, each.generation_tokens_per_second)
    )
    host = mib(each.host_weights if each.fits else None)
    cells = (printable(each.name), mib(each.bytes), bits, fits, *contexts, host, *rates)
    notes = ["best"] if is_best else []
    notes += [f"{len(each.files)} files"] if len(each.files) > 1 else []
    return (*(Text(cell, style=style) for cell in cells), ", ".join(notes))


def _below(found: Repository, verbose: bool) -> Iterator[str]:
    if verbose:
        for each in found.found:
            if each.plan is not None and each.fits:
                yield f"{printable(each.name)}: {printable(command_line(arguments(each.plan), quoted=True))}"
    for each in found.found:
        if each.problem:
            yield f"{printable(each.name)}: {printable(each.problem)}"
    yield from _beside(found, verbose)
    if any(each.n_ctx != each.longest_context for each in found.found):
        yield "context: of the plan, which is for speed; longest: the most that fits, whatever it costs in time"
    best = found.best
    if best is None or best.plan is None:
        yield from _none(found)
    elif found.n_devices and not best.is_on_devices and found.tokens_per_second is None:
        yield (
            "none fits with every layer on the devices, so the one with the most bits per weight is marked: "
            "--tokens-per-second N marks the one of them that generates as fast"
        )


def commands(found: Repository) -> tuple[str, ...]:
    """What to do with the best one, a line each that is not to be folded: it may be copied into a shell."""
    return tuple(map(printable, _commands(found)))


def _commands(found: Repository) -> Iterator[str]:
    best = found.best
    if best is None or best.plan is None:
        return
    yield f"best: {best.name}, {human(best.bytes)}"
    if found.download is not None:
        yield f"download: {shlex.join(found.download)}"
    if found.run is not None:
        yield f"run: {command_line(found.run, quoted=True)}"
        if found.hf is not None:
            yield f"run without downloading it first: {shlex.join(found.hf)} in place of -m and the file"
    else:
        yield f"arguments: {command_line(arguments(best.plan), quoted=True)}"


def _beside(found: Repository, verbose: bool) -> Iterator[str]:
    kinds = Counter(each.kind for each in found.beside)
    for kind, count in kinds.items():
        names = [each.name for each in found.beside if each.kind == kind]
        shown = names if verbose else names[:3]
        more = f" and {count - len(shown)} more" if count > len(shown) else ""
        word = kind if count == 1 else _PLURAL.get(kind, f"{kind}s")
        option = {"multimodal projector": " (--mmproj plans with one)"}.get(kind, "")
        yield f"not planned, {word}{option}: {printable(', '.join(shown))}{more}"


def _none(found: Repository) -> Iterator[str]:
    if found.fits and found.tokens_per_second is not None:
        rate = speed(found.tokens_per_second)
        yield f"none of them generates {rate} tokens per second: ask for fewer with --tokens-per-second"
        return
    planned = [(each.bytes, each.name, each.plan) for each in found.found if each.plan is not None]
    for _, name, plan in sorted(planned, key=lambda each: each[:2])[:1]:
        if plan.problems:
            yield f"none fits; {printable(name)}: {printable(plan.problems[0].message)}"


__all__ = ["commands", "repository_table", "to_dict"]
