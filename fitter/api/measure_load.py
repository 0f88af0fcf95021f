"""``fitter.measure``, ``fitter.estimate`` and ``fitter.inspect``: one load with exact parameters, such as a plan's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fitter.api.call_worker import fetch, one_load, tokenizer_check
from fitter.api.checked_call import checked_call, checked_worker_call
from fitter.errors import PlanError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import Breakdown, Params
from fitter.machine.machine import choose, device_speeds, speed_of_host
from fitter.machine.measured import corrected
from fitter.model.header import open_model
from fitter.output.keywords import fit_kwargs
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.table import Estimating, MachineKeywords, Measuring, RawKeywords, taken_by
from fitter.planning.plan.layer_map import Inspection, inspection_of
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.request_of_machine import pinned_by
from fitter.planning.pricing.pricing import Price, Speeds
from fitter.planning.pricing.split_price import price_any_split
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import check_live_tokens, check_split_mode, context_of_a_sequence, workload_of
from fitter.planning.request.request import Progress
from fitter.planning.request.request_limits import check_context
from fitter.planning.request.shared import HOST_NAME, taken
from fitter.planning.request.summary import SharedUse
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.model_facts import facts_of
from fitter.programs import LlamaCppPython
from fitter.text import mib_up

if TYPE_CHECKING:
    from typing_extensions import Unpack


@checked_worker_call(Measuring)
def measure(
    model: Path,
    *,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Measuring],
) -> Breakdown:
    """Measure the memory that llama.cpp takes with exactly these parameters, by one dummy load.

    A row's ``compute`` is the compute buffer of the dummy load, as in llama-fit-params and in plans; its ``reserved``
    is the buffer that a real load reserves. ``Breakdown.real`` has all rows with the real buffers.

    Args:
        model: Path or address of a GGUF file.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use for many calls; it stays open, and takes the devices of each call.
        parameters: llama.cpp's own parameters among those of ``fit``, with llama.cpp's defaults (``n_ctx`` 0: the
            model's own; ``n_gpu_layers`` -1: all), and ``load_mtp``, ``n_rs_seq`` and ``n_outputs_max``.

    Returns:
        Bytes by buffer type.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    with one_load(Ask.of_a_load(parameters), os.fsdecode(model), worker, on_log) as load:
        return load.worker.measure(load.model.skeleton, load.params, reserve=True)


@checked_worker_call(Estimating)
def estimate(
    model: Path,
    *,
    live_tokens: int | Sequence[int] | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Estimating],
) -> Price:
    """Estimate the time of a request with exactly these parameters, and measure their memory.

    Args:
        model: Path or address of a GGUF file.
        live_tokens: Tokens in the cache while a token is generated; by default the request's average. A list of them
            leaves the average, and gives ``Price.depths`` a speed for each.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use for many calls; it stays open, and takes the devices of each call.
        parameters: As for ``measure``, with the request's ``prompt`` (2048, or with ``n_ctx`` the geometric mean of
            2048 and the context, at most a quarter of it) and ``generate`` (512) tokens, or what the context holds, the
            number of ``users`` who send one at once, and the bandwidths of host and remote devices. ``load_mode`` is
            ``none`` by default, as in plans.

    Returns:
        Seconds and bytes; ``Price.sources`` says where each speed comes from.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    ask = Ask.of_a_load(parameters)
    check_split_mode(ask.load.split_mode)
    with one_load(ask, os.fsdecode(model), worker, on_log) as load:
        context = context_of_a_sequence(load.params, load.model.n_ctx_train or Workload.prompt + Workload.generate)
        is_set = bool(load.params.n_ctx)
        is_deep = is_set and ask.users is None
        one = workload_of(ask.prompt, ask.generate, context, is_set=is_set, is_deep=is_deep)
        workload = replace(one, users=ask.users or 1)
        depths = () if live_tokens is None or isinstance(live_tokens, int) else tuple(live_tokens)
        average = live_tokens if isinstance(live_tokens, int) else None
        for each in (average, *depths):
            check_live_tokens(each, context)
        breakdown, layout = load.measured()
        every = load.worker.devices() if breakdown.devices else ()
        infos = choose(every, breakdown.devices)
        speeds = device_speeds(infos, every, ask.virtual, load.worker.speed, ask.remote_bandwidths)
        host = speed_of_host(ask.host_bandwidth, is_described=ask.is_described, virtual=ask.virtual)
        if not ask.is_described:
            speeds, host = corrected(speeds, host, infos, load.worker.build().key)
        return price_any_split(
            facts_of(load.model),
            layout,
            load.params,
            breakdown,
            Speeds(
                breakdown.devices,
                tuple(speeds[info.name] for info in infos),
                tuple(info.free for info in infos),
                host,
                tuple(info.largest_tensor for info in infos),
            ),
            pinned_by(load.params, load.model, infos, every, load.worker.match),
            workload,
            average,
            depths,
        )


def load_keywords(plan: Plan, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``measure`` for exactly the load of ``plan``.

    Args:
        plan: The plan.
        told: Keywords of the ``fit`` that made it; those of the machine are kept.
    """
    names = {each.name for each in taken_by(Measuring)}
    machine = {name: value for name, value in told.items() if name in MachineKeywords.__annotations__}
    load = {name: value for name, value in fit_kwargs(plan).items() if name in names}
    raw = {name: getattr(plan.params, name) for name in RawKeywords.__annotations__}
    return without_timeout({**load, **raw, **machine})


