"""``fitter claim``: what one device must have for a model at a speed, and what a pod asks for to run a plan. Bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fitter.api.call_worker import OneLoad, one_load
from fitter.api.checked_call import checked_worker_call
from fitter.errors import ModelError, PlanError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import VirtualDevice
from fitter.machine import gpu_catalogue
from fitter.machine.device_memory import has_half_experts, unaccounted
from fitter.machine.machine import choose, device_speeds
from fitter.machine.speed import default_host
from fitter.model import location
from fitter.model.shapes import catalogue as shapes
from fitter.model.tensors import is_expert, source_type
from fitter.parameters.table import PARAMETERS, AnyPath, Measuring
from fitter.parameters.values import number, text
from fitter.planning.plan.claims import DeviceClaim, claim_name, least_bandwidth
from fitter.planning.plan.request_of_machine import pinned_by
from fitter.planning.pricing.pricing import Speeds
from fitter.planning.pricing.split_price import price_any_split
from fitter.planning.request.ask import Ask
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.model_facts import ModelFacts, facts_of
from fitter.version import VERSION

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ONE_CARD = "9999GiB"
"""A CUDA card with room for any model."""
N_CTX = 8192
"""Tokens of the context where none is asked for, if the model was trained with as many."""
_PLACING = (
    *("gpus", "rpc", "devices", "n_gpu_layers", "tensor_split", "override_tensor", "cpu_moe", "n_cpu_moe", "n_cpu_ffn"),
    *("main_gpu", "split_mode", "offload_kqv"),
)
"""Keywords that name devices, or keep a part of the model off the one device."""
_SECONDS = 30.0
"""Time limit for the list of a repository's files."""


@checked_worker_call(Measuring)
def claim_device(
    model: AnyPath,
    *,
    min_tps: float,
    quant: str | None = None,
    efficiency: int | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Measuring],
) -> DeviceClaim:
    """Compute the memory and bandwidth that one device needs to generate ``min_tps`` tokens per second.

    One dummy load on a CUDA card measures the memory.

    Args:
        model: As for ``fit``, a Hugging Face name (``org/repo``), or a published shape's name.
        min_tps: Tokens per second of generation.
        quant: The file type, for a model that has several or has no file.
        efficiency: Percent of its datasheet's bandwidth that a device reaches; by default the cost model's estimate.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use for many calls; it stays open, and takes the devices of each call.
        parameters: As for ``measure``; 8192 tokens of context by default, or the model's own.

    Raises:
        PlanError: No bandwidth is enough, or a part of the model does not go on a device.
        FitterError: As ``measure`` raises it.
    """
    if not 0 < number("--min-tps", min_tps) < math.inf:
        raise UsageError(f"--min-tps {min_tps:g} is no speed: give the tokens per second that you need")
    if efficiency is not None and not 1 <= number("--efficiency", efficiency) <= 100:
        raise UsageError(f"--efficiency {efficiency} is no percentage of a bandwidth: give 1 to 100")
    for keyword in _PLACING:
        if parameters.get(keyword) is not None:
            option = PARAMETERS[keyword].option
            raise UsageError(f"--min-tps asks what one device must have for all of the model: leave {option} out")
    called = os.fsdecode(model)
    path = model_of(called, quant)
    parameters |= {"gpus": [_ONE_CARD], "n_gpu_layers": -1}
    ask = Ask.of_a_load(parameters)
    with one_load(ask, path, worker, on_log) as load:
        if not load.params.n_ctx:
            n_ctx = N_CTX * max(1, load.params.n_seq_max)
            load = replace(load, params=replace(load.params, n_ctx=min(n_ctx, load.model.n_ctx_train or n_ctx)))
        facts = facts_of(load.model)
        memory = _memory(load, ask.virtual)
        if efficiency is None:
            bandwidth = least_bandwidth(_speed_of(load, facts, ask.virtual), min_tps)
        else:
            bandwidth = min_tps * _read(facts) * 100 / efficiency
        if bandwidth is None:
            raise PlanError(
                f"no bandwidth makes {min_tps:g} tokens per second of {called}: its layers alone take longer; ask for "
                "less with --min-tps"
            )
        file_type = _file_type(load, path)
        size = load.model.bytes
    reached = efficiency if efficiency is not None else round(min_tps * _read(facts) * 100 / bandwidth)
    return DeviceClaim(
        called, f"{claim_name(called)}-fit", file_type, size, memory, bandwidth, min_tps, max(1, reached), VERSION
    )


