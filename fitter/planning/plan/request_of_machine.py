"""Build the request of a fit, from the call's parameters, the model and the machine. Bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo, Params, SplitMode
from fitter.machine.device_memory import has_half_experts, unaccounted, used_by_default
from fitter.machine.machine import Machine, check_main_gpu, choose
from fitter.machine.measured import Calibrated, outside_of
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.model.header import Model
from fitter.model.tensors import is_expert, stays_on_host
from fitter.parameters.table import MAPPED, MAX_TOKENS, PARAMETERS
from fitter.planning.placing.layer_sizes import HOST, stays
from fitter.planning.plan.pool_use import check_pools
from fitter.planning.plan.turns import DEEPEST
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import (
    auto_margin,
    check_session,
    check_split_targets,
    check_targets,
    context_of_a_sequence,
    default_margin,
    device_limits,
    for_model,
    levers,
    workload_of,
)
from fitter.planning.request.pool_margin import MAPS, mapped_between, with_what_they_map
from fitter.planning.request.request import DEFAULT_FIT_CTX, DeviceLimit, HostLimit, PoolLimit, Request
from fitter.planning.request.request_limits import (
    batch_notes,
    check_reads,
    own_context,
    whole_inputs,
    with_whole_inputs,
)
from fitter.planning.request.session import Session, is_preset
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.model_facts import facts_of
from fitter.programs import PROGRAMS

_FFN_WEIGHT = re.compile(r"\.ffn_(up|down|gate|gate_up)\.")

_KEPT = frozenset(
    {
        *(
            "n_ctx",
            "n_gpu_layers",
            "n_batch",
            "n_ubatch",
            "type_k",
            "type_v",
            "op_offload",
            "offload_kqv",
            "flash_attn",
        ),
        *("moe_cache_size", "split_mode"),
    }
)
"""Keywords that a fit keeps if the user sets them."""


@dataclass(frozen=True)
class Questions:
    """Functions that ask a worker or measure this machine; each is called only when its answer is needed.

    Attributes:
        match: For patterns and names, the index of the first pattern that matches each name in llama.cpp; raises
            ``UsageError`` for an invalid pattern.
        speeds: Speeds of devices, by name.
        host_speed: Speed of the host.
    """

    match: Callable[[Sequence[str], Sequence[str]], Sequence[int]]
    speeds: Callable[[Sequence[DeviceInfo]], Mapping[str, DeviceSpeed]]
    host_speed: Callable[[], HostSpeed]


def request_of(
    ask: Ask, model: Model, machine: Machine, questions: Questions, calibrations: Sequence[Calibrated] = ()
) -> Request:
    """Build the request for ``model`` on ``machine``.

    Args:
        ask: Parameters of the call.
        model: The model.
        machine: The machine.
        questions: Functions that ask a worker or measure this machine.
        calibrations: Measurements of devices of the same kind.

    Raises:
        UsageError: A parameter makes no sense for this model or machine.
        FitterError: As ``questions`` raise it.
    """
    program = PROGRAMS[ask.program]
    params = for_model(ask.load, model, ask.cpu_moe, ask.n_cpu_moe, ask.n_cpu_ffn)
    named = ask.named
    if ask.is_described and not ask.virtual and named is None:
        # the devices of rpc-servers alone
        named = tuple(device.name for device in machine.devices)
    chosen = _chosen_devices(ask, machine, named)
    if params.moe_cache_size and not chosen:
        raise UsageError("a cache of experts needs a device: leave --moe-cache-mib out, or name one with --gpu")
    outside = _outside(ask, model, calibrations)
    others = _integrated_beside(ask, machine, chosen) if named is None else ()
    speeds = dict(questions.speeds(machine.devices if ask.sharing.may_be_anywhere else (*chosen, *others)))
    # a guess is not enough: they share the host's memory, whose speed may be a guess, too
    others = tuple(device for device in others if speeds[device.name].known)
    pools = _pools(ask, model, machine, (*chosen, *others), params)
    limits = _limits(chosen, ask.margin, outside)
    if others:
        # a list has one margin for each device that llama.cpp uses by default
        is_list = isinstance(ask.margin, tuple) and len(ask.margin) > 1
        beside = _limits(others, None if is_list else ask.margin, outside)
        limits = (*limits, *(replace(device, is_default=False) for device in beside))
    devices = with_what_they_map(limits, pools)
    pinned = pinned_by(params, model, devices, machine.devices, questions.match)
    n_ctx_train = model.n_ctx_train or min(ask.fit_ctx, MAX_TOKENS)
    session, workload, scaled = _work(ask, params, n_ctx_train)
    whole, unlike = frozenset[str](), []
    if params.embeddings:
        each = context_of_a_sequence(params, n_ctx_train)
        whole = whole_inputs(params, model, ask.split_poolings)
        unlike = batch_notes(params, whole, ask.batches, each, ask.program)
        whole = frozenset() if ask.batches else whole
        params = with_whole_inputs(params, whole, each)
    holds = 0
    if ask.is_workload_given:
        # caches of their own, or parts of one
        holds = session.longest * (workload.users if params.kv_unified else 1)
    return Request(
        params=replace(params, n_ctx=params.n_ctx or own_context(n_ctx_train, _streams(params))),
        fixed=_fixed(ask, named, devices, pinned),
        devices=devices,
        host=HostLimit(machine.host_total, machine.host_free, ask.host_margin, "paging" in ask.allow),
        n_layer=model.n_layer,
        n_ctx_train=n_ctx_train,
        is_movable=stays if "override_tensor" in program.lacks else is_expert if model.is_moe else _is_ffn_weight,
        is_expert_model=model.is_moe,
        fit_ctx=max(ask.fit_ctx, holds),
        model_bytes=model.bytes,
        pinned=pinned,
        facts=facts_of(model),
        speeds=speeds,
        host_speed=questions.host_speed(),
        workload=workload,
        most_drafted=DEEPEST if ask.sharing.drafts_with_a_model else 0,
        session=session if ask.session else None,
        objective=ask.objective,
        context_cost=ask.context_cost,
        strategy=ask.strategy,
        allow=levers(ask.allow),
        pools=pools,
        whole_inputs=whole,
        one_batch="n_batch" in program.lacks,
        notes=(
            *_beyond_training(params, model, ask.fit_ctx if "fit_ctx" in ask.given else 0),
            *_without_effect(ask, model, questions.match),
            *scaled,
            *unlike,
            *(_unused(machine, (*chosen, *others)) if named is None else ()),
        ),
    )


def _beyond_training(params: Params, model: Model, fit_ctx: int) -> tuple[str, ...]:
    """Note a context of a sequence, or a smallest one, beyond the one that the model was trained for."""
    n_ctx = params.n_ctx // _streams(params)
    if model.n_ctx_train and n_ctx > model.n_ctx_train:
        return (
            f"the context of {n_ctx} tokens is beyond the {model.n_ctx_train} that the model was trained for: its "
            "answers may be useless there",
        )
    if model.n_ctx_train and not params.n_ctx and fit_ctx > model.n_ctx_train:
        return (f"--fit-ctx {fit_ctx} is taken as {model.n_ctx_train} tokens, for which the model was trained",)
    return ()


def _without_effect(
    ask: Ask, model: Model, match: Callable[[Sequence[str], Sequence[str]], Sequence[int]]
) -> tuple[str, ...]:
    """Note the user's options for tensors that the model does not have."""
    overrides, names = ask.load.tensor_buft_overrides, [tensor.name for tensor in model.tensors]
    matched = set(match([override.pattern for override in overrides], names)) if overrides else set()
    notes = []
    for index, override in enumerate(overrides):
        if index not in matched:
            has_any = max(match([override.pattern], names), default=-1) >= 0
            why = "an earlier -ot has its tensors" if has_any else "no tensor of the model has such a name"
            notes.append(f"-ot '{override.pattern}={override.buffer_type}' has no effect: {why}")
    if not model.is_moe:
        flags = (("-cmoe", ask.cpu_moe), ("-ncmoe", ask.n_cpu_moe))
        notes += [f"{flag} has no effect: the model has no experts" for flag, value in flags if value]
    return tuple(notes)


