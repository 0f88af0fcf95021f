"""``fitter.estimate_gpu_layers``: xllamacpp's question and answer, measured by llama.cpp. Bytes."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from fitter.api.call_worker import OneLoad, one_load
from fitter.api.checked_call import naming_addresses
from fitter.errors import UsageError
from fitter.llama.types import Breakdown, Params
from fitter.machine.machine import choose
from fitter.model import location
from fitter.model.files import header_cache
from fitter.parameters.table import PARAMETERS, AnyPath, Measuring
from fitter.planning.placing.layer_sizes import units_of
from fitter.planning.placing.placement import Placement, counts_for_split
from fitter.planning.request.ask import Ask
from fitter.planning.search.whole_layers import most_layers
from fitter.storage import read_data
from fitter.text import MIB

_SPECS = {"metal": "metal", "mtl": "metal", "vulkan": "vulkan", "rocm": "rocm:gfx1100", "hip": "rocm:gfx1100"}
"""Descriptions of GPUs by the beginning of their names; all others are CUDA cards."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The layers that GPUs have room for, with xllamacpp's names."""

    layers: int
    """Layers on GPUs, the output counted as one (``n_gpu_layers``)."""
    graph: int
    """Bytes of the first GPU's compute buffer."""
    vram_size: int
    """Bytes that all GPUs need for these layers."""
    total_size: int
    """Bytes that all GPUs need for the whole model; without a GPU, bytes of the host."""
    tensor_split: list[float]
    """Each GPU's share of the layers."""
    gpu_sizes: list[int]
    """Bytes that each GPU needs; empty without layers on GPUs."""


def estimate_gpu_layers(
    gpus: Sequence[Mapping[str, Any]],
    model_path: AnyPath,
    projectors: Sequence[AnyPath],
    context_length: int,
    batch_size: int,
    num_parallel: int,
    kv_cache_type: str,
    *,
    llama_cpp: AnyPath | None = None,
) -> MemoryEstimate:
    """Answer as ``xllamacpp.estimate_gpu_layers``, with what llama.cpp measures: the most layers that fit.

    Only layers and their split are chosen. ``fit`` also places single tensors, and is faster for it.

    Args:
        gpus: For each GPU its ``name`` (``CUDA0``, ``Metal``; ``CPU`` means none), ``memory_free`` and, if not 512 MiB,
            the part of it that stays free (``memory_min``).
        model_path: Path or address of a GGUF file.
        projectors: Multimodal projectors, on the first GPU.
        context_length: Context in tokens, for all sequences together.
        batch_size: Tokens of a logical batch.
        num_parallel: Sequences.
        kv_cache_type: Type of the KV cache, such as ``q8_0``; empty for ``f16``.
        llama_cpp: The llama.cpp to use, as in ``fit``.

    Raises:
        UsageError: A GPU has no name or memory, or a value makes no sense.
        FitterError: As ``measure`` raises it.
    """
    cards = [_card(gpu) for gpu in gpus]
    if not cards:
        raise UsageError('gpus is empty: give a GPU, or [{"name": "CPU", "memory_free": 0}]')
    is_alone = cards[0][0] == "none"
    given: dict[str, Any] = {"n_batch": batch_size, "n_seq_max": num_parallel, "llama_cpp": llama_cpp}
    given |= {"n_ctx": max(context_length, _data()["least_context"]) if projectors else context_length}
    given |= dict.fromkeys(("type_k", "type_v"), kv_cache_type or None)
    asked = cast(Measuring, {name: PARAMETERS[name].check(value) for name, value in given.items() if value is not None})
    asked |= {"gpus": ["none"] if is_alone else [spec for spec, _ in cards], "program": "llama-server"}
    with (
        header_cache.reading(),
        naming_addresses(),
        one_load(Ask.of_a_load(asked), os.fsdecode(model_path), None, None) as load,
    ):
        names = [info.name for info in choose(load.worker.devices(), load.params.devices)]
        beside = _projectors(load, projectors, names[0] if names else None)
        whole = load.worker.measure(load.model.skeleton, load.params, reserve=True).most
        nothing = MemoryEstimate(0, 0, 0, sum(_used(whole, names, beside)), [0.0] * len(cards), [])
        if is_alone:
            return replace(nothing, total_size=whole.host.used + beside)
        rooms = [free for _, free in cards]
        found = _most_layers(load, names, [rooms[0] - beside, *rooms[1:]])
        if found is None:
            return nothing
        placement, measured = found
        sizes = _used(measured, names, beside)
        return MemoryEstimate(
            placement.n_gpu_layers,
            measured.on(names[0]).compute,
            sum(sizes),
            nothing.total_size if placement.first else sum(sizes),
            _shares(placement.counts),
            sizes,
        )


def least_free() -> int:
    """Return the bytes that stay free on a GPU without ``memory_min``."""
    return int(_data()["least_free_mib"]) * MIB


@functools.cache
def _data() -> dict[str, int]:
    return read_data(__file__)


def _card(gpu: Mapping[str, Any]) -> tuple[str, int]:
    """Return the description of a GPU and the bytes that it has for a model. Raises ``UsageError``."""
    try:
        name, free = str(gpu["name"]).lower(), int(gpu["memory_free"])
        least = int(gpu.get("memory_min", least_free()))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"a GPU has no name or memory ({error}): give name and memory_free") from None
    if name == "cpu":
        return "none", 0
    spec = next((f"{spec}:" for start, spec in _SPECS.items() if name.startswith(start)), "")
    return f"{spec}9999GiB", free - least


def _projectors(load: OneLoad, projectors: Sequence[AnyPath], device: str | None) -> int:
    """Return the bytes of all projectors."""
    files = [str(location.model_files(os.fsdecode(path))[0]) for path in projectors]
    flash_attn = load.params.flash_attn
    return sum(row.used for file in files for row in load.worker.projector(file, device=device, flash_attn=flash_attn))


def _used(breakdown: Breakdown, names: Sequence[str], beside: int) -> list[int]:
    return [breakdown.on(name).used + (0 if i else beside) for i, name in enumerate(names)]


def _most_layers(load: OneLoad, names: Sequence[str], rooms: Sequence[int]) -> tuple[Placement, Breakdown] | None:
    def measured(placement: Placement) -> Breakdown:
        return load.worker.measure(load.model.skeleton, _params(load.params, placement), reserve=True).most

    layout = load.worker.layout(load.model.skeleton, load.params)
    units = units_of(layout, load.model.n_layer - load.model.n_layer_nextn)
    found = most_layers(units, rooms, lambda at: _used(measured(at), names, 0))
    return None if found is None else (found, measured(found))


def _params(params: Params, placement: Placement) -> Params:
    return replace(params, n_gpu_layers=placement.n_gpu_layers, tensor_split=tuple(map(float, placement.counts)))


def _shares(counts: Sequence[int]) -> list[float]:
    """Return each device's share, or its layers if llama.cpp would round the shares to other layers."""
    n_layers = sum(counts)
    shares = [count / n_layers for count in counts]
    return shares if counts_for_split(n_layers, shares) == tuple(counts) else [float(count) for count in counts]
