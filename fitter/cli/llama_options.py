"""llama.cpp's options that are no parameters of fitter's: passed on, ignored by name, or refused.

``llama_options.toml`` lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from fitter.cli import options

_META = "fitter.llama_options"

_REFUSALS = {
    "memory": "changes what llama.cpp allocates, and fitter cannot plan for it: leave it out",
    "model": "chooses a model, and fitter takes a file: give it as MODEL, or with -m FILE",
    "removed": "is one that llama.cpp no longer has: leave it out",
    "other": "belongs to another tool of llama.cpp, and the plan is for llama-server: leave it out",
}


@dataclass(frozen=True)
class LlamaOption:
    """An option of llama.cpp's. ``values``: how many words follow it; ``use``: what is done with it."""

    names: tuple[str, ...]
    values: int
    use: str
    instead: str = ""


@dataclass(frozen=True)
class Found:
    """The words of a command line that are llama.cpp's alone.

    ``passed``: words to pass on, ``names``: the options among them, ``ignored``: the options that make no difference.
    """

    passed: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


class Command(options.Command):
    """A command that takes llama.cpp's other options as well: a llama-server command line works as it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take llama.cpp's options out of ``args``, and parse the rest."""
        try:
            # What is being typed is completed whatever it asks for.
            rest, ctx.meta[_META] = split(args, options.words_after(self, ctx), refuses=not ctx.resilient_parsing)
        except click.UsageError as error:
            if ctx.resilient_parsing:
                return super().parse_args(ctx, args)
            error.ctx = ctx
            raise
        return super().parse_args(ctx, rest)


def found() -> Found:
    """What the command line that runs has of llama.cpp's own options."""
    own: Found = click.get_current_context().meta.get(_META, Found())
    return own


def report_ignored(names: Sequence[str], why: str = "they make no difference here") -> None:
    """Say on one line of stderr which options were ignored."""
    if names:
        click.echo(f"fitter: ignored, since {why}: {', '.join(dict.fromkeys(names))}", err=True)


@cache
def known() -> dict[str, LlamaOption]:
    """Every option of ``llama_options.toml`` by each of its names."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    document = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    every = [
        LlamaOption(tuple(row["names"]), row["values"], use, row.get("instead", ""))
        for use, rows in document.items()
        for row in rows
    ]
    return {name: option for option in every for name in option.names}


def split(words: Sequence[str], own: dict[str, int], *, refuses: bool = True) -> tuple[list[str], Found]:
    """``words`` without llama.cpp's options, and those; ``own`` has fitter's options and how many words follow each.

    As in llama.cpp, underscores in a name of two dashes are dashes. Raises ``click.UsageError`` for an option without
    its value, and where it ``refuses`` also for one that changes the plan and that fitter does not have.
    """
    rest: list[str] = []
    passed: list[str] = []
    names: list[str] = []
    ignored: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*rest, word, *left], Found(tuple(passed), tuple(names), tuple(ignored))
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if not word.startswith("-") or word == "-":
            rest.append(word)
        elif name in own:
            rest.append(name + equals + value)
            if not equals:
                rest += left[: own[name]]
                del left[: own[name]]
        elif (option := known().get(name)) is None:
            rest.append(word)
        else:
            values = _values(option, name, [value] if equals else None, left)
            if refuses:
                _check(option, name)
            if option.use == "ignored":
                ignored.append(name)
            else:
                names.append(name)
                passed += option.instead.split() if option.use == "renamed" else [name, *values]
    return rest, Found(tuple(passed), tuple(names), tuple(ignored))


def _values(option: LlamaOption, name: str, given: list[str] | None, left: list[str]) -> list[str]:
    """The words that belong to an option, taken from ``left`` unless they came with it."""
    if given is None:
        given = left[: option.values]
        del left[: option.values]
    if len(given) < option.values:
        what = f"{option.values} arguments" if option.values > 1 else "an argument"
        raise click.BadOptionUsage(name, f"Option '{name}' requires {what}.")
    if len(given) > option.values:
        raise click.BadOptionUsage(name, f"Option '{name}' does not take a value.")
    return given


def _check(option: LlamaOption, name: str) -> None:
    if option.use in _REFUSALS:
        way_out = f", or take {option.instead}" if option.instead else ""
        raise click.UsageError(f"{name} {_REFUSALS[option.use]}{way_out}")