def _integrated_beside(ask: Ask, machine: Machine, chosen: Sequence[DeviceInfo]) -> tuple[DeviceInfo, ...]:
    """Return the integrated GPUs that a plan may use although llama.cpp does so only where ``-dev`` names them."""
    is_chosen = bool(ask.load.tensor_split and any(ask.load.tensor_split)) or ask.load.split_mode != "layer"
    if is_chosen or ask.strategy != "fastest":
        return ()
    return tuple(device for device in machine.devices if device not in chosen)


def _unused(machine: Machine, chosen: Sequence[DeviceInfo]) -> tuple[str, ...]:
    """Note the integrated GPUs that no plan may use unless ``-dev`` names them."""
    names = [device.name for device in machine.devices if device not in chosen and device.type == "igpu"]
    every = ",".join((*(device.name for device in chosen), *names))
    return tuple(
        f"{name} is not used: it shares the host's memory, and llama.cpp uses such a GPU only where there is no other "
        f"(-dev {every} uses it as well)"
        for name in names
    )


def _pools(
    ask: Ask, model: Model, machine: Machine, chosen: Sequence[DeviceInfo], params: Params
) -> tuple[PoolLimit, ...]:
    """Limit the memory that usable devices share with the host."""
    if not machine.pools:
        return ()
    names = {device.name for device in (machine.devices if ask.sharing.may_be_anywhere else chosen)}
    on_host = sum(tensor.bytes for tensor in model.tensors if stays_on_host(tensor.name))
    is_read = params.of_parameter(PARAMETERS["load_mode"]) not in ("auto", *MAPPED)
    pools = tuple(
        PoolLimit(
            pool.name,
            pool.devices,
            pool.memory.total,
            pool.memory.free,
            ask.host_margin,
            pool.memory.carved,
            pool.memory.system,
            on_host,
            mapped_between(model.tensors) if pool.memory.system == MAPS and not is_read else 0,
            is_read,
        )
        for pool in machine.pools
        if names.intersection(pool.devices)
    )
    check_pools(pools if ask.is_described else ())
    return pools


