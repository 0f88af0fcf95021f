"""``fitter gguf-parser``: what gguf-parser answers, with its options, measured by llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from fitter.cli import answers, options
from fitter.cli.group import HelpCommand
from fitter.errors import EXIT_FITS
from fitter.programs.gguf_parser import OPTIONS, document, footprint, headers, keywords, table

_EPILOG = """\
Examples:
  fitter gguf-parser -m model.gguf --ctx-size 8192 --json
  fitter gguf-parser --hf-repo org/repo --hf-file model.gguf --gpu-layers-step 1 --json

GPUStack runs it in place of gguf-parser where this is its gguf-parser program:
  #!/bin/sh
  exec fitter gguf-parser "$@"
"""


def _theirs(name: str, names: list[str], **settings: Any) -> Callable[[Any], Any]:
    """Declare an option of gguf-parser, which its own help describes."""
    return click.option(name, *names, default=None, hidden=True, **settings)


def _their_flag(name: str, names: list[str]) -> Callable[[Any], Any]:
    # as in Go, a value may follow after "="
    return _theirs(name, names, type=bool, is_flag=False, flag_value=True)


def _declared() -> list[Callable[[Any], Any]]:
    """Declare the options of gguf-parser."""
    left, several = OPTIONS["left"], OPTIONS["several"]
    found = [_theirs(each["keyword"], each["names"], multiple="repeated" in each) for each in OPTIONS["measured"]]
    found += [_theirs(f"{role}_{way}", names) for role, ways in OPTIONS["files"].items() for way, names in ways.items()]
    for scheme, each in OPTIONS["tokens"].items():
        found.append(_theirs(f"{scheme}_token", each["names"], envvar=each.get("variable")))
    found += [_theirs(name, names, multiple=True) for name, names in several.items()]
    found += [_their_flag(name, names) for name, names in OPTIONS["flags"].items()]
    found += [_theirs(f"left_{number}", [name]) for number, name in enumerate(left["one_word"])]
    return found + [_their_flag(f"left_flag_{number}", [name]) for number, name in enumerate(left["flags"])]


@click.command("gguf-parser", cls=HelpCommand, epilog=_EPILOG)
@options.stacked(*_declared())
@_theirs("step", ["--gpu-layers-step"], type=click.IntRange(0))
@_theirs("platform_footprint", ["--platform-footprint"])
@_theirs("rpc", ["--rpc"])
@_theirs("ollama_model", ["--ol-model"])
@options.parameter(
    "gpus", help="The cards to plan for; one stands for each share of --tensor-split. [default: CUDA cards]"
)
@options.llama_cpp_option
@options.timeout_option
def gguf_parser(as_json: bool | None, in_mib: bool | None, **given: Any) -> int:
    """Answer as gguf-parser, which GPUStack and others ask how much memory a model takes.

    All options are gguf-parser's but those below. Each row is one dummy load of llama.cpp. Nothing is asked of the
    servers of --rpc, which count as CUDA cards. Of the document the estimate and the name of the architecture are
    printed; fitter inspect shows metadata and tensors.
    """
    from fitter.api.gpu_layers import offload_table
    from fitter.model.files.http_ranges import sending

    platform = footprint(given["platform_footprint"])
    words = keywords(given, lambda text: click.echo(f"fitter: warning: {text}", err=True))
    with answers.asking(-1), sending(headers(given, words)):
        rows = offload_table(**words)
    answer = document(rows, platform, n_remote=words["n_remote"], is_mapped=words["load_mode"] == "mmap")
    wanted = {"architecture": not given["skip_architecture"], "estimate": not given["skip_estimate"]}
    if as_json:
        answers.print_json({key: answer[key] for key, is_wanted in wanted.items() if is_wanted})
    else:
        answers.print_table(table(answer, in_mib=bool(in_mib)))
    return EXIT_FITS
