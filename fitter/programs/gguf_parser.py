"""Answer as gguf-parser: its call as one of ``fitter.api.gpu_layers``, and its document, which schedulers read. Bytes.

``uma`` is what llama.cpp takes; ``nonuma`` adds what a platform takes of the host and of each device. With the file
mapped, weights on the host count as nothing, since their pages can be given back. A plan becomes a document with one
row, without the memory of other processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table

from fitter.errors import UsageError
from fitter.machine.gpu import virtual_devices
from fitter.output.documents.document import dumps
from fitter.parameters.table import MAPPED, PARAMETERS
from fitter.parameters.values import parse_overrides
from fitter.planning.placing.placement import llama_placement
from fitter.planning.plan.plan import Plan
from fitter.planning.tables.parameter_rows import OffloadPlace, OffloadRow, OffloadTable, offload_row
from fitter.storage import read_data
from fitter.text import MIB, human, mib

OPTIONS = read_data(__file__)
"""Its options, and what each is."""


class Footprint(NamedTuple):
    """Bytes that a platform takes of the host and of each device."""

    host: int
    device: int


def footprint(text: str | None) -> Footprint:
    """Parse ``--platform-footprint``, MiB of the host and of a device. Raises ``UsageError``."""
    text = str(OPTIONS["platform_footprint"]) if text is None else text
    if not (match := re.fullmatch(r"(\d{1,7}),(\d{1,7})", text, re.ASCII)):
        raise UsageError(f"--platform-footprint is '{text}': give MiB of the host and of a device, such as 150,250")
    return Footprint(int(match[1]) * MIB, int(match[2]) * MIB)


def gguf_parser_text(plan: Plan) -> str:
    """Write the document of ``fitter gguf-parser`` for the placement of ``plan``."""
    params, names = plan.params, plan.breakdown.devices
    free = [device.free for device in plan.devices if device.name in names]
    placement = llama_placement(plan.n_layer + 1, params.n_gpu_layers, params.tensor_split, free)
    own = [row for use in plan.shared if not use.is_of_others for row in use.rows]
    table = OffloadTable(
        plan.model.architecture,
        plan.breakdown.n_ctx,
        bool(plan.breakdown.flash_attn),
        params.n_batch,
        params.n_ubatch,
        params.embeddings,
        False,
        (offload_row(placement, plan.breakdown.most, own),),
    )
    n_remote = sum(name.startswith("RPC") for name in names)
    is_mapped = params.of_parameter(PARAMETERS["load_mode"]) in MAPPED
    return dumps(document(table, footprint(None), n_remote=n_remote, is_mapped=is_mapped))


def document(table: OffloadTable, platform: Footprint, *, n_remote: int = 0, is_mapped: bool = False) -> dict[str, Any]:
    """Write the document of a ``table``.

    Args:
        table: The loads.
        platform: Bytes that the platform takes.
        n_remote: How many of the devices, the first ones, are rpc-servers.
        is_mapped: Whether the file is mapped.
    """
    return {
        "architecture": {"type": "model", "architecture": table.architecture},
        "estimate": {
            "items": [_item(row, platform, n_remote, is_mapped) for row in table.rows],
            "type": "model",
            "architecture": table.architecture,
            "contextSize": table.n_ctx,
            "flashAttention": table.flash_attn,
            "noMMap": not is_mapped,
            "embeddingOnly": table.embeddings,
            "reranking": table.ranks,
            "distributable": True,
            "logicalBatchSize": table.n_batch,
            "physicalBatchSize": table.n_ubatch,
        },
    }


def _item(row: OffloadRow, platform: Footprint, n_remote: int, is_mapped: bool) -> dict[str, Any]:
    host = row.host.bytes - (row.host.weights if is_mapped else 0)
    return {
        "offloadLayers": row.n_gpu_layers,
        "fullOffloaded": row.is_whole,
        "ram": _place(row.host, host, platform.host, False, 0),
        "vrams": [
            _place(each, each.bytes, platform.device, at < n_remote, at if at < n_remote else at - n_remote)
            for at, each in enumerate(row.devices)
        ],
    }


def _place(place: OffloadPlace, size: int, more: int, is_remote: bool, position: int) -> dict[str, Any]:
    return {
        "handleLayers": place.n_layers,
        "handleLastLayer": place.last_layer,
        "handleOutputLayer": place.has_output,
        "remote": is_remote,
        "position": position,
        "uma": size,
        "nonuma": size + more,
    }


def table(document: dict[str, Any], *, in_mib: bool = False) -> RenderableType:
    """Draw a row for each number of layers on devices."""
    items = document["estimate"]["items"]
    drawn = Table(box=None, pad_edge=False)
    names = [f"VRAM {number}" for number in range(len(items[0]["vrams"]))]
    for column in ("layers on GPUs", "all", "RAM", *names):
        drawn.add_column(column, justify="right", no_wrap=True)
    size = mib if in_mib else human
    for item in items:
        places = (str(size(place["nonuma"])) for place in (item["ram"], *item["vrams"]))
        drawn.add_row(str(item["offloadLayers"]), "yes" if item["fullOffloaded"] else "no", *places)
    return drawn


_CARD = "9999GiB"
"""A CUDA card on which everything fits."""

_DEVICE = re.compile(rf"(?:{'|'.join(OPTIONS['devices'])})(?P<number>\d*)|RPC\d*\[(?P<server>.*)\]", re.ASCII)


def keywords(given: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, Any]:
    """Translate the options into keywords of ``offload_table``; ``warn`` takes what counts otherwise than it says.

    Raises:
        UsageError: An option cannot be translated.
    """
    if given["raw"]:
        raise UsageError("--raw prints the header of a file: use fitter inspect --json")
    if given["ollama_model"]:
        raise UsageError("--ol-model names no file: give the model's file with --path")
    remote = [server.strip() for server in (given["rpc"] or "").split(",") if server.strip()]
    files = {role: _file(given, role) for role in OPTIONS["files"]}
    if files["model"] is None:
        raise UsageError("no model is named: give --path, --url, or --hf-repo with --hf-file")
    words = {}
    for each in OPTIONS["measured"]:
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
    found = {**others, **words, **files, "lora": lora or None, **_devices(given, words, remote, warn)}
    return {name: value for name, value in found.items() if value is not None}


def _value(keyword: str, option: str, text: str | tuple[str, ...]) -> Any:
    """Parse the text of an option as the option of fitter's that has this keyword."""
    if isinstance(text, tuple):
        return text
    try:
        return PARAMETERS[keyword].kind.parse(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _devices(
    given: Mapping[str, Any], words: Mapping[str, Any], remote: Sequence[str], warn: Callable[[str], None]
) -> dict[str, Any]:
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
        warn("llama.cpp's CUDA, ROCm, Vulkan and Metal do not split rows: --split-mode row is measured as layer")
    if found["split_mode"] == "row" or len(cards) < 2:
        found["split_mode"] = None
    overrides = parse_overrides(words.get("override_tensor", ()))
    names = [card.name for card in cards]
    types = {
        word: _buffer_type(word, names, remote, warn) for word in dict.fromkeys(each.buffer_type for each in overrides)
    }
    texts = [f"{each.pattern}={types[each.buffer_type]}" for each in overrides]
    return {**found, "gpus": specs, "tensor_split": shares, "override_tensor": texts or None}


def _buffer_type(word: str, names: Sequence[str], remote: Sequence[str], warn: Callable[[str], None]) -> str:
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
    warn(f"there is no {word}: what --override-tensor puts there counts on the last device")
    return names[-1]


def headers(given: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """List the headers of requests for files, by the scheme of their addresses; those of ``""`` go with all of them.

    Raises ``UsageError`` for one that cannot be sent.
    """
    files = [words[role] for role in OPTIONS["files"] if role in words] + words.get("lora", [])
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