def limits_beside(
    ask: Ask, model: Model, machine: Machine, request: Request, calibrations: Sequence[Calibrated] = ()
) -> tuple[DeviceLimit, ...]:
    """Limit the devices that the user names for draft models or projectors only. Raises ``UsageError``."""
    of_the_model = {limit.name for limit in request.devices}
    others = [info for info in choose(machine.devices, ask.sharing.names) if info.name not in of_the_model]
    # a list has one margin for each device of the model
    is_list = isinstance(ask.margin, tuple) and len(ask.margin) > 1
    return _limits(others, None if is_list else ask.margin, _outside(ask, model, calibrations))


def pinned_by(
    params: Params,
    model: Model,
    used: Sequence[DeviceLimit | DeviceInfo],
    every: Sequence[DeviceInfo],
    match: Callable[[Sequence[str], Sequence[str]], Sequence[int]],
) -> dict[str, int]:
    """Find the places of tensors by the overrides of ``params``.

    Args:
        params: Parameters with the overrides.
        model: The model.
        used: Devices that the model may use.
        every: All devices.
        match: As in ``Questions``.

    Returns:
        By tensor name, an index of ``used``, or ``HOST``.

    Raises:
        UsageError: A pattern is invalid, or a device cannot hold its tensor.
    """
    overrides = params.tensor_buft_overrides
    if not overrides:
        return {}
    index_of = {device.buffer_type: d for d, device in enumerate(used)}
    matches = match([override.pattern for override in overrides], [tensor.name for tensor in model.tensors])
    caught = [(tensor, overrides[index]) for tensor, index in zip(model.tensors, matches, strict=True) if index >= 0]
    check_targets(caught, used, every)
    check_split_targets(params.split_mode, caught, used)
    return {tensor.name: index_of.get(override.buffer_type, HOST) for tensor, override in caught}


def _chosen_devices(ask: Ask, machine: Machine, named: Sequence[str] | None) -> tuple[DeviceInfo, ...]:
    """Return the devices that the model may use: the user's, or llama.cpp's default."""
    chosen = used_by_default(machine.devices) if named is None else choose(machine.devices, named)
    return with_main_gpu(chosen, ask.load.split_mode, ask.main_gpu)


def with_main_gpu(devices: tuple[DeviceInfo, ...], split_mode: SplitMode, main_gpu: int) -> tuple[DeviceInfo, ...]:
    """Return the devices that the split mode uses; ``none`` uses one. Raises ``UsageError`` if that is missing."""
    if split_mode != "none" or not devices:
        return devices
    check_main_gpu(main_gpu, devices)
    return () if main_gpu < 0 else (devices[main_gpu],)