def fit_keywords_of(plan: Plan) -> dict[str, Any]:
    """Return the keywords of ``fit`` that fix every parameter of ``plan``; margins and reservations are left out."""
    others = ("margin", "host_margin", "reserve", "rpc", "allow")
    return {name: value for name, value in fit_kwargs(plan).items() if name not in others and value is not None}


def without_timeout(told: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keyword that a worker has itself."""
    return {name: value for name, value in told.items() if name != "timeout"}


def with_every_output(plan: Plan) -> Plan:
    """Return ``plan`` with an output for every token, as a plain ``llama_cpp.Llama`` has; unchanged for other programs.

    Raises:
        PlanError: A device or the host has no room for the outputs.
    """
    if plan.program != LlamaCppPython.name or not plan.params.n_outputs_max or not plan.fit_keywords:
        return plan
    keywords = {**load_keywords(plan, plan.fit_keywords), "n_outputs_max": 0}
    breakdown = measure(plan.model.path, timeout=plan.fit_keywords.get("timeout"), **keywords)
    for name, lacking in missing_of(plan, breakdown, plan.shared).items():
        where = "the host" if name == HOST_NAME else name
        raise PlanError(
            f"llama_cpp.Llama makes every token of a batch an output, which the plan does not count, and for which "
            f"{where} lacks {mib_up(lacking)} MiB: use plan.load(), or fit with program='any'"
        )
    return replace(plan, params=replace(plan.params, n_outputs_max=0), breakdown=breakdown)


def missing_of(plan: Plan, breakdown: Breakdown, shared: Sequence[SharedUse] = ()) -> dict[str, int]:
    """Compute the bytes that each device and ``host`` lack if the parameters of ``plan`` take ``breakdown``.

    As in a plan, each row's ``compute`` leaves the margin free, and each row's ``reserved`` fits into the free memory.
    A limit that a fitting plan may exceed (host memory with ``paging``) does not count.

    Args:
        plan: The plan.
        breakdown: Its memory now.
        shared: Memory of draft model, projector and others now.

    Returns:
        Missing bytes by name; empty if all fits.
    """
    real = breakdown.real
    uses = [(use, breakdown.on(use.name).used, real.on(use.name).used) for use in plan.devices]
    lacking = {
        use.name: max(used + use.margin, reserved) + taken(shared, use.name) - use.free
        for use, used, reserved in uses
        if use.fits or not plan.fits
    }
    host = plan.host
    if host.free is not None and (host.fits or not plan.fits):
        taken_there = max(breakdown.host.used + host.margin, real.host.used) + taken(shared, None) + host.later
        lacking[HOST_NAME] = taken_there - host.free
    return {name: size for name, size in lacking.items() if size > 0}


@checked_call()
def inspect(
    model: Path,
    *,
    n_ctx: int | None = None,
    llama_cpp: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_progress: Callable[[Progress], None] | None = None,
) -> Inspection:
    """List the tensors of ``model`` by role, and each layer's weights and part of the KV cache.

    Weights are bytes in the file. Caches and compute buffers are measured by llama.cpp with everything on the host.

    Args:
        model: Path or address of a GGUF file.
        n_ctx: Context in tokens; ``None`` or 0 is the model's own.
        llama_cpp: The llama.cpp to use, as in ``fit``.
        timeout: Seconds for one answer of llama.cpp.
        on_progress: Called as the header of a remote model arrives.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    fetch(os.fsdecode(model), timeout, on_progress)
    with Worker(timeout=timeout, llama_cpp=llama_cpp) as worker, tokenizer_check(worker, is_alone=True) as check:
        opened = open_model(os.fsdecode(model), worker.header)
        check.begin(opened)
        check_context(n_ctx or opened.n_ctx_train, opened.n_ctx_train, 1)
        params = Params(n_ctx=n_ctx or 0, n_gpu_layers=0, devices=())
        breakdown = worker.measure(opened.skeleton, params)
        layout = worker.layout(opened.skeleton, params)
    return inspection_of(opened, breakdown, layout)
