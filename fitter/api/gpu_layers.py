"""Numbers of layers on GPUs, each measured by a dummy load: how many fit, and the memory with each number. Bytes.

``fitter.estimate_gpu_layers`` answers as xllamacpp does, and ``offload_table`` has the rows that gguf-parser prints.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from fitter.api.call_worker import OneLoad, ask_in_threads, one_load, worker_for
from fitter.api.checked_call import checked_worker_call, naming_addresses
from fitter.api.fits.shared_models import check_drafts_alone
from fitter.errors import UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, DeviceInfo, Params, Row
from fitter.machine.machine import choose
from fitter.model import location
from fitter.model.files import header_cache
from fitter.model.header import Model, open_model
from fitter.parameters.table import PARAMETERS, POOLING, Measuring
from fitter.parameters.table import AnyPath as Path
from fitter.planning.placing.layer_sizes import HOST, Unit, units_of
from fitter.planning.placing.packing import pack_whole
from fitter.planning.placing.placement import Placement, caches_on, counts_for_split, llama_placement, weights_on
from fitter.planning.plan.request_of_machine import with_main_gpu
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import context_of_a_sequence
from fitter.planning.speed.model_facts import facts_of
from fitter.planning.tables.parameter_rows import OffloadTable, layer_counts, offload_row
from fitter.storage import read_data
from fitter.system import processors
from fitter.text import MIB

if TYPE_CHECKING:
    from typing_extensions import Unpack


_SPECS = {"metal": "metal", "mtl": "metal", "vulkan": "vulkan", "rocm": "rocm:gfx1100", "hip": "rocm:gfx1100"}
"""Descriptions of GPUs by the beginning of their names; all others are CUDA cards."""


Used = Callable[[Placement], Sequence[int]]
"""Returns the bytes on each device with a placement, as a dummy load measures them."""


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
    model_path: Path,
    projectors: Sequence[Path],
    context_length: int,
    batch_size: int,
    num_parallel: int,
    kv_cache_type: str,
    *,
    llama_cpp: Path | None = None,
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


def _projectors(load: OneLoad, projectors: Sequence[Path], device: str | None) -> int:
    """Return the bytes of all projectors."""
    files = [str(location.model_files(os.fsdecode(path))[0]) for path in projectors]
    return sum(row.used for file in files for row in _projector(load, file, device))


def _used(breakdown: Breakdown, names: Sequence[str], beside: int) -> list[int]:
    return [breakdown.on(name).used + (0 if i else beside) for i, name in enumerate(names)]


def _most_layers(load: OneLoad, names: Sequence[str], rooms: Sequence[int]) -> tuple[Placement, Breakdown] | None:
    def measured(placement: Placement) -> Breakdown:
        return load.worker.measure(load.model.skeleton, _params(load.params, placement), reserve=True).most

    layout = load.worker.layout(load.model.skeleton, load.params)
    units = units_of(layout, load.model.n_layer - load.model.n_layer_nextn)
    found = most_layers(units, rooms, lambda at: _used(measured(at), names, 0))
    return None if found is None else (found, measured(found))


def most_layers(units: Sequence[Unit], rooms: Sequence[int], measure: Used) -> Placement | None:
    """Place as many layers as fit; ``None`` if not even the output does.

    Args:
        units: Sizes of the layers and the output.
        rooms: Bytes that each device may hold.
        measure: Useds a placement.
    """
    rest = [0] * len(rooms)
    best, first = None, 0
    while best is None and first < len(units):
        best, rest = _placed(units, rooms, rest, first, measure)
        first += 1
    # less may be on devices beside the layers than with placements that did not fit
    while best is not None and best.first > 0:
        more, rest = _placed(units, rooms, rest, best.first - 1, measure)
        if more is None:
            break
        best = more
    return best


def _placed(
    units: Sequence[Unit], rooms: Sequence[int], rest: Sequence[int], first: int, measure: Used
) -> tuple[Placement | None, list[int]]:
    """Place all units from ``first`` on; return the placement if it fits, and what devices had beside units.

    ``rest``: bytes that each device is expected to have beside units.
    """
    expected = list(rest)
    while (placement := pack_whole(units, [a - b for a, b in zip(rooms, expected, strict=True)], first)) is not None:
        used = measure(placement)
        held = [sum(each) for each in zip(weights_on(units, placement), caches_on(units, placement), strict=True)]
        rest = [a - b for a, b in zip(used, held, strict=True)]
        if all(a <= max(0, b) for a, b in zip(used, rooms, strict=True)):
            return placement, rest
        grown = [max(a, b) for a, b in zip(expected, rest, strict=True)]
        if grown == expected:
            break
        expected = grown
    return None, list(rest)


def _params(params: Params, placement: Placement) -> Params:
    return replace(params, n_gpu_layers=placement.n_gpu_layers, tensor_split=tuple(map(float, placement.counts)))


def _shares(counts: Sequence[int]) -> list[float]:
    """Return each device's share, or its layers if llama.cpp would round the shares to other layers."""
    n_layers = sum(counts)
    shares = [count / n_layers for count in counts]
    return shares if counts_for_split(n_layers, shares) == tuple(counts) else [float(count) for count in counts]


