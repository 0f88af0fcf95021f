"""The document that gguf-parser prints, which schedulers read: GPUStack's, for one. Bytes.

``uma`` is what llama.cpp takes; ``nonuma`` adds what a platform takes of the host and of each device. With the file
mapped, weights on the host count as nothing, since their pages can be given back. A plan becomes a document with one
row, without the memory of other processes.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table

from fitter.errors import UsageError
from fitter.output.documents.document import dumps
from fitter.parameters.table import MAPPED, PARAMETERS
from fitter.planning.placing.placement import llama_placement
from fitter.planning.plan.plan import Plan
from fitter.planning.tables.parameter_rows import OffloadPlace, OffloadRow, OffloadTable, offload_row
from fitter.storage import read_data
from fitter.text import MIB, human, mib

OPTIONS = read_data(__file__, "options.toml")
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
