"""Words of a command line that are none of a command's options, and what was likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise

import click


def words_after(command: click.Command, ctx: click.Context) -> dict[str, int]:
    """Count the words that follow each option of ``command``, by each of the option's names."""
    return {
        name: 0 if param.is_flag or param.count else param.nargs
        for param in command.get_params(ctx)
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


def similar_option(command: click.Command, ctx: click.Context, name: str) -> str | None:
    """Find the option that was likely meant: of that beginning, of that name in Python, or spelt almost so."""
    if not name.startswith("--"):
        return None
    options: dict[str, str] = {}
    for param in command.get_params(ctx):
        if isinstance(param, click.Option) and (long := [word for word in param.opts if word.startswith("--")]):
            in_python = "--" + (param.name or "").replace("_", "-")
            options |= {in_python: long[0], **{word: word for word in (*long, *param.secondary_opts)}}
    longer = [word for word in options if word.startswith(name)]
    close = sorted(longer, key=len) or difflib.get_close_matches(name, options, n=1, cutoff=0.8)
    return options[close[0]] if close else None


_ON_HUB = ("-hf", "-hfr", "--hf-repo")
"""llama.cpp's options for a repository of Hugging Face's hub."""


def check_model_option(command: click.Command, ctx: click.Context, words: Sequence[str]) -> None:
    """Raise ``click.UsageError`` for ``-hf``, and for ``-mx``, which click would read as ``-m x`` unlike llama.cpp."""
    options = words_after(command, ctx)
    for before, word in pairwise(("", *words)):
        if word == "--":
            return
        if (name := word.partition("=")[0]) in _ON_HUB and not options.get(before):
            raise click.UsageError(
                f"{name} is an option of fit: name the model by its address, hf://org/repo/FILE.gguf", ctx
            )
        if (
            word.startswith("-m")
            and len(word) > 2
            and word.partition("=")[0] not in options
            and not options.get(before)
        ):
            raise click.NoSuchOption(word, ctx=ctx)