_MOST_WORKERS = 4
LOADS_OF_A_WORKER = 24
"""Fewest loads that are worth the start of another worker: 33 of Llama 3.1 8B take 0.5 seconds, a start 0.2."""


@checked_worker_call(Measuring)
def offload_table(
    model: Path,
    *,
    step: int = 0,
    is_n_ctx_limited: bool = False,
    mmproj: Path | None = None,
    model_draft: Path | None = None,
    n_gpu_layers_draft: int | None = None,
    has_control_vectors: bool = False,
    n_remote: int = 0,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Measuring],
) -> OffloadTable:
    """Measure a model with no layers on devices, with ``step`` more each time, and with ``n_gpu_layers``.

    A place's memory is the larger of the dummy load's and the real one's. A model that only reads texts gets batches as
    large as its context, since it reads a text in one.

    Args:
        model: Path or address of a GGUF file.
        step: Layers between two loads; 0 for the load with ``n_gpu_layers`` alone.
        is_n_ctx_limited: Whether a context beyond the model's own becomes the model's own.
        mmproj: A projector beside it, on the first device after the remote ones; on the host where no layer is on a
            device.
        model_draft: A draft model beside it, on the same devices.
        n_gpu_layers_draft: Layers of the draft model on devices; -1, the default: all.
        has_control_vectors: Whether control vectors are applied, of which any number takes as much as one.
        n_remote: How many of the devices, the first ones, stand for rpc-servers.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use for many calls; it stays open, and takes the devices of each call.
        parameters: As for ``measure``.

    Raises:
        FitterError: As ``measure`` raises it.
    """
    ask = Ask.of_a_load(parameters)
    with one_load(ask, os.fsdecode(model), worker, on_log) as load, ExitStack() as stack:
        is_embedding, ranks = _reads_only(load.model)
        params, trained = load.params, load.model.n_ctx_train
        if trained and is_n_ctx_limited:
            params = replace(params, n_ctx=min(params.n_ctx or trained, trained))
        if is_embedding:
            # a text is read in one batch
            n_ctx = context_of_a_sequence(params, trained or params.n_ctx)
            params = replace(params, embeddings=True, n_batch=n_ctx, n_ubatch=n_ctx)
        infos = choose(load.worker.devices(), params.devices)
        names = tuple(info.name for info in infos)
        used = with_main_gpu(infos, params.split_mode, params.main_gpu)
        split = params.tensor_split if used == infos else None
        draft = None if model_draft is None else open_model(os.fsdecode(model_draft), load.worker.header)
        if draft is not None:
            check_drafts_alone(draft)
        n_units = load.model.n_layer - load.model.n_layer_nextn + 1

        @functools.cache
        def beside(is_on_devices: bool, n_ctx: int) -> list[Row]:
            found: list[Row] = []
            if draft is not None:
                layers = (-1 if n_gpu_layers_draft is None else n_gpu_layers_draft) if is_on_devices else 0
                found += _draft(load, draft, replace(params, n_ctx=n_ctx, n_gpu_layers=layers))
            if mmproj is not None:
                own = names[min(n_remote, len(names) - 1)] if names and is_on_devices else None
                found += _projector(load, os.fsdecode(mmproj), own)
            return found

        counts = layer_counts(params.n_gpu_layers, step, n_units) if names else (0,)
        # as in plan_repository: only one process uses a real device
        most = _MOST_WORKERS if worker is None and not ask.is_for_one_process else 1
        n_workers = max(1, min(processors(), most, len(counts) // LOADS_OF_A_WORKER))
        others = [stack.enter_context(worker_for(ask, None, on_log, at_once=True)) for _ in range(1, n_workers)]
        every = [replace(params, n_gpu_layers=count) for count in counts]
        rows = []
        for n_gpu_layers, breakdown in zip(counts, _measured(load, others, every), strict=True):
            measured = breakdown.most
            placement = llama_placement(n_units, n_gpu_layers, split, [info.free for info in used])
            more = _control_vectors(load.model, placement, used) if has_control_vectors else []
            rows.append(offload_row(placement, measured, [*beside(bool(n_gpu_layers), measured.n_ctx), *more], names))
        return OffloadTable(
            load.model.architecture,
            measured.n_ctx,
            bool(measured.flash_attn),
            params.n_batch,
            min(params.n_batch, params.n_ubatch),
            is_embedding,
            ranks,
            tuple(rows),
        )


def _measured(load: OneLoad, others: Sequence[Worker], every: Sequence[Params]) -> list[Breakdown]:
    """Measure ``every`` load of the model, with the worker of ``load`` and others at the same time."""
    found: dict[int, Breakdown] = {}
    ask_in_threads(
        [load.worker, *others],
        enumerate(every),
        lambda numbered, worker: worker.measure(load.model.skeleton, numbered[1], reserve=True),
        lambda numbered, breakdown, _: found.update({numbered[0]: breakdown}),
        dismiss=False,
    )
    return [found[index] for index in range(len(every))]


def _reads_only(model: Model) -> tuple[bool, bool]:
    """Return whether ``model`` only reads texts (attention that is not causal), and whether it ranks them."""
    architecture = model.metadata.get("general.architecture")
    has_head = any(tensor.name.startswith("cls.") for tensor in model.tensors)
    return not model.is_causal, has_head or model.metadata.get(f"{architecture}.pooling_type") == POOLING["rank"]


def _control_vectors(model: Model, placement: Placement, used: Sequence[DeviceInfo]) -> list[Row]:
    """List the vector that llama.cpp allocates beside each layer but the first one (``llama_adapter_cvec``)."""
    width = 4 * facts_of(model).n_embd
    layers = placement.homes[1:-1]
    rows = [Row("CPU", None, True, 0, width * layers.count(HOST), 0)]
    rows += [Row(info.name, info.name, False, 0, width * layers.count(at), 0) for at, info in enumerate(used)]
    return rows


def _draft(load: OneLoad, draft: Model, main: Params) -> tuple[Row, ...]:
    params = replace(
        main,
        tensor_buft_overrides=(),
        lora=(),
        embeddings=False,
        n_outputs_max=main.n_seq_max,
        # gguf-parser has no options for the types of its caches
        type_k=Params.type_k,
        type_v=Params.type_v,
    )
    return load.worker.measure(draft.skeleton, params, role="draft", reserve=True).most.rows


def _projector(load: OneLoad, path: str, device: str | None) -> tuple[Row, ...]:
    file = str(location.model_files(path)[0]) if location.is_address(path) else path
    return load.worker.projector(file, device=device, flash_attn=load.params.flash_attn)
