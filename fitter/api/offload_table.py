"""The memory of a model with each number of layers on devices: one dummy load for each."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fitter.api.call_worker import OneLoad, ask_in_threads, one_load, worker_for
from fitter.api.checked_call import checked_worker_call
from fitter.api.shared_models import check_drafts_alone
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, DeviceInfo, Params, Row
from fitter.machine.machine import choose
from fitter.model import location
from fitter.model.header import Model, open_model
from fitter.parameters.table import POOLING, Measuring
from fitter.parameters.table import AnyPath as Path
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement, llama_placement
from fitter.planning.plan.request_of_machine import with_main_gpu
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import context_of_a_sequence
from fitter.planning.speed.model_facts import facts_of
from fitter.planning.tables.parameter_rows import OffloadTable, layer_counts, offload_row
from fitter.system import processors

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    jobs = deque(range(len(every)))

    def ask(worker: Worker) -> None:
        with suppress(IndexError):
            while True:
                index = jobs.popleft()
                found[index] = worker.measure(load.model.skeleton, every[index], reserve=True)

    ask_in_threads([load.worker, *others], ask, jobs.clear, dismiss=False)
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
