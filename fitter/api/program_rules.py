"""What a plan's program decides by itself, applied to a plan: how it cuts layers, and memory that it takes beside them.
Bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fitter.api.questions import Questions
from fitter.llama.client import Worker
from fitter.machine.device_memory import used_by_default
from fitter.machine.machine import Machine
from fitter.model.header import Model
from fitter.planning.placing.layer_sizes import cache_layer
from fitter.planning.plan.layer_map import placement_of
from fitter.planning.plan.plan import Plan
from fitter.planning.request.ask import Ask
from fitter.planning.request.shared import parse_reserve
from fitter.programs import PROGRAMS, Attempt

_RESERVES = 3
"""So many plans at most reserve what the program takes beside llama.cpp."""


def attempts_of(ask: Ask, model: Model, machine: Machine) -> list[list[Attempt]]:
    """List the groups of plans to make for the program of ``ask``."""
    devices = used_by_default(machine.devices)
    if ask.named is not None:
        devices = tuple(device for name in ask.named for device in machine.devices if device.name == name)
    if ask.load.split_mode == "none":
        devices = devices[ask.main_gpu : ask.main_gpu + 1]
    free = {device.name: device.free for device in devices}
    return PROGRAMS[ask.program].attempts(model, free, ask.set_words)


def reserve_more(questions: Questions, ask: Ask, model: Model) -> None:
    """Plan again with room for what the program takes beside llama.cpp's weights, if it takes any."""
    sizes = PROGRAMS[ask.program].more(model)
    reserved: dict[str, int] = {}
    for _ in range(_RESERVES if sizes else 0):
        plan = questions.plan
        taken = _taken(sizes, plan)
        if all(size <= reserved.get(name, 0) for name, size in taken.items()) or not plan.fits:
            return
        # a layer more, since a reservation may move one
        wanted = {name: size + max(sizes.values()) for name, size in taken.items()}
        reserved = {name: max(reserved.get(name, 0), wanted.get(name, 0)) for name in (*reserved, *wanted)}
        own = parse_reserve(ask.sharing.reserve)
        questions.reserve({name: own.get(name, 0) + reserved.get(name, 0) for name in (*own, *reserved)})


def _taken(sizes: Mapping[int, int], plan: Plan) -> dict[str, int]:
    homes = placement_of(plan, plan.n_layer + 1).homes
    names = plan.breakdown.devices
    taken: dict[str, int] = {}
    for layer, size in sizes.items():
        if homes[layer] >= 0:
            taken[names[homes[layer]]] = taken.get(names[homes[layer]], 0) + size
    return taken


def with_own_split(plan: Plan, model: Model, worker: Worker) -> Plan:
    """Add the shares with which the program cuts layers like ``plan``, or a note where none do."""
    if len(plan.breakdown.devices) < 2 or plan.params.split_mode != "layer" or not plan.params.n_gpu_layers:
        return plan

    def caches() -> list[int]:
        sizes = [0] * model.n_layer
        for cache in worker.caches(model.skeleton, plan.params).caches:
            for tensor in cache.tensors:
                if (layer := cache_layer(tensor.name, -1)) >= 0:
                    sizes[layer] += tensor.row_bytes * tensor.rows * tensor.planes
        return sizes

    program = PROGRAMS[plan.program]
    split = program.split(model, plan.params, caches, placement_of(plan, plan.n_layer + 1).counts)
    if split is None:
        note = f"no -ts of {program.title} cuts layers like this plan: use one device less (-dev), or another -c"
        return replace(plan, notes=(*plan.notes, note))
    return replace(plan, own_split=tuple(split))