def _outside(ask: Ask, model: Model, calibrations: Sequence[Calibrated]) -> Callable[[DeviceInfo], int | None]:
    """Make a function that returns a device's bytes outside llama.cpp's count, measured here or on equal devices."""
    halves = has_half_experts(tensor for tensor in model.tensors if is_expert(tensor.name))

    def of(device: DeviceInfo) -> int | None:
        calibrated_here = outside_of(device, calibrations)
        return unaccounted(device, ask.virtual, halves=halves) if calibrated_here is None else calibrated_here

    return of


def _limits(
    devices: Sequence[DeviceInfo], margin: int | str | Sequence[int] | None, outside: Callable[[DeviceInfo], int | None]
) -> tuple[DeviceLimit, ...]:
    if isinstance(margin, str):
        return device_limits(devices, [auto_margin(outside(device)) for device in devices] or 0)
    return device_limits(devices, margin, [default_margin(outside(device)) for device in devices])


def _fixed(
    ask: Ask, named: Sequence[str] | None, devices: Sequence[DeviceLimit], pinned: Mapping[str, int]
) -> frozenset[str]:
    """Return the parameters that the fit must keep."""
    # a device without room for its margin is left out, unless the user put a tensor there
    has_none = any(d != HOST and devices[d].target <= 0 for d in pinned.values())
    others = {
        "n_ctx": bool(ask.load.n_ctx),
        "n_ubatch": ask.load.embeddings,
        "tensor_split": bool(ask.load.tensor_split and any(ask.load.tensor_split)),
        "devices": named is not None or ask.load.split_mode == "none" or has_none,
    }
    program = PROGRAMS[ask.program]
    lacks = set(program.lacks) & _KEPT | ({"tensor_split"} & set(program.lacks) if len(devices) > 1 else set())
    if "n_batch" in program.lacks and ask.batches:
        lacks |= {"n_batch", "n_ubatch"}
    return ask.given & _KEPT | lacks | {name for name, is_fixed in others.items() if is_fixed}


def _work(ask: Ask, params: Params, n_ctx_train: int) -> tuple[Session, Workload, tuple[str, ...]]:
    """Build the work and the request to be fast at; the user's context, or else the smallest one, must hold it.

    A named kind of work is scaled to the context, with a note.
    """
    is_set = "n_ctx" in ask.given or bool(params.n_ctx)
    if is_set:
        context = context_of_a_sequence(params, n_ctx_train)
    else:
        # a smaller --fit-ctx allows smaller contexts, and asks for no smaller request
        context = n_ctx_train if ask.is_workload_given else min(max(ask.fit_ctx, DEFAULT_FIT_CTX), n_ctx_train)
    is_chosen = bool(params.n_ctx)
    is_described = ask.workload is not None
    notes: tuple[str, ...] = ()
    if params.embeddings:
        check_reads(ask.objective, ask.workload, ask.users, ask.generate)
        if (ask.prompt or 0) > context:
            larger = ", or a larger -c" if is_chosen else ""
            raise UsageError(f"--prompt is {ask.prompt}, more than the context of {context}: give less{larger}")
        most = params.n_ubatch if ask.batches else context
        session = Session(ask.prompt or min(Workload.prompt, context, most), 0)
    elif ask.session and ask.workload is not None:
        session = ask.session
        if session.longest > context and is_preset(ask.workload):
            session = session.scaled_to(context)
            whose = "-c" if is_chosen else "the model's own context"
            notes = (
                f"--workload {ask.workload} is scaled to {whose}, {context} tokens for each user: a turn has "
                f"{session.prompt} + {session.answer} tokens, not {ask.session.prompt} + {ask.session.answer}",
            )
        check_session(session, context, is_set=is_chosen)
    else:
        # a context that may shrink, or that the fit chooses, is compared with others at one request
        is_deep = is_set and ask.users is None and "context" not in ask.allow
        workload = workload_of(ask.prompt, ask.generate, context, is_set=is_chosen, is_deep=is_deep)
        session = Session(workload.prompt, workload.generate, users=ask.users or 1)
    request = session.workload(users=min(session.users, params.n_seq_max))
    # a plain request is priced as before work could be described
    request = replace(request, is_text=is_described, is_unified=params.kv_unified and request.users > 1)
    return session, request, notes


def _streams(params: Params) -> int:
    """Return the number of separate KV caches."""
    return 1 if params.kv_unified else params.n_seq_max


def _is_ffn_weight(name: str) -> bool:
    return _FFN_WEIGHT.search(name) is not None
