"""``fitter gguf-parser``: what gguf-parser answers, with its options, measured by llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from fitter.cli import answers, options
from fitter.cli.command_help import HelpCommand
from fitter.errors import EXIT_FITS, UsageError
from fitter.machine.gpu import virtual_devices
from fitter.parameters.table import PARAMETERS
from fitter.parameters.values import parse_overrides
from fitter.storage.data_files import read_data

_NAMES: dict[str, Any] = read_data(__file__)

_CARD = "9999GiB"
"""A CUDA card on which everything fits."""

_DEVICE = re.compile(rf"(?:{'|'.join(_NAMES['devices'])})(?P<number>\d*)|RPC\d*\[(?P<server>.*)\]", re.ASCII)

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
    left, several = _NAMES["left"], _NAMES["several"]
    found = [_theirs(each["keyword"], each["names"], multiple="repeated" in each) for each in _NAMES["measured"]]
    found += [_theirs(f"{role}_{way}", names) for role, ways in _NAMES["files"].items() for way, names in ways.items()]
    for scheme, each in _NAMES["tokens"].items():
        found.append(_theirs(f"{scheme}_token", each["names"], envvar=each.get("variable")))
    found += [_theirs(name, names, multiple=True) for name, names in several.items()]
    found += [_their_flag(name, names) for name, names in _NAMES["flags"].items()]
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
    from fitter.api.offload_table import offload_table
    from fitter.model.files.http_ranges import sending
    from fitter.output.documents import gguf_parser_document as output

    if given["raw"]:
        raise UsageError("--raw prints the header of a file: use fitter inspect --json")
    if given["ollama_model"]:
        raise UsageError("--ol-model names no file: give the model's file with --path")
    remote = [server.strip() for server in (given["rpc"] or "").split(",") if server.strip()]
    footprint = output.footprint(given["platform_footprint"])
    keywords = _keywords(given, remote)
    with answers.asking(-1), sending(_headers(given, keywords)):
        table = offload_table(**keywords)
    document = output.document(table, footprint, n_remote=len(remote), is_mapped=keywords["load_mode"] == "mmap")
    wanted = {"architecture": not given["skip_architecture"], "estimate": not given["skip_estimate"]}
    if as_json:
        answers.print_json({key: document[key] for key, is_wanted in wanted.items() if is_wanted})
    else:
        answers.print_table(output.table(document, in_mib=bool(in_mib)))
    return EXIT_FITS


def _keywords(given: Mapping[str, Any], remote: Sequence[str]) -> dict[str, Any]:
    """Translate the options into keywords of ``offload_table``."""
    files = {role: _file(given, role) for role in _NAMES["files"]}
    if files["model"] is None:
        raise UsageError("no model is named: give --path, --url, or --hf-repo with --hf-file")
    words = {}
    for each in _NAMES["measured"]:
        if (text := given[each["keyword"]]) not in (None, (), "-1"):
            words[each["keyword"]] = _value(each["keyword"], each["names"][0], text)
    is_off = given["no_flash_attention"]
    is_on = given["flash_attention"] if is_off is None else not is_off
    if is_on is not None:
        words["flash_attn"] = "on" if is_on else "off"
    if given["no_kv_offload"]:
        words["offload_kqv"] = False
    lora = [*words.get("lora", ()), *_of_repository(given, "lora")]
    others = {
        "program": "llama-server",
        "n_seq_max": 1,
        "swa_full": given["swa_full"],
        "load_mode": "mmap" if (given["no_mmap"] is False if given["mmap"] is None else given["mmap"]) else "none",
        "is_n_ctx_limited": given["in_max_ctx_size"],
        "has_control_vectors": bool(given["control_vectors"]),
        **{name: given[name] for name in ("llama_cpp", "timeout", "step")},
    }
    return options.given({**others, **words, **files, "lora": lora or None, **_devices(given, words, remote)})


def _value(keyword: str, option: str, text: str | tuple[str, ...]) -> Any:
    """Parse the text of an option as the option of fitter's that has this keyword."""
    if isinstance(text, tuple):
        return text
    try:
        return PARAMETERS[keyword].kind.parse(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _devices(given: Mapping[str, Any], words: Mapping[str, Any], remote: Sequence[str]) -> dict[str, Any]:
    """Translate the options about devices into keywords: there is one for each share, the ``remote`` ones first."""
    shares, specs = words.get("tensor_split"), list(given["gpus"] or [_CARD])
    found = {"n_remote": len(remote), "main_gpu": words.get("main_gpu", 0), "split_mode": words.get("split_mode")}
    if shares is None:
        # gguf-parser has one device then, so its --main-gpu counts for nothing
        found["main_gpu"] = 0
        shares = [1.0] * (len(remote) + 1) if remote else None
    elif len(shares) < len(remote):
        raise UsageError(f"--rpc names {len(remote)} servers: give each of them a share in --tensor-split")
    elif found["main_gpu"] >= len(shares):
        raise UsageError(f"--main-gpu is {found['main_gpu']}: give the number of a share of --tensor-split, from 0 on")
    cards = virtual_devices(specs)
    if shares is not None and len(cards) == 1:
        specs *= len(shares)
        cards = virtual_devices(specs)
    elif shares is not None and len(cards) != len(shares):
        raise UsageError(
            f"--gpu names {len(cards)} cards, and --tensor-split {len(shares)}: name one for all, or one for each"
        )
    if found["split_mode"] == "row":
        _warn("llama.cpp's CUDA, ROCm, Vulkan and Metal do not split rows: --split-mode row is measured as layer")
    if found["split_mode"] == "row" or len(cards) < 2:
        found["split_mode"] = None
    overrides = parse_overrides(words.get("override_tensor", ()))
    names = [card.name for card in cards]
    types = {word: _buffer_type(word, names, remote) for word in dict.fromkeys(each.buffer_type for each in overrides)}
    texts = [f"{each.pattern}={types[each.buffer_type]}" for each in overrides]
    return {**found, "gpus": specs, "tensor_split": shares, "override_tensor": texts or None}


def _buffer_type(word: str, names: Sequence[str], remote: Sequence[str]) -> str:
    """Return the buffer type of the device that ``word`` names; the last device stands for one that is not there.

    GPUStack asks for one device first, whatever the overrides name.
    """
    match = _DEVICE.fullmatch(word)
    if match is None or not names:
        return word
    if match["server"] in remote:
        return names[remote.index(match["server"])]
    local = names[len(remote) :] or names
    number = int(match["number"] or 0)
    if match["server"] is None and number < len(local):
        return local[number]
    _warn(f"there is no {word}: what --override-tensor puts there counts on the last device")
    return names[-1]


def _warn(text: str) -> None:
    click.echo(f"fitter: warning: {text}", err=True)


def _headers(given: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """List the headers of requests for files, by the scheme of their addresses; those of ``""`` go with all of them.

    Raises ``UsageError`` for one that cannot be sent.
    """
    files = [keywords[role] for role in _NAMES["files"] if role in keywords] + keywords.get("lora", [])
    texts = [("", text) for text in given["headers"]]
    for scheme in dict.fromkeys(str(file).partition("://")[0].lower() for file in files):
        if token := given.get(f"{scheme.replace('https', 'http')}_token"):
            texts.append((scheme, f"Authorization: Bearer {token}"))
    found: dict[str, dict[str, str]] = {}
    for scheme, text in texts:
        name, colon, value = (part.strip() for part in text.partition(":"))
        # the value may be a secret
        if not colon or not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or not re.fullmatch(r"[ -~]*", value):
            raise UsageError("--header or a token cannot be sent: give a header as 'Name: value', in ASCII")
        found.setdefault(scheme, {})[name] = value
    return found


def _of_repository(given: Mapping[str, Any], role: str) -> list[str]:
    """List the addresses of files that are named below the model's repository of each hub."""
    found = []
    for hub in ("hf", "ms"):
        for name in given[f"{role}_{hub}_files"]:
            if (repository := given[f"model_{hub}_repo"]) is None:
                raise UsageError(f"--{hub}-{role}-file is given without --{hub}-repo: name the repository")
            found.append(f"{hub}://{repository}/{name}")
    return found


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