def model_of(model: str, quant: str | None) -> str:
    """Return the path or address of a model as other programs name it.

    A name ``org/repo`` without a file is that repository's ``config.json``, or one of its GGUF files if its name says
    that it has some.

    Raises:
        UsageError: ``quant`` is not the model's.
        FitterError: A repository cannot be listed, or has no such model.
    """
    if quant is not None and not text("--quant", quant):
        raise UsageError("--quant is an empty text: give a file type, such as Q4_K_M, or leave it out")
    shape = shapes.wanted(model)
    is_repository = ":" not in model and model.count("/") == 1 and not model.lower().endswith(".gguf")
    if shape is None and is_repository and not os.path.lexists(model):
        if "gguf" in model.lower():
            model = f"hf://{model}"
        else:
            shape = shapes.Wanted(shapes.CONFIG, f"hf://{model}/config.json", "")
    if shape is not None:
        if quant and shape.file_type and shapes.type_name(quant) != shape.file_type:
            raise UsageError(f"{model} has the file type {shape.file_type}, and --quant says {quant}: leave one out")
        return shape.of_type(shapes.type_name(quant)).address if quant else shape.address
    if location.is_repository(model):
        return _of_repository(model, quant)
    if quant:
        from fitter.model.repository_models import type_by_name

        named = type_by_name(model)
        if quant.upper() not in (named, named.partition("-")[2]):
            said = f"a file of {named}" if named else "one file, whose name says no file type"
            raise UsageError(f"{model} is {said}, and --quant says {quant}: name the file of that type")
    return model


def _of_repository(model: str, quant: str | None) -> str:
    from fitter.model import repository_models

    listing = repository_models.listing(model, _SECONDS)
    wanted = quant or shapes.DEFAULT_TYPE
    found, _ = repository_models.only(listing, (wanted,))
    if not found and quant is None and len(listing.models) == 1:
        found = listing.models
    if not found:
        raise UsageError(
            f"{listing.called} has no {wanted}: its file types are {repository_models.types_in(listing)}; name one "
            "with --quant"
        )
    if found[0].problem:
        raise ModelError(found[0].problem)
    return found[0].path


def _memory(load: OneLoad, virtual: Sequence[VirtualDevice]) -> int:
    """Return the memory of a card that has room for the load: the card has less for it than its datasheet says."""
    breakdown = load.worker.measure(load.model.skeleton, load.params, reserve=True).most
    (device,) = choose(load.worker.devices(), load.params.devices)[:1]
    used = breakdown.on(device.name).used
    halves = has_half_experts(tensor for tensor in load.model.tensors if is_expert(tensor.name))
    beside = unaccounted(device, virtual, halves=halves) or 0
    return math.ceil((used + beside) / gpu_catalogue.default().free_fraction)


def _read(facts: ModelFacts) -> float:
    """Return the bytes of weights that a token reads."""
    used = facts.n_expert_used / facts.n_expert if facts.n_expert else 1.0
    return sum(each.bytes * (used if is_expert(each.name) else 1.0) for each in facts.tensors)


def _speed_of(load: OneLoad, facts: ModelFacts, virtual: Sequence[VirtualDevice]) -> Callable[[float], float]:
    """Return a function from a card's bandwidth to tokens per second of generation."""
    breakdown, layout = load.measured()
    every = load.worker.devices()
    infos = choose(every, breakdown.devices)
    speeds = device_speeds(infos, every, virtual, load.worker.speed)
    targets = pinned_by(load.params, load.model, infos, every, load.worker.match)
    free, largest = tuple(info.free for info in infos), tuple(info.largest_tensor for info in infos)

    def speed(bandwidth: float) -> float:
        devices = tuple(replace(speeds[info.name], bandwidth=bandwidth) for info in infos)
        places = Speeds(breakdown.devices, devices, free, default_host(), largest)
        workload = Workload()
        return price_any_split(
            facts, layout, load.params, breakdown, places, targets, workload
        ).generation_tokens_per_second

    return speed


def _file_type(load: OneLoad, path: str) -> str:
    shape = shapes.wanted(path)
    if shape is not None and shape.file_type:
        return shape.file_type
    from fitter.model.repository_models import type_by_name

    return type_by_name(Path(load.model.path).name) or source_type(load.model.tensors).upper()
