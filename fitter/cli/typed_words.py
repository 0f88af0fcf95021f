"""Words of a command line: completed in a shell while somebody types, corrected where no option has such a name.

Completion asks nothing of llama.cpp. Its functions are a ``shell_complete`` of click each.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import click

from fitter.errors import FitterError

_BEFORE_GPU = re.compile(r"(?:.*[,+]\s*)?(?:[0-9]+\s*[x*]\s*)?", re.DOTALL | re.IGNORECASE)
"""The part of a text before the name of its last GPU."""


def _continued(incomplete: str, before: str, words: Iterable[str]) -> list[str]:
    """Return the words that begin as the rest of ``incomplete`` does, after the part that stays."""
    rest = incomplete[len(before) :].lower()
    return [before + word for word in words if word.lower().startswith(rest)]


def complete_gpus(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a GPU of the catalogue, also after a count, a ``+`` or a comma."""
    from fitter.machine import gpu_catalogue
    from fitter.machine.gpu import NO_GPU

    match = _BEFORE_GPU.match(incomplete)
    before = match[0] if match else ""
    return _continued(incomplete, before, (*gpu_catalogue.keys(), *(() if before else (NO_GPU,))))


def complete_shapes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a shape, or the file type after a colon."""
    from fitter.model.shapes import catalogue

    name, colon, _ = incomplete.partition(":")
    return (
        _continued(incomplete, f"{name}:", _file_types())
        if colon
        else _continued(incomplete, "", catalogue.shape_names())
    )


def complete_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the last of several file types."""
    return _continued(incomplete, incomplete[: incomplete.rfind(",") + 1], _file_types())


def complete_cases(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a case in the file of ``--cases``, also as the last word of an expression."""
    from fitter.regression.cases import CASES_FILE, read_cases

    with suppress(FitterError):
        names = [case.name for case in read_cases(Path(ctx.params.get("cases_file") or CASES_FILE))]
        return _continued(incomplete, incomplete[: max(map(incomplete.rfind, " (")) + 1], names)
    return []


def _file_types() -> tuple[str, ...]:
    from fitter.model.shapes.catalogue import FILE_TYPES

    return FILE_TYPES


def words_after(command: click.Command, ctx: click.Context) -> dict[str, int]:
    """Count the words that follow each option of ``command``, by each of the option's names."""
    return {
        name: 0 if param.is_flag or param.count else param.nargs
        for param in command.get_params(ctx)
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


_ELSEWHERE = {
    "-c": ("context", "context-length", "context-size", "max-context", "max-model-len", "num-ctx", "seq-len"),
    "-ctk": ("kv-type", "kv-cache-type", "kv-cache-dtype", "kv-quant"),
    "-np": ("slots", "max-num-seqs", "concurrency", "num-parallel"),
    "-ngl": ("gpu-layers", "num-gpu", "layers"),
    "--gpu": ("vram", "card", "cards", "gpu-memory", "device-memory"),
    "--host-memory": ("ram", "memory", "mem", "system-memory", "cpu-memory"),
    "--type": ("quant", "quantization", "quantisation", "file-type", "ftype"),
}
"""Options by the names that other programs and people have for them: vLLM, Ollama, LM Studio."""


def similar_option(command: click.Command, ctx: click.Context, name: str) -> str | None:
    """Find the option that was likely meant.

    By its name elsewhere (vLLM, Ollama) or in Python, with one dash for ``--ngl``, by its beginning, or its spelling.
    """
    if not name.startswith("--"):
        return None
    known, word = words_after(command, ctx), name.removeprefix("--").replace("_", "-").lower()
    meant = [option for option, names in _ELSEWHERE.items() if word in names] + [f"-{word}"]
    if option := next((each for each in meant if each in known), None):
        return option
    options: dict[str, str] = {}
    for param in command.get_params(ctx):
        if isinstance(param, click.Option) and (long := [word for word in param.opts if word.startswith("--")]):
            in_python = "--" + (param.name or "").replace("_", "-")
            options |= {in_python: long[0], **{word: word for word in (*long, *param.secondary_opts)}}
    longer = [word for word in options if word.startswith(name)]
    close = sorted(longer, key=len) or difflib.get_close_matches(name, options, n=1, cutoff=0.8)
    return options[close[0]] if close else None


def of_fit(command: click.Command, ctx: click.Context, name: str) -> str | None:
    """Say that an option is one of ``fit`` alone."""
    group = ctx.find_root().command
    fit = group.get_command(ctx, "fit") if isinstance(group, click.Group) else None
    is_of_fit = fit is not None and fit is not command and name in words_after(fit, ctx)
    return "'fitter fit' has it, this command has not" if is_of_fit else None


def with_meant_gpu(error: click.UsageError) -> click.UsageError:
    """Add ``--gpu`` to an error about a word too much that names a GPU."""
    from fitter.machine import gpu_catalogue

    extra = _EXTRA.fullmatch(error.message)
    if extra and gpu_catalogue.find_as_written(extra[1]):
        return click.UsageError(f"'{extra[1]}' is a GPU: write --gpu {shlex.quote(extra[1])}", error.ctx)
    return error


_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)\.?")
"""click's own words."""

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
