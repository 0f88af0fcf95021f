"""``fitter gguf-parser``: what gguf-parser answers, with its options, measured by llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from fitter.cli import answers, options
from fitter.cli.command_help import HelpCommand
from fitter.errors import EXIT_FITS, UsageError
from fitter.parameters.table import PARAMETERS
from fitter.storage.data_files import read_data

_NAMES: dict[str, Any] = read_data(__file__)

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
    """Declare the options of gguf_parser.toml."""
    left = _NAMES["left"]
    found = [_theirs(each["keyword"], each["names"], multiple="repeated" in each) for each in _NAMES["measured"]]
    found += [_theirs(f"{role}_{way}", names) for role, ways in _NAMES["files"].items() for way, names in ways.items()]
    found += [_their_flag(name, names) for name, names in _NAMES["flags"].items()]
    found += [_theirs(f"left_{number}", [name]) for number, name in enumerate(left["one_word"])]
    return found + [_their_flag(f"left_flag_{number}", [name]) for number, name in enumerate(left["flags"])]


@click.command("gguf-parser", cls=HelpCommand, epilog=_EPILOG)
@options.stacked(*_declared())
@_theirs("step", ["--gpu-layers-step"], type=click.IntRange(0))
@_theirs("platform_footprint", ["--platform-footprint"])
@_theirs("rpc", ["--rpc"])
@options.parameter("gpus", help="The cards to plan for. [default: a CUDA card for each share of --tensor-split]")
@options.llama_cpp_option
@options.timeout_option
def gguf_parser(as_json: bool | None, in_mib: bool | None, **given: Any) -> int:
    """Answer as gguf-parser, which GPUStack and others ask how much memory a model takes.

    All options are gguf-parser's but those below. Each row is one dummy load of llama.cpp. Nothing is asked of the
    servers of --rpc, which count as CUDA cards. Of the document the estimate and the name of the architecture are
    printed; fitter inspect shows metadata and tensors.
    """
    from fitter.api.offload_table import offload_table
    from fitter.output.documents import gguf_parser_document as output

    remote = [server for server in (given["rpc"] or "").split(",") if server]
    footprint = output.footprint(given["platform_footprint"])
    keywords = _keywords(given, len(remote))
    with answers.asking(-1):
        table = offload_table(**keywords)
    is_mapped = bool(given["mmap"]) and not given["no_mmap"]
    wanted = {"architecture": not given["skip_architecture"], "estimate": not given["skip_estimate"]}
    document = output.document(table, footprint, n_remote=len(remote), is_mapped=is_mapped)
    if as_json:
        answers.print_json({key: document[key] for key, is_wanted in wanted.items() if is_wanted})
    else:
        answers.print_table(output.table(document, in_mib=bool(in_mib)))
    return EXIT_FITS


def _keywords(given: Mapping[str, Any], n_remote: int) -> dict[str, Any]:
    """Translate the options into keywords of ``offload_table``."""
    files = {role: _file(given, role) for role in _NAMES["files"]}
    if files["model"] is None:
        raise UsageError("no model is named: give --path, --url, or --hf-repo with --hf-file")
    words = {}
    for each in _NAMES["measured"]:
        if (text := given[each["keyword"]]) not in (None, (), "-1"):
            words[each["keyword"]] = _value(each["keyword"], each["names"][0], text)
    shares = words.get("tensor_split") or [1.0]
    if n_remote and len(shares) <= n_remote:
        shares = words["tensor_split"] = [1.0] * (n_remote + 1)
    if given["flash_attention"] or given["no_flash_attention"]:
        words["flash_attn"] = "off" if given["no_flash_attention"] else "on"
    if given["no_kv_offload"]:
        words["offload_kqv"] = False
    others = {
        "program": "llama-server",
        "n_seq_max": 1,
        "swa_full": given["swa_full"],
        "load_mode": "mmap" if given["mmap"] and not given["no_mmap"] else "none",
        "is_n_ctx_limited": given["in_max_ctx_size"],
        "gpus": given["gpus"] or ["9999GiB"] * len(shares),
        **{name: given[name] for name in ("llama_cpp", "timeout", "step")},
    }
    return options.given({**others, **words, **files})


def _value(keyword: str, option: str, text: str | tuple[str, ...]) -> Any:
    """Parse the text of an option as the option of fitter's that has this keyword."""
    if isinstance(text, tuple):
        return text
    try:
        return PARAMETERS[keyword].kind.parse(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _file(given: Mapping[str, Any], role: str) -> str | None:
    """Return the path or address of a file that several options may name."""

    def of(way: str) -> str | None:
        return given.get(f"{role}_{way}")

    # the projector is in the model's repository
    for hub in ("hf", "ms"):
        repository = of(f"{hub}_repo") or given.get(f"model_{hub}_repo")
        if name := of(f"{hub}_file"):
            if repository is None:
                raise UsageError(f"--{hub}-file is given without --{hub}-repo: name the repository")
            return f"{hub}://{repository}/{name}"
    return of("path") or of("url")
