"""llama.cpp's options that are no parameters of fitter: each is passed on, translated, ignored or refused.

``llama_options.toml`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import click

from fitter.cli import options
from fitter.cli.typed_words import words_after
from fitter.storage import read_data

_META = "fitter.llama_options"

_REFUSALS = {
    "memory": "changes what llama.cpp allocates, and fitter cannot plan for it: leave it out",
    "model": "makes llama.cpp download a model: give it as MODEL (a file, or hf://org/repo/file.gguf)",
    "removed": "was removed from llama.cpp: leave it out",
    "other": "belongs to another llama.cpp program, but the plan is for llama-server: leave it out",
}


@dataclass(frozen=True)
class LlamaOption:
    """An option of llama.cpp.

    Attributes:
        names: All its names.
        values: Number of words that follow it.
        use: The table of ``llama_options.toml`` that lists it.
        instead: The option to use in its place.
        same: fitter's own options for some of its values.
        beside: The option to use in its place after certain other ones.
    """

    names: tuple[str, ...]
    values: int
    use: str
    instead: str = ""
    same: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Used:
    """llama.cpp's own options on a command line.

    Attributes:
        passed: Words to pass on to llama.cpp.
        names: The options among those words.
        ignored: Options without effect on a plan.
    """

    passed: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


class Command(options.Command):
    """A command that accepts all options of llama-server."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remove llama.cpp's options from ``args``, and parse the rest."""
        try:
            # completion accepts options that a run refuses
            rest, ctx.meta[_META] = split(args, words_after(self, ctx), refuses=not ctx.resilient_parsing)
        except click.UsageError as error:
            if ctx.resilient_parsing:
                return super().parse_args(ctx, args)
            error.ctx = ctx
            raise
        return super().parse_args(ctx, rest)


def used() -> Used:
    """Return llama.cpp's own options on the current command line."""
    used_options: Used = click.get_current_context().meta.get(_META, Used())
    return used_options


def report_ignored(names: Sequence[str], why: str = "they have no effect on a plan") -> None:
    """Name ignored options in one line on stderr."""
    if names:
        click.echo(f"fitter: ignored options: {', '.join(dict.fromkeys(names))} ({why})", err=True)


@cache
def all_options() -> dict[str, LlamaOption]:
    """Read ``llama_options.toml``; return every option by each of its names."""
    document = read_data(__file__)
    every = [
        LlamaOption(tuple(row.pop("names")), row.pop("values"), use, **row)
        for use, rows in document.items()
        for row in rows
    ]
    return {name: option for option in every for name in option.names}


def split(words: Sequence[str], fitter_options: dict[str, int], *, refuses: bool = True) -> tuple[list[str], Used]:
    """Separate llama.cpp's options from fitter's. Underscores in long options become dashes, as in llama.cpp.

    Args:
        words: The command line.
        fitter_options: fitter's options, each with the number of words that follow it.
        refuses: Whether to refuse options that fitter cannot plan for.

    Returns:
        The words without llama.cpp's options, and those options.

    Raises:
        click.UsageError: An option is refused, or its value is missing.
    """
    rest: list[str] = []
    passed: list[str] = []
    names: list[str] = []
    ignored: list[str] = []
    renamed: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*rest, word, *left], Used(tuple(passed), tuple(names), tuple(ignored))
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if not word.startswith("-") or word == "-":
            rest.append(word)
        elif name in fitter_options:
            rest.append(name + equals + value)
            if not equals:
                rest += left[: fitter_options[name]]
                del left[: fitter_options[name]]
        elif (option := all_options().get(name)) is None:
            rest.append(word)
        else:
            values = _values(option, name, [value] if equals else None, left)
            if values and values[0] in option.same:
                rest += option.same[values[0]].split()
                continue
            if option.use == "hub":
                rest += _on_hub(name, values[0], fitter_options)
                continue
            if refuses:
                _check(option, name)
            instead: list[str] = []
            if option.use == "renamed":
                before = next((other for other in reversed(renamed) if other in option.beside), None)
                instead = (option.instead if before is None else option.beside[before]).split()
                renamed.append(name)
            if instead and instead[0] in fitter_options:
                rest += instead
            elif option.use == "ignored":
                ignored.append(name)
            else:
                names.append(name)
                passed += instead or [name, *values]
    return rest, Used(tuple(passed), tuple(names), tuple(ignored))


def _values(option: LlamaOption, name: str, given: list[str] | None, left: list[str]) -> list[str]:
    """Return the value after the equals sign, or take the first words of ``left``."""
    if given is None:
        given = left[: option.values]
        del left[: option.values]
    if len(given) < option.values:
        what = f"{option.values} arguments" if option.values > 1 else "an argument"
        raise click.BadOptionUsage(name, f"Option '{name}' requires {what}.")
    if len(given) > option.values:
        raise click.BadOptionUsage(name, f"Option '{name}' does not take a value.")
    return given


def _on_hub(name: str, value: str, fitter_options: Mapping[str, int]) -> list[str]:
    """Write ``ORG/REPO[:TYPE]`` as an address, and the type as an option."""
    repository, colon, file_type = value.partition(":")
    if colon and "--type" not in fitter_options:
        raise click.UsageError(f"{name} {value}: this command takes a file: write hf://{repository}/FILE.gguf")
    return [f"hf://{repository}", *(["--type", file_type] if colon else [])]


def _check(option: LlamaOption, name: str) -> None:
    if option.use in _REFUSALS:
        remedy = f", or use {option.instead}" if option.instead else ""
        raise click.UsageError(f"{name} {_REFUSALS[option.use]}{remedy}")
